"""Compare several runs in one table: what differs, steps, rewards at equal steps and tokens, tokens and seconds.

Reads the roots, each once (ludic.eval.run_rewards says how rewards are compared). Names and values of a run are shown
as text. Raises ConfigError for sides that are not runs, MissingRootError, QueryError if a file can't be read.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from math import inf
from os import PathLike, fspath
from os.path import commonprefix
from typing import Any

import duckdb
import numpy as np

from ludic.app.show.runs import (
    RunSummary,
    differing,
    digests_of,
    find_runs,
    group_runs,
    home_of,
    is_data,
    setting_text,
    summarise,
)
from ludic.base import NOT_ESTIMATED, Frame, Part, Sentence, number, of_total, plural
from ludic.errors import ConfigError, unknown_name
from ludic.eval import (
    FEWEST_EXAMPLES,
    FEWEST_RUNS,
    Compared,
    RunProgress,
    common_amounts,
    comparable_name,
    read_progress,
    read_rewards,
    reward_columns,
)
from ludic.records import Row
from ludic.root import RUN, Root, newest_attempt
from ludic.root.sql import Connections, RootLike, ask, figure
from ludic.root.storage import Storage

# --- Runs by name ----------------------------------------------------------------------------------------------------

_MAGIC = frozenset("*?[")


def open_runs(sides: Iterable[RootLike | Iterable[RootLike]]) -> list[Root]:
    """Open runs, each once: runs, folders of runs with all runs below, and patterns such as runs/lr*, in their order.

    A pattern may stand in any folder's name, also of a bucket; what matches is a run, or a folder with runs. Raises
    ConfigError for a pattern that no run matches, MissingRootError for a folder without runs.
    """
    opened: dict[str, Root] = {}
    for side in sides:
        for root in _open_side(side):
            opened.setdefault(root.fs.unstrip_protocol(root.path), root)
    return list(opened.values())


def _open_side(side: RootLike | Iterable[RootLike]) -> Iterable[Root]:
    if isinstance(side, str | PathLike):
        return map(Root.open, matching_runs(fspath(side)))
    if isinstance(side, Iterable):
        return open_runs(side)
    return [side if isinstance(side, Root) else side.root]


def matching_runs(location: str) -> list[str]:
    """Return the URLs of a run, of the runs below a folder, or of those that match a pattern."""
    folder, pattern = _split_pattern(location)
    if not pattern:
        return find_runs(location) or [location]  # of which Root.open says what is wrong
    runs = [url for url in find_runs(folder or ".") if _is_match(_below(url, folder), pattern)]
    if not runs:
        raise ConfigError(f"no run matches {location}; `ludic runs {folder or '.'}` lists the runs there")
    return runs


def _split_pattern(location: str) -> tuple[str, Sequence[str]]:
    """Return the folder before the first name with a wildcard, and the names from there; none without a wildcard."""
    if not _MAGIC & {*location} or Storage.connect(location).exists(RUN.template):
        return location, ()
    names = location.rstrip("/").split("/")
    first = next(index for index, name in enumerate(names) if _MAGIC & {*name})
    return "/".join(names[:first]) or ("/" if location.startswith("/") else ""), names[first:]


def _below(url: str, folder: str) -> list[str]:
    return url.removeprefix(folder).strip("/").split("/")


def _is_match(names: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(names) >= len(pattern) and all(map(fnmatchcase, names, pattern))


def check_envs(roots: Sequence[Root], connections: Connections, env: Sequence[str]) -> None:
    """Raise ConfigError for an environment of which no run has trained on rollouts, or evaluated any."""
    if not env:
        return
    query = "select env_name from batches union select env_name from eval_episodes order by env_name"
    known = dict.fromkeys(name for root in roots for (name,) in connections.to(root).sql(query).fetchall())
    for name in env:
        if name not in known:
            raise ConfigError(unknown_name("environment", name, known))


# --- What differs ----------------------------------------------------------------------------------------------------

_DIGITS = 12
"""Digits of a digest that are shown."""

Facts = Mapping[tuple[str, str], str]
"""Facts of a run as text, by kind and name."""


def find_differing(summaries: Sequence[RunSummary], facts: Mapping[str, Facts]) -> list[dict[str, Any]]:
    """Return a row for each setting and fact that is not the same in all runs that have it recorded.

    facts: of code, data and machine, by the runs' labels. A run that has recorded no fact of a kind is not compared.
    """
    rows = [
        {
            "kind": "setting",
            "name": name,
            "values": {each.label: setting_text(each, name) if name in each.settings else None for each in summaries},
        }
        for name in differing(summaries)
    ]
    for kind, name in dict.fromkeys(key for of_run in facts.values() for key in of_run):
        recorded = {label for label, of_run in facts.items() if any(each == kind for each, _ in of_run)}
        values = {label: of_run.get((kind, name)) for label, of_run in facts.items()}
        if len({values[label] for label in recorded}) > 1:
            rows.append({"kind": kind, "name": name, "values": values})
    order = {"setting": 0, "code": 1, "data": 2, "machine": 3}
    return sorted(rows, key=lambda row: order[row["kind"]])


def read_facts(con: duckdb.DuckDBPyConnection, root: Root, data: dict[str, str]) -> Facts:
    """Return what a run has recorded of its code, its data and the trainer's machine.

    data: name of each data set by its digests, to which new ones are added: equal rows have one name in all runs.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for row in ask(con, root, figure("newest_code")):
        of_data, digests = is_data(row), digests_of(row)
        name = comparable_name(row["name"])
        if of_data:
            name = data.setdefault(json.dumps(digests), name)
        for part, digest in digests.items():
            title = " ".join(filter(None, ("" if of_data else row["role"], name, part)))
            home = "" if of_data or part else home_of(row)
            text = " ".join(filter(None, (home, (digest or "unknown")[:_DIGITS])))
            found.setdefault(("data" if of_data else "code", title), []).append(text)
    return {key: " and ".join(dict.fromkeys(texts)) for key, texts in found.items()} | _machine(root)


def _machine(root: Root) -> dict[tuple[str, str], str]:
    """Return the numerics of the newest trainer, without those that are settings, and its host."""
    attempt = newest_attempt(root)
    if attempt is None:
        return {}
    facts = {name: value for name, value in (attempt.numerics or {}).items() if name not in attempt.config}
    facts["host"] = attempt.owner.rpartition("-")[0] or attempt.owner
    return {
        ("machine", name): value if isinstance(value, str) else json.dumps(value)
        for name, value in facts.items()
        if value is not None
    }


# --- The table -------------------------------------------------------------------------------------------------------

_MOST_COLUMNS = 6
"""Runs up to which each has a column of its own in the table of what differs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunComparison:
    """Runs side by side; the first one is the baseline."""

    labels: Mapping[str, str]
    """Short name of each run, by its URL."""
    differing: Sequence[Row]
    """A row for each setting, file of code, data set and fact of the machine that is not the same in all runs, with
    `kind`, `name`, and `values` by the runs' names."""
    runs: Sequence[Row]
    """A row for each run."""
    rewards: Sequence[Row]
    """A row for each run, or group of runs, at equal steps and at equal tokens."""
    evaluations: Sequence[Row]
    """With groups, a row for each evaluated environment, measure and group; else empty."""
    notes: Sequence[str]
    """What is not compared, and why."""
    by: str | None
    window: int
    confidence: float

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        names = ("differing", "runs", "rewards", "notes", "by", "window")
        grouped = {} if self.by is None else {"evaluations": self.evaluations}
        return {name: getattr(self, name) for name in names} | grouped

    def parts(self) -> Iterator[Part]:
        """What differs, the runs, and their rewards."""
        yield from self._parts_of_differing()
        keys = ("run", "state") if self.by is None else ("group", "run")
        shown = (*keys, "progress", "reward_mean", "tokens", "seconds", "tokens_per_s")
        titles = {"progress": "step", "reward_mean": "newest reward", "tokens_per_s": "tokens/s"} | self._title
        derived = {"progress": _progress, "tokens_per_s": lambda row: _rounded(row["tokens_per_s"]), **self._short}
        derived["seconds"] = lambda row: _rounded(row["seconds"])
        heading = f"Runs; {self.runs[0]['run']} is the baseline"
        yield Frame("runs", self.runs, shown, most=len(self.runs), heading=heading, titles=titles, derived=derived)
        yield from self._parts_of_rewards()
        yield from self._parts_of_evaluations()
        for note in self.notes:
            yield Sentence(note, style="dim")

    def highest(self) -> str:
        """Say which run, or group, has the highest training reward at equal steps, or that intervals overlap."""
        rows = [row for row in self.rewards if row["at"] == "step" and row["estimate"] is not None]
        if not rows:
            return "no rewards to compare"
        best, *others = sorted(rows, key=lambda row: row["estimate"], reverse=True)
        low, _ = self._bounds(best)
        step = f"up to step {best['amount']:,}"
        if all(high < low for _, high in map(self._bounds, others)):
            return f"highest reward {step}: {self._reward(best)}"
        what = "run" if self.by is None else "group of runs"
        return f"no {what} has clearly the highest reward {step}: {self._reward(best)}; {self._reward(others[0])}"

    def _bounds(self, row: Row) -> tuple[float, float]:
        """Return the interval of a mean: without limits if there are too few values, the mean if all are equal."""
        if row["low"] is not None:
            return row["low"], row["high"]
        fewest = FEWEST_EXAMPLES if self.by is None else FEWEST_RUNS
        return (-inf, inf) if row["num_values"] < fewest else (row["estimate"], row["estimate"])

    def _reward(self, row: Row) -> str:
        of = "no interval" if row["low"] is None else f"{number(row['low'], 3)} to {number(row['high'], 3)}"
        return f"{row['run' if self.by is None else 'group']}, {number(row['estimate'], 3)} ({of})"

    @property
    def _title(self) -> dict[str, str]:
        return {} if self.by is None else {"group": self.by}

    @property
    def _short(self) -> dict[str, Callable[[Row], Any]]:
        """Groups by the values of the setting, which is their column's title."""
        return {} if self.by is None else {"group": lambda row: (row["group"] or "-").removeprefix(f"{self.by}=")}

    def _parts_of_differing(self) -> Iterator[Part]:
        if not self.differing:
            yield "the runs have recorded no difference of settings, code, data or machine"
            return
        labels = list(self.labels.values())
        columns = {f"value {index}": label for index, label in enumerate(labels)}
        derived: dict[str, Any] = {name: partial(_value_of, label) for name, label in columns.items()}
        if len(labels) > _MOST_COLUMNS:
            columns, derived = {"runs by value": "runs by value"}, {"runs by value": _by_value}
        shown, most = ("kind", "name", *columns), len(self.differing)
        heading = "What differs"
        yield Frame("differing", self.differing, shown, most, heading=heading, titles=columns, derived=derived)

    def _parts_of_rewards(self) -> Iterator[Part]:
        of = f"Training reward, last {plural(self.window, 'step')} up to"
        unit = f"; intervals over {'groups' if self.by is None else 'runs'}"
        steps, tokens = ([row for row in self.rewards if row["at"] == at] for at in ("step", "tokens"))
        if not steps:
            return
        at_tokens = plural(tokens[0]["amount"], "trained token") if tokens else ""
        is_same = [_without_amount(row) for row in steps] == [_without_amount(row) for row in tokens]
        both = f", which all reach with {at_tokens}" if is_same else ""
        yield self._frame("at_equal_steps", steps, f"{of} step {steps[0]['amount']:,}{both}{unit}")
        if tokens and not is_same:
            yield self._frame("at_equal_tokens", tokens, f"{of} {at_tokens}{unit}", ("steps",))
        if self.by is None and any(row["low"] is not None for row in self.rewards):
            yield Sentence(
                "each interval is over the groups of one run, and says nothing about other seeds", style="dim"
            )

    def _parts_of_evaluations(self) -> Iterator[Part]:
        if self.evaluations:
            keys = varying(self.evaluations, ("env_name", "measure"))
            of = " ".join(str(self.evaluations[0][name]) for name in ("measure", "env_name") if name not in keys)
            heading = f"Evaluation at each run's newest evaluated version{of and f', {of}'}; intervals over runs"
            yield self._frame("evaluations", self.evaluations, heading, before=keys)

    def _frame(
        self, name: str, rows: Sequence[Row], heading: str, more: Sequence[str] = (), before: Sequence[str] = ()
    ) -> Frame:
        """Return a table of means with intervals, and their differences from the baseline's."""
        of = f"{100 * self.confidence:g}% interval"
        fewest, unit = (FEWEST_EXAMPLES, "groups") if self.by is None else (FEWEST_RUNS, "runs")
        keys = ("run",) if self.by is None else ("group", "num_runs")
        return Frame(
            name,
            rows,
            (*before, *keys, "estimate", "interval", "difference", "of_difference", *more),
            most=len(rows),
            heading=heading,
            titles={"estimate": "mean", "interval": of, "of_difference": of, "difference": "diff."} | self._title,
            derived={
                **self._short,
                "interval": partial(_interval, "estimate", "low", "high", fewest, unit),
                "of_difference": partial(_interval, "difference", "difference_low", "difference_high", fewest, unit),
                **({"steps": _steps} if more else {}),
            },
        )


def varying(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Return the columns, of these, in which rows differ."""
    return [name for name in names if len({row[name] for row in rows}) > 1]


_MOST_IN_COMMON = 30
"""Characters with which all values of a setting may begin; longer beginnings are left out, or a cell would end
before the difference."""


def _value_of(label: str, row: Row) -> str:
    value = row["values"][label]
    known = [each for each in row["values"].values() if each is not None]
    common = len(commonprefix(known))  # noqa: RUF071 - of texts, which are no paths
    return (
        "-" if value is None else value if common <= _MOST_IN_COMMON else f"…{value[common - _MOST_IN_COMMON // 2 :]}"
    )


def _by_value(row: Row) -> str:
    """Return the runs that have each value, in one text."""
    found: dict[str, list[str]] = {}
    for label in row["values"]:
        found.setdefault(_value_of(label, row), []).append(label)
    return "; ".join(f"{value} ({', '.join(labels)})" for value, labels in found.items())


def _progress(row: Row) -> str:
    return of_total(row["step"], row["num_steps"])


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _without_amount(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in ("at", "amount")}


def _steps(row: Row) -> str | None:
    return None if row["last_step"] is None else f"{row['first_step']} to {row['last_step']}"


def _interval(estimate: str, low: str, high: str, fewest: int, unit: str, row: Row) -> str | None:
    """Return the interval of a row, or the reason why there is none; None without an estimate."""
    if row[low] is not None:
        return f"{number(row[low], 3)} to {number(row[high], 3)}"
    if row[estimate] is None:
        return None
    return f"too few {unit} ({row['num_values']})" if row["num_values"] < fewest else NOT_ESTIMATED


# --- Reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """Runs to compare, with what was read of each; the first one is the baseline."""

    summaries: Sequence[RunSummary]
    roots: Mapping[str, Root]
    """By the runs' labels, as below."""
    progress: Mapping[str, RunProgress]
    differing: Sequence[Row]
    groups: Mapping[str, Sequence[str]]
    """Labels of the runs of each group, the baseline's first; without groups each run is one."""
    notes: Sequence[str]
    by: str | None

    @classmethod
    def read(cls, roots: Sequence[Root], connections: Connections, by: str | None) -> "Runs":
        """Read runs. Raises ConfigError for fewer than two, one that can't be read, or an unknown setting."""
        if len(roots) < 2:
            raise ConfigError(f"there is nothing to compare {roots[0].url} with; name two or more runs")
        summaries = summarise([root.url for root in roots])
        if problems := [f"{each.url}: {each.problem}" for each in summaries if each.state == "unreadable"]:
            raise ConfigError(f"a run can't be read: {'; '.join(problems)}")
        named = {each.label: root for each, root in zip(summaries, roots, strict=True)}
        data: dict[str, str] = {}
        facts = {label: read_facts(connections.to(root), root, data) for label, root in named.items()}
        differences = find_differing(summaries, facts)
        groups = {label: [label] for label in named}
        notes: list[str] = []
        if by is not None:
            groups = group_runs(summaries, by)
            notes = list(_notes_of_groups(groups, by, summaries))
        return cls(
            summaries=summaries,
            roots=named,
            progress={label: read_progress(connections.to(root), root) for label, root in named.items()},
            differing=differences,
            groups=groups,
            notes=notes,
            by=by,
        )

    @property
    def labels(self) -> dict[str, str]:
        """Label of each run, by URL."""
        return {root.url: label for label, root in self.roots.items()}


def _notes_of_groups(groups: Mapping[str, Sequence[str]], by: str, summaries: Sequence[RunSummary]) -> Iterator[str]:
    """Say which runs have no group, or share the setting and no group."""
    grouped = {label for of_group in groups.values() for label in of_group}
    if alone := [each.label for each in summaries if each.label not in grouped]:
        yield f"{', '.join(alone)}: no settings are recorded, so it is in no group"
    if len(groups) > len({setting_text(each, by) for each in summaries if each.label in grouped}):
        yield f"runs of one {by} that differ in more than the seed are groups of their own"


def make_table(
    runs: Runs,
    compared: Compared,
    connections: Connections,
    *,
    window: int,
    env: Sequence[str],
    confidence: float,
) -> RunComparison:
    """Return the table of runs. compared: their evaluations."""
    return RunComparison(
        labels=runs.labels,
        differing=runs.differing,
        runs=list(_rows_of_runs(runs)),
        rewards=list(_rows_of_rewards(runs, connections, window, env, confidence)),
        evaluations=[] if runs.by is None else list(_rows_of_evaluations(runs, compared, confidence)),
        notes=[*runs.notes, *_notes_of_steps(runs), *_notes_of_evaluations(runs, compared)],
        by=runs.by,
        window=window,
        confidence=confidence,
    )


def _rows_of_runs(runs: Runs) -> Iterator[dict[str, Any]]:
    group_of = {label: name for name, labels in runs.groups.items() for label in labels}
    for each in runs.summaries:
        tokens = runs.progress[each.label].num_tokens
        yield {
            "run": each.label,
            **({} if runs.by is None else {"group": group_of.get(each.label)}),
            "url": each.url,
            "state": each.state,
            "step": each.step,
            "num_steps": each.num_steps,
            "reward_mean": each.reward,
            "tokens": tokens,
            "seconds": each.seconds,
            "tokens_per_s": tokens / each.seconds if each.seconds else None,
            "parent": each.parent,
        }


def _rows_of_rewards(
    runs: Runs, connections: Connections, window: int, env: Sequence[str], confidence: float
) -> Iterator[dict[str, Any]]:
    @cache  # equal steps are often equal tokens, too
    def values_of(label: str, steps: tuple[int, int] | None) -> np.ndarray:
        return read_rewards(connections.to(runs.roots[label]), runs.roots[label], steps, env)

    for at, amount in common_amounts(list(runs.progress.values())).items():
        windows = {label: each.window_at(at, amount, window) for label, each in runs.progress.items()}
        found = {label: values_of(label, steps) for label, steps in windows.items()}
        baseline: np.ndarray | None = None
        for group, labels in runs.groups.items():
            is_run = runs.by is None
            values = found[group] if is_run else _means([found[label] for label in labels])
            steps = {windows[label] for label in labels}
            first, last = (steps.pop() if len(steps) == 1 else None) or (None, None)
            yield {
                "at": at,
                "amount": amount,
                **({"run": group} if is_run else {"group": group, "num_runs": len(values)}),
                "first_step": first,
                "last_step": last,
                **_columns(baseline, values, confidence, is_run=is_run),
            }
            baseline = values if baseline is None else baseline


def _means(of_runs: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([values.mean() for values in of_runs if len(values)])


def _columns(baseline: np.ndarray | None, values: np.ndarray, confidence: float, *, is_run: bool) -> dict[str, Any]:
    fewest = FEWEST_EXAMPLES if is_run else FEWEST_RUNS
    return {**reward_columns(baseline, values, confidence, fewest=fewest), "num_values": len(values)}


def _rows_of_evaluations(runs: Runs, compared: Compared, confidence: float) -> Iterator[dict[str, Any]]:
    """Yield the mean over each group's runs of their estimates, on the examples that each has with the baseline."""
    labels, first = runs.labels, runs.summaries[0].label
    names = ("env_name", "measure", "k", "part")
    for key in dict.fromkeys(tuple(row[name] for name in names) for row in compared.rows):
        rows = [row for row in compared.rows if tuple(row[name] for name in names) == key]
        estimates = {first: rows[0]["estimate_a"]} | {
            labels[row["b"].rpartition("@")[0]]: row["estimate_b"] for row in rows
        }
        baseline: np.ndarray | None = None
        for group, members in runs.groups.items():
            values = np.array([estimates[label] for label in members if label in estimates])
            columns = _columns(baseline, values, confidence, is_run=False)
            yield {**dict(zip(names, key, strict=True)), "group": group, "num_runs": len(values), **columns}
            baseline = values if baseline is None else baseline


def _notes_of_steps(runs: Runs) -> Iterator[str]:
    if empty := [label for label, each in runs.progress.items() if each.last_step is None]:
        yield f"{', '.join(empty)}: no gradient step yet, so it does not limit the equal steps and tokens"
    if branches := [f"{each.label} left {each.parent}" for each in runs.summaries if each.parent]:
        yield f"branches, whose steps count from their beginning: {', '.join(branches)}"


def _notes_of_evaluations(runs: Runs, compared: Compared) -> Iterator[str]:
    """Say which runs have no evaluation in pairs, and why."""
    labels = runs.labels
    yield from (f"evaluation of {labels[url]} not compared: {reason}" for url, reason in compared.left_out.items())
