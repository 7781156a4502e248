"""What a root holds, and what other programs see of it, as rows that `==` compares."""

from typing import Any

import pyarrow as pa

from ludic.records.tables import arrow_schema
from ludic.root.root import Root
from ludic.root.rows.files import list_files, read_sources
from ludic.root.rows.parquet import read_columns


def stored_rows(root: Root) -> list[dict[str, Any]]:
    """Every row once, by Parquet alone."""
    files = list_files(root)
    replaced = {source for file in files if file.is_compacted for source in read_sources(root, file)}
    kept = [file for file in files if file.is_compacted or file.source not in replaced]
    names = arrow_schema("rollouts").names
    return by_id(pa.concat_tables([read_columns(root, file.name, names) for file in kept]))


def by_id(table: pa.Table) -> list[dict[str, Any]]:
    """The rows' columns of the schema, in an order that follows from their ids."""
    rows = table.select(arrow_schema("rollouts").names).to_pylist(maps_as_pydicts="lossy")
    return sorted(rows, key=lambda row: row["rollout_id"])
