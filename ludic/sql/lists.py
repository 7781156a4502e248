"""Read lists, structs and maps from workers' files when a query uses them; only scalars of those files are cached.

Each column is a DuckDB function of a row's address. DuckDB leaves out functions whose result is not used, and calls the
others after filters, for some 2,000 rows at a time. Rows of a file that was compacted since are found in the compacted
file. Raises SchemaError if a file is broken, StoreError if it is deleted or the filesystem fails.
"""

import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ludic.errors import LudicError, SchemaError
from ludic.schema import rollouts_schema
from ludic.store import Root
from ludic.store.ledger import read_rollouts
from ludic.store.parquet import read_row_groups

ARGUMENTS = ("file", "row_group", "row", "rollout_id", "group_id")
"""Columns of a segment (ludic.sql.scalars) that locate a row's lists."""

_RECENT_BYTES = 256 << 20
_CONCURRENT_READS = 32


class ListReader:
    """Reads single columns of rows by address. DuckDB's threads share one reader."""

    def __init__(self, root: Root) -> None:
        self._root, self._schema = root, rollouts_schema(root.run.extra_columns)
        self._recent = _RecentFiles(root)
        # Local reads are too short for threads to help; remote reads wait for the network.
        self._pool = None if root.is_local else ThreadPoolExecutor(_CONCURRENT_READS)

    def read(
        self,
        column: str,
        file: pa.ChunkedArray,
        row_group: pa.ChunkedArray,
        row: pa.ChunkedArray,
        rollout_id: pa.ChunkedArray,
        group_id: pa.ChunkedArray,
    ) -> pa.ChunkedArray:
        """Return a column of some rows, in their order. The other arguments are ARGUMENTS, all of equal length."""
        rows = pa.table([file, row_group, row, rollout_id, group_id], names=ARGUMENTS)
        names = rows["file"].combine_chunks().dictionary_encode()
        key = names.indices.to_numpy().astype(np.int64) << 32 | rows["row_group"].to_numpy()
        order = np.argsort(key, kind="stable")
        parts = [rows.take(indexes) for indexes in np.split(order, np.flatnonzero(np.diff(key[order])) + 1)]
        found = (self._pool.map if self._pool else map)(lambda part: self._read_part(column, part), parts)
        values = pa.chunked_array([chunk for part in found for chunk in part.chunks], self._schema.field(column).type)
        return values if (order[1:] > order[:-1]).all() else values.take(np.argsort(order))

    def _read_part(self, column: str, rows: pa.Table) -> pa.ChunkedArray:
        """Return a column for rows of one row group."""
        name, row_group = rows["file"][0].as_py(), rows["row_group"][0].as_py()
        where = f"{self._root.url}/{name}"
        try:
            data, footer = self._recent.open(name)
            with pq.ParquetFile(data, metadata=footer) as file:
                values = read_row_groups(file, [row_group], [column], where, self._schema)[column]
        except FileNotFoundError:
            return read_rollouts(self._root, rows, [column])[column]
        except LudicError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise SchemaError(f"{where}: column {column} can't be read: {error}") from error
        indexes = rows["row"].to_numpy()
        whole = len(indexes) == len(values) and (indexes == np.arange(len(values))).all()
        return values if whole else values.take(indexes)


class _RecentFiles:
    """Caches contents and footers of recent files: a query often needs several columns of the same rows."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._files: OrderedDict[str, tuple[pa.Buffer, pq.FileMetaData]] = OrderedDict()
        self._num_bytes = 0

    def open(self, name: str) -> tuple[pa.Buffer, pq.FileMetaData]:
        """Return a file's content and footer. Raises FileNotFoundError if there is no such file."""
        with self._lock:
            if name in self._files:
                self._files.move_to_end(name)
                return self._files[name]
        data = self._read(name)
        footer = pq.read_metadata(pa.BufferReader(data))
        with self._lock:
            if name not in self._files:
                self._files[name] = data, footer
                self._num_bytes += data.size
            while self._num_bytes > _RECENT_BYTES and len(self._files) > 1:
                self._num_bytes -= self._files.popitem(last=False)[1][0].size
        return data, footer

    def _read(self, name: str) -> pa.Buffer:
        """Map a local file into memory; fetch a remote file whole, in one request."""
        if not self._root.is_local:
            return pa.py_buffer(self._root.read(name))
        with self._root.explained(name), pa.memory_map(self._root.at(name)) as file:
            return file.read_buffer()
