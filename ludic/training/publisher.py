"""Publish weights, and the budget of open groups for workers, on rank 0.

A thread writes a version's files while the next steps train. LATEST names a version after its files are complete, so
workers never see a half-written version. The next publish, checkpoints and the end of the run wait for this thread.

A fenced trainer may pass its last check, sleep, and then point LATEST at an older version. All versions of its
successor are higher, so the successor notices this and points LATEST back. Raises FencedError if a newer attempt owns
the root, StoreError if the filesystem fails.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from ludic.errors import SchemaError
from ludic.root import Attempt, LatestPolicy, Root, check_not_fenced, check_not_replaced
from ludic.root.weights import (
    PolicyWriter,
    claim_policy,
    latest_policy,
    newest_version,
    point_latest,
    prune_policies,
    published_digests,
    read_policy,
    write_manifest,
)
from ludic.run import run_of
from ludic.training.batches.budget import Budget


class Publisher:
    """The only writer of policies/ in this attempt, shared by the training, planning and checkpoint threads."""

    def __init__(
        self,
        root: Root,
        attempt: Attempt,
        keep: int | None,
        *,
        full_every: int | None = None,
        max_off_policy_steps: int | None = None,
    ) -> None:
        """keep: number of versions whose weights to keep; None keeps all. full_every: see PolicyWriter.

        max_off_policy_steps: see Budget.
        """
        self._root, self._attempt, self._keep = root, attempt, keep
        self._writer = PolicyWriter(root, full_every)
        self._costs: dict[str, float] = {}
        self._budget = Budget(run_of(root), max_off_policy_steps, attempt.attempt_id)
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ludic-publish")
        self._writing: Future[None] | None = None
        self.version = newest_version(root)
        """Newest published version of any attempt; None before the first."""

    def publish(self, save: Callable[[Path], None], *, step: int) -> int:
        """Publish the files that `save` writes into a folder as the next version; returns the version.

        Raises FencedError if a newer attempt owns the root.
        """
        version = self.start(save, step=step)
        self.finish()
        return version

    def begin(self, save: Callable[[Path], None], *, step: int, num_ready_groups: int) -> int:
        """Publish the weights that training starts from, and wait; returns the version that has them.

        num_ready_groups: groups that an earlier trainer left, read and not planned.

        If the newest version has these weights already, as after a restart, nothing is published: a new version would
        make the stored rollouts of these weights a step off-policy. Then LATEST only gets the budget. Raises as
        `publish`.

        A fenced trainer that may still point LATEST at a version has claimed it before this attempt began. So if a
        version above the newest is claimed, one above it is published: see the top of this file.
        """
        with self._lock:
            self._budget.begin(num_ready_groups)
        latest = self._latest()
        if latest is None or not self._holds(latest.version, save, step):
            return self.publish(save, step=step)
        with self._lock:
            check_not_fenced(self._root, self._attempt)
            self._budget.on_publish(latest.version, step)
            self._point_latest()
        return latest.version

    def start(self, save: Callable[[Path], None], *, step: int) -> int:
        """Claim the next version and begin to publish it in a thread, which calls `save`; returns the version.

        Waits for the previous version. Raises FencedError if a newer attempt owns the root.
        """
        self.finish()
        check_not_fenced(self._root, self._attempt)
        version = claim_policy(self._root, step=step, attempt_id=self._attempt.attempt_id, parent_version=self.version)
        self._writing = self._thread.submit(self._write, save, version, step)
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

    def repair_latest(self) -> None:
        """Write LATEST again if another trainer replaced it; skipped while this trainer writes it anyway.

        Raises FencedError if a newer attempt owns the root.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            latest = self._budget.latest
            if latest is not None and self._latest() != latest:
                check_not_fenced(self._root, self._attempt)
                point_latest(self._root, latest)
        finally:
            self._lock.release()

    def note_arrivals(self, rows: pa.Table, num_ready_groups: int) -> None:
        """Record rows that were read; see Budget."""
        with self._lock:
            self._budget.note_arrivals(rows, num_ready_groups)

    def note_plan(self, step: int, num_ready_groups: int) -> None:
        """Record that a step is planned; workers see it with the next version."""
        with self._lock:
            self._budget.on_plan(step, num_ready_groups)

    def note_wait(self, num_ready_groups: int, num_missing_groups: int, idle_s: float, *, version: int) -> None:
        """Record that a step waits for groups, and let workers start more if some arrived groups can't be used.

        Until `version` is published, that publish tells the workers. Raises the error of a failed publish, since the
        awaited groups will not arrive.
        """
        self.finish(wait=False)
        with self._lock:
            is_published = self.version is not None and self.version >= version
            # Rollouts of a version can't be late before the version is published.
            self._budget.on_wait(num_ready_groups, num_missing_groups, idle_s if is_published else 0.0)
            if is_published and self._budget.has_room:
                check_not_fenced(self._root, self._attempt)
                self._point_latest()

    def _write(self, save: Callable[[Path], None], version: int, step: int) -> None:
        """Write the files, then LATEST, in the thread.

        Checks before the first file that the root still exists, and before LATEST names the version that the root still
        belongs to this trainer: writing weights may take minutes.
        """

        def save_and_check(folder: Path) -> None:
            save(folder)
            check_not_replaced(self._root, self._attempt)

        began = time.monotonic()
        num_bytes = self._writer.write(version, save_and_check)
        write_s = time.monotonic() - began
        with self._lock:
            check_not_fenced(self._root, self._attempt)
            self._budget.on_publish(version, step)
            self._point_latest()
            self.version = version
            self._costs = {"publish_bytes": num_bytes, "publish_write_s": write_s}
        if self._keep is not None:
            prune_policies(self._root, self._keep, version)

    def _point_latest(self) -> None:
        """Write LATEST. The caller holds the lock, and knows that this trainer owns the root."""
        point_latest(self._root, self._budget.make_latest())

    def _latest(self) -> LatestPolicy | None:
        """Return LATEST; None if there is none, or if it is broken."""
        with contextlib.suppress(SchemaError):
            return latest_policy(self._root)
        return None

    def _holds(self, version: int, save: Callable[[Path], None], step: int) -> bool:
        """Return whether a version is the newest claimed, is stored, and has the files that `save` writes.

        Compares digests; files are written for the comparison only if the version is of the same step.
        """
        try:
            policy, above = (read_policy(self._root, number) for number in (version, version + 1))
            digests = published_digests(self._root, version)
        except SchemaError:
            return False
        if policy is None or policy.step != step or above is not None or digests is None:
            return False
        with self._root.scratch_folder() as folder:
            save(folder)
            return write_manifest(folder) == digests
