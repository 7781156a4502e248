"""Flags of `ludic watch`."""

from dataclasses import dataclass

from ludic.bounds import check_numbers
from ludic.cli.settings import RootUrl


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    interval_s: float = 2.0
    """Seconds between two looks at the files."""
    once: bool = False
    """Print one frame and exit."""

    def __post_init__(self) -> None:
        check_numbers(self)
