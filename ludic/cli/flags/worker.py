"""Flags of `ludic worker`."""

from dataclasses import dataclass, field
from typing import Literal

import tyro

from ludic.cli.settings import RootUrl
from ludic.consent import CodeSettings
from ludic.defaults import ENGINE
from ludic.rollouts.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    worker: tyro.conf.OmitArgPrefixes[WorkerConfig] = field(default_factory=WorkerConfig)
    code: tyro.conf.OmitArgPrefixes[CodeSettings] = field(default_factory=CodeSettings)
    engine: str = ENGINE
    """Inference engine: a built-in name (transformers), or path/to/file.py:ClassName of your own."""
    device: Literal["cpu", "cuda"] | None = None
    """Device to sample on; None uses CUDA if available."""
    model: str | None = None
    """Location of the run's first model, which adapters need; None takes the location in run.json."""
