"""Find the tokens of a completion at which rewards for parts of an action fall."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ludic.environments.environment import SpanReward
from ludic.models.chat import decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def rewards_at_tokens(
    tokenizer: "PreTrainedTokenizerBase", tokens: np.ndarray, action: str, spans: Sequence[SpanReward]
) -> list[tuple[int, float]]:
    """Return for each span the index of the token that ends it, and its reward.

    tokens: (length,) int32, the completion. action: what a parser found in it. If the parser has rewritten the action,
    so that it is no part of the completion's text, all rewards fall at the last token.
    """
    if not spans:
        return []
    start = decode(tokenizer, tokens).rfind(action)
    if start < 0:
        return [(len(tokens) - 1, span.reward) for span in spans]
    return [(_token_of(tokenizer, tokens, start + span.end), span.reward) for span in spans]


def _token_of(tokenizer: "PreTrainedTokenizerBase", tokens: np.ndarray, num_characters: int) -> int:
    """Return the index of the first token with which the text has this number of characters."""
    index = bisect_left(range(len(tokens)), num_characters, key=lambda i: len(decode(tokenizer, tokens[: i + 1])))
    return min(index, len(tokens) - 1)
