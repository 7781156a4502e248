"""Progress of training and sampling in this process: a bar on stderr in a terminal or notebook, else log lines."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from ludic.records import RolloutBatch
from ludic.rollouts.metrics import mean_reward
from ludic.show.status import describe_step

logger = logging.getLogger("ludic.run")


@contextmanager
def training_progress(num_steps: int | None) -> Iterator[Callable[[int, Mapping[str, Any]], None]]:
    """Give a function that shows a step and its metrics. num_steps: the last step, None if it is not known."""
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not _can_draw(console)) as progress:
        task = progress.add_task("waiting for rollouts", total=num_steps)

        def report(step: int, row: Mapping[str, Any]) -> None:
            progress.update(task, completed=step, description=describe_step(row))
            if progress.disable:
                logger.info("step %d%s  %s", step, f" of {num_steps}" if num_steps else "", describe_step(row))

        yield report


@contextmanager
def sampling_progress(num_groups: int | None) -> Iterator[Callable[[RolloutBatch], None]]:
    """Give a function that shows a batch. num_groups: groups to sample, None if it is not known."""
    columns = SpinnerColumn(), TextColumn("{task.completed} groups  {task.description}")
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not _can_draw(console)) as progress:
        task = progress.add_task("waiting for a policy", total=num_groups)
        yield lambda batch: progress.update(task, advance=len(batch.groups), description=_describe(batch))


def _can_draw(console: Console) -> bool:
    return console.is_terminal or console.is_jupyter


def _describe(batch: RolloutBatch) -> str:
    """Return the policy version and mean reward of an engine call as one line."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    reward = mean_reward(rollouts)
    shown = "unscored" if reward is None else f"{reward:.3f}"
    return f"version {rollouts[0].policy_version}  reward {shown}"
