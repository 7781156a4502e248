"""Move broken files to quarantine/, where no reader looks, with the reason; list temporary files of killed writers.

Moves {root}/NAME to {root}/quarantine/NAME and writes {root}/quarantine/NAME.json. The note comes first; a second
call for the same file finishes an interrupted move. Only `ludic verify` and `ludic stats` look into quarantine/.
Raises StoreError if the filesystem fails.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ludic.errors import SchemaError
from ludic.store.catalogue import (
    OLD_QUARANTINE,
    OLD_QUARANTINED,
    QUARANTINE,
    QUARANTINED,
    MovedName,
    Records,
    row_of,
)
from ludic.store.local import SCRATCH
from ludic.store.records import QuarantinedFile, encode_record
from ludic.store.root import Root

_ROWS = ((QUARANTINED, QUARANTINE), (OLD_QUARANTINED, OLD_QUARANTINE))
"""The rows of quarantined files, with those of their notes."""


def quarantine(root: Root, name: str, reason: str) -> str:
    """Move a file below quarantine/, and return its new name.

    Does nothing if the file was moved before. Readers then see a gap in its worker's sequence and continue, and the
    next worker in that slot makes the requests of the file again. Raises FileNotFoundError if the file is at neither
    name.
    """
    assert row_of(name) not in (QUARANTINED, OLD_QUARANTINED), f"{name} is in quarantine"
    target = QUARANTINED.name(MovedName(name))
    assert QUARANTINED.parse(target), f"{name} would be taken for a note"
    try:
        # First check that the file exists: a note alone would describe a file that never existed.
        if root.exists(name):
            note = QuarantinedFile(name=name, reason=reason, found_at=datetime.now(UTC).isoformat())
            root.put(QUARANTINE.name_of(note), encode_record(note))
        root.rename(name, target)
    except FileNotFoundError:  # moved before, or by another process at the same time
        if not root.exists(target):
            raise
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
    with root.explained(SCRATCH):
        for path in sorted(folder.iterdir()):
            with suppress(FileNotFoundError):  # its writer has just ended
                written_at = max(file.stat().st_mtime for file in (path, *path.rglob("*")))
                yield Leftover(name=f"{SCRATCH}/{path.name}", age_s=time.time() - written_at)
