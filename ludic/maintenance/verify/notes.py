"""Check small files beside the tables: each is unchanged since it was written.

Raises StoreError if the filesystem fails; files that vanish while they are checked are ignored.
"""

from collections.abc import Iterator
from contextlib import suppress

from ludic.maintenance.verify.findings import Finding, reason_of
from ludic.store import Root
from ludic.store.json_files import decode_json
from ludic.store.quarantine import QUARANTINE
from ludic.store.retention import FOLDER as EXPIRED

_FOLDERS = (EXPIRED, "imports", QUARANTINE)


def check_notes(root: Root) -> Iterator[Finding]:
    """Tombstones, imports, and reasons for which files were set aside."""
    for name in (name for folder in _FOLDERS for name in root.list(folder) if name.endswith(".json")):
        with suppress(FileNotFoundError):
            data = root.read(name)
            try:
                decode_json(data)
            except ValueError as error:
                yield Finding(check="note", where=name, problem=f"can't be read: {reason_of(error)}")
