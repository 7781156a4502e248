"""Flags of `ludic serve`."""

from dataclasses import dataclass, field

from ludic.cli.settings import RootUrl
from ludic.launch.config import ServeConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    serve: ServeConfig = field(default_factory=ServeConfig)
