"""Compute what `ludic eval` prints from stored samples: each measure with its interval, by version and environment.

Reads evals/ and evaluations/ through SQL; samples nothing. Raises QueryError for a measure that fails, ConfigError if
nothing is stored or an interval does not fit a measure.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import ConfigError, QueryError
from ludic.eval import statistics
from ludic.eval.config import IntervalMethod, MeasureConfig, parse_versions
from ludic.root import Root, other_trainer_of
from ludic.root.sql import (
    MEASURE_KEYS,
    Connections,
    SqlText,
    ask,
    ask_table,
    check_measure_parameters,
    explain,
    figure,
    load_measure,
    run_measure,
)

if TYPE_CHECKING:
    import polars as pl

# --- Stored samples, chosen by version, environment and evaluation -------------------------------------

_STORED = "select distinct policy_version, env_name from main.eval_episodes order by all"
_MOST_NAMED = 8
_table_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Choice of stored samples to measure; None is all."""

    versions: Sequence[int] | None = None
    envs: Sequence[str] | None = None
    evaluations: Sequence[str | None] | None = None
    """Ids of evaluations; None among them means rows that `ludic eval` did not sample and that were not imported."""


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
        table = f"chosen_{next(_table_numbers)}"
        ids = None if chosen.evaluations is None else [name or "" for name in chosen.evaluations]
        lists = {"versions": chosen.versions, "envs": chosen.envs, "evaluations": ids}
        params = {name: None if value is None else list(value) for name, value in lists.items()}
        try:
            con.execute(f"create temp table {table} as\n{figure('chosen_samples')}", params)
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
        """Return a measure's values added up by example; see ludic.root.sql.library.run_measure."""
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
    """Return an error message: the wanted samples are not stored; it lists the stored ones."""
    named = (("version", chosen.versions), ("environment", chosen.envs), ("evaluation", chosen.evaluations))
    wanted = [f"{what} {', '.join(map(str, values))}" for what, values in named if values is not None]
    stored = [f"version {version} of {env}" for version, env in con.execute(_STORED).fetchall()]
    if not stored:
        return f"{root.url} has no evaluation; {_how_to_get_one(root)}"
    more = f" and {len(stored) - _MOST_NAMED} more" if len(stored) > _MOST_NAMED else ""
    return (
        f"{root.url} has no evaluation{' of ' if wanted else ''}{' and '.join(wanted)}; it has "
        f"{', '.join(stored[:_MOST_NAMED])}{more}; {_how_to_get_one(root)}"
    )


def _how_to_get_one(root: Root) -> str:
    other = other_trainer_of(root)
    if other is not None:  # ludic has no weights to sample with
        return f"record those of {other.name}, as rows of purpose eval"
    return f"`ludic eval {root.url}` samples one"


# --- Numbers: means over examples ----------------------------------------------------------------------

_METHODS: Mapping[IntervalMethod, Callable[..., statistics.Interval]] = {
    "korn_graubard": statistics.korn_graubard,
    "clustered": statistics.clustered,
}


def numbers(
    root: Root,
    config: MeasureConfig,
    chosen: Chosen,
    interval: IntervalMethod = "korn_graubard",
    con: duckdb.DuckDBPyConnection | None = None,
) -> "Numbers":
    """Return the numbers of the chosen samples. con: a connection to the root to use. Raises ConfigError for none."""
    with ExitStack() as stack:
        con = stack.enter_context(Connections()).to(root) if con is None else con
        return _numbers(con, root, config, chosen, interval)


def numbers_of_entries(
    root: Root, entries: Mapping[str, tuple[MeasureConfig, Chosen]], interval: IntervalMethod = "korn_graubard"
) -> "Numbers":
    """Return the numbers of several choices of samples, with a column `entry` that names the choice."""
    with Connections() as connections:
        con = connections.to(root)
        found = {name: _numbers(con, root, *entry, interval) for name, entry in entries.items()}
    counts = [
        part.counts.add_column(0, "entry", pa.array([name] * part.counts.num_rows, pa.string()))
        for name, part in found.items()
    ]
    rows = [{"entry": name, **row} for name, part in found.items() for row in part.rows]
    return Numbers(counts=pa.concat_tables(counts), rows=rows)


def _numbers(
    con: duckdb.DuckDBPyConnection, root: Root, config: MeasureConfig, chosen: Chosen, interval: IntervalMethod
) -> "Numbers":
    samples = Samples.choose(root, con, chosen)
    counts = samples.ask(figure("counts_of_samples"))
    if not counts.num_rows:
        raise ConfigError(nothing_stored(con, root, chosen))
    (fewest,) = [0] if config.measures else samples.ask(figure("fewest_samples"))["num_samples"].to_pylist()
    measures = _chosen_measures(config, fewest)
    check_measure_parameters([measure for measure, _ in measures], config.params)
    rows = [row for measure, defaults in measures for row in _rows(samples, measure, defaults, interval, config)]
    return Numbers(counts=counts, rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Numbers:
    """Counts of samples, and measures with intervals."""

    counts: pa.Table
    """One row for each evaluation, version and environment."""
    rows: Sequence[Mapping[str, Any]]
    """One row for each evaluation, version, environment, measure and part."""

    def frame(self) -> "pl.DataFrame":
        """Return the rows as a DataFrame."""
        import polars as pl

        first = ["entry"] if "entry" in self.counts.column_names else []
        texts = ["entry", "evaluation", "env_name", "measure", "part", "interval"]
        integers = ["policy_version", "k", "num_examples", "num_values", "num_missing"]
        floats = ["estimate", "std_error", "low", "high"]
        kinds: dict[str, Any] = {**dict.fromkeys(texts, pl.String), **dict.fromkeys(integers, pl.Int64)}
        kinds |= dict.fromkeys(floats, pl.Float64)
        order = [
            *first,
            "evaluation",
            "policy_version",
            "env_name",
            "measure",
            "k",
            "part",
            *floats,
            "interval",
            *integers[2:],
        ]
        return pl.DataFrame(list(self.rows), schema={name: kinds[name] for name in order})


def check_measures(config: MeasureConfig, n: int) -> None:
    """Raise QueryError or ConfigError for a measure or a parameter that can't be used. n: samples of an example."""
    measures = _chosen_measures(config, n)
    check_measure_parameters([measure for measure, _ in measures], config.params)
    for measure, defaults in measures:
        measure.bind({**defaults, **config.params})


def try_measures(root: Root, config: MeasureConfig, n: int) -> None:
    """Run measures over an empty table, before sampling. Raises as `check_measures` does, and QueryError for bad
    SQL."""
    check_measures(config, n)
    with Connections() as connections:
        for measure, defaults in _chosen_measures(config, n):
            params = {**defaults, **config.params}
            run_measure(connections.to(root), measure, params, over="select * from main.eval_episodes limit 0")


def _chosen_measures(config: MeasureConfig, fewest: int) -> list[tuple[SqlText, Mapping[str, Any]]]:
    """Return the measures of the settings, or the usual ones, each with defaults of its parameters.

    fewest: samples of an example.
    """
    if config.measures:
        return _load(*config.measures)
    at_k: list[tuple[SqlText, Mapping[str, Any]]] = [
        (load_measure(name), {"k": fewest}) for name in ("pass_at_k", "pass_hat_k") if fewest > 1
    ]
    return [*_load("mean_reward", "success_rate"), *at_k, *_load("response_length", "unscored")]


def _load(*names: str) -> list[tuple[SqlText, Mapping[str, Any]]]:
    return [(load_measure(name), {}) for name in names]


def _rows(
    samples: Samples, measure: SqlText, defaults: Mapping[str, Any], interval: IntervalMethod, config: MeasureConfig
) -> Iterator[dict[str, Any]]:
    """Yield a row for each part of a measure; an interval for shares is replaced for other measures."""
    params = measure.bind({**defaults, **config.params})
    for keys, part in parts(samples.measure(measure, params)):
        method: IntervalMethod = interval if part.is_share else "clustered"
        trials = {"trials": part.trials} if method == "korn_graubard" else {}
        found = _METHODS[method](part.means, config.confidence, **trials)
        if part.is_share:
            found = found.within(0, 1)
        yield {
            **keys,
            "measure": measure.name,
            "k": params.get("k"),
            "interval": method,
            "estimate": found.estimate,
            "std_error": found.std_error,
            "low": found.low,
            "high": found.high,
            "num_examples": len(part.means),
            "num_values": part.num_values,
            "num_missing": part.num_missing,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasurePart:
    """Values of a part of a measure, by example. G = examples that have a value."""

    example_ids: Sequence[str]
    """(G,) ids of the examples"""
    means: np.ndarray
    """(G,) float64, mean of an example's values; examples count alike, however many values they have."""
    num_values: int
    num_missing: int
    trials: np.ndarray | None
    """(G,) independent trials of an example's share; None for a measure that is not a share, or has no value."""
    is_binary: bool
    """True if each example has one value, 0 or 1."""

    @property
    def is_share(self) -> bool:
        """True if there are trials, and all means lie between 0 and 1."""
        return self.trials is not None and bool(np.all((self.means >= 0) & (self.means <= 1)))


def parts(table: pa.Table) -> Iterator[tuple[dict[str, Any], MeasurePart]]:
    """Yield keys and values of each part of a measure's table (ludic.root.sql.library.run_measure)."""
    keys = list(zip(*(table[name].to_pylist() for name in MEASURE_KEYS), strict=True))
    starts = [index for index in range(len(keys)) if index == 0 or keys[index] != keys[index - 1]]
    for start, end in zip(starts, [*starts[1:], len(keys)], strict=True):
        rows = table.slice(start, end - start)
        scored = rows.filter(pc.greater(rows["num_values"], 0))
        has_trials = scored.num_rows > 0 and scored["num_trials"].null_count == 0
        counts, totals = scored["num_values"].to_numpy(), scored["total"].to_numpy()
        means = totals / counts
        yield (
            dict(zip(MEASURE_KEYS, keys[start], strict=True)),
            MeasurePart(
                example_ids=scored["env_example_id"].to_pylist(),
                means=means,
                num_values=int(counts.sum()),
                num_missing=pc.sum(rows["num_missing"]).as_py(),
                trials=np.maximum(scored["num_trials"].to_numpy(), 1) if has_trials else None,
                is_binary=bool(np.all(counts == 1) and np.all(np.isin(means, (0, 1)))),
            ),
        )
