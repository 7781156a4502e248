"""Embedded inference engine: Hugging Face transformers in this process, on the CPU or one accelerator.

Reads Hugging Face folders (safetensors; never pickled weights) and peft's LoRA folders, whose adapter it merges into
the base that they name. Writes nothing. Raises ModelError if a folder can't be used, and ConfigError if a request
can't be served.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ludic.engines.attention import use_decoding_attention
from ludic.engines.continuous import ContinuousBatch
from ludic.engines.engine import Completion, GenerationRequest
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
    """Engine that batches continuously, with a key-value cache; see ludic.engines.engine.Engine for the contract.

    Requests join the batch between two tokens. Models whose cache has other than attention layers, for example states
    of linear attention, get a new batch only when the one before is finished.
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
        weights. max_batch: maximum sequences that are decoded together; further requests wait their turn.
        base: returns the folder of the model that LoRA adapters are merged into; None takes the base that they name.
        float32_head: compute logits in float32, as a trainer with the same setting does.
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
        if self._device.type == "cpu":  # nobody has measured it elsewhere
            use_decoding_attention(self._model)
        if float32_head:
            _make_logits_in_float32(self._model)
        self._half_loaded: str | None = None
        """Folder whose weights have replaced only a part of those in use."""
        self.policy_version = version
        # A model without a table or range of positions, for example with ALiBi, has no limit in its config.
        self.max_length: int = getattr(self._model.config.get_text_config(), "max_position_embeddings", sys.maxsize)
        self._batch = ContinuousBatch(
            self._model,
            max_length=self.max_length,
            max_batch=max_batch,
            eos_token_ids=_eos_token_ids(self._model),
            usable_version=self._usable_version,
        )

    async def generate(self, request: GenerationRequest) -> Completion:
        self._check(request)
        return await self._batch.generate(request)

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
        """Change the weights between two steps; if `copy` fails, `generate` raises until a later one succeeds."""

        def replace() -> None:
            self._half_loaded = folder
            copy()
            self._half_loaded, self.policy_version = None, version

        self._batch.between_steps(replace)

    def _usable_version(self) -> int:
        if self._half_loaded:
            raise ModelError(f"{self._half_loaded}: its weights are half loaded; load a version again, then sample")
        return self.policy_version

    def _check(self, request: GenerationRequest) -> None:
        prompt, vocab_size = request.prompt_tokens, self._model.config.get_text_config().vocab_size
        if prompt.ndim != 1 or len(prompt) == 0:
            raise ConfigError(f"the prompt has shape {prompt.shape}, wanted (n,) with n at least 1")
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise ConfigError(
                f"the prompt has tokens from {prompt.min()} to {prompt.max()}, the model knows "
                f"0 to {vocab_size - 1}; is it rendered by the model's own tokenizer?"
            )
        length = len(prompt) + request.params.max_tokens
        if length > self.max_length:
            raise ConfigError(
                f"a prompt of {len(prompt)} tokens and max_tokens {request.params.max_tokens} make "
                f"{length}, the model holds {self.max_length}; lower max_tokens"
            )


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
