"""Find out over HTTP how a vLLM server was started, before any of its tokens is stored.

Raises ConfigError, with the flags, for a server that would sample another distribution, or give other logprobs, than
the one asked for; and for one whose model can't be the run's.
"""

from dataclasses import dataclass

import numpy as np

from ludic.engines.engine import GenerationRequest, SamplingParams
from ludic.engines.server_http import (
    FLAGS,
    Answer,
    MissingEndpointError,
    RefusedError,
    Server,
)
from ludic.engines.vllm_params import to_vllm_params
from ludic.errors import ConfigError

_NEARLY_ZERO = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What stays the same while a server runs."""

    version: str
    """Version of vLLM."""
    model: str
    """Name of the model in requests; SERVE_NAME if `ludic serve` started the server."""
    max_length: int | None
    """Maximum tokens of prompt and completion together; None if the server does not tell."""
    has_generate: bool
    """Whether it has /inference/v1/generate; else /v1/completions is used."""


async def inspect(server: Server, *, vocab_size: int) -> ServerFacts:
    """Return a server's facts, with one token sampled. vocab_size: tokens that the run's model knows."""
    model = await server.model()
    request = GenerationRequest(
        prompt_tokens=np.array([vocab_size - 1], dtype=np.int32), params=SamplingParams(top_k=1, max_tokens=1), seed=0
    )
    params = to_vllm_params(request, (), vocab_size)
    try:
        try:
            answer, has_generate = await server.generate(request, params, "check"), True
        except MissingEndpointError:
            answer, has_generate = await server.complete(request, params, "check", model.id), False
    except MissingEndpointError as error:
        raise ConfigError(f"{error}; wanted a vLLM server, which has it") from error
    except RefusedError as error:
        raise ConfigError(
            f"{error}; the run's model has {vocab_size} tokens, so this server seems to have another model; "
            "start it with a policy of the run"
        ) from error
    _check_logprobs(server.name, answer)
    return ServerFacts(
        version=await server.version(),
        model=model.id,
        max_length=model.max_model_len,
        has_generate=has_generate,
    )


def _check_logprobs(name: str, answer: Answer) -> None:
    """Raise ConfigError unless the logprob is that of the distribution sampled from: with top_k 1, it is 0.

    Weights that give NaN tell nothing; they fail each request.
    """
    if abs(answer.logprobs[0]) > _NEARLY_ZERO:
        raise ConfigError(
            f"{name} gives logprobs of another distribution than it samples from (with top_k 1 the logprob is "
            f"{answer.logprobs[0]:.4g}, wanted 0); start it with {FLAGS}"
        )
