"""Publish weights and the number of groups that workers sample with them. On rank 0 only.

A fenced trainer may pass its last check, sleep, and then point LATEST at an older version. All versions of its
successor are higher, so the successor notices this and points LATEST back.
"""

import contextlib
import threading
from collections.abc import Callable
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
    publish_policy,
)
from ludic.store.policies import newest_version


class Publisher:
    """The only writer of policies/ in this attempt, shared by the training and the planning thread."""

    def __init__(self, root: Root, attempt: Attempt, keep: int | None) -> None:
        self._root, self._attempt, self._keep = root, attempt, keep
        self._demand = QuotaController(root.run)
        self._lock = threading.Lock()
        self.version = newest_version(root)
        """Newest version of any attempt; None before the first."""

    def publish(self, save: Callable[[Path], None], *, step: int, num_ready_groups: int) -> int:
        """Publish the files that `save` writes into a folder as the next version; returns the version.

        Raises FencedError if a newer attempt owns the root.
        """
        check_not_fenced(self._root, self._attempt)
        with self._lock:
            version = publish_policy(
                self._root,
                save,
                step=step,
                attempt_id=self._attempt.attempt_id,
                parent_version=self.version,
                groups_per_worker=lambda version: self._ask_for(version, num_ready_groups),
            )
            self.version = version
        if self._keep is not None:
            prune_policies(self._root, self._keep, version)
        return version

    def mend_latest(self) -> None:
        """Write LATEST again if another trainer replaced it; skipped during a publish, which writes it anyway."""
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

        Does nothing until `version` is published, since that publish sets its own number.
        """
        with self._lock:
            if self.version is None or self.version < version:
                return
            if self._demand.on_shortage(num_missing_groups, idle_s) is not None:
                check_not_fenced(self._root, self._attempt)
                point_latest(self._root, self._wanted)

    def _ask_for(self, version: int, num_ready_groups: int) -> int:
        """Return the groups per worker of a new version.

        Checks ownership again before LATEST names the version, since writing weights may take minutes.
        """
        check_not_fenced(self._root, self._attempt)
        return self._demand.on_publish(version, num_ready_groups)

    @property
    def _wanted(self) -> LatestPolicy:
        return LatestPolicy(version=self._demand.version, groups_per_worker=self._demand.groups_per_worker)

    def _points_at(self, wanted: LatestPolicy) -> bool:
        with contextlib.suppress(SchemaError):
            return latest_policy(self._root) == wanted
        return False
