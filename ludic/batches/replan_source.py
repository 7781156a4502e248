"""Replan source: train a branch of another run, by rules of its own over the rollouts that each step considered.

Reads that run's attempts/, batches/ and rollouts/. Step n of the branch plans step replan_from + n of the other run.
"""

import pyarrow as pa

from ludic.batches.config import BatchConfig
from ludic.batches.replan import Replanner
from ludic.batches.replay import plan_of_ledger, restamp
from ludic.batches.rules import own_rules
from ludic.batches.source import MORE_THAN_ANY_BATCH, Demand, Plan
from ludic.batches.vetting import Vetting
from ludic.code.kept import keep_code
from ludic.errors import ConfigError
from ludic.sql.planner import LossUnit
from ludic.store import Root, read_ledger
from ludic.store.ledger import attempt_of_steps, read_rollouts
from ludic.store.records import CheckpointInfo, CodeRecord


class ReplanSource:
    """Source that plans the steps of another run again."""

    def __init__(self, root: Root, config: BatchConfig, *, loss_unit: LossUnit = "row") -> None:
        """Raises ConsentError, QueryError, and ConfigError if the other run planned no step after replan_from."""
        assert config.replay_batches is not None
        assert config.replan_from is not None
        self._root, self._other, self._before = root, Root.open(config.replay_batches), config.replan_from
        self._attempt_of = attempt_of_steps(self._other)
        if self._before + 1 not in self._attempt_of:
            raise ConfigError(f"{self._other.url} has no step {self._before + 1}, where replan_from says to begin")
        self._rules = own_rules(root, config, loss_unit=loss_unit)
        self._replanner = Replanner(self._other, self._rules, read_rollouts)
        self._vetting = Vetting(self._other)

    def count_steps(self, resumed: CheckpointInfo | None) -> None:
        """Return None: num_steps is a setting, and the other run's last step ends training too."""

    def keep_code(self) -> list[CodeRecord]:
        return keep_code(self._root, self._rules.uses(), self._rules.files)

    def resume(self, resumed: CheckpointInfo | None, demand: Demand) -> None:
        """Do nothing: the step alone gives the position."""

    def plan(self, step: int, *, attempt_id: int, trainer_version: int) -> Plan | None:
        """Return the plan of a step. Raises ConfigError if the rules leave no rollout of it."""
        there = self._before + step
        if there not in self._attempt_of:
            return None
        rows = self._replanner.plan(read_ledger(self._other, self._attempt_of[there], there), self._vetting.find)
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
        """Return more groups than any batch takes, so that workers are asked for none."""
        return MORE_THAN_ANY_BATCH

    def close(self) -> None:
        """Do nothing, since no plan waits."""
