"""Flags of `ludic launch`."""

from dataclasses import dataclass, field
from typing import Annotated

import tyro

from ludic.adapters.clusters.config import ClusterConfig, System
from ludic.cli.settings import Algorithm, RootUrl
from ludic.engines.config import EngineConfig
from ludic.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    system: Annotated[tyro.conf.Positional[System], tyro.conf.arg(metavar="SYSTEM")]
    """slurm, kubernetes or skypilot."""
    root: RootUrl
    """Folder or URL of the run, which `ludic create` has made where the machines can reach it."""
    cluster: tyro.conf.OmitArgPrefixes[ClusterConfig] = field(default_factory=ClusterConfig)
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = field(default_factory=EngineConfig)
    algorithm: Algorithm = None
    """Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them."""
    train: tyro.conf.OmitArgPrefixes[TrainConfig] = field(default_factory=TrainConfig)
    out: str | None = None
    """Folder for the files; None prints them."""

    def __post_init__(self) -> None:
        self.cluster.check_for(self.system)
