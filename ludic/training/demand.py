"""How many groups each worker should sample with a version: enough for the next steps, and never a deadlock.

Pure. The first answer follows from run.json; later ones from what arrived. Filters may drop most
groups and workers may die or join: then what was asked for is not what came, and the trainer asks for more.
"""

import math
from collections import Counter, defaultdict

import pyarrow as pa

from ludic.store import RunConfig

PATIENCE_S = 10.0
"""After so long without an arrival, a worker that still owes groups is taken for dead; after twice as long, again."""
_MOST_EAGER = 16


class Demand:
    """Arrivals and what was asked for, of one trainer start."""

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
        """Count new groups; `rows` has policy_version, worker_id, sequence and group_id."""
        self._slowest_answer_s = max(self._slowest_answer_s, self._idle_s - self._raised_at_s)
        self._idle_s, self._raised_at_s, self._patience_s = 0.0, 0.0, self._first_patience_s
        file = ["policy_version", "worker_id", "sequence"]
        for row in rows.group_by(file).aggregate([("group_id", "count_distinct")]).to_pylist():
            num_groups = row["group_id_count_distinct"]
            self._groups[row["policy_version"]] += num_groups
            self._workers[row["policy_version"]].add(_slot(row["worker_id"]))
            self._largest_call = max(self._largest_call, num_groups)

    def on_publish(self, version: int, num_ready_groups: int) -> int:
        """Groups a worker for a new version, given the groups that wait to be trained on."""
        if self._first_version is None:
            self._first_version = version
        batches = self._run.steps_per_version + self._run.batches_ahead
        missing = max(0, batches * self._run.groups_per_batch - num_ready_groups - self._num_in_flight)
        self.version, self._eagerness, self._patience_s = version, 1, self._first_patience_s
        self.groups_per_worker = math.ceil(missing / self.num_workers)
        return self.groups_per_worker

    def on_shortage(self, num_missing_groups: int, idle_s: float) -> int | None:
        """A higher number of groups a worker when too few came; None while they are still being sampled."""
        if self._groups[self.version] >= self._num_asked:
            # All is here, and filters dropped too much of it: ask for more each time.
            self.groups_per_worker += math.ceil(num_missing_groups * self._eagerness / self.num_workers)
            self._eagerness = min(2 * self._eagerness, _MOST_EAGER)
            return self.groups_per_worker
        self._idle_s = idle_s
        if idle_s >= self._patience_s:
            # Any one worker that lives must be able to end the wait. One that is only slow is not to run away.
            self._raised_at_s, self._patience_s = idle_s, 2 * idle_s
            self.groups_per_worker += num_missing_groups
            return self.groups_per_worker
        return None

    @property
    def _num_in_flight(self) -> int:
        """What workers still owe of this version, as far as it fits into one call of each: at a new version they
        finish their call and drop the rest. Should it not come, on_shortage asks again."""
        owed = max(0, self._num_asked - self._groups[self.version])
        return min(owed, self._largest_call * self.num_workers)

    @property
    def _first_patience_s(self) -> float:
        """Thrice the longest that an answer took, since the last arrival or the last raise: a call of a large
        model may take minutes."""
        return max(PATIENCE_S, 3 * self._slowest_answer_s)

    @property
    def _num_asked(self) -> int:
        return self.groups_per_worker * self.num_workers

    @property
    def num_workers(self) -> int:
        """Workers that delivered lately; those of run.json until there is a history."""
        recent = set().union(*(self._workers[version] for version in range(self.version - 2, self.version)))
        has_history = self._first_version is not None and self.version >= self._first_version + 3
        return len(recent) if recent and has_history else self._run.num_workers


def _slot(worker_id: str) -> str:
    """Lives of one slot count as one worker: w3-host-pid-start."""
    return worker_id.partition("-")[0]
