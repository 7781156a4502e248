"""Read the records of a file of another program one by one: lines of JSON or rows of Parquet.

Reads a local path or any fsspec URL. Raises ConfigError if the file can't be read.
"""

import json
from collections.abc import Iterator
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from ludic.errors import ConfigError, one_line
from ludic.settings import check_url

_ROWS_A_BATCH = 256

Records = Iterator[tuple[int, dict[str, Any] | str]]
"""Records with their lines or numbers, from 1; a text is the reason for which one can't be read."""


def read_records(url: str) -> Records:
    """Yield each JSON line or Parquet row, counted from 1; for a line that is no JSON object, the reason."""
    with open_file(url) as file:
        magic = file.read(4)
        file.seek(0)
        if magic == b"PAR1":
            yield from enumerate(_parquet_rows(file, url), start=1)
            return
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:  # also a number of too many digits
                yield number, f"is no JSON: {error}"
                continue
            yield number, value if isinstance(value, dict) else f"is {type(value).__name__}, wanted a JSON object"


def _parquet_rows(file: Any, url: str) -> Iterator[dict[str, Any]]:
    try:
        for batch in pq.ParquetFile(file).iter_batches(_ROWS_A_BATCH):
            yield from batch.to_pylist(maps_as_pydicts="lossy")
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{url} is no Parquet file that can be read: {one_line(error)}") from error


def open_file(url: str) -> Any:
    """Open a file for reading. Raises ConfigError if that fails, or if its URL, which is stored, holds a secret."""
    check_url(url, "the file's URL")
    try:
        return fsspec.open(url, "rb").open()
    except (OSError, ValueError, ImportError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{url} can't be read: {reason}") from error
