"""Find a rollout or a group by its id, with its uses in training and the code that scored it.

Reads the rollout's file (ludic.root.rows.files) and the ledger; for part of an id also all ids of the run. Raises
UnknownIdError if the id matches nothing or several ids.
"""

import logging
import re
from dataclasses import replace
from typing import Any

import duckdb

from ludic.app.show.transcript import Lookup, LookupKind, PrintOptions
from ludic.errors import LudicError, QueryError
from ludic.records import Rollout, from_table, resolve_row
from ludic.root import Root
from ludic.root.maintenance import TABLES, read_footers
from ludic.root.rows import Address, find_rows, read_addresses
from ludic.root.sql import ask, connect, figure

logger = logging.getLogger(__name__)

_MOST_CANDIDATES = 4
_WHOLE_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class UnknownIdError(LudicError, LookupError):
    """An id matches no rollout or group, or several."""


def look_up(
    root: Root,
    part: str,
    *kinds: LookupKind,
    con: duckdb.DuckDBPyConnection | None = None,
    options: PrintOptions | None = None,
    version: int | None = None,
) -> Lookup:
    """Find the rollout or group that `part` of an id matches; kinds: search only these. con: a connection to the root.

    options: how it is printed; with them, a rollout has its labels. version: partition that a whole id is probably in;
    its files are listed first.

    Leaves out broken files, with a warning. Raises UnknownIdError, StoreError.
    """
    kinds = kinds or ("rollout", "group")
    if len(part) > 1 and part[0] == part[-1] in "\"'":  # as `ludic sql --format csv` prints an id
        part = part[1:-1]
    addresses = find_rows(root, part, version) if _WHOLE_ID.fullmatch(part) else []
    if not addresses and version is not None:
        addresses = find_rows(root, part)
    con = con or connect(root)
    try:
        found = _look_up(con, root, part, addresses, kinds)
    except QueryError as error:
        if isinstance(error.__cause__, duckdb.InterruptException):
            raise
        broken = [footer.name for folder in TABLES for footer in read_footers(root, folder) if footer.problem]
        if not broken:
            raise
        logger.warning("left out files that can't be read: %s", ", ".join(broken))
        found = _look_up(connect(root, without=broken), root, part, addresses, kinds)
    if found.kind not in kinds:
        raise UnknownIdError(
            f"{part!r} is a {found.kind}, wanted a {kinds[0]}; `ludic view {root.url} {part} --text` shows it"
        )
    return found if options is None else replace(found, options=options, labels=_labels_of(con, found))


def _look_up(
    con: duckdb.DuckDBPyConnection, root: Root, part: str, addresses: list[Address], kinds: tuple[LookupKind, ...]
) -> Lookup:
    id_ = part
    if not addresses:
        match = _find(con, root, part, kinds)
        id_, addresses = match["id"], find_rows(root, match["id"], match["version"])
    if not addresses:  # deleted since the view of rollouts was created
        raise _unknown(root, part)
    rows, records = _read(root, addresses)
    kind: LookupKind = "rollout" if rows[0]["rollout_id"] == id_ else "group"
    group = _group_of(root, rows[0], addresses[0].file.version) if kind == "rollout" else rows
    uses = ask(con, root, figure("uses"), {"ids": [row["rollout_id"] for row in group]})
    found = Lookup(root=root, kind=kind, rows=rows, records=records, group=group, group_uses=uses, code=[])
    return replace(found, code=_code_of(con, root, rows[0], found.uses))


def _labels_of(con: duckdb.DuckDBPyConnection, found: Lookup) -> list[dict[str, Any]]:
    if found.kind == "group":
        return []
    try:
        return ask(con, found.root, figure("labels_of_rollout"), {"id": found.record.rollout_id})
    except QueryError as error:
        logger.warning("left out the labels: %s", error)
        return []


def _group_of(root: Root, row: dict[str, Any], version: int) -> list[dict[str, Any]]:
    """Return the rows of the same group, which are in the same file."""
    addresses = find_rows(root, row["group_id"], version)
    return _read(root, addresses)[0] if addresses else [row]


def _code_of(
    con: duckdb.DuckDBPyConnection, root: Root, row: dict[str, Any], uses: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    attempts = sorted({use["attempt_id"] for use in uses})
    try:
        return ask(
            con,
            root,
            figure("code_of_rollout"),
            {"worker_id": row["worker_id"], "env_name": row["env_name"], "attempts": attempts},
        )
    except QueryError as error:
        logger.warning("left out the code that scored: %s", error)
        return []


def _read(root: Root, addresses: list[Address]) -> tuple[list[dict[str, Any]], tuple[Rollout, ...]]:
    """Read rows with the columns of the view `rollouts`, and their file, row group and row; and the rows as records."""
    table = read_addresses(root, addresses)
    rows = [
        {
            **resolve_row(row),
            "version": address.file.version,
            "env": address.file.env_name,
            "file": address.file.name,
            "row_group": address.row_group,
            "row": address.row,
        }
        for address, row in zip(addresses, table.to_pylist(maps_as_pydicts="lossy"), strict=True)
    ]
    records = [rollout for batch in from_table(table) for group in batch.groups for rollout in group.rollouts]
    return (
        sorted(rows, key=lambda row: (row["group_index"], row["depth"])),
        tuple(sorted(records, key=lambda rollout: (rollout.group_index, rollout.depth))),
    )


def _find(con: duckdb.DuckDBPyConnection, root: Root, part: str, kinds: tuple[LookupKind, ...]) -> dict[str, Any]:
    """Find the one id that equals, begins with or ends with `part`; returns its id, kind and version."""
    found = ask(con, root, figure("ids"), {"id": part, "kinds": list(kinds)}) if part else []
    if not found:
        raise _unknown(root, part)
    if len(found) > 1 and not found[0]["exact"]:
        some = ", ".join(f"{row['kind']} {row['id']}" for row in found[:_MOST_CANDIDATES])
        more = f" and {len(found) - _MOST_CANDIDATES:,} more" if len(found) > _MOST_CANDIDATES else ""
        raise UnknownIdError(f"{part!r} matches {some}{more}; give more characters (ids differ most at their end)")
    return found[0]


def _unknown(root: Root, part: str) -> UnknownIdError:
    query = "select rollout_id, group_id from rollouts"
    return UnknownIdError(f'{root.url} has no rollout or group {part!r}; `ludic sql {root.url} "{query}"` lists them')
