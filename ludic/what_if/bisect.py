"""Find the first step at which a SQL predicate is true, by binary search: a run of 200 steps takes 9 looks at most.

Reads the files of the steps that it looks at. The search assumes that the predicate turns true once and stays true.
Raises QueryError for a predicate that does not run, ConfigError if no step has rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ludic.errors import ConfigError
from ludic.sql.query import Predicate
from ludic.store import Root
from ludic.what_if.step_rows import StepRows, StepTable, open_rows

_MOST_EMPTY_ENDS = 3
"""Steps without rows at the end that are passed over; a trainer plans a step ahead, and a killed one loses a second of
metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One step that the search looked at."""

    step: int
    is_true: bool | None
    """None: NULL, or no rows; the search takes either as not true."""
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisected:
    """The result of a search."""

    table: StepTable
    predicate: str
    steps: tuple[int, int]
    """First and last step of the search."""
    found: int | None
    """First step at which the predicate is true; None if it is not true of the last step."""
    before: int | None
    """Step before `found` that was looked at or follows from the search; None if `found` is the first step."""
    looks: tuple[Look, ...]


def bisect(root: Root, predicate: str, table: StepTable = "metrics") -> Bisected:
    """Return the first step at which the predicate is true of the table's rows of that step."""
    rows = open_rows(root, table)
    parsed = Predicate(predicate, table, rows.schema)
    looks: list[Look] = []

    def is_true(index: int) -> bool:
        read = rows.read(rows.steps[index], parsed.columns)
        hit = parsed.is_true_of(read) if read.num_rows else None
        looks.append(Look(step=rows.steps[index], is_true=hit, num_rows=read.num_rows))
        return bool(hit)

    last = len(rows.steps) - 1
    while not is_true(last) and not looks[-1].num_rows:
        last = _step_back(root, table, rows, last, looks)
    found = _first_true(last, is_true) if looks[-1].is_true else None
    return Bisected(
        table=table,
        predicate=predicate,
        steps=(rows.steps[0], rows.steps[last]),
        found=None if found is None else rows.steps[found],
        before=rows.steps[found - 1] if found else None,
        looks=tuple(looks),
    )


def _first_true(last: int, is_true: Callable[[int], bool]) -> int:
    """Return the first index up to `last`, which is true, in looks at about log2(last) others."""
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        if is_true(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _step_back(root: Root, table: StepTable, rows: StepRows, last: int, looks: list[Look]) -> int:
    if last == 0 or len(looks) > _MOST_EMPTY_ENDS:
        raise ConfigError(f"{root.url}: steps {rows.steps[last]} to {rows.steps[-1]} have no rows of {table}")
    return last - 1
