"""The functions of before the catalogue of columns (commit b33740f4), copied without a change: an oracle.

Issue 37 rewrites how a row's arrays are assembled from calls. tests/agents/test_transcript_as_before.py compares both.
This file goes when the issue ends. It imports nothing that the issue rewrites.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_NOTHING_KEPT = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Location of one completion: tokens start to end of a row's response."""

    segment_index: int
    """Index of the row in the episode."""
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """Tokens of one row."""

    prompt_tokens: np.ndarray
    """(prompt_length,) int32."""
    response_tokens: np.ndarray
    """(response_length,) int32; the two arrays below have the same length."""
    response_logprobs: np.ndarray
    """(response_length,) float32, nats, 0 where action_mask is 0."""
    has_logprobs: bool = True
    """False if a completion came without logprobs; then all of response_logprobs are 0."""
    action_mask: np.ndarray | None
    """(response_length,) bool, 1 for sampled tokens; None if all tokens were sampled."""
    kept_tokens: tuple[np.ndarray, ...] | None = None
    """Token ids, (kept,) int32, that the sampler kept at each response token, empty where action_mask is 0; None if a
    completion came without them."""
    experts: np.ndarray | None = None
    """(prompt_length + response_length - 1, L, K) int16, of each token that the sampler read; None if a completion came
    without them."""
    segment_index: int = 0
    """Index of the row in the episode."""
    parent_segment_index: int | None = None
    """The earlier row with which the prompt has most tokens in common; None for the first row."""


class TranscriptBuilder:
    """Builds the rows of one episode of one agent from its calls, in the order of the calls."""

    def __init__(self) -> None:
        self._rows: list[RowBuilder] = []
        self._parents: list[int | None] = []

    def add_call(
        self,
        prompt_tokens: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray | None = None,
        kept_tokens: Sequence[np.ndarray] | None = None,
        experts: np.ndarray | None = None,
    ) -> Span:
        """Add a call to the newest row that its prompt extends, else to a new row; return the completion's span.

        prompt_tokens: (prompt_length,) int32, the whole prompt. tokens: (length,) int32, the completion. logprobs:
        (length,) float32. kept_tokens: for each token (kept,) int32. experts: (prompt_length + length - 1, L, K) int16,
        of the prompt too.
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
        return row.add_completion(tokens, logprobs, kept_tokens, experts)

    def transcripts(self) -> tuple[Transcript, ...]:
        """Return the rows so far, by segment_index; empty before the first call."""
        return tuple(row.transcript(parent) for row, parent in zip(self._rows, self._parents, strict=True))


class RowBuilder:
    """Builds one row from tokens in their order; use it alone where each row's tokens are known beforehand."""

    def __init__(self, segment_index: int = 0) -> None:
        self._segment_index = segment_index
        # Parts, joined when they are read.
        self._tokens: list[np.ndarray] = []
        self._mask: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._kept_tokens: list[np.ndarray] | None = []
        """Of the response; None once a completion came without."""
        self._experts: list[np.ndarray] | None = []
        """Of all tokens but the last; None once a completion came without."""
        self._length = 0
        self._has_logprobs = True
        self._prompt_length: int | None = None

    def __len__(self) -> int:
        """Number of tokens of prompt and response."""
        return self._length

    def is_extended_by(self, prompt_tokens: np.ndarray) -> bool:
        """Return whether a prompt begins with all tokens of this row."""
        return np.array_equal(prompt_tokens[: len(self)], self._all_tokens())

    def num_common_tokens(self, prompt_tokens: np.ndarray) -> int:
        """Return how many tokens a prompt and this row have in common at their beginning."""
        length = min(len(self), len(prompt_tokens))
        differs = np.flatnonzero(prompt_tokens[:length] != self._all_tokens()[:length])
        return int(differs[0]) if len(differs) else length

    def add_context(self, tokens: np.ndarray) -> None:
        """Append tokens that were not sampled: the prompt, and later messages of users, tools and environments."""
        self._append(tokens, np.zeros(len(tokens), np.float32), sampled=False)
        if self._kept_tokens is not None and self._prompt_length is not None:
            self._kept_tokens += [_NOTHING_KEPT] * len(tokens)

    def add_completion(
        self,
        tokens: np.ndarray,
        logprobs: np.ndarray | None = None,
        kept_tokens: Sequence[np.ndarray] | None = None,
        experts: np.ndarray | None = None,
    ) -> Span:
        """Append sampled tokens and return their span; the response begins with the first of them.

        tokens: (length,) int32. logprobs: (length,) float32. kept_tokens: for each token (kept,) int32. experts:
        (tokens of the row - 1, L, K) int16, of all tokens of the row that were read, from its first on.
        """
        if self._prompt_length is None:
            self._prompt_length = len(self)
        start = len(self) - self._prompt_length
        if logprobs is None:
            self._has_logprobs = False
            logprobs = np.zeros(len(tokens), np.float32)
        self._append(tokens, logprobs, sampled=True)
        if kept_tokens is None:
            self._kept_tokens = None
        elif self._kept_tokens is not None:
            self._kept_tokens += kept_tokens
        if experts is None:
            self._experts = None
        elif self._experts is not None:
            # What an earlier call read was sampled from then; a later call may have read it under other weights.
            self._experts.append(experts[sum(map(len, self._experts)) :])
        return Span(segment_index=self._segment_index, start=start, end=len(self) - self._prompt_length)

    def transcript(self, parent_segment_index: int | None = None) -> Transcript:
        """Return the row so far."""
        start = len(self) if self._prompt_length is None else self._prompt_length
        tokens, mask = self._all_tokens(), _joined(self._mask, np.bool_)[start:]
        logprobs = _joined(self._logprobs, np.float32)[start:]
        return Transcript(
            prompt_tokens=tokens[:start],
            response_tokens=tokens[start:],
            response_logprobs=logprobs if self._has_logprobs else np.zeros_like(logprobs),
            has_logprobs=self._has_logprobs,
            action_mask=None if mask.all() else mask,
            kept_tokens=tuple(self._kept_tokens) if self._kept_tokens else None,
            experts=np.concatenate(self._experts) if self._experts else None,
            segment_index=self._segment_index,
            parent_segment_index=parent_segment_index,
        )

    def _append(self, tokens: np.ndarray, logprobs: np.ndarray, *, sampled: bool) -> None:
        if len(tokens) != len(logprobs):
            raise ValueError(f"a completion has {len(tokens)} tokens and {len(logprobs)} logprobs, wanted as many")
        self._tokens.append(tokens)
        self._logprobs.append(logprobs)
        self._mask.append(np.full(len(tokens), sampled))
        self._length += len(tokens)

    def _all_tokens(self) -> np.ndarray:
        self._tokens = [_joined(self._tokens, np.int32)]
        return self._tokens[0]


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype)
