"""Rows of random dialogues are assembled as before the catalogue of columns (tests/oracles/transcript_before.py)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from oracles import present, transcript_before
from strategies import as_plain

from ludic.agents.transcript import RowBuilder, TranscriptBuilder

Call = tuple[np.ndarray, np.ndarray, np.ndarray | None, list[np.ndarray] | None, np.ndarray | None]
"""Prompt, completion, logprobs, kept tokens, experts."""


class Sampler:
    """Draws completions, which lack their arrays with a probability of their dialogue."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.lacking = rng.choice([0.0, 0.15, 1.0], 3, p=[0.6, 0.25, 0.15])
        self.shape = tuple(rng.integers(1, 4, 2).tolist())

    def tokens(self, most: int, least: int = 1) -> np.ndarray:
        """Few ids, so that prompts are often alike by chance."""
        return self.rng.integers(0, 3, self.rng.integers(least, most + 1)).astype(np.int32)

    def arrays(self, num_before: int, tokens: np.ndarray) -> tuple[Any, Any, Any]:
        rng, lacks = self.rng, self.rng.random(3) < self.lacking
        kept = [np.unique(rng.integers(0, 99, rng.integers(1, 4))).astype(np.int32) for _ in tokens]
        read = num_before + len(tokens) - 1
        return (
            None if lacks[0] else -rng.gamma(0.25, 2.0, len(tokens)).astype(np.float32),
            None if lacks[1] else kept,
            None if lacks[2] else rng.integers(0, 99, (read, *self.shape)).astype(np.int16),
        )


def dialogue(rng: np.random.Generator) -> Iterator[Call]:
    """Calls of one agent: each extends an earlier call with or without context, forks it, or begins anew."""
    sampler, histories = Sampler(rng), [np.zeros(0, np.int32)]
    for _ in range(rng.integers(1, 9)):
        history = histories[rng.integers(len(histories))] if rng.random() < 0.3 else histories[-1]
        if rng.random() < 0.25:  # rewritten or shortened
            history = history[: rng.integers(0, len(history) + 1)]
        context = sampler.tokens(4, least=0 if len(history) else 1)
        prompt = np.concatenate([history, context])
        tokens = sampler.tokens(4)
        yield prompt, tokens, *sampler.arrays(len(prompt), tokens)
        histories.append(np.concatenate([prompt, tokens]))


def assert_dialogues_are_equal(seeds: range) -> int:
    """Compare spans after each call and rows after each call; return the number of rows."""
    num_rows = 0
    for seed in seeds:
        before, builder = transcript_before.TranscriptBuilder(), TranscriptBuilder()
        for call in dialogue(np.random.default_rng(seed)):
            assert present.add_call(builder, *call) == before.add_call(*call), seed
            rows = [present.plain_transcript(row) for row in builder.transcripts()]
            assert as_plain(rows) == as_plain(before.transcripts()), seed
        num_rows += len(rows)
    return num_rows


def test_random_dialogues_are_assembled_as_before():
    assert assert_dialogues_are_equal(range(40)) > 60


@pytest.mark.slow
def test_four_hundred_dialogues_are_assembled_as_before():
    assert assert_dialogues_are_equal(range(400)) > 800


def test_the_dialogues_have_what_can_go_wrong():
    """Each kind of row comes often: with and without an array, with context, forks, completions of one token."""
    found = dict.fromkeys(("rows", "later rows", "with context", "logprobs", "kept_tokens", "experts", "one token"), 0)
    for seed in range(40):
        before = transcript_before.TranscriptBuilder()
        for call in dialogue(np.random.default_rng(seed)):
            before.add_call(*call)
            found["one token"] += len(call[1]) == 1
        for row in before.transcripts():
            found["rows"] += 1
            found["later rows"] += row.parent_segment_index is not None
            found["with context"] += row.action_mask is not None
            found["logprobs"] += row.has_logprobs
            found["kept_tokens"] += row.kept_tokens is not None
            found["experts"] += row.experts is not None
    assert min(found.values()) > 20, found
    assert max(found[name] for name in ("logprobs", "kept_tokens", "experts")) < 0.9 * found["rows"], found


def test_rows_that_are_known_beforehand_are_assembled_as_before():
    """Contexts and completions in any order, none of either, and several in a row."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        sampler, index = Sampler(rng), int(rng.integers(0, 3))
        before, builder = transcript_before.RowBuilder(index), RowBuilder(index)
        for _ in range(rng.integers(0, 7)):
            tokens = sampler.tokens(3, least=0)
            if not len(before) or rng.random() < 0.5:
                for each in (before, builder):
                    each.add_context(tokens)
            elif len(tokens):
                arrays = sampler.arrays(len(before), tokens)
                assert present.add_completion(builder, tokens, *arrays) == before.add_completion(tokens, *arrays)
            assert len(builder) == len(before)
            row = present.plain_transcript(builder.transcript(index or None))
            assert as_plain(row) == as_plain(before.transcript(index or None)), seed


def test_numbers_of_other_types_become_those_of_a_row_as_before():
    call = np.array([1, 2]), np.array([3, 4]), np.array([-1.0, -0.1]), None, None  # int64 and float64
    before, builder = transcript_before.TranscriptBuilder(), TranscriptBuilder()
    assert present.add_call(builder, *call) == before.add_call(*call)
    rows = [present.plain_transcript(row) for row in builder.transcripts()]
    assert as_plain(rows) == as_plain(before.transcripts())
    assert rows[0].response_logprobs.dtype == np.float32
