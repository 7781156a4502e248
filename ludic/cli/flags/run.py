"""Flags of `ludic run`."""

from dataclasses import dataclass, field

from ludic.cli.settings import Algorithm, RootUrl
from ludic.code.consent import CodeSettings
from ludic.engines.config import EngineConfig
from ludic.launch.config import LaunchConfig
from ludic.run_config import RunConfig
from ludic.training.config import TrainConfig

FIRST = (
    "model",
    "env",
    "algorithm",
    "num_steps",
    "learning_rate",
    "group_size",
    "groups_per_batch",
    "max_tokens",
    "num_workers",
    "ranks",
    "engine",
    "eval_every",
    "trust_code",
)
"""Settings that the first page of --help shows."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run; created if it does not exist."""
    run: RunConfig
    algorithm: Algorithm = None
    """Use the settings of this algorithm (docs/algorithms.md); settings given explicitly override them."""
    train: TrainConfig = field(default_factory=TrainConfig)
    code: CodeSettings = field(default_factory=CodeSettings)
    engine: EngineConfig = field(default_factory=EngineConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    def __post_init__(self) -> None:
        self.launch.workers_of(self.run.num_workers)
