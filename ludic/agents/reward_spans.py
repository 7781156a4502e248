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
    tokenizer: "PreTrainedTokenizerBase",
    tokens: np.ndarray,
    action: str,
    spans: Sequence[SpanReward],
    *,
    start: int | None = None,
) -> list[tuple[int, float]]:
    """Return for each span the index of the token that ends it, and its reward.

    tokens: (length,) int32, the completion. action: what a parser found in it, and start: where in its text. Where the
    action is not in the text, or no start is known and it is there more than once, all rewards fall at the last token.
    """
    if not spans:
        return []
    start = _start_of(action, decode(tokenizer, tokens), start)
    if start is None:
        return [(len(tokens) - 1, span.reward) for span in spans]
    return [(_token_of(tokenizer, tokens, start + span.end), span.reward) for span in spans]


def _start_of(action: str, text: str, start: int | None) -> int | None:
    if isinstance(start, int) and start >= 0 and text.startswith(action, start):  # a user's parser may say anything
        return start
    first = text.find(action)
    return first if first >= 0 and first == text.rfind(action) else None


def _token_of(tokenizer: "PreTrainedTokenizerBase", tokens: np.ndarray, num_characters: int) -> int:
    """Return the index of the first token with which the text has this number of characters."""

    def num_complete(index: int) -> int:
        # The bytes of a character that is not complete are decoded as U+FFFD.
        return len(decode(tokenizer, tokens[: index + 1]).rstrip("\ufffd"))

    return min(bisect_left(range(len(tokens)), num_characters, key=num_complete), len(tokens) - 1)
