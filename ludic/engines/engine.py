"""Define the protocol of inference engines, and check requests and completions.

An engine gets token ids and returns token ids with logprobs; it knows neither the store nor text. Its weights come from
a folder with a version. All engines share the checks and their messages. Raises ConfigError for a bad request,
EngineError for a bad completion, ModelError for weights that give NaN.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ludic.errors import ConfigError, EngineError, ModelError
from ludic.records import NUM_TOKEN_IDS, Columns, FinishReason, WeightSpan, reasons_against, select
from ludic.settings import PositiveCount, Temperature, Tokens, TopP
from ludic.settings.table import check


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of sampling a completion."""

    temperature: Temperature = 1.0
    """Divisor of the logits; 0 takes the most likely token, with logprob 0."""
    top_p: TopP = 1.0
    """Nucleus sampling: keep the smallest set of tokens with at least this probability; 1 is off."""
    top_k: PositiveCount | None = None
    """Keep only the k most likely tokens; None keeps all."""
    max_tokens: Tokens = 256
    """Maximum tokens in one completion, including the stop token."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, as its last token. The engine adds the model's own end-of-sequence tokens."""
    return_mask: bool = False
    """Return the tokens that top_k and top_p kept at each token."""
    return_experts: bool = False
    """Return the experts that a mixture's routers chose for each token that the model read."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def wants_kept_tokens(self) -> bool:
        """True if a completion must have kept_tokens: the mask is requested, and top_k or top_p may cut tokens."""
        return self.return_mask and self.temperature > 0 and (self.top_p < 1 or self.top_k is not None)

    @property
    def wanted_columns(self) -> Mapping[str, str]:
        """Columns that a completion must have beyond the common ones, with the remedy if an engine does not return
        them."""
        wanted = {"kept_tokens": self.wants_kept_tokens, "experts": self.return_experts}
        return {name: _WITHOUT[name] for name, is_wanted in wanted.items() if is_wanted}


_WITHOUT = {
    "kept_tokens": "which training needs with top_k or top_p; start a run without these, or with --keep-sampling-mask "
    "False, which biases importance ratios",
    "experts": "which keep_experts stores; start a run without --keep-experts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Request for one completion."""

    prompt_tokens: np.ndarray
    """(prompt_length,) int32, at least one."""
    params: SamplingParams
    seed: int
    """Random seed. The same request, weights and seed give the same tokens, whatever else is in the batch, unless the
    engine's `repeats_in_any_batch` is False."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled completion."""

    tokens: np.ndarray
    """(length,) int32, including the stop token; at least one."""
    finish_reason: FinishReason
    weight_versions: tuple[WeightSpan, ...]
    """Versions of the weights, at least one, in the order of the tokens; together the spans cover all tokens."""
    columns: Columns
    """Arrays of the row that the sampler sets, by the name of their column (ludic.records.columns), for these tokens.
    Always response_logprobs: (length,) float32, nats, under the distribution sampled from, after temperature, top_k and
    top_p. kept_tokens with params.wants_kept_tokens: a Ragged of int32, the token ids, ascending, that top_k and top_p
    kept at each token, with the token itself; the logprob is under the softmax over them. experts with
    params.return_experts: (prompt_length + length - 1, L, K) int16, for each token that the model read, of the prompt
    too, the K experts that the router of each of L layers chose, ascending. Any other array is stored unchanged."""
    first_token_s: float | None = field(default=None, compare=False)
    """Seconds from the request to its first token; None if the engine does not measure it."""

    @property
    def logprobs(self) -> np.ndarray:
        """(length,) float32, nats."""
        return self.columns["response_logprobs"]

    @property
    def policy_version(self) -> int:
        """Version of the weights at the first token."""
        return self.weight_versions[0].version

    @property
    def policy_version_last(self) -> int:
        """Version of the weights at the last token."""
        return self.weight_versions[-1].version


class Engine(Protocol):
    """Samples completions under weights that can be swapped in place.

    One test suite (tests/engines, on the fixture `engine`) runs on every implementation.
    """

    name: str
    """Library and its version, such as "vllm 0.32.0"; stored with each rollout."""
    repeats_in_any_batch: bool
    """True if a seed gives the same tokens whatever else is in the batch. If False, only in the same batch, since
    logits round differently in another one."""
    policy_version: int
    """Version of the weights in use."""
    max_length: int
    """Maximum tokens of prompt and completion together."""
    max_batch: int
    """Number of sequences that are decoded together; a worker keeps this many requests here. For an engine without it,
    the default of `EngineConfig.max_batch` is assumed."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return a completion of the request; the engine batches all requests that wait at the same time.

        May be called from any thread and event loop. Cancelling the task frees the request's slot in the batch. Raises
        ConfigError if the model does not know a token of the prompt, or if prompt and max_tokens together exceed
        max_length; ModelError if the weights give NaN; HalfLoadedError if they are half loaded. A refused request
        affects no other. A request that begins while weights are loaded waits for them, or starts with the old ones. An
        error of the model's own step, such as a device without memory left, fails all requests in the batch.
        """
        ...

    def load_weights(self, folder: str, version: int) -> None:
        """Replace the weights by those of a Hugging Face folder of the same architecture.

        May be called from any thread. Requests being generated pause between two tokens and continue with the new
        weights; their completions have a span for each version. The key-value cache of their earlier tokens is kept, as
        in vLLM's mode `keep`: later logprobs are those of the new weights over keys and values of the old ones.

        All or nothing: raises ModelError if the folder is missing, half-written or of another architecture, and
        keeps the old weights and version. If reading fails later, while weights are copied: raises ModelError and keeps
        the old version, and `generate` raises HalfLoadedError until a load succeeds, also for requests being generated.
        """
        ...


def generate_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Completion]:
    """Generate in a new event loop and return one completion per request, in order; raises what the first one raises.

    For scripts and tests; also works inside a running event loop, as of a notebook, which it blocks.
    """

    completions: list[Completion] = []

    async def gather() -> None:
        # A result would cost time: asyncio.run makes its repr (Python 3.11).
        completions.extend(await asyncio.gather(*map(engine.generate, requests)))

    if _runs_in_event_loop():
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, gather()).result()
    else:
        asyncio.run(gather())
    return completions


def _runs_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


# --- Checks ----------------------------------------------------------------------------------------------


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


def check_keeps_experts(request: GenerationRequest, engine_name: str, *, is_kept: bool) -> None:
    """Raise ConfigError if a request wants experts from an engine that was started without keep_experts."""
    if request.params.return_experts and not is_kept:
        raise ConfigError(f"engine {engine_name} was started without keep_experts, so it returns no experts")


def check_completion(
    engine_name: str, request: GenerationRequest, completion: Completion, vocab_size: int | None
) -> None:
    """Raise EngineError unless a completion, of any engine, can be stored and trained on; ModelError if it has NaN.

    vocab_size: tokens that the model knows; None if it is not known. Raises ConfigError if the engine can't give what
    the request asks for.
    """
    found = why_no_answer(request, completion, vocab_size)
    if found is None and (stray := _stray_ids(request.prompt_tokens, vocab_size)):
        found = f"it took a prompt with {stray}"
    if found is not None:
        raise EngineError(f"engine {engine_name} broke its contract: {found}")
    if np.isnan(completion.logprobs).any():
        raise ModelError(nan_logits(completion.policy_version_last))
    for name, advice in request.params.wanted_columns.items():
        if completion.columns.get(name) is None:
            raise ConfigError(f"engine {engine_name} returns no {name}, {advice}")


def nan_logits(version: int) -> str:
    """Return the error for weights that give NaN."""
    return f"the weights of version {version} give NaN logits; did training diverge?"


def why_no_answer(request: GenerationRequest, completion: Completion, vocab_size: int | None) -> str | None:
    """Return the reason why a completion can't answer a request; None if it can.

    A NaN logprob passes: it shows that the weights give NaN.
    """
    tokens, columns = completion.tokens, completion.columns
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        return f"tokens are {_described(tokens)}, wanted a NumPy array of int32 of one dimension"
    if not 1 <= len(tokens) <= request.params.max_tokens:
        return f"{len(tokens)} tokens, wanted 1 to {request.params.max_tokens}"
    if stray := _stray_ids(tokens, vocab_size):
        return stray
    if not isinstance(columns, Mapping):
        return f"columns are a {type(columns).__name__}, wanted a mapping of arrays by name"
    of_sampler = select(lambda column: column.set_by == "sampler")
    if others := columns.keys() - {column.name for column in of_sampler}:
        known = ", ".join(column.name for column in of_sampler)
        return f"{min(map(str, others))} is not a column that an engine sets, wanted {known}"
    for column in of_sampler:
        if not column.is_nullable and columns.get(column.name) is None:
            return f"no {column.name}, which each completion has"
    for name, reason in reasons_against(columns, len(request.prompt_tokens), len(tokens), vocab_size or NUM_TOKEN_IDS):
        if not (name == "response_logprobs" and _has_nan(columns[name])):
            return f"{name} {reason}"
    return None


def _stray_ids(tokens: np.ndarray, vocab_size: int | None) -> str | None:
    """Describe token ids, (n,), if one is outside the model's vocabulary; None if all are inside."""
    num_ids = vocab_size or NUM_TOKEN_IDS
    if tokens.min(initial=0) >= 0 and tokens.max(initial=0) < num_ids:
        return None
    return f"tokens from {tokens.min()} to {tokens.max()}, wanted 0 to {num_ids - 1}, which the model knows"


def _has_nan(values: Any) -> bool:
    return isinstance(values, np.ndarray) and values.dtype.kind == "f" and bool(np.isnan(values).any())


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
