"""Check code/: each copy of a user's file matches its name, and each list can be read. Runs no code."""

from collections.abc import Iterator
from contextlib import suppress

from ludic.errors import SchemaError, StoreError
from ludic.maintenance.verify.findings import Finding, reason_of
from ludic.store import Root
from ludic.store.catalogue import CODE
from ludic.store.code_files import check_list, parse_name
from ludic.user_files import digest


def check_code(root: Root) -> Iterator[Finding]:
    """Check all files of code/. Raises StoreError if the filesystem fails."""
    for name in root.list(CODE.folder):
        with suppress(FileNotFoundError):
            yield from _check_file(root, name)


def _check_file(root: Root, name: str) -> Iterator[Finding]:
    parsed = parse_name(name)
    if parsed is None:
        return  # check_records names it
    if isinstance(parsed, int):
        try:
            check_list(root, parsed)
        except (SchemaError, StoreError) as error:
            yield Finding(check="code", where=name, problem=reason_of(error))
    elif digest(root.read(name)) != parsed:
        problem = "is not the text that its name says; --update-code puts the file as it is now"
        yield Finding(check="code", where=name, problem=problem)
