"""Online plans of batches, on rank 0: poll the store, plan by SQL, write the ledger one step ahead.

Reads rollouts/, writes batches/. The ledger file of a step is written before its gradient step begins. If the store
can't be listed or read, polling is retried until the stall limit; if it can't be written, the trainer ends.
Plans are made in a thread while the previous step trains.
"""

import logging
import threading
import time
from dataclasses import replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import ConfigError, StalledError, StoreError
from ludic.sql.planner import BatchRules, Planner, Shortage
from ludic.store import Attempt, Cursor, RolloutReader, Root, write_ledger
from ludic.training.config import TrainConfig
from ludic.training.objective_settings import PAIRED
from ludic.training.plans import Plan, PlanThread
from ludic.training.publisher import Publisher

logger = logging.getLogger(__name__)

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.005, 0.5
_REPORT_EVERY_S = 30.0
_ENDLESS = 2**31 - 1
_FILTER_OF = {"max_off_policy_steps": "max_off_policy_steps", "max_age_s": "max_age"}


class PlanFeed:
    """Feed of plans over the rollouts that workers deliver."""

    def __init__(
        self,
        root: Root,
        attempt: Attempt,
        config: TrainConfig,
        planner: Planner,
        publisher: Publisher,
        cursor: Cursor,
        stop: threading.Event,
    ) -> None:
        """planner: has no rows yet. stop: ends the wait for a plan."""
        self._root, self._attempt, self._config = root, attempt, config
        self._planner, self._publisher = planner, publisher
        self._reader = RolloutReader(replace(root, stop=stop), planner.columns, cursor)
        self._thread = PlanThread()
        self._num_ready_groups = 0
        self._failure: StoreError | None = None
        """Error of the last poll; None if it succeeded."""
        self._is_fresh = True
        self._is_closed = False
        self._stop = stop

    def start(self, step: int, trainer_version: int) -> None:
        """Begin to plan a step; see Feed."""
        self._is_fresh = False
        self._num_ready_groups = self._planner.num_pending_groups
        self._thread.start(partial(self._plan, step, trainer_version))

    def take(self) -> Plan | None:
        """Wait for the plan; returns None if stopped. Raises StalledError, FencedError, StoreError, QueryError."""
        return self._thread.take()

    def count_ready_groups(self, latest_version: int | None) -> int:
        """Return the number of groups ready to train on: pending, or in the plan of the last `start`.

        Before the first plan, polls the store for groups that an earlier trainer left.
        """
        if self._is_fresh and latest_version is not None:
            self._poll(latest_version)
        return self._num_ready_groups

    def close(self) -> None:
        self._is_closed = True
        self._thread.close()

    def _plan(self, step: int, trainer_version: int) -> Plan | None:
        wait, shortage = _Wait(self._config.stall_limit_s), None
        while not (self._stop.is_set() or self._is_closed):
            if self._poll(trainer_version) or shortage is None:
                wait.heard_something()
                rows = self._planner.plan(
                    step=step, attempt_id=self._attempt.attempt_id, trainer_version=trainer_version
                )
                if rows is not None:
                    return self._commit(step, rows, window_of(self._config, trainer_version))
                shortage = self._planner.shortage(step, trainer_version)
            self._wait_for_groups(step, trainer_version, shortage, wait)
        return None

    def _poll(self, trainer_version: int) -> bool:
        """Add new groups to the planner; returns whether there are any. A failing store counts as having none."""
        try:
            rows = self._reader.poll(window_of(self._config, trainer_version))
        except StoreError as error:
            if self._failure is None:
                logger.warning("no new rollouts, and asking again: %s", error)
            self._failure = error
            return False
        self._failure = None
        if rows is not None:
            self._planner.add(rows)
            self._num_ready_groups = self._planner.num_pending_groups
            new = rows.filter(pc.invert(rows["is_duplicate"]))
            if new.num_rows:
                self._publisher.note_arrivals(new)
        return rows is not None

    def _commit(self, step: int, rows: pa.Table, window: range | None) -> Plan:
        write_ledger(self._root, self._attempt, step, rows)
        self._reader.use(rows)
        self._reader.consume(self._planner.used_up(rows), forgets=window is not None)
        if window is not None:
            # Not at each poll: the first poll may look from a newer version than the step that follows.
            self._reader.forget_before(window.start)
        num_pending_groups = self._planner.num_pending_groups
        self._num_ready_groups = num_pending_groups + self._root.run.groups_per_batch
        return Plan(
            step=step,
            rows=rows,
            cursor=self._reader.cursor.to_dict(),
            num_pending_groups=num_pending_groups,
            num_unreadable_files=len(self._reader.set_aside),
        )

    def _wait_for_groups(self, step: int, trainer_version: int, shortage: Shortage, wait: "_Wait") -> None:
        num_missing_groups = shortage.wanted_groups - shortage.ready_groups
        self._publisher.ask_for_more(num_missing_groups, wait.idle_s, version=trainer_version)
        if wait.is_over:
            if self._failure is not None:
                raise StalledError(
                    f"step {step} waited {wait.idle_s:.0f} s for new rollouts, and the store fails: {self._failure}"
                ) from self._failure
            raise StalledError(
                f"{self._root.url}: step {step} waited {wait.idle_s:.0f} s without new rollouts; "
                f"{shortage.describe()}; see that workers run, or raise stall_limit_s"
            )
        if wait.should_report():
            logger.warning("step %d waits for rollouts: %s", step, self._failure or shortage.describe())
        self._stop.wait(wait.next_pause_s())


def window_of(config: TrainConfig, trainer_version: int) -> range | None:
    """Return the policy versions that may be trained on, with the next one, which workers may already use; or None."""
    most = config.max_off_policy_steps
    return None if most is None else range(max(0, trainer_version - most), trainer_version + 2)


def batch_rules(config: TrainConfig, groups_per_batch: int, seed: int = 0) -> BatchRules:
    """Return the planner's rules from the settings; max_off_policy_steps and max_age_s become filters.

    Offline these two are ignored, since no newer rollouts would come. seed: of the run. Raises ConfigError if
    sql_params holds a name that is a setting itself.
    """
    limits = {"max_off_policy_steps": config.max_off_policy_steps, "max_age_s": config.max_age_s}
    limits = {name: value for name, value in limits.items() if value is not None and not config.offline}
    for name in limits.keys() & config.sql_params.keys():
        raise ConfigError(f"sql_params has {name!r}, which is a setting of its own; leave it out of sql_params")
    return BatchRules(
        advantage=config.advantage,
        filters=(*config.filters, *(_FILTER_OF[name] for name in limits)),
        where=config.where,
        selection=config.selection or ("epochs" if config.offline else "fifo"),
        max_uses=(config.epochs or _ENDLESS) if config.offline else config.max_uses,
        params={**config.sql_params, **limits},
        seed=seed,
        baseline_over=config.baseline_over,
        pairs=config.objective in PAIRED,
        groups_per_batch=groups_per_batch,
        max_seq_len=config.max_seq_len,
    )


class _Wait:
    """Growing pauses between polls, and the time since the last arrival."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._reported = time.monotonic()
        self.heard_something()

    def heard_something(self) -> None:
        self._since = time.monotonic()
        self._pause_s = _SHORTEST_WAIT_S

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._since

    @property
    def is_over(self) -> bool:
        return self._limit_s is not None and self.idle_s >= self._limit_s

    def next_pause_s(self) -> float:
        pause_s = self._pause_s
        self._pause_s = min(pause_s * 1.2, _LONGEST_WAIT_S)
        return pause_s

    def should_report(self) -> bool:
        if time.monotonic() - self._reported < _REPORT_EVERY_S:
            return False
        self._reported = time.monotonic()
        return True
