"""Register a root's rollout files as an Apache Iceberg table, in place; nothing is copied.

Writes a catalog (SQLite) with the table's metadata into a local folder: {root}/iceberg, or a folder that the user
chooses. One export is one commit: it adds new files, and removes files that compaction or expiry deleted.
The table is not partitioned, since a file's partition is not in its rows: readers skip files by the bounds of
policy_version and env_name instead. Needs the extra `export`. Raises StoreError for errors of Iceberg's writer,
ConfigError for a root whose files Iceberg can't address.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.errors import ConfigError, LudicError, StoreError, one_line
from ludic.interop.exports.tables import Footer, TableReport, read_footers
from ludic.schema import rollouts_schema
from ludic.store import Root
from ludic.store.catalogue import ICEBERG
from ludic.store.current import current_files
from ludic.store.files import Folder
from ludic.store.track import Track, untracked

if TYPE_CHECKING:
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.table import Table

NAMESPACE = "ludic"
_CATALOG_FILE = "catalog.db"
# Bounds only of columns that are used for pruning; ludic's files hold no statistics of other columns.
_PROPERTIES = {
    "write.metadata.metrics.default": "none",
    "write.metadata.metrics.column.policy_version": "full",
    "write.metadata.metrics.column.env_name": "full",
    "write.metadata.metrics.column.group_id": "full",
}


def export_iceberg(
    root: Root, folder: Folder = "rollouts", catalog: Path | None = None, track: Track = untracked
) -> TableReport:
    """Update the Iceberg table ludic.{folder} to the files that exist now; does nothing if they are the same.

    catalog: local folder of the catalog; None means {root}/iceberg, which needs a local root.
    """
    home = _home(root, catalog)
    files = {file.name: file for file in current_files(root, folder)}
    with _explained(f"{home}: {NAMESPACE}.{folder}"), closing(open_catalog(home)) as opened:
        table = _table(opened, root, folder)
        known = _names(table, root)
        new = [file for name, file in files.items() if name not in known]
        footers, left_out = read_footers(root, new, root.sizes(folder), track)
        gone = sorted(known - files.keys())
        _update(table, root, footers, gone)
        return TableReport(
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


def _home(root: Root, catalog: Path | None) -> Path:
    if catalog is not None:
        return catalog.resolve()
    if not root.is_local:
        raise ConfigError(f"{root.url} is not local: name a local folder for the catalog with --catalog FOLDER")
    return root.folder_for_others(ICEBERG.folder)


def _table(catalog: "SqlCatalog", root: Root, folder: Folder) -> "Table":
    """Open the table, or create it, and add missing columns of the run's schema."""
    schema = rollouts_schema(root.run.extra_columns)
    catalog.create_namespace_if_not_exists(NAMESPACE)
    table = catalog.create_table_if_not_exists(f"{NAMESPACE}.{folder}", schema=schema, properties=_PROPERTIES)
    with table.update_schema() as update:
        update.union_by_name(schema)
    return table


def _url(root: Root, name: str) -> str:
    """Return the URL of a file for Iceberg, with its protocol and its path as stored."""
    if root.is_local:
        return f"file://{root.path}/{name}"
    protocol = root.url.partition("://")[0]
    if protocol == "memory":
        raise ConfigError(f"{root.url}: Iceberg reads local folders and object stores, not memory://")
    return f"{protocol}://{root.at(name)}"


def _names(table: "Table", root: Root) -> set[str]:
    """Return the table's files as names below the root. Raises ConfigError if a file belongs to another root."""
    prefix = _url(root, "")
    paths = table.inspect.files().column("file_path").to_pylist()
    foreign = next((path for path in paths if not path.startswith(prefix)), None)
    if foreign is not None:
        raise ConfigError(f"the catalog's table holds {foreign}, which is not below {root.url}; choose another catalog")
    return {path.removeprefix(prefix) for path in paths}


def _update(table: "Table", root: Root, footers: Sequence[Footer], gone: Sequence[str]) -> None:
    """Add and remove files in one commit."""
    if not footers and not gone:
        return
    with table.transaction() as transaction:
        if footers:
            transaction.add_files([_url(root, footer.file.name) for footer in footers], check_duplicate_files=False)
        if gone:
            paths = {_url(root, name) for name in gone}
            with transaction.update_snapshot().overwrite() as overwrite:
                for task in table.scan().plan_files():
                    if task.file.file_path in paths:
                        overwrite.delete_data_file(task.file)


@contextmanager
def _explained(where: str) -> Iterator[None]:
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
