"""reference/: cached logprobs of rollouts under reference models, for a second epoch or an offline run.

Writes reference/model=FINGERPRINT/DIGEST.parquet, put if absent. The digest covers the rollouts, temperatures and
lengths, not the logprobs, so computing the same rows again adds no file. Only a cache: a broken file is skipped with
a warning, and its rows are computed again. Raises StoreError if the filesystem fails.
"""

import hashlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ludic.errors import SchemaError, StoreError
from ludic.schema import arrow_schema, check_schema
from ludic.store.catalogue import REFERENCE, ReferenceName
from ludic.store.parquet import UNREADABLE, check_text, encode_plain, open_checked
from ludic.store.root import Root

logger = logging.getLogger(__name__)

_CONCURRENT_READS = 16
# A second epoch takes rollouts in another order, so it reads few rows of many files.
_ROW_GROUP_ROWS = 16
_INDEX_COLUMNS = ["rollout_id", "temperature", "response_length"]


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """Address of a rollout's reference logprobs, with the temperature and length that they were computed for."""

    temperature: float
    response_length: int
    """Number of stored logprobs, one per response token."""
    file: str
    row: int


def write_reference(root: Root, model: str, rows: pa.Table) -> pa.Table:
    """Store rows of the reference table, all of one model; return their index, as `read_reference_index` does.

    model: fingerprint of the model.
    """
    assert rows.schema.equals(arrow_schema("reference"))
    if not rows.num_rows:
        return _index(rows, "")
    rows = rows.sort_by([(name, "ascending") for name in _INDEX_COLUMNS])
    name = REFERENCE.name(ReferenceName(model, _digest(rows)))
    # An existing file has the same rows in the same order; only last digits of its logprobs may differ.
    root.put_if_absent(name, encode_plain(rows, row_group_size=_ROW_GROUP_ROWS))
    return _index(rows, name)


def read_reference_index(root: Root, model: str) -> pa.Table:
    """Return the index of a model's stored rows: rollout_id, and the fields of ReferenceRow."""
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        tables = list(pool.map(lambda name: _read_index(root, name), REFERENCE.names(root, model=model)))
    return pa.concat_tables([_index(arrow_schema("reference").empty_table(), ""), *tables])


def read_reference(root: Root, name: str, rows: Sequence[int]) -> list[np.ndarray]:
    """Return reference_logprobs of rows of a file, (response_length,) float32 each; reads only their row groups.

    Raises FileNotFoundError or SchemaError if the file was deleted or damaged since it was indexed.
    """
    try:
        with root.open_file(name) as source, open_checked(source, f"{root.url}/{name}", pre_buffer=True) as (file, _):
            ends = np.cumsum([file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)])
            groups = np.searchsorted(ends, rows, side="right")
            row_groups = np.unique(groups)
            table = file.read_row_groups(row_groups.tolist(), ["reference_logprobs"])
    except (FileNotFoundError, StoreError, SchemaError):
        raise
    except UNREADABLE as error:
        raise SchemaError(f"{root.url}/{name}: can't be read any more: {error}; delete it, it is a cache") from error
    sizes = np.diff(ends, prepend=0)
    # First row of each row group that was read, in the file and in the table.
    in_file, in_table = ends - sizes, np.zeros_like(ends)
    in_table[row_groups] = np.cumsum(sizes[row_groups]) - sizes[row_groups]
    column = table.column("reference_logprobs").take(np.asarray(rows) - in_file[groups] + in_table[groups])
    return [value.values.to_numpy() for value in column]


def _digest(rows: pa.Table) -> str:
    about = repr(rows.select(_INDEX_COLUMNS).to_pydict())
    return hashlib.blake2b(about.encode(), digest_size=16).hexdigest()


def _read_index(root: Root, name: str) -> pa.Table:
    try:
        with root.open_file(name) as source, open_checked(source, f"{root.url}/{name}", pre_buffer=True) as (file, _):
            check_schema(file.schema_arrow, "reference", f"{root.url}/{name}")
            rows = file.read(columns=_INDEX_COLUMNS)
            check_text(rows, f"{root.url}/{name}")
            return _index(rows, name)
    except StoreError:
        raise
    except UNREADABLE as error:
        logger.warning("%s/%s is passed over, and computed again: %s", root.url, name, error)
        return _index(arrow_schema("reference").empty_table(), "")


def _index(rows: pa.Table, name: str) -> pa.Table:
    columns = {column: rows.column(column).combine_chunks() for column in _INDEX_COLUMNS}
    files, row_numbers = pa.array([name] * rows.num_rows, pa.string()), pa.array(range(rows.num_rows), pa.int64())
    return pa.table({**columns, "file": files, "row": row_numbers})
