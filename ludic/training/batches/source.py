"""Define the protocol of sources of batch plans, and the parts that online, offline and replay sources share.

Holds the contract of a source and its plans; builds the planner's rules from the settings and the users' SQL and Python
files in the root; and recalls the rows of earlier batches that an advantage continues from. Raises ConfigError or
ConsentError for rules that can't run.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any, Literal, Protocol, Self

import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import ConfigError, SchemaError, StoreError
from ludic.records import table_from_bytes, table_to_bytes
from ludic.root import CheckpointId, CheckpointInfo, CodeRecord, Root, newest_attempt
from ludic.root.rows import newest_rows, read_rollouts
from ludic.root.sql import BatchRules, LossUnit, Planner
from ludic.run import run_of, trusted_files
from ludic.settings import flat
from ludic.training.batches.config import BatchConfig

logger = logging.getLogger(__name__)

MORE_THAN_ANY_BATCH = 2**31
"""Number of ready groups that a source without workers reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Rollouts that one gradient step trains on or drops."""

    step: int
    rows: pa.Table
    """Ledger rows (schemas/batches.v1.json): used ones in training order, then dropped ones."""
    cursor: Mapping[str, Any]
    """The source's position after this step, for the checkpoint of this step."""
    num_pending_groups: int
    """Groups that were read and remain for later steps."""
    num_unreadable_files: int
    tokens: pa.Table | None = None
    """Columns of the used rows that rank 0 has read to check them (ludic.training.batches.reading.read_trained), and
    does not read again. Not sent to other ranks."""

    def to_bytes(self) -> bytes:
        """Return the plan as Arrow IPC, for other ranks."""
        facts = {name: getattr(self, name) for name in ("step", "cursor", "num_pending_groups", "num_unreadable_files")}
        table = self.rows.replace_schema_metadata({b"plan": json.dumps(facts).encode()})
        return table_to_bytes(table)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        table = table_from_bytes(data)
        return cls(rows=table, **json.loads(table.schema.metadata[b"plan"]))


def with_roots(plan: pa.Table, ledger: pa.Table) -> pa.Table:
    """Return the rows of a plan with the root of each rollout. ledger: rollout_id and root of these rollouts."""
    indexes = pc.index_in(plan["rollout_id"], ledger["rollout_id"].combine_chunks())
    return plan.set_column(plan.schema.get_field_index("root"), "root", ledger["root"].take(indexes))


class Demand(Protocol):
    """Callbacks of a source about the groups that workers sample.

    ludic.training.publisher.Publisher implements them, and ludic.training.batches.budget decides how many groups
    workers may begin.
    """

    def note_arrivals(self, rows: pa.Table, num_ready_groups: int) -> None:
        """Record new rows. num_ready_groups: groups read and not planned, including the new ones."""

    def note_plan(self, step: int, num_ready_groups: int) -> None:
        """Record that a step is planned. num_ready_groups: groups read and not yet planned."""

    def note_wait(self, num_ready_groups: int, num_missing_groups: int, idle_s: float, *, version: int) -> None:
        """Record that a step, which starts from a version, waits for groups. num_ready_groups: groups that it could
        use."""


class PlanSource(Protocol):
    """Source of batch plans; only rank 0 has one.

    Online (online.py), offline (offline.py) and replay (replay.py) implement it. The trainer calls, in this order:
    the constructor, which checks settings and users' code and writes nothing; `count_steps`; `keep_code`, just before
    it claims the root; `resume`, once, after the claim; `plan` for each step, in a thread; `close`.

    A source writes no files except the users' code: the stream writes a plan's rows to the ledger before the plan
    leaves its thread. So a source may change its position as soon as it returns a plan.
    """

    def count_steps(self, resumed: CheckpointInfo | None) -> int | None:
        """Return num_steps for training, when resuming from a checkpoint; None keeps the setting."""

    def keep_code(self) -> list[CodeRecord]:
        """Copy users' files to the root, and return a record of each SQL or Python text that plans are made with."""

    def resume(self, resumed: CheckpointInfo | None, demand: Demand) -> None:
        """Set the position to that of a checkpoint, or to the start if it is None."""

    def plan(self, step: int, *, attempt_id: int, trainer_version: int) -> BatchPlan | None:
        """Return the next plan, in order of steps; None after the last, or if stopped or closed while waiting.

        trainer_version: version of the weights that the step starts from. Raises StalledError, StoreError, QueryError.
        """

    def count_ready_groups(self, latest_version: int | None) -> int:
        """Return the number of groups that were read and not yet planned.

        latest_version: newest published version; None before the first. Any thread may call it.
        """

    def close(self) -> None:
        """End a wait in `plan`, in any thread."""


# --- Rules of the planner ------------------------------------------------------------------------------

_ENDLESS = 2**31 - 1


def sampled_whole(rows: pa.Table) -> pa.ChunkedArray:
    """Return which rows have the sampler's ids but no logprobs, and were drawn by one version from its whole
    distribution.

    With the weights of that version these logprobs can be computed. rows: with capture, policy_version,
    policy_version_last, top_p and top_k.
    """
    can_be = [
        pc.equal(rows["capture"], "ids"),
        pc.equal(rows["policy_version"], rows["policy_version_last"]),
        pc.greater_equal(rows["top_p"], 1),
        pc.is_null(rows["top_k"]),
    ]
    return pc.fill_null(reduce(pc.and_, can_be), False)


_FILTER_OF = {"max_off_policy_steps": "max_off_policy_steps", "max_age_s": "max_age"}


def batch_rules(
    config: BatchConfig,
    groups_per_batch: int,
    seed: int = 0,
    *,
    loss_unit: LossUnit = "row",
    needs_logprobs: bool = True,
) -> BatchRules:
    """Return the planner's rules: settings with the name of a rule; max_off_policy_steps and max_age_s become filters.

    Offline these two are ignored, since no newer rollouts would come. seed: of the run. loss_unit, needs_logprobs: of
    the loss, see BatchRules. Raises ConfigError if sql_params holds a name that is a setting itself.
    """
    limits = {"max_off_policy_steps": config.max_off_policy_steps, "max_age_s": config.max_age_s}
    limits = {name: value for name, value in limits.items() if value is not None and not config.offline}
    for name in limits.keys() & config.sql_params.keys():
        raise ConfigError(f"sql_params has {name!r}, which is a setting of its own; leave it out of sql_params")
    own = {each.name for each in fields(BatchRules)}
    rules = {name: value for name, value in flat(config).items() if name in own}
    rules |= {
        "filters": (*config.filters, *(_FILTER_OF[name] for name in limits)),
        "params": {**config.sql_params, **limits},
    }
    rules["selection"] = config.selection or ("epochs" if config.offline else "fifo")
    if config.offline:
        rules |= {"max_uses": config.epochs or _ENDLESS, "wait_for_scores_s": 0.0}
    return BatchRules(
        **rules,
        seed=seed,
        loss_unit=loss_unit,
        needs_logprobs=needs_logprobs,
        computes_logprobs=config.compute_logprobs,
        groups_per_batch=groups_per_batch,
    )


def own_rules(
    root: Root, config: BatchConfig, *, loss_unit: LossUnit = "row", needs_logprobs: bool = True
) -> BatchRules:
    """Return the rules of a run's own trainer, with the users' files stored in the root.

    Raises ConsentError if a file came with the root and the user has not agreed to run it, ConfigError.
    """
    run = run_of(root)
    rules = batch_rules(config, run.groups_per_batch, run.seed, loss_unit=loss_unit, needs_logprobs=needs_logprobs)
    return replace(rules, files=trusted_files(root, rules.uses(names_in_root(root))))


def names_in_root(root: Root) -> frozenset[str]:
    """Return the newest attempt's advantage, filters, selection and tracker: the defaults of the next trainer."""
    attempt = newest_attempt(root)
    config = {} if attempt is None else attempt.config
    names = [config.get("advantage"), config.get("selection"), config.get("log_to"), *(config.get("filters") or ())]
    return frozenset(name for name in names if isinstance(name, str))


# --- Rows of earlier batches ---------------------------------------------------------------------------
# After a restart, an advantage that continues over batches, such as rae, sees the same rows as without one. Reads
# batches/ and rollouts/.


def recall_history(
    root: Root, planner: Planner, checkpoint: CheckpointId, *, baseline_over: Literal["group", "kept"]
) -> None:
    """Give the planner the newest rows of batches up to a checkpoint, as many as its advantage needs.

    If their files are missing or broken, the history is empty and averages begin again, with a warning.
    """
    if not planner.history:
        return
    tables = newest_rows(root, checkpoint, planner.history, of_groups=baseline_over == "group")
    rows = pa.concat_tables([rows for rows in tables if rows.num_rows] or [pa.table({})])
    if not rows.num_rows:
        return
    try:
        found = read_rollouts(root, rows, planner.columns)
    except (SchemaError, StoreError) as error:
        logger.warning("%s: the advantage starts without earlier batches, since %s", root.url, error)
        return
    # The reward that the plan used, which a scorer may have given.
    found = found.set_column(found.schema.get_field_index("episode_reward"), "episode_reward", rows["episode_reward"])
    planner.recall_history(found.select(planner.columns).append_column("trained_step", rows["step"]))
