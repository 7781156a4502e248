"""Protocol of inference engines: token ids in, token ids with logprobs out.

Engines know neither the store nor text. They get a folder of weights and a version.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ludic.bounds import check_numbers
from ludic.records import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of sampling a completion."""

    temperature: float = 1.0
    """Divisor of the logits; 0 takes the most likely token, with logprob 0."""
    top_p: float = 1.0
    """Nucleus sampling: keep the smallest set of tokens with at least this probability; 1 is off."""
    top_k: int | None = None
    """Keep only the k most likely tokens; None keeps all."""
    max_tokens: int = 256
    """Maximum tokens in one completion, including the stop token."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, as its last token. The engine adds the model's own end-of-sequence tokens."""

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Request for one completion."""

    prompt_tokens: np.ndarray
    """(prompt_length,) int32, at least one."""
    params: SamplingParams
    seed: int
    """Random seed. The same request, weights and seed give the same tokens, whatever else is in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled completion."""

    tokens: np.ndarray
    """(length,) int32, including the stop token; at least one."""
    logprobs: np.ndarray
    """(length,) float32, nats, under the distribution sampled from (after temperature, top_k and top_p)."""
    finish_reason: FinishReason
    policy_version: int
    """Version of the weights at the first token."""
    policy_version_last: int
    """Version of the weights at the last token."""


class Engine(Protocol):
    """Samples completions under weights that can be swapped in place.

    One test suite (tests/engines/test_engine.py) runs on every implementation.
    """

    policy_version: int
    """Version of the weights in use."""
    max_length: int
    """Maximum tokens of prompt and completion together."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return one completion per request, in the order of the requests.

        Raises ConfigError if prompt and max_tokens together exceed max_length.
        """
        ...

    def load_weights(self, folder: str, version: int) -> None:
        """Replace the weights by those of a Hugging Face folder of the same architecture.

        All or nothing: raises ModelError if the folder is missing, half-written or of another architecture, and
        keeps the old weights and version. If reading fails later, while weights are copied: raises ModelError and keeps
        the old version, and `generate` raises ModelError until a load succeeds.
        """
        ...
