"""Pack rollouts into micro-batches, balanced over ranks and without padding.

Pure NumPy and CPU tensors; no I/O. Raises InvalidBatchError, which names the rollout, if a sequence can't be trained
on.
"""

# Shapes: S = sequences, n = response tokens of a sequence, T = packed tokens of a micro-batch, A = response tokens
# among them, N = A or T, K = numbers of a ragged column, R = ranks, G = row groups.

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields, replace
from functools import partial
from itertools import accumulate, chain, pairwise, repeat, zip_longest
from operator import is_
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from ludic.errors import InvalidBatchError
from ludic.records import ArrayColumn, Columns, Ragged, array_columns

V = TypeVar("V")


def _is_none(values: Iterable[Any]) -> Iterable[bool]:
    """Return for each value whether it is None; arrays can't be compared with None."""
    return map(is_, values, repeat(None))


# --- Sequences -----------------------------------------------------------------------------------------

_ALWAYS = ("response_logprobs", "action_mask")
"""Columns that every loss reads: a micro-batch always has them."""
_TOKENS = ("prompt_tokens", "response_tokens")
"""Arrays of a row that are separate fields here, and separate tensors in a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSequence:
    """Fields of one rollout that the loss needs."""

    rollout_id: str
    prompt_tokens: np.ndarray
    """(prompt_length,) int32, at least one."""
    response_tokens: np.ndarray
    """(response_length,) int32."""
    advantage: float | np.ndarray
    """Advantage of the whole response, or (response_length,) float32 per token."""
    weight: float = 1.0
    """Factor of the sequence's loss."""
    temperature: float = 1.0
    """Divisor of the trainer's logits, the same as the sampler's."""
    pair_id: str | None = None
    """Id shared by both sequences of a pair, which must be packed together; None without a pair."""
    columns: Columns
    """Every other array that training reads, as in Rollout.columns; response_logprobs must be there. One that is left
    out is absent: without action_mask, all tokens are sampled."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response; 0 if the response is empty, since `pack` leaves such a sequence out."""
        return _num_tokens(self.prompt_tokens, self.response_tokens)

    @property
    def num_action_tokens(self) -> int:
        """Tokens that the loss is computed over."""
        return _num_action_tokens(self.columns.get("action_mask"), self.response_tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequences:
    """S training sequences as columns, like in the files: no object per sequence, and no copy of tokens.

    Fields are named like those of TrainingSequence. Raises InvalidBatchError if an array is not as long as its tokens,
    or differs from another row's in its shape beyond the tokens, a prompt is empty, or a temperature is not finite and
    above 0.
    """

    rollout_id: Sequence[str]
    prompt_tokens: Sequence[np.ndarray]
    response_tokens: Sequence[np.ndarray]
    advantage: Sequence[float | np.ndarray]
    weight: Sequence[float]
    temperature: Sequence[float]
    pair_id: Sequence[str | None]
    columns: Mapping[str, Sequence[Any]]
    """Values of the sequences by the name of the column; None where it is absent."""
    is_sound: InitVar[bool] = False
    """True if the checks are skipped, for parts of sequences that passed them."""

    def __post_init__(self, is_sound: bool) -> None:
        if is_sound:
            return
        prompts, responses = list(map(len, self.prompt_tokens)), list(map(len, self.response_tokens))
        for name in dict.fromkeys((*_ALWAYS, *self.columns)):
            self._check_column(name, prompts, responses)
        rows = zip(
            self.rollout_id, self.prompt_tokens, self.response_tokens, self.advantage, self.temperature, strict=True
        )
        for rollout_id, prompt, response, advantage, temperature in rows:
            if isinstance(advantage, np.ndarray) and advantage.shape != response.shape:
                raise InvalidBatchError(
                    f"rollout {rollout_id}: advantage has shape {advantage.shape}, "
                    f"response_tokens has {response.shape}; both must be one value a response token"
                )
            if len(prompt) == 0:
                raise InvalidBatchError(
                    f"rollout {rollout_id}: prompt_tokens is empty; the first response token has nothing to predict it"
                )
            if not 0 < temperature < float("inf"):
                raise InvalidBatchError(
                    f"rollout {rollout_id}: temperature is {temperature}, wanted above 0; "
                    "greedy samples can't be trained on, drop them with a filter"
                )

    def _check_column(self, name: str, prompts: list[int], responses: list[int]) -> None:
        """Check one column. prompts, responses: lengths of each row's tokens."""
        column, of_rows = array_columns().get(name), self.column(name)
        if column is None:
            raise InvalidBatchError(f"{name} is not an array of a row, wanted one of {', '.join(array_columns())}")
        if self._fits(column, prompts, responses):
            return
        shapes: dict[tuple[int, ...], str] = {}
        for rollout_id, prompt, response, values in zip(self.rollout_id, prompts, responses, of_rows, strict=True):
            if values is None or not _has_dimensions(column, values):
                reason = column.misfit(values)
            else:
                reason = column.wrong_length(values, prompt, response)
                if column.along == "row" or len(values):  # without tokens there is no shape
                    shapes.setdefault(_beyond_tokens(column, values), rollout_id)
            if reason is not None:
                raise InvalidBatchError(f"rollout {rollout_id}: {name} {reason}")
        if len(shapes) > 1:
            (shape, one), (other_shape, other), *_ = shapes.items()
            raise InvalidBatchError(
                f"rollout {other}: {name} is {other_shape} numbers a token, that of rollout {one} {shape}; the rows of "
                "a batch must have the same shape, leave some out with a filter"
            )

    def _fits(self, column: ArrayColumn, prompts: list[int], responses: list[int]) -> bool:
        """Return whether a column is sound, by a check of all rows at once. May be False for a sound column."""
        found, lengths = self.column(column.name), {"prompt": prompts, "response": responses}.get(column.along)
        if len(found) != len(self):
            return False
        if lengths is None:
            lengths = [] if column.along == "row" else list(map(column.length, prompts, responses))
        if any(_is_none(found)):
            if not column.is_nullable:
                return False
            rows = [index for index, values in enumerate(found) if values is not None]
            found, lengths = [found[index] for index in rows], [lengths[index] for index in rows if lengths]
        if not found:
            return True
        if column.along == "row" or set(map(type, found)) != {Ragged if column.ragged else np.ndarray}:
            return False
        first = found[0].shape
        if len(first) != (1 if column.ragged else column.num_dimensions) or 0 in first[1:]:
            return False
        return [values.shape for values in found] == [(length, *first[1:]) for length in lengths]

    def column(self, name: str) -> Sequence[Any]:
        """Return a column's value of each sequence; None where it is absent."""
        return self.columns[name] if name in self.columns else [None] * len(self)

    @classmethod
    def of(cls, sequences: Iterable[TrainingSequence]) -> Self:
        """Build the columns from single sequences."""
        rows = list(sequences)
        own = [column.name for column in fields(cls) if column.name != "columns"]
        names = dict.fromkeys(name for row in rows for name in row.columns)
        values: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in own}
        return cls(
            **values,
            columns={name: [row.columns.get(name) for row in rows] for name in names},
        )

    def __len__(self) -> int:
        return len(self.rollout_id)

    @property
    def num_tokens(self) -> int:
        """Sum of TrainingSequence.num_tokens over the sequences."""
        return sum(map(_num_tokens, self.prompt_tokens, self.response_tokens))

    @property
    def num_action_tokens(self) -> int:
        """Sum of TrainingSequence.num_action_tokens over the sequences."""
        return sum(map(_num_action_tokens, self.column("action_mask"), self.response_tokens))


def _has_dimensions(column: ArrayColumn, values: Any) -> bool:
    """Return whether values, which are not None, have the dimensions of the column."""
    if column.ragged or isinstance(values, Ragged):
        return column.ragged and isinstance(values, Ragged)
    is_of_type = column.along == "row" or isinstance(values, np.ndarray)
    return is_of_type and np.ndim(values) == column.num_dimensions


def _beyond_tokens(column: ArrayColumn, values: Any) -> tuple[int, ...]:
    """Return the shape of the numbers of one token."""
    return np.shape(values) if column.along == "row" else values.shape[1:]


def _num_tokens(prompt_tokens: np.ndarray, response_tokens: np.ndarray) -> int:
    return len(prompt_tokens) + len(response_tokens) if len(response_tokens) else 0


def _num_action_tokens(action_mask: np.ndarray | None, response_tokens: np.ndarray) -> int:
    return len(response_tokens) if action_mask is None else int(np.count_nonzero(action_mask))


def cap(sequences: Sequences, max_seq_len: int) -> tuple[Sequences, int]:
    """Cut responses at the end to at most max_seq_len tokens per sequence; return the sequences and the number of cut
    ones.

    A prompt of max_seq_len tokens or more leaves an empty response.
    """
    room = [max(0, max_seq_len - len(prompt)) for prompt in sequences.prompt_tokens]
    num_cut = sum(len(tokens) > most for tokens, most in zip(sequences.response_tokens, room, strict=True))
    if not num_cut:
        return sequences, 0
    rows = np.arange(len(sequences))
    ends = np.minimum([len(tokens) for tokens in sequences.response_tokens], room)
    return cut_out(sequences, rows, np.zeros_like(rows), ends), num_cut


def cut_out(sequences: Sequences, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Sequences:
    """Return parts of responses as separate sequences; the tokens before a part belong to its prompt.

    rows, starts, ends: (parts,) int64, index of the sequence, and bounds of the part in its response.
    """
    bounds = list(zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True))
    prompts, responses = sequences.prompt_tokens, sequences.response_tokens

    def of_row(values: Sequence[V]) -> list[V]:
        return [values[row] for row, *_ in bounds]

    def cut(column: ArrayColumn, values: Sequence[Any]) -> list[Any]:
        if all(_is_none(values)):
            return [None] * len(bounds)
        return [column.cut(values[row], len(prompts[row]), start, end) for row, start, end in bounds]

    return Sequences(
        rollout_id=of_row(sequences.rollout_id),
        prompt_tokens=[
            np.concatenate([prompts[row], responses[row][:start]]) if start else prompts[row]
            for row, start, _ in bounds
        ],
        response_tokens=[responses[row][start:end] for row, start, end in bounds],
        advantage=[
            v[start:end] if isinstance(v := sequences.advantage[row], np.ndarray) else v for row, start, end in bounds
        ],
        weight=of_row(sequences.weight),
        temperature=of_row(sequences.temperature),
        pair_id=of_row(sequences.pair_id),
        columns={name: cut(array_columns()[name], values) for name, values in sequences.columns.items()},
        is_sound=True,
    )


# --- Shares of ranks -----------------------------------------------------------------------------------
# Even in tokens or costs, with few row groups read by several ranks. A rank reads each row group that holds one of its
# sequences; a row group is the smallest unit to read in Parquet. So whole row groups are assigned, and a row group is
# split only if the ranks would otherwise be uneven.

EVEN = 1.02
"""Load of the fullest rank over the mean of all ranks up to which nothing is split."""
UNEVEN = 1.1
"""Imbalance above which row groups are split even if they are read twice: waiting for a rank costs more than
reading."""
MOST_READ = 1.2
"""Maximum tokens read by all ranks together over the tokens of all row groups, while the ranks are not UNEVEN."""


def costs_of(lengths: np.ndarray, attention_tokens: int) -> np.ndarray:
    """Return (S,) int64: operations of each sequence, over those of the weights for one token, times attention_tokens.

    lengths: (S,) int64 tokens of each sequence. attention_tokens: length at which attention, which grows with the
    square, takes as many operations as the weights (ludic.models.sizes).
    """
    return lengths * (lengths + attention_tokens)


def assign(
    lengths: np.ndarray,
    num_ranks: int,
    max_tokens_per_micro_batch: int,
    row_groups: np.ndarray | None = None,
    costs: np.ndarray | None = None,
) -> list[list[list[int]]]:
    """Assign sequences to the ranks' micro-batches: [rank][micro_batch] -> indexes. Deterministic.

    lengths: (S,) tokens of each sequence. row_groups: (S,) int64, see `deal`; by default each sequence is a row group.
    A micro-batch holds at most max_tokens_per_micro_batch tokens; a longer sequence gets its own. Every rank gets the
    same number of micro-batches, some of them empty, since FSDP's collectives need every rank in each.

    costs: (S,) int64 of `costs_of`. With them the ranks wait as little as possible for each other, which they do in
    each micro-batch; the dearest come first. None makes ranks even in tokens, and fills each
    micro-batch.
    """
    row_groups = np.arange(len(lengths)) if row_groups is None else row_groups
    shares = partial(_shares, lengths, num_ranks, row_groups)
    if costs is None:
        plans = [_fill(share, lengths, max_tokens_per_micro_batch) for share in shares(lengths)]
    else:
        choices = (
            _least_waiting(shares(loads), lengths, costs, max_tokens_per_micro_batch) for loads in (costs, lengths)
        )
        plans = min(choices, key=lambda plans: _lockstep_cost(plans, costs))
    num_micro_batches = max(len(plan) for plan in plans)
    return [plan + [[] for _ in range(num_micro_batches - len(plan))] for plan in plans]


def _shares(lengths: np.ndarray, num_ranks: int, row_groups: np.ndarray, loads: np.ndarray) -> list[list[int]]:
    """Return the indexes of each rank's sequences, longest first, as `deal` deals them."""
    ranks = deal(lengths, num_ranks, row_groups, loads)
    longest_first = np.argsort(-lengths, kind="stable")
    return [longest_first[ranks[longest_first] == rank].tolist() for rank in range(num_ranks)]


def assign_pairs(
    lengths: np.ndarray,
    pair_ids: Sequence[str | None],
    num_ranks: int,
    max_tokens_per_micro_batch: int,
    row_groups: np.ndarray | None = None,
    costs: np.ndarray | None = None,
) -> list[list[list[int]]]:
    """Assign sequences as `assign` does, but put both sequences of a pair_id into one micro-batch."""
    if not any(pair_ids):
        return assign(lengths, num_ranks, max_tokens_per_micro_batch, row_groups, costs)
    members: dict[str | int, list[int]] = {}
    for index, pair_id in enumerate(pair_ids):
        members.setdefault(index if pair_id is None else pair_id, []).append(index)
    units = list(members.values())
    unit_lengths = np.array([lengths[unit].sum() for unit in units], np.int64)
    unit_costs = None if costs is None else np.array([costs[unit].sum() for unit in units], np.int64)
    unit_row_groups = None if row_groups is None else row_groups[[unit[0] for unit in units]]
    plan = assign(unit_lengths, num_ranks, max_tokens_per_micro_batch, unit_row_groups, unit_costs)
    return [[[index for unit in micro_batch for index in units[unit]] for micro_batch in rank] for rank in plan]


def _fill(share: list[int], lengths: np.ndarray, budget: int) -> list[list[int]]:
    """First fit: put each sequence, longest first, into the first micro-batch that has room."""
    micro_batches: list[list[int]] = []
    room: list[int] = []
    for index in share:
        tokens = int(lengths[index])
        for number, free in enumerate(room):  # noqa: B007 - a generator would take twice as long
            if tokens <= free:
                break
        else:
            number = len(room)
            micro_batches.append([])
            room.append(budget)
        micro_batches[number].append(index)
        room[number] -= tokens
    return micro_batches


def _least_waiting(
    shares: list[list[int]], lengths: np.ndarray, costs: np.ndarray, budget: int
) -> list[list[list[int]]]:
    """Return the ranks' micro-batches, the dearest first, in which the ranks wait least for each other.

    Micro-batches that are even in costs are best, unless a sequence costs more than an even share:
    then those that were filled longest first are more alike on all ranks. Full ones leave little room to choose, so
    even ones are also tried with one more. Each choice is made for all ranks alike.
    """
    filled = [_fill(share, lengths, budget) for share in shares]
    fewest, choices = max(len(plan) for plan in filled), [filled]
    for num_micro_batches in (fewest, fewest + 1):
        levelled = [_level(share, lengths, costs, budget, num_micro_batches) for share in shares]
        plans = [plan for plan in levelled if plan is not None]
        choices += [plans] if len(plans) == len(shares) else []
    ordered = [[sorted(plan, key=lambda one: -int(costs[one].sum())) for plan in plans] for plans in choices]
    return min(ordered, key=lambda plans: _lockstep_cost(plans, costs))


def _lockstep_cost(plans: list[list[list[int]]], costs: np.ndarray) -> int:
    """Return the cost of a step: in each micro-batch, all ranks wait for the dearest one."""
    return sum(max(int(costs[one].sum()) for one in ones) for ones in zip_longest(*plans, fillvalue=[]))


def _level(
    share: list[int], lengths: np.ndarray, costs: np.ndarray, budget: int, num_micro_batches: int
) -> list[list[int]] | None:
    """Put each sequence, longest first, into the cheapest micro-batch with room (Graham 1969, LPT); None without."""
    levelled: list[list[int]] = [[] for _ in range(num_micro_batches)]
    room, loads = [budget] * num_micro_batches, [0] * num_micro_batches
    for index in share:
        tokens = int(lengths[index])
        with_room = [number for number in range(num_micro_batches) if tokens <= room[number] or not levelled[number]]
        if not with_room:
            return None
        cheapest = min(with_room, key=loads.__getitem__)
        levelled[cheapest].append(index)
        room[cheapest] -= tokens
        loads[cheapest] += int(costs[index])
    return levelled


def deal(lengths: np.ndarray, num_ranks: int, row_groups: np.ndarray, costs: np.ndarray | None = None) -> np.ndarray:
    """Return (S,) int64: the rank of each sequence. Deterministic.

    lengths: (S,) int64 tokens of each sequence. row_groups: (S,) int64, number of the sequence's row group, from 0.
    costs: (S,) int64, load of each sequence; None is its tokens.

    Whole row groups are assigned, heaviest first, to the rank with the lowest load (Graham 1969, LPT). Then sequences
    move from the fullest rank to the emptiest until the ranks are EVEN, or until more than MOST_READ would be read and
    they are not UNEVEN, or until the load of every sequence of the fullest rank is at least the difference.
    """
    costs = lengths if costs is None else costs
    ranks = _deal_whole(costs, num_ranks, row_groups)
    while (moved := _even_out(ranks, lengths, costs, num_ranks, row_groups)) is not None:
        ranks = moved
    return ranks


def imbalance(loads: np.ndarray) -> float:
    """Return the load of the fullest rank over the mean; 1 if all are equal or 0. loads: (R,), of each rank."""
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def tokens_read(lengths: np.ndarray, ranks: np.ndarray, row_groups: np.ndarray) -> int:
    """Return the tokens of the row groups that each rank reads, summed over ranks; one rank reads lengths.sum()."""
    sizes = np.bincount(row_groups, lengths)
    pairs = np.unique(ranks * len(sizes) + row_groups)
    return int(sizes[pairs % len(sizes)].sum())


def _deal_whole(costs: np.ndarray, num_ranks: int, row_groups: np.ndarray) -> np.ndarray:
    sizes = np.bincount(row_groups, costs).astype(np.int64)
    rank_of = np.zeros(len(sizes), np.int64)
    loads = [(0, rank) for rank in range(num_ranks)]
    for row_group in np.argsort(-sizes, kind="stable").tolist():
        tokens, rank = heapq.heappop(loads)
        rank_of[row_group] = rank
        heapq.heappush(loads, (tokens + int(sizes[row_group]), rank))
    return rank_of[row_groups]


def _even_out(
    ranks: np.ndarray, lengths: np.ndarray, costs: np.ndarray, num_ranks: int, row_groups: np.ndarray
) -> np.ndarray | None:
    """Return the ranks after the move that adds the least to read; None if no move is needed or worthwhile.

    Every move lowers the sum of squared loads, so moves end.
    """
    loads = np.bincount(ranks, costs, num_ranks)
    if imbalance(loads) <= EVEN:
        return None
    fullest, emptiest = int(loads.argmax()), int(loads.argmin())
    difference = loads[fullest] - loads[emptiest]
    movable = (ranks == fullest) & (costs > 0) & (costs < difference)
    moves = []
    for row_group in np.unique(row_groups[movable]).tolist():
        moved = ranks.copy()
        moved[_fitting(np.flatnonzero(movable & (row_groups == row_group)), costs, difference / 2)] = emptiest
        left = abs(difference / 2 - costs[moved != ranks].sum())
        moves.append((tokens_read(lengths, moved, row_groups), left, row_group, moved))
    if not moves:
        return None
    num_read, *_, moved = min(moves, key=lambda move: move[:3])
    return moved if num_read <= MOST_READ * lengths.sum() or imbalance(loads) > UNEVEN else None


def _fitting(indexes: np.ndarray, costs: np.ndarray, wanted: float) -> list[int]:
    """Return the sequences, dearest first, that fit into the wanted load; if none fits, the cheapest."""
    by_cost = indexes[np.argsort(-costs[indexes], kind="stable")].tolist()
    fitting = []
    for index in by_cost:
        if costs[index] <= wanted:
            fitting.append(index)
            wanted -= costs[index]
    return fitting or by_cost[-1:]


# --- Micro-batches -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PackedRagged:
    """A ragged column of a micro-batch: a list of numbers for each of N tokens."""

    values: Tensor
    """(K,): the numbers of all lists, int64 if they are token ids, else of the column's dtype."""
    rows: Tensor
    """(K,) int64: index of the token that a number belongs to."""
    has_any: Tensor
    """(N,) bool: tokens whose list is not empty."""
    bounds: np.ndarray
    """(N + 1,) int64: where each token's numbers begin. Not a tensor, so that reading it never waits for a device."""

    @classmethod
    def of(cls, lists: Sequence[Ragged], dtype: Any) -> Self:
        """Lay the lists of sequences, at least one, end to end. dtype: of `values`."""
        counts = np.concatenate([each.counts for each in lists])
        return cls(
            values=torch.from_numpy(np.concatenate([each.values for each in lists], dtype=dtype)),
            rows=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
            has_any=torch.from_numpy(counts > 0),
            bounds=np.append(0, np.cumsum(counts)),
        )

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Self:
        """Return a copy on another device."""
        tensors = {name: getattr(self, name) for name in ("values", "rows", "has_any")}
        return replace(self, **{name: each.to(device, non_blocking=non_blocking) for name, each in tensors.items()})


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
    advantages: Tensor
    """(A,) float32."""
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
    absent: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The batch's other columns, which no row of this micro-batch has: the shape of the numbers of a token, as the
    rank's other rows of the step have it; 1 in each dimension where none has the column. With `columns`, the names are
    the same in all micro-batches of all ranks of a step."""
    columns: Mapping[str, Any]
    """Arrays of the rows by the name of their column. Always response_logprobs and action_mask; of the others, those
    that at least one row has. Along the response: (A, ...), beside targets; along the row: the same, repeated at each
    response token. Along the tokens read: (T, ...), beside input_ids; along the prompt: the same, and unknown at
    response tokens. A row without the column is unknown, too, which is the column's `null` (ArrayColumn.unknown). A
    ragged column is a PackedRagged, any other a Tensor. Token ids are int64, all else is of the column's dtype."""

    @property
    def sampler_logprobs(self) -> Tensor:
        """(A,) float32, nats."""
        return self.columns["response_logprobs"]

    @property
    def action_mask(self) -> Tensor:
        """(A,) bool: tokens that the loss is computed over."""
        return self.columns["action_mask"]

    @property
    def kept_tokens(self) -> PackedRagged | None:
        """Tokens that the sampler drew response tokens from; None if it drew all from the whole vocabulary."""
        return self.columns.get("kept_tokens")

    @property
    def experts(self) -> Tensor | None:
        """(T, L, K) int16: K experts, ascending, in each of L layers, that each token is sent to.

        A token of UNKNOWN_EXPERT is left to the routers; None leaves them all (ludic.models.experts).
        """
        return self.columns.get("experts")

    def column(self, name: str) -> Any:
        """Return a column, also one of `absent`: then one unknown value a token, on the device of the others.

        Raises KeyError if the batch does not have it, on every rank: prompt_tokens and response_tokens, which are
        input_ids and targets; a column that is trained on request, unless it was asked for; one that is not trained.
        """
        if name in self.columns:
            return self.columns[name]
        if name not in self.absent:
            raise KeyError(_why_not(name))
        column = array_columns()[name]
        num_tokens = self.input_ids.shape[1] if _is_of_inputs(column) else len(self.targets)
        unknown = column.unknown(num_tokens, like=np.empty((0, *self.absent[name])))
        if column.ragged:
            return PackedRagged.of([unknown], _dtype(column)).to(self.targets.device)
        return torch.from_numpy(unknown.astype(_dtype(column))).to(self.targets.device)

    def to(self, device: torch.device) -> Self:
        """Return a copy on another device."""
        movable = (Tensor, PackedRagged)
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), movable)}
        moved: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        columns = {name: each.to(device, non_blocking=True) for name, each in self.columns.items()}
        return replace(self, **moved, columns=columns)


def _why_not(name: str) -> str:
    """Describe why a column is in no micro-batch of a batch, and the remedy."""
    if (column := array_columns().get(name)) is None:
        return f"{name} is not an array of a row, wanted one of {', '.join(array_columns())}"
    if name in _TOKENS:
        return f"{name} is not a column of a batch: its tokens are in input_ids and targets of the micro-batch"
    if column.trained is None:
        return f"{name} is not in the batch: training does not read it; give its row in the catalogue the key trained"
    return f"{name} is not in the batch: training reads it {column.trained}; start the trainer so that it asks for it"


# A rank without sequences still takes part in the collectives of forward and backward. Its single
# token has action_mask 0, so its loss and gradient are zero.
_NOTHING = TrainingSequence(
    rollout_id="(none)",
    prompt_tokens=np.zeros(1, np.int32),
    response_tokens=np.zeros(1, np.int32),
    advantage=0.0,
    columns={"response_logprobs": np.zeros(1, np.float32), "action_mask": np.zeros(1, bool)},
)


def pack(sequences: Sequences | Sequence[TrainingSequence]) -> MicroBatch:
    """Lay sequences end to end, without those whose response is empty; if none is left, return a masked dummy."""
    columns = sequences if isinstance(sequences, Sequences) else Sequences.of(sequences)
    return pack_each(columns, [range(len(columns))])[0]


def pack_each(sequences: Sequences, plans: Sequence[Sequence[int]]) -> list[MicroBatch]:
    """Return the micro-batch of each plan, a list of indexes, as `pack` would make it; all share one memory block."""
    kept = [[index for index in plan if len(sequences.response_tokens[index])] for plan in plans]
    packed = iter(_pack_full(sequences, [indexes for indexes in kept if indexes]))
    trained = [name for name, column in array_columns().items() if column.trained == "always" and name not in _TOKENS]
    shapes = {
        name: _shape_beyond_tokens(array_columns()[name], sequences.column(name))
        for name in dict.fromkeys((*trained, *sequences.columns))
    }
    micro_batches = [next(packed) if indexes else _masked_dummy() for indexes in kept]
    return [
        replace(each, absent={name: shape for name, shape in shapes.items() if name not in each.columns})
        for each in micro_batches
    ]


def _masked_dummy() -> MicroBatch:
    (dummy,) = _pack_full(Sequences.of([_NOTHING]), [[0]])
    return replace(dummy, rollout_ids=())


def _shape_beyond_tokens(column: ArrayColumn, values: Sequence[Any]) -> tuple[int, ...]:
    """Return the shape of the numbers of a token in any of these rows; 1 in each dimension if none has the column."""
    if column.ragged:
        return ()
    shapes = (
        _beyond_tokens(column, each) for each in values if each is not None and (column.along == "row" or len(each))
    )
    return next(shapes, (1,) * (column.num_dimensions - (column.along != "row")))


def _pack_full(sequences: Sequences, plans: Sequence[Sequence[int]]) -> list[MicroBatch]:
    """Pack micro-batches. plans: indexes of each one's sequences, at least one, none with an empty response."""
    if not plans:
        return []
    layout = _Layout.of(sequences, plans)
    names = dict.fromkeys((*_ALWAYS, *sequences.columns))
    laid = {name: parts for name in names if (parts := _lay_out(array_columns()[name], sequences, layout))}
    flat = {
        name: layout.counts(_is_of_inputs(column), laid[name])
        for name in laid
        if _is_flat(column := array_columns()[name])
    }
    num_inputs, num_targets = sum(layout.num_inputs), sum(layout.num_targets)
    out, of_columns = _allocate(
        {name: (num_inputs if name in _OF_INPUTS else num_targets, dtype) for name, dtype in _FIELDS.items()},
        {name: (sum(counts), _dtype(array_columns()[name])) for name, counts in flat.items()},
    )
    _write_tokens(sequences, layout, out)
    pieces = {
        name: torch.from_numpy(array)[None].split(layout.num_inputs, dim=1)
        if name in _OF_INPUTS
        else torch.from_numpy(array).split(layout.num_targets)
        for name, array in out.items()
    }
    columns: list[dict[str, Any]] = [{} for _ in plans]
    for name, parts in laid.items():
        if name in flat:
            np.concatenate(list(chain.from_iterable(parts.values())), out=of_columns[name])
            packed: Sequence[Any] = torch.from_numpy(of_columns[name]).split(flat[name])
        else:
            packed = [_joined(array_columns()[name], each) for each in parts.values()]
        for number, of_plan in zip(parts, packed, strict=True):
            columns[number][name] = of_plan
    return [
        MicroBatch(
            **{name: pieces[name][number] for name in pieces},
            rollout_ids=tuple(sequences.rollout_id[index] for index in plan),
            sequence_lengths=tuple(layout.input_lengths[start:stop].tolist()),
            columns=columns[number],
        )
        for number, (plan, (start, stop)) in enumerate(zip(plans, layout.bounds, strict=True))
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Positions of the B sequences of P micro-batches, laid end to end."""

    plans: Sequence[Sequence[int]]
    """(P,): indexes of each micro-batch's sequences."""
    bounds: list[tuple[int, int]]
    """(P,): start and end of each micro-batch among the B sequences."""
    lengths: np.ndarray
    """(B,) int64: response tokens."""
    input_lengths: np.ndarray
    """(B,) int64: packed tokens. A response's last token predicts nothing, so it is a target but never an input."""
    num_targets: list[int]
    """(P,): response tokens of each micro-batch."""
    num_inputs: list[int]
    """(P,): packed tokens of each micro-batch."""

    @classmethod
    def of(cls, sequences: Sequences, plans: Sequence[Sequence[int]]) -> Self:
        indexes = list(chain.from_iterable(plans))
        lengths = np.array([len(sequences.response_tokens[index]) for index in indexes])
        input_lengths = lengths + [len(sequences.prompt_tokens[index]) - 1 for index in indexes]
        bounds = list(pairwise(accumulate(map(len, plans), initial=0)))
        num_targets, num_inputs = (
            [int(each[start:stop].sum()) for start, stop in bounds] for each in (lengths, input_lengths)
        )
        return cls(plans, bounds, lengths, input_lengths, num_targets, num_inputs)

    def counts(self, of_inputs: bool, numbers: Iterable[int]) -> list[int]:
        """Return the packed tokens of these micro-batches, or their response tokens."""
        counts = self.num_inputs if of_inputs else self.num_targets
        return [counts[number] for number in numbers]


def _write_tokens(sequences: Sequences, layout: _Layout, out: dict[str, np.ndarray]) -> None:
    """Write all fields but the columns."""
    plans, lengths, input_lengths = layout.plans, layout.lengths, layout.input_lengths
    indexes = list(chain.from_iterable(plans))

    def pick(values: Sequence[V]) -> list[V]:
        return [values[index] for index in indexes]

    prompts, responses = pick(sequences.prompt_tokens), pick(sequences.response_tokens)
    inputs = [part for prompt, response in zip(prompts, responses, strict=True) for part in (prompt, response[:-1])]
    ends = [end for start, stop in layout.bounds for end in np.cumsum(input_lengths[start:stop]).tolist()]
    counting = np.arange(max(ends))
    np.concatenate(inputs, out=out["input_ids"])
    np.concatenate([counting[:length] for length in input_lengths.tolist()], out=out["position_ids"])
    logit_positions = [counting[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
    np.concatenate(logit_positions, out=out["logit_positions"])
    np.concatenate(responses, out=out["targets"])
    _spread(pick(sequences.advantage), lengths, out["advantages"])
    _spread(pick(sequences.weight), lengths, out["weights"])
    _spread(pick(sequences.temperature), lengths, out["temperatures"])
    out["sequence_ids"][:] = np.repeat(np.concatenate([counting[: len(plan)] for plan in plans]), lengths)
    out["pair_ids"] = out["sequence_ids"]
    if any(pick(sequences.pair_id)):
        out["pair_ids"] = np.repeat(
            list(chain.from_iterable(_pair_numbers(sequences, plan) for plan in plans)), lengths
        )


def _pair_numbers(sequences: Sequences, plan: Sequence[int]) -> list[int]:
    """Return for each sequence of a micro-batch the number of its pair's first sequence, or its own if unpaired."""
    firsts: dict[str, int] = {}
    pair_ids = [sequences.pair_id[index] for index in plan]
    return [i if pair_id is None else firsts.setdefault(pair_id, i) for i, pair_id in enumerate(pair_ids)]


def _spread(values: Sequence[Any], lengths: np.ndarray, out: np.ndarray) -> None:
    """Write values end to end into `out`: arrays have one value per response token, scalars are repeated."""
    if any(isinstance(value, np.ndarray) for value in values):
        lists = [np.broadcast_to(value, length) for value, length in zip(values, lengths.tolist(), strict=True)]
        np.concatenate(lists, out=out)
    elif all(value == values[0] for value in values):  # usual for weights and temperatures
        out.fill(values[0])
    else:
        out[:] = np.repeat(np.array(values, out.dtype), lengths)


def _lay_out(column: ArrayColumn, sequences: Sequences, layout: _Layout) -> dict[int, list[Any]]:
    """Return a column's values, laid end to end, by the number of the micro-batch; none for a micro-batch without
    values."""
    values, prompts, responses = sequences.column(column.name), sequences.prompt_tokens, sequences.response_tokens
    if column.name not in _ALWAYS and all(_is_none(values)):
        return {}
    like = np.empty((0, *_shape_beyond_tokens(column, values)))

    def unknown(num_tokens: int) -> Any:
        return column.unknown(num_tokens, like)

    def parts_of(index: int) -> tuple[Any, ...]:
        num_prompt, num_response = len(prompts[index]), len(responses[index])
        if values[index] is None:
            return (unknown(num_response + (num_prompt - 1 if _is_of_inputs(column) else 0)),)
        if column.along == "row":
            return (np.broadcast_to(values[index], (num_response, *np.shape(values[index]))),)
        if column.along == "prompt":
            return values[index], unknown(num_response - 1)
        return (values[index],)

    laid = {}
    for number, plan in enumerate(layout.plans):
        of_plan = [values[index] for index in plan]
        if column.along in ("response", "read") and not any(_is_none(of_plan)):
            laid[number] = of_plan
        elif not all(_is_none(of_plan)):
            laid[number] = [part for index in plan for part in parts_of(index)]
        elif column.name in _ALWAYS:
            laid[number] = [unknown(sum(len(responses[index]) for index in plan))]
    return laid


def _joined(column: ArrayColumn, parts: Sequence[Any]) -> Tensor | PackedRagged:
    """Return a column of a micro-batch from values laid end to end."""
    if column.ragged:
        return PackedRagged.of(parts, _dtype(column))
    return torch.from_numpy(np.concatenate(parts, dtype=_dtype(column)))


def _is_of_inputs(column: ArrayColumn) -> bool:
    """Return whether a column is parallel to input_ids in a micro-batch; else to targets."""
    return column.along in ("read", "prompt")


def _is_flat(column: ArrayColumn) -> bool:
    """Return whether a column has one number for each token of a micro-batch."""
    return column.is_number_a_token or (column.along == "row" and column.num_dimensions == 0)


def _dtype(column: ArrayColumn) -> np.dtype:
    """Return the dtype of a column in a micro-batch; torch accepts only int64 as indexes."""
    return np.dtype(np.int64) if column.is_token_ids else column.dtype


_OF_INPUTS = ("input_ids", "position_ids")
_FIELDS: Mapping[str, np.dtype] = {
    **dict.fromkeys((*_OF_INPUTS, "logit_positions", "targets", "sequence_ids"), np.dtype(np.int64)),
    **dict.fromkeys(("advantages", "weights", "temperatures"), np.dtype(np.float32)),
}


def _allocate(*groups: Mapping[str, tuple[int, np.dtype]]) -> list[dict[str, np.ndarray]]:
    """Allocate arrays of these lengths and dtypes by name, for each group, in one memory block.

    Mapping new pages costs more than writing to them. A block of this size gets large pages, or is reused for the
    next batch. Arrays with several numbers a token are not in it: they would make it too large to be reused.
    """
    wanted = [(number, name, *each) for number, group in enumerate(groups) for name, each in group.items()]
    wanted.sort(key=lambda each: -each[3].itemsize)  # wide types first, so that each array is aligned
    sizes = [length * dtype.itemsize for *_, length, dtype in wanted]
    pieces = np.split(np.empty(sum(sizes), np.uint8), np.cumsum(sizes)[:-1])
    arrays: list[dict[str, np.ndarray]] = [{} for _ in groups]
    for (number, name, _, dtype), piece in zip(wanted, pieces, strict=True):
        arrays[number][name] = piece.view(dtype)
    return arrays
