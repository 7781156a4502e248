"""Delete files of rollouts that are no longer needed, with a tombstone, and move broken files to quarantine/."""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.base import Track, untracked
from ludic.errors import SchemaError
from ludic.root.catalogue import (
    EXPIRED,
    OLD_QUARANTINE,
    OLD_QUARANTINED,
    QUARANTINE,
    QUARANTINED,
    MovedName,
    NumberName,
    Records,
    file_kind_of,
)
from ludic.root.json_records import ExpiredPartition, QuarantinedFile, Spans, Tombstone, encode_record
from ludic.root.root import Root
from ludic.root.rows.files import Folder, RolloutFile, SourceFile, find_sources, slot_of
from ludic.root.rows.parquet import read_columns
from ludic.root.rows.reader import Cursor, Intervals
from ludic.root.storage.local import SCRATCH

# --- expired/ -------------------------------------------------------------------------------------------------
# Delete rollouts that are no longer needed: put a tombstone, then delete whole files.
#
# expired/N.json, put if absent, lists the deleted files and the reason, so that checks do not report them as missing.
# It also lists their groups of the schedule, so that restarted workers do not make these groups again. An interrupted
# deletion leaves files that a tombstone names; they stay valid, and the next expiry that chooses them deletes them. The
# trainer prunes policies/ and checkpoints/ (keep_policies, keep_checkpoints); policy.json, ledger and metrics are never
# deleted.


_CONCURRENT_REQUESTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of rollouts, with its size and the sources of its rows."""

    file: RolloutFile
    size_bytes: int
    sources: tuple[SourceFile, ...]
    leftovers: tuple[RolloutFile, ...] = ()
    """Workers' files that an interrupted compaction left behind, though this compacted file holds their rows."""


def stored_files(root: Root, folder: Folder = "rollouts") -> list[StoredFile]:
    """Return files that hold rows, sorted; broken compacted files are left out (`ludic verify` lists them)."""
    sizes = root.sizes(folder)
    files = sorted(file for file in map(RolloutFile.parse, sizes) if file is not None)
    with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
        found = pool.map(partial(find_sources, root), files)
        sources = {file: tuple(of_file or ()) for file, of_file in zip(files, found, strict=True)}
    workers = {file.source: file for file in files if not file.is_compacted}
    leftovers = {
        file: tuple(workers.pop(source) for source in held if source in workers)
        for file, held in sources.items()
        if file.is_compacted
    }
    kept = sorted([*workers.values(), *(file for file in leftovers if sources[file])])
    return [
        StoredFile(file=file, size_bytes=sizes[file.name], sources=sources[file], leftovers=leftovers.get(file, ()))
        for file in kept
    ]


def all_rows_match(
    files: Iterable[StoredFile], rows: Mapping[SourceFile, tuple[int, int]]
) -> tuple[list[StoredFile], int]:
    """Return the files whose rows all match, and the number of matching rows in the other files.

    rows: number of rows and number of matching rows, by source.
    """
    chosen, num_left = [], 0
    for stored in files:
        num_rows, num_matching = np.sum([rows.get(source, (0, 0)) for source in stored.sources], axis=0)
        if num_rows and num_rows == num_matching:
            chosen.append(stored)
        else:
            num_left += int(num_matching)
    return chosen, num_left


def is_unconsumed(stored: StoredFile, first_version: int, cursor: Cursor) -> bool:
    """Return whether a trainer that resumes at `cursor`, reading from `first_version` on, would use some of a file."""
    return stored.file.version >= first_version and not all(cursor.has_source(*source) for source in stored.sources)


def is_trained_on(stored: StoredFile, names: Collection[str]) -> bool:
    """Return whether one of `names`, files in the ledger, is this file or was compacted into it."""
    committed = (replace(stored.file, **source._asdict()).name for source in stored.sources)
    return stored.file.name in names or any(name in names for name in committed)


def expire(
    root: Root, files: Iterable[StoredFile], *, rule: str, dry_run: bool = False, track: Track = untracked
) -> list[ExpiredPartition]:
    """Put a tombstone and delete files; return the content of the tombstone, by partition.

    dry_run: delete nothing and put no tombstone. Raises StoreError if the filesystem fails: then call it again.
    """
    chosen = list(files)
    with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
        read = list(track(pool.map(partial(_read_groups, root), chosen), len(chosen), "files read"))
        partitions = _describe(chosen, read)
        if not dry_run and partitions:
            _put_tombstone(root, Tombstone(created_at=datetime.now(UTC).isoformat(), rule=rule, partitions=partitions))
            # Leftovers of a compaction go first: without the compacted file they would count as new rollouts.
            delete_files(root, [file.name for stored in chosen for file in stored.leftovers])
            delete_files(root, [stored.file.name for stored in chosen], track)
    return list(partitions)


def delete_files(root: Root, names: Collection[str], track: Track = untracked) -> None:
    """Delete files, some at a time. Raises StoreError."""
    with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
        list(track(pool.map(root.delete, names), len(names), "files deleted"))


def read_tombstones(root: Root) -> list[Tombstone]:
    """Return all tombstones, without broken ones: the writer of a broken tombstone put another one after it."""
    found: list[Tombstone | None] = []
    for each in EXPIRED.listed(root):
        with suppress(SchemaError):
            found.append(EXPIRED.read(root, *each))
    return [tombstone for tombstone in found if tombstone is not None]


def _put_tombstone(root: Root, tombstone: Tombstone) -> None:
    """Put a tombstone under the next free number, and read it back to make sure that it is stored whole."""
    data = encode_record(tombstone, indent=None)
    number = len(EXPIRED.listed(root))
    while not (root.put_if_absent(name := EXPIRED.name(NumberName(number)), data) and root.read(name) == data):
        number += 1


def _read_groups(root: Root, stored: StoredFile) -> tuple[int, np.ndarray]:
    """Return the number of rows of a file, and the group numbers of its scheduled rows, (num_groups,) int64.

    A broken or missing file counts as empty.
    """
    try:
        table = read_columns(root, stored.file.name, ["worker_id", "request_index", "group_size"])
    except (SchemaError, FileNotFoundError):
        return 0, np.zeros(0, np.int64)
    workers = table.column("worker_id")
    scheduled = [worker_id for worker_id in workers.unique().to_pylist() if slot_of(worker_id) is not None]
    mine = table.filter(pc.is_in(workers, value_set=pa.array(scheduled, pa.string())))
    return table.num_rows, np.unique(mine["request_index"].to_numpy() // mine["group_size"].to_numpy())


def _describe(files: Sequence[StoredFile], read: Sequence[tuple[int, np.ndarray]]) -> tuple[ExpiredPartition, ...]:
    partitions: dict[str, list[int]] = {}
    for index, stored in enumerate(files):
        partitions.setdefault(stored.file.partition, []).append(index)
    return tuple(_describe_partition([files[i] for i in mine], [read[i] for i in mine]) for mine in partitions.values())


def _describe_partition(files: Sequence[StoredFile], read: Sequence[tuple[int, np.ndarray]]) -> ExpiredPartition:
    file = files[0].file
    numbers = np.unique(np.concatenate([of_file for _, of_file in read]))
    return ExpiredPartition(
        folder=file.folder,
        version=file.version,
        env_name=file.env_name,
        num_files=len(files),
        num_rows=sum(num_rows for num_rows, _ in read),
        size_bytes=sum(stored.size_bytes for stored in files),
        files=_spans(
            SourceFile(file.worker_id, file.sequence) for stored in files for file in (stored.file, *stored.leftovers)
        ),
        sources=_spans(source for stored in files for source in stored.sources),
        groups=_intervals(numbers.tolist()).pairs,
    )


def _spans(sources: Iterable[SourceFile]) -> Spans:
    sequences: dict[str, list[int]] = {}
    for source in sources:
        sequences.setdefault(source.worker_id, []).append(source.sequence)
    return {worker_id: _intervals(found).pairs for worker_id, found in sorted(sequences.items())}


def _intervals(numbers: Iterable[int]) -> Intervals:
    intervals = Intervals()
    for number in sorted(numbers):
        intervals.add(number)
    return intervals


# --- quarantine/ ----------------------------------------------------------------------------------------------
# Move broken files to quarantine/, where no reader looks, with the reason; list temporary files of killed writers.
#
# Moves {root}/NAME to {root}/quarantine/NAME and writes {root}/quarantine/NAME.json. The note comes first; a second
# call for the same file finishes an interrupted move. Only `ludic verify` and `ludic watch --totals` look into
# quarantine/. Raises StoreError if the filesystem fails.


_ROWS = ((QUARANTINED, QUARANTINE), (OLD_QUARANTINED, OLD_QUARANTINE))
"""The rows of quarantined files, with those of their notes."""


def quarantine(root: Root, name: str, reason: str) -> str | None:
    """Move a file below quarantine/, and return its new name; None if the file is gone, such as expired meanwhile.

    Does nothing if the file was moved before. Readers then see a gap in its worker's sequence and continue, and the
    next worker in that slot makes the requests of the file again.
    """
    assert file_kind_of(name) not in (QUARANTINED, OLD_QUARANTINED), f"{name} is in quarantine already"
    target = QUARANTINED.name(MovedName(name))
    assert QUARANTINED.parse(target), f"{name} ends like a note of quarantine/"
    try:
        # First check that the file exists: a note alone would describe a file that never existed.
        if root.exists(name):
            note = QuarantinedFile(name=name, reason=reason, found_at=datetime.now(UTC).isoformat())
            root.put(QUARANTINE.name_of(note), encode_record(note))
        root.rename(name, target)
    except FileNotFoundError:  # moved before, or moved or deleted by another process at the same time
        return target if root.exists(target) else None
    return target


def list_quarantined(root: Root) -> list[QuarantinedFile]:
    """Return the quarantined files, sorted by name."""
    notes = {found.name: note for moved, note in reversed(_ROWS) for found in moved.listed(root)}
    return [_read_note(root, note, name) for name, note in sorted(notes.items())]


def is_quarantined(root: Root, name: str) -> bool:
    """Return whether a file was moved."""
    return any(root.exists(moved.name(MovedName(name))) for moved, _ in _ROWS)


def _read_note(root: Root, row: Records[MovedName, QuarantinedFile], name: str) -> QuarantinedFile:
    note = None
    with suppress(SchemaError):
        note = row.read(root, name)
    return note or QuarantinedFile(name=name, reason="", found_at="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A temporary file, or a folder of temporary files, of a writer that was killed or still writes."""

    name: str
    """Name below the root."""
    age_s: float
    """Seconds since the last write in it, by the clocks of this machine and of the disk's machine."""


def list_leftovers(root: Root) -> Iterator[Leftover]:
    """Yield the contents of the temporary folder of a local root.

    Object stores have no such folder: a lifecycle rule of the bucket ends unfinished uploads.
    """
    if not root.is_local or not root.exists(SCRATCH):
        return
    folder = Path(root.at(SCRATCH))
    if not folder.is_dir():
        return
    with root.explained(SCRATCH):
        for path in sorted(folder.iterdir()):
            with suppress(FileNotFoundError):  # its writer has just ended
                written_at = max(file.lstat().st_mtime for file in (path, *path.rglob("*")))
                yield Leftover(name=f"{SCRATCH}/{path.name}", age_s=time.time() - written_at)
