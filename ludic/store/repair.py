"""Set a broken file aside, out of every reader's sight and with the reason beside it; delete what killed writers left.

Moves {root}/NAME to {root}/set_aside/NAME and writes {root}/set_aside/NAME.json. The note comes first, and a
move that was cut short is finished by setting the same file aside again. Nothing but `ludic verify` and
`ludic stats` looks into set_aside/. Raises StoreError when the filesystem fails.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from ludic.store.filesystem import SCRATCH
from ludic.store.json_files import decode_record, encode_json
from ludic.store.root import Root

SET_ASIDE = "set_aside"
_NOTE = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """A file that was set aside."""

    name: str
    """Where it was, below the root."""
    reason: str
    """Why; empty where the note is gone."""
    found_at: str
    """ISO 8601, UTC."""


def set_aside(root: Root, name: str, reason: str) -> str:
    """Move a file below set_aside/, and return where it is now; a file that is there already stays as it is.

    Readers then see a gap in its worker's sequence and go on, and the next worker in that slot makes
    the requests of the file again. Raises FileNotFoundError for a file that is in neither place.
    """
    assert not name.startswith(f"{SET_ASIDE}/"), f"{name} is set aside"
    assert not name.endswith(_NOTE), f"{name} would be taken for a note"
    target = f"{SET_ASIDE}/{name}"
    try:
        # Not before the file is known to be there: a note alone would tell of a file that never was.
        if root.exists(name):
            note = SetAside(name=name, reason=reason, found_at=datetime.now(UTC).isoformat())
            root.put(f"{target}{_NOTE}", encode_json(asdict(note)))
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


def list_set_aside(root: Root) -> list[SetAside]:
    """The files that were set aside, by name."""
    names = [name.removeprefix(f"{SET_ASIDE}/") for name in root.list(SET_ASIDE)]
    return [_read_note(root, name) for name in names if not name.endswith(_NOTE)]


def _read_note(root: Root, name: str) -> SetAside:
    try:
        return decode_record(root.read(f"{SET_ASIDE}/{name}{_NOTE}"), SetAside)
    except (FileNotFoundError, ValueError, TypeError):
        return SetAside(name=name, reason="", found_at="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A temporary file, or a folder of them, of a writer that was killed, or that still writes."""

    name: str
    """Below the root."""
    age_s: float
    """Since something in it was last written, by the clocks of this machine and of the disk's."""


def list_leftovers(root: Root) -> Iterator[Leftover]:
    """What lies in the temporary folder of a local root.

    Object stores show none: unfinished uploads end by a lifecycle rule of the bucket.
    """
    folder = Path(root.at(SCRATCH))
    if not root.is_local or not folder.exists():
        return
    with root.explained(SCRATCH):
        for path in sorted(folder.iterdir()):
            with suppress(FileNotFoundError):  # its writer has just ended
                written_at = max(file.stat().st_mtime for file in (path, *path.rglob("*")))
                yield Leftover(name=f"{SCRATCH}/{path.name}", age_s=time.time() - written_at)
