"""Stream whole rows of a root with one row group in memory at a time, however long the rollouts are.

Reads rollouts/ or evals/, file by file in the order of versions. A broken file is left out with a warning. Raises
StoreError if a file is deleted before it is read.
"""

import logging
from collections.abc import Iterator, Set

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ludic.errors import SchemaError, StoreError
from ludic.schema import rollouts_schema
from ludic.store import Root
from ludic.store.current import current_files
from ludic.store.files import Folder
from ludic.store.parquet import open_parquet, read_row_groups

logger = logging.getLogger(__name__)


def whole_rows(root: Root, folder: Folder = "rollouts", rollout_ids: Set[str] | None = None) -> pa.RecordBatchReader:
    """Return all columns of all rows, each row once, although compaction may have doubled it.

    rollout_ids: return only rows with these ids; None means all rows.
    """
    schema = rollouts_schema(root.run.extra_columns)
    return pa.RecordBatchReader.from_batches(schema, _batches(root, folder, schema, rollout_ids))


def _batches(root: Root, folder: Folder, schema: pa.Schema, rollout_ids: Set[str] | None) -> Iterator[pa.RecordBatch]:
    wanted = None if rollout_ids is None else pa.array(sorted(rollout_ids), pa.string())
    for file in current_files(root, folder):
        where = f"{root.url}/{file.name}"
        try:
            with open_parquet(root, file.name) as parquet:
                for table in _tables(parquet, schema, wanted, where):
                    yield from table.to_batches()
        except FileNotFoundError:
            raise StoreError(f"{where} was deleted meanwhile, by a compaction or an expiry; try again") from None
        except SchemaError as error:
            logger.warning("left out: %s", error)


def _tables(parquet: pq.ParquetFile, schema: pa.Schema, wanted: pa.Array | None, where: str) -> Iterator[pa.Table]:
    for row_group in range(parquet.num_row_groups):
        if wanted is None:
            yield read_row_groups(parquet, [row_group], schema.names, where, schema)
            continue
        ids = read_row_groups(parquet, [row_group], ["rollout_id"], where).column("rollout_id")
        is_wanted = pc.is_in(ids, value_set=wanted)
        if pc.any(is_wanted).as_py():
            yield read_row_groups(parquet, [row_group], schema.names, where, schema).filter(is_wanted)
