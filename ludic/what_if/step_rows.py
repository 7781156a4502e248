"""Rows of one step, from that step's files alone: its metrics, its ledger, the rollouts it trained on, or evaluations.

Reads metrics/, batches/, rollouts/ or evals/ with policies/. Raises ConfigError if rollouts have expired, SchemaError
if a file is broken.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import ConfigError
from ludic.schema import arrow_schema, conform, rollouts_schema
from ludic.store import Root
from ludic.store.files import RolloutFile, current_files
from ludic.store.parquet import decode, read_columns
from ludic.store.policies import read_policy
from ludic.store.tables import metrics_file_names
from ludic.what_if.steps import planned_steps, read_considered, read_step

StepTable = Literal["metrics", "rollouts", "evals", "batches"]


class StepRows(Protocol):
    """The rows of a table, step by step."""

    schema: pa.Schema
    """All columns that a step's rows have."""
    steps: list[int]
    """Steps that may have rows, in order."""

    def read(self, step: int, columns: list[str]) -> pa.Table:
        """Return columns of the rows of a step; there may be none."""


def open_rows(root: Root, table: StepTable) -> StepRows:
    """Return the rows of a table by step. Raises ConfigError if there are no steps."""
    kinds: dict[StepTable, Callable[[Root], StepRows]]
    kinds = {"metrics": _Metrics, "rollouts": _Rollouts, "evals": _Evals, "batches": _Batches}
    return kinds[table](root)


class _Metrics:
    """The trainer's row of a step, whose file is found by bisection: the files of an attempt are in order of steps."""

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
        return conform(decode(self._root.read(name), f"{self._root.url}/{name}"), "metrics")


class _Batches:
    """The ledger rows of a step: used rollouts, then dropped ones."""

    schema = arrow_schema("batches")

    def __init__(self, root: Root) -> None:
        self._root, self._planned = root, planned_steps(root)
        self.steps = list(self._planned)

    def read(self, step: int, columns: list[str]) -> pa.Table:
        return read_step(self._root, self._planned, step).select(columns)


class _Rollouts:
    """The rollouts that a step trained on."""

    def __init__(self, root: Root) -> None:
        self._root, self._planned = root, planned_steps(root)
        self.schema, self.steps = rollouts_schema(root.run.extra_columns), list(self._planned)

    def read(self, step: int, columns: list[str]) -> pa.Table:
        rows = read_step(self._root, self._planned, step)
        used = rows.filter(rows["used"])
        return (
            read_considered(self._root, used, columns) if used.num_rows else self.schema.empty_table().select(columns)
        )


class _Evals:
    """The evaluated samples of the version that a step published."""

    def __init__(self, root: Root) -> None:
        self._root, self.schema = root, rollouts_schema(root.run.extra_columns)
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
