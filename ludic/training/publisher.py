"""Publish weights and the number of groups that workers sample with them. On rank 0 only.

A thread writes a version's files while the next steps train. LATEST names a version after its files are complete, so
workers see nothing half-written. The next publish, checkpoints and the end of the run wait for this thread.

A fenced trainer may pass its last check, sleep, and then point LATEST at an older version. All versions of its
successor are higher, so the successor notices this and points LATEST back.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from ludic.batches.quota import QuotaController
from ludic.errors import SchemaError
from ludic.store import (
    Attempt,
    LatestPolicy,
    Root,
    check_not_fenced,
    latest_policy,
    point_latest,
    prune_policies,
)
from ludic.store.policies import claim_policy, newest_version
from ludic.store.policy_writer import PolicyWriter


class Publisher:
    """The only writer of policies/ in this attempt, shared by the training, planning and checkpoint threads."""

    def __init__(self, root: Root, attempt: Attempt, keep: int | None, *, full_every: int | None = None) -> None:
        """keep: number of versions whose weights to keep; None keeps all. full_every: see PolicyWriter."""
        self._root, self._attempt, self._keep = root, attempt, keep
        self._writer = PolicyWriter(root, full_every)
        self._costs: dict[str, float] = {}
        self._demand = QuotaController(root.run)
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ludic-publish")
        self._writing: Future[None] | None = None
        self.version = newest_version(root)
        """Newest published version of any attempt; None before the first."""

    def publish(self, save: Callable[[Path], None], *, step: int, num_ready_groups: int) -> int:
        """Publish the files that `save` writes into a folder as the next version; returns the version.

        Raises FencedError if a newer attempt owns the root.
        """
        version = self.start(save, step=step, num_ready_groups=num_ready_groups)
        self.finish()
        return version

    def start(self, save: Callable[[Path], None], *, step: int, num_ready_groups: int) -> int:
        """Claim the next version and begin to publish it in a thread, which calls `save`; returns the version.

        Waits for the version before. Raises FencedError if a newer attempt owns the root.
        """
        self.finish()
        check_not_fenced(self._root, self._attempt)
        version = claim_policy(self._root, step=step, attempt_id=self._attempt.attempt_id, parent_version=self.version)
        with self._lock:
            num_used_groups = self._demand.num_arrived - num_ready_groups
        self._writing = self._thread.submit(self._write, save, version, num_used_groups)
        return version

    def finish(self, *, wait: bool = True) -> None:
        """Wait for the version that is being written. Raises its error, also in every later call.

        wait: if false, only raises the error of a version that has already failed.
        """
        writing = self._writing
        if writing is not None and (wait or writing.done()):
            writing.result()

    def close(self) -> None:
        """Wait for the version that is being written and ignore its error; it is complete or invisible."""
        self._thread.shutdown(wait=True)
        self._writer.close()

    def take_costs(self) -> dict[str, float]:
        """Return publish_bytes and publish_write_s of the version that was completed since the last call, if any."""
        with self._lock:
            costs, self._costs = self._costs, {}
        return costs

    def mend_latest(self) -> None:
        """Write LATEST again if another trainer replaced it; skipped while this trainer writes it anyway."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._demand.version >= 0 and not self._points_at(self._wanted):
                point_latest(self._root, self._wanted)
        finally:
            self._lock.release()

    def note_arrivals(self, rows: pa.Table) -> None:
        """Count the groups that workers delivered; see QuotaController."""
        with self._lock:
            self._demand.note_arrivals(rows)

    def ask_for_more(self, num_missing_groups: int, idle_s: float, *, version: int) -> None:
        """Raise the groups per worker in LATEST if too few groups arrive.

        Does nothing until `version` is published, since that publish sets its own number. Raises the error of a
        publish that failed, since the groups waited for will not come.
        """
        self.finish(wait=False)
        with self._lock:
            if self.version is None or self.version < version:
                return
            if self._demand.on_shortage(num_missing_groups, idle_s) is not None:
                check_not_fenced(self._root, self._attempt)
                point_latest(self._root, self._wanted)

    def _write(self, save: Callable[[Path], None], version: int, num_used_groups: int) -> None:
        """Write the files, then LATEST, in the thread.

        Checks ownership again before LATEST names the version, since writing weights may take minutes. Groups that
        arrived in the meantime count as ready.
        """
        began = time.monotonic()
        num_bytes = self._writer.write(version, save)
        write_s = time.monotonic() - began
        with self._lock:
            check_not_fenced(self._root, self._attempt)
            self._demand.on_publish(version, self._demand.num_arrived - num_used_groups)
            point_latest(self._root, self._wanted)
            self.version = version
            self._costs = {"publish_bytes": num_bytes, "publish_write_s": write_s}
        if self._keep is not None:
            prune_policies(self._root, self._keep, version)

    @property
    def _wanted(self) -> LatestPolicy:
        return LatestPolicy(version=self._demand.version, groups_per_worker=self._demand.groups_per_worker)

    def _points_at(self, wanted: LatestPolicy) -> bool:
        with contextlib.suppress(SchemaError):
            return latest_policy(self._root) == wanted
        return False
