"""Write rows into every container that ludic.base.data_files reads, one function for each suffix."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Rows = Sequence[Mapping[str, Any]]


def _lines(rows: Rows) -> bytes:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()


def _array(rows: Rows) -> bytes:
    return json.dumps(rows, ensure_ascii=False, indent=2).encode()


def _csv(rows: Rows) -> bytes:
    """As a spreadsheet has them: lists and objects as JSON, and nothing for null."""
    names = [*dict.fromkeys(name for row in rows for name in row)]
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(names)
    writer.writerows([_cell(row.get(name)) for name in names] for row in rows)
    return text.getvalue().encode()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parquet(rows: Rows) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def _arrow(rows: Rows) -> bytes:
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def arrow_stream(rows: Rows) -> bytes:
    """As the package datasets writes its files *.arrow."""
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


_TEXTS = {".jsonl": _lines, ".ndjson": _lines, ".json": _array, ".csv": _csv}
ENCODERS: Mapping[str, Callable[[Rows], bytes]] = {
    **_TEXTS,
    **{f"{suffix}.gz": lambda rows, encode=encode: gzip.compress(encode(rows)) for suffix, encode in _TEXTS.items()},
    ".parquet": _parquet,
    ".arrow": _arrow,
}


def write_rows(path: Path, rows: Rows) -> Path:
    """Write a file by its suffixes, such as .jsonl.gz."""
    path.write_bytes(ENCODERS["".join(path.suffixes)](rows))
    return path
