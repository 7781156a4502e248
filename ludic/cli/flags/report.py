"""Flags of `ludic report`."""

from dataclasses import dataclass, field
from typing import Annotated

from ludic.cli.settings import RootUrl
from ludic.eval.config import MeasureConfig, parse_versions
from ludic.settings import Shown


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    output: str = "report.html"
    """File to write, on this machine; must not exist."""
    versions: str | None = None
    """Evaluated versions to show, joined by commas: numbers, latest, and ranges such as 10-latest. None is all."""
    compare: Annotated[tuple[str, ...], Shown("SIDE")] = ()
    """The baseline, then what to compare it with, as in `ludic eval compare`: VERSION or latest of this run, or
    ROOT@VERSION. None given: the last evaluated version is compared with the first."""
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    overwrite: bool = False
    """Replace the output if it exists."""

    def __post_init__(self) -> None:
        if self.versions is not None:
            parse_versions(self.versions)
