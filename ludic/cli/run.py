"""`ludic run ROOT`: run workers and a trainer on this machine, and restart them when they die.

The same command resumes a run, with the settings that are stored in the root.
"""

import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from ludic.cli import train
from ludic.cli.code import prepare_code
from ludic.cli.flags.code import CodeSettings
from ludic.cli.flags.run import Settings
from ludic.cli.glance import Watcher
from ludic.cli.live import open_view
from ludic.cli.process import interrupt_on_sigterm
from ludic.cli.roots import open_or_start
from ludic.cli.settings import to_flags
from ludic.cli.supervisor import Child, supervise
from ludic.cli.train import last_step, outcome, train_args
from ludic.defaults import ENV_TIMEOUT_S
from ludic.errors import ConfigError, LudicError, MissingRootError, SchemaError, StoreError
from ludic.rollouts.sampler import make_environments
from ludic.sql import BatchRules, Planner
from ludic.sql.code import rule_uses
from ludic.store import Root, RunConfig
from ludic.store.code import environment_uses
from ludic.store.lease import await_free, newest_claim
from ludic.store.names import owner_name
from ludic.store.slots import newest_slot_claim, read_slot_claim
from ludic.training.batch_config import OFFLINE_SETTINGS
from ludic.training.code import names_in_root
from ludic.training.config import TrainConfig
from ludic.training.feed import batch_rules
from ludic.user_files import NO_FILES, Files


def earlier_settings(root_url: str, args: Sequence[str]) -> Mapping[str, Any]:
    """Return the settings of the run and of its newest trainer, without offline settings: `ludic run` is online.

    Returns {} if there is no run.
    """
    try:
        earlier = {**asdict(Root.open(root_url).run), **train.earlier_settings(root_url, args)}
    except MissingRootError:
        return {}
    return {name: value for name, value in earlier.items() if name not in OFFLINE_SETTINGS}


def main(settings: Settings) -> None:
    root = open_run(settings.root, settings.run, settings.train, settings.code)
    model = train.other_place(root, settings.run.model)
    interrupt_on_sigterm()
    if last_step(root) < settings.train.num_steps:
        replaces = predecessor(root, take_over=settings.take_over)
        with open_view(Watcher(root.url)) as view:
            run(
                root,
                settings.train,
                ranks=settings.ranks,
                num_workers=settings.local_workers,
                replaces=replaces,
                tick=view.update,
                model=model,
                env_timeout_s=settings.env_timeout_s,
            )
    ended = outcome(root.url, last_step(root), settings.train.num_steps)
    print(f"{ended}; `ludic stats {root.url}` says what is there")


def open_run(url: str, config: RunConfig, train: TrainConfig, code: CodeSettings) -> Root:
    """Start a run, or open the existing one, and check that its code works. Raises ConfigError, QueryError.

    A new run uses the code files of the user who starts it; code of an existing root runs only with consent.
    """
    check_settings(config, train)
    try:
        Root.open(url)
    except MissingRootError:
        _check_option_names(config)
        check_code(config, train, NO_FILES)
    root = open_or_start(url, config)
    uses = [*environment_uses(config), *rule_uses(_rules(config, train), names_in_root(root))]
    prepare_code(root, uses, code, partial(check_code, config, train))
    return root


def _check_option_names(config: RunConfig) -> None:
    """Raise ConfigError for options of an environment that the run does not name; they would have no effect."""
    for name in config.env_options:
        if name not in config.env:
            close = get_close_matches(name, config.env, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"env is {', '.join(config.env)}"
            raise ConfigError(f"env_options has options of {name!r}, which is not in env; {hint}")


def check_code(config: RunConfig, train: TrainConfig, files: Files) -> None:
    """Load SQL and environments once, to find errors before every process fails. Raises ConfigError, QueryError.

    Runs users' code. files: contents that replace those on disk.
    """
    Planner(replace(_rules(config, train), files=files), config.extra_columns)
    make_environments(config, files)


def _rules(config: RunConfig, train: TrainConfig) -> BatchRules:
    return batch_rules(train.batch, config.groups_per_batch, config.seed, pairs=train.loss.is_paired)


def check_settings(config: RunConfig, train: TrainConfig) -> None:
    """Check the settings without running users' code. Raises ConfigError if the trainer reads stored rollouts."""
    if train.batch.is_stored:
        raise ConfigError("a run trains on what its workers sample; `ludic train` trains on what is stored")


def predecessor(root: Root, *, take_over: bool = False) -> int:
    """Return the attempt that a trainer started here may replace; watches its lease if needed, unless take_over is set.

    Raises OwnedError if another live trainer owns the run, so that no second trainer is started.
    """
    free = newest_claim(root) if take_over else await_free(root, threading.Event())
    assert free is not None, "only who is told to stop gets none"
    return free


def run(
    root: Root,
    config: TrainConfig,
    *,
    ranks: int,
    num_workers: int | None = None,
    replaces: int,
    tick: Callable[[], None],
    model: str | None = None,
    env_timeout_s: float | None = ENV_TIMEOUT_S,
) -> None:
    """Run all processes until the trainer is done.

    num_workers: workers to start here; None starts one for each slot of the schedule.
    replaces: attempt that the trainer replaces at its first start, see `predecessor`.
    model: location of the run's model, if it is not where run.json says.

    Raises ChildError, OwnedError if another trainer took over, or KeyboardInterrupt after a clean stop.
    """
    logs = log_folder(root)

    def trainer_args() -> list[str]:
        follows = predecessor(root) if trainer.num_restarts else replaces
        return train_args(root.url, config, ranks, follows, model)

    trainer = Child(
        name="trainer", args=trainer_args, log=logs / "trainer.log", progress=partial(_newest_checkpoint, root)
    )
    workers = [
        Child(
            name=f"worker {slot}",
            args=partial(_worker_args, root, slot, model, env_timeout_s),
            log=logs / f"worker-{slot}.log",
            is_free=partial(_is_slot_free, root, slot),
            was_replaced=partial(_was_replaced, root, slot),
        )
        for slot in range(root.run.num_workers if num_workers is None else num_workers)
    ]
    # Fix the hash seed for all processes: some reasoning-gym generators draw in the order of a set.
    # Import no module from the working directory, which may be somebody else's root.
    environment = {"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", **_threads(ranks + len(workers))}
    supervise(trainer, workers, environment=environment, tick=tick)


def _worker_args(root: Root, slot: int, model: str | None, env_timeout_s: float | None) -> list[str]:
    return ["ludic", "worker", root.url, *to_flags({"slot": slot, "model": model, "env_timeout_s": env_timeout_s})]


def _is_slot_free(root: Root, slot: int) -> bool:
    try:
        holder = newest_slot_claim(root, slot)
    except StoreError:  # the supervisor asks again later
        return False
    except SchemaError:  # a new life claims the number after it
        return True
    return holder is None or holder.is_over


def _was_replaced(root: Root, slot: int, pid: int) -> bool:
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


def _threads(num_processes: int) -> dict[str, str]:
    """Return the environment variables that share the cores: by default torch uses all cores in each process."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_processes))}
