"""Find out over HTTP how a vLLM server was started, before any of its tokens is stored, and what a load left there.

Raises ConfigError, with the flags, for a server that would sample another distribution, or give other logprobs, than
the one asked for; and for one whose model can't be the run's. A load after which a server gives other logprobs than the
files raises WrongWeightsError.
"""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from transformers import PreTrainedModel

from ludic.engines.engine import GenerationRequest, SamplingParams
from ludic.engines.server_http import (
    FLAGS,
    Answer,
    BadAnswerError,
    MissingEndpointError,
    RefusedError,
    Server,
)
from ludic.engines.vllm_params import to_vllm_params
from ludic.errors import ConfigError, LudicError, one_line
from ludic.models.architecture import load_config
from ludic.models.families import logprobs_alone
from ludic.models.weight_files import load_pretrained

logger = logging.getLogger(__name__)

_NEARLY_ZERO = 1e-3
_MOST_COMPARED_BYTES = 2 << 30
"""Files of weights up to this size are read into this process as well; it takes some 2 s, before the server waits."""
_TOLERANCES = {"float32": 1e-3, "float16": 0.1}
"""Nats by the server's dtype; _HALF_TOLERANCE for any other. Sound servers differ by 2e-5 in float32."""
_HALF_TOLERANCE = 0.3
_NUM_COMPARED = 8
"""Tokens of the prompt, and of its completion."""


class WrongWeightsError(BadAnswerError):
    """A server computes with other weights than those that it has loaded."""


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
    try:
        answer, has_generate = await _sample(server, request, vocab_size, model.id, "check")
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


async def _sample(
    server: Server, request: GenerationRequest, vocab_size: int, model: str, salt: str
) -> tuple[Answer, bool]:
    """Return an answer, and whether it came from /inference/v1/generate."""
    params = to_vllm_params(request, (), vocab_size)
    try:
        return await server.generate(request, params, salt), True
    except MissingEndpointError:
        return await server.complete(request, params, salt, model), False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCheck:
    """What is compared after a load; made before it, so that the server waits no longer for it."""

    vocab_size: int
    wants_extension: bool
    """Whether a load without ludic's extension leaves the head as it was, or may do so."""
    device: str
    """Device of the server; "" if it does not tell."""
    tolerance: float
    """Maximum difference of logprobs, in nats."""
    model: PreTrainedModel | None
    """The weights of the folder; None compares nothing."""

    def check_extension(self, server: Server) -> None:
        """Raise WrongWeightsError if the load that is over did not change the head, or perhaps did not."""
        if self.wants_extension and not server.has_extension:
            unknown = "" if self.device else "/server_info does not tell its device, and "
            raise WrongWeightsError(
                f"{unknown}on a CPU, vLLM keeps the old head of a model with tied embeddings, unless it is started "
                f"with ludic's extension; start it with {FLAGS}"
            )

    async def compare(self, server: Server) -> None:
        """Raise WrongWeightsError if the server's logprobs of one completion are not those of the folder's weights."""
        if self.model is None:
            return
        prompt = np.linspace(0, self.vocab_size - 1, _NUM_COMPARED + 2, dtype=np.int32)[1:-1]
        request = GenerationRequest(prompt_tokens=prompt, params=SamplingParams(max_tokens=_NUM_COMPARED), seed=0)
        # A salt of its own: prompts under it share no prefix with those under the weights before.
        salt = f"check {uuid4().hex}"
        answer, _ = await _sample(server, request, self.vocab_size, (await server.model()).id, salt)
        tokens = np.concatenate([prompt, np.array(answer.tokens, dtype=np.int32)])
        with torch.inference_mode():
            wanted = logprobs_alone(self.model, tokens)[len(prompt) - 1 :]
        difference = (torch.tensor(answer.logprobs) - wanted).abs().max().item()
        if difference > self.tolerance:  # not so for NaN: weights that diverged fail each request
            raise WrongWeightsError(
                f"its logprobs differ by up to {difference:.2g} nats from those of the files (wanted "
                f"{self.tolerance:.0e}); start it with {FLAGS}"
            )


async def make_load_check(folder: str, device: str, dtype: str, *, is_first: bool) -> LoadCheck:
    """Return the check of a load. Raises ModelError for a folder without a usable config.json.

    device, dtype: of `Server.device_and_dtype`; a device that is not told may be a CPU. is_first: the server holds none
    of the run's weights. Such a load is compared, and on a CPU each one, if the files are small.
    """
    config = load_config(folder)
    text = config.get_text_config()
    may_be_cpu = device in ("cpu", "")
    model = None
    if is_first or may_be_cpu:
        model = await asyncio.to_thread(_read, folder)
    return LoadCheck(
        vocab_size=text.vocab_size,
        wants_extension=may_be_cpu and bool(config.tie_word_embeddings or text.tie_word_embeddings),
        device=device,
        tolerance=_TOLERANCES.get(dtype, _HALF_TOLERANCE),
        model=model,
    )


def _read(folder: str) -> PreTrainedModel | None:
    """Return a folder's model in float32; None if it is large, or transformers can't read it, as vLLM perhaps can."""
    size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    if size > _MOST_COMPARED_BYTES:
        logger.info("%s: logprobs of the server are not compared, as its files have %.1f GiB", folder, size / (1 << 30))
        return None
    try:
        return load_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    except (LudicError, MemoryError) as error:
        logger.warning("logprobs of the server are not compared: %s", one_line(error))
        return None
