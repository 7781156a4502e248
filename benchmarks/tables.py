"""Tables that many processes append rollouts to: a run of ludic, Delta Lake, Iceberg and Lance.

In a separate module, so that a fork server imports it once for all writers.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import lance
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from sqlalchemy.exc import OperationalError

from ludic.records import RolloutBatch, to_table
from ludic.root import Root
from ludic.root.rows import RolloutWriter
from ludic.run import RunConfig, put_run

# The fork server has imported lance, and never called it.
warnings.filterwarnings("ignore", "lance is not fork-safe")

Append = Callable[[RolloutBatch], object]


@dataclass(frozen=True, slots=True)
class TableKind:
    """A kind of table that many writers can append to."""

    create: Callable[[str, pa.Schema], object]
    """Creates an empty table in a folder."""
    open: Callable[[str, str], Append]
    """Opens the table in a folder for a writer with a name; its Append returns when the group is committed."""
    refusals: tuple[type[Exception], ...]
    """Exceptions after which a writer should try again."""
    read: Callable[[str], pa.ChunkedArray]
    """Reads the column group_id of all rows."""


def _create_ludic(folder: str, schema: pa.Schema) -> None:
    put_run(f"{folder}/run", RunConfig(model="none", env=("moar_cats",)))


def _open_ludic(folder: str, worker_id: str) -> Append:
    writer = RolloutWriter(Root.open(f"{folder}/run", writable=True), worker_id, flush_groups=1)

    def append(batch: RolloutBatch) -> None:
        writer.append(batch)
        writer.flush()

    return append


def _read_ludic(folder: str) -> pa.ChunkedArray:
    """Read with pyarrow, as plain Parquet."""
    return ds.dataset(f"{folder}/run/rollouts").to_table(columns=["group_id"])["group_id"]


def _create_delta(folder: str, schema: pa.Schema) -> None:
    DeltaTable.create(f"{folder}/delta", schema)


def _open_delta(folder: str, worker_id: str) -> Append:
    table = DeltaTable(f"{folder}/delta")
    return lambda batch: write_deltalake(table, _table(batch), mode="append")


def _read_delta(folder: str) -> pa.ChunkedArray:
    files = DeltaTable(f"{folder}/delta").file_uris()
    return ds.dataset(files).to_table(columns=["group_id"])["group_id"]


def _catalog(folder: str) -> SqlCatalog:
    return SqlCatalog("benchmark", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/iceberg")


def _create_iceberg(folder: str, schema: pa.Schema) -> None:
    catalog = _catalog(folder)
    catalog.create_namespace("run")
    catalog.create_table("run.rollouts", schema)


def _open_iceberg(folder: str, worker_id: str) -> Append:
    catalog = _catalog(folder)

    def append(batch: RolloutBatch) -> None:
        catalog.load_table("run.rollouts").append(_table(batch))

    return append


def _read_iceberg(folder: str) -> pa.ChunkedArray:
    return _catalog(folder).load_table("run.rollouts").scan(selected_fields=("group_id",)).to_arrow()["group_id"]


def _create_lance(folder: str, schema: pa.Schema) -> None:
    lance.write_dataset(schema.empty_table(), f"{folder}/lance")


def _open_lance(folder: str, worker_id: str) -> Append:
    return lambda batch: lance.write_dataset(_table(batch), f"{folder}/lance", mode="append")


def _read_lance(folder: str) -> pa.ChunkedArray:
    return lance.dataset(f"{folder}/lance").to_table(columns=["group_id"])["group_id"]


def _table(batch: RolloutBatch) -> pa.Table:
    return to_table(batch, run_id="none", sequence=0)


TABLES = {
    "ludic": TableKind(_create_ludic, _open_ludic, (), _read_ludic),
    "Delta Lake": TableKind(_create_delta, _open_delta, (CommitFailedError,), _read_delta),
    "Iceberg on SQLite": TableKind(
        _create_iceberg, _open_iceberg, (CommitFailedException, OperationalError), _read_iceberg
    ),
    "Lance": TableKind(_create_lance, _open_lance, (OSError,), _read_lance),
}
