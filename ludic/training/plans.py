"""What a gradient step trains on, as rank 0 decides it and the other ranks are told."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one gradient step trains on and drops."""

    step: int
    rows: pa.Table
    """Ledger rows (schemas/batches.v1.json): used ones in training order, then dropped ones."""
    cursor: Mapping[str, Any]
    """The reader's position after this step; a checkpoint of this step holds it."""
    num_pending_groups: int
    """Groups read and left for later steps."""
    num_unreadable_files: int

    def to_bytes(self) -> bytes:
        """Arrow IPC, for other ranks."""
        facts = {name: getattr(self, name) for name in ("step", "cursor", "num_pending_groups", "num_unreadable_files")}
        table = self.rows.replace_schema_metadata({b"plan": json.dumps(facts).encode()})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue().to_pybytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        table = pa.ipc.open_stream(data).read_all()
        return cls(rows=table, **json.loads(table.schema.metadata[b"plan"]))
