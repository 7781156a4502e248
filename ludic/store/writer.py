"""Append rollout batches to partitioned Parquet; the only writer of rollouts in ludic.

Writes {root}/rollouts/version=*/env=*/{worker_id}-{sequence}.parquet, and before them what became of their groups, as
{root}/requests/{worker_id}-{sequence}.parquet.
A file is complete and immutable once listed; a crash leaves nothing that a reader sees.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import TracebackType

import numpy as np
import pyarrow as pa

from ludic.records import GroupEvent, RolloutBatch
from ludic.schema import RAGGED_COLUMNS, TOKEN_COLUMNS, to_table, validate
from ludic.store.background import BackgroundAppender, NamedFile
from ludic.store.encoding import encode, group_starts, release_memory
from ludic.store.files import Folder, RequestsFile, RolloutFile, check_worker_id
from ludic.store.requests import encode_events
from ludic.store.root import Root

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
    ) -> None:
        """worker_id: must be unique to one life of one process, since the sequence of its files starts at 0.

        While four times `flush_bytes` wait to be written, `append` waits too.
        """
        self.worker_id = check_worker_id(worker_id)
        self._root, self._folder = root, folder
        self._flush_groups, self._flush_bytes = flush_groups, flush_bytes
        self._sequence, self._requests_sequence = itertools.count(), itertools.count()
        self.made: deque[MadeFile] = deque()
        """Files that were made, committed or about to be, until the caller removes them."""
        self._appender = BackgroundAppender[_Append](
            root,
            self._make_files,
            is_full=self._is_full,
            flush_age_s=flush_age_s,
            size_bytes=lambda item: item.size_bytes,
            max_bytes=4 * flush_bytes,
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
        extra_columns = self._root.run.extra_columns
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
        partitions = _partitions(pa.concat_tables(tables)) if tables else {}
        files = [
            RolloutFile(version, env_name, self.worker_id, next(self._sequence), self._folder)
            for version, env_name in partitions
        ]
        made = [self._make_file(rows, file) for file, rows in zip(files, partitions.values(), strict=True)]
        self.made.extend(
            MadeFile(file.worker_id, file.sequence, file.version, len(group_starts(rows)))
            for file, rows in zip(files, partitions.values(), strict=True)
        )
        events = [event for item in items for event in item.events]
        if events:
            file = RequestsFile(self.worker_id, next(self._requests_sequence))
            made.insert(0, (file.name, encode_events(events, run_id=self._root.run_id, worker_id=self.worker_id)))
        return made

    def _make_file(self, rows: pa.Table, file: RolloutFile) -> NamedFile:
        column = rows.schema.get_field_index("sequence")
        sequence = pa.repeat(pa.scalar(file.sequence, pa.int64()), rows.num_rows)
        release_memory(rows.get_total_buffer_size())  # before as well: encoding takes the most memory
        data = encode(rows.set_column(column, rows.schema.field(column), sequence))
        release_memory(rows.get_total_buffer_size())
        return file.name, data


def _least_bytes(batch: RolloutBatch) -> int:
    """Return the bytes of a batch's token columns; the batch is not validated, so a column may be missing."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    arrays = (getattr(rollout, name) for rollout in rollouts for name in TOKEN_COLUMNS)
    ragged = (array for rollout in rollouts for name in RAGGED_COLUMNS for array in getattr(rollout, name) or ())
    return sum(getattr(array, "nbytes", 0) for array in itertools.chain(arrays, ragged))


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
