"""Plan the next batch from the scalars of pending rollouts: which rows are used, and why others are dropped.

Reads no files: the trainer adds rows as they arrive and writes the plan to the ledger. The SQL of
advantages and filters is the same that `ludic.connect` runs. Raises QueryError for SQL that fails, before
training where that can be seen, and ConfigError for rules that can't hold.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from string import Template
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import ConfigError, QueryError
from ludic.schema import NO_COLUMNS, SCALAR_COLUMNS, conform, rollouts_schema
from ludic.sql.connect import open_duckdb
from ludic.sql.library import (
    check_filter,
    load_advantage,
    load_filter,
    read_packaged,
    required_columns,
    run_advantage,
    run_query,
)

ALWAYS_ON = "drop_errors"
"""The filter that no rules can leave out: what failed is never trained on."""

ADDRESS = pa.schema([("file", pa.string()), ("row_group", pa.int32()), ("row", pa.int32()), ("arrival", pa.int64())])
"""Where a row was read, and when in the order of reading; `add` wants these columns as well."""

_BASELINE_ROWS = {
    "group": """
        select * from main.rollouts
        where rollout_id in (select rollout_id from considered where in_batch)
    """,
    "kept": """
        select * from main.rollouts
        where rollout_id in (select rollout_id from considered where in_batch and reason is null)
    """,
}

# Not a delete: its dead rows would slow every later plan, by a quarter after 800 steps.
_FORGET_PLANNED = """
create or replace table rollouts as
select * from rollouts
where group_id not in (select group_id from considered where in_batch or not usable)
"""

_COUNT = """
select
    count(*) as num_rollouts,
    count(distinct group_id) filter (usable) as usable_groups,
    count(distinct group_id) filter (in_batch) as batch_groups
from considered
"""

_COUNT_DROPS = """
select reason, count(*)
from considered
where reason is not null
group by reason
order by reason
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """What makes a batch."""

    advantage: str = "rloo"
    """A name in ludic/sql/advantages/, or the path of a .sql file."""
    filters: tuple[str, ...] = ()
    """Names in ludic/sql/filters/, or paths of .sql files; a row is dropped by the first that hits."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Values of the $parameters of advantage and filters; $trainer_version and $now are known."""
    baseline_over: Literal["group", "kept"] = "group"
    """Rows that the advantage SQL sees: the whole groups of the batch, or what filters left of them."""
    groups_per_batch: int
    """Groups of which filters leave at least one row."""

    def __post_init__(self) -> None:
        if self.groups_per_batch < 1:
            raise ConfigError(f"groups_per_batch is {self.groups_per_batch}, wanted at least 1")
        if self.baseline_over not in ("group", "kept"):
            raise ConfigError(f"baseline_over is {self.baseline_over!r}, wanted group or kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Why there is no batch yet."""

    usable_groups: int
    wanted_groups: int
    num_pending_rollouts: int
    drops: Mapping[str, int]
    """Pending rollouts that each filter would drop."""

    def describe(self) -> str:
        """One sentence for the log."""
        waiting = f"{self.usable_groups} of {self.wanted_groups} groups are ready"
        if not self.drops:
            return waiting
        most = max(self.drops, key=lambda name: self.drops[name])
        total = sum(self.drops.values())
        return (
            f"{waiting}; filters drop {total} of {self.num_pending_rollouts} rollouts, {most} most ({self.drops[most]})"
        )


class Planner:
    """Pending rollouts, and the batches they make."""

    def __init__(self, rules: BatchRules, extra_columns: Mapping[str, str] = NO_COLUMNS) -> None:
        """extra_columns: the run's own, which SQL may use too.

        Raises QueryError for SQL that does not run, or whose parameters `rules` does not give.
        """
        self._rules = rules
        self._advantage = load_advantage(rules.advantage)
        self._filters = [load_filter(name) for name in dict.fromkeys((ALWAYS_ON, *rules.filters))]
        schema = rollouts_schema(extra_columns)
        needed = {*SCALAR_COLUMNS, *required_columns([self._advantage, *self._filters], schema.names)}
        self.columns = [name for name in schema.names if name in needed]
        """Columns of rollouts that `add` wants, besides those of ADDRESS."""
        self._schema = pa.schema([*map(schema.field, self.columns), *ADDRESS])
        predicates = ", ".join(f"coalesce((\n{text.text}\n), false)" for text in self._filters)
        self._consider_sql = Template(read_packaged("plan", "consider")).safe_substitute(predicates=predicates)
        self._ledger_sql = read_packaged("plan", "ledger")
        self._con = open_duckdb()
        # Threads cost more than they bring on a few thousand rows: 27 ms a plan on two, 17 ms on one.
        self._con.execute("set threads = 1")
        with self._registered("arrived", self._schema.empty_table()):
            self._con.execute("create table rollouts as from arrived")
        self._try_rules()

    def add(self, rows: pa.Table) -> None:
        """Whole groups that are pending from now on; columns beyond `columns` and ADDRESS are ignored."""
        with self._registered("arrived", rows.select(self._schema.names)):
            self._con.execute("insert into rollouts from arrived")

    @property
    def num_pending_groups(self) -> int:
        return self._fetch("select count(distinct group_id) from rollouts")[0][0]

    def plan(self, *, step: int, attempt_id: int, trainer_version: int, now: datetime | None = None) -> pa.Table | None:
        """The next batch, as rows of the batches table: used ones in training order, then dropped ones.

        The batch is the first groups_per_batch groups that keep a row, oldest weights first, then in the order
        of arrival; with it go all groups that lost every row. None, and nothing changes, while there are too few.
        now: what $now is to filters; the present by default. Raises QueryError when a row that would be used
        gets no finite advantage.
        """
        values = self._values(trainer_version, now)
        self._consider(values)
        _, _, batch_groups = self._fetch(_COUNT)[0]
        if batch_groups < self._rules.groups_per_batch:
            return None
        ledger = self._write_ledger(values, step=step, attempt_id=attempt_id)
        self._con.execute(_FORGET_PLANNED)
        return ledger

    def shortage(self, trainer_version: int, now: datetime | None = None) -> Shortage:
        """How far the pending groups are from a batch."""
        self._consider(self._values(trainer_version, now))
        num_rollouts, usable_groups, _ = self._fetch(_COUNT)[0]
        return Shortage(
            usable_groups=usable_groups,
            wanted_groups=self._rules.groups_per_batch,
            num_pending_rollouts=num_rollouts,
            drops=dict(self._fetch(_COUNT_DROPS)),
        )

    def _try_rules(self) -> None:
        """Run each text over no rows, so that what can't run fails before training starts."""
        values = self._values(0, None)
        for text in self._filters:
            check_filter(self._con, text, values)
        self._consider(values)
        self._estimate(values)

    def _values(self, trainer_version: int, now: datetime | None) -> dict[str, Any]:
        return {**self._rules.params, "trainer_version": trainer_version, "now": now or datetime.now(UTC)}

    def _consider(self, values: Mapping[str, Any]) -> None:
        """Judge and queue all pending rows, into the table `considered`."""
        params: dict[str, Any] = {"filter_names": [text.name for text in self._filters]}
        params["groups_per_batch"] = self._rules.groups_per_batch
        for text in self._filters:
            params |= text.bind(values)
        self._con.execute(f"create or replace temp table considered as\n{self._consider_sql}", params)

    def _estimate(self, values: Mapping[str, Any]) -> pa.Table:
        """rollout_id and advantage of the considered rows that make the baseline."""
        over = _BASELINE_ROWS[self._rules.baseline_over]
        table = run_advantage(self._con, self._advantage, self._advantage.bind(values), over=over)
        source = self._advantage.source
        if "advantage" not in table.column_names:
            raise QueryError(f"{source}: returns token_advantages; training takes one advantage a rollout so far")
        if pc.count_distinct(table["rollout_id"]).as_py() < table.num_rows:
            raise QueryError(f"{source}: returns a rollout_id more than once, wanted one row per rollout")
        return table

    def _write_ledger(self, values: Mapping[str, Any], *, step: int, attempt_id: int) -> pa.Table:
        stamps = {"step": step, "attempt_id": attempt_id, "trainer_version": values["trainer_version"]}
        with self._registered("estimated", self._estimate(values)):
            ledger = conform(run_query(self._con, self._ledger_sql, stamps), "batches")
        used = ledger.filter(ledger["used"])
        bad = used.filter(pc.invert(pc.fill_null(pc.is_finite(used["advantage"]), False)))
        if bad.num_rows:
            raise QueryError(
                f"{self._advantage.source}: {bad.num_rows} of {used.num_rows} rollouts to train on get no finite "
                f"advantage, first {bad['rollout_id'][0]}; return one for each, or drop them with a filter"
            )
        return ledger

    def _fetch(self, sql: str) -> list[tuple[Any, ...]]:
        return self._con.execute(sql).fetchall()

    @contextmanager
    def _registered(self, name: str, table: pa.Table) -> Iterator[None]:
        """An Arrow table that SQL sees by name for a while."""
        self._con.register(name, table)
        try:
            yield
        finally:
            self._con.unregister(name)
