"""metrics/: Parquet files with one row per gradient step and one row per worker's call of its engine.

Rows gather for at most a second, then a thread writes them; a killed process loses at most that second.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Literal

import pyarrow as pa

from ludic.errors import SchemaError
from ludic.schema import arrow_schema
from ludic.store.catalogue import METRICS, MetricsName
from ludic.store.files import check_worker_id
from ludic.store.parquet import encode_plain
from ludic.store.root import Root
from ludic.store.tables import read_table
from ludic.store.writer import BackgroundAppender, NamedFile

_FLUSH_AGE_S = 1.0
_CONCURRENT_READS = 16
_LISTING_SHARE = 20.0
"""Minimum time between listings, as a multiple of the time that the last listing took."""

_Rows = list[dict[str, Any]]
_Writer = tuple[Literal["train", "worker"], str]
"""Kind and id of a writer."""

POPULATIONS = {
    "reward_mean": "considered rollouts, dropped ones too",
    "response_length_mean": "used rollouts",
}
"""The rollouts of a gradient step whose mean each of these columns holds, for titles and labels.

A reward says how good the policy is, so filters that drop whole groups must not move it; a length says what trained.
"""


class MetricsLog:
    """Appends rows of the metrics table (schemas/metrics.v1.json)."""

    def __init__(self, root: Root, kind: Literal["train", "worker"], writer_id: str) -> None:
        """writer_id: part of the files' names; must be unique to one life of one process."""
        self._kind, self._run_id = kind, root.run_id
        self._writer_id = check_worker_id(writer_id)
        self._sequence = itertools.count()
        self._appender = BackgroundAppender[dict[str, Any]](
            root, self._make_files, is_full=lambda rows: len(rows) >= 32, flush_age_s=_FLUSH_AGE_S
        )

    def write(self, **values: Any) -> None:
        """Append one row; columns that are not given are null, and so are numbers that are not finite."""
        unknown = set(values) - set(arrow_schema("metrics").names)
        assert not unknown, f"no such metrics: {unknown}"
        stamp = {"kind": self._kind, "run_id": self._run_id, "created_at": datetime.now(UTC)}
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self._appender.append(stamp | finite)

    def close(self) -> None:
        """Write the remaining rows and stop the thread."""
        self._appender.close()

    def _make_files(self, rows: Sequence[Mapping[str, Any]]) -> list[NamedFile]:
        schema = arrow_schema("metrics")
        columns = {name: [row.get(name) for row in rows] for name in schema.names}
        table = pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)
        name = METRICS.name(MetricsName(self._kind, self._writer_id, next(self._sequence)))
        return [(name, encode_plain(table))]


class MetricsTail:
    """Reads the rows that were written since the last poll; for live displays.

    A listing gets slower as the run grows, so listings take at most a twentieth of the time. Between listings, files
    that follow the newest known file of each active writer are requested by name.
    """

    def __init__(self, root: Root, *, newest_files: int | None = None) -> None:
        """newest_files: number of files of each writer that the first poll reads; None reads all."""
        self._root, self._newest_files = root, newest_files
        self._seen: set[MetricsName] = set()
        self._next: dict[_Writer, int] = {}
        """Next sequence of each writer that had new files in the last listing."""
        self._list_at = -math.inf
        """Time of the next listing, on the monotonic clock."""

    def poll(self) -> list[dict[str, Any]]:
        """Return new rows, in no particular order; a broken file is left out (`ludic verify` lists broken files).

        Raises StoreError if the filesystem fails; the next poll reads those rows again.
        """
        is_due = not self._seen or time.monotonic() >= self._list_at
        found = self._read_listed() if is_due else self._read_next()
        return [row for rows in found for row in rows]

    def _read_listed(self) -> list[_Rows]:
        since = time.monotonic()
        listed = set(METRICS.listed(self._root))
        took_s = time.monotonic() - since
        new = sorted(listed - self._seen)
        wanted = new if self._seen or self._newest_files is None else _newest(new, self._newest_files)
        with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            found = list(pool.map(self._read, wanted))
        self._next = {file[:2]: file.sequence + 1 for file in new}
        self._seen |= listed
        self._list_at = time.monotonic() + _LISTING_SHARE * took_s
        return [rows or [] for rows in found]

    def _read_next(self) -> list[_Rows]:
        with ThreadPoolExecutor(_CONCURRENT_READS) as pool:  # one by one, 1,000 workers on S3 would take 20 s and more
            found = [pair for pairs in pool.map(self._read_on, list(self._next.items())) for pair in pairs]
        files = [file for file, _ in found]
        self._seen |= set(files)
        self._next |= {file[:2]: file.sequence + 1 for file in files}
        return [rows for _, rows in found]

    def _read_on(self, following: tuple[_Writer, int]) -> list[tuple[MetricsName, _Rows]]:
        """Return the files of a writer from a sequence on, each with its rows."""
        writer, sequence = following
        found: list[tuple[MetricsName, _Rows]] = []
        while (rows := self._read(file := MetricsName(*writer, sequence + len(found)))) is not None:
            found.append((file, rows))
        return found

    def _read(self, file: MetricsName) -> _Rows | None:
        """Return the rows of this run in a file, an empty list for a broken file; None if there is no such file."""
        try:
            rows = read_table(self._root, METRICS, file).to_pylist()
        except FileNotFoundError:
            return None
        except SchemaError:
            return []
        return [row for row in rows if row["run_id"] in (None, self._root.run_id)]


def metrics_file_names(root: Root) -> dict[str, list[str]]:
    """Return the names of the files of each writer, train-ID or worker-ID, in the order in which they were written."""
    by_writer = itertools.groupby(METRICS.listed(root), key=lambda file: file[:2])
    return {"-".join(writer): [METRICS.name(file) for file in of_writer] for writer, of_writer in by_writer}


def _newest(files: Sequence[MetricsName], most: int) -> list[MetricsName]:
    """Return the last `most` files of each writer. files: sorted."""
    by_writer = itertools.groupby(files, key=lambda file: file[:2])
    return [file for _, of_writer in by_writer for file in list(of_writer)[-most:]]
