"""Estimate the memory of a training step, a publish, a checkpoint and a sampler from configuration and settings.

Nothing is loaded or computed: the model is built on PyTorch's meta device, whose tensors have shapes but no memory. The
bytes of states (weights, gradients, moments) follow from the number of weights. No formula for activations holds for
every family, so forward and backward pass of a micro-batch run on the meta device with the training code, and the bytes
of all live tensors are added up, for one repetition of layers that stands in for all. benchmarks/plan.py compares the
figures with measured peaks. `ludic plan` shows them, and they determine a trainer's default numbers of tokens
(ludic.training.device_defaults).

All figures are bytes. Settings that follow the device have their CPU values if they are None. Imports no store. Raises
ModelError if transformers can't make the model.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import sdpa_mask

from ludic.errors import ModelError, one_line
from ludic.models import WITHOUT_ATTENTION, add_adapters, decoder_layers, make_model, max_positions
from ludic.run import RunConfig
from ludic.training.batches.packing import TrainingSequence, pack
from ludic.training.config import ON_CPU, ModelConfig, OptimizerConfig, TrainConfig
from ludic.training.logprobs import linear_logprobs

FLOAT32 = 4
"""Bytes of a float32. Trained weights, their gradients and AdamW's two moments each take one, whatever the dtype."""
LOGIT = 12
"""Bytes of a logit of a chunk at the peak: in float32, as a probability, and as a product of these."""
PROMPT_TOKENS = 1024
"""Tokens of a prompt, where no setting bounds a sequence. Assumed."""

DeviceKind = Literal["cpu", "cuda"]
Place = Literal["none", "device", "host"]
"""Location of a reference model's weights, if it is a separate model."""
Parts = dict[str, int]
"""Bytes by part; their sum is the peak."""


def word_bytes(dtype: str) -> int:
    """Return the bytes of a number: float32 or bfloat16."""
    return 2 if dtype == "bfloat16" else FLOAT32


def _dtype(settings: ModelConfig) -> Literal["float32", "bfloat16"]:
    return settings.dtype or "float32"


def _chunk_tokens(settings: ModelConfig) -> int:
    return settings.logprob_chunk_tokens or int(ON_CPU["logprob_chunk_tokens"])


def moment_bytes(sizes: "ModelSizes", optimizer: OptimizerConfig) -> int:
    """Return the bytes of AdamW's two moments of all trained weights (Loshchilov & Hutter 2019, arXiv 1711.05101).

    In 8 bits each is a byte, and 256 of them share a float32 scale (ludic.training.adamw_8bit).
    """
    if optimizer.optimizer == "adamw_8bit":
        return 2 * sizes.num_trained + 2 * FLOAT32 * -(-sizes.num_trained // 256)
    return 2 * FLOAT32 * sizes.num_trained


def longest_sequence(config: PreTrainedConfig, run: RunConfig, train: TrainConfig) -> int:
    """Return the tokens of the longest sequence, as far as settings determine it. config: of the model."""
    limit = max_positions(config, run.longrope)
    longest = run.max_sequence_tokens or train.batch.max_seq_len or PROMPT_TOKENS + run.max_tokens
    return min(limit, longest)


def reference_place(run: RunConfig, train: TrainConfig) -> Place:
    """Return where a reference model is; with LoRA, the run's own model is the trained one without its adapters."""
    loss = train.loss
    is_base = train.model.lora_rank is not None and loss.reference == run.model
    if loss.reference is None or is_base:
        return "none"
    return "host" if loss.reference_offload else "device"


_WINDOWED = ("sliding_attention", "chunked_attention")
"""Kinds of layers, as configurations name them."""


# --- The model ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Numbers of weights of a model; tied weights count once."""

    num_weights: int
    """Weights of the model, without adapters."""
    num_trained: int
    """Weights that are trained: all, or those of the adapters."""
    layer_weights: int
    """Weights of the largest decoder layer, with its adapters."""
    root_weights: int
    """Weights outside the decoder layers: embeddings, head and last norm."""
    largest_weight: int
    """Numbers in the largest trained weight."""
    vocab_size: int
    """Rows of the head."""
    cached: int
    """Numbers that a sampler's key-value cache keeps for each token, in the layers that see all tokens."""
    cached_in_window: int
    """The same, in layers that see a window of tokens."""
    window: int
    """Tokens of that window; 0 if no layer has one."""

    def cache_bytes(self, length: int, dtype: str) -> int:
        """Return the bytes of the cache of one sequence. length: in tokens."""
        return word_bytes(dtype) * (self.cached * length + self.cached_in_window * min(length, self.window))


_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_known: dict[Any, Any] = {}
"""Results of all calls of functions that are `_remembered`."""


def _remembered(
    measure: Callable[Concatenate[PreTrainedConfig, _Params], _Result],
) -> Callable[Concatenate[PreTrainedConfig, _Params], _Result]:
    """Cache the result per configuration and settings in this process, since a pass takes a third of a second.

    The folder of the configuration is part of the key only if the folder's code makes the model.
    """

    @wraps(measure)
    def call(config: PreTrainedConfig, *args: _Params.args, **named: _Params.kwargs) -> _Result:
        values = config.to_dict()
        if "auto_map" not in values:
            values.pop("_name_or_path", None)
        key = measure, type(config), repr(sorted(values.items())), args, *sorted(named.items())
        if key not in _known:
            _known[key] = measure(config, *args, **named)
        return _known[key]

    return call


@_remembered
def model_sizes(config: PreTrainedConfig, settings: ModelConfig) -> ModelSizes:
    """Count the weights of a configuration's model. Raises ModelError."""
    model = _on_meta(config, settings)
    layers = decoder_layers(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    of_layers = [_count(layer.parameters()) for layer in layers]
    num_adapters = 0 if settings.lora_rank is None else _count(trained)
    everything = _count(model.parameters())
    cached, cached_in_window, window = _cache(config)
    return ModelSizes(
        num_weights=everything - num_adapters,
        num_trained=_count(trained),
        layer_weights=max(of_layers),
        root_weights=everything - sum(of_layers),
        largest_weight=max(weight.numel() for weight in trained),
        vocab_size=model.get_output_embeddings().weight.shape[0],
        cached=cached,
        cached_in_window=cached_in_window,
        window=window,
    )


def _on_meta(config: PreTrainedConfig, settings: ModelConfig) -> Any:
    """Return the model with its adapters, without memory, in the dtype of the forward pass."""
    try:
        with torch.device("meta"):
            model = make_model(config, dtype=torch.float32, attention=_COUNTED)
    except ModelError:
        raise
    except Exception as error:  # each configuration class checks its values differently
        raise ModelError(f"{config.model_type}: transformers can't make the model: {one_line(error)}") from error
    model.tie_weights()
    if settings.lora_rank is not None:
        rank, alpha, targets = settings.lora_rank, settings.lora_alpha, settings.lora_targets
        with torch.device("meta"):
            add_adapters(model, source=config.model_type, rank=rank, alpha=alpha, targets=targets)
    return model.to(getattr(torch, _dtype(settings))).eval()


def _count(weights: Any) -> int:
    return sum(weight.numel() for weight in weights)


def _cache(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Return the numbers that a cache keeps for a token in whole layers and in layers with a window, and the window.

    Keys and values of each layer's heads; with latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), the
    compressed vector and the rotated key. Layers of linear attention keep a state of fixed size, which is left out.
    """
    text = config.get_text_config(decoder=True)
    kinds = list(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)
    if latent := getattr(text, "kv_lora_rank", None):
        a_layer = latent + text.qk_rope_head_dim
    else:
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        a_layer = 2 * head * (getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    window = getattr(text, "sliding_window", None) or 0
    in_window = sum(kind in _WINDOWED for kind in kinds) if window else 0
    without = sum(kind in WITHOUT_ATTENTION for kind in kinds)
    return a_layer * (len(kinds) - in_window - without), a_layer * in_window, window


# --- Activations: a forward and a backward pass without memory ----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes that the forward and backward pass of one micro-batch take beside weights and gradients."""

    kept: int
    """Bytes that the decoder's forward pass keeps for the backward pass."""
    more: int
    """Further bytes at the peak: logits of a chunk, gradients in transit, a recomputed layer."""
    is_exact: bool = True
    """True if the passes ran in this dtype; if not, the figures are estimates, probably too large."""


@_remembered
def activations(
    config: PreTrainedConfig,
    settings: ModelConfig,
    *,
    num_tokens: int,
    length: int,
    device: DeviceKind,
    float32_head: bool = False,
) -> Activations:
    """Return the bytes of a micro-batch's passes.

    num_tokens: tokens of the micro-batch. length: of each of its sequences; matters where attention has no kernel that
    runs in the memory of its output, such as float32 on CUDA. float32_head: the run's setting; the head's weights are
    converted in each pass. Raises ModelError if the model can't be made.
    """
    size = {"num_tokens": num_tokens, "length": min(length, num_tokens)}
    for dtype in dict.fromkeys((_dtype(settings), "bfloat16")):
        model = _on_meta(config, replace(settings, dtype=dtype, publish_dtype=None))
        try:
            found = _run_on_meta(model, settings, **size, device=device, float32_head=float32_head)
        except Exception:  # such as grouped products of experts, which run in bfloat16 only
            continue
        if dtype == _dtype(settings):
            return found
        return Activations(kept=2 * found.kept, more=2 * found.more, is_exact=False)
    return _by_formula(config, settings, num_tokens=num_tokens)


def _run_on_meta(
    model: Any, settings: ModelConfig, *, num_tokens: int, length: int, device: DeviceKind, float32_head: bool
) -> Activations:
    for weight in model.parameters():
        # Gradients are counted separately; here each exists until it would be added to the others.
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(_drop_gradient)
    for layer in decoder_layers(model) if settings.activation_checkpointing else ():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    batch = _batch(num_tokens, length).to(torch.device("meta"))
    has_kernel = device == "cuda" and _dtype(settings) == "bfloat16"
    # PyTorch's attention in float32 has no fused kernel for grouped heads on CUDA; it has one on the CPU.
    counted = {"has_kernel": has_kernel, "score_length": length if device == "cuda" and not has_kernel else None}

    def run(living: _Living) -> int:
        hidden = _decode(model, batch, **counted)[0, batch.logit_positions]
        kept = living.num_bytes
        head = model.get_output_embeddings()
        parts = hidden, head.weight, head.bias
        hidden, weight, bias = (part.float() if float32_head and part is not None else part for part in parts)
        del parts
        logprobs, _ = linear_logprobs(
            hidden,
            weight,
            bias,
            batch.targets,
            batch.temperatures,
            chunk_tokens=_chunk_tokens(settings),
        )
        logprobs.sum().backward()
        return kept

    kept, peak = _count_bytes(model, run)
    return Activations(kept=kept, more=peak - kept)


def _count_bytes(model: Any, run: Callable[["_Living"], int]) -> tuple[int, int]:
    """Return the bytes that `run` returns, of tensors that it keeps, and those at its peak.

    Only the first layers run if the others repeat them: each repetition keeps as many bytes as the previous one. The
    peak is the largest of several moments, each of which grows by at most that amount with a repetition. So once the
    peak has grown by that amount, it does so with all further repetitions.
    """
    layers, config = decoder_layers(model), model.config.get_text_config(decoder=True)
    whole = dict(layers._modules)

    def run_first(count: int) -> tuple[int, int]:
        layers._modules = dict(list(whole.items())[:count])
        config.num_hidden_layers = count
        try:
            with _Living([*model.parameters(), *model.buffers()]) as living:
                return run(living), living.peak
        finally:
            layers._modules, config.num_hidden_layers = whole, len(whole)

    period, first = _repetition([_kind(layer, config, number) for number, layer in enumerate(layers)])
    count = first + period + (len(whole) - first - period) % period
    # Fails for a model that can't run with fewer layers, for example if it splits a tensor among them.
    with suppress(Exception):
        found, num_run = run_first(count), count
        while num_run + count + period < len(whole):
            (kept, peak), count = found, count + period
            found, num_run = run_first(count), num_run + count
            if (step := found[0] - kept) == found[1] - peak:
                added = step * (len(whole) - count) // period
                return found[0] + added, found[1] + added
    return run_first(len(whole))


def _repetition(kinds: Sequence[Any]) -> tuple[int, int]:
    """Return the period with which the kinds of layers repeat up to the last layer, and the first layer of the
    repetition."""
    found = len(kinds), 0
    for period in range(1, len(kinds) // 2 + 1):
        first = len(kinds) - period
        while first > 0 and kinds[first - 1] == kinds[first - 1 + period]:
            first -= 1
        found = min(found, (period, first), key=sum)
    return found


def _kind(layer: nn.Module, config: PreTrainedConfig, number: int) -> Any:
    """Return a key of a layer that is equal for layers that make the same tensors."""
    listed = [value[number] for value in vars(config).values() if _is_list_of(value, config.num_hidden_layers)]
    parts = [
        (name, type(part), [value for value in sorted(vars(part).items()) if _is_setting(*value)])
        for name, part in layer.named_modules()
    ]
    return listed, parts, [(name, weight.shape) for name, weight in layer.named_parameters()]


def _is_list_of(value: Any, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length


def _is_setting(name: str, value: Any) -> bool:
    return name != "layer_idx" and isinstance(value, bool | int | float | str | None)


def _decode(model: Any, batch: Any, **counted: Any) -> Tensor:
    """Run the decoder as ludic.training.logprobs does; returns its last hidden state, (1, T, hidden size)."""
    mask = torch.ones(1, 1, 1, 1, dtype=torch.int64, device="meta")
    hidden: Tensor = model.get_decoder()(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        attention_mask=mask,
        **counted,
    ).last_hidden_state
    return hidden


def _drop_gradient(weight: Tensor) -> None:
    weight.grad = None


def _batch(num_tokens: int, length: int) -> Any:
    """Return a micro-batch of sequences of one length; a token of each is its prompt."""
    lengths = [length] * (num_tokens // length)
    lengths += [num_tokens - sum(lengths)] if sum(lengths) < num_tokens else []
    return pack(
        [
            TrainingSequence(
                rollout_id=str(index),
                prompt_tokens=np.zeros(1, np.int32),
                response_tokens=np.zeros(each, np.int32),
                advantage=0.0,
                columns={"response_logprobs": np.zeros(each, np.float32)},
            )
            for index, each in enumerate(lengths)
        ]
    )


class _Living(TorchDispatchMode):
    """Adds up the storages that operations create, for as long as each exists."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        """known: tensors that are not counted."""
        super().__init__()
        self.num_bytes = self.peak = 0
        self._seen: dict[int, Any] = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: Any) -> None:
        if id(storage) in self._seen:
            return
        size = storage.nbytes()
        self._seen[id(storage)] = weakref.ref(storage, partial(self._forget, id(storage), size))
        self.num_bytes += size
        self.peak = max(self.peak, self.num_bytes)

    def _forget(self, key: int, size: int, _: Any) -> None:
        self._seen.pop(key, None)
        self.num_bytes -= size


_COUNTED = "ludic_counted"
"""attn_implementation of models that are only counted."""


def _counted_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    has_kernel: bool = True,
    score_length: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Allocate the memory of ludic.training.logprobs.packed_attention, without computing.

    query: (1, H, T, D), key, value: (1, K, T, D); returns (1, T, H, D). has_kernel: whether one kernel runs over all
    sequences. score_length: tokens whose scores are kept for each token; None keeps none.
    """
    output = _Fused.apply(query, key, value, score_length)
    return (output if has_kernel else torch.cat([output], dim=1)), None


class _Fused(torch.autograd.Function):
    """Keeps query, key, value, the output and one float32 a row and head (Dao 2023, arXiv 2307.08691, section 3.1).

    With a length, it keeps the scores of each pair of tokens, too: PyTorch's plain attention.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, length: int | None) -> Tensor:
        _, heads, tokens, _ = query.shape
        output = query.new_empty(1, tokens, heads, value.shape[-1])
        kept = [query.new_empty(heads, tokens, dtype=torch.float32)]
        if length is not None:
            kept.append(query.new_empty(heads, tokens, length))
        ctx.save_for_backward(query, key, value, output, *kept)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors[:3]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


AttentionInterface.register(_COUNTED, _counted_attention)
AttentionMaskInterface.register(_COUNTED, sdpa_mask)


def _by_formula(config: PreTrainedConfig, settings: ModelConfig, *, num_tokens: int) -> Activations:
    """Estimate the activations of a family whose passes can't run on the meta device.

    34 bytes for each token, layer and hidden unit at 2 bytes a number, of a layer whose attention is fused and whose
    MLP is four times as wide (Korthikanti et al. 2022, arXiv 2205.05198, equation 2 without the attention's scores);
    here twice as much, for gated MLPs and several experts for a token.
    """
    text = config.get_text_config(decoder=True)
    scale = word_bytes(_dtype(settings)) / 2
    layer = round(2 * 34 * text.hidden_size * num_tokens * scale)
    entry = round(2 * text.hidden_size * num_tokens * scale)
    kept = text.num_hidden_layers * (entry if settings.activation_checkpointing else layer)
    logits = LOGIT * min(_chunk_tokens(settings), num_tokens) * text.vocab_size
    head = text.vocab_size * text.hidden_size * (FLOAT32 + word_bytes(_dtype(settings)))
    return Activations(kept=kept, more=max(logits + head, layer), is_exact=False)


# --- A rank of the trainer, on its device ------------------------------------------------------------------------


CUDA = 2 * 10**9
"""Bytes of a GPU for CUDA's context, NCCL's buffers and the libraries' workspaces. Assumed, not measured."""


def rank_memory(
    sizes: ModelSizes,
    passes: Activations,
    config: TrainConfig,
    *,
    ranks: int,
    device: DeviceKind,
    reference: Place = "none",
) -> Parts:
    """Return the bytes by part of one rank's device at the peak of a step.

    Trained weights, gradients and moments are float32, 16 bytes a weight (ZeRO, Rajbhandari et al. 2020, arXiv
    1910.02054, section 3.1, whose 16 bytes are split otherwise), or moments in 8 bits, divided by the ranks (FSDP, Zhao
    et al. 2023, arXiv 2304.11277). The peak is either in the passes of a micro-batch that is not the first, when
    gradients are there, or in AdamW's step.
    """
    settings = config.model
    word = word_bytes(_dtype(settings))
    frozen = sizes.num_weights if settings.lora_rank is not None else 0
    parts = {
        "weights": -(-(FLOAT32 * sizes.num_trained + word * frozen) // ranks),
        "gradients": -(-FLOAT32 * sizes.num_trained // ranks),
        "AdamW's moments": -(-moment_bytes(sizes, config.optimizer) // ranks),
    }
    if reference == "device":
        parts["reference model"] = -(-word * sizes.num_weights // ranks)
    in_passes = {"activations": passes.kept, "logits, gradients on their way": passes.more}
    if ranks > 1 or _dtype(settings) != "float32":
        in_passes["layers gathered by FSDP2"] = _gathered(sizes, word)
    in_step = _adamw_temporaries(sizes, config.optimizer, ranks, device)
    if in_step > sum(in_passes.values()):
        in_passes = {"AdamW's temporaries": in_step}
    return {**parts, **in_passes, **({"CUDA and libraries": CUDA} if device == "cuda" else {})}


def _gathered(sizes: ModelSizes, word: int) -> int:
    """Return the bytes of whole weights and gradients in the passes.

    The unit of embeddings and head stays gathered from the forward to the backward pass; beside the layer in use, the
    next one is gathered ahead. A layer's gradients are whole, and copied as float32, until they are reduced (ludic
    reduces in float32). Read from FSDP2 of torch 2.13.
    """
    return word * (sizes.root_weights + 2 * sizes.layer_weights) + (word + FLOAT32) * sizes.layer_weights


def _adamw_temporaries(sizes: ModelSizes, optimizer: OptimizerConfig, ranks: int, device: DeviceKind) -> int:
    """Return the bytes of AdamW's step: a square root for each weight on CUDA, where it handles all at once (foreach).

    One kernel (fused) has none. On the CPU, and in 8 bits, it handles one tensor after the other. Read from torch
    2.13's torch/optim/adam.py, and torchao 0.18.
    """
    if optimizer.optimizer == "adamw" and optimizer.fused_adamw:
        return 0
    if optimizer.optimizer == "adamw" and device == "cuda":
        return -(-FLOAT32 * sizes.num_trained // ranks)
    return -(-2 * FLOAT32 * sizes.largest_weight // ranks)


# --- A worker's engine, on its device ----------------------------------------------------------------------------


STEP_TOKENS = 8192
"""Tokens that an engine computes at once: vLLM's default max_num_batched_tokens of most GPUs (vllm/engine/arg_utils.py
of 0.32). The transformers engine is counted alike."""
GRAPHS = 10**9
"""Bytes of vLLM's CUDA graphs. Assumed: vLLM logs 0.5 to 1 GiB for models of 1 to 8 billion weights."""


def sampler_memory(
    config: PreTrainedConfig, sizes: ModelSizes, dtype: str, *, max_batch: int, tensor_parallel: int, device: DeviceKind
) -> Parts:
    """Return the bytes by part of one device of an engine, without its key-value cache (see ModelSizes.cache_bytes).

    dtype: of its weights. Weights and the layers' temporaries are divided by tensor_parallel (Megatron-LM, Shoeybi et
    al. 2019, arXiv 1909.08053). Logits are float32, with probabilities and a sorted copy.
    """
    passing = _forward_bytes(config, ModelConfig(dtype="bfloat16" if dtype == "bfloat16" else "float32"))
    parts = {
        "weights": -(-word_bytes(dtype) * sizes.num_weights // tensor_parallel),
        "one forward pass": -(-passing // tensor_parallel),
        "logits": 3 * FLOAT32 * max_batch * sizes.vocab_size,
    }
    return {**parts, **({"CUDA and graphs": CUDA + GRAPHS} if device == "cuda" else {})}


@_remembered
def _forward_bytes(config: PreTrainedConfig, settings: ModelConfig) -> int:
    """Return the bytes of a decoder's forward pass over STEP_TOKENS tokens without gradients."""
    model = _on_meta(config, settings)
    batch = _batch(STEP_TOKENS - 1, STEP_TOKENS - 1).to(torch.device("meta"))

    def run(living: _Living) -> int:
        _decode(model, batch, has_kernel=True, score_length=None)
        return living.num_bytes

    try:
        with torch.no_grad():
            return _count_bytes(model, run)[1]
    except Exception:  # as in `activations`
        formula = _by_formula(config, settings, num_tokens=STEP_TOKENS)
        return formula.kept // config.get_text_config(decoder=True).num_hidden_layers


# --- Memory of the host ------------------------------------------------------------------------------------------


PROCESS: Mapping[DeviceKind, int] = {"cpu": 7 * 10**8, "cuda": 4 * 10**9}
"""Bytes of a process of the trainer before a model is there: Python and libraries. Measured for cpu; for cuda, whose
libraries are larger and whose staging buffers are pinned, assumed."""


def host_memory(
    sizes: ModelSizes, config: TrainConfig, *, ranks: int, rank: int, device: DeviceKind, reference: Place = "none"
) -> Parts:
    """Return the bytes by part of a rank's host memory, without those that `rank_memory` counts on the CPU.

    Rank 0 gathers whole weights for a publish, and whole weights and moments for a checkpoint; when both are due at a
    step they exist together, while threads write them. safetensors writes tensors without another copy.
    """
    settings = config.model
    word = word_bytes(_dtype(settings))
    parts = {"Python and libraries": PROCESS[device]}
    if reference == "host":
        parts["reference model"] = -(-word * sizes.num_weights // ranks)
    if rank > 0:
        return parts
    published = settings.publish_dtype or _dtype(settings)
    if settings.lora_rank is None:
        parts["whole weights, to publish"] = FLOAT32 * sizes.num_weights
    elif settings.publish_lora == "merged":
        parts["whole weights, to publish"] = 2 * word * sizes.num_weights + FLOAT32 * sizes.num_trained
    else:
        parts["adapters, to publish"] = FLOAT32 * sizes.num_trained
    if published != "float32" and settings.publish_lora == "merged":
        parts[f"the same in {published}"] = word_bytes(published) * sizes.num_weights
    parts["weights and moments, for a checkpoint"] = checkpoint_bytes(sizes, config.optimizer)
    if device == "cpu" and ranks > 1:  # gathered tensors are copied once more there (ludic.training.model.detached)
        parts["moments, while they are copied"] = moment_bytes(sizes, config.optimizer)
    return parts


# --- Files -------------------------------------------------------------------------------------------------------


def version_bytes(sizes: ModelSizes, settings: ModelConfig) -> int:
    """Return the bytes of a published version's weights."""
    if settings.publish_lora == "adapter":
        return FLOAT32 * sizes.num_trained
    return word_bytes(settings.publish_dtype or _dtype(settings)) * sizes.num_weights


def checkpoint_bytes(sizes: ModelSizes, optimizer: OptimizerConfig) -> int:
    """Return the bytes of a checkpoint: trained weights in float32, and moments."""
    return FLOAT32 * sizes.num_trained + moment_bytes(sizes, optimizer)
