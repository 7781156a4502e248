"""`ludic worker ROOT`: sample rollouts for a run until told to stop."""

from dataclasses import dataclass, field

import tyro

from ludic.cli.process import stop_on_signals
from ludic.rollouts.worker import WorkerConfig, run_worker
from ludic.store import Root


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: tyro.conf.Positional[str]
    """Folder or URL of the run."""
    worker: tyro.conf.OmitArgPrefixes[WorkerConfig] = field(default_factory=WorkerConfig)
    device: str | None = None
    """Where to sample: cpu or cuda. None takes CUDA when there is one."""


def main(settings: Settings) -> None:
    stop = stop_on_signals()
    root = Root.open(settings.root, writable=True)

    from ludic.inference.transformers_engine import TransformersEngine

    def make_engine(folder: str, version: int) -> TransformersEngine:
        return TransformersEngine(folder, device=settings.device, version=version)

    num_groups = run_worker(root, settings.worker, make_engine, stop)
    print(f"{num_groups} groups committed to {root.url}")
