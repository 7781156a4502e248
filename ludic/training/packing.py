"""Rollouts to micro-batches: balanced over ranks, laid end to end without padding.

Pure NumPy and CPU tensors; no I/O. A sequence that cannot be trained on raises InvalidBatchError
naming its rollout.
"""

# Shapes: T = packed tokens of a micro-batch, A = response tokens among them.

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ludic.errors import InvalidBatchError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSequence:
    """What the loss needs of one rollout."""

    rollout_id: str
    prompt_tokens: np.ndarray
    """(prompt_length,) int32, at least one."""
    response_tokens: np.ndarray
    """(response_length,) int32; every list below is as long."""
    sampler_logprobs: np.ndarray
    """(response_length,) float32, nats, of the distribution sampled from."""
    action_mask: np.ndarray | None = None
    """(response_length,) bool, 1 for sampled tokens; None when all are."""
    advantage: float | np.ndarray
    """Of the whole response, or (response_length,) float32 for each token."""
    weight: float = 1.0
    """Multiplies the sequence's loss."""
    temperature: float = 1.0
    """Divides the trainer's logits, as it did the sampler's."""
    pair_id: str | None = None
    """That of the other side too, where sequences are compared in pairs; both must be packed together."""

    def __post_init__(self) -> None:
        for name in ("sampler_logprobs", "action_mask", "advantage"):
            value = getattr(self, name)
            if isinstance(value, np.ndarray) and value.shape != self.response_tokens.shape:
                raise InvalidBatchError(
                    f"rollout {self.rollout_id}: {name} has shape {value.shape}, "
                    f"response_tokens has {self.response_tokens.shape}; both must be one value a response token"
                )
        if len(self.prompt_tokens) == 0:
            raise InvalidBatchError(
                f"rollout {self.rollout_id}: prompt_tokens is empty; the first response token has nothing to predict it"
            )
        if not 0 < self.temperature < float("inf"):
            raise InvalidBatchError(
                f"rollout {self.rollout_id}: temperature is {self.temperature}, wanted above 0; "
                "greedy samples can't be trained on, drop them with a filter"
            )

    @property
    def num_tokens(self) -> int:
        """Prompt and response; 0 without a response, since nothing is left to predict and `pack` leaves it out."""
        return len(self.prompt_tokens) + len(self.response_tokens) if len(self.response_tokens) else 0

    @property
    def num_action_tokens(self) -> int:
        """Tokens that the loss is taken over."""
        return len(self.response_tokens) if self.action_mask is None else int(np.count_nonzero(self.action_mask))


def cap(sequence: TrainingSequence, max_seq_len: int) -> tuple[TrainingSequence, bool]:
    """The sequence with at most max_seq_len tokens, cut from the end of its response; and whether it was cut.

    A prompt that alone is as long leaves an empty response.
    """
    kept = max(0, max_seq_len - len(sequence.prompt_tokens))
    if len(sequence.response_tokens) <= kept:
        return sequence, False
    mask, advantage = sequence.action_mask, sequence.advantage
    shorter = replace(
        sequence,
        response_tokens=sequence.response_tokens[:kept],
        sampler_logprobs=sequence.sampler_logprobs[:kept],
        action_mask=None if mask is None else mask[:kept],
        advantage=advantage[:kept] if isinstance(advantage, np.ndarray) else advantage,
    )
    return shorter, True


def assign(lengths: np.ndarray, num_ranks: int, micro_token_budget: int) -> list[list[list[int]]]:
    """Which sequences each rank takes in each of its micro-batches: [rank][micro_batch] -> indexes.

    lengths: (num_sequences,) tokens of each sequence. A micro-batch holds at most
    micro_token_budget tokens, save that a longer sequence gets one of its own. Every rank gets
    the same number of micro-batches, some of them empty: FSDP's collectives need every rank in
    each. Deterministic.
    """
    plans = [_fill(share, lengths, micro_token_budget) for share in _share(lengths, num_ranks)]
    num_micro_batches = max(len(plan) for plan in plans)
    return [plan + [[] for _ in range(num_micro_batches - len(plan))] for plan in plans]


def assign_pairs(
    lengths: np.ndarray, pair_ids: Sequence[str | None], num_ranks: int, micro_token_budget: int
) -> list[list[list[int]]]:
    """`assign`, with both sequences of a pair_id in one micro-batch: dealt out like one that is as long as both."""
    members: dict[str | int, list[int]] = {}
    for index, pair_id in enumerate(pair_ids):
        members.setdefault(index if pair_id is None else pair_id, []).append(index)
    units = list(members.values())
    unit_lengths = np.array([lengths[unit].sum() for unit in units], np.int64)
    plan = assign(unit_lengths, num_ranks, micro_token_budget)
    return [[[index for unit in micro_batch for index in units[unit]] for micro_batch in rank] for rank in plan]


def _share(lengths: np.ndarray, num_ranks: int) -> list[list[int]]:
    """Longest first, each to the rank with the fewest tokens so far (Graham 1969, LPT)."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in np.argsort(-lengths, kind="stable").tolist():
        tokens, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (tokens + int(lengths[index]), rank))
    return shares


def _fill(share: list[int], lengths: np.ndarray, budget: int) -> list[list[int]]:
    """First fit: each sequence, longest first, into the first micro-batch that has room."""
    micro_batches: list[list[int]] = []
    room: list[int] = []
    for index in share:
        tokens = int(lengths[index])
        place = next((i for i, free in enumerate(room) if tokens <= free), None)
        if place is None:
            place = len(room)
            micro_batches.append([])
            room.append(budget)
        micro_batches[place].append(index)
        room[place] -= tokens
    return micro_batches


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Sequences laid end to end, as tensors. A is at least 1."""

    input_ids: Tensor
    """(1, T) int64."""
    position_ids: Tensor
    """(1, T) int64, from 0 again at each sequence; that is what isolates sequences."""
    logit_positions: Tensor
    """(A,) int64, indexes into T: the token whose logits predict the response token."""
    targets: Tensor
    """(A,) int64, the response tokens."""
    sampler_logprobs: Tensor
    """(A,) float32, nats."""
    advantages: Tensor
    """(A,) float32."""
    action_mask: Tensor
    """(A,) bool: the loss is taken here."""
    weights: Tensor
    """(A,) float32."""
    temperatures: Tensor
    """(A,) float32."""
    sequence_ids: Tensor
    """(A,) int64, counts the sequences that were packed, from 0."""
    pair_ids: Tensor
    """(A,) int64, the first sequence_id of the pair; without a pair, its own."""
    rollout_ids: tuple[str, ...]
    """Of each sequence_id; none in a rank's empty micro-batch."""

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}
        moved: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        return replace(self, **moved)


# A rank without sequences still takes part in the collectives of forward and backward. Its one
# token has action_mask 0, so that its loss and its gradient are zero.
_NOTHING = TrainingSequence(
    rollout_id="(none)",
    prompt_tokens=np.zeros(1, np.int32),
    response_tokens=np.zeros(1, np.int32),
    sampler_logprobs=np.zeros(1, np.float32),
    action_mask=np.zeros(1, bool),
    advantage=0.0,
)


def pack(sequences: Sequence[TrainingSequence]) -> MicroBatch:
    """Lay sequences end to end. Those with an empty response are left out; nothing at all becomes a masked dummy."""
    kept = [s for s in sequences if s.num_tokens] or [_NOTHING]
    firsts: dict[str, int] = {}
    lengths = np.array([len(s.response_tokens) for s in kept])
    # A response's last token predicts nothing, so it is a target but never an input.
    input_lengths = lengths + [len(s.prompt_tokens) - 1 for s in kept]
    inputs = [part for s in kept for part in (s.prompt_tokens, s.response_tokens[:-1])]

    def per_token(values: Sequence[float | np.ndarray], dtype: type) -> Tensor:
        if any(isinstance(value, np.ndarray) for value in values):
            pairs = zip(values, lengths, strict=True)
            full = [v if isinstance(v, np.ndarray) else np.broadcast_to(v, length) for v, length in pairs]
            return torch.from_numpy(np.concatenate(full, dtype=dtype, casting="unsafe"))
        return torch.from_numpy(np.repeat(np.array(values, dtype), lengths))

    return MicroBatch(
        input_ids=torch.from_numpy(np.concatenate(inputs, dtype=np.int64))[None],
        position_ids=torch.from_numpy(_count_from(np.zeros_like(lengths), input_lengths))[None],
        logit_positions=torch.from_numpy(_count_from(np.cumsum(input_lengths) - lengths, lengths)),
        targets=per_token([s.response_tokens for s in kept], np.int64),
        sampler_logprobs=per_token([s.sampler_logprobs for s in kept], np.float32),
        advantages=per_token([s.advantage for s in kept], np.float32),
        action_mask=per_token([True if s.action_mask is None else s.action_mask for s in kept], np.bool_),
        weights=per_token([s.weight for s in kept], np.float32),
        temperatures=per_token([s.temperature for s in kept], np.float32),
        sequence_ids=per_token(range(len(kept)), np.int64),
        pair_ids=per_token(
            [i if s.pair_id is None else firsts.setdefault(s.pair_id, i) for i, s in enumerate(kept)], np.int64
        ),
        rollout_ids=tuple(s.rollout_id for s in kept if s is not _NOTHING),
    )


def _count_from(firsts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(sum of lengths,) int64: for each length, so many numbers that count up from its first."""
    return np.arange(lengths.sum()) + np.repeat(firsts - (np.cumsum(lengths) - lengths), lengths)
