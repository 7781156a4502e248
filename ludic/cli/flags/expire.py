"""Flags of `ludic expire`."""

from dataclasses import dataclass
from typing import Literal

from ludic.cli.settings import RootUrl
from ludic.maintenance.expiry_rule import ExpiryRule


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    keep_versions: int | None = None
    """Number of newest policy versions to keep; files of older versions are deleted."""
    before: int | None = None
    """Delete files of policy versions below this one."""
    older_than: str | None = None
    """Delete rows written longer ago than this age, by the worker's clock: 90m, 12h, 7d, 4w."""
    where: str | None = None
    """Delete rows that match this SQL predicate over the rollouts table: "env_name = 'warm_up' and version < 10"."""
    folder: Literal["rollouts", "evals", "token_stats"] = "rollouts"
    """Folder to delete from. In token_stats, a file's version is that of the weights its step started from."""
    break_resume: bool = False
    """Also delete rollouts that a trainer would still train on after it resumes from its checkpoint."""
    break_replay: bool = False
    """Also delete rollouts that steps were trained on, so that those steps can't be replayed."""
    dry_run: bool = False
    """Report the deletions without making them."""
    json: bool = False
    """Print JSON instead of a table."""

    def __post_init__(self) -> None:
        names = ("folder", "keep_versions", "before", "older_than", "where")
        ExpiryRule(**{name: getattr(self, name) for name in names})  # raises ConfigError
