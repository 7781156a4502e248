"""Stored samples of a root, chosen by version, environment and evaluation, for queries and measures."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from ludic.errors import ConfigError, QueryError
from ludic.eval.config import parse_versions
from ludic.sql import SqlText
from ludic.sql.library import run_measure
from ludic.sql.query import ask, ask_table, explain
from ludic.store import Root

_CHOOSE = """
create temp table {name} as
select *
from main.eval_episodes
where
    ($versions is null or version in (select unnest($versions::bigint[])))
    and ($envs is null or env in (select unnest($envs::varchar[])))
    and ($evaluations is null or coalesce(evaluation, '') in (select unnest($evaluations::varchar[])))
"""
_STORED = "select distinct policy_version, env_name from main.eval_episodes order by all"
_MOST_NAMED = 8
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which stored samples to measure; None is all."""

    versions: Sequence[int] | None = None
    envs: Sequence[str] | None = None
    evaluations: Sequence[str | None] | None = None
    """Ids of evaluations; None among them stands for rows that were neither sampled by `ludic eval` nor imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Stored samples of a root, in a temporary table: many measures read them."""

    root: Root
    con: duckdb.DuckDBPyConnection
    chosen: Chosen
    table: str

    @classmethod
    def choose(cls, root: Root, con: duckdb.DuckDBPyConnection, chosen: Chosen) -> "Samples":
        """Read samples. con: a connection to the root alone. Raises QueryError if a file can't be read."""
        table = f"chosen_{next(_numbers)}"
        ids = None if chosen.evaluations is None else [name or "" for name in chosen.evaluations]
        lists = {"versions": chosen.versions, "envs": chosen.envs, "evaluations": ids}
        params = {name: None if value is None else list(value) for name, value in lists.items()}
        try:
            con.execute(_CHOOSE.format(name=table), params)
        except duckdb.Error as error:
            raise QueryError(explain(error, root)) from error
        return cls(root=root, con=con, chosen=chosen, table=f"temp.{table}")

    @property
    def evaluation(self) -> str | None:
        """Id of the settings of samples of one evaluation; None if `ludic eval` did not sample them."""
        (evaluation,) = self.chosen.evaluations or [None]
        return evaluation

    def ask(self, sql: str) -> pa.Table:
        """Return the rows of a SELECT, in which `eval_episodes` are the chosen samples."""
        return ask_table(self.con, self.root, f"with eval_episodes as (from {self.table})\n{sql}")

    def measure(self, measure: SqlText, params: Mapping[str, Any]) -> pa.Table:
        """Return a measure's values added up by example; see ludic.sql.library.run_measure."""
        return run_measure(self.con, measure, params, over=f"from {self.table}")


def stored_versions(con: duckdb.DuckDBPyConnection, root: Root, versions: str | None) -> list[int]:
    """Return the versions with samples that a text such as "0,10-latest" chooses; None chooses all.

    latest is the newest version with samples. Raises ConfigError for a version or a range without samples.
    """
    stored = [row["version"] for row in ask(con, root, "select distinct version from evals order by all")]
    if versions is None:
        return stored
    parts = parse_versions(versions)
    if not stored:
        raise ConfigError(nothing_stored(con, root, Chosen()))
    chosen: set[int] = set()
    for part in parts:
        first, last = (
            stored[-1] if isinstance(each, str) else each
            for each in (part if isinstance(part, tuple) else (part, part))
        )
        found = {version for version in stored if first <= version <= last}
        if not found:
            raise ConfigError(nothing_stored(con, root, Chosen(versions=sorted({first, last}))))
        chosen |= found
    return sorted(chosen)


def nothing_stored(con: duckdb.DuckDBPyConnection, root: Root, chosen: Chosen) -> str:
    """Return the message of an error: no samples are stored, and which ones are."""
    named = (("version", chosen.versions), ("environment", chosen.envs), ("evaluation", chosen.evaluations))
    wanted = [f"{what} {', '.join(map(str, values))}" for what, values in named if values is not None]
    stored = [f"version {version} of {env}" for version, env in con.execute(_STORED).fetchall()]
    more = f" and {len(stored) - _MOST_NAMED} more" if len(stored) > _MOST_NAMED else ""
    return (
        f"{root.url} has no evaluation{' of ' if wanted else ''}{' and '.join(wanted)}; it has "
        f"{', '.join(stored[:_MOST_NAMED]) or 'none'}{more}; `ludic eval {root.url}` samples one"
    )
