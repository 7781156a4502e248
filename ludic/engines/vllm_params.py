"""Translate between ludic's engine protocol and vLLM's sampling parameters and outputs.

Pure, and imports nothing of vLLM: the engine in this process and the one that asks servers share it. Raises ConfigError
for parameters that vLLM would change silently, ModelError if the weights give NaN, and EngineError if vLLM ends a
request for a reason of its own.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from ludic.engines.checks import nan_logits
from ludic.engines.engine import Completion, GenerationRequest
from ludic.errors import ConfigError, EngineError, ModelError
from ludic.records import FinishReason, WeightSpan

_LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one, except 0, with no more than a warning in its log."""
_MOST_TIES = 8
"""Tokens as likely as the last one of top_k, which vLLM keeps too."""
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


def to_vllm_params(request: GenerationRequest, eos_token_ids: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams, which are also the JSON of `sampling_params` over HTTP.

    eos_token_ids: the model's own end-of-sequence tokens. They are passed as stop tokens, and ignore_eos is set, so
    that neither the tokenizer's nor generation_config.json's can differ from those of other engines. A stop token is
    the last token of the completion. logprobs 0 asks for the sampled token's alone, which are those of the
    distribution sampled from if vLLM was started with logprobs_mode processed_logprobs.
    """
    params = request.params
    is_greedy = params.temperature == 0
    if 0 < params.temperature < _LOWEST_TEMPERATURE:
        raise ConfigError(
            f"temperature is {params.temperature}, vLLM samples with at least {_LOWEST_TEMPERATURE}; "
            "set it to 0 to take the most likely token"
        )
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or 0,
        "max_tokens": params.max_tokens,
        "seed": None if is_greedy else _to_vllm_seed(request.seed),
        "stop_token_ids": sorted({*eos_token_ids, *params.stop_token_ids}),
        "ignore_eos": True,
        "logprobs": _num_candidates(request, vocab_size) if params.wants_kept_tokens else 0,
        "detokenize": False,
    }


def _num_candidates(request: GenerationRequest, vocab_size: int) -> int:
    """Return the number of most likely tokens whose logprobs tell which of them top_k and top_p kept."""
    top_k = request.params.top_k
    if top_k is None:
        raise ConfigError(
            "top_p alone may keep any number of tokens, and vLLM would send the logprobs of all tokens at each one; "
            "set top_k too, for example to 200, or --keep-sampling-mask False, which biases importance ratios"
        )
    return min(top_k + _MOST_TIES, vocab_size)


def _to_vllm_seed(seed: int) -> int:
    """Return a hash of 63 bits: vLLM takes -1 for no seed, and the CPU's generator ignores all but the low 32 bits."""
    return xxh3_64_intdigest((seed % 2**64).to_bytes(8, "little")) >> 1


def to_completion(
    request: GenerationRequest,
    *,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None,
    weight_versions: Sequence[WeightSpan],
    candidates: Sequence[tuple[Sequence[int], Sequence[float]]] | None = None,
    first_token_s: float | None = None,
) -> Completion:
    """Return the completion of a request from the lists that vLLM gives, one entry per token.

    candidates: ids and logprobs of the token and the most likely ones, if the request wants kept_tokens.
    A greedy completion gets logprobs 0, as the protocol says; vLLM gives those of temperature 1.
    """
    reason = _FINISH_REASONS.get(finish_reason or "")
    if reason is None:
        raise EngineError(f"vLLM ended a request with finish_reason {finish_reason}; wanted stop or length")
    array = np.array(logprobs, dtype=np.float32)
    if np.isnan(array).any():
        raise ModelError(nan_logits(weight_versions[-1].version))
    return Completion(
        tokens=np.array(tokens, dtype=np.int32),
        logprobs=np.zeros_like(array) if request.params.temperature == 0 else array,
        finish_reason=reason,
        weight_versions=tuple(weight_versions),
        kept_tokens=None if candidates is None else tuple(_kept(*pair) for pair in candidates),
        first_token_s=first_token_s,
    )


def _kept(token_ids: Sequence[int], logprobs: Sequence[float]) -> np.ndarray:
    """Return the ids, (kept,) int32 ascending, of the tokens that were not cut; those that were have logprob -inf."""
    return np.unique(np.array(token_ids, dtype=np.int32)[np.isfinite(np.array(logprobs, dtype=np.float32))])
