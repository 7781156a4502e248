"""Build the token transcripts of an episode from its model calls, with sampled tokens marked.

A row grows from call to call. Its prompt is the first call's prompt; the first completion follows. Each later call adds
the suffix by which its prompt extends the row, which was not sampled, and its completion. A prompt that extends no row,
because history was rewritten or shortened, starts a new row: tokens are never realigned, and each sampled token is in
one row only. Arrays of the sampler are joined by the rules in the catalogue (ludic.records.columns). Pure; knows
nothing of text, rewards or the store. Raises ValueError for an array of a wrong length.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ludic.records import ArrayColumn, Columns, HasTokens, array_columns

NO_ARRAYS: Columns = MappingProxyType({})
"""Columns of a completion with known tokens only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionSpan:
    """Location of one completion: tokens start to end of a row's response."""

    segment_index: int
    """Index of the row in the episode."""
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript(HasTokens):
    """Arrays of one row."""

    columns: Columns
    """Arrays that the transcript and the sampler set, by the name of their column; one that is left out is absent. An
    array along the response or the tokens read is absent if a completion came without it: response_logprobs too."""
    segment_index: int = 0
    """Index of the row in the episode."""
    parent_segment_index: int | None = None
    """The earlier row with which the prompt has most tokens in common; None for the first row."""


class TranscriptBuilder:
    """Builds the rows of one episode of one agent from its calls, in the order of the calls."""

    def __init__(self) -> None:
        self._rows: list[RowBuilder] = []
        self._parents: list[int | None] = []

    def add_call(self, prompt_tokens: np.ndarray, tokens: np.ndarray, columns: Columns = NO_ARRAYS) -> CompletionSpan:
        """Add a call to the newest row that its prompt extends, else to a new row; return the completion's span.

        prompt_tokens: (prompt_length,) int32, the whole prompt. tokens: (length,) int32, the completion. columns: of
        the completion, see `RowBuilder.add_completion`.
        """
        rows = range(len(self._rows) - 1, -1, -1)
        segment = next((index for index in rows if self._rows[index].is_extended_by(prompt_tokens)), None)
        if segment is None:
            segment = len(self._rows)
            common = [row.num_common_tokens(prompt_tokens) for row in self._rows]
            self._parents.append(common.index(max(common)) if common else None)
            self._rows.append(RowBuilder(segment))
        row = self._rows[segment]
        row.add_context(prompt_tokens[len(row) :])
        return row.add_completion(tokens, columns)

    def transcripts(self) -> tuple[Transcript, ...]:
        """Return the rows so far, by segment_index; empty before the first call."""
        return tuple(row.transcript(parent) for row, parent in zip(self._rows, self._parents, strict=True))


@dataclass(frozen=True, slots=True)
class _Completion:
    """One completion of a row: tokens start to end of its response."""

    start: int
    end: int
    columns: Columns


class RowBuilder:
    """Builds one row from tokens in order; use it directly if each row's tokens are known in advance."""

    def __init__(self, segment_index: int = 0) -> None:
        self._segment_index = segment_index
        self._tokens: list[np.ndarray] = []
        """Parts, joined when they are read."""
        self._length = 0
        self._prompt_length: int | None = None
        self._completions: list[_Completion] = []

    def __len__(self) -> int:
        """Number of tokens of prompt and response."""
        return self._length

    def is_extended_by(self, prompt_tokens: np.ndarray) -> bool:
        """Return whether a prompt begins with all tokens of this row."""
        return np.array_equal(prompt_tokens[: len(self)], self._all_tokens())

    def num_common_tokens(self, prompt_tokens: np.ndarray) -> int:
        """Return the number of tokens in the common beginning of a prompt and this row."""
        length = min(len(self), len(prompt_tokens))
        differs = np.flatnonzero(prompt_tokens[:length] != self._all_tokens()[:length])
        return int(differs[0]) if len(differs) else length

    def add_context(self, tokens: np.ndarray) -> None:
        """Append tokens that were not sampled: the prompt, and later messages of users, tools and environments."""
        self._tokens.append(tokens)
        self._length += len(tokens)

    def add_completion(self, tokens: np.ndarray, columns: Columns = NO_ARRAYS) -> CompletionSpan:
        """Append sampled tokens and return their span; the response begins with the first of them.

        tokens: (length,) int32. columns: the sampler's arrays for them, by the name of the column, with all earlier
        tokens of the row as their prompt. Raises ValueError if an array has another length.
        """
        for name, values in columns.items():
            if reason := self._reason_against(name, values, len(tokens)):
                raise ValueError(f"{name} of a completion {reason}")
        if self._prompt_length is None:
            self._prompt_length = len(self)
        start = len(self) - self._prompt_length
        self.add_context(tokens)
        end = len(self) - self._prompt_length
        self._completions.append(_Completion(start, end, columns))
        return CompletionSpan(segment_index=self._segment_index, start=start, end=end)

    def _reason_against(self, name: str, values: Any, num_tokens: int) -> str | None:
        """Return why the values of a completion can't follow those of the row; None if they can."""
        column = array_columns().get(name)
        if column is None:
            return f"is not an array of a row, wanted one of {', '.join(array_columns())}"
        if reason := column.wrong_length(values, len(self), num_tokens):
            return reason
        if values is None or column.ragged or column.num_dimensions < 2 or column.along == "row":
            return None
        before = next((found for each in self._completions if (found := each.columns.get(name)) is not None), values)
        if values.shape[1:] == before.shape[1:]:
            return None
        return f"has shape {values.shape[1:]} at each token, the row's first one {before.shape[1:]}"

    def transcript(self, parent_segment_index: int | None = None) -> Transcript:
        """Return the row so far."""
        start = len(self) if self._prompt_length is None else self._prompt_length
        tokens = self._all_tokens()
        columns = {"prompt_tokens": tokens[:start], "response_tokens": tokens[start:], "action_mask": self._mask()}
        for column in array_columns().values():
            if column.set_by == "sampler":
                columns[column.name] = self._sampled(column)
        return Transcript(
            columns={name: values for name, values in columns.items() if values is not None},
            segment_index=self._segment_index,
            parent_segment_index=parent_segment_index,
        )

    @property
    def _response_length(self) -> int:
        return 0 if self._prompt_length is None else len(self) - self._prompt_length

    def _mask(self) -> np.ndarray | None:
        """Return (response_length,) bool, 1 for sampled tokens; None if all were sampled."""
        mask = np.zeros(self._response_length, np.bool_)
        for each in self._completions:
            mask[each.start : each.end] = True
        return None if mask.all() else mask

    def _sampled(self, column: ArrayColumn) -> Any:
        """Return the values of the row in a column that the sampler sets; None if it has none."""
        found = [each.columns.get(column.name) for each in self._completions]
        given = [values for values in found if values is not None]
        if column.along == "row":
            return given[-1] if given else None
        if column.along == "prompt":
            return found[0] if found else None
        if len(given) < len(found):
            return None
        if not found:  # nothing was sampled, for example if an episode failed before its first call
            return None if column.is_nullable or not column.is_along_response else column.unsampled(0)
        return column.concatenate(self._read(given) if column.along == "read" else self._response(column, given))

    def _read(self, given: list[Any]) -> list[Any]:
        """Return the values of tokens at the first call that read each.

        An earlier call sampled from the tokens that it read; a later call may have read them under other weights.
        """
        parts: list[Any] = []
        length = 0
        for values in given:
            parts.append(values[length:])
            length += len(parts[-1])
        return parts

    def _response(self, column: ArrayColumn, given: list[Any]) -> list[Any]:
        """Return the values of the response's tokens, with `unsampled` values at tokens that were not sampled."""
        parts: list[Any] = []
        end = 0
        for completion, values in zip(self._completions, given, strict=True):
            if completion.start > end:
                parts.append(column.unsampled(completion.start - end, values))
            parts.append(values)
            end = completion.end
        if self._response_length > end:
            parts.append(column.unsampled(self._response_length - end, parts[-1]))
        return parts

    def _all_tokens(self) -> np.ndarray:
        self._tokens = [np.concatenate([np.zeros(0, np.int32), *self._tokens], dtype=np.int32)]
        return self._tokens[0]
