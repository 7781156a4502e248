"""Plan epochs over the rollouts that one or several roots hold now, with the planner of online training.

Reads the scalars of all sources once, at the start, and token columns that the advantage SQL mentions. Rollouts that
arrive later are used after the next start. The position is not stored: it follows from the ledger since the first step
of the pass, which the checkpoint's cursor holds as "offline".
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from ludic.base import plural
from ludic.errors import ConfigError
from ludic.records import arrow_schema, rollouts_schema
from ludic.root import CheckpointInfo, CodeRecord, Root, other_trainer_of
from ludic.root.rows import (
    PLAN_COLUMNS,
    Cursor,
    RolloutReader,
    ScoreReader,
    effective_steps,
    recall_groups,
    superseded_groups,
)
from ludic.root.sql import ADDED, BatchRules, LossUnit, Planner
from ludic.root.weights import same_tokenizer, versions_to_compute_with
from ludic.run import keep_code
from ludic.training.batches.config import BatchConfig
from ludic.training.batches.reading import Vetting
from ludic.training.batches.source import (
    MORE_THAN_ANY_BATCH,
    BatchPlan,
    Demand,
    own_rules,
    recall_history,
    sampled_whole,
    with_roots,
)

logger = logging.getLogger(__name__)

_TO_COMPUTE = ["rollout_id", "group_id", "root", "file", "row_group", "row"]
_TO_COMPUTE += ["policy_version", "temperature", "prompt_length", "response_length"]
_ROWS_VETTED = 1024
"""Maximum rows whose tokens are in memory at once."""
_KEY = "offline"
"""Key of the pass in a cursor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRollouts:
    """Rollouts of one or several roots, read into memory."""

    sources: tuple[str, ...]
    extra_columns: Mapping[str, str]
    rows: pa.Table
    """Scalars with the columns ADDED and root, in whole groups. A group in several roots is taken from the first."""
    scores: pa.Table
    """Scores of the rules' scorers: ludic.root.rows.tables.PLAN_COLUMNS, of all sources."""
    num_unreadable_files: int
    to_compute: frozenset[str] = frozenset()
    """rollout_ids of rows whose logprobs are computed before training; in `rows` their capture is already trainer."""

    @classmethod
    def read(cls, sources: Sequence[Root], rules: BatchRules, *, own: Root | None = None) -> Self:
        """Read all sources. own: the root that is trained; its rows have NULL in column `root`.

        Leaves out the groups of a recorded run whose steps its trainer repeated, and logs their number. Raises
        ConfigError if there are no rollouts, or if two runs have columns of the same name and different types.
        """
        extra_columns = _join_extra_columns(sources)
        schema = rollouts_schema(extra_columns)
        planner = Planner(rules, extra_columns)
        schema = pa.schema([schema.field(name) for name in planner.columns])
        tables: list[pa.Table] = []
        to_compute: set[str] = set()
        num_unreadable_files = 0
        for source in sources:
            known = rollouts_schema(source.extra_columns).names
            is_own = own is not None and source.run_id == own.run_id
            reader = RolloutReader(source, [name for name in schema.names if name in known], any_run=not is_own)
            rows = reader.poll(None)
            for name, why in reader.broken_files.items():
                logger.warning("%s/%s is left out: %s", source.url, name, why)
            num_unreadable_files += len(reader.broken_files)
            if rows is not None:
                url = None if is_own else source.url
                rows = _without_superseded(source, _conform(rows, schema))
                if rules.computes_logprobs:
                    rows, ids = _as_computed(source, rows)
                    to_compute.update(ids)
                tables.append(_new_groups(rows, url, tables))
        urls = tuple(source.url for source in sources)
        if not tables:
            raise ConfigError(f"{', '.join(urls)}: no rollouts, wanted at least one group to train on")
        return cls(
            sources=urls,
            extra_columns=extra_columns,
            rows=pa.concat_tables(tables),
            scores=_read_scores(sources, planner.scorers),
            num_unreadable_files=num_unreadable_files,
            to_compute=frozenset(to_compute),
        )

    def planner(
        self, rules: BatchRules, *, num_uses: Mapping[str, int] | None = None, without: Collection[str] = ()
    ) -> Planner:
        """Return a planner with the rows of all groups except those in `without`."""
        planner = Planner(rules, self.extra_columns)
        planner.recall_uses(num_uses or {})
        if planner.scorers:
            planner.add_scores(self.scores)
        left_out = pc.is_in(self.rows["group_id"], pa.array(without, pa.string()))
        planner.add(self.rows.filter(pc.invert(left_out)))
        planner.release_scored()
        return planner

    def plan(
        self,
        planner: Planner,
        vetting: Vetting,
        step: int,
        *,
        attempt_id: int,
        trainer_version: int,
        cursor: Mapping[str, Any],
    ) -> BatchPlan | None:
        """Return a planner's next plan; the last one may have fewer groups than a batch. None after the last."""
        rows = planner.plan(
            step=step,
            attempt_id=attempt_id,
            trainer_version=trainer_version,
            at_least=1,
            find_untrainable=lambda chosen: vetting.find(with_roots(chosen, self.rows)),
        )
        if rows is None:
            return None
        return BatchPlan(
            step=step,
            rows=with_roots(rows, self.rows),
            cursor=cursor,
            num_pending_groups=planner.num_pending_groups,
            num_unreadable_files=self.num_unreadable_files,
            tokens=vetting.tokens,
        )

    def count_groups(self, rules: BatchRules) -> int:
        """Return the number of groups that can be trained on. Raises ConfigError if there is none."""
        shortage = self.planner(rules).shortage(1, 0)
        if shortage.ready_groups == 0:
            where = "" if rules.where is None else f" where {rules.where}"
            raise ConfigError(f"{', '.join(self.sources)}: nothing to train on{where}; {shortage.describe()}")
        return shortage.ready_groups


class OfflineSource:
    """Source of plans over epochs of stored rollouts. An epoch's last groups share a batch with the next epoch's."""

    def __init__(
        self, root: Root, config: BatchConfig, *, loss_unit: LossUnit = "row", needs_logprobs: bool = True
    ) -> None:
        """Read the scalars of all sources.

        Raises ConsentError, QueryError, and ConfigError if there is nothing to train on.
        """
        sources = [Root.open(url) for url in config.sources] or [root]
        _warn_of_other_models(root, sources)
        self._root, self._epochs = root, config.epochs
        self._rules = own_rules(root, config, loss_unit=loss_unit, needs_logprobs=needs_logprobs)
        self._stored = StoredRollouts.read(sources, self._rules, own=root)
        self._vetting = Vetting(root)
        self._num_groups = self._stored.count_groups(self._rules)
        self._choice = {"sources": list(self._stored.sources), "where": config.where}

    def count_steps(self, resumed: CheckpointInfo | None) -> int | None:
        if self._epochs is None:
            return None
        num_steps = math.ceil(self._epochs * self._num_groups / self._rules.groups_per_batch)
        return self._first_step(resumed) - 1 + num_steps

    def keep_code(self) -> list[CodeRecord]:
        return keep_code(self._root, self._rules.uses(), self._rules.files)

    def resume(self, resumed: CheckpointInfo | None, demand: Demand) -> None:
        first_step = self._first_step(resumed)
        cursor = resumed.cursor if resumed else Cursor().to_dict()
        self._cursor = {**cursor, _KEY: {"first_step": first_step, **self._choice}}
        replayed = effective_steps(self._root, (resumed.attempt_id, resumed.step)) if resumed else []
        num_uses, dropped = recall_groups(self._root, [step for step in replayed if step[1] >= first_step])
        dropped |= {group_id for group_id, uses in num_uses.items() if uses >= self._rules.max_uses}
        self._planner = self._stored.planner(self._rules, num_uses=num_uses, without=dropped)
        if resumed is not None:
            checkpoint = resumed.attempt_id, resumed.step
            recall_history(self._root, self._planner, checkpoint, baseline_over=self._rules.baseline_over)

    def plan(self, step: int, *, attempt_id: int, trainer_version: int) -> BatchPlan | None:
        """Return the next plan; see PlanSource. Raises ConfigError if none of the rollouts can be trained on."""
        plan = self._stored.plan(
            self._planner,
            self._vetting,
            step,
            attempt_id=attempt_id,
            trainer_version=trainer_version,
            cursor=self._cursor,
        )
        if plan is None and step == self._cursor[_KEY]["first_step"]:
            why = self._planner.shortage(step, trainer_version).describe()
            raise ConfigError(f"{', '.join(self._stored.sources)}: nothing to train on; {why}")
        return plan

    def rows_to_compute(self) -> pa.Table:
        """Return the rows that a step may train on once their logprobs are computed, after `resume`: _TO_COMPUTE."""
        wanted = self._stored.to_compute.intersection(self._planner.kept_rollouts())
        rows = self._stored.rows
        rows = rows.filter(pc.is_in(rows["rollout_id"], pa.array(wanted, pa.string()))).select(_TO_COMPUTE)
        rows = rows.sort_by([(name, "ascending") for name in ("root", "policy_version", "file", "row_group", "row")])
        chunks = [rows.slice(start, _ROWS_VETTED) for start in range(0, rows.num_rows, _ROWS_VETTED)]
        refused = [rollout_id for chunk in chunks for rollout_id in self._vetting.find(chunk)]
        rows = rows.filter(pc.invert(pc.is_in(rows["rollout_id"], pa.array(refused, pa.string()))))
        # A filter that depends on the step may keep other rows later.
        self._vetting.not_computed = self._stored.to_compute.difference(rows["rollout_id"].to_pylist())
        return rows

    def count_ready_groups(self, latest_version: int | None) -> int:
        """Return more groups than any batch takes, so that workers sample none."""
        return MORE_THAN_ANY_BATCH

    def close(self) -> None:
        """Do nothing, since no plan waits."""

    def _first_step(self, resumed: CheckpointInfo | None) -> int:
        """Return the first step of the checkpoint's pass if sources and where are the same, else the next step."""
        if resumed is None:
            return 1
        begun = dict(resumed.cursor.get(_KEY, {}))
        first_step = begun.pop("first_step", None)
        return resumed.step + 1 if first_step is None or begun != self._choice else first_step


def _join_extra_columns(sources: Sequence[Root]) -> dict[str, str]:
    joined: dict[str, str] = {}
    for source in sources:
        for name, type_ in source.extra_columns.items():
            if joined.setdefault(name, type_) != type_:
                raise ConfigError(f"{source.url}: {name} is {type_}, and {joined[name]} in a source before it")
    return joined


def _read_scores(sources: Sequence[Root], scorers: Sequence[str]) -> pa.Table:
    schema = arrow_schema("scores")
    found = (ScoreReader(source, scorers).poll() for source in sources)
    return pa.concat_tables(
        [schema.empty_table().select(PLAN_COLUMNS), *(table for table in found if table is not None)]
    )


def _conform(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a reader's rows with nulls for columns that its run does not have."""
    columns = {
        field.name: rows[field.name] if field.name in rows.column_names else pa.nulls(rows.num_rows, field.type)
        for field in (*schema, *ADDED)
    }
    return pa.table(columns)


def _without_superseded(source: Root, rows: pa.Table) -> pa.Table:
    """Return a source's rows; of a recorded run without groups that only superseded steps considered.

    Its trainer sampled them again after a resume, so they would count twice.
    """
    other = other_trainer_of(source)
    if other is None:
        return rows
    groups = superseded_groups(source)
    kept = rows.filter(pc.invert(pc.is_in(rows["group_id"], pa.array(groups, pa.string()))))
    if kept.num_rows < rows.num_rows:
        logger.warning(
            "%s: left out %s of superseded steps, which %s repeated after a resume",
            *(source.url, plural(rows.num_rows - kept.num_rows, "rollout"), other.name),
        )
    return kept


def _as_computed(source: Root, rows: pa.Table) -> tuple[pa.Table, list[str]]:
    """Return the rows with the capture `trainer` where their logprobs can be computed, and the rollout_ids of these.

    This holds if a single version sampled the row from its whole distribution, and its whole weights are in the source.
    """
    versions = versions_to_compute_with(source)
    has_weights = pc.is_in(rows["policy_version"], pa.array(versions, pa.int64()))
    chosen = pc.and_(sampled_whole(rows), has_weights)
    capture = pc.if_else(chosen, pa.scalar("trainer"), rows["capture"])
    index = rows.schema.get_field_index("capture")
    return rows.set_column(index, rows.schema.field(index), capture), rows["rollout_id"].filter(chosen).to_pylist()


def _new_groups(rows: pa.Table, url: str | None, before: Sequence[pa.Table]) -> pa.Table:
    """Return rows of groups that no earlier table has, with later arrival numbers and the root that holds them."""
    for table in before:
        rows = rows.filter(pc.invert(pc.is_in(rows["group_id"], table["group_id"].combine_chunks())))
    num_arrivals = sum(pc.max(table["arrival"]).as_py() + 1 for table in before[-1:] if table.num_rows)
    arrival = rows.schema.get_field_index("arrival")
    rows = rows.set_column(arrival, "arrival", pc.add(rows["arrival"], num_arrivals))
    return rows.append_column("root", pa.repeat(pa.scalar(url, pa.string()), rows.num_rows))


def _warn_of_other_models(root: Root, sources: Sequence[Root]) -> None:
    for source in sources:
        if not same_tokenizer(root, source):
            logger.warning(
                "%s was sampled by %s, and %s trains %s: tokens mean the same only if both have one tokenizer",
                *(source.url, source.record.model, root.url, root.record.model),
            )
