"""Requests: the identity of sampled work, whichever worker sampled it.

A group of the schedule samples the requests number * group_size, number * group_size + 1, ..., so its number
identifies them. Imports, and writers that follow no schedule, have no requests.
"""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pyarrow as pa

from ludic.errors import SchemaError
from ludic.store.compaction_plans import find_replacement
from ludic.store.cursor import Cursor
from ludic.store.files import RolloutFile, list_files, slot_of
from ludic.store.parquet import read_columns
from ludic.store.root import Root
from ludic.store.tombstones import read_tombstones

_COLUMNS = ["worker_id", "sequence", "group_id", "request_index", "group_size"]
_CONCURRENT_READS = 8


def group_numbers(rows: pa.Table) -> np.ndarray:
    """Return each row's group number in the schedule, (num_rows,) int64; -1 for a row that follows no schedule."""
    workers = rows["worker_id"].combine_chunks().dictionary_encode()
    slots = [slot_of(worker_id) for worker_id in workers.dictionary.to_pylist()]
    is_scheduled = np.array([slot is not None for slot in slots], np.bool_)[workers.indices.to_numpy()]
    indexes, sizes = rows["request_index"].to_numpy(), rows["group_size"].to_numpy()
    return np.where(is_scheduled & (indexes >= 0) & (sizes > 0), indexes // np.maximum(sizes, 1), -1)


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


def _read_requests(root: Root, file: RolloutFile) -> set[tuple[int, str, int, str]]:
    """Return number, worker_id, sequence and group_id of each scheduled group; an empty set if the file is broken."""
    try:
        rows = read_columns(root, file.name, _COLUMNS)
    except SchemaError:
        return set()
    except FileNotFoundError:
        replacement = find_replacement(root, file)
        return _read_requests(root, replacement) if replacement else set()
    ids = (rows[name].to_pylist() for name in ("worker_id", "sequence", "group_id"))
    return {row for row in zip(group_numbers(rows).tolist(), *ids, strict=True) if row[0] >= 0}
