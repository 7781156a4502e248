"""Check small files beside the tables: each is unchanged since it was written.

Raises StoreError if the filesystem fails; files that vanish while they are checked are ignored.
"""

from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256

from ludic.errors import SchemaError
from ludic.fsck.findings import Finding, reason_of
from ludic.store import Root
from ludic.store.json_files import decode_json
from ludic.store.model import IDENTITY, damaged_files
from ludic.store.repair import SET_ASIDE
from ludic.store.retention import FOLDER as EXPIRED

_CODE = "code"
_FOLDERS = (EXPIRED, "imports", SET_ASIDE, _CODE)


def check_notes(root: Root) -> Iterator[Finding]:
    """Check tombstones, imports, notes of files that were set aside, users' code and the run's model."""
    yield from _check_json(root)
    yield from _check_code(root)
    try:
        for name in damaged_files(root):
            yield Finding(check="note", where=name, problem=f"is not the file that {IDENTITY} says")
    except SchemaError as error:
        yield Finding(check="note", where=IDENTITY, problem=f"can't be read: {reason_of(error)}")


def _check_json(root: Root) -> Iterator[Finding]:
    for name in (name for folder in _FOLDERS for name in root.list(folder) if name.endswith(".json")):
        with suppress(FileNotFoundError):
            data = root.read(name)
            try:
                decode_json(data)
            except ValueError as error:
                yield Finding(check="note", where=name, problem=f"can't be read: {reason_of(error)}")


def _check_code(root: Root) -> Iterator[Finding]:
    """Compare each text in code/ with the SHA-256 in its name."""
    for name in (name for name in root.list(_CODE) if not name.endswith(".json")):
        with suppress(FileNotFoundError):
            if sha256(root.read(name)).hexdigest() != name.rpartition("/")[2].partition(".")[0]:
                yield Finding(check="note", where=name, problem="is not the text that its name says")
