"""Sources of batch plans: the contract that online, offline and replay training share."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import pyarrow as pa

from ludic.store.records import CheckpointInfo, CodeRecord

MORE_THAN_ANY_BATCH = 2**31
"""Number of ready groups that a source reports if workers need not sample for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Rollouts that one gradient step trains on or drops."""

    step: int
    rows: pa.Table
    """Ledger rows (schemas/batches.v1.json): used ones in training order, then dropped ones."""
    cursor: Mapping[str, Any]
    """The source's position after this step, for the checkpoint of this step."""
    num_pending_groups: int
    """Groups that were read and remain for later steps."""
    num_unreadable_files: int
    tokens: pa.Table | None = None
    """What rank 0 has read of the used rows to look at them (ludic.batches.reading.read_trained), and need not read
    again. It is not sent to other ranks."""

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


class Demand(Protocol):
    """What a source tells of the groups that workers sample; ludic.training.publisher.Publisher keeps the budget."""

    def note_arrivals(self, rows: pa.Table, num_ready_groups: int) -> None:
        """Note new rows. num_ready_groups: read and not planned, with them."""

    def note_plan(self, step: int, num_ready_groups: int) -> None:
        """Note that a step is planned. num_ready_groups: read and not yet planned."""

    def note_wait(self, num_ready_groups: int, num_missing_groups: int, idle_s: float, *, version: int) -> None:
        """Note that a step, which starts from a version, waits for groups. num_ready_groups: what it could use."""


class Source(Protocol):
    """Source of batch plans; only rank 0 has one.

    Online (online.py), offline (offline.py) and replay (replay.py) implement it. The trainer calls, in this order:
    the constructor, which checks settings and users' code and writes nothing; `count_steps`; `keep_code`, just before
    it claims the root; `resume`, once, after the claim; `plan` for each step, in a thread; `close`.

    A source writes neither the ledger nor any file but the users' code: the stream writes a plan's rows to the ledger
    before the plan leaves its thread. So a source may change its position as soon as it returns a plan.
    """

    def count_steps(self, resumed: CheckpointInfo | None) -> int | None:
        """Return num_steps for training, when resuming from a checkpoint; None keeps the setting."""

    def keep_code(self) -> list[CodeRecord]:
        """Copy users' files to the root, and return a record of each SQL or Python text that plans are made with."""

    def resume(self, resumed: CheckpointInfo | None, demand: Demand) -> None:
        """Set the position to that of a checkpoint, or to the start if it is None."""

    def plan(self, step: int, *, attempt_id: int, trainer_version: int) -> Plan | None:
        """Return the next plan, in order of steps; None after the last, or if stopped or closed while waiting.

        trainer_version: version of the weights that the step starts from. Raises StalledError, StoreError, QueryError.
        """

    def count_ready_groups(self, latest_version: int | None) -> int:
        """Return the number of groups that were read and not yet planned.

        latest_version: newest published version; None before the first. Any thread may call it.
        """

    def close(self) -> None:
        """End a wait in `plan`, in any thread."""
