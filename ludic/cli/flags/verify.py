"""Flags of `ludic verify`."""

from dataclasses import dataclass

from ludic.cli.settings import RootUrl


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run. In a run that is still active, half-written data may be reported as well."""
    repair: bool = False
    """Move broken files to quarantine/ with the reason, and delete temporary files that are older than a day."""
    json: bool = False
    """Print JSON instead of a list."""
