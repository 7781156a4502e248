"""Plan: the rollouts that a gradient step trains on, made on rank 0 and sent to all ranks. Feed: a source of plans.

ludic.batches.online plans from the rollouts that workers deliver; ludic.batches.stored from stored rollouts, in epochs
or as another run did. A thread makes plans, so that the next plan is ready when the current step ends.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, Self

import pyarrow as pa


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Rollouts that one gradient step trains on or drops."""

    step: int
    rows: pa.Table
    """Ledger rows (schemas/batches.v1.json): used ones in training order, then dropped ones."""
    cursor: Mapping[str, Any]
    """The reader's position after this step, for the checkpoint of this step."""
    num_pending_groups: int
    """Groups that were read and remain for later steps."""
    num_unreadable_files: int

    def to_bytes(self) -> bytes:
        """Return the plan as Arrow IPC, for other ranks."""
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
    """Source of plans in order of steps, on rank 0: `start` begins a plan and `take` returns it, one at a time."""

    def start(self, step: int, trainer_version: int) -> None:
        """Begin to plan a step that will start from the weights of `trainer_version`; returns at once."""

    def take(self) -> Plan | None:
        """Wait for the plan and return it; None if stopped or if there are no more plans. Raises errors of planning."""

    def count_ready_groups(self, latest_version: int | None) -> int:
        """Return the number of groups that are ready to train on, which workers need not sample."""

    def close(self) -> None:
        """End the thread; an unfinished plan is given up or finished."""


class PlanThread:
    """Makes plans in a thread, one at a time."""

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
