"""`ludic train ROOT`: train on a run's rollouts, on one rank or several."""

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ludic.cli.code import gives_consent, prepare_code
from ludic.cli.flags.code import CodeSettings
from ludic.cli.flags.train import Settings
from ludic.cli.process import LAUNCHER, stop_on_signals
from ludic.cli.roots import start_like
from ludic.cli.settings import last_value, take_option, to_flags
from ludic.errors import ConfigError, MissingRootError
from ludic.store import Root, newest_attempt_id, read_attempt
from ludic.store.checkpoints import checkpoint_places, place_to_resume
from ludic.store.lease import newest_claim
from ludic.training.config import TrainConfig
from ludic.training.objective_settings import DECIDE_IGNORED, without_ignored
from ludic.training.presets import load_algorithm

logger = logging.getLogger(__name__)


def earlier_settings(root_url: str, args: Sequence[str]) -> Mapping[str, Any]:
    """Return the settings of the run's newest trainer, or of the run to be replayed; {} if there is neither.

    Leaves out settings that the objective of the flags, the file or the preset ignores: only settings given now are
    refused.
    """
    return without_ignored(_stored_settings(root_url, args), chosen_objective(args))


def chosen_objective(args: Sequence[str]) -> dict[str, Any]:
    """The settings that decide which others are ignored, as far as flags or the preset that they name give them."""
    algorithm = last_value(args, "algorithm")
    preset = load_algorithm(algorithm) if algorithm not in (None, "None") else {}
    given = {name: last_value(args, name) for name in DECIDE_IGNORED}
    chosen = {name: None if value == "None" else value for name, value in given.items() if value is not None}
    return {name: preset[name] for name in DECIDE_IGNORED if name in preset} | chosen


def _stored_settings(root_url: str, args: Sequence[str]) -> Mapping[str, Any]:
    _, replayed = take_option(list(args), "--replay-batches", "a run's folder or URL")
    if replayed not in (None, "None"):
        from ludic.training.replay import replay_settings

        return replay_settings(replayed)
    try:
        root = Root.open(root_url)
    except MissingRootError:
        return {}
    attempt_id = newest_attempt_id(root)
    return read_attempt(root, attempt_id).config if attempt_id else {}


def main(settings: Settings) -> None:
    root = open_resumable(settings.root) if settings.resume else open_or_create(settings)
    prepare_trainer_code(root, settings.train, settings.code)
    replaces = newest_claim(root) if settings.take_over else settings.replaces
    if settings.ranks > 1 and "WORLD_SIZE" not in os.environ:
        model = other_place(root, settings.model)
        args = train_args(root.url, settings.train, settings.ranks, replaces, model, resume=settings.resume)
        os.environ[LAUNCHER] = str(os.getpid())
        os.execv(sys.executable, [sys.executable, "-m", *args])

    from ludic.training.trainer import train

    stop = stop_on_signals()
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        num_steps = None if settings.train.batch.is_stored else settings.train.num_steps
        task = progress.add_task("waiting for rollouts", total=num_steps)

        def report(step: int, row: Mapping[str, Any]) -> None:
            progress.update(task, completed=step, description=describe(row))
            if progress.disable:
                logger.info("step %d%s  %s", step, f" of {num_steps}" if num_steps else "", describe(row))

        model = other_place(root, settings.model)
        step = train(root, settings.train, stop, report, replaces=replaces, model=model, resume=settings.resume)
    if os.environ.get("RANK", "0") == "0":
        print(outcome(root.url, step, num_steps))


def outcome(url: str, step: int, num_steps: int | None) -> str:
    """Return a sentence about how training ended. step: last step in the weights; num_steps: target, None for none."""
    if num_steps is not None and step > num_steps:
        return f"{url} is at step {step} already, which is past num_steps {num_steps}; nothing to train"
    return f"trained to step {step}{f' of {num_steps}' if num_steps else ''} in {url}"


def last_step(root: Root) -> int:
    """Return the step of the checkpoint that a trainer would resume from; 0 if there is none."""
    place = place_to_resume(root, newest_attempt_id(root), checkpoint_places(root))
    return place[1] if place else 0


def prepare_trainer_code(root: Root, config: TrainConfig, code: CodeSettings) -> None:
    """Do what the flags of code ask for, and consent to the user's own files that the root already holds."""
    from ludic.sql.code import rule_uses
    from ludic.sql.planner import Planner
    from ludic.training.code import names_in_root
    from ludic.training.feed import batch_rules

    rules = batch_rules(config.batch, root.run.groups_per_batch, root.run.seed, pairs=config.loss.is_paired)
    uses = rule_uses(rules, names_in_root(root))
    if code.is_given or gives_consent(root, uses):
        prepare_code(root, uses, code, lambda files: Planner(replace(rules, files=files), root.run.extra_columns))


def open_resumable(url: str) -> Root:
    """Open a run that has a checkpoint. Raises MissingRootError, or ConfigError if there is no complete checkpoint."""
    root = Root.open(url, writable=True)
    if not last_step(root):
        raise ConfigError(
            f"{root.url} has no complete checkpoint to resume from; without --resume it starts from the first weights"
        )
    return root


def open_or_create(settings: Settings) -> Root:
    """Open the run, or create it like the first run that it trains on. Raises MissingRootError if there is neither."""
    like = settings.train.batch.replay_batches or next(iter(settings.train.batch.sources), None)
    try:
        return Root.open(settings.root, writable=True)
    except MissingRootError:
        if like is None:
            raise
        return start_like(settings.root, Root.open(like), settings.model)


def other_place(root: Root, model: str | None) -> str | None:
    """Return `model`, a location other than the one in run.json, or None if it is the same."""
    return None if model == root.run.model else model


def train_args(
    root: str,
    config: TrainConfig,
    ranks: int,
    replaces: int | None = None,
    model: str | None = None,
    *,
    resume: bool = False,
) -> list[str]:
    """Return the arguments after `python -m` to train on this machine, under torchrun if there are several ranks."""
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    flags = to_flags({**config.flat(), "replaces": replaces, "ranks": ranks, "model": model, "resume": resume})
    return [*launch, "ludic", "train", root, *flags]


def describe(row: Mapping[str, Any]) -> str:
    """Return a step's main metrics as one line."""
    reward = row.get("reward_mean")
    shown = "unscored" if reward is None else f"{reward:.3f}"
    mean = row.get("lag_mean")  # the stored name
    off_policy = "" if mean is None else f"off-policy steps {mean:.1f}  "
    return f"reward {shown}  loss {row['loss']:.4f}  {off_policy}{row['tokens_per_s']:,.0f} tokens/s"
