"""Append rollout batches to partitioned Parquet; the only writer of rollouts in ludic.

Writes {root}/rollouts/version=*/env=*/{worker_id}-{sequence}.parquet.
A file is complete and immutable once listed; a crash leaves nothing that a reader sees.
"""

import itertools
from collections.abc import Sequence
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.records import RolloutBatch
from ludic.schema import to_table, validate
from ludic.store.background import BackgroundAppender, NamedFile
from ludic.store.files import Folder, RolloutFile, check_worker_id
from ludic.store.parquet import encode, group_starts
from ludic.store.root import Root


class RolloutWriter:
    """One worker's appends. `append` validates and returns; a thread encodes and commits.

    A flush happens by itself after `flush_groups` groups, `flush_bytes` of Arrow memory or
    `flush_age_s` seconds, whichever comes first, and makes one file for each version and environment.
    """

    def __init__(
        self,
        root: Root,
        worker_id: str,
        *,
        flush_groups: int = 8,
        flush_bytes: int = 64 << 20,
        flush_age_s: float = 5.0,
        folder: Folder = "rollouts",
    ) -> None:
        """`worker_id` must be unique to one life of one process: its files count up from 0."""
        self.worker_id = check_worker_id(worker_id)
        self._root, self._folder = root, folder
        self._flush_groups, self._flush_bytes = flush_groups, flush_bytes
        self._sequence = itertools.count()
        self._appender = BackgroundAppender[tuple[int, pa.Table]](
            root, self._make_files, is_full=self._is_full, flush_age_s=flush_age_s
        )

    def append(self, batch: RolloutBatch) -> None:
        """Take a batch whole, or refuse it whole.

        Raises InvalidBatchError naming every bad row, column and reason; and, once, the error of an
        earlier write (StoreError, NameTakenError): then this batch was not taken, and that write is tried again.
        """
        assert batch.metadata.worker_id == self.worker_id, "a batch of another worker"
        validate(batch)
        table = to_table(batch, run_id=self._root.run_id, sequence=0)
        self._appender.append((len(batch.groups), table))

    def flush(self, *, wait: bool = True) -> None:
        """Commit what was appended; with `wait`, return when readers can see it.

        Raises, once, the error of a write, which is then tried again.
        """
        self._appender.flush(wait=wait)

    def close(self) -> None:
        """Flush, trying once more what failed before, and stop; raises when something could not be written."""
        self._appender.close()

    def __enter__(self) -> "RolloutWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_full(self, items: Sequence[tuple[int, pa.Table]]) -> bool:
        groups = sum(num_groups for num_groups, _ in items)
        return groups >= self._flush_groups or sum(table.nbytes for _, table in items) >= self._flush_bytes

    def _make_files(self, items: Sequence[tuple[int, pa.Table]]) -> list[NamedFile]:
        table = pa.concat_tables([table for _, table in items])
        versions = _group_versions(table)
        keys = pa.table({"version": versions, "env_name": table.column("env_name")})
        partitions = keys.group_by(["version", "env_name"], use_threads=False).aggregate([]).to_pylist()
        return [
            self._make_file(
                table.filter(pc.and_(pc.equal(versions, version), pc.equal(table.column("env_name"), env_name))),
                RolloutFile(version, env_name, self.worker_id, next(self._sequence), self._folder),
            )
            for version, env_name in (partition.values() for partition in partitions)
        ]

    def _make_file(self, rows: pa.Table, file: RolloutFile) -> NamedFile:
        column = rows.schema.get_field_index("sequence")
        sequence = pa.repeat(pa.scalar(file.sequence, pa.int64()), rows.num_rows)
        return file.name, encode(rows.set_column(column, rows.schema.field(column), sequence))


def _group_versions(table: pa.Table) -> pa.Array:
    """(num_rows,) int64: the oldest policy_version of each row's group, so that no group is split between files."""
    starts = group_starts(table)
    oldest = np.minimum.reduceat(table.column("policy_version").to_numpy(), starts)
    return pa.array(np.repeat(oldest, np.diff(starts, append=table.num_rows)))
