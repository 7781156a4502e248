"""Join the process group of a trainer (torchrun, Ray Train or a single rank), and exchange data between ranks.

Rank 0's decisions are sent to other ranks as JSON, never pickled. A LudicError of one rank is raised on every rank,
because a rank that waits for a collective alone hangs.

Each process group has its own timeout. The default group sums and moves tensors, which takes seconds, and keeps torch's
limits. Work of one rank, such as a download of a model or the end of a checkpoint, may take hours: the other ranks wait
for it in a gloo group without a limit. If a rank dies, its connections close, and the wait ends.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import ludic.errors
from ludic.errors import LudicError

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Backends of the process group, by device."""

_UNLIMITED = timedelta(days=365)

_waiting_group: dist.ProcessGroup | None = None
"""Group in which ranks wait for the work of one of them; None before `init_distributed`."""


def init_distributed(device: str | None = None) -> DeviceMesh:
    """Join the group that torchrun describes in the environment, or start a group of one rank.

    device: "cpu" (gloo) or "cuda" (nccl for CUDA tensors, gloo for the others; this process
    takes the device numbered LOCAL_RANK); None takes CUDA if available.
    Returns the one-dimensional mesh to shard over; a second call returns a mesh over the same group. A caller that has
    joined a group before, as Ray Train does, has also chosen the CUDA device of this process.
    """
    global _waiting_group
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        _waiting_group = None
        _join(device)
    if _waiting_group is None:
        _waiting_group = unlimited_group()
    return init_device_mesh(device, (num_ranks(),))


def _join(device: str) -> None:
    options: dict[str, Any] = {}
    if device == "cuda":
        # NCCL connects at once, and a rank on the wrong device fails here instead of in its first collective.
        options["device_id"] = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(options["device_id"])
    if "WORLD_SIZE" not in os.environ:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(BACKENDS[device], **options)


def unlimited_group() -> dist.ProcessGroup:
    """Return a new gloo group of all ranks that waits without a limit; every rank must call it."""
    return dist.new_group(backend="gloo", timeout=_UNLIMITED)


def shut_down() -> None:
    """Leave the process group, if there is one."""
    global _waiting_group
    _waiting_group = None
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank()


def num_ranks() -> int:
    return dist.get_world_size()


def is_main() -> bool:
    return rank() == 0


def broadcast_bytes(data: bytes | None, source: int = 0, group: dist.ProcessGroup | None = None) -> bytes:
    """Return the data of rank `source` on every rank of a group; data of other ranks is ignored."""
    is_source = rank() == source
    size = torch.tensor([len(data) if is_source and data is not None else 0])
    dist.broadcast(size, src=source, group=group)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if is_source and data:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if len(buffer):
        dist.broadcast(buffer, src=source, group=group)
    return buffer.numpy().tobytes()


def from_main(whole: Tensor | None, *, like: Tensor) -> Tensor:
    """Return rank 0's tensor on every rank, sharded like `like`; tensors of other ranks are ignored."""
    if whole is None:
        whole = torch.empty(like.shape, dtype=like.dtype)
    whole = whole.to(like.device)
    if isinstance(like, DTensor):
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=0)
    dist.broadcast(whole, src=0)
    return whole


def run_on_main(function: Callable[[], T], type_: Any = Any) -> T:
    """Call `function` on rank 0 only, and return its result, or raise its LudicError, on every rank.

    The result must be of JSON values, which are finite. type_: the dataclass or union that a result is converted to.
    Any other exception ends rank 0, and torchrun then ends the other ranks.
    """
    return msgspec.json.decode(bytes_from_main(lambda: msgspec.json.encode(function())), type=type_)


def open_on_main(open_: Callable[[], T]) -> T | None:
    """Call `open_` on rank 0 only, and return its result there, None elsewhere. Raises its LudicError on every rank."""
    opened = None

    def call() -> None:
        nonlocal opened
        opened = open_()

    run_on_main(call)
    return opened


@contextmanager
def path_on_main(find: Callable[[], AbstractContextManager[Path]]) -> Iterator[str]:
    """Yield the path that rank 0 finds and keeps open during the block, on every rank. Raises its error on every
    rank."""
    with ExitStack() as stack:
        yield run_on_main(lambda: str(stack.enter_context(find())))


def bytes_from_main(function: Callable[[], bytes], group: dist.ProcessGroup | None = None) -> bytes:
    """Call `function` on rank 0 only, and return its bytes, or raise its LudicError, on every rank.

    The other ranks wait without a limit. group: another `unlimited_group`, for a thread of its own.
    """
    group = group or _waiting_group
    failure, answer = None, b""
    if is_main():
        try:
            answer = b"+" + function()
        except LudicError as error:
            failure, answer = error, b"-" + _describe(error)
    answer = broadcast_bytes(answer, group=group)
    if answer.startswith(b"-"):
        raise failure or _as_described(answer[1:])
    return answer[1:]


def run_on_all(function: Callable[[], T]) -> T:
    """Call `function` on every rank, and return each rank's own result.

    If ranks raise a LudicError, the error of the lowest such rank is raised on every rank. Any other exception ends
    the rank that raises it, and torchrun then ends the other ranks.
    """
    failure, answers = None, []
    try:
        answers.append(function())
    except LudicError as error:
        failure = error
    failed = torch.tensor([num_ranks() if failure is None else rank()])
    dist.all_reduce(failed, op=dist.ReduceOp.MIN, group=_waiting_group)
    if int(failed) < num_ranks():
        text = None if failure is None else _describe(failure)
        description = broadcast_bytes(text, source=int(failed), group=_waiting_group)
        raise failure or _as_described(description)
    return answers[0]


def _describe(error: LudicError) -> bytes:
    return f"{type(error).__name__}:{error}".encode()


def _as_described(description: bytes) -> LudicError:
    name, _, message = description.decode().partition(":")
    return getattr(ludic.errors, name, LudicError)(message)
