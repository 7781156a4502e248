"""Flags of `ludic expire`."""

import re
from dataclasses import dataclass
from typing import Literal

from ludic.bounds import check_numbers
from ludic.cli.settings import RootUrl
from ludic.errors import ConfigError

AGE = re.compile(r"(\d+)([smhdw])")


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    keep_versions: int | None = None
    """Number of newest policy versions to keep; files of older versions are deleted."""
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
        check_numbers(self)
        rules = [self.keep_versions, self.older_than, self.where]
        if sum(rule is not None for rule in rules) != 1:
            raise ConfigError("wanted one of --keep-versions N, --older-than AGE and --where SQL")
        if self.older_than is not None and not AGE.fullmatch(self.older_than):
            raise ConfigError(f"older_than is {self.older_than!r}, wanted a number and s, m, h, d or w, such as 7d")
        if self.folder == "token_stats" and self.keep_versions is None:
            raise ConfigError("folder is token_stats, which goes by the versions of weights; wanted --keep-versions N")

    @property
    def rollouts_folder(self) -> Literal["rollouts", "evals"]:
        """Folder of rollouts that the rule applies to."""
        assert self.folder != "token_stats"
        return self.folder

    @property
    def rule(self) -> str:
        """The rule as text, stored in the tombstone."""
        if self.keep_versions is not None:
            return f"--keep-versions {self.keep_versions}"
        return f"--older-than {self.older_than}" if self.older_than is not None else f"--where {self.where}"
