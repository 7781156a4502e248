"""Decide which GPUs each process of a run on this machine gets, by CUDA_VISIBLE_DEVICES. Pure.

The trainer gets the first GPUs, one per rank; the workers divide the others. If there are too few, workers share GPUs
with each other, and as a last resort with the trainer. A worker whose engine spreads the model over several GPUs gets
that number, not shared with other workers. Raises ConfigError if the GPUs do not suffice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ludic.base import Gpus, parse_gpus
from ludic.errors import ConfigError

if TYPE_CHECKING:
    from ludic.app.launch.config import LaunchConfig
    from ludic.engines import EngineConfig
    from ludic.training import TrainConfig

WHOLE_SHARE = 0.9
"""Share of a GPU's memory that workers divide; the rest is for CUDA and the libraries. vLLM's own default."""
_MEMORY_BESIDE_TRAINER = 0.5
"""Share of a GPU's memory that workers divide if the trainer uses the same GPU."""


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

    def memory_share(self, worker: int) -> float | None:
        """Return the share of its GPUs' memory that a worker's engine may take; None if it has them to itself."""
        gpus = self.workers[worker]
        if not any(self._users(gpu) > 1 for gpu in gpus):
            return None
        return min(self._share(gpu) for gpu in gpus)

    def trainer_share(self) -> float | None:
        """Return the share of its GPUs' memory that the trainer may take; None if it has them to itself."""
        is_shared = any(self._users(gpu) > 1 for gpu in self.trainer)
        return 1 - _MEMORY_BESIDE_TRAINER if is_shared else None

    def describe_shared(self) -> list[str]:
        """Return a line for each shared GPU, such as: GPU 0 is shared by the trainer and 1 worker."""
        gpus = dict.fromkeys(gpu for gpus in (self.trainer, *self.workers) for gpu in gpus)
        return [f"GPU {gpu} is shared by {self._describe_users(gpu)}" for gpu in gpus if self._users(gpu) > 1]

    def _share(self, gpu: str) -> float:
        whole = _MEMORY_BESIDE_TRAINER if gpu in self.trainer else WHOLE_SHARE
        return whole / self._num_workers(gpu)

    def _users(self, gpu: str) -> int:
        return (gpu in self.trainer) + self._num_workers(gpu)

    def _num_workers(self, gpu: str) -> int:
        return sum(gpu in gpus for gpus in self.workers)

    def _describe_users(self, gpu: str) -> str:
        num_workers = self._num_workers(gpu)
        workers = f"{num_workers} worker{'s' if num_workers > 1 else ''}"
        return f"the trainer and {workers}" if gpu in self.trainer else workers


def assign_gpus(
    visible: Sequence[str],
    *,
    ranks: int,
    num_workers: int,
    trainer: Gpus | None = None,
    workers: Gpus | None = None,
    gpus_per_worker: int | None = None,
) -> GpuPlan | None:
    """Assign GPUs to the processes of a run; returns None if there is no GPU to assign.

    ranks: number of the trainer's ranks that need a GPU, 0 if it trains on the CPU. trainer, workers: the user's
    choice, instead of the choice made here. gpus_per_worker: number of GPUs that hold one copy of a worker's model;
    None divides all GPUs that the trainer leaves. Raises ConfigError if there are fewer GPUs than ranks or than a
    worker's model needs, or if a chosen GPU is not visible.
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
    if gpus_per_worker is None:
        return GpuPlan(trainer=trainer, workers=_divide(workers, num_workers))
    return GpuPlan(trainer=trainer, workers=_give_each(workers, num_workers, gpus_per_worker))


def _give_each(gpus: Gpus, num_workers: int, per_worker: int) -> tuple[Gpus, ...]:
    """Give each worker its number of GPUs, in order; with fewer GPUs, workers of one GPU share. Raises ConfigError."""
    if per_worker == 1:
        return _divide(gpus[:num_workers], num_workers)
    if len(gpus) < num_workers * per_worker:
        raise ConfigError(
            f"tensor_parallel is {per_worker}, so {num_workers} workers need {num_workers * per_worker} GPUs, but the "
            f"workers have {len(gpus)} ({', '.join(gpus) or 'none'}); start fewer workers, lower tensor_parallel, or "
            "choose with worker_gpus"
        )
    return tuple(gpus[first : first + per_worker] for first in range(0, num_workers * per_worker, per_worker))


def _divide(gpus: Gpus, num_workers: int) -> tuple[Gpus, ...]:
    """Divide GPUs into contiguous, nearly equal parts; with fewer GPUs than workers, each worker gets one in turn."""
    if len(gpus) < num_workers:
        return tuple((gpus[number % len(gpus)],) if gpus else () for number in range(num_workers))
    bounds = [number * len(gpus) // max(num_workers, 1) for number in range(num_workers + 1)]
    return tuple(gpus[low:high] for low, high in pairwise(bounds))


def gpu_plan(
    config: "TrainConfig", processes: "LaunchConfig", engine: "EngineConfig", num_workers: int, gpus: Sequence[str]
) -> GpuPlan | None:
    """Assign GPUs by the settings of a run; None if there are none. Raises ConfigError.

    num_workers: processes with an engine; an evaluator is the last of them. gpus: their names in CUDA_VISIBLE_DEVICES.
    """
    is_spread = engine.is_vllm or engine.tensor_parallel > 1
    return assign_gpus(
        gpus,
        ranks=0 if config.model.device == "cpu" else processes.ranks,
        num_workers=num_workers,
        trainer=parse_gpus(processes.trainer_gpus),
        workers=parse_gpus(processes.worker_gpus),
        gpus_per_worker=engine.tensor_parallel if is_spread else None,
    )
