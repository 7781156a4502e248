"""Set the budget of open groups: enough to keep engines full, few enough that rollouts do not get too old.

Pure. A group is open from its start until the publish of a version that was trained on it. So open groups are being
sampled, not read yet, ready, or in steps whose weights are not published. A worker starts a group while fewer groups
are open than the budget (`LatestPolicy.num_allowed`).

With G groups a version and N open groups, a rollout is N / G versions old on average when it is used, since groups are
used roughly in the order of their starts; long answers get older.
"""

from dataclasses import dataclass
from math import ceil

import pyarrow as pa

from ludic.root import LatestPolicy
from ludic.root.rows import slot_of
from ludic.run import RunConfig

PATIENCE_S = 10.0
"""Seconds without arrivals after which the budget is raised although groups are open; doubles each time. So a run does
not stall on lost groups that workers count as open, such as those in an unreadable file."""
_FORGOTTEN_VERSIONS = 64
"""Versions without arrivals after which a worker is left out of LATEST."""


@dataclass(slots=True)
class _Seen:
    """Groups read from a slot's newest life."""

    worker_id: str
    sequence: int
    version: int
    """Version that was the newest at the last arrival."""


class Budget:
    """The budget, and the other values of LATEST."""

    def __init__(self, run: RunConfig, max_off_policy_steps: int | None, attempt_id: int = 0) -> None:
        """max_off_policy_steps: in versions; None drops no rollouts."""
        self._run, self._max_age, self._attempt_id = run, max_off_policy_steps, attempt_id
        self._least, self._most = run.budget_bounds(max_off_policy_steps)
        self._size, self._raised_by = self._least, 0
        self._seen: dict[int | None, _Seen] = {}
        """By slot: the lives of one slot are one worker, whose newest life counts."""
        self._num_ready = 0
        self._lacks_groups = False
        """True if the last plan of the next step found too few groups."""
        self._planned_step = self._published_step = 0
        self.latest: LatestPolicy | None = None
        """What workers were told last; None before the first version of this trainer."""
        self._num_arrived = 0
        """Groups that have arrived since."""
        self._slowest_answer_s = self._idle_s = self._raised_at_s = 0.0
        self._patience_s = PATIENCE_S
        self.version = -1
        """Newest version; -1 before the first one of this trainer."""

    def begin(self, num_ready_groups: int) -> None:
        """Record the groups of an earlier trainer that are read and not planned."""
        self._num_ready = num_ready_groups

    def note_arrivals(self, rows: pa.Table, num_ready_groups: int) -> None:
        """Count new rows as read. rows: columns worker_id, sequence and group_id. num_ready_groups: with these."""
        self._num_ready = num_ready_groups
        self._num_arrived += len(rows["group_id"].unique())
        self._slowest_answer_s = max(self._slowest_answer_s, self._idle_s - self._raised_at_s)
        self._idle_s = self._raised_at_s = 0.0
        # Three times the longest wait for an arrival, from the last arrival or raise: an answer of a large model may
        # take minutes.
        self._patience_s = max(PATIENCE_S, 3 * self._slowest_answer_s)
        for row in rows.group_by("worker_id").aggregate([("sequence", "max")]).to_pylist():
            worker_id, sequence = row["worker_id"], row["sequence_max"]
            seen = self._seen.get(slot_of(worker_id))
            if seen is None or seen.worker_id != worker_id:
                self._seen[slot_of(worker_id)] = _Seen(worker_id, sequence, self.version)
            else:
                seen.sequence, seen.version = max(seen.sequence, sequence), self.version

    def on_publish(self, version: int, step: int) -> None:
        """Record a new version, with the weights of a step.

        If a batch is left for a further step, the budget shrinks. If the next step is not planned because groups are
        missing, the trainer waits for rollouts, and the budget grows. A step whose plan has not begun, or is being
        made, waits for the reader, which more rollouts do not help.
        """
        if self._num_ready >= self._run.groups_per_batch:
            self._size = max(self._size - self._run.groups_per_batch, self._least)
        elif self.version >= 0 and self._lacks_groups and self._planned_step <= step:
            self._size = min(2 * self._size, self._most)
        self.version, self._published_step = version, step
        self._planned_step = max(self._planned_step, step)
        forgotten = version - _FORGOTTEN_VERSIONS
        self._seen = {slot: seen for slot, seen in self._seen.items() if seen.version > forgotten}

    def on_plan(self, step: int, num_ready_groups: int) -> None:
        """Record that a step is planned, and the groups that are left for later steps."""
        self._planned_step, self._num_ready, self._raised_by = step, num_ready_groups, 0
        self._lacks_groups = False

    def on_wait(self, num_ready_groups: int, num_missing_groups: int, idle_s: float) -> None:
        """Record that the next step waits. num_ready_groups: number of read groups that its batch could use.

        Groups that filters drop are not ready, so workers sample others instead.
        """
        self._num_ready, self._idle_s, self._lacks_groups = num_ready_groups, idle_s, True
        if idle_s >= self._patience_s:
            # A single live worker must be able to end the wait. Patience doubles, so that a slow worker's budget does
            # not grow without bound.
            self._raised_at_s, self._patience_s = idle_s, 2 * idle_s
            self._raised_by += num_missing_groups * self._num_workers

    @property
    def has_room(self) -> bool:
        """True if workers would start groups that the last LATEST does not allow.

        They count each group as open until LATEST says otherwise, for example groups that filters drop.
        """
        if self.latest is None:
            return True
        return self._budget > (self.latest.budget or 0) or self._num_counted < self.latest.num_ready + self._num_arrived

    def make_latest(self) -> LatestPolicy:
        """Return what to tell workers now."""
        self._num_arrived = 0
        self.latest = LatestPolicy(
            version=self.version,
            budget=self._budget,
            num_workers=self._num_workers,
            num_ready=self._num_counted,
            oldest_version=max(0, self.version - self._max_age) if self._max_age is not None else 0,
            seen={seen.worker_id: seen.sequence for seen in self._seen.values()},
            attempt_id=self._attempt_id,
            planned_step=self._planned_step,
        )
        return self.latest

    @property
    def _budget(self) -> int:
        return self._size + self._raised_by

    @property
    def _num_counted(self) -> int:
        """Number of groups that are ready, or in steps whose weights are not published."""
        return self._num_ready + (self._planned_step - self._published_step) * self._run.groups_per_batch

    @property
    def _num_workers(self) -> int:
        """Number of workers that delivered lately; at first, the number in run.json.

        Lately means twice the average time that a group is open, in versions: among many workers with long answers, few
        deliver in each version.
        """
        oldest = self.version - max(2, ceil(2 * self._size / self._run.groups_per_version))
        recent = sum(seen.version >= oldest for seen in self._seen.values())
        return recent if recent and self._published_step >= 3 * self._run.steps_per_version else self._run.num_workers
