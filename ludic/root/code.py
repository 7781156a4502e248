"""Store the users' files that a run uses in code/, and lists of their names; run none of them.

Each text is stored once, and a list maps file names to texts.

    code/{sha256}.py, .sql    a text, named by the digest of its bytes
    code/N.json               list N: file names as in the settings, each with its digest and path

Each list holds all files of the list before it. ludic.run.code_snapshots decides which text runs, and who must consent.
Raises SchemaError if a text or a list is damaged, StoreError if a text is gone.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ludic.errors import SchemaError, StoreError
from ludic.root.catalogue import CODE, TEXTS, NumberName, TextName
from ludic.root.claims import owner_name
from ludic.root.json_records import CodeList, CodeRecord, FileEntry, TextEntry, convert, encode_record
from ludic.root.root import Root
from ludic.settings import Files, UserFile, digest

logger = logging.getLogger(__name__)

SHOWN_DIGITS = 12
"""Digits of a digest that messages show."""


# --- Lists and texts -------------------------------------------------------------------------------------------


def keep_files(root: Root, files: Files) -> None:
    """Copy texts into the root, and put a new list if they differ from the newest list. Raises StoreError."""
    while True:
        number, entries = newest_list(root)
        wanted = {**entries, **{name: _entry(file) for name, file in files.items()}}
        if wanted == entries:
            return
        for file in files.values():
            for each in (file, *file.imports.values()):
                _put_text(root, each)
        made = CodeList(files=wanted, owner=owner_name(), created_at=datetime.now(UTC).isoformat())
        if root.put_if_absent(CODE.name(NumberName(number + 1)), encode_record(made)):
            return


def copy_code(source: Root, root: Root) -> None:
    """Copy the users' files of the run `source` into a new root; this does not give consent to them."""
    entries = newest_list(source)[1]
    keep_files(root, {name: read_copy(source, name, entry) for name, entry in entries.items()})


def newest_list(root: Root) -> tuple[int, dict[str, FileEntry]]:
    """Return number and files of the newest list, or 0 and {}. Raises SchemaError as `_read_list`."""
    number = 0
    while root.exists(CODE.name(NumberName(number + 1))):  # by name, since a listing may lag
        number += 1
    return number, _read_list(root, number) if number else {}


def _read_list(root: Root, number: int) -> dict[str, FileEntry]:
    """Read a list. Raises SchemaError for values that `keep_files` does not write."""
    found = CODE.read(root, number)
    return dict(found.files) if found else {}


def read_copy(root: Root, name: str, entry: FileEntry) -> UserFile:
    """Return the root's copy of a file, with the modules that it imports. name: in the settings."""
    imports = {module: _read_text(root, each, ".py") for module, each in entry.imports.items()}
    suffix = ".sql" if name.endswith(".sql") else ".py"
    text = _read_text(root, entry, suffix)
    return UserFile(path=text.path, source=text.source, imports=imports)


def _read_text(root: Root, entry: TextEntry, suffix: str) -> UserFile:
    name = text_name(entry.sha256, suffix)
    try:
        file = UserFile(path=Path(entry.path), source=root.read(name))
    except FileNotFoundError:
        raise StoreError(
            f"{root.url}/{name}, the text of {entry.path!r}, is missing; --update-code puts it back"
        ) from None
    if file.sha256 != entry.sha256:
        raise SchemaError(f"{root.url}/{name} is damaged: its sha256 is {file.sha256}, wanted the one in its name")
    return file


def _put_text(root: Root, file: UserFile) -> None:
    name = text_name(file.sha256, file.suffix)
    if not root.put_if_absent(name, file.source):
        raise StoreError(f"{root.url}/{name} holds another text than its name says; delete that file")


def _entry(file: UserFile) -> FileEntry:
    imports = {name: TextEntry(sha256=each.sha256, path=str(each.path)) for name, each in sorted(file.imports.items())}
    return FileEntry(sha256=file.sha256, path=str(file.path), imports=imports)


def parse_name(name: str) -> str | int | None:
    """Return the digest in a text's name, or a list's number; None if `keep_files` does not write such a name."""
    text, of_list = TEXTS.parse(name), CODE.parse(name)
    return text.sha256 if text else of_list.number if of_list else None


def check_list(root: Root, number: int) -> None:
    """Check a list and its texts.

    Raises SchemaError if the list can't be read or a text is damaged, StoreError if a text is lost.
    """
    for file, entry in _read_list(root, number).items():
        read_copy(root, file, entry)


def read_snapshot_text(root: Root, sha256: str | None, path: str | None) -> str | None:
    """Return the text of a user's file that a record names, for people; None if it is missing or damaged."""
    name = text_name(sha256 or "", Path(path or "").suffix)
    if TEXTS.parse(name) is None:
        return None
    try:
        source = root.read(name)
    except FileNotFoundError:
        return None
    return source.decode(errors="replace") if digest(source) == sha256 else None


def text_name(sha256: str, suffix: str) -> str:
    """Return the path of a text below the root."""
    return TEXTS.name(TextName(sha256, suffix.removeprefix(".")))


# --- Records of code -------------------------------------------------------------------------------------------


def to_dicts(records: Iterable[CodeRecord]) -> list[dict[str, Any]]:
    """Return records as dictionaries for JSON."""
    return [asdict(record) for record in records]


def from_dicts(values: Sequence[Any]) -> list[CodeRecord]:
    """Parse the records that `to_dicts` wrote. Skips other values: a root may hold anything."""
    records = []
    for value in values:
        with suppress(ValueError):
            records.append(convert(value, CodeRecord))
    return records


def warn_of_other_code(before: Sequence[Mapping[str, Any]], now: Iterable[CodeRecord], *, where: str) -> None:
    """Log one warning for each name whose code differs from the previous life's.

    where: names the previous life, such as attempt 3.
    """
    earlier = {(record.role, record.name): record for record in from_dicts(before)}
    for record in now:
        then = earlier.get((record.role, record.name))
        if then is not None and then.digests != record.digests:
            logger.warning("%s", _describe_change(then, record, where))


def _describe_change(earlier: CodeRecord, record: CodeRecord, where: str) -> str:
    then, now = earlier.digests, record.digests
    name = next(module for module in {**now, **then} if then.get(module) != now.get(module))
    what = f"{record.role} {record.name!r}" + (f", module {name}," if name else "")
    shown = ", ".join(
        f"{str(digests.get(name))[:SHOWN_DIGITS]} {when}" for digests, when in ((then, "then"), (now, "now"))
    )
    packages = f" ({earlier.package} then, {record.package} now)" if record.package else ""
    return f"{what} is not what {where} ran: sha256 {shown}{packages}"
