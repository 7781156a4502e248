"""Training on what is stored: a feed whose plans nobody waits for, offline (epochs) or as another run did (replay).

Writes batches/ of its own root, as the online feed does; reads rollouts/ and batches/ of any.
"""

import threading
from functools import partial
from typing import Protocol

from ludic.store import Attempt, Root, write_ledger
from ludic.store.code import CodeRecord
from ludic.training.checkpoint import CheckpointInfo
from ludic.training.config import TrainConfig
from ludic.training.offline import OfflinePlans
from ludic.training.plans import Plan, PlanThread
from ludic.training.replay import ReplayPlans

_MORE_THAN_ANY_BATCH = 2**31


class StoredPlans(Protocol):
    """Plans that follow from what is stored when training begins."""

    def count_steps(self, resumed: CheckpointInfo | None) -> int | None:
        """The last step that there is a plan for, going on from a checkpoint; None where there is no last one."""

    def code(self) -> list[CodeRecord]:
        """The texts that plans are made with."""

    def resume(self, resumed: CheckpointInfo | None) -> None:
        """Go on from a checkpoint, None from the start; called once, before the first plan."""

    def plan(self, step: int, *, attempt_id: int, trainer_version: int) -> Plan | None:
        """The next plan, in order of steps; None behind the last."""


def open_stored(root: Root, config: TrainConfig) -> StoredPlans | None:
    """What the settings ask for; None is online. Reads the scalars of all sources.

    Raises ConfigError for a source that is no root or has nothing to train on, or that another model's weights wrote
    what is to be replayed.
    """
    if config.offline:
        return OfflinePlans(root, config)
    if config.replay_batches is not None:
        return ReplayPlans(root, config)
    return None


class StoredFeed:
    """Plans over what is stored; a Feed."""

    def __init__(self, root: Root, attempt: Attempt, plans: StoredPlans, stop: threading.Event) -> None:
        self._root, self._attempt, self._plans, self._stop = root, attempt, plans, stop
        self._thread = PlanThread()

    def start(self, step: int, trainer_version: int) -> None:
        """As Feed has it."""
        self._thread.start(partial(self._plan, step, trainer_version))

    def take(self) -> Plan | None:
        """As Feed has it. Raises FencedError, StoreError, QueryError."""
        return self._thread.take()

    def count_ready_groups(self, latest_version: int | None) -> int:
        """More than any batch takes: no worker is asked for anything."""
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
