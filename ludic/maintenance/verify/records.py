"""Check that each record can be read, is as it was written, and stands in its own file; and find foreign names.

ludic.store.catalogue says which files hold records, and of which type. Files that vanish while they are checked are
ignored. Raises StoreError if the filesystem fails.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from typing import Any

from ludic.code.files import digest
from ludic.code.kept import check_list, parse_name
from ludic.errors import SchemaError, StoreError
from ludic.maintenance.verify.findings import Finding, reason_of
from ludic.maintenance.verify.tables import FOREIGN_NAME, TABLES
from ludic.store import Root
from ludic.store.catalogue import (
    ATTEMPTS,
    CHECKPOINTS,
    CODE,
    COMPACTIONS,
    DELTAS,
    IDENTITY,
    LATEST,
    LEASES,
    POLICIES,
    ROWS,
    RUN,
    WORKERS,
    Records,
    row_of,
)

_WITH_THEIR_FILES = (RUN, LATEST, DELTAS, CHECKPOINTS, IDENTITY, CODE, COMPACTIONS)
"""Records that other checks read, since they say which other files there must be."""
_CHECKS = {ATTEMPTS.kind: "attempt", LEASES.kind: "attempt", WORKERS.kind: "worker", POLICIES.kind: "policy"}
"""Name of the check, by kind; of the others it is note."""
_FOLDERS = {row.folder for row in ROWS if row.folder} - TABLES.keys()
"""Folders whose names are checked here; check_tables finds foreign names among tables."""


def check_records(root: Root) -> Iterator[Finding]:
    """Check all files but tables and weights, by one listing."""
    for name in root.list(""):
        row = row_of(name)
        if row is None:
            if name.partition("/")[0] in _FOLDERS or ("\\" in name and name.partition("/")[0] not in TABLES):
                yield Finding(check="misnamed", where=name, problem=FOREIGN_NAME)
        elif isinstance(row, Records) and row not in _WITH_THEIR_FILES:
            yield from _check_record(root, row, name)


def check_code(root: Root) -> Iterator[Finding]:
    """Check code/: each copy of a user's file matches its name, and each list can be read. Runs no code."""
    for name in root.list(CODE.folder):
        with suppress(FileNotFoundError):
            yield from _check_code_file(root, name)


def _check_code_file(root: Root, name: str) -> Iterator[Finding]:
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


def _check_record(root: Root, row: Records[Any, Any], name: str) -> Iterator[Finding]:
    of = row.parse(name)
    assert of is not None, f"{name} is none of {row.kind}"
    try:
        record = row.read(root, *of)
    except SchemaError as error:
        yield Finding(check=_CHECKS.get(row.kind, "note"), where=name, problem=reason_of(error))
        return
    if record is None:
        return
    own = row.home(of, {each.name: getattr(record, each.name) for each in fields(record)})
    if own != name:
        yield Finding(check="misnamed", where=name, problem=f"holds the record of {own}")
