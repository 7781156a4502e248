"""Flags of `ludic compact`."""

from dataclasses import dataclass
from typing import Annotated

from ludic.cli.settings import RootUrl
from ludic.defaults import TARGET_BYTES
from ludic.errors import ConfigError
from ludic.settings import Index, Range, check


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    before: Index | None = None
    """Compact versions below this one; None compacts the versions that workers and the newest trainer no longer use.

    Files of requests/, which have no versions, are always compacted."""
    all: bool = False
    """Compact every version; for a finished run."""
    target_mb: Annotated[int, Range(1, 10**6)] = TARGET_BYTES >> 20
    """Target size of a compacted file, in MiB."""
    dry_run: bool = False
    """Report the changes without making them."""
    json: bool = False
    """Print JSON instead of a table."""

    def __post_init__(self) -> None:
        check(self)
        if self.all and self.before is not None:
            raise ConfigError("--all and --before contradict each other; give one of them")
