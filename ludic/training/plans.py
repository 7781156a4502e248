"""What a gradient step trains on, as rank 0 decides it and the other ranks are told; and the protocol of who decides.

ludic.training.feed plans from what workers deliver, stored from what is there: offline in epochs, or as another run
did. Plans are made in a thread, so that the next one is there when the current step ends.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, Self

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


class Feed(Protocol):
    """Plans in order of steps, on rank 0; each is asked for with `start` and got with `take`, one at a time."""

    def start(self, step: int, trainer_version: int) -> None:
        """Begin to plan a step that will start from the weights of `trainer_version`; never waits."""

    def take(self) -> Plan | None:
        """Wait for the plan; None when told to stop, or when there is no further one. Raises what planning raised."""

    def count_ready_groups(self, latest_version: int | None) -> int:
        """Groups that wait to be trained on, so that workers need not sample them."""

    def close(self) -> None:
        """End the thread; a plan in the making is given up or finished."""


class PlanThread:
    """Makes plans, one at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ludic-plan")
        self._future: Future[Plan | None] | None = None

    def start(self, make: Callable[[], Plan | None]) -> None:
        assert self._future is None, "the plan before was not taken"
        self._future = self._thread.submit(make)

    def take(self) -> Plan | None:
        assert self._future is not None, "no plan was asked for"
        future, self._future = self._future, None
        return future.result()

    def close(self) -> None:
        self._thread.shutdown(wait=True)
