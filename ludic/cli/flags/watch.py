"""Flags of `ludic watch`."""

from dataclasses import dataclass

from ludic.cli.settings import RootUrl
from ludic.settings import SecondsOfADay, check


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    interval_s: SecondsOfADay = 2.0
    """Seconds between two looks at the files."""
    once: bool = False
    """Print one frame and exit."""

    def __post_init__(self) -> None:
        check(self)
