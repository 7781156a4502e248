"""Compute a model's logprobs on packed tokens (ludic.training.packed), with logits in chunks of rows.

A causal model's head turns hidden states into logits, which at a vocabulary of 150,000 are a hundred times as large.
Here a chunk of logits is computed, reduced to one number per row, and dropped; the backward pass computes each chunk
again. So peak memory grows with the chunk, not with the micro-batch (benchmarks/logprobs_memory.py).

Pure tensor code. Raises ModelError if a model's head is not supported.
"""

# Shapes: A = response tokens of a micro-batch, C = rows of a chunk, H = hidden size, V = vocabulary. Nats.

import math
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn.functional import linear
from transformers import PreTrainedModel

from ludic.errors import ModelError
from ludic.training.batches.packing import MicroBatch, PackedRagged
from ludic.training.config import ON_CPU
from ludic.training.packed import PACKED_ATTENTION, keep_apart, packed_arguments, with_lengths

# --- Logprobs ----------------------------------------------------------------------------------------------------


CHUNK_TOKENS: int = ON_CPU["logprob_chunk_tokens"]
"""Rows of logits in memory at once: 0.6 GB of float32 at a vocabulary of 150,000, and enough to keep a GPU busy."""

LEFT_OUT = -1e30
"""Logit of a token that top_k or top_p left out: the sampler drew from the softmax over the others. Its probability is
0, and, unlike -inf, 0 times it is 0."""

_METHOD = "ludic_token_logprobs"


def token_logprobs(
    model: PreTrainedModel,
    batch: MicroBatch,
    *,
    chunk_tokens: int | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return logprob and entropy at each response token, at its row's temperature: both (A,), at least float32.

    Both are of the softmax over batch.kept_tokens, where there are any.

    Works on a plain model, and after `register_token_logprobs` on a sharded model. chunk_tokens: rows of logits in
    memory at once; None is CHUNK_TOKENS. entropy_gradient: whether the entropy has a gradient.
    """
    run = getattr(model, _METHOD, None) or partial(_token_logprobs, model)
    return run(batch, chunk_tokens or CHUNK_TOKENS, entropy_gradient)


def register_token_logprobs(model: PreTrainedModel, *, float32_head: bool = False) -> None:
    """Let FSDP2 gather the root unit, which has the head, for `token_logprobs` as for forward.

    float32_head: compute logits in float32, whatever the model's dtype.
    """
    setattr(model, _METHOD, MethodType(partial(_token_logprobs, float32_head=float32_head), model))
    register_fsdp_forward_method(model, _METHOD)


def check_head(model: PreTrainedModel, source: str) -> None:
    """Raise ModelError unless this module's logits of one token equal the model's.

    Some models scale their logits in their own way. A comparison finds all of them; a list of names could not.
    """
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        with torch.no_grad():
            wanted = model(input_ids=token, use_cache=False).logits[0]
            hidden = decoder_of(model)(input_ids=token, use_cache=False).last_hidden_state[0]
            found = _capped(linear(hidden, head.weight, head.bias), _softcap(model)) * _scale(model)
        # Tolerance: bfloat16 has 8 bits of precision.
        if (found - wanted).abs().max() <= 2**-7 * wanted.abs().max():
            return
    raise ModelError(
        f"{source}: {type(model).__name__} computes its logits in an unsupported way (supported: a linear "
        "head, also with capped or scaled logits); add it to ludic.training.logprobs"
    )


def _token_logprobs(
    model: PreTrainedModel,
    batch: MicroBatch,
    chunk_tokens: int,
    entropy_gradient: bool,
    *,
    float32_head: bool = False,
) -> tuple[Tensor, Tensor]:
    keep_apart(model)
    is_ours = model.config._attn_implementation == PACKED_ATTENTION
    # Without a mask, transformers builds a dense mask from the restarts of positions.
    packed = packed_arguments(batch.sequence_lengths, batch.input_ids.device) if is_ours else {}
    with with_lengths(batch.sequence_lengths if is_ours else None):
        output = decoder_of(model)(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            **packed,
        )
    head = model.get_output_embeddings()
    parts = output.last_hidden_state[0, batch.logit_positions], head.weight, head.bias
    hidden, weight, bias = (part.float() if float32_head and part is not None else part for part in parts)
    return linear_logprobs(
        hidden,
        weight,
        bias,
        batch.targets,
        batch.temperatures / _scale(model),
        kept=batch.kept_tokens,
        softcap=_softcap(model),
        chunk_tokens=chunk_tokens,
        entropy_gradient=entropy_gradient,
    )


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model that computes hidden states; for some models that is the model itself."""
    decoder = model.get_decoder()
    if decoder is not model:
        return decoder
    return next(part for part in model.children() if part is not model.get_output_embeddings())


def _scale(model: PreTrainedModel) -> float:
    """Return the factor of a model's logits, such as Cohere's and Granite's; 1 for most."""
    config = model.config.get_text_config(decoder=True)
    multiplied, divided = (
        math.prod(getattr(config, name, None) or 1.0 for name in names)
        for names in (("logit_scale", "lm_head_multiplier"), ("logits_scaling",))
    )
    return multiplied / divided


def _softcap(model: PreTrainedModel) -> float | None:
    """Return the bound c of logits c tanh(logits / c), as in Gemma 2 (arXiv 2408.00118, section 2); None if absent."""
    config = model.config.get_text_config(decoder=True)
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return next((cap for name in names if (cap := getattr(config, name, None)) is not None), None)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperatures: Tensor,
    *,
    kept: PackedRagged | None = None,
    softcap: float | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return logprobs of targets, and entropies, under softmax(logits / temperature), logits = hidden weight^T + bias.

    hidden: (A, H) and weight: (V, H), of one float dtype; bias: (V,) or None. targets: (A,) int64. temperatures: (A,)
    above 0. kept: tokens of the softmax, where there are any. softcap: bound c of the logits, as c tanh(logits / c).
    Both results are (A,), float32 or float64. Logits are computed in the dtype of hidden, and everything after them in
    the dtype of the results.
    """
    return _LinearLogprobs.apply(
        hidden, weight, bias, targets, temperatures, kept, softcap, max(1, chunk_tokens), entropy_gradient
    )


class _LinearLogprobs(torch.autograd.Function):
    """Keeps hidden states and one normalizer per row for the backward pass, which computes the logits again.

    Activation checkpointing of each chunk would sum the head's gradient in the head's dtype; in bfloat16, the
    contributions of later chunks would be lost. So this is a separate autograd function.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperatures: Tensor,
        kept: PackedRagged | None,
        softcap: float | None,
        chunk_tokens: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropies, normalizers = (hidden.new_empty(len(targets), dtype=dtype) for _ in range(3))
        for rows in _chunks(len(targets), chunk_tokens):
            scaled = _scaled(_logits(hidden[rows], weight, bias, softcap), temperatures, kept, rows)
            normalizers[rows] = scaled.logsumexp(-1)
            logprobs[rows] = scaled.gather(-1, targets[rows, None])[:, 0] - normalizers[rows]
            entropies[rows] = normalizers[rows] - torch.linalg.vecdot(scaled.softmax(-1), scaled)
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, normalizers, entropies)
        ctx.kept, ctx.softcap = kept, softcap
        ctx.chunk_tokens, ctx.entropy_gradient = chunk_tokens, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, normalizers, entropies = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=normalizers.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=normalizers.dtype) if needs_bias else None
        for rows in _chunks(len(targets), ctx.chunk_tokens):
            logits = _logits(hidden[rows], weight, bias, ctx.softcap)
            # d capped / d logits
            slope = None if ctx.softcap is None else 1 - (logits / ctx.softcap).square()
            grad = _grad_scaled(
                _scaled(logits, temperatures, ctx.kept, rows).sub_(normalizers[rows, None]),
                targets[rows],
                entropies[rows],
                grad_logprobs[rows],
                grad_entropies[rows] if ctx.entropy_gradient else None,
            ).div_(temperatures[rows, None])
            grad = (grad if slope is None else grad.mul_(slope)).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[rows]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        grads = (grad_hidden, _to(grad_weight, hidden.dtype), _to(grad_bias, hidden.dtype))
        return *grads, None, None, None, None, None, None


def _chunks(num_rows: int, chunk_tokens: int) -> Iterator[slice]:
    return (slice(start, start + chunk_tokens) for start in range(0, num_rows, chunk_tokens))


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    """Return (C, V) logits, at least float32, as a new tensor."""
    logits = linear(hidden, weight, bias)
    return _capped(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)


def _scaled(logits: Tensor, temperatures: Tensor, kept: PackedRagged | None, rows: slice) -> Tensor:
    """Return the (C, V) logits of some rows over their temperatures, without the tokens left out; in place."""
    scaled = logits.div_(temperatures[rows, None])
    return scaled if kept is None else _leave_out(scaled, kept, rows.start)


def _leave_out(logits: Tensor, kept: PackedRagged, start: int) -> Tensor:
    """Set the logits of tokens that were not kept to LEFT_OUT, in place. logits: (C, V), of rows from `start`.

    A token without any kept was drawn from the whole vocabulary, or was not sampled.
    """
    stop = start + len(logits)
    part = slice(int(kept.bounds[start]), int(kept.bounds[stop]))
    is_out = kept.has_any[start:stop, None].repeat(1, logits.shape[1])
    is_out[kept.rows[part] - start, kept.values[part]] = False
    return logits.masked_fill_(is_out, LEFT_OUT)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else logits.div(softcap).tanh_().mul_(softcap)


def _grad_scaled(
    log_probabilities: Tensor,
    targets: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor | None,
) -> Tensor:
    """Return (C, V): gradient with respect to the scaled logits. Overwrites log_probabilities, (C, V).

    With p the softmax and H its entropy: d log p_t / d s_i = [i = t] - p_i, and d H / d s_i = -p_i (log p_i + H).
    """
    probabilities = log_probabilities.exp()
    if grad_entropies is None:
        grad = probabilities.mul_(-grad_logprobs[:, None])
    else:
        grad = log_probabilities.add_(entropies[:, None]).mul_(-grad_entropies[:, None])
        grad.sub_(grad_logprobs[:, None]).mul_(probabilities)
    return grad.scatter_add_(-1, targets[:, None], grad_logprobs[:, None])


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
