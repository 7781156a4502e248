"""`ludic run ROOT`: workers and a trainer on this machine, started again when they die.

The same command resumes a run: what is in the root says how it was started.
"""

import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from ludic.cli import train
from ludic.cli.glance import Watcher
from ludic.cli.live import LiveView
from ludic.cli.process import interrupt_on_sigterm
from ludic.cli.settings import RootUrl
from ludic.cli.supervisor import Child, supervise
from ludic.cli.train import train_args
from ludic.errors import ConfigError, MissingRootError
from ludic.rollouts.sampler import make_environments
from ludic.sql import Planner
from ludic.store import Root, RunConfig
from ludic.store.lease import await_free, newest_claim
from ludic.training.config import OFFLINE_SETTINGS, TrainConfig
from ludic.training.feed import batch_rules


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run; made when it is not there."""
    run: tyro.conf.OmitArgPrefixes[RunConfig]
    train: tyro.conf.OmitArgPrefixes[TrainConfig] = field(default_factory=TrainConfig)
    ranks: int = 1
    """Processes that train together."""
    take_over: bool = False
    """Fence the trainer that owns the run, alive or not, instead of being refused while it lives."""


def earlier_settings(root_url: str, args: Sequence[str]) -> Mapping[str, Any]:
    """Those that the run was started with, and those of its newest trainer; a run is online, whatever that one was."""
    try:
        earlier = {**asdict(Root.open(root_url).run), **train.earlier_settings(root_url, args)}
    except MissingRootError:
        return {}
    return {name: value for name, value in earlier.items() if name not in OFFLINE_SETTINGS}


def main(settings: Settings) -> None:
    check(settings.run, settings.train)
    root = Root.create(settings.root, settings.run)
    interrupt_on_sigterm()
    replaces = predecessor(root, take_over=settings.take_over)
    with LiveView(Watcher(root.url), Console(stderr=True)) as view:
        run(root, settings.train, ranks=settings.ranks, replaces=replaces, tick=view.update)
    print(f"trained to step {settings.train.num_steps} in {root.url}; `ludic stats {root.url}` says what is there")


def check(config: RunConfig, train: TrainConfig) -> None:
    """Find here, at once, what would otherwise fail in every process. Raises ConfigError, QueryError."""
    if train.is_stored:
        raise ConfigError("a run trains on what its workers sample; `ludic train` trains on what is stored")
    Planner(batch_rules(train, config.groups_per_batch, config.seed), config.extra_columns)
    make_environments(config)
    is_id = len(config.model.split("/")) <= 2 and not config.model.startswith(("/", ".", "~"))
    if not is_id and not Path(config.model).expanduser().is_dir():
        raise ConfigError(f"model {config.model} is no folder; wanted one with config.json and weights, or a Hub id")


def predecessor(root: Root, *, take_over: bool = False) -> int:
    """The attempt that a trainer started here may replace; watches its lease where need be, unless it is taken over.

    Raises OwnedError where a trainer of somebody else lives, so that nothing is started beside it.
    """
    free = newest_claim(root) if take_over else await_free(root, threading.Event())
    assert free is not None, "only who is told to stop gets none"
    return free


def run(root: Root, config: TrainConfig, *, ranks: int, replaces: int, tick: Callable[[], None]) -> None:
    """Run all processes until the trainer is done, which replaces an attempt at first, see `predecessor`.

    Raises ChildError, OwnedError when somebody else's trainer took over, or KeyboardInterrupt after a clean stop.
    """
    logs = log_folder(root)

    def trainer_args() -> list[str]:
        return train_args(root.url, config, ranks, predecessor(root) if trainer.num_restarts else replaces)

    trainer = Child(name="trainer", args=trainer_args, log=logs / "trainer.log")
    workers = [
        Child(name=f"worker {slot}", args=partial(_worker_args, root, slot), log=logs / f"worker-{slot}.log")
        for slot in range(root.run.num_workers)
    ]
    # The same hashes in every life: some of reasoning-gym's generators draw in the order of a set.
    environment = {"PYTHONHASHSEED": "0", **_threads(ranks + len(workers))}
    supervise(trainer, workers, environment=environment, tick=tick)


def _worker_args(root: Root, slot: int) -> list[str]:
    return ["ludic", "worker", root.url, "--slot", str(slot)]


def log_folder(root: Root) -> Path:
    """Where the processes' own output goes: beside a local root's files, else among the temporary files."""
    return Path(root.path) / "logs" if root.is_local else Path(tempfile.gettempdir()) / f"ludic-{root.run_id}"


def _threads(num_processes: int) -> dict[str, str]:
    """Share the cores: torch would take all of them in each process."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_processes))}
