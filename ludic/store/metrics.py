"""metrics/: one row a gradient step and one a worker's call of its engine, as Parquet.

Rows gather for a second and are written by a thread; a killed process loses at most that second.
"""

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from ludic.errors import SchemaError
from ludic.schema import arrow_schema, conform
from ludic.store.background import BackgroundAppender, NamedFile
from ludic.store.files import check_worker_id
from ludic.store.parquet import encode_plain
from ludic.store.root import Root

_FLUSH_AGE_S = 1.0


class MetricsLog:
    """Appends rows of the metrics table (schemas/metrics.v1.json)."""

    def __init__(self, root: Root, kind: Literal["train", "worker"], writer_id: str) -> None:
        """`writer_id` must be unique to one life of one process: it names the files."""
        self._kind, self._run_id = kind, root.run_id
        self._prefix = f"metrics/{check_worker_id(f'{kind}-{writer_id}')}"
        self._sequence = itertools.count()
        self._appender = BackgroundAppender[dict[str, Any]](
            root, self._make_files, is_full=lambda rows: len(rows) >= 32, flush_age_s=_FLUSH_AGE_S
        )

    def write(self, **values: Any) -> None:
        """One row; columns not named are null, and so are numbers that are not finite."""
        unknown = set(values) - set(arrow_schema("metrics").names)
        assert not unknown, f"no such metrics: {unknown}"
        stamp = {"kind": self._kind, "run_id": self._run_id, "created_at": datetime.now(UTC)}
        self._appender.append({**stamp, **{name: _finite(value) for name, value in values.items()}})

    def close(self) -> None:
        """Write what is left."""
        self._appender.close()

    def _make_files(self, rows: Sequence[Mapping[str, Any]]) -> list[NamedFile]:
        schema = arrow_schema("metrics")
        columns = {name: [row.get(name) for row in rows] for name in schema.names}
        table = pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)
        return [(f"{self._prefix}-{next(self._sequence)}.parquet", encode_plain(table))]


class MetricsTail:
    """Reads the rows that were written since the last look; for live displays."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._seen: set[str] = set()

    def poll(self) -> list[dict[str, Any]]:
        """New rows, in no particular order; a broken file is left out (`ludic verify` lists those).

        Raises StoreError when the filesystem fails; the next poll reads those rows again.
        """
        new = [name for name in self._root.list("metrics") if name not in self._seen]
        rows = [row for name in new for row in self._read(name)]
        self._seen.update(new)
        return rows

    def _read(self, name: str) -> list[dict[str, Any]]:
        try:
            data = self._root.read(name)
        except FileNotFoundError:
            return []
        try:
            return conform(pq.read_table(io.BytesIO(data)), "metrics").to_pylist()
        except (pa.ArrowException, OSError, SchemaError):
            return []


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
