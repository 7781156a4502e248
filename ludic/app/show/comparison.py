"""Show several runs as one table: what differs, steps, rewards at equal steps and tokens, tokens and seconds.

Reads the roots through SQL (ludic.eval.run_rewards says how rewards are compared) and the records of settings, code and
machines. Names of runs, settings and files are shown as text. Raises ConfigError for runs that can't be compared.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

import duckdb
import numpy as np

from ludic.app.show.runs import RunSummary, differing, groups_by, labels_of, summarise
from ludic.base import NOT_ESTIMATED, TOO_FEW, Frame, Part, Sentence, json_text, number, plural
from ludic.errors import ConfigError
from ludic.eval import FEWEST_EXAMPLES, RunAmount, RunProgress, common_amounts, read_progress, read_reward, reward_columns
from ludic.records import Row
from ludic.root import CodeRecord, Root, comparable_name, from_dicts, is_questions, newest_attempt
from ludic.root.sql import Connections, ask, figure

_MOST_COLUMNS = 6
"""Runs up to which each has a column of its own in the table of what differs."""
_DIGITS = 12
"""Digits of a digest."""
_DIGITS_OF_MEANS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunTable:
    """Runs side by side. The baseline is the first one."""

    labels: Mapping[str, str]
    """Short name of each run, by its URL."""
    differing: Sequence[Row]
    """One row for each setting, file of code, data set and fact of the machine that is not the same in all runs, with
    `kind`, `name` and `values` by the runs' names."""
    runs: Sequence[Row]
    """One row for each run."""
    rewards: Sequence[Row]
    """One row for each of `common_amounts` and run, or group of runs."""
    evaluations: Sequence[Row]
    """With groups of runs, one row for each evaluated environment, measure and group; else empty."""
    notes: Sequence[str]
    """What is not compared, and why."""
    by: str | None
    confidence: float
    window: int

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        names = ("differing", "runs", "rewards", "notes", "by", "window")
        found = {name: getattr(self, name) for name in names}
        return found | ({"evaluations": self.evaluations} if self.by is not None else {})

    def parts(self) -> Iterator[Part]:
        """What differs, the runs, and their rewards."""
        yield from self._differing_parts()
        yield Frame(
            "runs",
            self.runs,
            (*(("group",) if self.by is not None else ()), "run", "state", "step", "tokens", "seconds", "tokens_per_s"),
            most=len(self.runs),
            heading="Runs",
            titles={"step": "steps", "tokens_per_s": "tokens/s"},
        )
        yield from self._reward_parts()
        for note in self.notes:
            yield Sentence(note, style="dim")

    def _differing_parts(self) -> Iterator[Part]:
        labels = list(self.labels.values())
        if not self.differing:
            yield "The runs differ in no setting, code, data or machine that they have recorded."
            return
        if len(labels) <= _MOST_COLUMNS:
            columns = {f"values {index}": label for index, label in enumerate(labels)}
            derived: Mapping[str, Any] = {name: partial(_value_of, label) for name, label in columns.items()}
        else:
            columns, derived = {"runs by value": "runs by value"}, {"runs by value": _by_value}
        yield Frame(
            "differing",
            self.differing,
            ("kind", "name", *columns),
            most=len(self.differing),
            heading="What differs",
            titles=columns,
            derived=derived,
        )

    def _reward_parts(self) -> Iterator[Part]:
        of = f"{100 * self.confidence:g}% interval"
        titles = {"estimate": "reward", "interval": of, "difference": "diff.", "interval_of_difference": of}
        intervals = {"interval": ("low", "high"), "interval_of_difference": ("difference_low", "difference_high")}
        derived: Mapping[str, Any] = {name: partial(_interval, *ends) for name, ends in intervals.items()}
        unit = "groups of rollouts" if self.by is None else "runs"
        keys = ("run",) if self.by is None else ("group", "num_runs")
        shown = (*keys, "estimate", "interval", "difference", "interval_of_difference")
        for at, title in (("step", "steps"), ("tokens", "trained tokens")):
            rows = [row for row in self.rewards if row["at"] == at]
            if rows:
                amount = f"step {rows[0]['amount']}" if at == "step" else plural(rows[0]["amount"], "token")
                heading = f"Training reward at equal {title}: the last {plural(self.window, 'step')} up to {amount}"
                more = ("steps",) if at == "tokens" and self.by is None else ()
                steps = {"steps": lambda row: "-" if row["last_step"] is None else f"{row['first_step']}-{row['last_step']}"}
                yield Frame(
                    f"rewards at equal {at if at == 'tokens' else 'steps'}",
                    rows,
                    (*shown, *more),
                    most=len(rows),
                    heading=f"{heading}; intervals over {unit}",
                    titles=titles,
                    derived={**derived, **steps},
                )


def _value_of(label: str, row: Row) -> str:
    value = row["values"][label]
    return "-" if value is None else value


def _by_value(row: Row) -> str:
    """Return the runs that have each value, in one text."""
    found: dict[str, list[str]] = {}
    for label in row["values"]:
        found.setdefault(_value_of(label, row), []).append(label)
    return "; ".join(f"{value} ({', '.join(labels)})" for value, labels in found.items())


def _interval(low: str, high: str, row: Row) -> str | None:
    if row[low] is not None:
        return f"{number(row[low], _DIGITS_OF_MEANS)} to {number(row[high], _DIGITS_OF_MEANS)}"
    ...
