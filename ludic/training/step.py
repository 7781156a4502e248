"""One gradient step over the micro-batches of all ranks. Collective."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ludic.batches.packing import MicroBatch
from ludic.errors import TrainingError
from ludic.training.config import TrainConfig
from ludic.training.logprobs import token_logprobs
from ludic.training.losses import clipped_tokens, loss_units, rl_loss
from ludic.training.objectives import OffPolicy, Reinforce
from ludic.training.ratio_quantiles import log_ratio_histogram, ratio_quantile
from ludic.training.reference import Reference
from ludic.training.shaping import shape_advantages
from ludic.training.timing import StepTimer
from ludic.training.token_stats import TokenStats

_HISTOGRAM = "log_ratio_histogram"


def train_step(
    model: PreTrainedModel,
    optimizer: Optimizer,
    micro_batches: Sequence[MicroBatch],
    *,
    config: TrainConfig,
    num_action_tokens: int,
    num_ranks: int,
    learning_rate: float,
    reference: Reference | None = None,
    timer: StepTimer | None = None,
    token_stats: TokenStats | None = None,
) -> dict[str, float]:
    """Update the weights once and return metrics, named as in schemas/metrics.v1.json; equal on all ranks.

    micro_batches: those of this rank; every rank must have the same number. num_action_tokens: of all ranks
    together; the loss is a mean over the global batch, independent of how it is split. reference: is called once with
    all micro_batches before the first forward pass. timer: measures the phases reference, forward, backward,
    collectives and optimizer. token_stats: records every micro-batch of this rank.
    Raises TrainingError on every rank, before the weights change, if the loss or the gradient is not finite.
    """
    timer = timer or StepTimer(model.device)
    if not isinstance(config.loss.objective, OffPolicy):
        # It compares with no sampler, but is about the whole distribution.
        micro_batches = [replace(batch, kept_tokens=None) for batch in micro_batches]
    totals: dict[str, Tensor] = {}
    with timer.device("collectives"):
        num_sequences = _count_sequences(micro_batches, config, model.device)
    counts = {"num_action_tokens": num_action_tokens, "num_sequences": num_sequences}
    with timer.device("reference"):
        references = reference(micro_batches) if reference else [None] * len(micro_batches)
    with timer.device("collectives"):
        micro_batches = shape_advantages(micro_batches, references, config.loss, model.device)
    for batch, of_reference in zip(micro_batches, references, strict=True):
        with timer.device("forward"):
            loss, sums = _micro_batch_loss(model, batch.to(model.device), config, counts, of_reference, token_stats)
        with timer.device("backward"):
            # FSDP2 averages gradients over ranks, but the loss is a sum over ranks. Gradients are reduced after each
            # micro-batch: reducing only after the last would keep them unsharded in memory.
            (loss * num_ranks).backward()
        totals = _accumulate(totals, sums)
    with timer.device("collectives"):
        metrics = _reduce(totals, num_action_tokens)
        metrics["grad_norm"] = _clip_gradients(model, config.optimizer.max_grad_norm)
    metrics["learning_rate"] = learning_rate
    _check_finite(optimizer, metrics, config)
    with timer.device("optimizer"):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()
    return metrics


def _micro_batch_loss(
    model: PreTrainedModel,
    batch: MicroBatch,
    config: TrainConfig,
    counts: Mapping[str, int],
    reference: Tensor | None,
    token_stats: TokenStats | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the micro-batch's share of the loss, and detached sums of the metrics to average over action tokens."""
    logprobs, entropies = token_logprobs(
        model,
        batch,
        chunk_tokens=config.model.logprob_chunk_tokens,
        entropy_gradient=config.loss.entropy_weight is not None,
    )
    loss, sums = rl_loss(logprobs, batch, config.loss, **counts, entropies=entropies, reference_logprobs=reference)
    if token_stats is not None:
        token_stats.see(batch, logprobs, entropies, clipped_tokens(logprobs, batch, config.loss, reference))
    sums |= {"entropy": torch.where(batch.action_mask, entropies.detach(), 0).sum()}
    sums |= {"loss": loss.detach() * counts["num_action_tokens"]}
    return loss, sums | {_HISTOGRAM: log_ratio_histogram(logprobs.detach() - batch.sampler_logprobs, batch.action_mask)}


def _count_sequences(micro_batches: Sequence[MicroBatch], config: TrainConfig, device: torch.device) -> int:
    """Return the number of sequences, or pairs, with sampled tokens on all ranks; at least 1."""
    num_sequences = sum(loss_units(batch, config.loss)[batch.action_mask].unique().numel() for batch in micro_batches)
    total = torch.tensor(num_sequences, device=device)
    dist.all_reduce(total)
    return max(1, int(total.item()))


def _accumulate(totals: dict[str, Tensor], sums: dict[str, Tensor]) -> dict[str, Tensor]:
    if not totals:
        return sums
    return {k: torch.maximum(totals[k], v) if k == "ratio_max" else totals[k] + v for k, v in sums.items()}


def _reduce(totals: dict[str, Tensor], num_action_tokens: int) -> dict[str, float]:
    """Return means over the action tokens of all ranks, and maximum and quantiles of the ratio."""
    ratio_max, histogram = totals.pop("ratio_max"), totals.pop(_HISTOGRAM)
    dist.all_reduce(ratio_max, op=dist.ReduceOp.MAX)
    dist.all_reduce(histogram)
    sums = torch.stack([value.double() for value in totals.values()])
    dist.all_reduce(sums)
    means = dict(zip(totals, (sums / num_action_tokens).tolist(), strict=True))
    means["ratio_mean"], means["clip_fraction"] = means.pop("ratio"), means.pop("clipped")
    quantiles = {f"ratio_p{percent:02}": ratio_quantile(histogram.cpu(), percent / 100) for percent in (1, 99)}
    return means | quantiles | {"ratio_max": ratio_max.item()}


def _clip_gradients(model: PreTrainedModel, max_grad_norm: float | None) -> float:
    """Scale gradients to an L2 norm of at most max_grad_norm; returns the norm before scaling, over all ranks."""
    limit = float("inf") if max_grad_norm is None else max_grad_norm
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def _check_finite(optimizer: Optimizer, metrics: dict[str, float], config: TrainConfig) -> None:
    # Both numbers are reduced over ranks, so either all ranks raise or none.
    bad = [name for name in ("loss", "grad_norm") if not torch.isfinite(torch.tensor(metrics[name]))]
    if bad:
        optimizer.zero_grad()
        found = ", ".join(f"{name} {metrics[name]}" for name in ("loss", "grad_norm", "ratio_max"))
        raise TrainingError(
            f"{' and '.join(bad)} not finite ({found}); the weights were left as they were; "
            f"resume from a checkpoint with {' or '.join(_remedies(config))}"
        )


def _remedies(config: TrainConfig) -> list[str]:
    """Return settings that could keep loss and gradient finite and are not in use."""
    objective = config.loss.objective
    bounds = [name for name in objective.bounded_by if name != "clip_low"] if isinstance(objective, OffPolicy) else []
    unused = [name for name in bounds if getattr(objective, name) is None]
    if isinstance(objective, Reinforce) and len(unused) < len(bounds):
        unused = []  # is_ratio_cap or is_ratio_bounds alone bounds the ratio
    return [
        f"a learning_rate below {config.optimizer.learning_rate:g}",
        *unused,
        *(["max_grad_norm 1"] if config.optimizer.max_grad_norm is None else []),
        *(["kl_estimator k2"] if config.loss.kl_weight is not None and config.loss.kl_estimator == "k3" else []),
        *(["dtype float32"] if config.model.dtype == "bfloat16" else []),
    ]
