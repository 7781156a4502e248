"""Take one gradient step over the micro-batches of all ranks, and measure it. Collective.

Sections: advantages that depend on the whole batch, the optimizer, seconds of phases, quantiles of importance ratios,
values of each token, and the row of the metrics table. Raises TrainingError if the loss or the gradient is not finite.
"""

# Shapes: A = response tokens of a micro-batch, B = bins of a histogram. Sums over ranks are float64, so that no split
# of the batch changes them.

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import asinh, exp, nan, sinh
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel

from ludic.errors import TrainingError
from ludic.models import Routers
from ludic.records import UNKNOWN_EXPERT, with_columns
from ludic.root.rows import step_numbers, to_token_stats
from ludic.training.adamw_8bit import adamw_8bit
from ludic.training.batches.packing import MicroBatch
from ludic.training.config import LossConfig, OffPolicy, Reinforce, TrainConfig
from ludic.training.logprobs import token_logprobs
from ludic.training.losses import KL_ESTIMATORS, MAX_LOG_RATIO, bounded, clipped_tokens, loss_units, rl_loss
from ludic.training.router_losses import EXPERT_TOKENS, count_tokens, expert_imbalance, router_losses

if TYPE_CHECKING:
    from ludic.training.batches.source import BatchPlan
    from ludic.training.reference import Reference

_HISTOGRAM = "log_ratio_histogram"
_OF_SAMPLER, _KNOWN = ("ratio", "sampler_kl", "sampler_kl_k1"), "num_known"
"""Sums over the sampled tokens with a known sampler's logprob, and the number of these tokens."""


def train_step(
    model: PreTrainedModel,
    optimizer: Optimizer,
    micro_batches: Sequence[MicroBatch],
    *,
    config: TrainConfig,
    num_action_tokens: int,
    num_ranks: int,
    learning_rate: float,
    reference: "Reference | None" = None,
    timer: "StepTimer | None" = None,
    token_stats: "TokenStats | None" = None,
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
        # It is not compared with the sampler: it covers the whole distribution, and the model's own experts.
        micro_batches = [with_columns(batch, kept_tokens=None, experts=None) for batch in micro_batches]
    totals: dict[str, Tensor] = {}
    with timer.device("collectives"):
        num_sequences = _count_sequences(micro_batches, config, model.device)
        num_tokens = count_tokens(micro_batches, model.device) if config.loss.has_router_losses else None
    counts = {"num_action_tokens": num_action_tokens, "num_sequences": num_sequences}
    with timer.device("reference"):
        references = reference(micro_batches) if reference else [None] * len(micro_batches)
    with timer.device("collectives"):
        micro_batches = shape_advantages(micro_batches, references, config.loss, model.device)
    for batch, of_reference in zip(micro_batches, references, strict=True):
        batch = batch.to(model.device)
        with _replay(model, batch) as other_experts:
            with timer.device("forward"):
                loss, sums = _micro_batch_loss(model, batch, config, counts, of_reference, token_stats)
                sums |= other_experts()
                if num_tokens is not None:
                    loss, of_routers = _add_router_losses(loss, model, batch, config, num_tokens, num_action_tokens)
                    sums |= of_routers
            with timer.device("backward"):
                # FSDP2 averages gradients over ranks, but the loss is a sum over ranks. Gradients are reduced after
                # each micro-batch: reducing only after the last would keep them unsharded in memory.
                (loss * num_ranks).backward()
        totals = _accumulate(totals, sums)
    with timer.device("collectives"):
        metrics = _reduce(totals, num_action_tokens)
        metrics["grad_norm"] = _clip_gradients(model, config.optimizer.max_grad_norm)
    metrics["learning_rate"] = learning_rate
    _check_finite(optimizer, metrics, config)
    with timer.device("optimizer"):
        _set_learning_rate(optimizer, learning_rate)
        optimizer.step()
        optimizer.zero_grad()
    return metrics


def _set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao compiles its step, in which a number would be a constant
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


_OTHER_EXPERTS, _REPLAYED = "experts_changed", "num_replayed"


@contextmanager
def _replay(model: PreTrainedModel, batch: MicroBatch) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Send the tokens of a micro-batch to its experts, if it has any, in the block's forward and backward pass.

    After the forward pass, the function returns two sums over sampled tokens that have experts: of the share of layers
    whose router would have chosen others, and of 1.
    """
    zero = torch.zeros((), device=model.device)
    if batch.experts is None:
        yield lambda: {_OTHER_EXPERTS: zero, _REPLAYED: zero}
        return
    experts = batch.experts
    with Routers(model, type(model).__name__).replay(experts) as differs:

        def sums() -> dict[str, Tensor]:
            # A token is sampled by the pass that reads the token before it.
            is_known = (experts[batch.logit_positions, 0, 0] != UNKNOWN_EXPERT) & batch.action_mask
            changed = torch.where(is_known, differs()[batch.logit_positions], 0)
            return {_OTHER_EXPERTS: changed.sum(), _REPLAYED: is_known.sum()}

        yield sums


def _micro_batch_loss(
    model: PreTrainedModel,
    batch: MicroBatch,
    config: TrainConfig,
    counts: Mapping[str, int],
    reference: Tensor | None,
    token_stats: "TokenStats | None",
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
    is_known = batch.action_mask & batch.sampler_logprobs.isfinite()
    histogram = log_ratio_histogram(logprobs.detach() - batch.sampler_logprobs, is_known)
    return loss, sums | {_KNOWN: is_known.sum(), _HISTOGRAM: histogram}


def _add_router_losses(
    loss: Tensor,
    model: PreTrainedModel,
    batch: MicroBatch,
    config: TrainConfig,
    num_tokens: int,
    num_action_tokens: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a micro-batch's share of the loss with those of the routers, and its sums. num_tokens: of all ranks."""
    routed = router_losses(model, batch, config.loss, num_tokens=num_tokens)
    loss = loss + routed.loss
    # These are not means over action tokens, by which all sums are divided.
    shares = {"loss": loss, "router_balance_loss": routed.balance, "router_z_loss": routed.z}
    sums = {name: share.detach() * num_action_tokens for name, share in shares.items()}
    return loss, sums | {EXPERT_TOKENS: routed.expert_tokens}


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
    """Return means over the action tokens of all ranks, maximum and quantiles of the ratio, and expert_imbalance.

    Metrics that compare with the sampler are over tokens with its logprob; NaN if there are none.
    """
    ratio_max, histogram = totals.pop("ratio_max"), totals.pop(_HISTOGRAM)
    tokens = totals.pop(EXPERT_TOKENS, None)
    dist.all_reduce(ratio_max, op=dist.ReduceOp.MAX)
    dist.all_reduce(histogram)
    sums = torch.stack([value.double() for value in totals.values()])
    dist.all_reduce(sums)
    names = list(totals)
    num_known, of_all = sums[names.index(_KNOWN)], sums.new_tensor(num_action_tokens)
    numbers = torch.stack([num_known if name in _OF_SAMPLER else of_all for name in names])
    means = dict(zip(names, (sums / numbers).tolist(), strict=True))  # their only copy from the device
    share_known, num_replayed = means.pop(_KNOWN), means.pop(_REPLAYED)
    if num_replayed > 0:
        means[_OTHER_EXPERTS] /= num_replayed
    else:
        del means[_OTHER_EXPERTS]
    means["ratio_mean"], means["clip_fraction"] = means.pop("ratio"), means.pop("clipped")
    quantiles = {f"ratio_p{percent:02}": ratio_quantile(histogram.cpu(), percent / 100) for percent in (1, 99)}
    if tokens is not None:
        dist.all_reduce(tokens)
        means["expert_imbalance"] = expert_imbalance(tokens)
    return means | quantiles | {"ratio_max": ratio_max.item() if share_known > 0 else nan}


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


# --- Advantages that depend on the whole batch: KL in returns, and whitening -------------------------------------


_VARIANCE_FLOOR = 1e-8
"""Constant added to the variance, as in verl's masked_whiten."""


def shape_advantages(
    batches: Sequence[MicroBatch], references: Sequence[Tensor | None], config: LossConfig, device: torch.device
) -> Sequence[MicroBatch]:
    """Return the micro-batches with the advantages that the loss uses. Every rank must call it.

    references: (A,) logprobs of each micro-batch. device: device of the sums over ranks.
    """
    if config.kl_weight is not None and config.kl_placement == "return":
        estimate = KL_ESTIMATORS[config.kl_estimator]
        batches = [
            replace(
                batch, advantages=(batch.advantages - config.kl_weight * _kl_to_go(batch, reference, estimate)).float()
            )
            for batch, reference in zip(batches, references, strict=True)
        ]
    if isinstance(config.objective, OffPolicy) and config.objective.whiten_advantages:
        batches = _whiten(batches, device)
    return batches


def _kl_to_go(batch: MicroBatch, reference: Tensor | None, estimate: Callable[[Tensor], Tensor]) -> Tensor:
    """Return (A,) float64: KL of each token plus all later ones (REINFORCE++, Hu 2025, arXiv 2501.03262).

    The KL is from the sampler, which is the paper's old policy, to the reference.
    """
    assert reference is not None, "kl_weight needs reference_logprobs"
    log_ratio = (reference.to(batch.sampler_logprobs.device) - batch.sampler_logprobs).double()
    return _sum_to_go(torch.where(batch.action_mask, estimate(log_ratio), 0), batch.sequence_ids)


def _sum_to_go(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Return (A,): at each token, the sum from there to the end of its sequence; sequences lie end to end."""
    totals = torch.zeros_like(values).index_add(0, sequence_ids, values)
    before = values.cumsum(0) - values
    start = (totals.cumsum(0) - totals)[sequence_ids]
    return totals[sequence_ids] - (before - start)


def _whiten(batches: Sequence[MicroBatch], device: torch.device) -> list[MicroBatch]:
    """Scale advantages to mean 0 and variance 1 (with n - 1) over the sampled tokens of all ranks' micro-batches."""
    sampled = [batch.advantages[batch.action_mask].double() for batch in batches]
    count, total = _sum_over_ranks(sum(map(len, sampled)), sum(float(each.sum()) for each in sampled), device=device)
    mean = total / max(1, count)
    (squares,) = _sum_over_ranks(sum(float((each - mean).square().sum()) for each in sampled), device=device)
    scale = (squares / max(1, count - 1) + _VARIANCE_FLOOR) ** -0.5
    return [replace(batch, advantages=((batch.advantages.double() - mean) * scale).float()) for batch in batches]


def _sum_over_ranks(*values: float, device: torch.device) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


# --- The optimizer -----------------------------------------------------------------------------------------------


def build_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Return AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101); 1-D parameters (norms, biases) do not decay.

    `train_step` sets the learning rate at each step. Raises ConfigError for adamw_8bit if torchao is not installed.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    # Adapters have only matrices, and an empty group can't be checkpointed.
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": config.optimizer.learning_rate, "betas": config.optimizer.betas}
    if config.optimizer.optimizer == "adamw_8bit":
        return adamw_8bit(groups, **options)
    # None, not False: torch chooses foreach only if fused is not given.
    return AdamW(groups, fused=config.optimizer.fused_adamw or None, **options)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a gradient step; steps count from 1 to num_steps.

    It rises linearly to config.learning_rate at step warmup_steps. Then it stays constant or falls towards 0,
    which it would reach one step after the last.
    """
    if step <= config.optimizer.warmup_steps:
        return config.optimizer.learning_rate * step / config.optimizer.warmup_steps
    progress = (step - config.optimizer.warmup_steps - 1) / (config.num_steps - config.optimizer.warmup_steps)
    progress = min(progress, 1.0)
    if config.optimizer.schedule == "linear":
        return config.optimizer.learning_rate * (1 - progress)
    if config.optimizer.schedule == "cosine":
        return config.optimizer.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    return config.optimizer.learning_rate


# --- Seconds of the phases ---------------------------------------------------------------------------------------


class StepTimer:
    """Seconds of one step by phase. Phases may be nested; the times of a repeated phase add up."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def host(self, phase: str) -> Iterator[None]:
        """Measure the block by the clock, until the device has finished its work."""
        started = time.perf_counter()
        yield
        if self._is_cuda:
            torch.cuda.synchronize()
        self._seconds[phase] += time.perf_counter() - started

    @contextmanager
    def device(self, phase: str) -> Iterator[None]:
        """Measure the device's work in the block, on CUDA by events without waiting, elsewhere like `host`."""
        if not self._is_cuda:
            with self.host(phase):
                yield
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((phase, start, end))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase; waits for the device."""
        for phase, start, end in self._events:
            end.synchronize()
            self._seconds[phase] += start.elapsed_time(end) / 1000
        self._events.clear()
        return dict(self._seconds)


# --- Quantiles of importance ratios ------------------------------------------------------------------------------


_BIN_SCALE = 1e-3
"""Nats below which bins are of about equal width."""
_BINS_A_SIDE = 1024
"""Bins on either side of the middle one, which holds the ratio 1."""
_BIN_STEP = asinh(MAX_LOG_RATIO / _BIN_SCALE) / _BINS_A_SIDE


def log_ratio_histogram(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return (B,) int64: number of tokens in each bin. log_ratio: (A,) nats, trainer minus sampler; mask: (A,) bool."""
    positions = (bounded(torch.where(mask, log_ratio, 0)) / _BIN_SCALE).asinh() / _BIN_STEP
    bins = positions.round().long() + _BINS_A_SIDE
    return torch.zeros(2 * _BINS_A_SIDE + 1, dtype=torch.int64, device=bins.device).index_add_(0, bins, mask.long())


def ratio_quantile(histogram: Tensor, q: float) -> float:
    """Return the q-quantile of the ratios of a histogram, by nearest rank; NaN if it is empty."""
    cumulative = histogram.cumsum(0)
    if cumulative[-1] == 0:
        return nan
    index = int((cumulative < q * cumulative[-1]).sum())
    return exp(_BIN_SCALE * sinh((index - _BINS_A_SIDE) * _BIN_STEP))


# --- Values of each token, for the table token_stats -------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """Values of one micro-batch; tensors are (A,), on the model's device."""

    rollout_ids: tuple[str, ...]
    sequence_ids: Tensor
    trainer_logprobs: Tensor
    entropy: Tensor
    clipped: Tensor
    weight: Tensor | None = None
    """Gradient weight of each token; None before the backward pass."""


@dataclass(slots=True)
class TokenStats:
    """Token statistics of one rank and step: call `see` for each micro-batch between its forward and backward pass."""

    weight_scale: float
    """Factor from a gradient of the backward pass to the table's unit: sampled tokens of the batch / ranks."""
    _seen: list[_Seen] = field(default_factory=list)

    def see(self, batch: MicroBatch, logprobs: Tensor, entropies: Tensor, clipped: Tensor) -> None:
        """Record a micro-batch. logprobs: (A,), before the backward pass; entropies: (A,); clipped: (A,) bool."""
        seen = _Seen(
            rollout_ids=batch.rollout_ids,
            sequence_ids=batch.sequence_ids,
            trainer_logprobs=logprobs.detach(),
            entropy=entropies.detach(),
            clipped=clipped,
        )
        logprobs.register_hook(partial(self._keep_weight, seen))
        self._seen.append(seen)

    def _keep_weight(self, seen: _Seen, gradient: Tensor) -> None:
        seen.weight = -gradient.detach() * self.weight_scale

    def to_table(self, attempt_id: int, step: int) -> pa.Table:
        """Return rows of the token_stats table; a rollout whose response max_seq_len cuts to 0 tokens has no row."""
        full = [seen for seen in self._seen if seen.rollout_ids]
        lengths = [seen.sequence_ids.bincount(minlength=len(seen.rollout_ids)).numpy() for seen in full]
        return to_token_stats(
            attempt_id=attempt_id,
            step=step,
            rollout_ids=[rollout_id for seen in full for rollout_id in seen.rollout_ids],
            lengths=np.concatenate([np.zeros(0, np.int64), *lengths]),
            trainer_logprobs=_join([seen.trainer_logprobs for seen in full], np.float32),
            entropy=_join([seen.entropy for seen in full], np.float32),
            clipped=_join([seen.clipped for seen in full], np.bool_),
            weight=_join([seen.weight for seen in full if seen.weight is not None], np.float32),
        )

    def to_cpu(self) -> None:
        """Copy all tensors to CPU memory; call it after the step."""
        for seen in self._seen:
            assert seen.weight is not None, "a micro-batch without a backward pass"
            for name in ("sequence_ids", "trainer_logprobs", "entropy", "clipped", "weight"):
                setattr(seen, name, getattr(seen, name).cpu())


def _join(tensors: list[Tensor], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(tensor.numpy().astype(dtype, copy=False) for tensor in tensors)])


# --- Metrics of the step and its data ----------------------------------------------------------------------------


def step_metrics(
    plan: "BatchPlan", metrics: Mapping[str, float], *, num_tokens: int, num_truncated: int
) -> dict[str, Any]:
    """Return the metrics of a training step together with those of its used and dropped rollouts."""
    return {
        **metrics,
        "policy_version": plan.rows.column("trainer_version")[0].as_py(),
        "num_tokens": num_tokens,
        "num_seq_len_truncated": num_truncated,
        "num_pending_groups": plan.num_pending_groups,
        "num_unreadable_files": plan.num_unreadable_files,
        **step_numbers(plan.rows),
    }


def trained_lengths(plan: "BatchPlan", max_seq_len: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return prompt and response lengths, in tokens, of a step's used rollouts; max_seq_len may cut a response to 0."""
    used = plan.rows.filter(plan.rows.column("used"))
    prompts, responses = (used.column(name).to_numpy() for name in ("prompt_length", "response_length"))
    if max_seq_len is not None:
        responses = np.clip(responses, 0, np.maximum(0, max_seq_len - prompts))
    return prompts, responses
