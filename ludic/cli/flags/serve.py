"""Flags of `ludic serve`."""

from dataclasses import dataclass, field

import tyro

from ludic.cli.settings import RootUrl
from ludic.launch.config import ServeConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    serve: tyro.conf.OmitArgPrefixes[ServeConfig] = field(default_factory=ServeConfig)
