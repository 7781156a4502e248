"""evaluators/{id}.json: the blocks that a running process of `ludic eval` samples, so that others leave them to it.

A process puts its file with a block's name before it samples the block, and then reads the files of the others: if one
of them names the block too, it takes its own claim back. It replaces the file three times per lease length, and deletes
it when it ends. A file counts no more if its process is proven dead, or if it has not changed for a lease length while
this process looked; as for leases of trainers, only the looking machine's monotonic clock counts.

Claims only save work. If two processes sample a block after all, such as one that was frozen and one that took its
block over, the first one that stores it wins.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from ludic.defaults import LEASE_S
from ludic.errors import LudicError, ReplacedRootError, SchemaError
from ludic.records import new_id
from ludic.store.catalogue import EVALUATORS, UuidName
from ludic.store.claims import describe_process, is_dead, owner_name
from ludic.store.records import Evaluator, encode_record
from ludic.store.root import Root

logger = logging.getLogger(__name__)

_RENEWALS_A_LEASE = 3


class BlockClaims:
    """This process's claims of blocks, and those of others. `release` may be called while `take` runs in a thread."""

    def __init__(self, root: Root, lease_s: float = LEASE_S) -> None:
        """lease_s: seconds without a change after which another process's claims count no more."""
        self._root, self._uuid, self._lease_s = root, UuidName(new_id()), lease_s
        self._name = EVALUATORS.name(self._uuid)
        self._own = Evaluator(owner=owner_name(), process=describe_process(os.getpid()), blocks=())
        self._changes = threading.Lock()
        self._done = threading.Event()
        self._renewing: threading.Thread | None = None
        self._seen: dict[str, tuple[Evaluator, float]] = {}
        """Other files, and when they were first seen with this content, in seconds of the monotonic clock."""
        self._broken: set[str] = set()

    def __enter__(self) -> "BlockClaims":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release all claims."""
        self._done.set()
        if self._renewing is None:
            return
        self._renewing.join()
        try:
            self._change(drop=self._own.blocks)
        except LudicError as error:
            logger.warning("%s is not deleted; others wait until its lease is over: %s", self._name, error)

    def of_others(self) -> set[str]:
        """Return the blocks that other living processes have claimed. Raises StoreError."""
        names = {EVALUATORS.name(found): found for found in EVALUATORS.listed(self._root) if found != self._uuid}
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        return {block for name, found in names.items() for block in self._blocks_of(name, found)}

    def take(self, block: str) -> bool:
        """Claim a block; returns False, and claims nothing, if another living process has claimed it.

        Two processes that claim a block at the same moment may both get False. Raises StoreError, ReplacedRootError.
        """
        self._change(add=(block,))
        if self._renewing is None:
            self._renewing = threading.Thread(target=self._renew, daemon=True, name="ludic-claims")
            self._renewing.start()
        if block in self.of_others():
            self.release(block)
            return False
        return True

    def release(self, block: str) -> None:
        """Release a block, which is stored or given up. Raises as `take` does."""
        self._change(drop=(block,))

    def _change(self, *, add: Sequence[str] = (), drop: Sequence[str] = ()) -> None:
        """Store this process's claims, with a new number."""
        with self._changes:
            blocks = [*(block for block in self._own.blocks if block not in drop), *add]
            self._own = replace(self._own, blocks=blocks, num_changes=self._own.num_changes + 1)
            self._root.check_same_run()
            if blocks:
                self._root.put(self._name, encode_record(self._own))
            else:
                self._root.delete(self._name)

    def _renew(self) -> None:
        while not self._done.wait(self._lease_s / _RENEWALS_A_LEASE):
            try:
                if self._own.blocks:
                    self._change()
            except ReplacedRootError:
                return  # the next block is not stored either, which says so
            except LudicError as error:
                logger.warning("%s is not renewed, trying again: %s", self._name, error)

    def _blocks_of(self, name: str, of: UuidName) -> Sequence[str]:
        """Return the blocks in another process's file; none if it counts no more."""
        try:
            found = EVALUATORS.read(self._root, *of)
        except SchemaError as error:
            if name not in self._broken:
                logger.warning("%s", error)
                self._broken.add(name)
            return ()
        if found is None:
            return ()
        now = time.monotonic()
        known, since = self._seen.get(name, (None, now))
        if found != known:
            since = now
        self._seen[name] = found, since
        is_over = now - since >= self._lease_s or (found.process is not None and is_dead(found.process))
        if not is_over:
            return found.blocks
        self._root.delete(name)  # if its process was only frozen, the next renewal puts it back
        return ()
