"""Put and read the small files of a table: all but rollouts, which have a writer and a reader of their own."""

from typing import TYPE_CHECKING, NamedTuple, TypeVar

import pyarrow as pa

from ludic.schema import check_schema, conform
from ludic.store.catalogue import Table
from ludic.store.parquet import decode, encode_plain

if TYPE_CHECKING:
    from ludic.store.filesystem import Storage

F = TypeVar("F", bound="NamedTuple")


def put_table(root: "Storage", row: Table[F], of: F, rows: pa.Table) -> bool:
    """Put a file unless it is there; returns False if another one has its name. rows: of the table's own schema.

    Raises SchemaError for rows of another table, StoreError if the filesystem fails.
    """
    return root.put_if_absent(row.name(of), encode_plain(conform(rows, row.table)))


def read_table(root: "Storage", row: Table[F], of: F) -> pa.Table:
    """Return all rows of a file in the table's own schema; columns that an older file lacks are null.

    Raises FileNotFoundError if there is no such file, SchemaError if it is broken or newer, StoreError if the
    filesystem fails.
    """
    where = f"{root.url}/{row.name(of)}"
    table = decode(root.read(row.name(of)), where)
    check_schema(table.schema, row.table, where)
    return conform(table, row.table)
