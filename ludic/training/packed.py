"""Keep packed sequences independent: attention stays within each sequence, and layers with a state reset at each one.

transformers separates packed sequences by a dense mask of all tokens by all tokens, whose cost grows with the square
of the micro-batch. ludic passes the sequences' lengths instead of a mask. The cost grows with the sum of their squared
lengths (benchmarks/packing.py).

On CUDA, half-precision models run PyTorch's variable-length attention, one kernel for all sequences. Otherwise causal
attention, which needs no mask, runs on one sequence after the other. Lengths stay on the CPU, so no layer waits for the
device. Windows, chunks and sinks of attention are supported; other features of a family are found by a probe when its
model is loaded (ludic.models.families).

A token mixer with a state (gated delta nets, Mamba, short convolutions, linear attention) runs on one sequence after
the other, within its layer, so that ranks with FSDP2 gather each layer once. After `run_at_once` it runs on the whole
pack, and gets the sequences' borders, for kernels that know them.

Pure tensor code.
"""

# Shapes: T = packed tokens, S = sequences, H = heads, K = key and value heads, D = head size.

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache, partial
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_ATTENTION = "ludic_packed"
"""attn_implementation of models that ludic trains; without lengths it is transformers' sdpa."""


def packed_arguments(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Return the arguments with the lengths of a decoder's packed sequences; create them once per micro-batch.

    attention_mask is (1, 1, 1, S) int64 on the CPU: transformers passes a 4-D mask on to the layers unchanged.
    """
    arguments = {"attention_mask": torch.tensor(lengths)[None, None, None]}
    return arguments | (flash_arguments(lengths, device) if device.type == "cuda" else {})


def flash_arguments(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Return the arguments by which transformers passes packed lengths to flash attention.

    cu_seq_lens_*: (S + 1,) int32, the sequences' starts and the end of the last.
    """
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)
    starts_and_longest = {"cu_seq_lens": starts, "max_length": max(lengths)}
    return {f"{name}_{of}": value for name, value in starts_and_longest.items() for of in ("q", "k")}


# --- Attention -------------------------------------------------------------------------------------------


_FLASH_CAPABILITY = (8, 0)
"""Lowest compute capability that the variable-length kernel runs on: Ampere."""

_FEWER_KEYS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Argument of varlen_attn for fewer key heads than query heads; PyTorch 2.11 takes them as they are."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers; returns (1, T, H, D). query: (1, H, T, D). key, value: (1, K, T, D).

    s_aux: (H,) sinks, logits of a key without a value that every token sees beside the others.
    """
    if attention_mask is None or not _is_lengths(attention_mask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, s_aux=s_aux, **rest)
    lengths = attention_mask.flatten().tolist()
    if (size := _chunk_size(module)) is not None and max(lengths) > size:
        # A chunk sees nothing before it, so it is a sequence of its own.
        lengths = [min(size, length - start) for length in lengths for start in range(0, length, size)]
        if cu_seq_lens_q is not None:
            chunks = flash_arguments(lengths, query.device)
            cu_seq_lens_q, max_length_q = chunks["cu_seq_lens_q"], chunks["max_length_q"]
    if cu_seq_lens_q is not None and max_length_q is not None and _has_kernel(query, value):
        # Tokens before the token itself: all (-1), or one fewer than sliding_window, which counts it.
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if s_aux is None:
            output = _kernel(query, key, value, cu_seq_lens_q, max_length_q, scaling, window)
        else:
            output = _KernelWithSinks.apply(query, key, value, s_aux, cu_seq_lens_q, max_length_q, scaling, window)
        return output[None], None
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    attend = partial(_attend, scaling=scaling, sliding_window=sliding_window, sinks=s_aux)
    return torch.cat([attend(*part) for part in parts], dim=2).transpose(1, 2).contiguous(), None


def _is_lengths(attention_mask: Tensor) -> bool:
    """Return whether a mask is that of `packed_arguments`."""
    return attention_mask.ndim == 4 and attention_mask.dtype == torch.int64


def _chunk_size(module: nn.Module) -> int | None:
    """Return the chunk size of an attention layer that sees chunks, as in Llama 4."""
    config: Any = getattr(module, "config", None)
    kinds, number = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    is_chunked = kinds is not None and number is not None and kinds[number] == "chunked_attention"
    return config.attention_chunk_size if is_chunked else None


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether the variable-length kernel computes this attention on this device."""
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] == value.shape[-1]
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
        and torch.cuda.get_device_capability(query.device) >= _FLASH_CAPABILITY
    )


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: int,
    scaling: float | None,
    window: tuple[int, int],
    **options: Any,
) -> Any:
    """Run the variable-length kernel. query: (T, H, D); key, value: (T, K, D)."""
    fewer = _FEWER_KEYS if query.shape[1] != key.shape[1] else {}
    options |= {"scale": scaling, "window_size": window} | fewer
    return varlen_attn(query, key, value, starts, starts, longest, longest, **options)


class _KernelWithSinks(torch.autograd.Function):
    """The variable-length kernel with sinks, exact in both directions.

    A sink s adds exp(s) to each softmax's denominator: with l the log-sum-exp of the other scores and l' = log(exp(l) +
    exp(s)), the output is that without sinks times exp(l - l') = sigmoid(l - s). The kernel's backward pass computes
    probabilities as exp(score - l), and their mean gradient from the output; given l' and the output with sinks it
    gives the gradients with sinks. The kernel's own l has no gradient, so autograd can't do this.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        starts: Tensor,
        longest: int,
        scaling: float | None,
        window: tuple[int, int],
    ) -> Tensor:
        aux = AuxRequest(lse=True)
        output, normalizer = _kernel(query, key, value, starts, longest, scaling, window, return_aux=aux)
        # (H, T), as in the kernel
        with_sinks = torch.logaddexp(normalizer, sinks.float()[:, None])
        output = (output.float() * (normalizer - with_sinks).exp().T[:, :, None]).to(output.dtype)
        ctx.save_for_backward(query, key, value, sinks, starts, output, with_sinks)
        ctx.longest, ctx.scaling, ctx.window = longest, scaling, window
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, starts, output, normalizer = ctx.saved_tensors
        grad = grad.contiguous()
        gradients = torch.ops.aten._flash_attention_backward(
            grad,
            query,
            key,
            value,
            output,
            normalizer,
            starts,
            starts,
            ctx.longest,
            ctx.longest,
            0.0,
            ctx.window == (-1, 0),
            torch.zeros(2, dtype=torch.uint64, device=grad.device),
            torch.empty(0, device=grad.device),
            scale=ctx.scaling,
            window_size_left=ctx.window[0],
            window_size_right=ctx.window[1],
        )
        return *gradients, _grad_sinks(grad, output, normalizer, sinks), None, None, None, None


def _grad_sinks(grad: Tensor, output: Tensor, normalizer: Tensor, sinks: Tensor) -> Tensor:
    """Return (H,): a sink takes its probability from all others, so its gradient is minus that times grad . output.

    grad, output: (T, H, D). normalizer: (H, T), the log-sum-exp with sinks.
    """
    shares = (sinks.float()[:, None] - normalizer).exp()
    return -(shares * (grad.float() * output.float()).sum(-1).T).sum(1).to(sinks.dtype)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    sliding_window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention of one sequence: a token sees itself and sliding_window - 1 tokens before it; None is all."""
    length = query.shape[2]
    window = None
    if sinks is not None or (sliding_window is not None and length > sliding_window):
        positions = torch.arange(length, device=query.device)
        distances = positions[:, None] - positions
        window = (distances >= 0) & (distances < (length if sliding_window is None else sliding_window))
    if sinks is not None:
        assert window is not None
        return _attend_with_sinks(query, key, value, window, sinks, scaling)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=window,
        is_causal=window is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, window: Tensor, sinks: Tensor, scaling: float | None
) -> Tensor:
    """Attention with a matrix of all scores: PyTorch's fused one gives no normalizer. window: (T, T) bool."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores.masked_fill(~window, -torch.inf)
    dtype = torch.promote_types(scores.dtype, torch.float32)
    all_scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1).to(scores.dtype)], dim=-1)
    return all_scores.softmax(-1, dtype=dtype)[..., :-1].to(value.dtype) @ value


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)


def keep_uncompiled() -> None:
    """Exclude `packed_attention` from torch.compile: it depends on lengths, which differ in every micro-batch."""
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))


# --- Token mixers with a state ---------------------------------------------------------------------------


_lengths: ContextVar[Sequence[int] | None] = ContextVar("_lengths", default=None)
"""Lengths of the sequences that a decoder runs on."""

_IS_APART, _AT_ONCE = "_ludic_keeps_apart", "_ludic_at_once"
_PACKING = ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_BY_NAME = ("LightningAttention",)
"""Ends of the names of mixers that have a state and no convolution."""


@contextmanager
def with_lengths(lengths: Sequence[int] | None) -> Iterator[None]:
    """Let the mixers of a decoder see the lengths of its packed sequences; None runs them on all tokens at once."""
    token = _lengths.set(lengths)
    try:
        yield
    finally:
        _lengths.reset(token)


def checkpoint_lengths() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for torch's checkpoint: a layer sees the same lengths when it is computed again."""
    return nullcontext(), with_lengths(_lengths.get())


def keep_apart(model: PreTrainedModel) -> None:
    """Let token mixers with a state run on one packed sequence after the other; changes the model in place, once."""
    if getattr(model, _IS_APART, False):
        return
    for module in by_sequence(model):
        module.forward = partial(_run_by_sequence, module, module.forward)
    setattr(model, _IS_APART, True)


def run_at_once(model: PreTrainedModel) -> None:
    """Let token mixers with a state run on a whole pack at once; their kernels must reset the state at its borders."""
    for module in by_sequence(model):
        setattr(module, _AT_ONCE, _has_state(module))


def by_sequence(model: PreTrainedModel) -> list[nn.Module]:
    """Return the parts of a model that run on one packed sequence after the other, unless `run_at_once` changed it."""
    return [module for module in model.modules() if _has_state(module) or _counts_tokens(module)]


def _has_state(module: nn.Module) -> bool:
    """Return whether a module is a token mixer with a state: it has a convolution over tokens, or a known name."""
    has_convolution = any(isinstance(part, nn.Conv1d) for part in module.children())
    return has_convolution or type(module).__name__.endswith(_BY_NAME)


def _counts_tokens(module: nn.Module) -> bool:
    """Return whether an attention layer derives positions from the order of its tokens, as in Llama 4."""
    return bool(getattr(module, "attn_temperature_tuning", False))


@torch.compiler.disable
def _run_by_sequence(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a token mixer on each packed sequence, and join its outputs."""
    lengths = _lengths.get()
    if lengths is None:
        return forward(*args, **kwargs)
    # Arguments for packed sequences are replaced: an attention layer gets one sequence's length, others need none.
    has_state = _has_state(module)
    others = {"attention_mask": None} if "attention_mask" in kwargs else {}
    kwargs = {name: value for name, value in kwargs.items() if name not in _PACKING}
    if getattr(module, _AT_ONCE, False):
        return forward(*args, **kwargs | others | _borders(forward, lengths, _device_of(*args, *kwargs.values())))
    device = _device_of(*args, *kwargs.values())
    bounds = list(accumulate(lengths, initial=0))
    outputs = []
    for start, length in zip(bounds, lengths, strict=False):
        cut = partial(_cut, start=start, length=length, num_tokens=bounds[-1])
        alone = others if has_state else packed_arguments([length], device)
        outputs.append(forward(*map(cut, args), **{name: cut(value) for name, value in kwargs.items()}, **alone))
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, dim=1)
    # After the hidden states come a state or a matrix of scores, which training does not read.
    return torch.cat([output[0] for output in outputs], dim=1), *[None] * (len(outputs[0]) - 1)


def _device_of(*values: Any) -> torch.device:
    return next(value.device for value in values if isinstance(value, Tensor))


@lru_cache(maxsize=1)
def _all_borders(lengths: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """Return `_borders`, computed once for all layers of a pack."""
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    starts = flash_arguments(lengths, device)["cu_seq_lens_q"]
    return {"cu_seq_lens_q": starts, "seq_idx": numbers.int()[None].to(device, non_blocking=True)}


def _borders(forward: Callable[..., Any], lengths: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    """Return the borders of packed sequences under the names by which transformers' mixers pass them to kernels.

    cu_seq_lens_q: (S + 1,) int32, for gated delta rules. seq_idx: (1, T) int32, the number of each token's sequence,
    for convolutions and Mamba 2.
    """
    found = _all_borders(tuple(lengths), device)
    known = signature(forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return found
    return {name: value for name, value in found.items() if name in known}


def _cut(value: Any, start: int, length: int, num_tokens: int) -> Any:
    """Return one sequence's part of an argument; its tokens are the second dimension."""
    if isinstance(value, tuple):
        return tuple(_cut(part, start, length, num_tokens) for part in value)
    has_tokens = isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == num_tokens
    return value.narrow(1, start, length) if has_tokens else value
