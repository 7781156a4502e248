"""Move broken files to set_aside/, where no reader looks, with the reason; list temporary files of killed writers.

Moves {root}/NAME to {root}/set_aside/NAME and writes {root}/set_aside/NAME.json. The note comes first; setting the
same file aside again finishes an interrupted move. Only `ludic verify` and `ludic stats` look into set_aside/.
Raises StoreError if the filesystem fails.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ludic.errors import SchemaError
from ludic.store.filesystem import SCRATCH
from ludic.store.json_files import encode_record, read_record
from ludic.store.root import Root

QUARANTINE = "set_aside"
_NOTE = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedFile:
    """A file that was set aside."""

    name: str
    """Name of the file below the root before it was moved."""
    reason: str
    """Why the file was set aside; empty if the note is gone."""
    found_at: str
    """Time in ISO 8601, UTC; empty if the note is gone."""


def quarantine(root: Root, name: str, reason: str) -> str:
    """Move a file below set_aside/, and return its new name.

    Does nothing if the file was moved before. Readers then see a gap in its worker's sequence and continue, and the
    next worker in that slot makes the requests of the file again. Raises FileNotFoundError if the file is at neither
    name.
    """
    assert not name.startswith(f"{QUARANTINE}/"), f"{name} is set aside"
    assert not name.endswith(_NOTE), f"{name} would be taken for a note"
    target = f"{QUARANTINE}/{name}"
    try:
        # First check that the file exists: a note alone would describe a file that never existed.
        if root.exists(name):
            note = QuarantinedFile(name=name, reason=reason, found_at=datetime.now(UTC).isoformat())
            root.put(f"{target}{_NOTE}", encode_record(note))
        _move(root, name, target)
    except FileNotFoundError:  # moved before, or by another process at the same time
        if not root.exists(target):
            raise
    return target


def _move(root: Root, name: str, target: str) -> None:
    with root.explained(name):
        if root.is_local:
            Path(root.at(name)).replace(root.at(target))
            return
        root.fs.cp_file(root.at(name), root.at(target))
    root.delete(name)


def list_quarantined(root: Root) -> list[QuarantinedFile]:
    """Return the files that were set aside, sorted by name."""
    names = [name.removeprefix(f"{QUARANTINE}/") for name in root.list(QUARANTINE)]
    return [_read_note(root, name) for name in names if not name.endswith(_NOTE)]


def _read_note(root: Root, name: str) -> QuarantinedFile:
    note = None
    with suppress(SchemaError):
        note = read_record(root, f"{QUARANTINE}/{name}{_NOTE}", QuarantinedFile, "note")
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
    folder = Path(root.at(SCRATCH))
    if not root.is_local or not folder.exists():
        return
    with root.explained(SCRATCH):
        for path in sorted(folder.iterdir()):
            with suppress(FileNotFoundError):  # its writer has just ended
                written_at = max(file.stat().st_mtime for file in (path, *path.rglob("*")))
                yield Leftover(name=f"{SCRATCH}/{path.name}", age_s=time.time() - written_at)
