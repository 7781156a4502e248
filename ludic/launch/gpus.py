"""Decide which GPUs each process of a run on this machine gets, by CUDA_VISIBLE_DEVICES. Pure, except `visible_gpus`.

The trainer takes one GPU per rank, the first ones; the workers divide the others. Where there are too few, workers
share GPUs with each other, and as a last resort with the trainer.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ludic.errors import ConfigError

VARIABLE = "CUDA_VISIBLE_DEVICES"
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Devices of the drivers: NVIDIA on Linux, NVIDIA in WSL, AMD."""

Gpus = tuple[str, ...]
"""Names of GPUs as CUDA_VISIBLE_DEVICES has them: numbers or UUIDs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """GPUs of each process; an empty tuple leaves a process without one."""

    trainer: Gpus
    """GPUs that the trainer's ranks take, one each."""
    workers: tuple[Gpus, ...]
    """GPUs of each worker."""

    def describe(self) -> str:
        """Return the plan as one line, such as: trainer 0; worker 0: 1; worker 1: 2."""
        workers = (f"worker {number}: {','.join(gpus)}" for number, gpus in enumerate(self.workers))
        return "; ".join([f"trainer: {','.join(self.trainer) or 'none'}", *workers])


def visible_gpus() -> Gpus:
    """Return the GPUs that this process may use; those of CUDA_VISIBLE_DEVICES if it is set."""
    if (names := parse_gpus(os.environ.get(VARIABLE))) is not None:
        return names[: names.index("-1")] if "-1" in names else names  # CUDA ignores what follows an invalid number
    if not any(Path(device).exists() for device in _DRIVERS):  # importing torch takes seconds
        return ()
    import torch

    return tuple(str(number) for number in range(torch.cuda.device_count()))


def parse_gpus(text: str | None) -> Gpus | None:
    """Return the names in a text such as 0,1; None for None."""
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def assign_gpus(
    visible: Sequence[str],
    *,
    ranks: int,
    num_workers: int,
    trainer: Gpus | None = None,
    workers: Gpus | None = None,
) -> GpuPlan | None:
    """Assign GPUs to the processes of a run; returns None if there is no GPU to assign.

    ranks: number of the trainer's ranks that need a GPU, 0 if it trains on the CPU. trainer, workers: the user's
    choice, instead of the choice made here. Raises ConfigError if there are fewer GPUs than ranks, or if a chosen GPU
    is not visible.
    """
    for name, chosen in (("trainer_gpus", trainer), ("worker_gpus", workers)):
        if missing := [gpu for gpu in chosen or () if gpu not in visible]:
            found = ", ".join(visible) or "none"
            raise ConfigError(f"{name} names GPU {', '.join(missing)}; the GPUs that ludic may use here are: {found}")
    if not visible:
        return None
    if trainer is None:
        trainer = tuple([gpu for gpu in visible if gpu not in (workers or ())] or visible)[:ranks]
        if len(trainer) < ranks:
            trainer = tuple(visible[:ranks])  # shared with workers
    if len(trainer) < ranks:
        raise ConfigError(f"ranks is {ranks}, but the trainer has {len(trainer)} GPUs; wanted one for each rank")
    if workers is None:
        workers = tuple([gpu for gpu in visible if gpu not in trainer] or visible)
    return GpuPlan(trainer=trainer, workers=_divide(workers, num_workers))


def _divide(gpus: Gpus, num_workers: int) -> tuple[Gpus, ...]:
    """Divide GPUs into contiguous, nearly equal parts; with fewer GPUs than workers, each worker gets one in turn."""
    if len(gpus) < num_workers:
        return tuple((gpus[number % len(gpus)],) if gpus else () for number in range(num_workers))
    bounds = [number * len(gpus) // max(num_workers, 1) for number in range(num_workers + 1)]
    return tuple(gpus[low:high] for low, high in pairwise(bounds))
