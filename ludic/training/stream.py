"""The batch stream: from rollouts in the store to packed micro-batches, on every rank.

Rank 0 plans (ludic.training.plans) and the plan reaches the other ranks as Arrow IPC; each rank reads
the row groups of its own sequences. Planning overlaps with the training step, reading with what
follows it. At no time are more tokens in memory than two batches hold.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist

from ludic.errors import SchemaError, StoreError
from ludic.schema import column_values, token_arrays
from ludic.store.relocated import read_rollouts
from ludic.store.repair import set_aside
from ludic.store.root import Root
from ludic.training.config import TrainConfig
from ludic.training.distributed import num_ranks, rank, run_on_all, run_on_main
from ludic.training.packing import MicroBatch, TrainingSequence, assign_pairs, cap, pack
from ludic.training.plans import Feed, Plan

TOKEN_COLUMNS = ["prompt_tokens", "response_tokens", "response_logprobs", "action_mask"]
_COLUMNS = ["rollout_id", "temperature", *TOKEN_COLUMNS]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """What one rank trains on at one step."""

    plan: Plan
    """Of all ranks."""
    micro_batches: list[MicroBatch]
    """Of this rank; as many on every rank."""
    num_action_tokens: int
    """Of all ranks: what the loss is divided by."""
    num_tokens: int
    """Of all ranks, prompts included."""
    num_truncated: int
    """Sequences of all ranks that were cut to max_seq_len."""
    read_s: float
    """Seconds in which this rank read its sequences, in the background."""
    pack_s: float
    """And packed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of a batch, with its counts."""

    plan: Plan
    """Of all ranks."""
    micro_batches: list[MicroBatch]
    num_action_tokens: int
    num_tokens: int
    num_truncated: int
    read_s: float
    pack_s: float


class PlannedStream:
    """Batches in order of steps. Collective: every rank calls every method alike."""

    def __init__(self, root: Root, config: TrainConfig, feed: Feed | None) -> None:
        """`feed` on rank 0, None elsewhere; its first plan must have been started."""
        self._root, self._config, self._feed = root, config, feed
        self._reading: Future[Share] | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="ludic-read")

    def next_batch(self) -> TrainingBatch | None:
        """The next step's batch, as soon as there are groups enough; None when rank 0 was told to stop.

        Raises, on every rank, what the feed raises on rank 0, and StoreError, SchemaError or InvalidBatchError
        for rollouts that one of the ranks can't read or train on.
        """
        begun, self._reading = self._reading or self._begin_reading(wait=True), None
        if begun is None:
            return None
        share = run_on_all(begun.result)
        counts = torch.tensor([share.num_action_tokens, share.num_tokens, share.num_truncated])
        dist.all_reduce(counts)
        num_action_tokens, num_tokens, num_truncated = counts.tolist()
        return TrainingBatch(
            plan=share.plan,
            micro_batches=share.micro_batches,
            num_action_tokens=num_action_tokens,
            num_tokens=num_tokens,
            num_truncated=num_truncated,
            read_s=share.read_s,
            pack_s=share.pack_s,
        )

    def start_plan(self, step: int, trainer_version: int) -> None:
        """Begin to plan a step that will start from the weights of `trainer_version`."""
        if self._feed is not None:
            self._feed.start(step, trainer_version)

    def prefetch(self) -> None:
        """Begin to read the next batch if its plan is there already; never waits, and leaves errors to next_batch."""
        self._reading = self._reading or self._begin_reading(wait=False)

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
        self._reader.shutdown(wait=True)

    def _begin_reading(self, *, wait: bool) -> Future[Share] | None:
        data = run_on_main(lambda: self._take_plan(wait))
        if not data:
            return None
        return self._reader.submit(read_share, self._root, self._config, Plan.from_bytes(data), rank(), num_ranks())

    def _take_plan(self, wait: bool) -> bytes:
        assert self._feed is not None
        plan = self._feed.take() if wait or self._feed.has_plan else None
        return plan.to_bytes() if plan else b""


def read_share(root: Root, config: TrainConfig, plan: Plan, rank: int, num_ranks: int) -> Share:
    """Read and pack one rank's sequences of a plan; the same on any machine."""
    used = plan.rows.filter(plan.rows.column("used"))
    lengths = _sum_columns(used, "prompt_length", "response_length")
    if config.max_seq_len is not None:
        lengths = np.minimum(lengths, config.max_seq_len)
    pair_ids = used.column("pair_id").to_pylist()
    mine = assign_pairs(lengths, pair_ids, num_ranks, config.micro_token_budget)[rank]
    order = [index for micro_batch in mine for index in micro_batch]
    reading_since = time.perf_counter()
    sequences = dict(zip(order, read_sequences(root, used.take(order)), strict=True))
    packing_since = time.perf_counter()
    capped = {index: _cap(sequence, config.max_seq_len) for index, sequence in sequences.items()}
    kept = [sequence for sequence, _ in capped.values()]
    micro_batches = [pack([capped[index][0] for index in micro_batch]) for micro_batch in mine]
    packed = time.perf_counter()
    return Share(
        plan=plan,
        micro_batches=micro_batches,
        num_action_tokens=sum(sequence.num_action_tokens for sequence in kept),
        num_tokens=sum(sequence.num_tokens for sequence in kept),
        num_truncated=sum(was_cut for _, was_cut in capped.values()),
        read_s=packing_since - reading_since,
        pack_s=packed - packing_since,
    )


def read_sequences(root: Root, rows: pa.Table) -> list[TrainingSequence]:
    """The tokens of ledger rows, in their order, wherever compaction has moved them.

    Raises StoreError for a file that is broken, which is set aside, or gone: the next trainer plans without it.
    """
    if rows.num_rows == 0:
        return []
    # As they lie in the files: then whole row groups are not copied.
    order = np.array(pc.sort_indices(rows, [(name, "ascending") for name in ("file", "row_group", "row")]))
    rows = rows.take(order)
    try:
        table = read_rollouts(root, rows, _COLUMNS, on_broken=partial(set_aside, root))
    except SchemaError as error:
        raise StoreError(f"{error}; it was planned for a step: start the trainer again, it plans anew") from error
    names = dict(zip(_COLUMNS, _COLUMNS, strict=True)) | {"response_logprobs": "sampler_logprobs"}
    columns = {names[column]: column_values(table, column) for column in _COLUMNS}
    columns |= {"advantage": _advantages(rows)} | {
        name: rows.column(name).to_pylist() for name in ("weight", "pair_id")
    }
    sequences = [
        TrainingSequence(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)
    ]
    return [sequences[place] for place in np.argsort(order)]


def _advantages(rows: pa.Table) -> list[float | np.ndarray]:
    """Of each ledger row: one for each token, (response_length,) float32, where the advantage SQL gave those."""
    per_token = [values for chunk in rows.column("token_advantages").chunks for values in token_arrays(chunk)]
    pairs = zip(per_token, rows.column("advantage").to_pylist(), strict=True)
    return [one if values is None else values for values, one in pairs]


def _cap(sequence: TrainingSequence, max_seq_len: int | None) -> tuple[TrainingSequence, bool]:
    return (sequence, False) if max_seq_len is None else cap(sequence, max_seq_len)


def _sum_columns(table: pa.Table, *names: str) -> np.ndarray:
    return sum(table.column(name).to_numpy().astype(np.int64) for name in names)
