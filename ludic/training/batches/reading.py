"""Read one rank's sequences of a plan and pack them into micro-batches; find rows that can't be trained on.

Reads the row groups of rollouts/ that hold these sequences, in any root. Raises StoreError, SchemaError or
InvalidBatchError if a rollout can't be read or trained on.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import ConfigError, SchemaError, StoreError
from ludic.models import sizes
from ludic.records import (
    TRAINED_COLUMNS,
    WITHOUT_LOGPROBS,
    Routing,
    array_columns,
    find_untrainable,
    reason_against_experts,
    values_of,
    with_columns,
)
from ludic.root import Root
from ludic.root.rows import CAPTURE, ReferenceIndex, quarantine, read_rollouts, take_rows
from ludic.root.weights import first_config, vocabulary_of
from ludic.run import run_of
from ludic.training.batches.config import MICRO_BATCH_TOKENS, BatchConfig
from ludic.training.batches.packing import (
    MicroBatch,
    Sequences,
    assign_pairs,
    cap,
    costs_of,
    cut_out,
    imbalance,
    pack_each,
)
from ludic.training.batches.source import BatchPlan

logger = logging.getLogger(__name__)

_READ = (*TRAINED_COLUMNS, CAPTURE)
"""Columns of rollouts that a step needs for training."""
_KEYS = ("rollout_id", "prompt_length", "response_length")
"""Ledger columns that `read_trained` adds: the row's address, and the lengths of its lists in the plan."""
_PLANNED = ["rollout_id", "group_id", "pair_id", "root", "file", "row_group", "row"]
_PLANNED += ["prompt_length", "response_length", "advantage", "token_advantages", "weight"]
"""Ledger columns that locate a rollout and say how it is trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """One rank's part of a step's batch."""

    plan: BatchPlan
    """Plan of the step, for all ranks."""
    micro_batches: list[MicroBatch]
    """Micro-batches of this rank; the same number on every rank."""
    num_action_tokens: int
    """Action tokens of this rank. All three counts are of this rank; `PlannedStream.next_batch` returns sums over
    ranks."""
    num_tokens: int
    """Tokens of prompts and responses."""
    num_truncated: int
    """Sequences that were cut to max_seq_len."""
    token_imbalance: float
    """Tokens of the fullest rank over the mean of all ranks, for the whole batch; costs if these are balanced."""
    read_s: float
    """Seconds this rank spent reading its sequences, in the background."""
    pack_s: float
    """Seconds this rank spent packing its sequences, in the background."""


def attention_tokens(root: Root, config: BatchConfig) -> int | None:
    """Return the attention_tokens of the run's model, to balance costs; None if tokens are balanced.

    Raises ModelError if the model's configuration can't be read.
    """
    if config.balance_by != "cost":
        return None
    from ludic.models import load_config  # loads transformers

    with first_config(root) as folder:
        return sizes.attention_tokens(load_config(str(folder)))


def replayed_routing(root: Root, config: BatchConfig) -> Routing | None:
    """Return the routing of the run's model; None if no experts are replayed.

    Raises ModelError if the model has no experts, or its configuration can't be read.
    """
    if not (run_of(root).keep_experts if config.replay_experts is None else config.replay_experts):
        return None
    from ludic.models import (
        load_config,
        routing_of,  # these load transformers
    )

    with first_config(root) as folder:
        return routing_of(load_config(str(folder)), root.record.model)


def read_rank_batch(
    root: Root,
    config: BatchConfig,
    plan: BatchPlan,
    rank: int,
    num_ranks: int,
    attention_tokens: int | None = None,
    routing: Routing | None = None,
    computed: ReferenceIndex | None = None,
) -> RankBatch:
    """Read and pack one rank's sequences of a plan; the result is the same on any machine.

    attention_tokens: see `costs_of`; None balances tokens. routing: of the model whose experts are replayed; None
    replays none. computed: logprobs of rows without stored ones. Raises StoreError, SchemaError or InvalidBatchError if
    a rollout can't be read or trained on.
    """
    used = take_rows(plan.rows.select(_PLANNED), np.flatnonzero(plan.rows["used"].to_numpy()).tolist())
    units = _turns(root, used) if config.training_unit == "turn" else _rows(used)
    lengths = used["prompt_length"].to_numpy().astype(np.int64)[units.row] + units.end
    if config.max_seq_len is not None:
        lengths = np.minimum(lengths, config.max_seq_len)
    pair_ids = take_rows(used.select(["pair_id"]), units.row.tolist())["pair_id"].to_pylist()
    costs = None if attention_tokens is None else costs_of(lengths, attention_tokens)
    most_tokens = config.max_tokens_per_micro_batch or MICRO_BATCH_TOKENS
    shares = assign_pairs(lengths, pair_ids, num_ranks, most_tokens, _row_groups(used)[units.row], costs)
    loads, indexes = lengths if costs is None else costs, [sorted(chain.from_iterable(share)) for share in shares]
    reading_since = time.perf_counter()
    rows = np.unique(units.row[indexes[rank]])
    of_rows = take_rows(used, rows.tolist())
    sequences, num_truncated = read_sequences(root, of_rows, plan.tokens, computed), 0
    if routing is not None:
        check = partial(reason_against_experts, routing=routing)
        sequences = with_columns(sequences, experts=_read_requested(root, of_rows, "experts", check))
    if config.training_unit == "turn":
        of_rank = units.take(indexes[rank])
        sequences = cut_out(sequences, np.searchsorted(rows, of_rank.row), of_rank.start, of_rank.end)
    packing_since = time.perf_counter()
    if config.max_seq_len is not None:
        sequences, num_truncated = cap(sequences, config.max_seq_len)
    position_of = {index: position for position, index in enumerate(indexes[rank])}
    micro_batches = pack_each(
        sequences, [[position_of[index] for index in micro_batch] for micro_batch in shares[rank]]
    )
    return RankBatch(
        plan=replace(plan, tokens=None),
        micro_batches=micro_batches,
        num_action_tokens=sequences.num_action_tokens,
        num_tokens=sequences.num_tokens,
        num_truncated=num_truncated,
        token_imbalance=imbalance(np.array([loads[of_rank].sum() for of_rank in indexes])),
        read_s=packing_since - reading_since,
        pack_s=time.perf_counter() - packing_since,
    )


@dataclass(frozen=True, slots=True)
class _Units:
    """U parts of rows to train on, each as a separate sequence."""

    row: np.ndarray
    """(U,) int64, index of the row, ascending."""
    start: np.ndarray
    """(U,) int64: index of the part's first response token."""
    end: np.ndarray
    """(U,) int64: index after its last."""

    def take(self, indexes: list[int]) -> "_Units":
        return _Units(self.row[indexes], self.start[indexes], self.end[indexes])


def _rows(used: pa.Table) -> _Units:
    ends = used["response_length"].to_numpy().astype(np.int64)
    return _Units(np.arange(len(ends)), np.zeros_like(ends), ends)


def _turns(root: Root, used: pa.Table) -> _Units:
    """Return each run of sampled tokens. Every rank reads all masks, since all must know the number of
    micro-batches."""
    lengths = used["response_length"].to_pylist()
    masks = _columns_of(read_trained(root, used, ["action_mask"]), used, ["action_mask"])["action_mask"]
    turns = [_sampled_runs(np.ones(n, bool) if mask is None else mask) for mask, n in zip(masks, lengths, strict=True)]
    rows = np.repeat(np.arange(len(turns)), [len(of_row) for of_row in turns])
    bounds = np.concatenate([np.zeros((0, 2), np.int64), *turns])
    return _Units(rows, bounds[:, 0], bounds[:, 1])


def _sampled_runs(mask: np.ndarray) -> np.ndarray:
    """Return (turns, 2) int64: start and end of each run of 1s. mask: (length,) bool."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    return edges.reshape(-1, 2)


def read_sequences(
    root: Root, rows: pa.Table, known: pa.Table | None = None, computed: ReferenceIndex | None = None
) -> Sequences:
    """Read the tokens of ledger rows, in their order, also of rows that compaction has moved.

    known: rows that were read already, BatchPlan.tokens. Missing response_logprobs are taken from `computed`, else NaN.
    Raises StoreError if a file is missing or broken. A broken file is quarantined: the next trainer plans without it.
    """
    if rows.num_rows == 0:
        return Sequences.of([])
    if known is None:
        known = read_trained(root, rows)
    columns = _columns_of(known, rows, _READ)
    levels = columns.pop(CAPTURE)
    if any(level in WITHOUT_LOGPROBS for level in levels):
        columns["response_logprobs"] = _known_logprobs(rows["rollout_id"].to_pylist(), levels, columns, computed)
    return Sequences(
        rollout_id=rows["rollout_id"].to_pylist(),
        prompt_tokens=columns.pop("prompt_tokens"),
        response_tokens=columns.pop("response_tokens"),
        advantage=_advantages(rows),
        weight=rows["weight"].to_pylist(),
        temperature=columns.pop("temperature"),
        pair_id=rows["pair_id"].to_pylist(),
        columns=columns,
    )


def _known_logprobs(
    rollout_ids: Sequence[str],
    levels: Sequence[str | None],
    columns: Mapping[str, Sequence[Any]],
    computed: ReferenceIndex | None,
) -> list[np.ndarray]:
    """Return response_logprobs of rows; missing ones from `computed`, else NaN. levels: `capture`."""
    lacking = [rollout_id for rollout_id, level in zip(rollout_ids, levels, strict=True) if level in WITHOUT_LOGPROBS]
    found = {} if computed is None else computed.read(dict.fromkeys(lacking), _raise_for_broken)
    known: list[np.ndarray] = []
    for rollout_id, level, logprobs, mask in zip(
        rollout_ids, levels, columns["response_logprobs"], columns["action_mask"], strict=True
    ):
        if level in WITHOUT_LOGPROBS:
            own = found.get(rollout_id, np.zeros(0, np.float32))
            logprobs = np.append(own, np.full(len(logprobs) - len(own), np.nan, np.float32))
            logprobs = logprobs if mask is None else np.where(mask, logprobs, np.float32(0))
        known.append(logprobs)
    return known


def _raise_for_broken(error: Exception, where: str) -> None:
    raise StoreError(
        f"{where} holds computed logprobs, and can't be read any more ({error}); start the trainer again to "
        "compute them again"
    ) from error


def _read_requested(
    root: Root, rows: pa.Table, name: str, reason_against: Callable[[Any, int], str | None]
) -> list[Any]:
    """Return a column that is trained on request, of ledger rows; None where it is absent, or unusable for this model.

    reason_against: returns why the values of a row, for a number of tokens, can't be used; None if they can. A row with
    unusable values is trained on without them, like a row without values.
    """
    if rows.num_rows == 0:
        return []
    column, stored = array_columns()[name], _columns_of(read_trained(root, rows, [name]), rows, [name])[name]
    prompts, responses = (rows[each].to_pylist() for each in ("prompt_length", "response_length"))
    reasons = [
        None if values is None else reason_against(values, column.length(prompt, response))
        for values, prompt, response in zip(stored, prompts, responses, strict=True)
    ]
    bad = [index for index, reason in enumerate(reasons) if reason is not None]
    if bad:
        logger.warning(
            "%s: the %s of %d rollouts are not used; those of the first, %s: %s %s",
            *(root.url, name, len(bad), rows["rollout_id"][bad[0]].as_py(), name, reasons[bad[0]]),
        )
    return [None if reason else values for values, reason in zip(stored, reasons, strict=True)]


def read_trained(root: Root, rows: pa.Table, columns: Sequence[str] = _READ) -> pa.Table:
    """Return columns of the rollouts of ledger rows, in the order of the files, beside the rows' own _KEYS.

    Raises StoreError as `read_sequences`.
    """
    # In the order of the files, whole row groups are not copied.
    rows = rows.sort_by([(name, "ascending") for name in ("file", "row_group", "row")])
    try:
        table = read_rollouts(root, rows, list(columns), on_broken=partial(quarantine, root))
    except SchemaError as error:
        raise StoreError(f"{error}; it was planned for a step: start the trainer again to make a new plan") from error
    for name in _KEYS:
        table = table.append_column(name, rows[name])
    return table


def _columns_of(table: pa.Table, rows: pa.Table, names: Sequence[str]) -> dict[str, list[Any]]:
    """Return columns of `read_trained` in the order of `rows`, which may be fewer."""
    indexes = pc.index_in(rows["rollout_id"], table["rollout_id"].combine_chunks()).to_pylist()
    arrays = array_columns()
    columns = {
        name: values_of(arrays[name], table[name]) if name in arrays else table[name].to_pylist() for name in names
    }
    return {name: [values[index] for index in indexes] for name, values in columns.items()}


def _advantages(rows: pa.Table) -> list[float | np.ndarray]:
    """Return each row's advantage: a number, or (response_length,) float32 if the advantage SQL gives one per token."""
    pairs = zip(rows["token_advantages"].to_numpy(), rows["advantage"].to_pylist(), strict=True)
    return [one if per_token is None else per_token for per_token, one in pairs]


def _row_groups(rows: pa.Table) -> np.ndarray:
    """Return (num_rows,) int64: number, from 0, of the row group that each row was planned from."""
    keys = list(zip(*(rows[name].to_pylist() for name in ("root", "file", "row_group")), strict=True))
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys], np.int64)


# --- Vetting -------------------------------------------------------------------------------------------
# Check the rows that a plan has chosen, before the ledger records that a step trains on them.
#
# A plan is made from scalars, but a row's arrays may still be unusable: ids beyond the model's embedding, invalid
# logprobs. The ledger is written before the step, and every later trainer makes the same plan again, so one such row
# would end the run permanently. The columns read here are those of training; rank 0 keeps them for its own share of the
# batch (BatchPlan.tokens).

_MOST_NAMED = 5
"""Maximum number of rows of one check that the log, or an error, names."""


class Vetting:
    """Finds the rows that can't be trained on, and keeps the tokens that it read last."""

    def __init__(self, root: Root) -> None:
        """root: run whose model is trained. Raises ModelError if its model/ is damaged."""
        self._root, self._vocab_size = root, vocabulary_of(root)
        self.tokens: pa.Table | None = None
        """Tokens of the rows of the last check; see `read_trained`."""
        self.not_computed: Collection[str] = ()
        """rollout_ids of rows whose logprobs should have been computed, but were not."""

    def find(self, rows: pa.Table) -> list[str]:
        """Return the rollout_ids of rows that can't be trained on, and name them in the log.

        rows: rollout_id, group_id, the address with root, prompt_length and response_length.
        """
        found = self._look(rows)
        for rollout_id in rows["rollout_id"].to_pylist() if self.not_computed else ():
            if rollout_id in self.not_computed:
                found.setdefault(rollout_id, "response_logprobs are not computed: a filter dropped the row at first")
        if found:
            logger.warning("%s: %s; they are dropped as untrainable", self._root.url, _describe(found, rows.num_rows))
        return list(found)

    def check(self, rows: pa.Table, where: str, *, needs_logprobs: bool = False) -> None:
        """Raise ConfigError if a row, which must be used unchanged, has token ids beyond the embedding.

        Logprobs only have to be finite: an older ludic trained on others, within its bound of the ratio. where: the
        plan, for errors. needs_logprobs: refuse rows without stored logprobs.
        """
        found = self._look(rows, any_logprob=True)
        if found:
            raise ConfigError(
                f"{where}: {_describe(found, rows.num_rows)}, and a replay leaves nothing out; train on these rollouts "
                "in another way, such as offline, which drops them"
            )
        levels = [] if self.tokens is None else self.tokens[CAPTURE].to_pylist()
        if needs_logprobs and (num_without := sum(level in WITHOUT_LOGPROBS for level in levels)):
            raise ConfigError(
                f"{where}: the sampler's logprobs of {num_without} of {rows.num_rows} rows were not stored, and a "
                "replay computes none; train on these rollouts offline, with compute_logprobs if token ids were kept"
            )

    def _look(self, rows: pa.Table, *, any_logprob: bool = False) -> dict[str, str]:
        """Return the problems by rollout_id."""
        self.tokens = None
        if rows.num_rows == 0:
            return {}
        tokens = self.tokens = read_trained(self._root, rows)
        found = find_untrainable(tokens, self._vocab_size, any_logprob=any_logprob)
        ids = tokens["rollout_id"]
        return {ids[row].as_py(): reason for row, reason in found.items()}


def _describe(found: Mapping[str, str], num_rows: int) -> str:
    named = [f"rollout {rollout_id}: {reason}" for rollout_id, reason in list(found.items())[:_MOST_NAMED]]
    if len(found) > len(named):
        named.append(f"and {len(found) - len(named)} more")
    return f"{len(found)} of {num_rows} rows can't be trained on ({'; '.join(named)})"
