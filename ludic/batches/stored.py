"""Feed of plans over stored rollouts: offline in epochs, or the batches of another run (replay).

Writes batches/ of its own root, as the online feed does; reads rollouts/ and batches/ of any root.
"""

import threading
from functools import partial
from typing import Protocol

from ludic.batches.offline import OfflinePlans
from ludic.batches.plans import Plan, PlanThread
from ludic.batches.replay import ReplayPlans
from ludic.store import Attempt, Root, write_ledger
from ludic.store.code import CodeRecord
from ludic.training.checkpoint import CheckpointInfo
from ludic.training.config import TrainConfig

_MORE_THAN_ANY_BATCH = 2**31


class StoredPlans(Protocol):
    """Source of plans over the rollouts and batches that are stored when training begins."""

    def count_steps(self, resumed: CheckpointInfo | None) -> int | None:
        """Return num_steps for training, when resuming from a checkpoint; None keeps the setting."""

    def code(self) -> list[CodeRecord]:
        """Return a record of each SQL or Python text that plans are made with."""

    def resume(self, resumed: CheckpointInfo | None) -> None:
        """Resume from a checkpoint, or begin at the start if it is None; called once, before the first plan."""

    def plan(self, step: int, *, attempt_id: int, trainer_version: int) -> Plan | None:
        """Return the next plan, in order of steps; None after the last."""


def open_stored(root: Root, config: TrainConfig) -> StoredPlans | None:
    """Return the plans for offline training or a replay; None online. Offline reads the scalars of all sources.

    Raises ConfigError if a source has no rollouts to train on, or if the run to replay began with another model or
    other settings; MissingRootError if a source is no root.
    """
    if config.batch.offline:
        return OfflinePlans(root, config)
    if config.batch.replay_batches is not None:
        return ReplayPlans(root, config)
    return None


class StoredFeed:
    """Feed of plans over stored rollouts."""

    def __init__(self, root: Root, attempt: Attempt, plans: StoredPlans, stop: threading.Event) -> None:
        self._root, self._attempt, self._plans, self._stop = root, attempt, plans, stop
        self._thread = PlanThread()

    def start(self, step: int, trainer_version: int) -> None:
        """Begin to plan a step; see Feed."""
        self._thread.start(partial(self._plan, step, trainer_version))

    def take(self) -> Plan | None:
        """Wait for the plan and return it; see Feed. Raises FencedError, StoreError, QueryError."""
        return self._thread.take()

    def count_ready_groups(self, latest_version: int | None) -> int:
        """Return more groups than any batch takes, so that workers are asked for none."""
        return _MORE_THAN_ANY_BATCH

    def close(self) -> None:
        self._thread.close()

    def _plan(self, step: int, trainer_version: int) -> Plan | None:
        if self._stop.is_set():
            return None
        plan = self._plans.plan(step, attempt_id=self._attempt.attempt_id, trainer_version=trainer_version)
        if plan is not None:
            write_ledger(self._root, self._attempt, step, plan.rows)
        return plan
