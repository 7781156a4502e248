"""Append rollout batches to partitioned Parquet files, and write the files of every table in a thread.

RolloutWriter is the only writer of rollouts in ludic; before each batch it writes the starts and ends of the batch's
groups to requests/. ludic.root.rows.tables has the writers of the other tables. Raises InvalidBatchError for a bad
batch; StoreError or NameTakenError, at the next call, for a failed write, which is tried again.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from types import TracebackType
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa

from ludic.errors import NameTakenError
from ludic.records import GroupEvent, RolloutBatch, arrow_schema, to_table, validate
from ludic.root.root import Root
from ludic.root.rows.files import Folder, RolloutFile, SequenceFile, check_worker_id
from ludic.root.rows.parquet import encode, encode_plain, group_starts, release_memory
from ludic.root.storage.local import Content

# --- Files written by a thread --------------------------------------------------------------------------------
# Write files in a background thread, so that sampling and training need not wait for a write.
#
# Items are buffered until there are enough of them, or the oldest is old enough, or the caller flushes. A file that
# could not be written stays first in the queue. The next call raises its error, and the write is tried again, so
# nothing is lost while the process lives. Nothing is written into a root that was deleted or created again since it was
# opened.


Item = TypeVar("Item")

NamedFile = tuple[str, Content]

MAX_WAITING = 64
"""Items in a buffer at which `append` waits."""


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
        max_waiting: int = MAX_WAITING,
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
        except BaseException as error:  # an extension's panic is not an Exception; callers must not wait forever
            return error
        return None


def commit(root: Root, name: str, data: Content) -> None:
    """Create a file that no other process may create; a retry after a lost response changes nothing.

    Raises NameTakenError if the file exists with other content.
    """
    if not root.put_if_absent(name, data):
        raise NameTakenError(
            f"{root.url}/{name} exists with other content: two processes use the same name; "
            "give each worker its own worker_id, or leave it out"
        )


# --- requests/ ------------------------------------------------------------------------------------------------
# RolloutWriter writes requests/{worker_id}-{sequence}.parquet before the rollouts of the same groups, so each group in
# rollouts/ has its end there. If a kill comes between, the next life samples the group again, under a new group_id.


def encode_events(events: Iterable[GroupEvent], *, run_id: str, worker_id: str) -> bytes:
    """Return the bytes of a file of requests/."""
    rows = [{**asdict(event), "run_id": run_id, "worker_id": worker_id} for event in events]
    return encode_plain(pa.Table.from_pylist(rows, arrow_schema("requests")))


# --- rollouts/ and evals/ -------------------------------------------------------------------------------------
# Append rollout batches to partitioned Parquet; the only writer of rollouts in ludic.
#
# Writes {root}/rollouts/version=*/env=*/{worker_id}-{sequence}.parquet, and before them the starts and ends of their
# groups, as {root}/requests/{worker_id}-{sequence}.parquet. A file is complete and immutable once listed; a crash
# leaves nothing that a reader sees.


FLUSH_GROUPS = 32
"""Groups after which a writer flushes. 32 groups of 8 rollouts fill one row group; 8 groups would take 5% more bytes
(benchmarks/store_size.py)."""
FLUSH_AGE_S = 5.0
"""Seconds after which a writer flushes."""


@dataclass(frozen=True, slots=True)
class MadeFile:
    """A file of rollouts."""

    worker_id: str
    sequence: int
    version: int
    num_groups: int


@dataclass(frozen=True, slots=True)
class _Append:
    """A batch as rows, whose sequence is not known yet."""

    num_groups: int
    rows: pa.Table | None
    """None if there are events only."""
    size_bytes: int
    """Arrow memory of the rows."""
    events: Sequence[GroupEvent]


class RolloutWriter:
    """Appends the rollouts of one worker. `append` validates and returns; a thread encodes and commits.

    The writer flushes automatically after `flush_groups` groups, `flush_bytes` of Arrow memory or
    `flush_age_s` seconds, whichever comes first, and makes one file for each version and environment.
    """

    def __init__(
        self,
        root: Root,
        worker_id: str,
        *,
        flush_groups: int = FLUSH_GROUPS,
        flush_bytes: int = 64 << 20,
        flush_age_s: float = FLUSH_AGE_S,
        folder: Folder = "rollouts",
        file_per_batch: bool = False,
    ) -> None:
        """worker_id: must be unique to one life of one process, since the sequence of its files starts at 0.

        file_per_batch: write each batch at once, as files of its own, so that the files do not depend on the clock.

        While four times `flush_bytes` wait to be written, `append` waits too.
        """
        self.worker_id = check_worker_id(worker_id)
        self._root, self._folder = root, folder
        self._flush_groups, self._flush_bytes = 1 if file_per_batch else flush_groups, flush_bytes
        self._sequence, self._requests_sequence = itertools.count(), itertools.count()
        self.made: deque[MadeFile] = deque()
        """Files that were encoded, committed or about to be, until the caller removes them."""
        self._appender = BackgroundAppender[_Append](
            root,
            self._make_files,
            is_full=self._is_full,
            flush_age_s=flush_age_s,
            size_bytes=lambda item: item.size_bytes,
            max_bytes=4 * flush_bytes,
            max_waiting=1 if file_per_batch else MAX_WAITING,
        )

    def append(self, batch: RolloutBatch | None, events: Sequence[GroupEvent] = ()) -> None:
        """Accept a whole batch, or refuse it whole. events: starts and ends of groups, committed before it.

        Raises InvalidBatchError naming every bad row, column and reason. Raises, once, the error of an
        earlier write (StoreError, NameTakenError): then this batch is not accepted, and that write is retried.
        """
        if batch is None:
            self._appender.append(_Append(0, None, 0, events))
            return
        assert batch.metadata.worker_id == self.worker_id, "a batch of another worker"
        self._appender.wait_for_room(_least_bytes(batch))
        extra_columns = self._root.extra_columns
        tokens = validate(batch, extra_columns)
        rows = to_table(batch, run_id=self._root.run_id, sequence=0, extra_columns=extra_columns, tokens=tokens)
        self._appender.append(_Append(len(batch.groups), rows, rows.get_total_buffer_size(), events))

    def flush(self, *, wait: bool = True) -> None:
        """Commit all appended batches; with `wait`, return when readers can see them.

        Raises, once, the error of a write, which is then retried.
        """
        self._appender.flush(wait=wait)

    def close(self) -> None:
        """Flush, retrying writes that failed before, and stop the thread. Raises if a file could not be written."""
        self._appender.close()

    def __enter__(self) -> "RolloutWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_full(self, items: Sequence[_Append]) -> bool:
        num_groups, size_bytes = sum(item.num_groups for item in items), sum(item.size_bytes for item in items)
        return num_groups >= self._flush_groups or size_bytes >= self._flush_bytes

    def _make_files(self, items: Sequence[_Append]) -> list[NamedFile]:
        tables = [item.rows for item in items if item.rows is not None]
        parts = file_parts(pa.concat_tables(tables), self.worker_id, self._sequence, self._folder) if tables else []
        made: list[NamedFile] = [(file.name, encode_rows(rows)) for file, rows in parts]
        self.made.extend(
            MadeFile(file.worker_id, file.sequence, file.version, len(group_starts(rows))) for file, rows in parts
        )
        events = [event for item in items for event in item.events]
        if events:
            requests = SequenceFile(self.worker_id, next(self._requests_sequence))
            made.insert(0, (requests.name, encode_events(events, run_id=self._root.run_id, worker_id=self.worker_id)))
        return made


def file_parts(
    rows: pa.Table, worker_id: str, sequence: Iterator[int], folder: Folder
) -> list[tuple[RolloutFile, pa.Table]]:
    """Return the files that rows of one worker make, one for each version and environment, and the rows of each.

    rows: whole groups; their column sequence gets that of the file. sequence: numbers that no file of the folder has.
    """
    partitions = _partitions(rows)
    files = [RolloutFile(version, env_name, worker_id, next(sequence), folder) for version, env_name in partitions]
    return [
        (file, stamped(part, "sequence", file.sequence)) for file, part in zip(files, partitions.values(), strict=True)
    ]


def stamped(rows: pa.Table, name: str, value: int | str) -> pa.Table:
    """Return rows with one value in all of a column."""
    column = rows.schema.get_field_index(name)
    field = rows.schema.field(column)
    return rows.set_column(column, field, pa.repeat(pa.scalar(value, field.type), rows.num_rows))


def encode_rows(rows: pa.Table) -> bytes:
    """Return the bytes of a file of rollouts."""
    release_memory(rows.get_total_buffer_size())  # also before, since encoding takes the most memory
    data = encode(rows)
    release_memory(rows.get_total_buffer_size())
    return data


def _least_bytes(batch: RolloutBatch) -> int:
    """Return the bytes of a batch's arrays; the batch is not validated, so an array may be missing or anything."""
    columns = [rollout.columns for group in batch.groups for rollout in group.rollouts]
    arrays = (array for each in columns if isinstance(each, Mapping) for array in each.values())
    return sum(getattr(array, "nbytes", 0) for array in arrays)


def _partitions(table: pa.Table) -> dict[tuple[int, str], pa.Table]:
    """Return the rows of each version and environment, without a copy.

    A group goes to the oldest policy_version in it, so that it is not split between files.
    """
    starts = group_starts(table)
    versions = np.minimum.reduceat(table.column("policy_version").to_numpy(), starts).tolist()
    env_names = table.column("env_name").take(starts).to_pylist()
    groups = zip(versions, env_names, starts.tolist(), [*starts.tolist()[1:], table.num_rows], strict=True)
    parts: dict[tuple[int, str], list[pa.Table]] = {}
    for partition, run in itertools.groupby(groups, key=itemgetter(0, 1)):
        bounds = [bound for _, _, *bounds in run for bound in bounds]
        parts.setdefault(partition, []).append(table.slice(bounds[0], bounds[-1] - bounds[0]))
    return {partition: pa.concat_tables(tables) for partition, tables in parts.items()}
