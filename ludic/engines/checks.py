"""Check requests before an engine takes them, with the same messages for all engines."""

from ludic.engines.engine import GenerationRequest
from ludic.errors import ConfigError


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
