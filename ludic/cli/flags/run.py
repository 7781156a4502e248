"""Flags of `ludic run`."""

from dataclasses import dataclass, field

import tyro

from ludic.cli.settings import Algorithm, RootUrl
from ludic.code.consent import CodeSettings
from ludic.engines.config import EngineConfig
from ludic.launch.config import LaunchConfig
from ludic.run_config import RunConfig
from ludic.training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run; created if it does not exist."""
    run: tyro.conf.OmitArgPrefixes[RunConfig]
    algorithm: Algorithm = None
    """Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them."""
    train: tyro.conf.OmitArgPrefixes[TrainConfig] = field(default_factory=TrainConfig)
    code: tyro.conf.OmitArgPrefixes[CodeSettings] = field(default_factory=CodeSettings)
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = field(default_factory=EngineConfig)
    launch: tyro.conf.OmitArgPrefixes[LaunchConfig] = field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        self.launch.workers_of(self.run.num_workers)
