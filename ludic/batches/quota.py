"""Number of groups that each worker should sample with a version: enough for the next steps, without deadlock.

Pure. The first number follows from run.json, later ones from arrivals. Filters may drop most groups, and workers may
die or join. Then fewer usable groups arrive than requested, and the trainer requests more.
"""

import math
from collections import Counter, defaultdict

import pyarrow as pa

from ludic.store import RunConfig

PATIENCE_S = 10.0
"""Seconds without arrivals before the quota is raised although workers still owe groups; doubles each time."""
_MOST_EAGER = 16


class QuotaController:
    """Requested and delivered groups since the trainer started."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._groups: Counter[int] = Counter()
        self._workers: defaultdict[int, set[str]] = defaultdict(set)
        self._first_version: int | None = None
        self._eagerness = 1
        self._largest_call = 0
        self._idle_s = self._raised_at_s = self._slowest_answer_s = 0.0
        self._patience_s = PATIENCE_S
        self.version = -1
        self.groups_per_worker = 0

    def note_arrivals(self, rows: pa.Table) -> None:
        """Count new groups. rows: columns policy_version, worker_id, sequence and group_id."""
        self._slowest_answer_s = max(self._slowest_answer_s, self._idle_s - self._raised_at_s)
        self._idle_s, self._raised_at_s, self._patience_s = 0.0, 0.0, self._first_patience_s
        file = ["policy_version", "worker_id", "sequence"]
        for row in rows.group_by(file).aggregate([("group_id", "count_distinct")]).to_pylist():
            num_groups = row["group_id_count_distinct"]
            self._groups[row["policy_version"]] += num_groups
            self._workers[row["policy_version"]].add(_slot(row["worker_id"]))
            self._largest_call = max(self._largest_call, num_groups)

    def on_publish(self, version: int, num_ready_groups: int) -> int:
        """Return the groups per worker for a new version, given the number of groups ready to train on."""
        if self._first_version is None:
            self._first_version = version
        batches = self._run.steps_per_version + self._run.batches_ahead
        missing = max(0, batches * self._run.groups_per_batch - num_ready_groups - self._num_in_flight)
        self.version, self._eagerness, self._patience_s = version, 1, self._first_patience_s
        self.groups_per_worker = math.ceil(missing / self.num_workers)
        return self.groups_per_worker

    def on_shortage(self, num_missing_groups: int, idle_s: float) -> int | None:
        """Return a higher number of groups per worker if too few arrived; None while they are still being sampled."""
        if self._groups[self.version] >= self._num_asked:
            # All requested groups have arrived, and filters dropped too many: request more each time.
            self.groups_per_worker += math.ceil(num_missing_groups * self._eagerness / self.num_workers)
            self._eagerness = min(2 * self._eagerness, _MOST_EAGER)
            return self.groups_per_worker
        self._idle_s = idle_s
        if idle_s >= self._patience_s:
            # One live worker alone must be able to end the wait. Patience doubles, so that a slow worker's quota does
            # not grow without bound.
            self._raised_at_s, self._patience_s = idle_s, 2 * idle_s
            self.groups_per_worker += num_missing_groups
            return self.groups_per_worker
        return None

    @property
    def num_arrived(self) -> int:
        """Number of groups that workers delivered, of all versions."""
        return self._groups.total()

    @property
    def _num_in_flight(self) -> int:
        """Groups that workers still owe of this version, at most one call per worker: at a new version they finish
        their call and drop the rest. If these groups do not arrive, on_shortage requests more."""
        owed = max(0, self._num_asked - self._groups[self.version])
        return min(owed, self._largest_call * self.num_workers)

    @property
    def _first_patience_s(self) -> float:
        """Seconds: three times the longest wait for an arrival, measured from the last arrival or raise, but at least
        PATIENCE_S. A call of a large model may take minutes."""
        return max(PATIENCE_S, 3 * self._slowest_answer_s)

    @property
    def _num_asked(self) -> int:
        return self.groups_per_worker * self.num_workers

    @property
    def num_workers(self) -> int:
        """Number of workers that delivered in the two versions before; until there is a history, run.json's number."""
        recent = set().union(*(self._workers[version] for version in range(self.version - 2, self.version)))
        has_history = self._first_version is not None and self.version >= self._first_version + 3
        return len(recent) if recent and has_history else self._run.num_workers


def _slot(worker_id: str) -> str:
    """Return the slot of a worker_id such as w3-host-pid-start; all lives of a slot count as one worker."""
    return worker_id.partition("-")[0]
