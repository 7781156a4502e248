"""Say which stored rows can't be trained on, from the columns that training reads. Pure.

The writer refuses such rows, so they come from an older ludic, from another program, or from a model with more tokens.
One of them would end a step with an index beyond the embedding, or with a loss that is not finite.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.records import LARGEST_REWARD
from ludic.schema.conversion import ragged_arrays
from ludic.schema.kept_tokens import reasons_against
from ludic.schema.type_checks import RowProblem
from ludic.schema.validation import (
    LOGPROB_TOLERANCE,
    LOWEST_LOGPROB,
    NUM_TOKEN_IDS,
    FlatTokens,
    bad_ids,
    bad_numbers,
)

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
        yield first, FlatTokens(column, flat, flat.to_numpy(zero_copy_only=False), np.cumsum(counts))
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
