"""Embedded inference engine: Hugging Face transformers in this process, on the CPU or one accelerator.

Reads Hugging Face folders (safetensors; never pickled weights) and peft's LoRA folders, whose adapter it merges into
the base that they name. Writes nothing. Raises ModelError if a folder can't be used, and ConfigError if a request
can't be served.
"""

# Shapes: B = sequences of the batch, P = longest prompt, N = most new tokens, V = vocabulary.

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoConfig, DynamicCache, PretrainedConfig, PreTrainedModel

from ludic.engines.engine import Completion, GenerationRequest
from ludic.engines.sampling import make_rows, sample
from ludic.errors import ConfigError, ModelError, one_line
from ludic.models.adapters import base_of_adapter, merge_adapter
from ludic.models.weight_files import (
    can_read_into,
    check_tensors,
    first_unknown_name,
    load_pretrained,
    open_weights,
    read_into,
)

# Config entries that may differ between folders of the same architecture.
_NOT_ARCHITECTURE = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}


class TransformersEngine:
    """Engine that samples in batches with a key-value cache; see ludic.engines.engine.Engine for the contract.

    Calls from several threads are serialised, so no completion mixes two versions.
    """

    def __init__(
        self,
        folder: str,
        *,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        version: int = 0,
        max_batch: int = 256,
        base: Callable[[], str] | None = None,
        float32_head: bool = False,
    ) -> None:
        """Load a Hugging Face folder or id.

        device: None takes CUDA if available, else the CPU. dtype: None is float32 on the CPU, else the dtype of the
        weights. max_batch: maximum sequences in memory; longer lists of requests are split. base: returns the folder
        of the model that LoRA adapters are merged into; None takes the base that they name. float32_head: compute
        logits in float32, as a trainer with the same setting does.
        """
        if max_batch < 1:
            raise ConfigError(f"max_batch is {max_batch}, wanted at least 1")
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device is cuda, but torch finds no CUDA device here; set device to cpu or leave it out")
        if dtype is None and self._device.type == "cpu":
            dtype = torch.float32
        self._base = base
        self._model = _load_model(folder, dtype, base).to(self._device)
        if float32_head:
            _make_logits_in_float32(self._model)
        self._eos_token_ids = _eos_token_ids(self._model)
        self._max_batch = max_batch
        self._lock = threading.Lock()
        self._half_loaded: str | None = None
        """Folder whose weights have replaced only a part of those in use."""
        self.policy_version = version
        # A model without a table or range of positions, for example with ALiBi, has no limit in its config.
        self.max_length: int = getattr(self._model.config.get_text_config(), "max_position_embeddings", sys.maxsize)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        for index, request in enumerate(requests):
            self._check(request, index)
        # Sort by length, so that batches have little padding.
        order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_tokens))
        completions: dict[int, Completion] = {}
        with self._lock, torch.inference_mode():
            if self._half_loaded:
                raise ModelError(f"{self._half_loaded}: its weights are half loaded; load a version again, then sample")
            for start in range(0, len(order), self._max_batch):
                indexes = order[start : start + self._max_batch]
                batch = [requests[index] for index in indexes]
                completions.update(zip(indexes, self._generate_batch(batch), strict=True))
        return [completions[index] for index in range(len(requests))]

    def load_weights(self, folder: str, version: int) -> None:
        if not Path(folder).is_dir():
            raise ModelError(f"{folder}: there is no such folder; version {self.policy_version} stays in use")
        _check_same_architecture(self._model.config, _load_config(folder), folder)
        if base_of_adapter(folder) or not can_read_into(self._model):
            self._copy_second_model(folder, version)
        elif difference := self._read_in_place(folder, version):
            try:  # transformers translates some names, for example those of older releases
                self._copy_second_model(folder, version)
            except ModelError as error:
                raise ModelError(difference) from error

    def _read_in_place(self, folder: str, version: int) -> str | None:
        """Read the weights, or change nothing and return the first difference if the tensors have other names."""
        with open_weights(folder) as stored:
            difference = first_unknown_name(stored, self._model, folder)
            if difference is None:
                check_tensors(stored, self._model)
                self._replace(folder, version, partial(read_into, self._model, stored))
        return difference

    def _copy_second_model(self, folder: str, version: int) -> None:
        """Load weights that transformers or peft have to convert."""
        model = _load_model(folder, self._model.dtype, self._base)
        self._replace(folder, version, partial(self._model.load_state_dict, model.state_dict()))

    def _replace(self, folder: str, version: int, copy: Callable[[], object]) -> None:
        """Change the weights; if `copy` fails or is interrupted, `generate` raises until a later one succeeds."""
        with self._lock:
            self._half_loaded = folder
            copy()
            self._half_loaded, self.policy_version = None, version

    def _check(self, request: GenerationRequest, index: int) -> None:
        prompt, vocab_size = request.prompt_tokens, self._model.config.get_text_config().vocab_size
        if prompt.ndim != 1 or len(prompt) == 0:
            raise ConfigError(f"request {index}: the prompt has shape {prompt.shape}, wanted (n,) with n at least 1")
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise ConfigError(
                f"request {index}: the prompt has tokens from {prompt.min()} to {prompt.max()}, the model knows "
                f"0 to {vocab_size - 1}; is it rendered by the model's own tokenizer?"
            )
        length = len(prompt) + request.params.max_tokens
        if length > self.max_length:
            raise ConfigError(
                f"request {index}: a prompt of {len(prompt)} tokens and max_tokens {request.params.max_tokens} make "
                f"{length}, the model holds {self.max_length}; lower max_tokens"
            )

    def _generate_batch(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        rows = make_rows(requests, self._eos_token_ids, self._device)
        prompts = [np.asarray(request.prompt_tokens, dtype=np.int32) for request in requests]
        sequences = _Sequences(self._model, prompts, self.max_length)
        tokens = torch.zeros(rows.uniforms.shape, dtype=torch.int64, device=self._device)
        logprobs = torch.zeros(rows.uniforms.shape, device=self._device)
        finished = torch.zeros(len(requests), dtype=torch.bool, device=self._device)
        for step in range(tokens.shape[1]):
            drawn, drawn_logprobs = sample(sequences.logits, rows, rows.uniforms[:, step])
            tokens[rows.index, step], logprobs[rows.index, step] = drawn, drawn_logprobs
            finished |= (drawn[:, None] == rows.stop_token_ids).any(dim=1) | (rows.max_tokens <= step + 1)
            live = (~finished).nonzero()[:, 0]
            if len(live) == 0:
                break
            if len(live) <= len(finished) // 2:  # copying the cache pays off if it halves
                rows, drawn, finished = rows.select(live), drawn[live], finished[live]
                sequences.select(live)
            sequences.extend(drawn)
        columns = zip(requests, tokens.cpu().numpy(), logprobs.cpu().numpy(), strict=True)
        return [self._completion(*column) for column in columns]

    def _completion(self, request: GenerationRequest, tokens: np.ndarray, logprobs: np.ndarray) -> Completion:
        """Cut a row to its completion. tokens, logprobs: (N,), padded after the first stop token or max_tokens."""
        stop_token_ids = (*request.params.stop_token_ids, *self._eos_token_ids)
        stops = np.flatnonzero(np.isin(tokens[: request.params.max_tokens], stop_token_ids))
        length = int(stops[0]) + 1 if len(stops) else request.params.max_tokens
        if np.isnan(logprobs[:length]).any():
            raise ModelError(f"the weights of version {self.policy_version} give NaN logits; did training diverge?")
        return Completion(
            tokens=tokens[:length].astype(np.int32),
            logprobs=logprobs[:length].copy(),
            finish_reason="stop" if len(stops) else "length",
            policy_version=self.policy_version,
            policy_version_last=self.policy_version,
        )


class _Sequences:
    """A batch of left-padded sequences in a model's key-value cache, with the logits of their next tokens."""

    logits: Tensor
    """(B, V), in the model's dtype."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[np.ndarray], max_length: int) -> None:
        """Run the prompts, each int32; equal prompts, as in a group of rollouts, are run once."""
        self._model = model
        self._last_position = max_length - 1
        unique = {prompt.tobytes(): prompt for prompt in prompts}
        tokens, mask = (array.to(model.device) for array in _pad_left(list(unique.values())))
        self._mask = mask
        self._positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        self._cache = DynamicCache(config=model.config)
        self._forward(tokens)
        if len(unique) < len(prompts):
            index_of = {key: index for index, key in enumerate(unique)}
            self.select(torch.tensor([index_of[prompt.tobytes()] for prompt in prompts], device=model.device))

    def select(self, indexes: Tensor) -> None:
        """Keep the sequences at `indexes`, (n,) int64, which may repeat."""
        self.logits, self._mask, self._positions = self.logits[indexes], self._mask[indexes], self._positions[indexes]
        self._cache.batch_select_indices(indexes)

    def extend(self, tokens: Tensor) -> None:
        """Append one token, (B,) int64, to each sequence."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        # A finished sequence waits for the others; the positions of its padding must stay in the model's range.
        self._positions = (self._positions[:, -1:] + 1).clamp(max=self._last_position)
        self._forward(tokens[:, None])

    def _forward(self, tokens: Tensor) -> None:
        output = self._model(
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.logits = output.logits[:, -1]


def _pad_left(prompts: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return tokens and attention mask, each (B, P) int64; padding is token 0 with mask 0."""
    tokens = torch.zeros(len(prompts), max(len(prompt) for prompt in prompts), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, -len(prompt) :] = torch.from_numpy(np.array(prompt, dtype=np.int64))
        mask[row, -len(prompt) :] = 1
    return tokens, mask


def _load_config(folder: str) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, TypeError, ...: depends on what is broken
        raise ModelError(f"{folder}: no config.json that transformers can use: {one_line(error)}") from error


def _load_model(folder: str, dtype: torch.dtype | None, find_base: Callable[[], str] | None) -> PreTrainedModel:
    """Load a folder's model on the CPU, in eval mode. dtype: None keeps the dtype of the weights.

    Raises ModelError unless the weights are exactly those of the folder's config.json.
    """
    base = base_of_adapter(folder)
    if base and find_base:
        base = find_base()
    model = load_pretrained(base or folder, dtype=dtype, where=folder, use_safetensors=True)
    return merge_adapter(model, folder) if base else model


def _make_logits_in_float32(model: PreTrainedModel) -> None:
    """Compute logits in float32 from the weights at each call; a float32 copy would have to follow their updates."""
    head = model.get_output_embeddings()

    def forward(hidden: Tensor) -> Tensor:
        return linear(hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float())

    head.forward = forward


def _check_same_architecture(current: PretrainedConfig, other: PretrainedConfig, folder: str) -> None:
    ours, theirs = _architecture(current.to_dict()), _architecture(other.to_dict())
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if names:
        differences = ", ".join(f"{name} {theirs.get(name)} instead of {ours.get(name)}" for name in names)
        raise ModelError(f"{folder}: another architecture than the model in use: {differences}")


def _architecture(config: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _architecture(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _NOT_ARCHITECTURE
    }


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return all end-of-sequence tokens of the model; generation_config.json may name one, several or none."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)
