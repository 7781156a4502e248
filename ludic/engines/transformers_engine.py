"""Sample with Hugging Face transformers in this process, on the CPU or one accelerator.

Reads Hugging Face folders (safetensors; never pickled weights) and peft's LoRA folders, whose adapter it merges into
the base that they name. Writes nothing. Raises ModelError if a folder can't be used, and ConfigError if a request
can't be served.
"""

import inspect
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ludic.base import Longrope, check_model_folder
from ludic.engines.continuous import ContinuousBatch, probe_batches
from ludic.engines.engine import Completion, GenerationRequest, check_keeps_experts, check_request
from ludic.engines.registry import EngineSetup
from ludic.errors import ConfigError, HalfLoadedError, ModelError
from ludic.models import (
    Routers,
    TokensWithLogprobs,
    base_of_adapter,
    can_read_into,
    check_family,
    check_same_architecture,
    check_tensors,
    eos_token_ids,
    first_unknown_name,
    load_config,
    load_pretrained,
    max_positions,
    merge_adapter,
    open_weights,
    read_into,
)

logger = logging.getLogger(__name__)

_WHAT = "the batches of engine transformers"


class TransformersEngine:
    """Engine that batches continuously, with a key-value cache; see ludic.engines.engine.Engine for the contract.

    Requests join the batch between two tokens. Models whose cache has other than attention layers, for example states
    of linear attention, get a new batch only when the one before is finished.
    """

    repeats_in_any_batch = True

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
        keep_experts: bool = False,
        longrope: Longrope | None = None,
    ) -> None:
        """Load a Hugging Face folder or id.

        device: None takes CUDA if available, else the CPU. dtype: None is float32 on the CPU, else the dtype of the
        weights. max_batch: maximum sequences that are decoded together; further requests wait their turn.
        base: returns the folder of the model that LoRA adapters are merged into; None takes the base that they name.
        float32_head: compute logits in float32, as a trainer with the same setting does.
        keep_experts: requests may ask for the experts that tokens are sent to. longrope: of EngineSetup.
        """
        if max_batch < 1:
            raise ConfigError(f"max_batch is {max_batch}, wanted at least 1")
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device is cuda, but torch finds no CUDA device here; set device to cpu or leave it out")
        if dtype is None and self._device.type == "cpu":
            dtype = torch.float32
        self._base, self._longrope = base, longrope
        self._attention, is_tried = exact_attention(_folder_of_weights(folder, base), folder)
        if not is_tried:
            logger.warning(
                "%s: no small model of its configuration runs, so it is not tested whether %s give exact logprobs; "
                "watch sampler_kl, which should be about 0",
                *(folder, _WHAT),
            )
        self._model = _load_model(folder, dtype, base, self._attention, longrope).to(self._device)
        if self._device.type == "cpu":  # not measured elsewhere
            use_decoding_attention(self._model)
        if float32_head:
            _make_logits_in_float32(self._model)
        self._routers = _tried_routers(self._model, folder) if keep_experts else None
        self.name = f"transformers {transformers.__version__}"
        self._config: bytes | None = None
        """config.json of the weights that were loaded last."""
        self._half_loaded: str | None = None
        """Folder whose weights have replaced only a part of those in use."""
        self.policy_version, self.max_batch = version, max_batch
        self.max_length = max_positions(self._model.config, longrope)
        self._batch = ContinuousBatch(
            self._model,
            max_length=self.max_length,
            max_batch=max_batch,
            eos_token_ids=eos_token_ids(self._model.config, self._model.generation_config),
            usable_version=self._usable_version,
            routers=self._routers,
        )

    async def generate(self, request: GenerationRequest) -> Completion:
        vocab_size = self._model.config.get_text_config().vocab_size
        check_request(request, vocab_size=vocab_size, max_length=self.max_length)
        check_keeps_experts(request, self.name, is_kept=self._routers is not None)
        return await self._batch.generate(request)

    def load_weights(self, folder: str, version: int) -> None:
        if not Path(folder).is_dir():
            raise ModelError(f"{folder}: there is no such folder; version {self.policy_version} stays in use")
        self._check_config(folder)
        if base_of_adapter(folder) or not can_read_into(self._model):
            self._copy_second_model(folder, version)
        elif difference := self._read_in_place(folder, version):
            try:  # transformers translates some names, for example those of older releases
                self._copy_second_model(folder, version)
            except ModelError as error:
                raise ModelError(difference) from error

    def _check_config(self, folder: str) -> None:
        """Raise ModelError unless a folder holds weights of the model's architecture."""
        check_model_folder(folder)
        config = Path(folder, "config.json")
        content = config.read_bytes() if config.is_file() else None
        if content is None or content != self._config:  # transformers takes longer to read it than the weights
            check_same_architecture(self._model.config, load_config(folder), folder)
        self._config = content

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
        model = _load_model(folder, self._model.dtype, self._base, self._attention, self._longrope)
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
            raise HalfLoadedError(self._half_loaded)
        return self.policy_version


def make_engine(folder: str, *, version: int, setup: EngineSetup) -> TransformersEngine:
    """Return a worker's engine with the weights of a Hugging Face folder."""
    return TransformersEngine(
        folder,
        version=version,
        device=setup.device,
        base=setup.base,
        float32_head=setup.float32_head,
        keep_experts=setup.keep_experts,
        longrope=setup.longrope,
        max_batch=setup.config.max_batch,
    )


def _tried_routers(model: PreTrainedModel, where: str) -> Routers:
    """Return a model's routers after one pass, which shows that ludic knows how they choose. Raises ModelError."""
    routers = Routers(model, where)
    with torch.inference_mode(), routers.record():
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    return routers


def _load_model(
    folder: str,
    dtype: torch.dtype | None,
    find_base: Callable[[], str] | None,
    attention: str | None,
    longrope: Longrope | None,
) -> PreTrainedModel:
    """Load a folder's model on the CPU, in eval mode. dtype: None keeps the dtype of the weights.

    Raises ModelError unless the weights are exactly those of the folder's config.json.
    """
    source = _folder_of_weights(folder, find_base)
    model = load_pretrained(
        source, dtype=dtype, where=folder, longrope=longrope, use_safetensors=True, attn_implementation=attention
    )
    return merge_adapter(model, folder) if base_of_adapter(folder) else model


def _folder_of_weights(folder: str, find_base: Callable[[], str] | None) -> str:
    """Return the folder itself, or the folder of the base of its adapter."""
    base = base_of_adapter(folder)
    return folder if not base else find_base() if find_base else base


def exact_attention(folder: str, where: str) -> tuple[str | None, bool]:
    """Return the attn_implementation that samples exactly, and whether that was tested.

    The first is None for transformers' choice, or eager, as for capped scores. Raises ModelError if neither is exact.
    """
    try:
        return None, check_family(folder, where, _in_batches, attention=None, what=_WHAT)
    except ModelError:
        return "eager", check_family(folder, where, _in_batches, attention="eager", what=_WHAT)


def _in_batches(model: PreTrainedModel) -> TokensWithLogprobs:
    use_decoding_attention(model)
    return probe_batches(model)


def _make_logits_in_float32(model: PreTrainedModel) -> None:
    """Compute logits in float32 from the weights at each call; a float32 copy would have to follow their updates."""
    head = model.get_output_embeddings()

    def forward(hidden: Tensor) -> Tensor:
        return linear(hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float())

    head.forward = forward


# --- Attention for decoding ------------------------------------------------------------------------------
# Each sequence asks with one new token.
#
# Query heads that share a key and value head are the rows of one small matrix, so keys and values are read without
# copies. transformers' sdpa repeats them for each query head, which takes three times as long on a CPU
# (benchmarks/README.md). Prompts, and models that do more than a mask and a scale, run transformers' sdpa.
#
# Shapes: B = sequences, T = new tokens, L = tokens of the longest, H = heads, K = key and value heads, D = head size.


DECODING_ATTENTION = "ludic_decoding"
"""attn_implementation of models that are sampled from on a CPU."""

_BEYOND_A_MASK = ("position_bias", "softcap", "s_aux", "cache")
"""Arguments of attention functions that change the result, apart from mask, scale and dropout."""


def use_decoding_attention(model: PreTrainedModel) -> None:
    """Switch a model from transformers' sdpa to this attention; other models stay as they are."""
    if model.config._attn_implementation == "sdpa" and _can_switch(model):
        model.set_attn_implementation(DECODING_ATTENTION)


def _can_switch(model: PreTrainedModel) -> bool:
    """Return whether a model calls registered attention functions without checking their names.

    transformers reads the source too. Models with an indexer, such as GLM-5, pass other arguments to unknown names.
    """
    if model.config.get_text_config() is not model.config:
        return False
    source = inspect.getsource(sys.modules[type(model).__module__])
    return "ALL_ATTENTION_FUNCTIONS.get_interface(" in source and '"sdpa"' not in source


def decoding_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention function for transformers; returns (B, T, H, D). query: (B, H, T, D). key, value: (B, K, L, D)."""
    num_sequences, num_heads, num_tokens, _ = query.shape
    is_plain = not options.get("dropout") and all(options.get(name) is None for name in _BEYOND_A_MASK)
    masks_all_heads = attention_mask is None or attention_mask.shape[1] == 1
    if num_tokens > 1 or key.shape[1] == num_heads or not (is_plain and masks_all_heads):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    groups = query.reshape(num_sequences, key.shape[1], -1, query.shape[-1])
    output = scaled_dot_product_attention(groups, key, value, attn_mask=attention_mask, scale=options.get("scaling"))
    return output.reshape(num_sequences, 1, num_heads, -1), None


def decoding_mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None,
    mask_function: Callable[..., Tensor],
    **options: Any,
) -> Tensor | None:
    """Mask function for transformers; returns (B, 1, q_length, L) bool, or None if nothing is masked.

    attention_mask: (B, L), 0 for padding. A last token sees all tokens that the cache holds, so its mask is that of the
    padding, unless the cache holds a window of kv_length tokens only.
    """
    sees_all = q_length == 1 and mask_function is causal_mask_function
    if sees_all and attention_mask is not None and attention_mask.shape[1] == kv_length:
        return attention_mask[:, None, None, :].bool()
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, attention_mask=attention_mask, mask_function=mask_function, **options
    )


AttentionInterface.register(DECODING_ATTENTION, decoding_attention)
AttentionMaskInterface.register(DECODING_ATTENTION, decoding_mask)
