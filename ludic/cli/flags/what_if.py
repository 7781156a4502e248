"""Flags of `ludic what-if`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from ludic.cli.settings import Algorithm, RootUrl
from ludic.settings import Count, Index, Shown, check


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    advantage: str | None = None
    """Advantage to use instead: a name, path/to/file.sql, or path/to/file.py:function. None keeps the run's."""
    filters: tuple[str, ...] | None = None
    """Filters to use instead: names, or paths of .sql files; --filters alone uses none. None keeps the run's."""
    algorithm: Algorithm = None
    """Use the advantage, filters and loss settings of this algorithm (docs/algorithms.md)."""
    sql_params: Mapping[str, float | int | str] = field(default_factory=dict)
    """Values of the $parameters of the SQL, as JSON. Without it, those of the run that the SQL takes."""
    steps: str | None = None
    """Steps to look at: one such as 7, or a range such as 10-20. None is all."""
    train: Annotated[str | None, Shown("OUT_ROOT")] = None
    """Root of a branch, a new run to train with these settings on the run's stored batches; needs --from-step."""
    from_step: Index | None = None
    """Step whose policy the branch begins with; 0 is the first policy."""
    num_steps: Count | None = None
    """Steps of the branch. None trains as many as the run has after --from-step."""
    json: bool = False
    """Print JSON instead of tables."""

    def __post_init__(self) -> None:
        check(self)
