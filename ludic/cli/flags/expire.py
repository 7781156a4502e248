"""Flags of `ludic expire`."""

from dataclasses import dataclass

from ludic.cli.settings import RootUrl
from ludic.maintenance.expiry_rule import ExpiryRule


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    rule: ExpiryRule
    break_resume: bool = False
    """Also delete rollouts that a trainer would still train on after it resumes from its checkpoint."""
    break_replay: bool = False
    """Also delete rollouts that steps were trained on, so that those steps can't be replayed."""
    dry_run: bool = False
    """Report the deletions without making them."""
    json: bool = False
    """Print JSON instead of a table."""
