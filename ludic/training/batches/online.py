"""Poll the store for the rollouts that workers deliver, and plan batches of them by SQL.

Reads rollouts/, and scores/ if the settings name scorers. If the store fails, or filters drop all new rollouts, polling
continues for up to rollout_timeout_s; then it raises StalledError or StoreError. Raises AllFailedError if every new
rollout failed.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pyarrow as pa

from ludic.errors import AllDroppedError, AllFailedError, StalledError, StoreError
from ludic.records import TRACEBACK
from ludic.root import CheckpointInfo, CodeRecord, Root
from ludic.root.rows import Cursor, RolloutReader, ScoreReader, count_uses, recall_requests, recall_sources
from ludic.root.sql import LossUnit, Planner, Shortage
from ludic.run import keep_code, run_of
from ludic.training.batches.config import BatchConfig
from ludic.training.batches.reading import Vetting
from ludic.training.batches.source import BatchPlan, Demand, own_rules, recall_history

logger = logging.getLogger(__name__)

MAX_FAILED_BATCHES = 2
"""Batches' worth of groups after which the trainer, and with it `ludic run`, stops if every rollout of them failed."""
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.005, 0.5
_PAUSE_SHARE, _LOCAL_PAUSE_SHARE = 4.0, 1.0
"""Minimum pause after a poll, as a multiple of the time of a poll without new files, up to _LONGEST_WAIT_S. On S3 a
poll is one LIST per version of the window: with ten workers and shorter pauses, these were most of a run's request
costs (benchmarks/scale.py)."""
_REPORT_EVERY_S = 30.0


class OnlineSource:
    """Source of plans over the rollouts that workers deliver."""

    _reader: RolloutReader
    _demand: Demand

    def __init__(
        self,
        root: Root,
        config: BatchConfig,
        stop: threading.Event,
        *,
        loss_unit: LossUnit = "row",
        needs_logprobs: bool = True,
    ) -> None:
        """stop: ends the wait for a plan. Raises ConsentError, ConfigError, QueryError."""
        self._root, self._config, self._stop = root, config, stop
        self._rules = own_rules(root, config, loss_unit=loss_unit, needs_logprobs=needs_logprobs)
        self._planner = Planner(self._rules, root.extra_columns)
        self._scores = ScoreReader(root, self._planner.scorers)
        self._vetting = Vetting(root)
        self._num_pending_groups = self._num_ready_groups = 0
        self._wait = _Wait(root, config.rollout_timeout_s)
        self._failure: StoreError | None = None
        """Error of the last poll; None if it succeeded."""
        self._failed = FailedGroups()
        self._is_fresh = True
        self._is_closed = False

    def count_steps(self, resumed: CheckpointInfo | None) -> None:
        """Return None: workers deliver rollouts for any number of steps."""

    def keep_code(self) -> list[CodeRecord]:
        return keep_code(self._root, self._rules.uses(), self._rules.files)

    def resume(self, resumed: CheckpointInfo | None, demand: Demand) -> None:
        num_uses = count_uses(self._root, (resumed.attempt_id, resumed.step) if resumed else None)
        self._planner.recall_uses(num_uses)
        if resumed is not None:
            checkpoint = resumed.attempt_id, resumed.step
            recall_history(self._root, self._planner, checkpoint, baseline_over=self._rules.baseline_over)
        cursor = Cursor.from_dict(dict(resumed.cursor)) if resumed else Cursor()
        if not cursor.knows_requests:
            recall_requests(self._root, cursor, num_uses)
        if resumed is not None:
            window = window_of(self._config, resumed.policy_version)
            first_version = 0 if window is None else window.start
            checkpoint = resumed.attempt_id, resumed.step
            recall_sources(self._root, cursor, first_version, checkpoint, forgets=window is not None)
        columns = list(dict.fromkeys((*self._planner.columns, TRACEBACK)))  # for FailedGroups
        self._reader = RolloutReader(replace(self._root, stop=self._stop), columns, cursor)
        self._demand = demand

    def plan(self, step: int, *, attempt_id: int, trainer_version: int) -> BatchPlan | None:
        """Wait until enough groups are pending; see PlanSource."""
        self._is_fresh = False
        self._num_ready_groups = self._num_pending_groups
        wait, shortage, is_first = self._wait, None, True
        wait.begin()
        while not (self._stop.is_set() or self._is_closed):
            has_new = wait.poll(partial(self._poll, trainer_version))
            self._check_failures(step)
            if has_new or is_first:
                wait.heard_something(is_arrival=not is_first)
                rows = self._choose_rows(step, attempt_id=attempt_id, trainer_version=trainer_version)
                if rows is not None:
                    return self._consume(step, rows, window_of(self._config, trainer_version))
                shortage, is_first = None, False
            if not has_new or wait.is_over:  # otherwise poll first, which may find the rest
                shortage = shortage or self._planner.shortage(step, trainer_version)
                self._wait_for_groups(step, trainer_version, shortage, wait)
            self._stop.wait(wait.next_pause_s())
        return None

    def count_ready_groups(self, latest_version: int | None) -> int:
        """Return the pending groups; while a plan waits, those that it could use.

        Before the first plan, polls the store for groups that an earlier trainer left.
        """
        if self._is_fresh and latest_version is not None:
            self._poll(latest_version)
        return self._num_ready_groups

    def close(self) -> None:
        self._is_closed = True

    def _poll(self, trainer_version: int) -> bool:
        """Add new groups and scores to the planner; returns whether plans have more groups to choose from.

        A failing store counts as having none.
        """
        try:
            rows = self._reader.poll(window_of(self._config, trainer_version))
            self._failed.add(rows)
            if rows is not None:
                self._add(rows)
            scores = self._scores.poll()
        except StoreError as error:
            if self._failure is None:
                logger.warning("no new rollouts, polling again: %s", error)
            self._failure = error
            return False
        self._failure = None
        if scores is not None:
            self._planner.add_scores(scores)
        return rows is not None or self._planner.release_scored()

    def _add(self, rows: pa.Table) -> None:
        self._planner.add(rows)
        self._count_pending()
        self._demand.note_arrivals(rows, self._num_ready_groups)

    def _count_pending(self) -> None:
        self._num_pending_groups = self._num_ready_groups = self._planner.num_pending_groups

    def _check_failures(self, step: int) -> None:
        """Raise AllFailedError if every rollout of the last MAX_FAILED_BATCHES batches failed."""
        num_groups = self._failed.num_groups
        if num_groups < MAX_FAILED_BATCHES * run_of(self._root).groups_per_batch:
            return
        error = AllFailedError(
            f"{self._failed.error}; by this, or alike, each of the {self._failed.num_rollouts} rollouts of the newest "
            f"{num_groups} groups of {self._root.url} failed, and step {step} has nothing to train on; correct it and "
            "start again, with --update-code if a file of yours has changed"
        )
        error.detail = self._failed.traceback
        raise error

    def _choose_rows(self, step: int, *, attempt_id: int, trainer_version: int) -> pa.Table | None:
        """Return the rows of the next plan; None if there are too few groups, whatever filters drop."""
        if self._num_pending_groups < run_of(self._root).groups_per_batch:
            return None
        return self._planner.plan(
            step=step,
            attempt_id=attempt_id,
            trainer_version=trainer_version,
            find_untrainable=self._vetting.find,
        )

    def _consume(self, step: int, rows: pa.Table, window: range | None) -> BatchPlan:
        """Move the reader behind a plan's rows."""
        self._reader.use(rows)
        self._reader.consume(self._planner.used_up(rows), forgets=window is not None)
        if window is not None:
            # Not at each poll: the first poll may start at a newer version than the next step.
            self._reader.forget_before(window.start)
        self._count_pending()
        self._demand.note_plan(step, self._num_pending_groups)
        return BatchPlan(
            step=step,
            rows=rows,
            cursor=self._reader.cursor.to_dict(),
            num_pending_groups=self._num_pending_groups,
            num_unreadable_files=len(self._reader.broken_files),
            tokens=self._vetting.tokens,
        )

    def _wait_for_groups(self, step: int, trainer_version: int, shortage: Shortage, wait: "_Wait") -> None:
        self._num_ready_groups = shortage.ready_groups + shortage.num_waiting_groups
        wait.note_groups(shortage.ready_groups, self._num_ready_groups)
        num_missing_groups = shortage.wanted_groups - self._num_ready_groups
        if num_missing_groups > 0:
            self._demand.note_wait(self._num_ready_groups, num_missing_groups, wait.idle_s, version=trainer_version)
        if wait.is_over:
            raise self._stalled(step, shortage, wait) from self._failure
        if wait.should_report():
            logger.warning("step %d waits for rollouts: %s", step, self._failure or shortage.describe())

    def _stalled(self, step: int, shortage: Shortage, wait: "_Wait") -> StalledError:
        """Return the error that ends a wait: a failing store, filters that drop all rollouts, or missing workers."""
        waited = f"{self._root.url}: step {step} waited {wait.stuck_s:.0f} s"
        if self._failure is not None:
            return StalledError(f"{waited} for new rollouts, and the store fails: {self._failure}")
        if not wait.has_arrivals:
            advice = "see that workers run, or raise rollout_timeout_s"
            return StalledError(f"{waited} without new rollouts; {shortage.describe()}; {advice}")
        where = self._config.where
        # The planner skips groups without a fitting row before any filter counts them.
        by_where = "" if where is None else f"; where ({where}) takes only groups with a row for which it is true"
        return (AllDroppedError if shortage.drops or by_where else StalledError)(
            f"{waited}; groups came, but no step can use them: {shortage.describe()}{by_where}; change the filter, or "
            f"look at the rewards (ludic view {self._root.url})"
        )


def window_of(config: BatchConfig, trainer_version: int) -> range | None:
    """Return the policy versions that may be trained on, with the next one, which workers may already use; or None."""
    most = config.max_off_policy_steps
    return None if most is None else range(max(0, trainer_version - most), trainer_version + 2)


class FailedGroups:
    """Counts the groups that were read since the newest poll with a rollout that did not fail.

    Groups of the first poll do not count: they were sampled before this trainer began, perhaps by code that was
    corrected since.
    """

    def __init__(self) -> None:
        self.num_groups = self.num_rollouts = 0
        self.error: str | None = None
        """The most frequent error among the newest rows."""
        self.traceback: str | None = None
        self._is_first = True

    def add(self, rows: pa.Table | None) -> None:
        """Count the groups of a poll. rows: columns group_id, error and traceback; None if it found none."""
        is_first, self._is_first = self._is_first, False
        if rows is None:
            return
        if is_first or rows["error"].null_count:
            self.num_groups = self.num_rollouts = 0
            return
        self.num_groups += len(rows["group_id"].unique())
        self.num_rollouts += rows.num_rows
        errors = rows["error"].to_pylist()
        ((self.error, _),) = Counter(errors).most_common(1)
        self.traceback = rows["traceback"][errors.index(self.error)].as_py()


class _Wait:
    """Pauses between polls, the time since the last arrival, and since the last one that a batch could use."""

    def __init__(self, root: Root, limit_s: float | None) -> None:
        self._root, self._limit_s = root, limit_s
        self._poll_s: float | None = None
        """Seconds of the last poll that found nothing; before one, seconds of the first poll."""
        self.has_arrivals = False
        """True if new groups arrived that no batch could use."""
        self.begin()

    def begin(self) -> None:
        """Begin the wait for a plan."""
        self._reported = time.monotonic()
        self.heard_something()
        self._most_groups, self._useful, self.has_arrivals = (0, 0), self._since, False

    def poll(self, poll: Callable[[], bool]) -> bool:
        """Return the result of a poll: whether it found something."""
        began = time.monotonic()
        found = poll()
        if not found or self._poll_s is None:
            self._poll_s = time.monotonic() - began
        return found

    def heard_something(self, *, is_arrival: bool = False) -> None:
        self._since = time.monotonic()
        self.has_arrivals |= is_arrival
        self._pauses = self._root.pauses(_SHORTEST_WAIT_S, _LONGEST_WAIT_S)

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self._since

    def note_groups(self, num_ready: int, num_usable: int) -> None:
        """Record the number of groups that a batch could use, without and with those that wait for scores."""
        ready, usable = self._most_groups
        if num_ready > ready or num_usable > usable:
            self._most_groups = max(ready, num_ready), max(usable, num_usable)
            self._useful, self.has_arrivals = time.monotonic(), False

    @property
    def stuck_s(self) -> float:
        """Seconds since the number of usable groups last grew."""
        return time.monotonic() - self._useful

    @property
    def is_over(self) -> bool:
        return self._limit_s is not None and self.stuck_s >= self._limit_s

    def next_pause_s(self) -> float:
        share = _LOCAL_PAUSE_SHARE if self._root.is_local else _PAUSE_SHARE
        return min(max(next(self._pauses), share * (self._poll_s or 0.0)), _LONGEST_WAIT_S)

    def should_report(self) -> bool:
        if time.monotonic() - self._reported < _REPORT_EVERY_S:
            return False
        self._reported = time.monotonic()
        return True
