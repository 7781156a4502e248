"""Flags of `ludic cut`."""

from dataclasses import dataclass
from typing import Annotated

from ludic.cli.settings import RootUrl
from ludic.settings import Index, Shown, check


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    step: Index
    """Step to cut out."""
    out: Annotated[str, Shown("OUT", by_position=True)]
    """Local folder to write; it must not exist, or be empty."""
    json: bool = False
    """Print JSON instead of text."""

    def __post_init__(self) -> None:
        check(self)
