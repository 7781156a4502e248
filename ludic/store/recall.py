"""Restore what a reader's cursor does not hold, from stored rollouts and the ledger.

A cursor forgets versions behind the trainer's window. A later trainer with a larger window, or with none, reads these
versions again: it must get each group once, and every group that was never consumed. The cursor of an older ludic
holds no requests. Reads batches/, expired/ and the ids of rollouts. Raises StoreError if the filesystem fails,
SchemaError if the ledger is damaged.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa

from ludic.errors import SchemaError
from ludic.store.cursor import Cursor
from ludic.store.files import RolloutFile, Source, find_replacement, group_numbers, list_files
from ludic.store.ledger import consumed_groups
from ludic.store.parquet import read_columns
from ludic.store.records import CheckpointId
from ludic.store.root import Root
from ludic.store.tombstones import read_tombstones

_SOURCE = ["worker_id", "sequence", "group_id"]
_CONCURRENT_READS = 8


def recall_sources(root: Root, cursor: Cursor, first_version: int, checkpoint: CheckpointId, *, forgets: bool) -> None:
    """Restore what a cursor has forgotten of versions from `first_version` on; does nothing if it forgot none of them.

    checkpoint: that of the cursor. forgets: as in RolloutReader.consume.
    """
    forgotten = range(first_version, cursor.first_version)
    if not forgotten:
        return
    consumed = consumed_groups(root, checkpoint)
    cursor.first_version = first_version
    files = list_files(root, forgotten)
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        for file, sources in zip(files, pool.map(partial(_groups_of_sources, root), files), strict=True):
            for source, group_ids in sources.items():
                used, version = group_ids & consumed, file.version if forgets else None
                if used:
                    cursor.consume(*source, used, whole=used == group_ids, version=version)


def recall_requests(root: Root, cursor: Cursor, in_use: Collection[str]) -> None:
    """Add to the cursor of an older ludic the requests of its consumed groups and of the groups in use.

    in_use: group_ids that steps trained on, and that may be delivered again. Reads ids of all rollouts; expired groups
    count as consumed. Raises StoreError if the filesystem fails.
    """
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        for rows in pool.map(partial(_read_requests, root), list_files(root)):
            for number, worker_id, sequence, group_id in rows:
                if cursor.has_group(worker_id, sequence, group_id):
                    cursor.finish_request(number)
                elif group_id in in_use:
                    cursor.use_request(number, group_id)
    partitions = [partition for tombstone in read_tombstones(root) for partition in tombstone.partitions]
    for first, last in [pair for each in partitions if each.folder == "rollouts" for pair in each.groups]:
        for number in range(first, last):
            cursor.finish_request(number)
    cursor.knows_requests = True


def _groups_of_sources(root: Root, file: RolloutFile) -> dict[Source, set[str]]:
    """Return the group_ids of each source of a file; none if the file is broken or was deleted."""
    sources: defaultdict[Source, set[str]] = defaultdict(set)
    for worker_id, sequence, group_id in _rows(_read(root, file, _SOURCE)):
        sources[Source(worker_id, sequence)].add(group_id)
    return sources


def _read_requests(root: Root, file: RolloutFile) -> set[tuple[int, str, int, str]]:
    """Return number, worker_id, sequence and group_id of each scheduled group; none if the file is broken or gone."""
    rows = _read(root, file, [*_SOURCE, "request_index", "group_size"])
    if rows is None:
        return set()
    return {
        (number, *row) for number, row in zip(group_numbers(rows).tolist(), _rows(rows), strict=True) if number >= 0
    }


def _read(root: Root, file: RolloutFile, columns: list[str]) -> pa.Table | None:
    """Return columns of a file, or of the file that compaction moved it to; None if it is broken or was deleted."""
    try:
        return read_columns(root, file.name, columns)
    except SchemaError:
        return None
    except FileNotFoundError:
        replacement = find_replacement(root, file)
        return _read(root, replacement, columns) if replacement else None


def _rows(table: pa.Table | None) -> Iterator[tuple[str, int, str]]:
    """Yield worker_id, sequence and group_id of each row."""
    if table is not None:
        yield from zip(*(table[name].to_pylist() for name in _SOURCE), strict=True)
