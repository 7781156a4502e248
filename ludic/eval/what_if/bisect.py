"""Find the step at which a SQL predicate turns true, by binary search: at most 9 checks in a run of 200 steps.

Reads only the files of the steps that it checks: metrics/, batches/, rollouts/, or evals/ with policies/. The search
assumes that the predicate turns true once and stays true; else it finds one of the steps at which it turns true. Raises
QueryError for a predicate that does not run, ConfigError if no step has rows or rollouts have expired, SchemaError if a
file is broken.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import ConfigError
from ludic.eval.what_if.rerun import planned_steps, read_considered, read_step
from ludic.records import arrow_schema, conform, rollouts_schema, shown_names
from ludic.root import Root
from ludic.root.rows import RolloutFile, current_files, decode, metrics_file_names, read_columns
from ludic.root.sql import Predicate
from ludic.root.weights import read_policy

StepTable = Literal["metrics", "rollouts", "evals", "batches"]

_MOST_EMPTY_ENDS = 3
"""Maximum steps without rows at the end that are skipped; a trainer plans a step ahead, and a killed one loses a second
of metrics."""


class StepRows(Protocol):
    """The rows of a table, step by step."""

    schema: pa.Schema
    """All columns that a step's rows have."""
    steps: list[int]
    """Steps that may have rows, in order."""

    def read(self, step: int, columns: list[str]) -> pa.Table:
        """Return columns of the rows of a step; there may be none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One step that the search checked."""

    step: int
    is_true: bool | None
    """Result of the predicate; None for NULL or no rows, which the search treats as not true."""
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisected:
    """The result of a search."""

    table: StepTable
    predicate: str
    steps: tuple[int, int]
    """First and last step of the search."""
    found: int | None
    """Step at which the predicate turns true; None if it is not true of the last step."""
    before: int | None
    """Step before `found` that was looked at or follows from the search; None if `found` is the first step."""
    probes: tuple[Probe, ...]


def bisect(root: Root, predicate: str, table: StepTable = "metrics") -> Bisected:
    """Return the step at which the predicate turns true of the table's rows of that step: see the module."""
    rows = open_rows(root, table)
    parsed = Predicate(predicate, table, rows.schema)
    probes: list[Probe] = []

    def is_true(index: int) -> bool:
        read = rows.read(rows.steps[index], parsed.columns)
        hit = parsed.is_true_of(read) if read.num_rows else None
        probes.append(Probe(step=rows.steps[index], is_true=hit, num_rows=read.num_rows))
        return bool(hit)

    last = len(rows.steps) - 1
    while not is_true(last) and not probes[-1].num_rows:
        last = _step_back(root, table, rows, last, probes)
    found = _first_true(last, is_true) if probes[-1].is_true else None
    return Bisected(
        table=table,
        predicate=predicate,
        steps=(rows.steps[0], rows.steps[last]),
        found=None if found is None else rows.steps[found],
        before=rows.steps[found - 1] if found else None,
        probes=tuple(probes),
    )


def _first_true(last: int, is_true: Callable[[int], bool]) -> int:
    """Return the first true index up to `last`, which is true, after about log2(last) checks of others."""
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        if is_true(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _step_back(root: Root, table: StepTable, rows: StepRows, last: int, probes: list[Probe]) -> int:
    if last == 0 or len(probes) > _MOST_EMPTY_ENDS:
        raise ConfigError(f"{root.url}: steps {rows.steps[last]} to {rows.steps[-1]} have no rows of {table}")
    return last - 1


# --- Rows of one step, from that step's files alone ----------------------------------------------------


def open_rows(root: Root, table: StepTable) -> StepRows:
    """Return the rows of a table by step. Raises ConfigError if there are no steps."""
    kinds: dict[StepTable, Callable[[Root], StepRows]]
    kinds = {"metrics": _Metrics, "rollouts": _Rollouts, "evals": _Evals, "batches": _Batches}
    return kinds[table](root)


class _Metrics:
    """The trainer's row of a step; a bisection finds its file, since the files of an attempt are in order of steps."""

    schema = arrow_schema("metrics")

    def __init__(self, root: Root) -> None:
        self._root, self._attempt_of = root, planned_steps(root)
        self._names = metrics_file_names(root)
        self._read_file = lru_cache(maxsize=32)(self._load)
        self.steps = list(self._attempt_of)

    def read(self, step: int, columns: list[str]) -> pa.Table:
        names = self._names.get(f"train-{self._attempt_of[step]}", [])
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            rows = self._read_file(names[middle])
            if rows.num_rows and pc.min(rows["step"]).as_py() > step:
                high = middle
            elif rows.num_rows and pc.max(rows["step"]).as_py() >= step:
                return rows.filter(pc.equal(rows["step"], step)).select(columns)
            else:
                low = middle + 1
        return self.schema.empty_table().select(columns)

    def _load(self, name: str) -> pa.Table:
        return conform(decode(self._root.read(name), f"{self._root.url}/{name}", "metrics"), "metrics")


_LEDGER = pa.schema(
    [each.with_name(shown_names("batches").get(each.name, each.name)) for each in arrow_schema("batches")]
)


class _Batches:
    """The ledger rows of a step, used rollouts, then dropped ones; columns have the names of SQL."""

    schema = _LEDGER

    def __init__(self, root: Root) -> None:
        self._root, self._planned = root, planned_steps(root)
        self.steps = list(self._planned)

    def read(self, step: int, columns: list[str]) -> pa.Table:
        return read_step(self._root, self._planned, step).rename_columns(self.schema.names).select(columns)


class _Rollouts:
    """The rollouts that a step trained on."""

    def __init__(self, root: Root) -> None:
        self._root, self._planned = root, planned_steps(root)
        self.schema, self.steps = rollouts_schema(root.extra_columns), list(self._planned)

    def read(self, step: int, columns: list[str]) -> pa.Table:
        rows = read_step(self._root, self._planned, step)
        used = rows.filter(rows["used"])
        return (
            read_considered(self._root, used, columns) if used.num_rows else self.schema.empty_table().select(columns)
        )


class _Evals:
    """The evaluated samples of the version that a step published."""

    def __init__(self, root: Root) -> None:
        self._root, self.schema = root, rollouts_schema(root.extra_columns)
        files: dict[int, list[RolloutFile]] = {}
        for file in current_files(root, "evals"):
            policy = read_policy(root, file.version)
            if policy is not None:
                files.setdefault(policy.step, []).append(file)
        if not files:
            raise ConfigError(f"{root.url} has no evaluations; `ludic eval {root.url}` samples them")
        self._files, self.steps = files, sorted(files)

    def read(self, step: int, columns: list[str]) -> pa.Table:
        return pa.concat_tables([read_columns(self._root, file.name, columns) for file in self._files[step]])
