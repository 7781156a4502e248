"""Check requests before an engine takes them, and what engines answer, with the same messages for all engines."""

from collections.abc import Sequence

import numpy as np

from ludic.engines.engine import Completion, GenerationRequest
from ludic.errors import ConfigError, EngineError, ModelError
from ludic.schema.validation import LOGPROB_TOLERANCE, LOWEST_LOGPROB, NUM_TOKEN_IDS


def check_request(request: GenerationRequest, *, vocab_size: int, max_length: int) -> None:
    """Raise ConfigError if the model does not know a token of the prompt, or if the completion may not fit.

    vocab_size: tokens that the model knows. max_length: maximum tokens of prompt and completion together.
    """
    prompt = request.prompt_tokens
    if prompt.ndim != 1 or len(prompt) == 0:
        raise ConfigError(f"the prompt has shape {prompt.shape}, wanted (n,) with n at least 1")
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise ConfigError(
            f"the prompt has tokens from {prompt.min()} to {prompt.max()}, the model knows "
            f"0 to {vocab_size - 1}; is it rendered by the model's own tokenizer?"
        )
    length = len(prompt) + request.params.max_tokens
    if length > max_length:
        raise ConfigError(
            f"a prompt of {len(prompt)} tokens and max_tokens {request.params.max_tokens} make "
            f"{length}, the model holds {max_length}; lower max_tokens"
        )


def check_completion(
    engine_name: str, request: GenerationRequest, completion: Completion, vocab_size: int | None
) -> None:
    """Raise EngineError unless a completion, of any engine, can be stored and trained on; ModelError if it has NaN.

    vocab_size: tokens that the model knows; None if it is not known.
    """
    try:
        found = why_no_answer(request, completion.tokens, completion.logprobs, completion.kept_tokens, vocab_size)
        if found is None and _has_stray_token(request.prompt_tokens, vocab_size):
            found = f"it took a prompt with a token that is not from 0 to {(vocab_size or NUM_TOKEN_IDS) - 1}"
    except (TypeError, ValueError) as error:
        found = f"its tokens or logprobs are no numbers ({error})"
    if found is not None:
        raise EngineError(f"engine {engine_name} broke its contract: {found}")
    if np.isnan(completion.logprobs).any():
        raise ModelError(nan_logits(completion.policy_version_last))


def nan_logits(version: int) -> str:
    """Return the error for weights that give NaN."""
    return f"the weights of version {version} give NaN logits; did training diverge?"


def why_no_answer(
    request: GenerationRequest,
    tokens: Sequence[int] | np.ndarray,
    logprobs: Sequence[float] | np.ndarray,
    kept_tokens: Sequence[Sequence[int] | np.ndarray] | None,
    vocab_size: int | None,
) -> str | None:
    """Return why these can't be the answer to a request; None if they can.

    Token ids may be of any size here. A logprob that is NaN passes: it says that the weights give NaN.
    """
    if not 1 <= len(tokens) <= request.params.max_tokens or len(logprobs) != len(tokens):
        return (
            f"{len(tokens)} tokens and {len(logprobs)} logprobs; wanted as many logprobs as tokens, from 1 to "
            f"{request.params.max_tokens}"
        )
    wanted = f"wanted 0 to {(vocab_size or NUM_TOKEN_IDS) - 1}, which the model knows"
    if _has_stray_token(tokens, vocab_size):
        return f"tokens from {min(tokens)} to {max(tokens)}, {wanted}"
    values = np.asarray(logprobs, np.float64)
    bad = values[(values > LOGPROB_TOLERANCE) | (values < LOWEST_LOGPROB)]
    if len(bad):
        return f"logprob {bad[0]:g}, wanted {LOWEST_LOGPROB:g} to 0, the logarithm of a probability"
    if kept_tokens is not None and len(kept_tokens) != len(tokens):
        return f"kept tokens for {len(kept_tokens)} of {len(tokens)} tokens"
    for ids in kept_tokens or ():
        if len(ids) and _has_stray_token(ids, vocab_size):
            return f"kept tokens from {min(ids)} to {max(ids)}, {wanted}"
    return None


def _has_stray_token(tokens: Sequence[int] | np.ndarray, vocab_size: int | None) -> bool:
    """Return whether a token is none of the model's."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise TypeError(f"shape {tokens.shape} of {tokens.dtype}, wanted (n,) of int32")
        return bool(tokens.min() < 0 or tokens.max() >= (vocab_size or NUM_TOKEN_IDS))
    return min(tokens) < 0 or max(tokens) >= (vocab_size or NUM_TOKEN_IDS)
