"""What every inference engine promises: token ids in, token ids with logprobs out.

Engines know neither the store nor text. They are handed a folder of weights and a version.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ludic.bounds import check_numbers
from ludic.records import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How completions are sampled."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token, with logprob 0."""
    top_p: float = 1.0
    """Nucleus: the smallest set of tokens with at least this probability; 1 is off."""
    top_k: int | None = None
    """Only the k most likely tokens."""
    max_tokens: int = 256
    """Most tokens in one completion, the stop token included."""
    stop_token_ids: tuple[int, ...] = ()
    """End a completion, and are its last token; the engine adds the model's own end of sequence."""

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One completion to sample."""

    prompt_tokens: np.ndarray
    """(prompt_length,) int32, at least one."""
    params: SamplingParams
    seed: int
    """The same request with the same weights and seed gives the same tokens, whatever else is in its batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine sampled."""

    tokens: np.ndarray
    """(length,) int32, the stop token included; at least one."""
    logprobs: np.ndarray
    """(length,) float32, nats, of the distribution really sampled from (after temperature, top_k and top_p)."""
    finish_reason: FinishReason
    policy_version: int
    """Weights at the first token."""
    policy_version_last: int
    """Weights at the last token."""


class Engine(Protocol):
    """Samples completions under weights that can be swapped in place.

    One test suite (tests/inference/test_engine.py) runs on every implementation.
    """

    policy_version: int
    """Version of the weights in use."""
    max_length: int
    """Most tokens of prompt and completion together."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """One completion a request, in the order of the requests.

        Raises ConfigError when prompt and max_tokens exceed what the model can hold.
        """
        ...

    def load_weights(self, folder: str, version: int) -> None:
        """Swap in the weights of a Hugging Face folder of the same architecture.

        All or nothing: a missing, half-written or foreign folder raises ModelError and the
        old weights and version stay in use.
        """
        ...
