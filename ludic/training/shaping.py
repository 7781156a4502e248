"""Advantages that depend on the whole batch of a step: KL in returns, and whitening. Collective.

Pure, except for sums over ranks. Changes nothing if the settings ask for neither.
"""

# Shapes: A = response tokens of a micro-batch. Sums are float64, so that no split of the batch changes them.

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ludic.batches.packing import MicroBatch
from ludic.training.loss_config import LossConfig
from ludic.training.losses.ratios import KL_ESTIMATORS
from ludic.training.objectives import OffPolicy

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
