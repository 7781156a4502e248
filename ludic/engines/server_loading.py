"""Load weights into a vLLM server that several workers share, and check the server before its tokens are stored.

A worker claims a load in the server's label, see below. vLLM has no compare-and-set, so the worker writes its claim,
waits for longer than an answer takes, and continues only if the label is still its own: among workers that claim at the
same time, the last writer loads. The label is read once more before the new weights are named in it; a worker whose
claim is gone by then has been replaced, and changes nothing more.

Before any of its tokens is stored, the server's flags are checked. Raises ConfigError, with the flags, for a server
that would sample from another distribution or return other logprobs than requested, or whose model can't be the run's.
A load after which a server gives other logprobs than the files raises WrongWeightsError.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from ludic.base import Longrope
from ludic.engines.engine import GenerationRequest, SamplingParams
from ludic.engines.server_http import (
    FLAGS,
    BadAnswerError,
    MissingEndpointError,
    RefusedError,
    Server,
    ServerCompletion,
    Setup,
)
from ludic.engines.vllm_options import to_vllm_params
from ludic.errors import ConfigError, LudicError, ModelError, one_line
from ludic.models import EXPERTS, first_of, load_config, load_pretrained, logprobs_alone

logger = logging.getLogger(__name__)

_CLAIM_S = 0.1
_POLL_EVERY_S = 0.1
_STALE_S = 10.0
"""Seconds within which a live worker renews its claim. While vLLM reads weights it does not answer, so those seconds do
not count."""


class LoadFailedError(ModelError):
    """A server could not load a folder; its weights are unknown."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The weights that a worker wants on its servers."""

    weights: "LoadedWeights"
    folder: str
    longrope: Longrope | None = None
    """Factors of a longrope model."""

    def is_met_by(self, label: str) -> bool:
        """Return whether a server with this label holds these weights, or newer ones of the same run."""
        found = weights_of(label)
        return found is not None and found.run == self.weights.run and found.version >= self.weights.version


async def load(server: Server, wanted: Wanted, *, is_forced: bool = False) -> None:
    """Return once the server holds the wanted weights, or newer ones of the same run.

    is_forced: load in any case. Raises ModelError if the folder is gone or the server could not load it.
    """
    while True:
        label, is_abandoned = await _settled(server)
        if wanted.is_met_by(label) and not is_abandoned and not is_forced:
            return
        if not Path(wanted.folder).is_dir():
            raise ModelError(f"{wanted.folder}: there is no such folder; {server.name} waits for a newer version")
        setup = await server.setup()  # before the claim: the first answer may take seconds
        if setup.device == "cpu" and setup.cuts_prompts:
            raise ConfigError(
                f"{server.name} computes long prompts in parts, at which vLLM 0.32 on a CPU dies if the request has a "
                "seed, as ludic's have; start it with --no-enable-chunked-prefill"
            )
        own = claim(label, wanted.weights.version, uuid4().hex[:12])
        await server.set_label(own)
        await asyncio.sleep(_CLAIM_S)
        if await server.label() != own:
            continue
        loading = _Loading(server, wanted, own, HALF_LOADED if is_abandoned else label)
        if await loading.run(setup):
            return


async def _settled(server: Server) -> tuple[str, bool]:
    """Wait while another worker loads; returns the label, and whether its worker has left a load unfinished."""
    label, since = await server.label(), time.monotonic()
    while is_claim(label) and time.monotonic() - since < _STALE_S:
        asked = time.monotonic()
        await asyncio.sleep(_POLL_EVERY_S)
        before, label = label, await server.label()
        waited_s = time.monotonic() - asked
        if label != before:
            since = time.monotonic()
        elif waited_s > 1:  # the server was reading weights
            since += waited_s
    return label, is_claim(label)


@dataclass(slots=True)
class _Loading:
    """A load that this worker has claimed."""

    server: Server
    wanted: Wanted
    claim: str
    left: str
    """Label of the server's weights if the load fails now."""

    async def run(self, setup: Setup) -> bool:
        """Load the weights and name them; returns False if another worker claimed the load in the meantime.

        After any failure, no claim is left that others would wait for, and no label names weights that were not
        compared.
        """
        try:
            return await self._replace(setup)
        except Exception as error:
            is_taken_over = await self._give_up()
            if is_taken_over and isinstance(error, WrongWeightsError):
                return False  # the weights that were compared are the other worker's
            if isinstance(error, BadAnswerError):
                raise LoadFailedError(_failed(self.server, self.wanted, error)) from error
            raise

    async def _replace(self, setup: Setup) -> bool:
        server, weights, folder = self.server, self.wanted.weights, self.wanted.folder
        before = weights_of(self.left)
        is_first = before is None or before.run != weights.run
        check = await self._renewing(make_load_check(folder, setup, is_first=is_first, longrope=self.wanted.longrope))
        if check is None or await server.label() != self.claim:
            return False
        await server.pause()
        self.left = HALF_LOADED
        await server.reload(folder)
        check.check_extension(server)
        if await server.label() != self.claim:
            await self._disown()
            return False
        await server.set_label(weights.label)
        await server.resume()
        await check.compare(server)
        return True

    async def _renewing(self, making: Coroutine[Any, Any, "LoadCheck"]) -> "LoadCheck | None":
        """Return the check once it is made, and renew the claim meanwhile, since that may take longer than a claim
        lasts.

        Returns None if another worker has claimed the load in the meantime.
        """
        task = asyncio.create_task(making)
        try:
            while not (await asyncio.wait([task], timeout=_STALE_S / 4))[0]:
                if await self.server.label() != self.claim:
                    return None
                self.claim = claim(self.claim, self.wanted.weights.version, uuid4().hex[:12])
                await self.server.set_label(self.claim)
            return task.result()
        finally:
            task.cancel()

    async def _disown(self) -> None:
        """Mark the weights as unknown if another worker has named the weights that it loaded: this worker replaced
        them.

        Its pause may also have come after the other's resume. A worker that still claims the load ends both.
        """
        if not is_claim(await self.server.label()):
            await self.server.set_label(HALF_LOADED)

    async def _give_up(self) -> bool:
        """Take the claim, or the label of the weights, from the server; returns True if another worker has done so."""
        with contextlib.suppress(LudicError):
            if await self.server.label() not in (self.claim, self.wanted.weights.label):
                if self.left == HALF_LOADED:
                    await self._disown()
                return True
            await self.server.set_label(self.left)
            await self.server.resume()
        return False


def _failed(server: Server, wanted: Wanted, error: BadAnswerError) -> str:
    if isinstance(error, WrongWeightsError):
        return f"{server.name} gets no requests after loading {wanted.folder}: {error}"
    return (
        f"{server.name} could not load {wanted.folder}, so it gets no requests ({error}); it must see this folder, "
        "as on a shared disk; else run `ludic serve ROOT` on its machine"
    )


# --- Labels of weights -----------------------------------------------------------------------------------
# By these labels, workers who share a vLLM server agree on its weights. Pure.
#
# vLLM keeps one text beside its weights (/weight_info, /update_weight_version) and repeats it with each answer's
# tokens. ludic writes
#
#     RUN:VERSION                       the weights of this version of this run
#     RUN:VERSION <- VERSION by NAME    the same weights, before the arrow, while NAME loads another version
#
# Any other text means unknown weights: those that the server started with, or half-loaded ones.

HALF_LOADED = "half loaded"
"""Label of weights that may be partly replaced."""

_LABEL = re.compile(r"([\w-]+):(\d+)( <- .*)?")


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Weights that ludic has loaded."""

    run: str
    """Id of a run: letters, digits, _ and -."""
    version: int

    @property
    def label(self) -> str:
        return f"{self.run}:{self.version}"


def weights_of(label: str) -> LoadedWeights | None:
    """Return the weights that a label names; None if they are unknown."""
    match = _LABEL.fullmatch(label)
    return LoadedWeights(match[1], int(match[2])) if match else None


def is_claim(label: str) -> bool:
    """Return whether a label claims that other weights are being loaded."""
    return " <- " in label


def claim(label: str, version: int, name: str) -> str:
    """Return a label that claims the loading of a version. label: that of the weights in use, or an earlier claim."""
    return f"{label.partition(' <- ')[0]} <- {version} by {name}"


# --- Checks of a server ----------------------------------------------------------------------------------
# Facts that a server reports over HTTP, and its weights after a load.

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
    """Facts about a server that do not change while it runs."""

    version: str
    """Version of vLLM."""
    model: str
    """Name of the model in requests; SERVE_NAME if `ludic serve` started the server."""
    max_length: int | None
    """Maximum tokens of prompt and completion together; None if the server does not report it."""
    has_generate: bool
    """True if the server has /inference/v1/generate; else /v1/completions is used."""


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


def _check_logprobs(name: str, answer: ServerCompletion) -> None:
    """Raise ConfigError unless the logprob is that of the distribution sampled from: with top_k 1, it is 0.

    Weights that give NaN prove nothing here; they fail each request.
    """
    if abs(answer.logprobs[0]) > _NEARLY_ZERO:
        raise ConfigError(
            f"{name} gives logprobs of another distribution than it samples from (with top_k 1 the logprob is "
            f"{answer.logprobs[0]:.4g}, wanted 0); start it with {FLAGS}"
        )


async def _sample(
    server: Server, request: GenerationRequest, vocab_size: int, model: str, salt: str
) -> tuple[ServerCompletion, bool]:
    """Return an answer, and whether it came from /inference/v1/generate."""
    params = to_vllm_params(request, (), vocab_size)
    try:
        return await server.generate(request, params, salt), True
    except MissingEndpointError:
        return await server.complete(request, params, salt, model), False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCheck:
    """Values to compare after a load; computed before it, so that the server does not wait for them."""

    vocab_size: int
    wrong_without_extension: str | None
    """Errors, certain or possible, of a load without ludic's extension."""
    device: str
    """Device of the server; "" if not reported."""
    tolerance: float
    """Maximum difference of logprobs, in nats."""
    model: PreTrainedModel | None
    """The weights of the folder; None compares nothing."""

    def check_extension(self, server: Server) -> None:
        """Raise WrongWeightsError if the last load did not change all weights, or possibly did not."""
        if self.wrong_without_extension and not server.has_extension:
            raise WrongWeightsError(
                f"{self.wrong_without_extension}, unless it is started with ludic's extension; start it with {FLAGS}"
            )

    async def compare(self, server: Server) -> None:
        """Raise WrongWeightsError if the server's logprobs of one completion are not those of the folder's weights."""
        if self.model is None:
            return
        prompt = np.linspace(0, self.vocab_size - 1, _NUM_COMPARED + 2, dtype=np.int32)[1:-1]
        request = GenerationRequest(prompt_tokens=prompt, params=SamplingParams(max_tokens=_NUM_COMPARED), seed=0)
        # A new salt: prompts under it share no prefix with those under the previous weights.
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


async def make_load_check(folder: str, setup: Setup, *, is_first: bool, longrope: Longrope | None = None) -> LoadCheck:
    """Return the check of a load. Raises ModelError for a folder without a usable config.json.

    setup: of the server; an unreported device may be a CPU. is_first: the server holds none of the run's weights. Such
    a load is compared, and on a CPU every load, if the files are small. longrope: factors of a longrope model.
    """
    config, device = load_config(folder), setup.device
    model = None
    if is_first or device in ("cpu", ""):
        model = await asyncio.to_thread(_read, folder, longrope)
    return LoadCheck(
        vocab_size=config.get_text_config().vocab_size,
        wrong_without_extension=_wrong_without_extension(config, device),
        device=device,
        tolerance=_TOLERANCES.get(setup.dtype, _HALF_TOLERANCE),
        model=model,
    )


def _wrong_without_extension(config: PretrainedConfig, device: str) -> str | None:
    """Return the errors of a load by vLLM 0.32 itself. device: "" if not reported."""
    if config.model_type == "gpt_oss":
        return "vLLM keeps the old experts of gpt-oss"
    text = config.get_text_config()
    where = "on a CPU" if device else "/server_info does not tell its device, and on a CPU"
    if device in ("cpu", "") and (config.tie_word_embeddings or text.tie_word_embeddings):
        return f"{where}, vLLM keeps the old head of a model with tied embeddings"
    if device in ("cpu", "") and first_of(text, EXPERTS):
        return f"{where}, vLLM misplaces the new experts of a mixture"
    return None


def _read(folder: str, longrope: Longrope | None) -> PreTrainedModel | None:
    """Return a folder's model in float32; None if it is large, or if transformers can't read it, though vLLM may."""
    size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    if size > _MOST_COMPARED_BYTES:
        logger.info("%s: logprobs of the server are not compared, as its files have %.1f GiB", folder, size / (1 << 30))
        return None
    try:
        return load_pretrained(folder, dtype=torch.float32, longrope=longrope, attn_implementation="eager")
    except (LudicError, MemoryError) as error:
        logger.warning("logprobs of the server are not compared: %s", one_line(error))
        return None
