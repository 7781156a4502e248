"""Flags of `ludic worker`."""

from dataclasses import dataclass, field
from typing import Literal

from ludic.cli.settings import RootUrl
from ludic.code.consent import CodeSettings
from ludic.engines.config import EngineConfig
from ludic.rollouts.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    code: CodeSettings = field(default_factory=CodeSettings)
    engine: EngineConfig = field(default_factory=EngineConfig)
    device: Literal["cpu", "cuda"] | None = None
    """Device to sample on; None uses CUDA if available."""
    model: str | None = None
    """Location of the run's first model, which adapters need; None takes the location in run.json."""
