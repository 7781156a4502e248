"""Record and compare what changes the last bits of weights: threads, versions and processors of an attempt.

Reads attempts/. Each attempt records its numerics. A resume uses the number of threads of the attempt that wrote its
checkpoint, a replay that of the run that it repeats. A warning names all other differences.
"""

import contextlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers

from ludic.base import LUDIC, broadcast_bytes, installed_version, is_main, num_ranks, rank, run_on_main
from ludic.root import CheckpointInfo, Root, read_attempt
from ludic.training.config import TrainConfig
from ludic.training.inherited_settings import attempts_to_replay
from ludic.training.packed import PACKED_ATTENTION

logger = logging.getLogger(__name__)

# Each variable was observed to change weights on a CPU, or is documented to choose another kernel.
_VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "ONEDNN_MAX_CPU_ISA"),
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO"),
)
_MOST_THREADS = 1024


def agree_on_numerics(root: Root, config: TrainConfig, resumed: CheckpointInfo | None) -> dict[str, Any]:
    """Set threads and precision of each rank, warn of differences to earlier attempts, and return the numerics.

    Collective; call it before anything is computed.
    """
    earlier = run_on_main(lambda: _earlier_numerics(root, config, resumed))
    _set_threads(config, earlier)
    if _on_cuda() and config.model.tf32:
        torch.set_float32_matmul_precision("high")
    here = gather_numerics(config)
    if is_main():
        for name, there in earlier.items():
            warn_of_differences(name, here, there)
    return here


def gather_numerics(config: TrainConfig) -> dict[str, Any]:
    """Return the numerics of all ranks as JSON values: num_threads per rank, other values once if all are equal."""
    mine = json.dumps(_numerics_of_rank(config)).encode()
    ranks = [json.loads(broadcast_bytes(mine, source=source)) for source in range(num_ranks())]
    gathered = {name: [values[name] for values in ranks] for name in ranks[0]}
    once = {name: values[0] for name, values in gathered.items() if values.count(values[0]) == len(values)}
    return {"num_ranks": len(ranks)} | gathered | once | {"num_threads": gathered["num_threads"]}


def warn_of_differences(name: str, here: Mapping[str, Any], there: Mapping[str, Any] | None) -> None:
    """Log one line that names each difference to another attempt. there: None if that attempt recorded nothing."""
    if there is None:
        found = "its threads, versions and processor are unknown, since an older ludic wrote it"
    else:
        differing = [item for item in there if item in here and here[item] != there[item]]
        found = ", ".join(f"{item} is {here[item]!r} here, {there[item]!r} there" for item in differing)
    if found:
        logger.warning("%s: %s: weights may differ in the last bits", name, found)


def _earlier_numerics(
    root: Root, config: TrainConfig, resumed: CheckpointInfo | None
) -> dict[str, Mapping[str, Any] | None]:
    """Return the numerics of attempts to compare with, by name, newest first."""
    url, attempts = root.url, []
    if config.batch.replay_batches is not None:
        url, attempts = config.batch.replay_batches, list(attempts_to_replay(config.batch.replay_batches))
    elif resumed is not None:
        with contextlib.suppress(FileNotFoundError):
            attempts = [read_attempt(root, resumed.attempt_id)]
    return {f"attempt {attempt.attempt_id} of {url}": attempt.numerics for attempt in attempts}


def _set_threads(config: TrainConfig, earlier: Mapping[str, Mapping[str, Any] | None]) -> None:
    name, there = next(iter(earlier.items()), ("", None))
    num_threads = config.num_threads or recorded_threads(there or {}, rank())
    if num_threads is None or num_threads == torch.get_num_threads():
        return
    if config.num_threads is None:
        logger.info("num_threads is %d, as in %s; --num-threads sets another", num_threads, name)
    torch.set_num_threads(num_threads)


def recorded_threads(there: Mapping[str, Any], rank: int) -> int | None:
    """Return a rank's recorded CPU threads; None if they are not usable, since any program may have written them."""
    recorded = there.get("num_threads")
    if not isinstance(recorded, list) or not recorded:
        return None
    num_threads = recorded[min(rank, len(recorded) - 1)]
    return num_threads if isinstance(num_threads, int) and 1 <= num_threads <= _MOST_THREADS else None


def _numerics_of_rank(config: TrainConfig) -> dict[str, Any]:
    return {
        "num_threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if _on_cuda() else "cpu",
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "dtype": config.model.dtype,
        "compile": config.model.compile,
        "attention": PACKED_ATTENTION,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn": torch.backends.cudnn.version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "ludic": installed_version(LUDIC),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _on_cuda() -> bool:
    """Return whether this process group trains on CUDA."""
    return "nccl" in dist.get_backend_config()


def _cpu_model() -> str:
    """Return the CPU's name from /proc/cpuinfo on Linux, else from the platform module."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
