"""Check small files. In code/, each copy of a user's file matches its name, and each list can be read. Everywhere, each
JSON file that ludic writes matches its digest. Runs no code."""

import re
from collections.abc import Collection, Iterator
from contextlib import suppress

from ludic.errors import SchemaError, StoreError
from ludic.maintenance.verify.findings import Finding, reason_of
from ludic.maintenance.verify.tables import FOREIGN_NAME
from ludic.store import Root
from ludic.store.code_files import check_list, parse_name
from ludic.store.json_files import decode_json
from ludic.user_files import digest

_OTHERS = re.compile(
    r"/_delta_log/|^(?:iceberg|logs|tensorboard|\.tmp|model|checkpoints)/|^policies/version=|^quarantine/.*(?<!\.parquet\.json)$"
    r"|^(?!run\.json$|cut\.json$)[^/]+$"
)
"""Matches files of other programs, broken ones, and those that the digests of their folder cover."""


def check_code(root: Root) -> Iterator[Finding]:
    """Check all files of code/. Raises StoreError if the filesystem fails."""
    for name in root.list("code"):
        with suppress(FileNotFoundError):
            yield from _check_file(root, name)


def check_json(root: Root, named: Collection[str]) -> Iterator[Finding]:
    """Check that each JSON file matches its digest. named: files that another check found broken.

    Files of other programs are left out, and those below policies/, checkpoints/ and model/, whose own digests cover
    them. Raises StoreError if the filesystem fails.
    """
    for name in root.list(""):
        is_json = name.endswith((".json", ".lease")) or name == "policies/LATEST"
        if not is_json or name in named or _OTHERS.search(name):
            continue
        try:
            decode_json(root.read(name))
        except FileNotFoundError:
            continue
        except ValueError as error:
            yield Finding(check="note", where=name, problem=reason_of(error))


def _check_file(root: Root, name: str) -> Iterator[Finding]:
    parsed = parse_name(name)
    if parsed is None:
        yield Finding(check="misnamed", where=name, problem=FOREIGN_NAME)
    elif isinstance(parsed, int):
        try:
            check_list(root, parsed)
        except (SchemaError, StoreError) as error:
            yield Finding(check="code", where=name, problem=reason_of(error))
    elif digest(root.read(name)) != parsed:
        problem = "is not the text that its name says; --update-code puts the file as it is now"
        yield Finding(check="code", where=name, problem=problem)
