"""Flags of `ludic eval`."""

from dataclasses import dataclass, field
from typing import Literal

from ludic.cli.settings import RootUrl
from ludic.code.consent import CodeSettings
from ludic.engines.config import EngineConfig
from ludic.eval.config import EvalConfig, Interval, MeasureConfig

FIRST = (
    "versions",
    "every",
    "suite",
    "env",
    "num_examples",
    "n",
    "temperature",
    "measures",
    "interval",
    "engine",
    "model",
    "json",
)
"""Settings that the first page of --help shows."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run; created if it does not exist and --model is given."""
    suite: str | None = None
    """TOML file that lists environments with their settings and measures (docs/evaluation.md), instead of --env and
    the settings of samples."""
    samples: EvalConfig = field(default_factory=EvalConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    interval: Interval = "korn_graubard"
    """Kind of interval: Korn and Graubard's or Wilson's for shares and clustered for other measures, clustered by
    example for all, or bootstrap of examples."""
    code: CodeSettings = field(default_factory=CodeSettings)
    engine: EngineConfig = field(default_factory=EngineConfig)
    device: Literal["cpu", "cuda"] | None = None
    """Device to sample on; None uses CUDA if available."""
    model: str | None = None
    """Folder, Hugging Face id or URL of the model to evaluate, for a root that is created; for another root, another
    location of the run's first model."""
    json: bool = False
    """Print JSON instead of tables."""
