"""The sources of a file of rollouts or requests: the files, as workers committed them, that its rows came from.

A worker's file is its own source. A compacted file holds all rows of its sources, and names the sources in the entry
`ludic.sources` of its footer: a JSON list of [worker_id, sequence].
"""

import json
from collections.abc import Iterable

import pyarrow.parquet as pq

from ludic.errors import SchemaError
from ludic.store.files import AppendedFile, Source, parse_source
from ludic.store.parquet import open_parquet
from ludic.store.root import Root

SOURCES_KEY = b"ludic.sources"


def to_json(sources: Iterable[Source]) -> bytes:
    """Return the value of SOURCES_KEY in a compacted file's footer."""
    return json.dumps([list(source) for source in sources]).encode()


def sources_of(parquet: pq.ParquetFile, file: AppendedFile) -> list[Source]:
    """Return the sources of an open file. Raises SchemaError if a compacted file does not name its sources."""
    if not file.is_compacted:
        return [file.source]
    try:
        pairs = json.loads((parquet.metadata.metadata or {})[SOURCES_KEY])
        return [parse_source(worker_id, sequence) for worker_id, sequence in pairs]
    except (KeyError, ValueError, TypeError) as error:
        raise SchemaError(f"{file.name} does not name its sources in its footer; no compaction wrote it") from error


def find_sources(root: Root, file: AppendedFile) -> list[Source] | None:
    """Return the sources of a file as `read_sources` does; None if it is broken or gone."""
    try:
        return read_sources(root, file)
    except (SchemaError, FileNotFoundError):
        return None


def read_sources(root: Root, file: AppendedFile) -> list[Source]:
    """Return the sources of a file, from its name or, if compacted, its footer. Raises the errors of `open_parquet`."""
    if not file.is_compacted:
        return [file.source]
    with open_parquet(root, file.name, file.table) as parquet:
        return sources_of(parquet, file)
