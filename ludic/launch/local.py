"""Run workers and a trainer of a run as processes of this machine, and restart them when they die."""

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ludic.engines.registry import check_engine
from ludic.errors import ConfigError, LudicError, SchemaError, StoreError
from ludic.launch.config import LaunchConfig
from ludic.launch.flags import to_flags
from ludic.launch.gpus import VARIABLE, assign_gpus, parse_gpus, visible_gpus
from ludic.launch.roots import other_location
from ludic.launch.supervisor import Child, supervise
from ludic.launch.train import last_step, train_args
from ludic.store import Root
from ludic.store.lease import await_free, newest_claim
from ludic.store.names import owner_name
from ludic.store.slots import newest_slot_claim, read_slot_claim
from ludic.training.config import TrainConfig
from ludic.viewer.live import open_view
from ludic.viewer.status import Watcher

logger = logging.getLogger(__name__)


def launch(root: Root, config: TrainConfig, processes: LaunchConfig, *, model: str | None = None) -> int:
    """Run all processes until the trainer is done, and show what they do; returns the last step trained.

    model: location of the run's first model, if it is not where run.json says. A run that already reached num_steps
    starts no process. Raises ConfigError, ChildError if a process dies repeatedly, OwnedError if another live trainer
    owns the run, or KeyboardInterrupt after a clean stop.
    """
    check_launch(config, processes, root.run.num_workers)
    if last_step(root) < config.num_steps:
        gpus = _gpu_environments(config, processes, processes.workers_of(root.run.num_workers))
        replaces = _predecessor(root, take_over=processes.take_over)
        with open_view(Watcher(root.url)) as update_view:
            _supervise(root, config, processes, other_location(root, model), replaces, gpus, update_view)
    return last_step(root)


def check_launch(config: TrainConfig, processes: LaunchConfig, num_workers: int) -> None:
    """Check the settings without running users' code. num_workers: workers of the schedule. Raises ConfigError."""
    if config.batch.is_stored:
        raise ConfigError(
            "`ludic run` trains on rollouts that its workers sample; `ludic train` trains on stored rollouts"
        )
    processes.workers_of(num_workers)
    check_engine(processes.engine)


def _predecessor(root: Root, *, take_over: bool = False) -> int:
    """Return the attempt that a trainer started here may replace; watches its lease if needed, unless take_over is set.

    Raises OwnedError if another live trainer owns the run, so that no second trainer is started.
    """
    free = newest_claim(root) if take_over else await_free(root, threading.Event())
    assert free is not None, "only who is told to stop gets none"
    return free


def _supervise(
    root: Root,
    config: TrainConfig,
    processes: LaunchConfig,
    model: str | None,
    replaces: int,
    gpus: Sequence[Mapping[str, str]],
    tick: Callable[[], None],
) -> None:
    """Start and supervise all processes.

    replaces: attempt that the trainer replaces at its first start. gpus: see `_gpu_environments`.
    """
    logs = log_folder(root)

    def trainer_args() -> list[str]:
        follows = _predecessor(root) if trainer.num_restarts else replaces
        return train_args(root.url, config, processes.ranks, follows, model)

    trainer = Child(
        name="trainer",
        args=trainer_args,
        log=logs / "trainer.log",
        progress=partial(_newest_checkpoint, root),
        environment=gpus[0],
    )
    workers = [
        Child(
            name=f"worker {slot}",
            args=partial(_worker_args, root, slot, model, processes),
            log=logs / f"worker-{slot}.log",
            is_free=partial(_is_slot_free, root, slot),
            was_replaced=partial(was_replaced, root, slot),
            environment=gpus[1 + slot],
        )
        for slot in range(len(gpus) - 1)
    ]
    # Fix the hash seed for all processes: some reasoning-gym generators draw in the order of a set.
    # Import no module from the working directory, which may be somebody else's root.
    environment = {"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1"}
    if "OMP_NUM_THREADS" not in os.environ:  # by default torch uses all cores in each process
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // (processes.ranks + len(workers))))
    supervise(trainer, workers, environment=environment, tick=tick)


def _gpu_environments(config: TrainConfig, processes: LaunchConfig, num_workers: int) -> list[Mapping[str, str]]:
    """Return the environment variables of the trainer, then of each worker, that show them their GPUs."""
    plan = assign_gpus(
        visible_gpus(),
        ranks=0 if config.model.device == "cpu" else processes.ranks,
        num_workers=num_workers,
        trainer=parse_gpus(processes.trainer_gpus),
        workers=parse_gpus(processes.worker_gpus),
    )
    if plan is None:
        return [{}] * (1 + num_workers)
    logger.info("GPUs: %s", plan.describe())
    return [{VARIABLE: ",".join(gpus)} for gpus in (plan.trainer, *plan.workers)]


def _worker_args(root: Root, slot: int, model: str | None, processes: LaunchConfig) -> list[str]:
    settings = {"slot": slot, "model": model, "env_timeout_s": processes.env_timeout_s, "engine": processes.engine}
    return ["ludic", "worker", root.url, *to_flags(settings)]


def _is_slot_free(root: Root, slot: int) -> bool:
    try:
        holder = newest_slot_claim(root, slot)
    except StoreError:  # the supervisor asks again later
        return False
    except SchemaError:  # a new life claims the number after it
        return True
    return holder is None or holder.is_over


def was_replaced(root: Root, slot: int, pid: int) -> bool:
    """Return True if a process of this machine claimed the slot, and another process claimed it later."""
    try:
        newest = newest_slot_claim(root, slot)
        lives = range(newest.life if newest else 0, 0, -1)
        claims = (read_slot_claim(root, slot, life) for life in lives)
        own = next((claim for claim in claims if claim and claim.owner == owner_name(pid)), None)
    except LudicError:  # `is_free` asks again before the next life
        return True
    return own is not None and newest is not None and newest.life > own.life


def _newest_checkpoint(root: Root) -> int | None:
    try:
        return last_step(root)
    except LudicError:
        return None


def log_folder(root: Root) -> Path:
    """Return the folder for the processes' output: `logs` in a local root, else a folder below the temporary files."""
    return Path(root.path) / "logs" if root.is_local else Path(tempfile.gettempdir()) / f"ludic-{root.run_id}"
