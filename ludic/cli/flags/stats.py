"""Flags of `ludic stats`."""

from dataclasses import dataclass

from ludic.cli.settings import RootUrl


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    json: bool = False
    """Print JSON instead of tables."""
