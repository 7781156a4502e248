"""Register a root's rollout files as a Delta Lake table, in place; nothing is copied.

Writes {root}/rollouts/_delta_log/, which ludic's own listings ignore. One export is one commit: it adds new files, and
removes files that compaction or expiry deleted. Partition columns are version and env, as in the folders' names.
Needs the extra `export`. Raises StoreError for errors of Delta's writer, ConfigError for a filesystem that Delta does
not support.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa

from ludic.errors import ConfigError, LudicError, StoreError, one_line
from ludic.interop.exports.tables import Footer, TableReport, read_footers
from ludic.schema import rollouts_schema
from ludic.store import RolloutFile, Root
from ludic.store.catalogue import DELTA_LOGS
from ludic.store.current import current_files
from ludic.store.files import Folder
from ludic.store.track import Track, untracked

if TYPE_CHECKING:
    from deltalake import DeltaTable, Schema

_PARTITION = pa.schema([("version", pa.int64()), ("env", pa.string())])
_PROTOCOLS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
# VACUUM deletes files that the table does not name, including rollouts that are not exported yet.
_CONFIGURATION = {"delta.deletedFileRetentionDuration": "interval 36500 days"}


def export_delta(root: Root, folder: Folder = "rollouts", track: Track = untracked) -> TableReport:
    """Update the Delta table at {root}/{folder} to the files that exist now; does nothing if they are the same."""
    location = _location(root, folder)
    files = {file.name: file for file in current_files(root, folder)}
    with _explained(location):
        table = _open(root, folder, location)
        # Delta percent-encodes the paths, which are encoded already.
        paths = pa.table(table.get_add_actions()).column("path").to_pylist() if table else []
        known = {f"{folder}/{unquote(path)}" for path in paths}
        new = [file for name, file in files.items() if name not in known]
        footers, left_out = read_footers(root, new, root.sizes(folder), track)
        gone = sorted(known - files.keys())
        if table is None:
            table = _create(location, root, footers)
        else:
            _update(table, root, footers, [name.removeprefix(f"{folder}/") for name in gone])
        return TableReport(
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


def _location(root: Root, folder: Folder) -> str:
    if root.is_local:
        root.folder_for_others(DELTA_LOGS[folder].below())
        return root.at(folder)
    protocol = root.url.partition("://")[0]
    if protocol not in _PROTOCOLS:
        raise ConfigError(f"{root.url}: Delta Lake reads local folders, s3://, gs:// and az://, not {protocol}://")
    return f"{root.url}/{folder}"


def _open(root: Root, folder: Folder, location: str) -> "DeltaTable | None":
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


def _create(location: str, root: Root, footers: Sequence[Footer]) -> "DeltaTable":
    from deltalake import DeltaTable, Schema
    from deltalake.transaction import create_table_with_add_actions

    create_table_with_add_actions(
        location,
        Schema.from_arrow(_schema(root)),
        [_add_action(footer) for footer in footers],
        partition_by=_PARTITION.names,
        name="rollouts",
        description=f"Rollouts of the ludic run {root.run_id}. Read only: never VACUUM or OPTIMIZE it.",
        configuration=_CONFIGURATION,
        storage_options=storage_options(),
    )
    return DeltaTable(location, storage_options=storage_options())


def _update(table: "DeltaTable", root: Root, footers: Sequence[Footer], gone: Sequence[str]) -> None:
    """Add and remove files in one commit; columns that a newer schema added get an earlier commit."""
    from deltalake import Schema
    from deltalake.transaction import RemoveAction

    if not footers and not gone:
        return
    schema = Schema.from_arrow(_schema(root))
    if not _paths(schema) <= _paths(table.schema()):
        table.alter.add_columns(schema.fields)
    removals = [RemoveAction(path, True, _now_ms()) for path in gone]
    table.create_write_transaction(
        [*map(_add_action, footers), *removals], "append", schema, partition_by=_PARTITION.names
    )
    table.update_incremental()


def _paths(schema: "Schema") -> set[str]:
    """Return the dotted names of all fields, also within lists and structs: a set, since new fields may be anywhere."""
    return set(_paths_below("", json.loads(schema.to_json())))


def _paths_below(prefix: str, type_: Any) -> Iterator[str]:
    match type_:
        case {"type": "struct", "fields": fields}:
            for field in fields:
                yield prefix + field["name"]
                yield from _paths_below(f"{prefix}{field['name']}.", field["type"])
        case {"type": "array", "elementType": element}:
            yield from _paths_below(prefix, element)


def _schema(root: Root) -> pa.Schema:
    """Return the run's columns, then the partition columns."""
    return pa.schema([*rollouts_schema(root.run.extra_columns), *_PARTITION])


def _add_action(footer: Footer) -> Any:
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
def _explained(location: str) -> Iterator[None]:
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
