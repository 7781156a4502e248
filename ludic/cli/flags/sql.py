"""Flags of `ludic sql`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ludic.cli.settings import RootUrl
from ludic.settings import Count, Shown, check

Format = Literal["table", "json", "csv", "parquet"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    also: Annotated[tuple[str, ...], Shown("ROOT", by_position=True, has_flag=True)] = ()
    """More runs to query, here or with --also."""
    query: Annotated[str, Shown("QUERY", by_position=True)]
    """SQL over the views rollouts, groups, steps, evals, batches, all_batches, requests, attempts, workers, code,
    policies, metrics, reference, token_stats, trained_tokens, mismatch, scores and labels. Column root is the run of a
    row; in batches and all_batches, ledger_root is."""
    format: Format | None = None
    """Output format; None derives it from the suffix of --out, else prints a table."""
    out: Path | None = None
    """File to write; None writes to stdout."""
    max_rows: Count = 40
    """Maximum number of rows that a table shows."""
    unsafe: bool = False
    """Run any statement, not queries only: it may read and write files, attach databases and load extensions."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def chosen_format(self) -> Format:
        suffixes: dict[str, Format] = {".json": "json", ".csv": "csv", ".parquet": "parquet"}
        return self.format or suffixes.get(self.out.suffix if self.out else "", "table")
