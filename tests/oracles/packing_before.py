"""The functions of before the catalogue of columns (commit b33740f4), copied without a change: an oracle.

Issue 37 rewrites how sequences are cut and packed. tests/batches/test_packing_as_before.py compares both.
This file goes when the issue ends. It imports nothing that the issue rewrites.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, pairwise
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from ludic.errors import InvalidBatchError

V = TypeVar("V")

UNKNOWN_EXPERT = -1

LEFT_OUT = -1e30
"""Logit of a token that was left out: its probability is 0, and, unlike -inf, 0 times it is 0."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """Kept tokens of one sequence. A token without any was drawn from the whole vocabulary, or was not sampled."""

    ids: np.ndarray
    """(K,) int32."""
    bounds: np.ndarray
    """(n + 1,) int: where each response token's ids begin, and where the last one's end."""

    @property
    def shape(self) -> tuple[int]:
        """Number of response tokens, as of an array with a value for each."""
        return (len(self.bounds) - 1,)

    def __getitem__(self, part: slice) -> "KeptTokens":
        start, stop, _ = part.indices(*self.shape)
        bounds = self.bounds[start : max(start, stop) + 1]
        return KeptTokens(self.ids[bounds[0] : bounds[-1]], bounds - bounds[0])


@dataclass(frozen=True, slots=True, eq=False)
class PackedKeptTokens:
    """Kept tokens of a micro-batch."""

    ids: Tensor
    """(K,) int64."""
    rows: Tensor
    """(K,) int64: index of the response token that an id belongs to."""
    is_cut: Tensor
    """(A,) bool: response tokens that have kept tokens."""
    bounds: np.ndarray
    """(A + 1,) int64: where each token's ids begin. Not a tensor, so that reading it never waits for a device."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Self:
        """Return a copy on another device."""
        ids, rows, is_cut = (each.to(device, non_blocking=non_blocking) for each in (self.ids, self.rows, self.is_cut))
        return replace(self, ids=ids, rows=rows, is_cut=is_cut)

    def leave_out(self, logits: Tensor, start: int) -> Tensor:
        """Set the logits of tokens that were not kept to LEFT_OUT, in place. logits: (C, V), of rows from `start`."""
        stop = start + len(logits)
        part = slice(int(self.bounds[start]), int(self.bounds[stop]))
        is_out = self.is_cut[start:stop, None].repeat(1, logits.shape[1])
        is_out[self.rows[part] - start, self.ids[part]] = False
        return logits.masked_fill_(is_out, LEFT_OUT)


def pack_kept_tokens(kept: Sequence[KeptTokens | None], lengths: Sequence[int]) -> PackedKeptTokens | None:
    """Lay the kept tokens of sequences end to end; None if there are none. lengths: response tokens of each."""
    if all(each is None for each in kept):
        return None
    pairs = list(zip(kept, lengths, strict=True))
    counts = np.concatenate([np.zeros(n, np.int64) if each is None else np.diff(each.bounds) for each, n in pairs])
    ids = np.concatenate([each.ids for each in kept if each is not None])
    return PackedKeptTokens(
        ids=torch.from_numpy(ids.astype(np.int64)),
        rows=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
        is_cut=torch.from_numpy(counts > 0),
        bounds=np.append(0, np.cumsum(counts)),
    )


_PER_TOKEN = ("sampler_logprobs", "action_mask", "advantage", "kept_tokens")
_LISTS = (np.ndarray, KeptTokens)
"""Types of a sequence's columns that have a value for each response token."""
_PER_ROW = ("rollout_id", "weight", "temperature", "pair_id")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSequence:
    """Fields of one rollout that the loss needs."""

    rollout_id: str
    prompt_tokens: np.ndarray
    """(prompt_length,) int32, at least one."""
    response_tokens: np.ndarray
    """(response_length,) int32; the arrays below have the same length."""
    sampler_logprobs: np.ndarray
    """(response_length,) float32, nats, under the distribution sampled from."""
    action_mask: np.ndarray | None = None
    """(response_length,) bool, 1 for sampled tokens; None if all tokens are sampled."""
    advantage: float | np.ndarray
    """Advantage of the whole response, or (response_length,) float32 per token."""
    weight: float = 1.0
    """Factor of the sequence's loss."""
    temperature: float = 1.0
    """Divisor of the trainer's logits, the same as the sampler's."""
    pair_id: str | None = None
    """Id shared by both sequences of a pair, which must be packed together; None without a pair."""
    kept_tokens: KeptTokens | None = None
    """Tokens that the sampler drew each response token from; None if it drew from all."""
    experts: np.ndarray | None = None
    """(prompt_length + response_length - 1, L, K) int16: K experts, ascending, in each of L layers, that the model is
    to send each token to that it reads; None leaves them to its routers."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response; 0 if the response is empty, since `pack` leaves such a sequence out."""
        return _num_tokens(self.prompt_tokens, self.response_tokens)

    @property
    def num_action_tokens(self) -> int:
        """Tokens that the loss is computed over."""
        return _num_action_tokens(self.action_mask, self.response_tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequences:
    """S training sequences as columns, like in the files: no object per sequence, and no copy of tokens.

    Columns are named like the fields of TrainingSequence. Raises InvalidBatchError if a list is not as long as its
    response, a prompt is empty, or a temperature is not finite and above 0.
    """

    rollout_id: Sequence[str]
    prompt_tokens: Sequence[np.ndarray]
    response_tokens: Sequence[np.ndarray]
    sampler_logprobs: Sequence[np.ndarray]
    action_mask: Sequence[np.ndarray | None]
    advantage: Sequence[float | np.ndarray]
    weight: Sequence[float]
    temperature: Sequence[float]
    pair_id: Sequence[str | None]
    kept_tokens: Sequence[KeptTokens | None]
    experts: Sequence[np.ndarray | None]

    def __post_init__(self) -> None:
        for name in _PER_TOKEN:
            self._check_lengths(name)
        self._check_experts()
        for rollout_id, prompt, temperature in zip(self.rollout_id, self.prompt_tokens, self.temperature, strict=True):
            if len(prompt) == 0:
                raise InvalidBatchError(
                    f"rollout {rollout_id}: prompt_tokens is empty; the first response token has nothing to predict it"
                )
            if not 0 < temperature < float("inf"):
                raise InvalidBatchError(
                    f"rollout {rollout_id}: temperature is {temperature}, wanted above 0; "
                    "greedy samples can't be trained on, drop them with a filter"
                )

    def _check_lengths(self, name: str) -> None:
        for rollout_id, values, tokens in zip(self.rollout_id, getattr(self, name), self.response_tokens, strict=True):
            if isinstance(values, _LISTS) and values.shape != tokens.shape:
                raise InvalidBatchError(
                    f"rollout {rollout_id}: {name} has shape {values.shape}, "
                    f"response_tokens has {tokens.shape}; both must be one value a response token"
                )

    def _check_experts(self) -> None:
        rows = zip(self.rollout_id, self.experts, self.prompt_tokens, self.response_tokens, strict=True)
        for rollout_id, experts, prompt, response in rows:
            if experts is not None and len(experts) != (num_read := _num_read(prompt, response)):
                raise InvalidBatchError(
                    f"rollout {rollout_id}: experts has shape {experts.shape}, wanted experts of {num_read} tokens: "
                    "prompt_tokens, and response_tokens without the last one"
                )
        if len({experts.shape[1:] for experts in self.experts if experts is not None}) > 1:
            raise InvalidBatchError("experts are of models with different numbers of layers or of experts for a token")

    @classmethod
    def of(cls, sequences: Iterable[TrainingSequence]) -> Self:
        """Build the columns from single sequences."""
        rows = list(sequences)
        return cls(**{column.name: [getattr(row, column.name) for row in rows] for column in fields(cls)})

    def __len__(self) -> int:
        return len(self.rollout_id)

    @property
    def num_tokens(self) -> int:
        """Sum of TrainingSequence.num_tokens over the sequences."""
        return sum(map(_num_tokens, self.prompt_tokens, self.response_tokens))

    @property
    def num_action_tokens(self) -> int:
        """Sum of TrainingSequence.num_action_tokens over the sequences."""
        return sum(map(_num_action_tokens, self.action_mask, self.response_tokens))


def _num_tokens(prompt_tokens: np.ndarray, response_tokens: np.ndarray) -> int:
    return len(prompt_tokens) + len(response_tokens) if len(response_tokens) else 0


def _num_read(prompt_tokens: np.ndarray, response_tokens: np.ndarray) -> int:
    """Return the tokens that the model reads: a response's last token predicts nothing."""
    return max(0, len(prompt_tokens) + len(response_tokens) - 1)


def _num_action_tokens(action_mask: np.ndarray | None, response_tokens: np.ndarray) -> int:
    return len(response_tokens) if action_mask is None else int(np.count_nonzero(action_mask))


def cap(sequences: Sequences, max_seq_len: int) -> tuple[Sequences, int]:
    """Cut responses at the end to at most max_seq_len tokens per sequence; returns the sequences and how many were cut.

    A prompt of max_seq_len tokens or more leaves an empty response.
    """
    room = [max(0, max_seq_len - len(prompt)) for prompt in sequences.prompt_tokens]
    num_cut = sum(len(tokens) > most for tokens, most in zip(sequences.response_tokens, room, strict=True))

    def cut(column: Sequence[Any]) -> list[Any]:
        return [v[:most] if isinstance(v, _LISTS) else v for v, most in zip(column, room, strict=True)]

    if not num_cut:
        return sequences, 0
    lists = {name: cut(getattr(sequences, name)) for name in ("response_tokens", *_PER_TOKEN)}
    experts = _cut_experts(sequences.experts, sequences.prompt_tokens, lists["response_tokens"])
    return replace(sequences, **lists, experts=experts), num_cut


def _cut_experts(
    experts: Sequence[np.ndarray | None], prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]
) -> list[np.ndarray | None]:
    rows = zip(experts, prompts, responses, strict=True)
    return [None if each is None else each[: _num_read(prompt, response)] for each, prompt, response in rows]


def cut_out(sequences: Sequences, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Sequences:
    """Return parts of responses as sequences of their own; what came before a part is in its prompt.

    rows, starts, ends: (parts,) int64, index of the sequence, and bounds of the part in its response.
    """
    bounds = list(zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True))

    def cut(column: Sequence[Any]) -> list[Any]:
        return [v[start:end] if isinstance(v := column[row], _LISTS) else v for row, start, end in bounds]

    lists = {name: cut(getattr(sequences, name)) for name in ("response_tokens", *_PER_TOKEN)}
    others = {name: [getattr(sequences, name)[row] for row, *_ in bounds] for name in _PER_ROW}
    prompts = [
        np.concatenate([sequences.prompt_tokens[row], sequences.response_tokens[row][:start]])
        for row, start, _ in bounds
    ]
    experts = _cut_experts([sequences.experts[row] for row, *_ in bounds], prompts, lists["response_tokens"])
    return Sequences(prompt_tokens=prompts, experts=experts, **lists, **others)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Sequences laid end to end, as tensors. A is at least 1."""

    input_ids: Tensor
    """(1, T) int64."""
    position_ids: Tensor
    """(1, T) int64, restarting at 0 at each sequence, which isolates sequences."""
    logit_positions: Tensor
    """(A,) int64, indexes into T of the tokens whose logits predict the response tokens."""
    targets: Tensor
    """(A,) int64, the response tokens to predict."""
    sampler_logprobs: Tensor
    """(A,) float32, nats."""
    advantages: Tensor
    """(A,) float32."""
    action_mask: Tensor
    """(A,) bool: tokens that the loss is computed over."""
    weights: Tensor
    """(A,) float32."""
    temperatures: Tensor
    """(A,) float32."""
    sequence_ids: Tensor
    """(A,) int64, number of the packed sequence, from 0."""
    pair_ids: Tensor
    """(A,) int64, first sequence_id of the pair; without a pair, the token's own sequence_id."""
    rollout_ids: tuple[str, ...]
    """rollout_id of each sequence_id; empty in a rank's empty micro-batch."""
    sequence_lengths: tuple[int, ...]
    """Packed tokens of each sequence; the sum is T. Not a tensor, so that reading it never waits for a device."""
    kept_tokens: PackedKeptTokens | None = None
    """Tokens that the sampler drew response tokens from; None if it drew all from the whole vocabulary."""
    experts: Tensor | None = None
    """(T, L, K) int16: K experts, ascending, in each of L layers, that each token is sent to; UNKNOWN_EXPERT leaves a
    token to the routers. None leaves them all (ludic.models.experts)."""

    def to(self, device: torch.device) -> Self:
        """Return a copy on another device."""
        movable = (Tensor, PackedKeptTokens)
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), movable)}
        moved: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        return replace(self, **moved)


# A rank without sequences still takes part in the collectives of forward and backward. Its single
# token has action_mask 0, so its loss and gradient are zero.
_NOTHING = TrainingSequence(
    rollout_id="(none)",
    prompt_tokens=np.zeros(1, np.int32),
    response_tokens=np.zeros(1, np.int32),
    sampler_logprobs=np.zeros(1, np.float32),
    action_mask=np.zeros(1, bool),
    advantage=0.0,
)


def pack(sequences: Sequences | Sequence[TrainingSequence]) -> MicroBatch:
    """Lay sequences end to end, without those whose response is empty; if none is left, return a masked dummy."""
    columns = sequences if isinstance(sequences, Sequences) else Sequences.of(sequences)
    return pack_each(columns, [range(len(columns))])[0]


def pack_each(sequences: Sequences, plans: Sequence[Sequence[int]]) -> list[MicroBatch]:
    """Return the micro-batch of each plan, a list of indexes, as `pack` would make it; all share one memory block."""
    kept = [[index for index in plan if len(sequences.response_tokens[index])] for plan in plans]
    packed = iter(_pack_full(sequences, [indexes for indexes in kept if indexes]))
    return [next(packed) if indexes else replace(pack([_NOTHING]), rollout_ids=()) for indexes in kept]


def _pack_full(sequences: Sequences, plans: Sequence[Sequence[int]]) -> list[MicroBatch]:
    """Pack micro-batches. plans: indexes of each one's sequences, at least one, none with an empty response."""
    if not plans:
        return []
    indexes = list(chain.from_iterable(plans))

    def pick(column: Sequence[V]) -> list[V]:
        return [column[index] for index in indexes]

    prompts, responses = pick(sequences.prompt_tokens), pick(sequences.response_tokens)
    lengths = np.array([len(response) for response in responses])
    # A response's last token predicts nothing, so it is a target but never an input.
    input_lengths = lengths + [len(prompt) - 1 for prompt in prompts]
    inputs = [part for prompt, response in zip(prompts, responses, strict=True) for part in (prompt, response[:-1])]
    bounds = list(pairwise(accumulate(map(len, plans), initial=0)))
    ends = [end for start, stop in bounds for end in np.cumsum(input_lengths[start:stop]).tolist()]
    counting = np.arange(max(ends))

    out = _allocate(input_lengths.sum(), lengths.sum())
    np.concatenate(inputs, out=out["input_ids"])
    np.concatenate([counting[:length] for length in input_lengths.tolist()], out=out["position_ids"])
    logit_positions = [counting[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
    np.concatenate(logit_positions, out=out["logit_positions"])
    np.concatenate(responses, out=out["targets"])
    np.concatenate(pick(sequences.sampler_logprobs), out=out["sampler_logprobs"])
    _spread(pick(sequences.advantage), lengths, out["advantages"])
    _spread([True if mask is None else mask for mask in pick(sequences.action_mask)], lengths, out["action_mask"])
    _spread(pick(sequences.weight), lengths, out["weights"])
    _spread(pick(sequences.temperature), lengths, out["temperatures"])
    out["sequence_ids"][:] = np.repeat(np.concatenate([counting[: len(plan)] for plan in plans]), lengths)
    out["pair_ids"] = out["sequence_ids"]
    if any(pick(sequences.pair_id)):
        out["pair_ids"] = np.repeat(
            list(chain.from_iterable(_pair_numbers(sequences, plan) for plan in plans)), lengths
        )
    rollout_ids = [tuple(sequences.rollout_id[index] for index in plan) for plan in plans]
    packed_lengths = [tuple(input_lengths[start:stop].tolist()) for start, stop in bounds]
    num_targets = [int(lengths[start:stop].sum()) for start, stop in bounds]
    kept = [
        pack_kept_tokens([sequences.kept_tokens[index] for index in plan], lengths[start:stop].tolist())
        for plan, (start, stop) in zip(plans, bounds, strict=True)
    ]
    experts = [
        _pack_experts([sequences.experts[index] for index in plan], input_lengths[start:stop].tolist())
        for plan, (start, stop) in zip(plans, bounds, strict=True)
    ]
    return _split(out, packed_lengths, num_targets, rollout_ids, kept, experts)


def _pack_experts(experts: Sequence[np.ndarray | None], lengths: Sequence[int]) -> Tensor | None:
    """Lay the experts of sequences end to end; None if there are none. lengths: tokens that are read of each."""
    shapes = [each.shape[1:] for each in experts if each is not None]
    if not shapes:
        return None
    rows = zip(experts, lengths, strict=True)
    parts = [np.full((length, *shapes[0]), UNKNOWN_EXPERT, np.int16) if each is None else each for each, length in rows]
    return torch.from_numpy(np.concatenate(parts))


def _pair_numbers(sequences: Sequences, plan: Sequence[int]) -> list[int]:
    """Return for each sequence of a micro-batch the number of its pair's first sequence, or its own if unpaired."""
    firsts: dict[str, int] = {}
    pair_ids = [sequences.pair_id[index] for index in plan]
    return [i if pair_id is None else firsts.setdefault(pair_id, i) for i, pair_id in enumerate(pair_ids)]


# Wide types first, so that each field is aligned.
_FIELDS = {
    **dict.fromkeys(("input_ids", "position_ids", "logit_positions", "targets", "sequence_ids"), np.int64),
    **dict.fromkeys(("sampler_logprobs", "advantages", "weights", "temperatures"), np.float32),
    "action_mask": np.bool_,
}
_OF_INPUTS = ("input_ids", "position_ids")


def _allocate(num_inputs: int, num_targets: int) -> dict[str, np.ndarray]:
    """Allocate each field of all micro-batches, in one memory block.

    Mapping new pages costs more than writing to them. A block of this size gets large pages, or is reused for the
    next batch.
    """
    counts = {name: num_inputs if name in _OF_INPUTS else num_targets for name in _FIELDS}
    sizes = [counts[name] * np.dtype(dtype).itemsize for name, dtype in _FIELDS.items()]
    pieces = np.split(np.empty(sum(sizes), np.uint8), np.cumsum(sizes)[:-1])
    return {name: piece.view(dtype) for (name, dtype), piece in zip(_FIELDS.items(), pieces, strict=True)}


def _spread(values: Sequence[Any], lengths: np.ndarray, out: np.ndarray) -> None:
    """Write values end to end into `out`: arrays have one value per response token, scalars are repeated."""
    if any(isinstance(value, np.ndarray) for value in values):
        lists = [np.broadcast_to(value, length) for value, length in zip(values, lengths.tolist(), strict=True)]
        np.concatenate(lists, out=out)
    elif all(value == values[0] for value in values):  # usual for masks, weights and temperatures
        out.fill(values[0])
    else:
        out[:] = np.repeat(np.array(values, out.dtype), lengths)


def _split(
    arrays: Mapping[str, np.ndarray],
    packed_lengths: Sequence[tuple[int, ...]],
    num_targets: Sequence[int],
    rollout_ids: Sequence[tuple[str, ...]],
    kept_tokens: Sequence[PackedKeptTokens | None],
    experts: Sequence[Tensor | None],
) -> list[MicroBatch]:
    """Split the arrays into micro-batches, given each one's packed tokens by sequence and its response tokens."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    num_inputs = [sum(lengths) for lengths in packed_lengths]
    pieces = {
        name: tensor[None].split(num_inputs, dim=1) if name in _OF_INPUTS else tensor.split(num_targets)
        for name, tensor in tensors.items()
    }
    return [
        MicroBatch(
            **{name: pieces[name][number] for name in pieces},
            rollout_ids=ids,
            sequence_lengths=lengths,
            kept_tokens=kept,
            experts=of_experts,
        )
        for number, (ids, lengths, kept, of_experts) in enumerate(
            zip(rollout_ids, packed_lengths, kept_tokens, experts, strict=True)
        )
    ]
