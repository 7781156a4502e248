"""Flags of `ludic score`."""

from dataclasses import dataclass

from ludic.cli.settings import RootUrl
from ludic.scoring.options import ScoreOptions


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    options: ScoreOptions
    json: bool = False
    """Print the report as JSON."""
