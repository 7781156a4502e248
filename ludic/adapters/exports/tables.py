"""Register a root's rollout files as a table of Delta Lake or Apache Iceberg, in place; nothing is copied.

One export is one commit: it adds new files, and removes files that compaction or expiry deleted. A broken file is left
out with its reason, as in readers. Needs the extra `export`. Raises StoreError for errors of a table's writer,
ConfigError for a root whose files the table can't address.

Delta: writes {root}/rollouts/_delta_log/, which ludic's own listings ignore. Partition columns are version and env, as
in the folders' names.

Iceberg: writes a catalog (SQLite) with the table's metadata into a local folder: {root}/iceberg, or a folder that the
user chooses. The table is not partitioned, since a file's partition is not in its rows: readers skip files by the
bounds of policy_version and env_name instead.
"""

import json
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote

import pyarrow as pa

from ludic.adapters.exports.targets import given_folder
from ludic.base import Part, Result, Track, plural, untracked
from ludic.errors import ConfigError, LudicError, SchemaError, StoreError, one_line
from ludic.records import rollouts_schema
from ludic.root import DELTA_LOGS, ICEBERG, Root
from ludic.root.rows import Folder, RolloutFile, current_files, open_parquet
from ludic.settings import SettingsError

if TYPE_CHECKING:
    from deltalake import DeltaTable, Schema
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.table import Table

_CONCURRENT_READS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """A sound file, with its size and number of rows."""

    file: RolloutFile
    size_bytes: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TableReport(Result):
    """Changes that an export made to a table."""

    format: str
    """delta or iceberg."""
    location: str
    version: int
    """Version of a Delta table, or number of snapshots of an Iceberg table."""
    num_added: int
    num_removed: int
    num_files: int
    """Number of files in the table after the export."""
    left_out: Mapping[str, str]
    """Reason by name of each broken file."""

    def parts(self) -> Iterator[Part]:
        """A sentence."""
        changes = f"{plural(self.num_added, 'file')} added, {self.num_removed:,} removed"
        yield f"{self.location}: {self.format} table of {plural(self.num_files, 'file')}; {changes}"

    @property
    def remarks(self) -> Sequence[str]:
        """Files that were left out, and why."""
        return [f"{name} was left out: {reason}" for name, reason in self.left_out.items()]


def read_footers(
    root: Root, files: Collection[RolloutFile], sizes: Mapping[str, int], track: Track = untracked
) -> tuple[list[ExportedFile], dict[str, str]]:
    """Return the footers of the sound files, and the reason by name of each broken file.

    A file that vanished is in neither. sizes: bytes by name.
    """

    def read(file: RolloutFile) -> ExportedFile | str | None:
        try:
            with open_parquet(root, file.name) as parquet:
                return ExportedFile(file=file, size_bytes=sizes[file.name], num_rows=parquet.metadata.num_rows)
        except (FileNotFoundError, KeyError):
            return None
        except SchemaError as error:
            return str(error)

    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        found = list(track(pool.map(read, files), len(files), "footers"))
    left_out = {file.name: answer for file, answer in zip(files, found, strict=True) if isinstance(answer, str)}
    return [answer for answer in found if isinstance(answer, ExportedFile)], left_out


# --- Delta Lake ------------------------------------------------------------------------------------------


_PARTITION = pa.schema([("version", pa.int64()), ("env", pa.string())])
_PROTOCOLS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
# VACUUM deletes files that the table does not name, including rollouts that are not exported yet.
_CONFIGURATION = {"delta.deletedFileRetentionDuration": "interval 36500 days"}


def delta(root: Root, target: str | BinaryIO | None, *, table: Folder, track: Track) -> TableReport:
    """The exporter of a Delta table, which lies in the root."""
    if target is not None:
        raise SettingsError("out does not apply to format delta; leave it out")
    return export_delta(root, table, track)


def export_delta(root: Root, folder: Folder = "rollouts", track: Track = untracked) -> TableReport:
    """Update the Delta table at {root}/{folder} to the files that exist now; does nothing if they are the same."""
    location = _delta_location(root, folder)
    files = {file.name: file for file in current_files(root, folder)}
    with _delta_explained(location):
        table = _delta_open(root, folder, location)
        # Delta percent-encodes the paths, which are encoded already.
        paths = pa.table(table.get_add_actions()).column("path").to_pylist() if table else []
        known = {f"{folder}/{unquote(path)}" for path in paths}
        new = [file for name, file in files.items() if name not in known]
        footers, left_out = read_footers(root, new, root.sizes(folder), track)
        gone = sorted(known - files.keys())
        if table is None:
            table = _delta_create(location, root, footers)
        else:
            _delta_update(table, root, footers, [name.removeprefix(f"{folder}/") for name in gone])
        return TableReport(
            format="delta",
            location=location,
            version=table.version(),
            num_added=len(footers),
            num_removed=len(gone),
            num_files=len(known) - len(gone) + len(footers),
            left_out=left_out,
        )


def storage_options() -> dict[str, str]:
    """Return the options that Delta needs in addition to the environment: permission to use an http:// endpoint."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    return {"AWS_ALLOW_HTTP": "true"} if endpoint.startswith("http://") else {}


def _delta_location(root: Root, folder: Folder) -> str:
    if root.is_local:
        root.folder_for_others(DELTA_LOGS[folder].below())
        return root.at(folder)
    protocol = root.url.partition("://")[0]
    if protocol not in _PROTOCOLS:
        raise ConfigError(f"{root.url}: Delta Lake reads local folders, s3://, gs:// and az://, not {protocol}://")
    return f"{root.url}/{folder}"


def _delta_open(root: Root, folder: Folder, location: str) -> "DeltaTable | None":
    """Open the table; None before the first export. Uses ludic's listing, since deltalake's waits holding the GIL."""
    from deltalake import DeltaTable

    if not any(name.endswith(".json") for name in root.list(DELTA_LOGS[folder].below())):
        return None
    table = DeltaTable(location, storage_options=storage_options())
    if table.metadata().partition_columns != _PARTITION.names:
        raise ConfigError(
            f"{location} is a Delta table partitioned by {table.metadata().partition_columns}, wanted "
            f"{_PARTITION.names}; `ludic export` did not make it: delete its _delta_log, and it will"
        )
    return table


def _delta_create(location: str, root: Root, footers: Sequence[ExportedFile]) -> "DeltaTable":
    from deltalake import DeltaTable, Schema
    from deltalake.transaction import create_table_with_add_actions

    create_table_with_add_actions(
        location,
        Schema.from_arrow(_delta_schema(root)),
        [_add_action(footer) for footer in footers],
        partition_by=_PARTITION.names,
        name="rollouts",
        description=f"Rollouts of the ludic run {root.run_id}. Read only: never VACUUM or OPTIMIZE it.",
        configuration=_CONFIGURATION,
        storage_options=storage_options(),
    )
    return DeltaTable(location, storage_options=storage_options())


def _delta_update(table: "DeltaTable", root: Root, footers: Sequence[ExportedFile], gone: Sequence[str]) -> None:
    """Add and remove files in one commit; columns that a newer schema added get an earlier commit."""
    from deltalake import Schema
    from deltalake.transaction import RemoveAction

    if not footers and not gone:
        return
    schema = Schema.from_arrow(_delta_schema(root))
    if not _field_names(schema) <= _field_names(table.schema()):
        table.alter.add_columns(schema.fields)
    removals = [RemoveAction(path, True, _now_ms()) for path in gone]
    table.create_write_transaction(
        [*map(_add_action, footers), *removals], "append", schema, partition_by=_PARTITION.names
    )
    table.update_incremental()


def _field_names(schema: "Schema") -> set[str]:
    """Return the dotted names of all fields, also within lists and structs: a set, since new fields may be anywhere."""
    return set(_field_names_below("", json.loads(schema.to_json())))


def _field_names_below(prefix: str, type_: Any) -> Iterator[str]:
    match type_:
        case {"type": "struct", "fields": fields}:
            for field in fields:
                yield prefix + field["name"]
                yield from _field_names_below(f"{prefix}{field['name']}.", field["type"])
        case {"type": "array", "elementType": element}:
            yield from _field_names_below(prefix, element)


def _delta_schema(root: Root) -> pa.Schema:
    """Return the run's columns, then the partition columns."""
    return pa.schema([*rollouts_schema(root.extra_columns), *_PARTITION])


def _add_action(footer: ExportedFile) -> Any:
    from deltalake.transaction import AddAction

    file: RolloutFile = footer.file
    return AddAction(
        path=file.name.partition("/")[2],
        size=footer.size_bytes,
        partition_values={"version": str(file.version), "env": file.env_name},
        modification_time=_now_ms(),
        data_change=True,
        stats=json.dumps({"numRecords": footer.num_rows}),
    )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@contextmanager
def _delta_explained(location: str) -> Iterator[None]:
    """Turn errors of Delta's writer into StoreErrors of one line; raises ConfigError if deltalake is missing."""
    try:
        from deltalake.exceptions import DeltaError
    except ImportError:
        raise ConfigError("Delta tables need deltalake: pip install 'ludic-rl[export]'") from None
    try:
        yield
    except LudicError:
        raise
    except (DeltaError, OSError) as error:
        raise StoreError(f"{location}: {one_line(error)}") from error


# --- Apache Iceberg --------------------------------------------------------------------------------------


NAMESPACE = "ludic"
_CATALOG_FILE = "catalog.db"
# Bounds only of columns that are used for pruning; ludic's files hold no statistics of other columns.
_PROPERTIES = {
    "write.metadata.metrics.default": "none",
    "write.metadata.metrics.column.policy_version": "full",
    "write.metadata.metrics.column.env_name": "full",
    "write.metadata.metrics.column.group_id": "full",
}


def iceberg(root: Root, target: str | BinaryIO | None, *, table: Folder, track: Track) -> TableReport:
    """The exporter of an Iceberg table. target: local folder of the catalog; None uses ROOT/iceberg."""
    catalog = None if target is None else given_folder(target, "iceberg", "the catalog")
    return export_iceberg(root, table, catalog, track)


def export_iceberg(
    root: Root, folder: Folder = "rollouts", catalog: Path | None = None, track: Track = untracked
) -> TableReport:
    """Update the Iceberg table ludic.{folder} to the files that exist now; does nothing if they are the same.

    catalog: local folder of the catalog; None means {root}/iceberg, which needs a local root.
    """
    home = _iceberg_home(root, catalog)
    files = {file.name: file for file in current_files(root, folder)}
    with _iceberg_explained(f"{home}: {NAMESPACE}.{folder}"), closing(open_catalog(home)) as opened:
        table = _iceberg_table(opened, root, folder)
        known = _iceberg_names(table, root)
        new = [file for name, file in files.items() if name not in known]
        footers, left_out = read_footers(root, new, root.sizes(folder), track)
        gone = sorted(known - files.keys())
        _iceberg_update(table, root, footers, gone)
        return TableReport(
            format="iceberg",
            location=f"{home}/{_CATALOG_FILE}",
            version=len(table.history()),
            num_added=len(footers),
            num_removed=len(gone),
            num_files=len(known) - len(gone) + len(footers),
            left_out=left_out,
        )


def open_catalog(home: Path) -> "SqlCatalog":
    """Open the catalog in a local folder, or create it; the caller closes it."""
    from pyiceberg.catalog.sql import SqlCatalog

    home.mkdir(parents=True, exist_ok=True)
    where = {"uri": f"sqlite:///{home / _CATALOG_FILE}", "warehouse": home.as_uri()}
    return SqlCatalog("ludic", **where, **_s3_properties())


def _s3_properties() -> dict[str, str]:
    """Return endpoint and region of S3, from the environment that ludic itself uses; pyarrow finds credentials."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    found = {"s3.endpoint": endpoint, "s3.region": region}
    return {name: value for name, value in found.items() if value}


def _iceberg_home(root: Root, catalog: Path | None) -> Path:
    if catalog is not None:
        return catalog.resolve()
    if not root.is_local:
        raise ConfigError(f"{root.url} is not local: name a local folder for the catalog with --out FOLDER")
    return root.folder_for_others(ICEBERG.folder)


def _iceberg_table(catalog: "SqlCatalog", root: Root, folder: Folder) -> "Table":
    """Open the table, or create it, and add missing columns of the run's schema."""
    schema = rollouts_schema(root.extra_columns)
    catalog.create_namespace_if_not_exists(NAMESPACE)
    table = catalog.create_table_if_not_exists(f"{NAMESPACE}.{folder}", schema=schema, properties=_PROPERTIES)
    with table.update_schema() as update:
        update.union_by_name(schema)
    return table


def _iceberg_url(root: Root, name: str) -> str:
    """Return the URL of a file for Iceberg, with its protocol and its path as stored."""
    if root.is_local:
        return f"file://{root.path}/{name}"
    protocol = root.url.partition("://")[0]
    if protocol == "memory":
        raise ConfigError(f"{root.url}: Iceberg reads local folders and object stores, not memory://")
    return f"{protocol}://{root.at(name)}"


def _iceberg_names(table: "Table", root: Root) -> set[str]:
    """Return the table's files as names below the root. Raises ConfigError if a file belongs to another root."""
    prefix = _iceberg_url(root, "")
    paths = table.inspect.files().column("file_path").to_pylist()
    foreign = next((path for path in paths if not path.startswith(prefix)), None)
    if foreign is not None:
        raise ConfigError(f"the catalog's table holds {foreign}, which is not below {root.url}; choose another catalog")
    return {path.removeprefix(prefix) for path in paths}


def _iceberg_update(table: "Table", root: Root, footers: Sequence[ExportedFile], gone: Sequence[str]) -> None:
    """Add and remove files in one commit."""
    if not footers and not gone:
        return
    with table.transaction() as transaction:
        if footers:
            transaction.add_files(
                [_iceberg_url(root, footer.file.name) for footer in footers], check_duplicate_files=False
            )
        if gone:
            paths = {_iceberg_url(root, name) for name in gone}
            with transaction.update_snapshot().overwrite() as overwrite:
                for task in table.scan().plan_files():
                    if task.file.file_path in paths:
                        overwrite.delete_data_file(task.file)


@contextmanager
def _iceberg_explained(where: str) -> Iterator[None]:
    """Turn errors of Iceberg's writer into StoreErrors of one line; raises ConfigError if pyiceberg is missing."""
    try:
        from pyiceberg.exceptions import CommitFailedException
        from sqlalchemy.exc import SQLAlchemyError
    except ImportError:
        raise ConfigError("Iceberg tables need pyiceberg with SQLite: pip install 'ludic-rl[export]'") from None
    try:
        yield
    except LudicError:
        raise
    except (CommitFailedException, SQLAlchemyError, OSError, ValueError) as error:
        raise StoreError(f"{where}: {one_line(error)}") from error
