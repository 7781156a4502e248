"""Find the consumed groups of versions that a reader's cursor has forgotten, in the ledger.

A cursor forgets versions behind the trainer's window. A later trainer with a larger window, or with none, reads these
versions again: it must not get a group twice, nor miss one that was never consumed. Reads batches/, and the ids of all
rollouts of the forgotten versions. Raises StoreError if the filesystem fails.
"""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ludic.errors import SchemaError
from ludic.store.attempts import CheckpointId
from ludic.store.compaction_plans import find_replacement
from ludic.store.cursor import Cursor
from ludic.store.files import RolloutFile, Source, list_files
from ludic.store.ledger import consumed_groups
from ludic.store.parquet import read_columns
from ludic.store.root import Root

_COLUMNS = ["worker_id", "sequence", "group_id"]
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


def _groups_of_sources(root: Root, file: RolloutFile) -> dict[Source, set[str]]:
    """Return the group_ids of each source of a file; none if the file is broken or was deleted."""
    try:
        rows = read_columns(root, file.name, _COLUMNS)
    except SchemaError:
        return {}
    except FileNotFoundError:
        replacement = find_replacement(root, file)
        return _groups_of_sources(root, replacement) if replacement else {}
    sources: defaultdict[Source, set[str]] = defaultdict(set)
    for worker_id, sequence, group_id in zip(*(rows[name].to_pylist() for name in _COLUMNS), strict=True):
        sources[Source(worker_id, sequence)].add(group_id)
    return sources
