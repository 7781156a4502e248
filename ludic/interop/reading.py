"""Read the records of a peer's file one by one: lines of JSON or rows of Parquet.

Reads a local path or any fsspec URL. Raises ConfigError if the file can't be opened or is not of the format.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from ludic.errors import ConfigError, one_line
from ludic.interop.mapping import Container, FormatMapping
from ludic.paths import is_url

_ROWS_A_BATCH = 256

NumberedRecord = tuple[int, dict[str, Any] | str]
"""Line or row, counted from 1, and its values, or the reason that it can't be read."""


def digest(url: str) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with _open(url) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_records(url: str, mapping: FormatMapping) -> Iterator[NumberedRecord]:
    """Yield every record; for a line that is not a JSON object, the reason instead of values."""
    with _open(url) as file:
        yield from _READERS[mapping.container](file, url, mapping)


def path_fields(url: str, mapping: FormatMapping) -> dict[str, str]:
    """Return the fields that the mapping reads from the file's full path."""
    place = url if is_url(url) else Path(url).absolute().as_posix()
    match = mapping.path.search(place) if mapping.path else None
    return {name: value for name, value in match.groupdict().items() if value is not None} if match else {}


def _open(url: str) -> Any:
    """Open a file for reading."""
    try:
        return fsspec.open(url, "rb").open()
    except (OSError, ValueError, ImportError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{url} can't be read: {reason}") from error


def _read_lines(file: BinaryIO, url: str, mapping: FormatMapping) -> Iterator[NumberedRecord]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            yield number, f"is no JSON: {error}"
            continue
        yield number, value if isinstance(value, dict) else f"is {type(value).__name__}, wanted a JSON object"


def _read_rows(file: BinaryIO, url: str, mapping: FormatMapping) -> Iterator[NumberedRecord]:
    try:
        parquet = pq.ParquetFile(file)
        _check_columns(parquet.schema_arrow.names, url, mapping)
        number = 0
        for batch in parquet.iter_batches(_ROWS_A_BATCH):
            for row in batch.to_pylist(maps_as_pydicts="lossy"):
                number += 1
                yield number, row
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{url} is no Parquet file that can be read: {one_line(error)}") from error


def _check_columns(names: list[str], url: str, mapping: FormatMapping) -> None:
    """Raises ConfigError if the table lacks a column that every record needs: it is another format's."""
    for field in ("prompt", "completion", "messages"):
        places = mapping.fields.get(field, ())
        if places and not any(place.partition(".")[0] in names for place in places):
            raise ConfigError(
                f"{url} has no column {' or '.join(map(repr, places))}, which format {mapping.name} reads as its "
                f"{field}; it has {', '.join(names)}"
            )


_READERS: dict[Container, Any] = {"jsonl": _read_lines, "parquet": _read_rows}
