"""Write rows to a file or stdout as JSON, JSON Lines, CSV or Parquet, in a stream.

Null, lists and maps stay in JSON; CSV has an empty field for null, and JSON text for lists and maps. Raises ConfigError
if a file can't be written.
"""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ludic.base.printable import CONTROL
from ludic.errors import ConfigError, LudicError

if TYPE_CHECKING:
    import pyarrow as pa

_BYTES_AT_ONCE = 4 << 20


@contextmanager
def open_sink(target: Path | BinaryIO | None) -> Iterator[BinaryIO]:
    """Yield a file that appears once it is complete, or an open file; None is stdout. Raises ConfigError.

    An existing target that is not a file, such as /dev/null or a pipe, is written to, not replaced.
    """
    if target is None:
        sys.stdout.flush()
        target = sys.stdout.buffer
    if not isinstance(target, Path):
        yield target
        target.flush()
        return
    if not target.name or target.is_dir():
        raise ConfigError(f"{target} is a folder, wanted a file")
    is_device = target.exists() and not target.is_file()
    partial = target if is_device else target.with_name(f"{target.name}.partial")
    try:
        if not is_device:  # a link with that name, in another user's folder, could lead to another file
            partial.unlink(missing_ok=True)
        with partial.open("wb" if is_device else "xb") as file:
            yield file
        if not is_device:
            partial.replace(target)
    except LudicError:  # errors of the block; some are OSErrors, too
        raise
    except OSError as error:
        raise ConfigError(f"{target} can't be written: {error.strerror or error}") from error
    finally:
        if not is_device:
            with suppress(OSError):  # the folder may be a file, or be read-only
                partial.unlink(missing_ok=True)


def write_json(names: Sequence[str], rows: Iterable[Iterable[Any]], sink: BinaryIO) -> None:
    """Write one JSON array with an object per row."""
    before = b"[\n"
    for row in rows:
        sink.write(before + json_text(dict(zip(names, row, strict=True))).encode())
        before = b",\n"
    sink.write(b"\n]\n" if before == b",\n" else b"[]\n")


def write_jsonl(names: Sequence[str], rows: Iterable[Iterable[Any]], sink: BinaryIO) -> None:
    """Write one JSON object per line."""
    for row in rows:
        sink.write(json_text(dict(zip(names, row, strict=True))).encode() + b"\n")


def write_csv(names: Sequence[str], rows: Iterable[Iterable[Any]], sink: BinaryIO) -> None:
    """Write a header and one line per row of plain values; null is empty, and lists and maps are JSON text.

    All texts are quoted: csv.writer of Python before 3.11.9 leaves a carriage return bare, where readers cut the row.
    """
    header = [name if name.isidentifier() else _csv_field(name) for name in names]
    for line in chain([header], (map(_csv_field, row) for row in rows)):
        sink.write(",".join(line).encode() + b"\n")


def _csv_field(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | int | float):
        return json_text(value)
    text = value if isinstance(value, str) else json_text(value)
    return '"' + text.replace('"', '""') + '"'


ROW_WRITERS: dict[str, Callable[[Sequence[str], Iterable[Iterable[Any]], BinaryIO], None]] = {
    "json": write_json,
    "jsonl": write_jsonl,
    "csv": write_csv,
}


def write_result(result: "pa.RecordBatchReader", format: str, sink: BinaryIO) -> None:
    """Write a stream of record batches as json, jsonl, csv or parquet."""
    if format == "parquet":
        import pyarrow.parquet as pq

        with pq.ParquetWriter(sink, result.schema, compression="zstd") as writer:
            for batch in result:
                writer.write_batch(batch)
    else:
        ROW_WRITERS[format](result.schema.names, plain_rows(result), sink)


def plain_rows(result: "pa.RecordBatchReader") -> Iterator[list[Any]]:
    """Yield rows of values that JSON can represent."""
    for batch in result:
        # Numbers take up to ten times as much memory as Python objects as in Arrow.
        num_rows = max(1, _BYTES_AT_ONCE * batch.num_rows // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, num_rows):
            columns = batch.slice(start, num_rows).columns
            for row in zip(*(column.to_pylist(maps_as_pydicts="lossy") for column in columns), strict=True):
                yield [to_plain(value) for value in row]


def json_text(value: Any, **options: Any) -> str:
    """Return plain values as JSON. Characters that `printable` spells out are escaped and read back the same."""
    text = json.dumps(value, ensure_ascii=False, **options)
    return CONTROL.sub(lambda match: json.dumps(match[0], ensure_ascii=True)[1:-1], text)


def to_plain(value: Any) -> Any:
    """Convert a table's value for JSON: times become ISO 8601, NaN and infinity null, bytes hex, other types text."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case datetime():
            return value.isoformat()
        case Mapping():
            return {str(key): to_plain(item) for key, item in value.items()}
        case list() | tuple():
            return list(value) if _is_plain(value) else [to_plain(item) for item in value]
    return value.hex() if isinstance(value, bytes) else str(value)


def _is_plain(values: Sequence[Any]) -> bool:
    """Return whether a list needs no conversion; takes 1% of the time of converting each of 100,000 tokens."""
    types = set(map(type, values))
    return types <= {int, bool, str, type(None)} or (types == {float} and all(map(math.isfinite, values)))
