"""Flags of `ludic run`."""

from dataclasses import dataclass, field

import tyro

from ludic.bounds import check_numbers
from ludic.cli.flags.code import CodeSettings
from ludic.cli.settings import Algorithm, RootUrl
from ludic.defaults import ENV_TIMEOUT_S
from ludic.errors import ConfigError
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
    local_workers: int | None = None
    """Number of workers to start on this machine, 0 for none; None starts num_workers, all of the schedule."""
    ranks: int = 1
    """Number of processes that train together."""
    env_timeout_s: float | None = ENV_TIMEOUT_S
    """Seconds that one environment call may take in a worker started here; None means no limit."""
    take_over: bool = False
    """Fence the trainer that owns the run, even if it is alive; without this flag, a live owner refuses the start."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.local_workers is not None and not 0 <= self.local_workers <= self.run.num_workers:
            raise ConfigError(
                f"local_workers is {self.local_workers}, wanted 0 to num_workers ({self.run.num_workers})"
            )
