"""Flags of `ludic cut`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from ludic.bounds import check_numbers
from ludic.cli.settings import RootUrl


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    step: int
    """Step to cut out."""
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT")]
    """Local folder to write; it must not exist, or be empty."""
    json: bool = False
    """Print JSON instead of text."""

    def __post_init__(self) -> None:
        check_numbers(self)
