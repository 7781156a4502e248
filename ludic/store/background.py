"""Write files in a background thread, so that sampling and training need not wait for a write.

Items are buffered until there are enough of them, or the oldest is old enough, or the caller flushes.
A file that could not be written stays first in the queue. The next call raises its error, and
the write is tried again, so nothing is lost while the process lives. Nothing is written into a root that was
deleted, or made again, since it was opened.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ludic.errors import NameTakenError
from ludic.store.local import Content
from ludic.store.root import Root

Item = TypeVar("Item")

NamedFile = tuple[str, Content]


class BackgroundAppender(Generic[Item]):
    """Writes items to files, in order, in one thread."""

    def __init__(
        self,
        root: Root,
        make_files: Callable[[Sequence[Item]], Sequence[NamedFile]],
        *,
        is_full: Callable[[Sequence[Item]], bool],
        flush_age_s: float,
        size_bytes: Callable[[Item], int] = lambda item: 0,
        max_waiting: int = 64,
        max_bytes: int = 256 << 20,
    ) -> None:
        """Start the thread.

        `make_files` runs in the thread and is called again if it fails; it must return new file names. `is_full`
        returns whether the buffered items should be written. `append` waits while `max_waiting` items are buffered,
        and while an item would take the unwritten bytes above `max_bytes`, so that memory stays bounded if the
        filesystem is slower than the caller. An item larger than `max_bytes` waits until all others are written.
        """
        self._root, self._make_files, self._is_full, self._size_bytes = root, make_files, is_full, size_bytes
        self._flush_age_s, self._max_waiting, self._max_bytes = flush_age_s, max_waiting, max_bytes
        self._items: list[Item] = []
        self._begun: list[Item] = []
        self._gathered_bytes = self._begun_bytes = 0
        self._oldest = 0.0
        self._unwritten: deque[NamedFile] = deque()
        self._flushing = self._closed = self._busy = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ludic-append", daemon=True)
        self._thread.start()

    def append(self, item: Item) -> None:
        """Add an item to the buffer; waits until there is room.

        Raises the error of an earlier write, once: this item was not added then, and that write is tried again.
        """
        with self._changed:
            size_bytes = self._size_bytes(item)
            self._wait_for_room(size_bytes)
            if not self._items:
                self._oldest = time.monotonic()
            self._items.append(item)
            self._gathered_bytes += size_bytes
            self._changed.notify_all()

    def wait_for_room(self, size_bytes: int) -> None:
        """Wait until there is room for an item of about this size, so that the caller can build it afterwards.

        Raises as `append` does.
        """
        with self._changed:
            self._wait_for_room(size_bytes)

    def flush(self, *, wait: bool = True) -> None:
        """Write the buffered items now; with `wait`, return when they are committed.

        Raises the error of an earlier write, once; with `wait`, also that of this write.
        """
        with self._changed:
            assert not self._closed, "flush after close"
            self._raise_error()
            self._flushing = bool(self._items)
            self._changed.notify_all()
            if wait:
                self._changed.wait_for(lambda: self._is_idle() or self._error)
                self._raise_error()

    def close(self) -> None:
        """Write all remaining items, including failed writes, and end the thread; raises if a write fails."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)
            self._closed, self._error = True, None
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            self._raise_error()

    def _wait_for_room(self, size_bytes: int) -> None:
        assert not self._closed, "append after close"
        self._raise_error()
        if not self._has_room(size_bytes):
            self._flushing = True
            self._changed.notify_all()
        self._changed.wait_for(lambda: self._has_room(size_bytes) or self._error)
        self._raise_error()

    def _has_room(self, size_bytes: int) -> bool:
        waiting_bytes = self._gathered_bytes + self._begun_bytes
        return len(self._items) < self._max_waiting and (
            waiting_bytes == 0 or waiting_bytes + size_bytes <= self._max_bytes
        )

    def _is_idle(self) -> bool:
        return not (self._items or self._begun or self._unwritten or self._busy)

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            self._changed.notify_all()
            raise error

    def _is_due(self) -> bool:
        """Return whether the thread should write now; False while an error has not been raised yet."""
        if self._error is not None:
            return False
        if self._begun or self._unwritten:
            return True
        aged = time.monotonic() - self._oldest >= self._flush_age_s
        return bool(self._items) and (aged or self._flushing or self._closed or self._is_full(self._items))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._is_due() or self._closed):
                    self._changed.wait(self._patience())
                if not self._is_due():
                    return
                if not (self._begun or self._unwritten):
                    self._begun, self._items = self._items, []
                    self._begun_bytes, self._gathered_bytes = self._gathered_bytes, 0
                    self._flushing = False
                self._busy = True
            error = self._write()
            with self._changed:
                self._busy, self._error = False, error
                if error is None:
                    self._begun_bytes = 0
                self._changed.notify_all()

    def _patience(self) -> float | None:
        """Seconds until the oldest item is due; None if the thread waits for the next call."""
        if not self._items or self._error is not None:
            return None
        return max(0.0, self._oldest + self._flush_age_s - time.monotonic())

    def _write(self) -> BaseException | None:
        try:
            if self._begun:
                self._unwritten.extend(self._make_files(self._begun))
                self._begun = []
            if self._unwritten:
                self._root.check_same_run()
            while self._unwritten:
                name, data = self._unwritten[0]
                commit(self._root, name, data)
                self._unwritten.popleft()
        except BaseException as error:  # an extension's panic is no Exception; callers must not wait forever
            return error
        return None


def commit(root: Root, name: str, data: Content) -> None:
    """Create a file that no other process may create; a retry after a lost response changes nothing.

    Raises NameTakenError if the file exists with other content.
    """
    if not root.put_if_absent(name, data):
        raise NameTakenError(
            f"{root.url}/{name} exists with other content: two processes use one name; "
            "give each worker a worker_id of its own, or leave it out"
        )
