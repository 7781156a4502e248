"""`ludic worker ROOT`: sample rollouts for a run until it is stopped."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from ludic.cli.code import prepare_code
from ludic.cli.flags.worker import Settings
from ludic.errors import SlotTakenError
from ludic.launch.guard import guarded
from ludic.launch.process import REPLACED, stop_on_signals
from ludic.models.first_model import first_model
from ludic.records import RolloutBatch
from ludic.rollouts.metrics import mean_reward
from ludic.rollouts.sampler import make_environments
from ludic.rollouts.worker import run_worker
from ludic.store import Root
from ludic.store.code import environment_uses


def main(settings: Settings) -> None:
    stop = stop_on_signals()
    root = Root.open(settings.root, writable=True)
    if settings.code.is_given:
        prepare_code(root, environment_uses(root.run), settings.code, partial(make_environments, root.run))

    try:
        with base_of_run(root, settings.model) as base:
            num_groups = _run(root, settings, stop, base)
    except SlotTakenError as error:
        print(f"ludic: {error}", file=sys.stderr)
        sys.exit(REPLACED)
    print(f"{num_groups} groups committed to {root.url}")


@contextmanager
def base_of_run(root: Root, model: str | None = None) -> Iterator[Callable[[], str]]:
    """Give a function that finds the folder of the run's first model once. model: the only location to look at."""
    with ExitStack() as stack:
        yield cache(lambda: str(stack.enter_context(first_model(root, model))))


def _run(root: Root, settings: Settings, stop: threading.Event, base: Callable[[], str]) -> int:
    from ludic.engines.transformers_engine import TransformersEngine

    def make_engine(folder: str, version: int) -> TransformersEngine:
        return TransformersEngine(
            folder, device=settings.device, version=version, base=base, float32_head=root.run.float32_head
        )

    columns = SpinnerColumn(), TextColumn("{task.completed} groups  {task.description}")
    with (
        guarded(settings.worker.env_timeout_s) as announce,
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        task = progress.add_task("waiting for a policy", total=settings.worker.num_groups)

        def report(batch: RolloutBatch) -> None:
            progress.update(task, advance=len(batch.groups), description=describe(batch))

        return run_worker(root, settings.worker, make_engine, stop, report, announce)


def describe(batch: RolloutBatch) -> str:
    """Return the policy version and mean reward of the last engine call as one line."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    reward = mean_reward(rollouts)
    shown = "unscored" if reward is None else f"{reward:.3f}"
    return f"version {rollouts[0].policy_version}  reward {shown}"
