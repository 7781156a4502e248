"""Train on a run's rollouts in this process, or with several ranks that torchrun starts."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NoReturn

from ludic.app.launch.process import LAUNCHER, config_args, stop_variables, stop_within_s
from ludic.app.launch.roots import other_location, rules_of, start_like
from ludic.app.show.watch import training_progress
from ludic.base import become_python
from ludic.errors import ConfigError, MissingRootError
from ludic.root import (
    NOTHING_TO_RESUME,
    Root,
    begin_from_cut,
    checkpoint_id_to_resume,
    checkpoint_ids,
    newest_attempt_id,
    newest_claim,
)
from ludic.root.sql import Planner
from ludic.run import gives_consent, prepare_code, run_of
from ludic.settings import CodeSettings
from ludic.training import TrainConfig, tracker_uses
from ludic.training.batches import names_in_root


def train_in_process(
    root: Root,
    config: TrainConfig,
    stop: threading.Event,
    *,
    code: CodeSettings | None = None,
    model: str | None = None,
    resume: bool = False,
    take_over: bool = False,
    replaces: int | None = None,
    report: Callable[[int, Mapping[str, Any]], None] | None = None,
) -> int:
    """Train in this process, which may be a rank of torchrun; see ludic.training.trainer.train for the arguments.

    take_over: fence a live trainer. report: called with each step, instead of the progress that is shown on stderr.
    """
    from ludic.training import train

    prepare_trainer_code(root, config, code or CodeSettings())
    replaces = newest_claim(root) if take_over else replaces
    with training_progress(config.steps_to_reach) if report is None else nullcontext(report) as shown:
        model = other_location(root, model)
        return train(root, config, stop, shown, replaces=replaces, model=model, resume=resume)


def become_ranks(
    root: Root,
    config: TrainConfig,
    ranks: int,
    *,
    model: str | None,
    resume: bool,
    take_over: bool,
    replaces: int | None,
    code: CodeSettings,
    json: bool,
) -> NoReturn:
    """Replace this process by torchrun, which starts `ludic train` on each rank."""
    prepare_trainer_code(root, config, code)
    replaces = newest_claim(root) if take_over else replaces
    args = train_args(root.url, config, ranks, replaces, other_location(root, model), resume=resume, json=json)
    stops = stop_variables(stop_within_s())
    become_python(["-m", *args], environment={**os.environ, **stops, LAUNCHER: str(os.getpid())})


def train_args(
    root: str,
    config: TrainConfig,
    ranks: int,
    replaces: int | None = None,
    model: str | None = None,
    *,
    resume: bool = False,
    json: bool = False,
) -> list[str]:
    """Return the arguments after `python -m` to train on this machine, under torchrun if there are several ranks.

    Writes the settings to a file that lasts as long as this process, also if it becomes torchrun.
    """
    own = {"replaces": replaces, "ranks": ranks, "model": model, "resume": resume, "json": json}
    settings = {**config.flat(), **own}
    train = ["ludic", "train", root, *config_args("trainer", settings)]
    if ranks == 1:
        return train
    return ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", *args_of_ranks(train)]


def args_of_ranks(args: Sequence[str]) -> list[str]:
    """Return the arguments for torchrun that its ranks receive as `args`: torchrun replaces $NAME by a value, and $$ by
    $."""
    return [arg.replace("$", "$$") for arg in args]


def last_step(root: Root) -> int:
    """Return the step of the checkpoint that a trainer would resume from; 0 if there is none."""
    checkpoint_id = checkpoint_id_to_resume(root, newest_attempt_id(root), checkpoint_ids(root))
    return checkpoint_id[1] if checkpoint_id else 0


def prepare_trainer_code(root: Root, config: TrainConfig, code: CodeSettings) -> None:
    """Store users' files, and record consent according to `code`, and to the user's own files in the root."""
    rules = rules_of(run_of(root), config)
    uses = [*rules.uses(names_in_root(root)), *tracker_uses(root, config.tracker.log_to)]
    if code.is_given or gives_consent(root, uses):
        prepare_code(root, uses, code, lambda files: Planner(replace(rules, files=files), root.extra_columns))


def open_to_train(url: str, config: TrainConfig, *, model: str | None = None, resume: bool = False) -> Root:
    """Open a run, or create it like the first run that it trains on.

    resume: refuse a run without a complete checkpoint. Raises MissingRootError or ConfigError.
    """
    like = config.batch.replay_batches or next(iter(config.batch.sources), None)
    try:
        root = Root.open(url, writable=True)
    except MissingRootError:
        if like is None or resume:
            raise
        root = start_like(url, Root.open(like), model)
    if config.batch.replay_batches is not None:
        begin_from_cut(root, Root.open(config.batch.replay_batches))
    if resume and not last_step(root):
        raise ConfigError(f"{root.url} {NOTHING_TO_RESUME}")
    return root
