"""Compute the losses of mixture-of-experts routers (load balancing, z-loss), and the imbalance of experts.

Both are for routers that choose the largest softmax probabilities. A family is known if transformers has the balancing
loss for it, and its routers are where transformers records their logits. The balancing loss couples all tokens of a
micro-batch, so its value is that of each micro-batch, weighted by its tokens; the z-loss is a mean over all tokens of
the global batch, however it is split.

Pure tensor code, but for counts over ranks. Raises ModelError for a model without such routers.
"""

# Shapes: T = packed tokens of a micro-batch, L = layers with a router, E = experts of a layer.

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ludic.errors import ModelError
from ludic.models import CHOSEN, first_of
from ludic.training.batches.packing import MicroBatch
from ludic.training.config import LossConfig
from ludic.training.packed import checkpoint_lengths

EXPERT_TOKENS = "expert_tokens"
"""Key of `RouterLosses.expert_tokens` among the sums of a step."""

_ROUTERS = "_ludic_routers"
_LOGITS = "ludic_router_logits"

# --- Logits of the routers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Routers:
    modules: tuple[nn.Module, ...]
    """One a layer, in the order of the layers."""
    num_chosen: int
    """Experts that a token uses."""


def keep_router_logits(model: PreTrainedModel, source: str) -> None:
    """Let each router keep the logits of its last forward pass, for `router_losses`; changes the model in place.

    Call it before the model is sharded or compiled, and after adapters are added. Raises ModelError if the family's
    routers have no such losses.
    """
    if not hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func") or _has_bias(model):
        raise ModelError(
            f"{source}: router_balance_weight and router_z_weight are for mixtures whose routers choose by softmax "
            f"alone, such as qwen3_moe, gpt_oss and mixtral; {model.config.model_type} is not one, or is balanced "
            "by a bias; leave both out"
        )
    config = model.config.get_text_config(decoder=True)
    found = list(_find_routers(model))
    num_chosen = first_of(config, CHOSEN)
    if not found or not num_chosen:
        raise ModelError(
            f"{source}: found no routers in this {model.config.model_type} model that could be balanced; leave out "
            "router_balance_weight and router_z_weight"
        )
    for router, index in found:
        router.register_forward_hook(partial(_keep_logits, index=index))
    setattr(model, _ROUTERS, _Routers(modules=tuple(router for router, _ in found), num_chosen=num_chosen))


def _has_bias(model: PreTrainedModel) -> bool:
    """Return whether a bias that no loss trains is added before experts are chosen (arXiv 2408.15664)."""
    return any("e_score_correction_bias" in name for name, _ in chain(model.named_parameters(), model.named_buffers()))


def _find_routers(model: PreTrainedModel) -> Iterator[tuple[nn.Module, int]]:
    """Yield each router, and the index of the logits in its output."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    recorded = (part._can_record_outputs for part in parts if isinstance(part._can_record_outputs, dict))
    recorders: Any = next((found["router_logits"] for found in recorded if "router_logits" in found), [])
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        for name, module in model.named_modules():
            is_named = recorder.layer_name is None or name.endswith(f".{recorder.layer_name}")
            if is_named and isinstance(module, recorder.target_class):
                yield module, recorder.index


def _keep_logits(router: nn.Module, args: Any, output: Any, *, index: int) -> None:
    # An attribute, which compiled layers can set: a list would differ in each layer, and cause a new compilation.
    setattr(router, _LOGITS, output[index] if isinstance(output, tuple) else output)


def checkpoint_contexts(
    layer: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for torch's checkpoint of a decoder layer: those of ludic.training.packed, without router logits.

    Logits of a recomputed layer are not read, and would keep all of its activations in memory.
    """
    first, again = checkpoint_lengths()
    return first, _forgetting(layer, again)


@contextmanager
def _forgetting(layer: nn.Module, inner: AbstractContextManager[None]) -> Iterator[None]:
    try:
        with inner:
            yield
    finally:
        for module in layer.modules():
            module.__dict__.pop(_LOGITS, None)


# --- The losses --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLosses:
    """A micro-batch's share of both losses; the shares of a global batch add up to its losses."""

    loss: Tensor
    """Weighted sum of both, with gradient."""
    balance: Tensor
    """Balancing loss, without weight and gradient."""
    z: Tensor
    """z-loss, without weight and gradient."""
    expert_tokens: Tensor
    """(L, E) int64: tokens that chose each expert."""


def count_tokens(micro_batches: Sequence[MicroBatch], device: torch.device) -> int:
    """Return the number of packed tokens of all ranks, at least 1. Every rank must call it."""
    total = torch.tensor(sum(map(_num_tokens, micro_batches)), device=device)
    dist.all_reduce(total)
    return max(1, int(total.item()))


def _num_tokens(batch: MicroBatch) -> int:
    """Return the tokens of a micro-batch; 0 for the dummy of a rank without sequences."""
    return sum(batch.sequence_lengths) if batch.rollout_ids else 0


def router_losses(model: PreTrainedModel, batch: MicroBatch, config: LossConfig, *, num_tokens: int) -> RouterLosses:
    """Return the losses of the forward pass that the model has just made of a micro-batch.

    num_tokens: packed tokens of all micro-batches of all ranks.
    """
    routers: _Routers = getattr(model, _ROUTERS)
    logits = [router.__dict__.pop(_LOGITS).flatten(0, -2) for router in routers.modules]
    share = _num_tokens(batch) / num_tokens
    tokens = torch.stack([expert_tokens(of_layer, routers.num_chosen) for of_layer in logits])
    # Only the logits are kept for the backward pass: probabilities are computed again, in float32.
    sums = [checkpoint(_sums, of_layer, use_reentrant=False, preserve_rng_state=False) for of_layer in logits]
    probabilities, squares = (torch.stack(of_layers) for of_layers in zip(*sums, strict=True))
    balance = balance_loss(tokens, probabilities, len(logits[0])) * share
    z = squares.mean() / len(logits[0]) * share
    return RouterLosses(
        loss=(config.router_balance_weight or 0) * balance + (config.router_z_weight or 0) * z,
        balance=balance.detach(),
        z=z.detach(),
        expert_tokens=tokens * bool(batch.rollout_ids),
    )


@torch.no_grad()
def expert_tokens(logits: Tensor, num_chosen: int) -> Tensor:
    """Return (E,) int64: how many tokens choose each expert. logits: (T, E)."""
    chosen = logits.topk(num_chosen, dim=-1).indices.flatten()
    counts = torch.zeros(logits.shape[-1], dtype=torch.int64, device=logits.device)
    return counts.index_add_(0, chosen, torch.ones_like(chosen))


def _sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums over the tokens of a layer: (E,) of probabilities; of squared log normalizers, the z-loss.

    logits: (T, E). z-loss: ST-MoE (Zoph et al. 2022, arXiv 2202.08906), eq. 5.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.softmax(-1).sum(0), logits.logsumexp(-1).square().sum()


def balance_loss(tokens: Tensor, probabilities: Tensor, num_tokens: int) -> Tensor:
    """E times the sum over experts of the share of tokens that chose one times its mean probability; mean over layers.

    Switch Transformers (Fedus et al. 2021, arXiv 2101.03961), eq. 4 to 6, where a token may choose several experts: of
    one layer, transformers' load_balancing_loss_func. That takes several layers as one, in which layers that are uneven
    in opposite ways cancel. It is the number of experts that a token uses where all are used alike, and more where they
    are not. tokens, probabilities: (L, E), sums over num_tokens tokens; only the probabilities have a gradient.
    """
    return tokens.shape[-1] * (tokens / num_tokens * probabilities / num_tokens).sum(1).mean()


def expert_imbalance(tokens: Tensor) -> float:
    """Return the tokens of the most chosen expert over the mean of its layer, in the most uneven layer.

    tokens: (L, E). 1 if all are chosen alike, at most E over the number of experts that a token uses; NaN without
    tokens.
    """
    return (tokens.amax(1) / tokens.double().mean(1)).max().item()
