"""Plan the stored steps of a run again, by any rules over the rollouts that each step considered.

By the rules of the step's own trainer a plan equals the ledger bit for bit, since the planner's input follows from the
ledger; only the time of the plan does not, if a user's SQL reads $now. Reads scores/, and earlier batches/ with their
rollouts for an advantage that has a history. Imports no torch. Raises QueryError if the rules do not fit the rollouts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import QueryError
from ludic.records import NO_LOGPROBS, arrow_schema
from ludic.root import Root
from ludic.root.rows import DUPLICATE_REQUEST, OTHER_RUN, PLAN_COLUMNS, ScoreReader
from ludic.root.sql import UNTRAINABLE, BatchRules, FindUntrainable, Planner
from ludic.training.batches.source import recall_history, sampled_whole, with_roots

_EVERY_GROUP = 2**31 - 1
_PAIRLESS = "no_pair"
_REFUSALS = pa.array([DUPLICATE_REQUEST, OTHER_RUN])
_JUST_OVER = timedelta(microseconds=2)


class Replanner:
    """Plans steps again, in order of steps."""

    def __init__(self, root: Root, rules: BatchRules) -> None:
        """root: the run whose steps are planned. Raises QueryError or ConfigError for wrong rules."""
        self._root, self._rules = root, rules
        self._planner = Planner(
            replace(rules, groups_per_batch=_EVERY_GROUP, wait_for_scores_s=0.0), root.extra_columns
        )
        self._scores: dict[str, pa.Table | None] = {}
        self._is_fresh = True

    @property
    def columns(self) -> list[str]:
        """Columns of rollouts that `plan` needs."""
        return self._planner.columns

    def plan(self, ledger: pa.Table, rollouts: pa.Table, find_untrainable: FindUntrainable | None = None) -> pa.Table:
        """Return the plan of a step as ledger rows.

        ledger: the stored rows of the step; those that it dropped as untrainable are dropped again. rollouts: `columns`
        of their rollouts, in the same order (ludic.root.rows.ledger.read_rollouts). find_untrainable: looks at the rows
        that the plan would use, since a filter may have dropped them before. Every considered group that has a row left
        is used, so a batch may have more or fewer groups than the run's. Groups of which `where` leaves no row are
        missing.
        """
        step, attempt_id, version = (ledger[name][0].as_py() for name in ("step", "attempt_id", "trainer_version"))
        if self._is_fresh and step > 1:
            recall_history(self._root, self._planner, (attempt_id, step - 1), baseline_over=self._rules.baseline_over)
        self._is_fresh = False
        rows = _as_it_was(ledger, rollouts.select(self.columns))
        if self._rules.computes_logprobs:
            rows = _as_computed(ledger, rows)
        if self._planner.scorers:
            self._planner.add_scores(self._scores_of(ledger))
        self._planner.recall_uses(_uses_before(ledger))
        self._planner.add(rows)
        untrainable = ledger.filter(pc.fill_null(pc.equal(ledger["reason"], UNTRAINABLE), False))
        if untrainable.num_rows:
            self._planner.drop_untrainable(untrainable["rollout_id"].to_pylist())
        now = _time_of_plan(ledger, rows, self._rules.params.get("max_age_s"))
        try:
            plan = self._planner.plan(
                step=step,
                attempt_id=attempt_id,
                trainer_version=version,
                now=now,
                at_least=0,
                find_untrainable=None
                if find_untrainable is None
                else lambda chosen: find_untrainable(with_roots(chosen, ledger)),
            )
        except QueryError as error:
            raise QueryError(f"step {step}: {error}") from error
        self._planner.forget()
        assert plan is not None
        return with_roots(plan, ledger)

    def _scores_of(self, ledger: pa.Table) -> pa.Table:
        """Return the scores that the plan of the step used, of the versions that the ledger names.

        A rollout that was dropped for scores of several versions gets all stored scores.
        """
        tables = [self._scores_in(url) for url in ledger["root"].unique().to_pylist()]
        known = pa.concat_tables(
            [table for table in tables if table is not None]
            or [arrow_schema("scores").empty_table().select(PLAN_COLUMNS)]
        )
        of_rows = (ledger[name].to_pylist() for name in ("rollout_id", "scorer_versions"))
        versions = {rollout_id: dict(found or ()) for rollout_id, found in zip(*of_rows, strict=True)}
        mixed = set(ledger.filter(pc.equal(ledger["reason"], "mixed_scorers"))["rollout_id"].to_pylist())
        keys = zip(*(known[name].to_pylist() for name in ("rollout_id", "scorer", "scorer_version")), strict=True)
        keep = [
            rollout_id in mixed or versions.get(rollout_id, {}).get(scorer) == version
            for rollout_id, scorer, version in keys
        ]
        return known.filter(pa.array(keep, pa.bool_()))

    def _scores_in(self, url: str | None) -> pa.Table | None:
        key = url or ""
        if key not in self._scores:
            root = self._root if url is None else Root.open(url)
            self._scores[key] = ScoreReader(root, self._planner.scorers).poll()
        return self._scores[key]


def _as_it_was(ledger: pa.Table, rows: pa.Table) -> pa.Table:
    """Return rollouts as the planner of the step had read them, in an order of arrival that fits the ledger."""
    order = {group_id: number for number, group_id in enumerate(_arrivals(ledger))}
    added = {
        "file": ledger["file"],
        "row_group": ledger["row_group"],
        "row": ledger["row"],
        "arrival": pa.array([order[group_id] for group_id in ledger["group_id"].to_pylist()], pa.int64()),
        "refusal": pc.if_else(pc.is_in(ledger["reason"], _REFUSALS), ledger["reason"], pa.scalar(None, pa.string())),
    }
    for name, column in added.items():
        rows = rows.append_column(name, column)
    return rows


def _as_computed(ledger: pa.Table, rows: pa.Table) -> pa.Table:
    """Return rows with the capture `trainer` where the step's trainer had computed missing logprobs."""
    is_dropped = pc.fill_null(pc.is_in(ledger["reason"], pa.array(list(NO_LOGPROBS))), False)
    is_computed = pc.and_(sampled_whole(rows), pc.invert(is_dropped))
    capture = pc.if_else(is_computed, pa.scalar("trainer"), rows["capture"])
    return rows.set_column(rows.schema.get_field_index("capture"), rows.schema.field("capture"), capture)


def _uses_before(ledger: pa.Table) -> dict[str, int]:
    """Return how often each group was used before the step: a chosen group's num_uses counts the step itself."""
    uses: dict[str, int] = {}
    names = ("group_id", "num_uses", "reason")
    for group_id, num_uses, reason in zip(*(ledger[name].to_pylist() for name in names), strict=True):
        is_chosen = reason is None or reason == _PAIRLESS
        before = (num_uses if num_uses is not None else int(is_chosen)) - is_chosen
        uses[group_id] = min(before, uses.get(group_id, before))
    return uses


def _time_of_plan(ledger: pa.Table, rows: pa.Table, max_age_s: float | None) -> datetime | None:
    """Return a time at which exactly the rows that were dropped as max_age were too old; None if it does not matter."""
    if max_age_s is None or "created_at" not in rows.column_names:
        return None
    newest = pc.max(rows["created_at"]).as_py()
    old = rows.filter(pc.fill_null(pc.equal(ledger["reason"], "max_age"), False))
    if not old.num_rows:
        return newest
    return max(newest, pc.max(old["created_at"]).as_py() + timedelta(seconds=max_age_s) + _JUST_OVER)


def _arrivals(ledger: pa.Table) -> list[str]:
    """Return the groups in an order of arrival under which the planner gives the ledger's order of rows.

    Dropped rows are in order of arrival; used rows are too, if the selection is fifo, or fifo within an environment.
    """
    dropped = _groups(ledger.filter(pc.invert(ledger["used"])))
    used = ledger.filter(ledger["used"])
    by_env = [_groups(used.filter(pc.equal(used["env_name"], env))) for env in used["env_name"].unique()]
    for chains in ([dropped, _groups(used)], [dropped, *by_env], [dropped]):
        try:
            found = _merge(chains)
        except CycleError:
            continue
        return list(dict.fromkeys([*found, *_groups(ledger)]))
    raise AssertionError("one chain has no cycle")


def _groups(rows: pa.Table) -> list[str]:
    return rows["group_id"].unique().to_pylist()


def _merge(chains: Iterable[Sequence[str]]) -> list[str]:
    """Return all members in an order that keeps the order of each chain. Raises CycleError if there is none."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for chain in chains:
        for group_id in chain:
            sorter.add(group_id)
        for before, after in pairwise(chain):
            sorter.add(after, before)
    return list(sorter.static_order())
