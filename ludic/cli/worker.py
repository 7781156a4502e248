"""`ludic worker ROOT`: sample rollouts for a run until told to stop."""

from dataclasses import dataclass, field
from typing import Literal

import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from ludic.cli.process import stop_on_signals
from ludic.cli.settings import RootUrl
from ludic.records import RolloutBatch
from ludic.rollouts.worker import WorkerConfig, mean_reward, run_worker
from ludic.store import Root


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    worker: tyro.conf.OmitArgPrefixes[WorkerConfig] = field(default_factory=WorkerConfig)
    device: Literal["cpu", "cuda"] | None = None
    """Where to sample; None takes CUDA when there is one."""


def main(settings: Settings) -> None:
    stop = stop_on_signals()
    root = Root.open(settings.root, writable=True)

    from ludic.inference.transformers_engine import TransformersEngine

    def make_engine(folder: str, version: int) -> TransformersEngine:
        return TransformersEngine(folder, device=settings.device, version=version)

    columns = SpinnerColumn(), TextColumn("{task.completed} groups  {task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("waiting for a policy", total=settings.worker.num_groups)

        def report(batch: RolloutBatch) -> None:
            progress.update(task, advance=len(batch.groups), description=describe(batch))

        num_groups = run_worker(root, settings.worker, make_engine, stop, report)
    print(f"{num_groups} groups committed to {root.url}")


def describe(batch: RolloutBatch) -> str:
    """What the last call of the engine sampled, in short."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    reward = mean_reward(rollouts)
    shown = "unscored" if reward is None else f"{reward:.3f}"
    return f"version {rollouts[0].policy_version}  reward {shown}"
