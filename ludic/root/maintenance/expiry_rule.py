"""Define the rule that chooses the files to expire. Raises ConfigError for a bad rule."""

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ludic.errors import ConfigError
from ludic.settings import Index, PositiveCount
from ludic.settings.table import check

if TYPE_CHECKING:
    from ludic.root.catalogue import Table

_AGE = re.compile(r"(\d+)([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiryRule:
    """One rule that chooses what expires, and the folder that it applies to."""

    folder: str = "rollouts"
    """Folder to delete from: rollouts, evals, token_stats, scores, requests or calls. In token_stats, a file's version
    is that of the weights its step started from; scores, requests and calls have only an age. Of calls whole episodes
    that are over are deleted."""
    keep_versions: PositiveCount | None = None
    """Number of newest policy versions to keep; files of older versions are deleted."""
    before: Index | None = None
    """Delete files of policy versions below this one."""
    older_than: str | None = None
    """Delete rows written longer ago than this age, by the worker's clock: 90m, 12h, 7d, 4w."""
    where: str | None = None
    """Delete rows that match this SQL predicate over the rollouts table: "env_name = 'warm_up' and version < 10"."""

    def __post_init__(self) -> None:
        check(self)
        rules = [self.keep_versions, self.before, self.older_than, self.where]
        if sum(rule is not None for rule in rules) != 1:
            raise ConfigError("wanted exactly one rule: keep_versions, before, older_than or where")
        if self.older_than is not None and not _AGE.fullmatch(self.older_than):
            raise ConfigError(f"older_than is {self.older_than!r}, wanted a number and s, m, h, d or w, such as 7d")
        fields = self.row.fields._fields
        if "version" in fields:
            return
        if "step" in fields and self.keep_versions is None and self.before is None:
            raise ConfigError(
                f"folder is {self.folder}, whose files only have versions; wanted keep_versions or before"
            )
        if "step" not in fields and self.older_than is None:
            raise ConfigError(f"folder is {self.folder}, whose files only have an age; wanted older_than")

    @property
    def row(self) -> "Table[Any]":
        """Row of the folder in ludic.root.catalogue. Raises ConfigError if its files do not expire."""
        from ludic.root.catalogue import FILE_KINDS, Table

        rows = {row.folder: row for row in FILE_KINDS if isinstance(row, Table) and row.kept == "expire"}
        if self.folder not in rows:
            raise ConfigError(f"folder is {self.folder!r}, wanted one of {', '.join(map(repr, rows))}")
        return rows[self.folder]

    @property
    def age(self) -> timedelta | None:
        """older_than as a duration."""
        match = _AGE.fullmatch(self.older_than or "")
        return timedelta(**{_UNITS[match[2]]: int(match[1])}) if match else None

    def first_kept(self, newest_version: int) -> int | None:
        """Return the first version that is kept; None if the rule does not depend on versions."""
        return self.before if self.keep_versions is None else newest_version - self.keep_versions + 1

    def __str__(self) -> str:
        """The rule as the flag of `ludic expire`, stored in the tombstone."""
        names = ("keep_versions", "before", "older_than", "where")
        values = ((name, getattr(self, name)) for name in names)
        return next(f"--{name.replace('_', '-')} {value}" for name, value in values if value is not None)
