"""Show the numbers of evaluations, of a comparison in pairs, and of contamination by trained texts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ludic.app.show.comparison import RunComparison, Runs, check_envs, make_table, varying
from ludic.base import NOT_ESTIMATED, TOO_FEW, Frame, Part, Result, Sentence, number, plural, to_frame
from ludic.eval import (
    DIFFERENCE,
    ESTIMAND,
    FEWEST_EXAMPLES,
    FEWEST_FOR_POWER,
    WINDOW,
    Chosen,
    Compared,
    IntervalMethod,
    MeasureConfig,
    Numbers,
    Overlaps,
    compare_runs,
    numbers,
)
from ludic.root import Root
from ludic.root.sql import Connections

if TYPE_CHECKING:
    import polars as pl

_DIGITS = 4
_MOST_OVERLAPS = 20
"""Maximum number of examples with overlap that are shown."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Evaluation(Result):
    """Numbers of stored evaluations. Prints well; the tables are Polars DataFrames."""

    url: str
    """Root of the run."""
    numbers: Numbers
    confidence: float

    @cached_property
    def samples(self) -> "pl.DataFrame":
        """Counts of examples, samples, failures and tokens, by evaluation, version and environment."""
        import polars as pl

        frame = pl.from_arrow(self.numbers.counts)
        assert isinstance(frame, pl.DataFrame)
        return frame

    @cached_property
    def measures(self) -> "pl.DataFrame":
        """Each measure with its interval, by evaluation, version, environment and part."""
        return self.numbers.frame()

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain values, as `ludic eval --json` prints them."""
        samples, measures = self.numbers.counts.to_pylist(), list(self.numbers.rows)
        facts = {"root": self.url, "estimand": ESTIMAND, "confidence": self.confidence}
        return {**facts, "samples": samples, "measures": measures}

    def parts(self) -> Iterator[Part]:
        """A table of samples, then one of measures."""
        counts = self.numbers.counts.to_pylist()
        has_several = len({row["evaluation"] for row in counts}) > 1
        keys = ["policy_version", "env_name", *(["evaluation"] if has_several else [])]
        of_entries = "entry" in self.numbers.counts.column_names
        if of_entries:
            keys = ["entry", "policy_version"]
        figures = ("num_examples", "num_samples", "num_unscored", "num_failed", "num_sampled_tokens")
        yield Frame("samples", counts, (*keys, *figures), most=len(counts))
        rows = list(self.numbers.rows)
        if not of_entries:
            rows.sort(key=lambda row: (row["policy_version"], row["env_name"]))
        yield Frame(
            "measures",
            rows,
            (*keys, "measure", "estimate", "interval", "std_error", "num_missing"),
            most=len(rows),
            titles={"estimate": "mean over examples", "interval": f"{100 * self.confidence:g}% interval"},
            derived={
                "measure": measure_title,
                "interval": interval_text,
                "num_missing": lambda row: row["num_missing"] or None,
            },
        )


def measure_stored(
    root: Root, measure: MeasureConfig, chosen: Chosen, interval: IntervalMethod = "korn_graubard"
) -> Evaluation:
    """Measure the chosen stored samples. Raises ConfigError if there are none, QueryError."""
    found = numbers(root, measure, chosen, interval)
    return Evaluation(url=root.url, numbers=found, confidence=measure.confidence)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Comparison(Result):
    """Differences from a baseline on the same examples. Prints well; the tables are Polars DataFrames."""

    compared: Compared
    difference: float
    """The difference to detect."""
    confidence: float
    runs: RunComparison | None = None
    """The table of whole runs; None for a comparison of versions."""
    page: str | None = None
    """File of the report of the runs; None if none was written."""

    @cached_property
    def differences(self) -> "pl.DataFrame":
        """Each difference with its interval, p-values and power, by side, environment, measure and part."""
        return to_frame(self.compared.rows)

    @cached_property
    def examples(self) -> "pl.DataFrame":
        """The means of both sides for each example, and their difference: gains and losses."""
        return to_frame(self.compared.examples)

    @property
    def warnings(self) -> list[str]:
        """Properties that should be equal on both sides and are not."""
        return list(self.compared.warnings)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain values, as `ludic compare --json` prints them."""
        return {
            "estimand": ESTIMAND,
            "confidence": self.confidence,
            "difference_of_interest": self.difference,
            "differences": list(self.compared.rows),
            "warnings": self.warnings,
            **({} if self.runs is None else self.runs.to_dict() | {"page": self.page}),
        }

    def parts(self) -> Iterator[Part]:
        """The table of runs, if it compares runs; a table of differences, their limits, and warnings."""
        if self.runs is not None:
            yield from self.runs.parts()
        if self.compared.rows:
            yield from self._parts_of_differences()
        for warning in self.warnings:
            yield Sentence(warning, mark="warning ", style="yellow")
        if self.page is not None:
            yield f"the report of these runs is in {self.page}"

    def _parts_of_differences(self) -> Iterator[Part]:
        rows = [{**row, "title": measure_title(row)} for row in self.compared.rows]
        names = ("env_name", "title") if self.runs is None else tuple(varying(rows, ("env_name", "title")))
        of = "".join(f"{rows[0][name]}, " for name in ("title", "env_name") if name not in names)
        baseline = rows[0]["a"] if self.runs is None else self.runs.runs[0]["run"]
        yield f"{of}baseline {baseline}, paired on the same examples; means are over these examples"
        yield Frame(
            "differences",
            self.compared.rows,
            ("side", *names, "estimate_a", "estimate_b", "difference", "interval", "p_value", "p_holm"),
            most=len(rows),
            titles={"interval": f"{100 * self.confidence:g}% interval", "title": "measure"},
            derived={"side": self._side, "title": measure_title, "interval": partial(interval_text, digits=3)},
        )
        for row in rows:
            version = "" if self.runs is None else f"@{row['b'].rpartition('@')[2]}"
            name = f"{self._side(row)}{version} {row['env_name']} {row['title']}"
            yield Sentence(f"{name}: {', '.join(facts_of(row, self.difference))}", style="dim")

    def _side(self, row: Mapping[str, Any]) -> str:
        """Return the name of a side: a run's short name in a table of runs."""
        return side_name(row) if self.runs is None else self.runs.labels[row["b"].rpartition("@")[0]]


def compare_whole_runs(
    roots: Sequence[Root],
    connections: Connections,
    config: MeasureConfig,
    *,
    by: str | None = None,
    window: int = WINDOW,
    env: Sequence[str] = (),
    **of_evaluations: Any,
) -> tuple[Runs, Comparison]:
    """Compare runs in one table, and their newest evaluations in pairs; also return what was read of the runs.

    of_evaluations: difference, seed and evaluation of `ludic.eval.compare_runs`. Raises as `Runs.read` does.
    """
    check_envs(roots, connections, env)
    runs = Runs.read(roots, connections, by)
    compared = compare_runs(roots, config, connections, env=env, **of_evaluations)
    table = make_table(runs, compared, connections, window=window, env=env, confidence=config.confidence)
    difference = of_evaluations.get("difference", DIFFERENCE)
    return runs, Comparison(compared=compared, difference=difference, confidence=config.confidence, runs=table)


def side_name(row: Mapping[str, Any]) -> str:
    """Return the name of a side; of the baseline's root its version alone."""
    url, _, version = row["b"].rpartition("@")
    return f"@{version}" if row["a"].rpartition("@")[0] == url else row["b"]


def measure_title(row: Mapping[str, Any]) -> str:
    """Return the name of a row's measure, with its part and k."""
    k = "" if row["k"] is None else f", k = {row['k']}"
    return f"{row['measure']}{'' if row['part'] is None else ' ' + row['part']}{k}"


def interval_text(row: Mapping[str, Any], digits: int = _DIGITS) -> str:
    """Return the interval of a row, or the reason why there is none."""
    if row["low"] is not None:
        return f"{number(row['low'], digits)} to {number(row['high'], digits)}"
    few = 0 < row["num_examples"] < FEWEST_EXAMPLES
    return f"{TOO_FEW} ({row['num_examples']})" if few else NOT_ESTIMATED


def interval_phrase(row: Mapping[str, Any], digits: int = _DIGITS) -> str:
    """Return the 95% interval of a row as a part of a sentence, or the reason why there is none."""
    text = interval_text(row, digits)
    return f"no 95% interval: {text}" if row["low"] is None else f"95% interval {text}"


def facts_of(row: Mapping[str, Any], difference: float) -> Iterator[str]:
    """Yield the facts about a difference: pairs and test, power, what was left out."""
    mid = "" if row["p_mid"] is None else f" (mid-p {number(row['p_mid'], 2)}, {number(row['p_mid_holm'], 2)} by Holm)"
    test = {"mcnemar": f"McNemar's exact test{mid}", "permutation": "permutation test"}[row["test"]]
    changes = f"{row['num_gains']:,} up and {row['num_losses']:,} down"
    yield f"{plural(row['num_examples'], 'pair')}, {changes}, {test}"
    reason = TOO_FEW if row["num_examples"] < FEWEST_FOR_POWER else NOT_ESTIMATED
    power = reason if row["power"] is None else f"{row['power']:.0%}"
    needed = row["examples_needed"]
    enough = "" if needed is None else f"; 80% needs about {plural(needed, 'example')}"
    yield f"power for a difference of {number(difference)}: {power}{enough}"
    if row["num_only_a"] or row["num_only_b"]:
        yield f"examples of one side only: {row['num_only_a']:,} of the baseline, {row['num_only_b']:,} of this one"
    if row["num_missing_a"] or row["num_missing_b"]:
        yield f"values left out: {row['num_missing_a']:,} of the baseline, {row['num_missing_b']:,} of this one"


# --- Contamination ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Contamination(Result):
    """Overlaps of evaluated prompts with trained texts. Prints well; the tables are Polars DataFrames."""

    overlaps: Overlaps

    @cached_property
    def examples(self) -> "pl.DataFrame":
        """N-grams of each example, those that were trained on, and the rollout that has most of them; most first."""
        import polars as pl

        frame = pl.from_arrow(self.overlaps.examples)
        assert isinstance(frame, pl.DataFrame)
        return frame

    @cached_property
    def total(self) -> "pl.DataFrame":
        """Examples and n-grams of each environment, and the share of n-grams that were trained on."""
        import polars as pl

        found = pl.col("num_found")
        sums = pl.col("num_ngrams").sum(), found.sum(), (found.sum() / pl.col("num_ngrams").sum()).alias("share")
        counts = (
            pl.len().cast(pl.Int64).alias("num_examples"),
            (found > 0).sum().cast(pl.Int64).alias("num_overlapping"),
        )
        return self.examples.group_by("env_name").agg(*counts, *sums).sort("env_name")

    @property
    def num_trained(self) -> int:
        """Rollouts that gradient steps used."""
        return self.overlaps.num_trained

    @property
    def num_absent(self) -> int:
        """Those without text in these roots, which were not compared."""
        return self.overlaps.num_absent

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain values, as `ludic contamination --json` prints them."""
        counts = {"num_trained": self.num_trained, "num_absent": self.num_absent}
        return {**counts, "total": self.total.to_dicts(), "examples": self.examples.to_dicts()}

    def parts(self) -> Iterator[Part]:
        """The total of each environment, then the examples with the most overlap."""
        columns = ("env_name", "num_examples", "num_overlapping", "num_ngrams", "num_found", "share")
        titles = {"num_overlapping": "with overlap", "num_ngrams": "n-grams", "num_found": "trained on"}
        yield Frame("total", self.total.to_dicts(), columns, titles=titles)
        rows = [row for row in self.examples.to_dicts() if row["num_found"]]
        if rows:
            titles |= {"env_example_id": "example", "rollout_id": "most with rollout", "num_shared": "of them"}
            shown = ("env_example_id", "num_ngrams", "num_found", "rollout_id", "num_shared")
            yield Frame("examples", rows, shown, most=_MOST_OVERLAPS, titles=titles)
        if self.num_absent:
            said = f"{self.num_absent:,} of {self.num_trained:,} trained rollouts are not stored here, so not compared"
            yield Sentence(said, mark="warning ", style="yellow")
