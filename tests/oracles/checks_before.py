"""The functions of before the catalogue of columns (commit b33740f4), as an oracle.

Issue 37 rewrites how a row's arrays are checked. tests/schema/test_checks_as_before.py compares both.
Only the types of arrays are listed here instead of read from the schema. This file goes when the issue ends. It imports
nothing that the issue rewrites.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, starmap
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

LARGEST_REWARD = float(np.finfo(np.float32).max)
LOGPROB_TOLERANCE, LOWEST_LOGPROB = 1e-5, -100.0
NUM_TOKEN_IDS, NUM_EXPERTS = 2**31, 2**15

Misfit = tuple[str, str]
RowProblem = tuple[int, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """The arrays of a row, and what the rules for them read besides."""

    rollout_id: str
    prompt_tokens: Any
    response_tokens: Any
    response_logprobs: Any
    token_rewards: Any
    action_mask: Any = None
    kept_tokens: Any = None
    experts: Any = None
    error: str | None = None

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_tokens)

    @property
    def response_length(self) -> int:
        return len(self.response_tokens)


@dataclass(frozen=True, slots=True)
class _Array:
    """What the schema says of an array."""

    name: str
    dtype: np.dtype
    nullable: bool = False
    num_dimensions: int | None = 1
    """None: a list of arrays."""


_ARRAYS = (
    _Array("prompt_tokens", np.dtype(np.int32)),
    _Array("response_tokens", np.dtype(np.int32)),
    _Array("response_logprobs", np.dtype(np.float32)),
    _Array("token_rewards", np.dtype(np.float32)),
    _Array("action_mask", np.dtype(np.bool_), nullable=True),
    _Array("kept_tokens", np.dtype(np.int32), nullable=True, num_dimensions=None),
    _Array("experts", np.dtype(np.int16), nullable=True, num_dimensions=3),
)
_RESPONSE_COLUMNS = ("response_logprobs", "token_rewards", "action_mask")
_ALWAYS_THERE = ("prompt_tokens", "response_tokens", "response_logprobs", "token_rewards")


def find_problems(rollouts: Sequence[Rollout], vocab_size: int | None = None) -> list[str]:
    """Return the reasons to refuse rows because of their arrays, as `Problem` writes them."""
    misfits = list(find_misfits(rollouts))
    unfit = {row for row, _, _ in misfits}
    fit = [rollout for row, rollout in enumerate(rollouts) if row not in unfit]
    tokens = {column: FlatTokens.of(column, fit) for column in _ALWAYS_THERE}
    most = vocab_size or NUM_TOKEN_IDS
    findings = chain(
        _bad_row_lengths(fit),
        _bad_tokens(tokens, most),
        _bad_masked_logprobs(fit),
        find_bad_kept_tokens(fit, most),
        _bad_experts(fit),
    )
    found = [(rollouts[row], column, reason) for row, column, reason in misfits]
    found += [(fit[row], column, reason) for row, column, reason in findings]
    return [f"rollout {rollout.rollout_id}: {column} {reason}" for rollout, column, reason in found]


def find_misfits(rollouts: Sequence[Rollout]) -> Iterator[RowProblem]:
    """Yield wrong types, nulls, shapes and lengths of arrays, by column."""
    for array in _ARRAYS:
        for row, rollout in enumerate(rollouts):
            value = getattr(rollout, array.name)
            is_ragged = array.num_dimensions is None
            misfits = _ragged_misfits(value, array) if is_ragged else _array_misfits(value, array)
            yield from ((row, *misfit) for misfit in misfits)
    for name in _RESPONSE_COLUMNS:
        for row, (array, tokens) in enumerate(map(attrgetter(name, "response_tokens"), rollouts)):
            if isinstance(array, np.ndarray) and isinstance(tokens, np.ndarray) and array.size != tokens.size:
                yield row, name, f"has length {array.size}, response_tokens has {tokens.size}"
    for row, (arrays, tokens) in enumerate(map(attrgetter("kept_tokens", "response_tokens"), rollouts)):
        if isinstance(arrays, Sequence) and isinstance(tokens, np.ndarray) and len(arrays) != tokens.size:
            yield row, "kept_tokens", f"has length {len(arrays)}, response_tokens has {tokens.size}"


def _bad_row_lengths(rollouts: Sequence[Rollout]) -> Iterator[RowProblem]:
    for row, rollout in enumerate(rollouts):
        if rollout.prompt_length == 0:
            yield row, "prompt_length", "is 0, wanted at least one prompt token"
        if rollout.response_length == 0 and rollout.error is None:
            yield row, "response_length", "is 0, wanted at least one response token, since no error is set"


def _array_misfits(array: Any, field: _Array) -> Iterator[Misfit]:
    if isinstance(array, np.ndarray):
        if array.dtype != field.dtype or array.ndim != field.num_dimensions:
            wanted = {1: "one dimension", 3: "three dimensions"}[field.num_dimensions or 0]
            yield field.name, f"is {array.dtype} of shape {array.shape}, wanted {field.dtype} of {wanted}"
    elif array is not None or not field.nullable:
        yield field.name, f"is {type(array).__name__}, wanted a NumPy array of {field.dtype}"


def _ragged_misfits(arrays: Any, field: _Array) -> Iterator[Misfit]:
    dtype = field.dtype
    if arrays is None:
        return
    if not isinstance(arrays, tuple | list):
        yield field.name, f"is {type(arrays).__name__}, wanted a tuple of NumPy arrays of {dtype}"
    elif any(not isinstance(array, np.ndarray) or (array.dtype, array.ndim) != (dtype, 1) for array in arrays):
        yield field.name, f"holds other values than NumPy arrays of {dtype} of one dimension"


def _bad_tokens(tokens: "Mapping[str, FlatTokens]", vocab_size: int) -> Iterator[RowProblem]:
    yield from bad_ids(tokens["prompt_tokens"], vocab_size)
    yield from bad_ids(tokens["response_tokens"], vocab_size)
    yield from bad_numbers(tokens["token_rewards"], -LARGEST_REWARD, LARGEST_REWARD)
    yield from bad_numbers(tokens["response_logprobs"], LOWEST_LOGPROB, LOGPROB_TOLERANCE)


def bad_ids(tokens: "FlatTokens", vocab_size: int) -> Iterator[RowProblem]:
    if tokens.values.min(initial=0) < 0 or tokens.values.max(initial=0) >= vocab_size:
        bad = (tokens.values < 0) | (tokens.values >= vocab_size)
        yield from tokens.findings(bad, f"wanted a token id from 0 to {vocab_size - 1}")


def bad_numbers(numbers: "FlatTokens", lowest: float, highest: float) -> Iterator[RowProblem]:
    """Yield numbers that are not finite, below `lowest` or above `highest`."""
    # If there is a NaN, it is minimum and maximum, and compares as false.
    if numbers.values.min(initial=0) >= lowest and numbers.values.max(initial=0) <= highest:
        return
    finite = np.isfinite(numbers.values)
    yield from numbers.findings(~finite, "wanted a finite number")
    positive = finite & (numbers.values > highest)
    yield from numbers.findings(positive, "wanted at most 0, the logarithm of a probability")
    low = finite & (numbers.values < lowest)
    yield from numbers.findings(low, f"wanted at least {lowest:g}: a token less likely is never sampled")


def _bad_masked_logprobs(rollouts: Sequence[Rollout]) -> Iterator[RowProblem]:
    """Yield rows with a logprob for a token that was not sampled."""
    masked = [row for row, rollout in enumerate(rollouts) if rollout.action_mask is not None]
    if not masked:
        return
    chosen = [rollouts[row] for row in masked]
    logprobs = FlatTokens.of("response_logprobs", chosen)
    # NaN fails this comparison, since it is already reported.
    nonzero = np.abs(logprobs.values) > 0
    unsampled = ~FlatTokens.of("action_mask", chosen).values
    for index, column, reason in logprobs.findings(nonzero & unsampled, "wanted 0, since action_mask is 0"):
        yield masked[index], column, reason


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """Concatenated token lists of all rows."""

    column: str
    values: np.ndarray
    """(all tokens,)."""
    ends: np.ndarray
    """(rows,) int64: index after each row's last token."""

    @classmethod
    def of(cls, column: str, rollouts: Iterable[Rollout]) -> "FlatTokens":
        arrays = list(map(attrgetter(column), rollouts))
        dtype = next(each.dtype for each in _ARRAYS if each.name == column)
        values = np.concatenate([np.zeros(0, dtype), *arrays])
        return cls(column, values, np.cumsum([len(array) for array in arrays]))

    def findings(self, bad: np.ndarray, wanted: str) -> Iterator[RowProblem]:
        """Yield one finding for each row with a bad token. bad: (all tokens,) bool."""
        if not bad.any():
            return
        positions = np.flatnonzero(bad)
        owners = np.searchsorted(self.ends, positions, side="right")
        rows, firsts, counts = np.unique(owners, return_index=True, return_counts=True)
        for row, position, count in zip(rows.tolist(), positions[firsts].tolist(), counts.tolist(), strict=True):
            token = position - (int(self.ends[row - 1]) if row else 0)
            others = f", and {count - 1} more" if count > 1 else ""
            yield row, self.column, f"is {self.values[position]} at token {token}{others}, {wanted}"


def find_bad_kept_tokens(rollouts: Sequence[Rollout], vocab_size: int) -> Iterator[RowProblem]:
    """Yield rows whose kept_tokens are not ascending, lack the sampled token, or are of tokens that were not sampled.

    The types and lengths of the rows must fit the schema. vocab_size: ids are below it.
    """
    for row, rollout in enumerate(rollouts):
        if rollout.kept_tokens is not None:
            counts = np.array([len(ids) for ids in rollout.kept_tokens], np.int64)
            ids = np.concatenate([np.zeros(0, np.int32), *rollout.kept_tokens])
            mask = np.ones(len(counts), bool) if rollout.action_mask is None else rollout.action_mask
            for reason in reasons_against(ids, counts, rollout.response_tokens, mask, vocab_size):
                yield row, "kept_tokens", reason


def reasons_against(
    ids: np.ndarray, counts: np.ndarray, tokens: np.ndarray, is_sampled: np.ndarray, vocab_size: int
) -> Iterator[str]:
    """Yield what is wrong with the kept tokens of one row.

    ids: (K,) kept at all response tokens. counts: (n,), how many at each. tokens: (n,). is_sampled: (n,) bool.
    """
    owners = np.repeat(np.arange(len(counts)), counts)
    has_token = np.bincount(owners[ids == tokens[owners]], minlength=len(counts)) > 0
    falls = owners[1:][(np.diff(ids) <= 0) & (np.diff(owners) == 0)]
    outside = owners[(ids < 0) | (ids >= vocab_size)]
    yield from _at(np.flatnonzero(is_sampled & ~has_token), "lacks the sampled token, wanted it among the kept ones")
    yield from _at(np.flatnonzero(~is_sampled & (counts > 0)), "is not empty, wanted no ids, since action_mask is 0")
    yield from _at(falls, "does not ascend, wanted sorted ids, each once")
    yield from _at(outside, f"holds a number that is no token id, wanted 0 to {vocab_size - 1}")


def _at(tokens: np.ndarray, reason: str) -> Iterator[str]:
    if len(tokens):
        others = f", and {len(set(tokens.tolist())) - 1} more" if len(set(tokens.tolist())) > 1 else ""
        yield f"at token {tokens[0]}{others} {reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What the routers of a model choose from."""

    layers: tuple[int, ...]
    """Numbers of the decoder layers with experts."""
    chosen: int
    """Experts that a token is sent to."""
    num_experts: int
    """Experts of a layer."""


def _bad_experts(rollouts: Sequence[Rollout]) -> Iterator[RowProblem]:
    """Yield rows whose experts are not of each token that was read, or do not ascend. Their types must fit."""
    for row, rollout in enumerate(rollouts):
        if rollout.experts is not None:
            num_read = rollout.prompt_length + rollout.response_length - 1
            if (reason := reason_against_experts(rollout.experts, num_read)) is not None:
                yield row, "experts", reason


def reason_against_experts(experts: np.ndarray, num_read: int, routing: Routing | None = None) -> str | None:
    """Return what is wrong with the experts of one row or completion; None if nothing is.

    experts: three dimensions of int16. num_read: tokens that the sampler read. routing: of the model; None if it is not
    known.
    """
    if len(experts) != num_read or 0 in experts.shape:
        return f"has shape {experts.shape}, wanted experts for each of the {num_read} tokens that the sampler read"
    most = NUM_EXPERTS if routing is None else routing.num_experts
    if routing is not None and experts.shape[1:] != (len(routing.layers), routing.chosen):
        return (
            f"has {experts.shape[2]} experts in each of {experts.shape[1]} layers, the model sends a token to "
            f"{routing.chosen} in each of {len(routing.layers)}"
        )
    if experts.min() < 0 or experts.max() >= most:
        return f"holds numbers from {experts.min()} to {experts.max()}, wanted 0 to {most - 1}"
    if (np.diff(experts, axis=2) <= 0).any():
        return "does not ascend, wanted a layer's experts sorted, each once"
    return None


TRAINED_COLUMNS = (
    *("temperature", "prompt_tokens", "response_tokens", "response_logprobs", "action_mask", "kept_tokens"),
)
"""Columns of rollouts that training reads."""


def find_untrainable(rows: pa.Table, vocab_size: int | None, *, any_logprob: bool = False) -> Mapping[int, str]:
    """Return the first reason against each row that can't be trained on, by its index.

    rows: TRAINED_COLUMNS, with prompt_length and response_length, which the lists should have. vocab_size: rows of the
    model's embedding; None if no model is known. any_logprob: accept each finite logprob.
    """
    lowest, highest = (-LARGEST_REWARD, LARGEST_REWARD) if any_logprob else (LOWEST_LOGPROB, LOGPROB_TOLERANCE)
    most, problems = vocab_size or NUM_TOKEN_IDS, dict[int, str]()

    def note(found: Iterator[RowProblem]) -> None:
        for row, column, reason in found:
            problems.setdefault(row, f"{column} {reason}")

    note(_bad_temperatures(rows["temperature"]))
    note(_bad_lengths(rows))
    for name in ("prompt_tokens", "response_tokens", "response_logprobs"):
        for first, flat in _flat(rows, name):
            found = bad_numbers(flat, lowest, highest) if name == "response_logprobs" else bad_ids(flat, most)
            note((first + row, column, reason) for row, column, reason in found)
    if rows["kept_tokens"].null_count < rows.num_rows:
        note(_bad_kept_tokens(rows, most, problems))
    return problems


def _flat(rows: pa.Table, column: str) -> Iterator[tuple[int, FlatTokens]]:
    """Yield the lists of each chunk of a column, with the index of its first row; a chunk is not copied."""
    first = 0
    for chunk in rows[column].chunks:
        flat, counts = chunk.flatten(), pc.fill_null(pc.list_value_length(chunk), 0).to_numpy()
        yield first, FlatTokens(column, flat.to_numpy(zero_copy_only=False), np.cumsum(counts))
        first += len(chunk)


def _bad_temperatures(column: pa.ChunkedArray) -> Iterator[RowProblem]:
    values = column.to_numpy()
    for row in np.flatnonzero(~((values > 0) & (values < np.inf))).tolist():
        yield row, "temperature", f"is {values[row]:g}, wanted above 0; greedy samples can't be trained on"


def _bad_lengths(rows: pa.Table) -> Iterator[RowProblem]:
    """Yield lists that are not as long as the row says; a list that is null, as some may be, has no length."""
    prompts, responses = (rows[name].to_numpy() for name in ("prompt_length", "response_length"))
    for row in np.flatnonzero(prompts < 1).tolist():
        yield row, "prompt_tokens", "is empty, wanted at least one token"
    for column in TRAINED_COLUMNS[1:]:
        wanted = prompts if column == "prompt_tokens" else responses
        found = pc.list_value_length(rows[column]).to_numpy(zero_copy_only=False)
        for row in np.flatnonzero((found != wanted) & ~np.isnan(found)).tolist():
            yield row, column, f"has {found[row]:g} tokens, the row says {wanted[row]}"


def _bad_kept_tokens(rows: pa.Table, most: int, known: Mapping[int, str]) -> Iterator[RowProblem]:
    """Yield rows whose kept tokens lack a sampled token or are no token ids. A token without any kept all."""
    kept = (each for chunk in rows["kept_tokens"].chunks for each in ragged_arrays(chunk))
    for row, lists in enumerate(kept):
        if lists is None or row in known:
            continue
        ids, bounds = lists
        tokens, mask = (rows[name][row].values for name in ("response_tokens", "action_mask"))
        counts = np.diff(bounds)
        is_sampled = counts > 0 if mask is None else mask.to_numpy(zero_copy_only=False) & (counts > 0)
        for reason in reasons_against(ids, counts, tokens.to_numpy(), is_sampled, most):
            yield row, "kept_tokens", reason


def ragged_arrays(array: pa.ListArray) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """Return each row of a list<list> column as its numbers, (K,), and (n + 1,) bounds of its n lists; None for a null.

    The numbers are read-only views of one array.
    """
    inner = array.flatten()
    flat, bounds = inner.values.to_numpy(), inner.offsets.to_numpy()
    rows: list[tuple[np.ndarray, np.ndarray] | None] = []
    for part in _slices(array):
        if part is None:
            rows.append(None)
        else:
            of_row = bounds[part.start : part.stop + 1]
            rows.append((flat[of_row[0] : of_row[-1]], of_row - of_row[0]))
    return rows


def _slices(array: pa.ListArray) -> list[slice | None]:
    """Return each row's slice of array.flatten(), which skips elements hidden by nulls and slices; None for a null."""
    if array.null_count == len(array):
        return [None] * len(array)
    if not array.null_count:
        offsets = array.offsets.to_numpy()
        return list(starmap(slice, pairwise((offsets - offsets[0]).tolist())))
    lengths = pc.list_value_length(array).fill_null(0).to_numpy()
    ends = np.cumsum(lengths, dtype=np.int64)
    parts = map(slice, (ends - lengths).tolist(), ends.tolist())
    return [part if valid else None for part, valid in zip(parts, array.is_valid().to_pylist(), strict=True)]
