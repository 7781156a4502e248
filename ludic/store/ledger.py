"""batches/: what each gradient step trained on and dropped; the truth about consumption.

A step's file is written before its gradient step, and never changed.
"""

import io
import re

import pyarrow as pa
import pyarrow.parquet as pq

from ludic.errors import FencedError, SchemaError
from ludic.schema import arrow_schema, check_schema
from ludic.store.attempts import Attempt, check_not_fenced
from ludic.store.parquet import encode_plain
from ludic.store.root import Root

_NAME = re.compile(r"batches/attempt=(\d+)/step=(\d+)\.parquet")


def ledger_name(attempt_id: int, step: int) -> str:
    return f"batches/attempt={attempt_id}/step={step}.parquet"


def write_ledger(root: Root, attempt: Attempt, step: int, rows: pa.Table) -> None:
    """Commit a step's rows (schema of the batches table); raises FencedError when a newer attempt owns the root."""
    assert rows.schema.equals(arrow_schema("batches"))
    check_not_fenced(root, attempt)
    name = ledger_name(attempt.attempt_id, step)
    if not root.put_if_absent(name, encode_plain(rows)):
        raise FencedError(f"{root.url}/{name} exists with other content: another process trains as this attempt")


def read_ledger(root: Root, attempt_id: int, step: int) -> pa.Table:
    """A step's rows, as planned. Raises FileNotFoundError for a step that was not, SchemaError for a broken file."""
    name = ledger_name(attempt_id, step)
    data = root.read(name)
    try:
        table = pq.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError) as error:
        raise SchemaError(f"{root.url}/{name}: no Parquet file, or a broken one, of {len(data)} bytes") from error
    check_schema(table.schema, "batches", f"{root.url}/{name}")
    return table


def ledger_steps(root: Root, attempt_id: int) -> list[int]:
    """Steps that an attempt planned, in order."""
    matches = map(_NAME.fullmatch, root.list(f"batches/attempt={attempt_id}"))
    return sorted(int(match[2]) for match in matches if match)
