"""Make tokens of calls that were recorded as text, with a tokenizer and its chat template, as imports do.

The tokens of an earlier call whose text begins a prompt are kept, so that an agent's row goes on. Such calls have
capture `text`: nobody kept the sampled tokens. A call whose messages the template refuses stays without tokens. Pure.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ludic.engines import Completion
from ludic.errors import RefusedRecordError
from ludic.gateway.assembly import Prompts, ReadCall
from ludic.models import Tokenizer, TurnFinder, encode
from ludic.records import WeightSpan


@dataclass(frozen=True, slots=True)
class _Text:
    """Text and tokens of a call's prompt and answer."""

    text: str
    """Without an end token that the template does not write."""
    tokens: np.ndarray
    """(length,) int32."""


class TextTokens:
    """Makes tokens of calls, in the order of the calls of each episode."""

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Sequence[int] = ()) -> None:
        """stop_tokens: at which the model stops, beside the tokenizer's end token."""
        self._turns = TurnFinder(tokenizer, stop_tokens)

    def __call__(self, calls: Sequence[ReadCall], prompts: Prompts) -> None:
        """Give prompt and completion to each answered call of capture `text` that has messages."""
        known: defaultdict[tuple[str, int], list[_Text]] = defaultdict(list)
        for call in calls:
            if call.is_text and call.is_sound and call.messages and call.answer is not None:
                with suppress(RefusedRecordError):
                    tools = prompts.get(call.values["tools_digest"] or "", ())
                    self._add(call, tools, known[call.episode_id, call.attempt])

    def _add(self, call: ReadCall, tools: Sequence[Mapping[str, Any]], known: list[_Text]) -> None:
        assert call.answer is not None
        messages = (*call.messages, call.answer)
        is_cut = call.values["finish_reason"] == "length"
        turn = self._turns.of(messages, tools).of_last(len(messages), is_cut=is_cut)
        prompt, whole = self._encode(turn.prompt), self._encode(turn.prompt + turn.said)
        before = [each for each in known if turn.prompt.startswith(each.text)]
        if before:
            base = max(before, key=lambda each: len(each.text))
            if not _begins(prompt, base.tokens):
                prompt = np.concatenate([base.tokens, self._encode(turn.prompt[len(base.text) :])])
        completion = whole[len(prompt) :] if _begins(whole, prompt) else self._encode(turn.said)
        if turn.end_token is not None:
            completion = np.append(completion, np.int32(turn.end_token))
        call.prompt = prompt
        call.completion = Completion(
            tokens=completion,
            finish_reason="length" if is_cut else "stop",
            weight_versions=(WeightSpan(version=call.values["policy_version"] or 0, start=0, end=len(completion)),),
            columns={"response_logprobs": np.zeros(len(completion), np.float32)},
        )
        known.append(_Text(turn.prompt + turn.said, np.concatenate([prompt, completion])))

    def _encode(self, text: str) -> np.ndarray:
        return encode(self._turns.tokenizer, text)


def _begins(tokens: np.ndarray, beginning: np.ndarray) -> bool:
    return np.array_equal(tokens[: len(beginning)], beginning)
