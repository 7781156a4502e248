"""Flags of `ludic sql`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ludic.cli.settings import RootUrl
from ludic.settings import Count, check

Format = Literal["table", "json", "csv", "parquet"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    root: RootUrl
    """Folder or URL of the run."""
    query: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="QUERY")]
    """SQL over the views rollouts, groups, steps, evals, batches, all_batches, requests, attempts, workers, code,
    policies, metrics, reference, token_stats, trained_tokens, mismatch, scores and labels. Column root is the run of a
    row; in batches and all_batches, ledger_root is."""
    also: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ROOT [ROOT ...]")] = ()
    """More runs to query; `ludic sql ROOT ROOT ... QUERY` does the same."""
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


def positionals_to_flags(args: list[str]) -> list[str]:
    """Turn ROOT ROOT ... QUERY into ROOT QUERY --also ROOT ...: the number of positional arguments is fixed."""
    num_positional = next((index for index, arg in enumerate(args) if arg.startswith("-")), len(args))
    root, *others, query = args[:num_positional] if num_positional > 2 else ("", "")
    return [root, query, *args[num_positional:], "--also", *others] if others else args
