"""Requests that tests of engines make of their tiny model, which has 64 tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ludic.engines.engine import Completion, GenerationRequest, SamplingParams

PROMPT = np.array([4, 46, 50, 47, 2, 5], dtype=np.int32)
LONGER_PROMPT = np.array([3, 45, 48, 46, 2, 4, 51, 52, 53, 54, 2, 5], dtype=np.int32)


def a_request(prompt: np.ndarray = PROMPT, *, seed: int = 0, max_tokens: int = 16, **params: Any) -> GenerationRequest:
    params["max_tokens"] = max_tokens
    return GenerationRequest(prompt_tokens=prompt, params=SamplingParams(**params), seed=seed)


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in completions]
