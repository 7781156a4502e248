"""Plan the next batch from the scalars of pending rollouts: the rows to use, and the reason for each dropped row.

Reads no files: the trainer adds rows as they arrive and writes the plan to the ledger. The SQL of advantages and
filters also runs on `ludic.connect`. Raises QueryError if SQL fails, before training if possible, and ConfigError if
rules are invalid.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from string import Template
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from ludic.base import read_packaged
from ludic.errors import ConfigError, QueryError
from ludic.records import NO_COLUMNS, NO_LOGPROBS, SCALAR_COLUMNS, rollouts_schema
from ludic.root.sql.connection import open_duckdb, seal
from ludic.root.sql.ledger_rows import (
    FOR_LEDGER,
    ledger_rows,
    planned_groups,
    rows_to_train_on,
    whole_pairs,
    with_reason,
)
from ludic.root.sql.library import (
    check_filter,
    check_parameters,
    load_advantage,
    load_filter,
    load_selection,
    make_table,
    required_columns,
    run_advantage,
    run_query,
    run_selection,
    where_filter,
)
from ludic.root.sql.score_gate import names_missing_scorers, open_gate
from ludic.settings import ADVANTAGE, FILTER, SELECTION, CodeUse, Files

# --- Rules of a batch ----------------------------------------------------------------------------------

ALWAYS_ON = "drop_errors"
"""Filter that is always applied: failed rollouts are never trained on."""

KNOWN_PARAMS = ("trainer_version", "now", "step", "seed")
"""Parameters that SQL may use without a value in the rules."""

LossUnit = Literal["row", "pair", "episode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """Rules that make a batch of pending rollouts."""

    advantage: str = "rloo"
    """A name in ludic/root/sql/advantages/, the path of a .sql file, or path/to/file.py:function."""
    needs_logprobs: bool = True
    """True if the loss takes a ratio to the sampler; rows without stored logprobs are then dropped."""
    computes_logprobs: bool = False
    """True if training computes missing logprobs where it can. The caller of `add` gives these rows the capture
    `trainer`."""
    loss_unit: LossUnit = "row"
    """Unit that the loss averages over. pair: use rows only in the pairs that the advantage makes. episode: weights of
    rows make each trajectory count once, by the sampled tokens of all its rows."""
    filters: tuple[str, ...] = ()
    """Names in ludic/root/sql/filters/, or paths of .sql files; a row is dropped by the first filter that hits."""
    where: str | None = None
    """Predicate over a row of rollouts. A group without a row for which it is true is never pending; in other groups,
    the filter `where` drops rows for which it is not true."""
    selection: str = "fifo"
    """Order of groups: a name in ludic/root/sql/selections/, or the path of a .sql file."""
    max_uses: int = 1
    """Number of steps that may train on a group; it is pending again after each step but the last."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Values of the $parameters of advantage, filters and selection; KNOWN_PARAMS need no values."""
    seed: int = 0
    """Random seed of selections: the value of $seed, unless params hold one."""
    baseline_over: Literal["group", "kept"] = "group"
    """Rows that the advantage SQL sees: the whole groups of the batch, or their rows that filters keep."""
    groups_per_batch: int
    """Number of groups in a batch; each has at least one row that no filter drops."""
    max_seq_len: int | None = None
    """Length at which the trainer cuts sequences, recorded in the ledger. A row without a sampled token within this
    length is dropped as no_tokens."""
    scorers: tuple[str, ...] = ()
    """Scorers, SCORER or SCORER@VERSION, whose scores each rollout needs; SQL reads them from the table `scores`."""
    reward_scorer: str | None = None
    """Scorer whose value replaces episode_reward: as in `scorers`, and :VALUE if it gives several."""
    mixed_scorers: bool = False
    """Accept groups whose rows were scored by different versions of a scorer; the newest score counts."""
    wait_for_scores_s: float | None = 0.0
    """Seconds that a group waits for scores; None waits without a limit."""
    files: Files = field(default_factory=dict)
    """Contents of users' files that replace those on disk, by the paths in the names above."""

    def __post_init__(self) -> None:
        if self.groups_per_batch < 1:
            raise ConfigError(f"groups_per_batch is {self.groups_per_batch}, wanted at least 1")
        if self.max_uses < 1:
            raise ConfigError(f"max_uses is {self.max_uses}, wanted at least 1")
        if self.baseline_over not in ("group", "kept"):
            raise ConfigError(f"baseline_over is {self.baseline_over!r}, wanted group or kept")

    def uses(self, named_by_root: Collection[str] = ()) -> list[CodeUse]:
        """Return the uses of advantage, filters and selection. named_by_root: names that come from the root."""
        names = [(ADVANTAGE, self.advantage), *((FILTER, name) for name in dict.fromkeys(self.filters))]
        names.append((SELECTION, self.selection))
        return [CodeUse(role=kind.role, setting=name, named_by_root=name in named_by_root) for kind, name in names]


# --- Planner -------------------------------------------------------------------------------------------

UNTRAINABLE = "untrainable"
"""Reason for a drop: a check of the chosen rows found that the row can't be trained on; see plan/judge.sql."""

ADDED = pa.schema(
    [
        ("file", pa.string()),
        ("row_group", pa.int32()),
        ("row", pa.int32()),
        ("arrival", pa.int64()),
        ("refusal", pa.string()),
    ]
)
"""Columns that a reader adds to a row, and that `add` needs: the row's address, the order of reading, and `refusal`,
the reason why no rules may train on the row (ludic.root.rows.reader); it is null for most rows."""

_ADVANTAGE_COLUMNS = {
    "advantage": pa.float64(),
    "token_advantages": pa.list_(pa.float32()),
    "pair_id": pa.string(),
}
_WEIGHTS = pa.schema([("rollout_id", pa.string()), ("weight", pa.float64())])
_BASELINE_ROWS = {
    "group": "select * from main.rollouts where group_id in (select group_id from chosen)",
    "kept": """
        select * from main.rollouts
        where
            group_id in (select group_id from chosen)
            and rollout_id in (select rollout_id from judged where reason is null)
    """,
}

# Rows of earlier batches; a group that is used again counts with its newest use.
_HISTORY_ROWS = "select * exclude (trained_step) from main.history where group_id not in (select group_id from chosen)"
_KEEP_HISTORY = """
create or replace table history as
with trained as (
    select *, $step::bigint as trained_step from ({rows})
    union all by name
    select * from history where group_id not in (select group_id from chosen)
)

select * from trained
where episode_reward is not null
order by trained_step desc, request_index desc, rollout_id desc
limit $num_rows
"""

_PLANNED_ROWS = f"select {', '.join(FOR_LEDGER)} from rollouts"  # noqa: S608

_CREATE_ROLLOUTS = """
create table rollouts as
select
    *,
    0::integer as num_uses,
    0::bigint as num_trained_tokens,
    null::varchar as score_problem,
    null::map(varchar, varchar) as scorer_versions
from arrived
"""
_ADD_ARRIVED = """
insert into {table} by name
select
    * replace (case when isfinite(episode_reward) then episode_reward end as episode_reward),
    {num_trained_tokens} as num_trained_tokens
from arrived
where {fits}
"""
_HAS_A_ROW_THAT_FITS = """arrived.group_id in (
    select group_id
    from arrived
    where not (
{where}
    )
)"""

# For groups that are used once: takes half of the time of plan/unplanned.sql.
_FORGET_PLANNED = "create or replace table rollouts as from rollouts anti join planned using (group_id)"

_MASK = "action_mask"
_TOKENS_WITHIN = """
case
    when prompt_length + response_length <= {most} then action_length
    when action_mask is null then greatest({most} - prompt_length, 0)
    else coalesce(list_sum(action_mask[:greatest({most} - prompt_length, 0)]::integer[]), 0)
end"""
"""Number of a row's sampled tokens within max_seq_len."""


FindUntrainable = Callable[[pa.Table], Sequence[str]]
"""Returns the rollout_ids of rows that can't be trained on. Its argument has the rows that a plan has chosen:
rollout_id, group_id, the address (file, row_group, row, and root, which is null), prompt_length and response_length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The reason why there is no batch yet."""

    ready_groups: int
    """Number of groups with a row that no filter drops, and that the selection returns."""
    wanted_groups: int
    num_pending_rollouts: int
    drops: Mapping[str, int]
    """Number of pending rollouts that each filter would drop."""
    selection: str
    num_passed_over: int
    """Number of groups with a row that no filter drops, and that the selection does not return."""
    num_waiting_groups: int = 0
    """Number of groups that wait for scores."""
    waits_for: str | None = None
    """The missing scores, as a part of a sentence."""

    def describe(self) -> str:
        """Return one sentence for the log."""
        parts = [f"{self.ready_groups} of {self.wanted_groups} groups are ready"]
        if self.num_passed_over:
            parts.append(f"selection {self.selection} leaves out {self.num_passed_over} more")
        if self.waits_for is not None:
            parts.append(self.waits_for)
        if self.drops:
            most = max(self.drops, key=lambda name: self.drops[name])
            of_all = f"{sum(self.drops.values())} of {self.num_pending_rollouts} rollouts"
            parts.append(f"filters drop {of_all}, {most} most ({self.drops[most]})")
            known = {**NO_LOGPROBS, "drop_errors": "failed, or without a reward (`ludic score`, --reward-scorer)"}
            parts += [f"{reason}: {known[reason]}" for reason in self.drops if reason in known]
        return "; ".join(parts)


class Planner:
    """Holds pending rollouts and plans batches of them."""

    def __init__(self, rules: BatchRules, extra_columns: Mapping[str, str] = NO_COLUMNS) -> None:
        """Load and try the rules' SQL. extra_columns: the run's own columns, which SQL may use.

        Raises QueryError if SQL does not run or a parameter has no value, ConfigError if a given parameter is unused.
        """
        self._rules = rules
        self._advantage = load_advantage(rules.advantage, rules.files)
        self._filters = [load_filter(name, rules.files) for name in dict.fromkeys((ALWAYS_ON, *rules.filters))]
        self._where = None if rules.where is None else where_filter(rules.where)
        if self._where is not None:
            self._filters.append(self._where)
        self._selection = load_selection(rules.selection, rules.files)
        texts = [self._advantage, *self._filters, self._selection]
        check_parameters(texts, rules.params, known=KNOWN_PARAMS)
        schema = rollouts_schema(extra_columns)
        needed = {*SCALAR_COLUMNS, *required_columns(texts, schema.names)}
        self._num_trained_tokens = "action_length"
        if rules.max_seq_len is not None:
            needed.add(_MASK)
            self._num_trained_tokens = _TOKENS_WITHIN.format(most=int(rules.max_seq_len))
        self.columns = [name for name in schema.names if name in needed]
        """Columns of rollouts that `add` needs, in addition to ADDED."""
        self._schema = pa.schema([*map(schema.field, self.columns), *ADDED])
        predicates = ", ".join(f"coalesce((\n{text.text}\n), false)" for text in self._filters)
        self._judge_sql = Template(read_packaged("plan", "judge")).safe_substitute(predicates=predicates)
        self._con = open_duckdb()
        # Threads do not help for a few thousand rows: a plan takes 27 ms on two threads, 17 ms on one.
        self._con.execute("set threads = 1")
        seal(self._con)
        with self._registered("arrived", self._schema.empty_table()):
            self._con.execute(_CREATE_ROLLOUTS)
        self._con.execute("create table history as select *, 0::bigint as trained_step from rollouts")
        self._con.execute("create table untrainable (rollout_id varchar)")
        self.recall_uses({})
        self._gate = open_gate(
            self._con, rules.scorers, rules.reward_scorer, mixed=rules.mixed_scorers, wait_s=rules.wait_for_scores_s
        )
        self._try_rules()

    def recall_uses(self, num_uses: Mapping[str, int]) -> None:
        """Set how often groups were used before this planner began, by group_id; `add` delivers those groups again."""
        self._num_uses = pa.array(list(num_uses), pa.string()), pa.array(num_uses.values(), pa.int32())

    @property
    def history(self) -> int:
        """Number of rows of earlier batches that the advantage sees."""
        return self._advantage.history

    def recall_history(self, rows: pa.Table) -> None:
        """Set rows of batches before this planner began: `columns`, and trained_step, the step that used a row."""
        with self._registered("recalled", rows):
            self._con.execute("insert into history by name from recalled")

    def add(self, rows: pa.Table) -> None:
        """Add whole groups, which are then pending. Ignores columns other than `columns` and ADDED."""
        where = None if self._gate is not None and self._gate.is_read_by(self._where) else self._where
        fits = "true" if where is None else _HAS_A_ROW_THAT_FITS.format(where=where.text)
        params = {} if where is None else where.bind(self._values(1, 0, None))
        used, num_uses = self._num_uses
        uses_of_row = pc.fill_null(num_uses.take(pc.index_in(rows["group_id"].combine_chunks(), used)), 0)
        with self._registered("arrived", rows.select(self._schema.names).append_column("num_uses", uses_of_row)):
            table = "rollouts" if self._gate is None else "waiting"
            sql = _ADD_ARRIVED.format(table=table, fits=fits, num_trained_tokens=self._num_trained_tokens)
            self._con.execute(sql, params)
        if self._gate is not None:
            self._gate.note_arrivals()

    @property
    def scorers(self) -> list[str]:
        """Names of the scorers whose scores `add_scores` expects."""
        return [] if self._gate is None else self._gate.scorers

    def drop_untrainable(self, rollout_ids: Sequence[str]) -> None:
        """Let plans drop these rows, which can't be trained on."""
        with self._registered("found", pa.table({"rollout_id": pa.array(rollout_ids, pa.string())})):
            self._con.execute("insert into untrainable from found")

    def add_scores(self, scores: pa.Table) -> None:
        """Add rows of the scores table, of any rollouts, with ludic.root.rows.tables.PLAN_COLUMNS."""
        assert self._gate is not None, "the rules name no scorers"
        self._gate.add(scores)

    def release_scored(self) -> bool:
        """Let plans use the groups whose wait for scores has ended; returns whether there are new ones."""
        return self._gate is not None and self._gate.release()

    @property
    def num_pending_groups(self) -> int:
        """Number of pending groups, without refused ones, which are dropped under any rules.

        Groups that wait for scores are included.
        """
        num_waiting = 0 if self._gate is None else self._gate.num_waiting_groups
        return num_waiting + self._fetch("select count(distinct group_id) from rollouts where refusal is null")[0][0]

    def plan(
        self,
        *,
        step: int,
        attempt_id: int,
        trainer_version: int,
        now: datetime | None = None,
        at_least: int | None = None,
        find_untrainable: FindUntrainable | None = None,
    ) -> pa.Table | None:
        """Return the next batch as rows of the batches table: used rows in training order, then dropped rows.

        The batch is the first groups_per_batch groups in the order of the selection, of those with a row that no filter
        drops. All groups without such a row are dropped with it. A group that was used less than max_uses times stays
        pending. Returns None, and changes nothing, if there are too few groups. at_least: smallest number of groups
        that makes a batch; None means groups_per_batch. now: value of $now; None means the current time.
        find_untrainable: looks at the rows to train on; if it refuses some, the batch is chosen again without them.
        Raises QueryError if a row to train on has no finite advantage, or token_advantages of a wrong length.
        """
        self.release_scored()
        values = self._values(step, trainer_version, now)
        fewest = self._rules.groups_per_batch if at_least is None else at_least
        while (chosen := self._choose_batch(values, fewest)) is not None:
            with self._registered("chosen", chosen):
                rows = self._planned_rows(chosen)
                refused = () if find_untrainable is None else find_untrainable(rows_to_train_on(rows, chosen))
                if not refused:
                    ledger = self._make_ledger(rows, chosen, values, attempt_id)
                    self._keep_history(step)
                    self._forget_planned(ledger)
                    return ledger
            self.drop_untrainable(refused)
        return None

    def _planned_rows(self, chosen: pa.Table) -> pa.Table:
        """Return FOR_LEDGER and `reason` of the rows that a plan of the chosen groups uses or drops."""
        groups = planned_groups(self._judged, chosen)
        if len(groups) == pc.count_distinct(self._judged["group_id"]).as_py():
            return with_reason(run_query(self._con, _PLANNED_ROWS), self._judged)
        with self._registered("planned", pa.table({"group_id": groups})):
            rows = run_query(self._con, f"{_PLANNED_ROWS} where group_id in (select group_id from planned)")  # noqa: S608
        return with_reason(rows, self._judged)

    def _forget_planned(self, ledger: pa.Table) -> None:
        """Keep only the rows that are still pending after a plan."""
        if self._rules.max_uses > 1:
            unplanned = f"create or replace table rollouts as\n{read_packaged('plan', 'unplanned')}"
            self._con.execute(unplanned, {"max_uses": self._rules.max_uses})
        elif self._judged.num_rows == ledger.num_rows:
            self.forget()  # all of them are in the plan; this takes a quarter of the time of finding the others
            return
        else:
            with self._registered("planned", pa.table({"group_id": ledger["group_id"].unique()})):
                self._con.execute(_FORGET_PLANNED)
        if self._gate is not None:
            self._gate.forget_planned()

    def used_up(self, ledger: pa.Table) -> pa.Table:
        """Return the rows of a plan whose groups are no longer pending: dropped, or used max_uses times."""
        stays = pc.and_(ledger["used"], pc.less(ledger["num_uses"], self._rules.max_uses))
        return ledger.filter(pc.invert(pc.is_in(ledger["group_id"], ledger["group_id"].filter(stays).unique())))

    def forget(self) -> None:
        """Forget all pending groups; rows of earlier batches stay."""
        self._con.execute("create or replace table rollouts as from rollouts limit 0")
        if self._gate is not None:
            self._gate.forget_planned()

    def kept_rollouts(self) -> list[str]:
        """Return the rollout_ids of pending rows that no filter drops, as of the first step."""
        self._judge(self._values(1, 0, None))
        return self._judged.filter(pc.is_null(self._judged["reason"]))["rollout_id"].to_pylist()

    def shortage(self, step: int, trainer_version: int, now: datetime | None = None) -> Shortage:
        """Return how many groups are missing for a batch, and why."""
        num_rollouts = num_kept_groups = ready_groups = 0
        drops: dict[str, int] = {}
        if self._fetch("select exists (from rollouts)")[0][0]:
            values = self._values(step, trainer_version, now)
            self._judge(values)
            num_rollouts, num_kept_groups = self._fetch(read_packaged("plan", "num_judged"))[0]
            ready_groups = self._choose(values).num_rows
            drops = dict(self._fetch(read_packaged("plan", "drops")))
        return Shortage(
            ready_groups=ready_groups,
            wanted_groups=self._rules.groups_per_batch,
            num_pending_rollouts=num_rollouts,
            drops=drops,
            selection=self._selection.name,
            num_passed_over=num_kept_groups - ready_groups,
            num_waiting_groups=0 if self._gate is None else self._gate.num_waiting_groups,
            waits_for=None if self._gate is None else self._gate.describe(),
        )

    def _try_rules(self) -> None:
        """Run each rule's SQL over no rows, so that errors appear before training starts."""
        values = self._values(1, 0, None)
        with names_missing_scorers():
            for text in self._filters:
                check_filter(self._con, text, values)
            self._judge(values)
            for view in ("queue", "groups"):  # groups reads queue
                self._con.execute(f"create temp view {view} as\n{read_packaged('plan', view)}")
            self._con.execute(f"create temp view trajectory_rows as\n{read_packaged('views', 'trajectory_rows')}")
            with self._registered("chosen", self._choose(values)):
                self._estimate(values)

    def _values(self, step: int, trainer_version: int, now: datetime | None) -> dict[str, Any]:
        known = {"step": step, "trainer_version": trainer_version, "now": now or datetime.now(UTC)}
        return {"seed": self._rules.seed, **self._rules.params, **known}

    def _judge(self, values: Mapping[str, Any]) -> None:
        """Write the first filter that drops each pending row to the table `judged`."""
        params: dict[str, Any] = {"filter_names": [text.name for text in self._filters]}
        params |= {"max_uses": self._rules.max_uses, "needs_logprobs": self._rules.needs_logprobs}
        for text in self._filters:
            params |= text.bind(values)
        self._judged = make_table(self._con, self._judge_sql, params, name="judged")

    def _choose(self, values: Mapping[str, Any]) -> pa.Table:
        """Return group_id and queue_position of all groups that the selection returns, in its order."""
        # Do not read `groups` here: DuckDB needs 8 ms to bind that view, for any of its columns.
        candidates = self._judged.filter(pc.is_null(self._judged["reason"]))["group_id"]
        group_ids = run_selection(self._con, self._selection, self._selection.bind(values), candidates)
        positions = pa.array(range(len(group_ids)), pa.int64())
        return pa.table({"group_id": group_ids, "queue_position": positions})

    def _choose_batch(self, values: Mapping[str, Any], at_least: int) -> pa.Table | None:
        """Return the groups of a batch, as `_choose`; None if there are fewer than `at_least`."""
        self._judge(values)
        chosen = self._choose(values)
        return chosen.slice(0, self._rules.groups_per_batch) if chosen.num_rows >= at_least else None

    def _estimate(self, values: Mapping[str, Any]) -> pa.Table:
        """Return rollout_id and _ADVANTAGE_COLUMNS for the rows of the baseline; missing columns are null."""
        over = _BASELINE_ROWS[self._rules.baseline_over]
        if self.history:
            over = f"{over} union all by name {_HISTORY_ROWS}"
        run = partial(make_table, name="estimated")
        table = run_advantage(self._con, self._advantage, self._advantage.bind(values), over=over, run=run)
        source = self._advantage.source
        if pc.count_distinct(table["rollout_id"]).as_py() < table.num_rows:
            raise QueryError(f"{source}: returns a rollout_id more than once, wanted one row per rollout")
        if self._rules.loss_unit == "pair" and "pair_id" not in table.column_names:
            raise QueryError(
                f"{source}: returns no pair_id, which objectives of pairs (dpo, ipo, orpo) need; best_worst makes pairs"
            )
        if "token_advantages" in table.column_names:
            with self._registered("estimated_tokens", table):
                means = run_query(self._con, read_packaged("plan", "mean_advantages"))
            indexes = pc.index_in(table["rollout_id"], means["rollout_id"])
            table = table.append_column("advantage", means["advantage"].take(indexes))
        missing = _ADVANTAGE_COLUMNS.keys() - set(table.column_names)
        for name in missing:
            table = table.append_column(name, pa.nulls(table.num_rows, _ADVANTAGE_COLUMNS[name]))
        return table

    def _make_ledger(self, rows: pa.Table, chosen: pa.Table, values: Mapping[str, Any], attempt_id: int) -> pa.Table:
        estimated = self._estimate(values)
        ledger = ledger_rows(
            rows,
            chosen,
            estimated,
            self._weights(),
            step=values["step"],
            trainer_version=values["trainer_version"],
            attempt_id=attempt_id,
            max_seq_len=self._rules.max_seq_len,
            pairs=whole_pairs(estimated, self._judged) if self._rules.loss_unit == "pair" else None,
        )
        used = ledger.filter(ledger["used"])
        check_advantages(self._advantage.source, used)
        if self._rules.loss_unit == "pair":
            check_pairs(self._advantage.source, used, self._rules.groups_per_batch)
        return ledger

    def _weights(self) -> pa.Table:
        """Return the weight of each row to train on, by rollout_id; no row if all have weight 1."""
        if self._rules.loss_unit != "episode":
            return _WEIGHTS.empty_table()
        return run_query(self._con, read_packaged("plan", "weights")).cast(_WEIGHTS)

    def _keep_history(self, step: int) -> None:
        if self.history:
            sql = _KEEP_HISTORY.format(rows=_BASELINE_ROWS[self._rules.baseline_over])
            self._con.execute(sql, {"step": step, "num_rows": self.history})

    def _fetch(self, sql: str) -> list[tuple[Any, ...]]:
        return self._con.execute(sql).fetchall()

    @contextmanager
    def _registered(self, name: str, table: pa.Table) -> Iterator[None]:
        """Let SQL read an Arrow table by name within the block."""
        self._con.register(name, table)
        try:
            yield
        finally:
            self._con.unregister(name)


# --- Checks of the advantages --------------------------------------------------------------------------
# source: the advantage's file, for errors. used: rows of the ledger that the step trains on.


def check_advantages(source: str, used: pa.Table) -> None:
    """Raise QueryError unless each used row has a finite advantage, and one number per token if it has a list."""
    bad = used.filter(pc.invert(pc.fill_null(pc.is_finite(used["advantage"]), False)))
    if bad.num_rows:
        raise QueryError(
            f"{source}: {bad.num_rows} of {used.num_rows} rollouts to train on get no finite "
            f"advantage, first {bad['rollout_id'][0]}; return one for each, or drop them with a filter"
        )
    lengths = pc.list_value_length(used["token_advantages"])
    bad = used.filter(pc.fill_null(pc.not_equal(lengths, used["response_length"]), False))
    if bad.num_rows:
        first = bad.slice(0, 1).to_pylist()[0]
        raise QueryError(
            f"{source}: {bad.num_rows} of {used.num_rows} rollouts get token_advantages of a wrong length, first "
            f"{first['rollout_id']} in {first['file']}: {len(first['token_advantages'])} for "
            f"{first['response_length']} response tokens; return one for each token"
        )


def check_pairs(source: str, used: pa.Table, num_groups: int) -> None:
    """Raise QueryError unless each pair has two rows, one chosen and one rejected, and there is a pair.

    num_groups: groups of the batch.
    """
    if used.num_rows == 0:
        raise QueryError(
            f"{source}: makes no pair of the {num_groups} groups of a batch; "
            "keep groups of equal rewards out with drop_zero_variance_groups"
        )
    sides = pa.table({"pair_id": used["pair_id"], "side": pc.sign(used["advantage"])})
    pairs = sides.group_by("pair_id").aggregate([("side", "list")])
    for pair_id, found in zip(pairs["pair_id"].to_pylist(), pairs["side_list"].to_pylist(), strict=True):
        if sorted(found) != [-1, 1]:
            raise QueryError(
                f"{source}: pair {pair_id} has {len(found)} rollouts, {found.count(1)} of them chosen; "
                "wanted two, one with an advantage above 0 and one below"
            )
