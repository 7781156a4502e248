"""Replay another run: train on its batches step by step, or by other rules on the rollouts that its steps considered.

Reads that run's attempts/, checkpoints/, batches/ and scores/, and its rollouts, which must not have expired. Raises
ConfigError, which names the missing step or the unusable row.
"""

import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import ConfigError
from ludic.root import CheckpointId, CheckpointInfo, CodeRecord, Root
from ludic.root.rows import Cursor, attempt_of_steps, effective_steps, read_ledger, read_rollouts
from ludic.root.sql import LossUnit
from ludic.run import keep_code
from ludic.training.batches.config import BatchConfig
from ludic.training.batches.reading import Vetting
from ludic.training.batches.replanner import Replanner
from ludic.training.batches.source import MORE_THAN_ANY_BATCH, BatchPlan, Demand, own_rules

# --- Replay: the batches as they were ------------------------------------------------------------------
# Up to the other run's newest checkpoint. On one rank, the same first weights and settings give bit for bit the same
# weights (ludic.training.inherited_settings).


class ReplaySource:
    """Source that repeats the plans of another run."""

    def __init__(
        self, other: Root, last: CheckpointId, num_steps: int, *, first_step: int = 1, needs_logprobs: bool = True
    ) -> None:
        """List the other run's ledger up to its checkpoint `last`.

        num_steps: setting of the other run, which learning rates depend on; it may have stopped earlier. first_step:
        above 1 for a cut, which lacks the steps before. needs_logprobs: of the loss. Raises ConfigError if the ledger
        lacks a step.
        """
        self._other, self._num_steps = other, num_steps
        self._attempt_of = {step: attempt_id for attempt_id, step in effective_steps(other, last)}
        self._first_step, self._vetting, self._needs_logprobs = first_step, Vetting(other), needs_logprobs
        missing = set(range(first_step, last[1] + 1)) - self._attempt_of.keys()
        if missing:
            raise ConfigError(
                f"{other.url}: batches/ lacks step {min(missing)}; a replay needs every step from the first on"
            )

    def count_steps(self, resumed: CheckpointInfo | None) -> int:
        return self._num_steps

    def keep_code(self) -> list[CodeRecord]:
        """Return no records: the other run's ledger already holds the decisions of its code."""
        return []

    def resume(self, resumed: CheckpointInfo | None, demand: Demand) -> None:
        """Check that a replay of a cut begins with its checkpoint; otherwise the step alone determines the position."""
        step = resumed.step if resumed else 0
        if step + 1 < self._first_step:
            raise ConfigError(
                f"{self._other.url} is a cut that begins after step {self._first_step - 1}, and this run is at step "
                f"{step}; replay the cut into a new root"
            )

    def plan(self, step: int, *, attempt_id: int, trainer_version: int) -> BatchPlan | None:
        """Return the plan of a step; see PlanSource. Raises ConfigError if a row of it can't be trained on."""
        if step not in self._attempt_of:
            return None
        rows = read_ledger(self._other, self._attempt_of[step], step)
        rows = restamp(rows, self._other.url, attempt_id, trainer_version)
        where = f"step {step} of {self._other.url}"
        self._vetting.check(rows.filter(rows["used"]), where, needs_logprobs=self._needs_logprobs)
        return plan_of_ledger(step, rows, self._vetting)

    def count_ready_groups(self, latest_version: int | None) -> int:
        """Return more groups than any batch takes, so that workers sample none."""
        return MORE_THAN_ANY_BATCH

    def close(self) -> None:
        """Do nothing, since no plan waits."""


def plan_of_ledger(step: int, rows: pa.Table, vetting: Vetting) -> BatchPlan:
    """Return a step's plan with the ledger rows of another run: no group waits, and the step is the position.

    vetting: has checked the used rows.
    """
    return BatchPlan(
        step=step,
        rows=rows,
        cursor=Cursor().to_dict(),
        num_pending_groups=0,
        num_unreadable_files=0,
        tokens=vetting.tokens,
    )


def restamp(rows: pa.Table, url: str, attempt_id: int, trainer_version: int) -> pa.Table:
    """Return another run's ledger rows as rows of this run, with the root of each rollout."""
    values = {
        "attempt_id": pa.repeat(pa.scalar(attempt_id, pa.int32()), rows.num_rows),
        "trainer_version": pa.repeat(pa.scalar(trainer_version, pa.int64()), rows.num_rows),
        "lag": pc.subtract(trainer_version, rows["policy_version"]),
        "lag_last": pc.add(rows["lag_last"], pc.subtract(trainer_version, rows["trainer_version"])),
        "root": pc.fill_null(rows["root"], url),
    }
    for name, column in values.items():
        rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), column)
    return rows


# --- Replan source: a branch of another run ------------------------------------------------------------
# Trains by its own rules over the rollouts that each step considered. Step n of the branch plans step replan_from + n
# of the other run.


class ReplanSource:
    """Source that plans the steps of another run again."""

    def __init__(
        self, root: Root, config: BatchConfig, *, loss_unit: LossUnit = "row", needs_logprobs: bool = True
    ) -> None:
        """Raises ConsentError, QueryError, and ConfigError if the other run planned no step after replan_from."""
        assert config.replay_batches is not None
        assert config.replan_from is not None
        self._root, self._other, self._before = root, Root.open(config.replay_batches), config.replan_from
        self._attempt_of = attempt_of_steps(self._other)
        if self._before + 1 not in self._attempt_of:
            raise ConfigError(f"{self._other.url} has no step {self._before + 1}, where replan_from says to begin")
        self._rules = own_rules(root, config, loss_unit=loss_unit, needs_logprobs=needs_logprobs)
        self._replanner = Replanner(self._other, self._rules)
        self._vetting = Vetting(self._other)

    def count_steps(self, resumed: CheckpointInfo | None) -> None:
        """Return None: num_steps is a setting, and the other run's last step ends training too."""

    def keep_code(self) -> list[CodeRecord]:
        return keep_code(self._root, self._rules.uses(), self._rules.files)

    def resume(self, resumed: CheckpointInfo | None, demand: Demand) -> None:
        """Do nothing: the step alone determines the position."""

    def plan(self, step: int, *, attempt_id: int, trainer_version: int) -> BatchPlan | None:
        """Return the plan of a step. Raises ConfigError if the rules leave no rollout of it."""
        there = self._before + step
        if there not in self._attempt_of:
            return None
        ledger = read_ledger(self._other, self._attempt_of[there], there)
        rollouts = read_rollouts(self._other, ledger, self._replanner.columns)
        rows = self._replanner.plan(ledger, rollouts, self._vetting.find)
        if not any(rows["used"].to_pylist()):
            raise ConfigError(
                f"{self._root.url}: the filters drop all rollouts of step {there} of {self._other.url}; train fewer "
                "steps, or with other filters"
            )
        rows = restamp(rows, self._other.url, attempt_id, trainer_version)
        index = rows.schema.get_field_index("step")
        rows = rows.set_column(index, rows.schema.field(index), pa.repeat(pa.scalar(step, pa.int64()), rows.num_rows))
        return plan_of_ledger(step, rows, self._vetting)

    def count_ready_groups(self, latest_version: int | None) -> int:
        """Return more groups than any batch takes, so that workers sample none."""
        return MORE_THAN_ANY_BATCH

    def close(self) -> None:
        """Do nothing, since no plan waits."""
