"""Flags of `ludic launch`."""

from dataclasses import dataclass, field
from typing import Annotated

from ludic.adapters.clusters.config import ClusterConfig, System
from ludic.cli.settings import Algorithm, RootUrl
from ludic.engines.config import EngineConfig
from ludic.settings import Shown
from ludic.training.config import TrainConfig

FIRST = (
    "workers",
    "nodes",
    "ranks",
    "gpus",
    "gpu_type",
    "max_hours",
    "setup",
    "image",
    "engine",
    "algorithm",
    "num_steps",
    "learning_rate",
    "out",
)
"""Settings that the first page of --help shows."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    system: Annotated[System, Shown("SYSTEM", by_position=True)]
    """slurm, kubernetes or skypilot."""
    root: RootUrl
    """Folder or URL of the run, which `ludic create` has made where the machines can reach it."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    algorithm: Algorithm = None
    """Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them."""
    train: TrainConfig = field(default_factory=TrainConfig)
    out: str | None = None
    """Folder for the files; None prints them."""

    def __post_init__(self) -> None:
        self.cluster.check_for(self.system)
