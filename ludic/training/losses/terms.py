"""Inputs of objectives: masked terms of a micro-batch and the trainer's logprobs. Pure tensor code."""

# Shapes: A = response tokens of a micro-batch. Logprobs are in nats.

from dataclasses import dataclass

import torch
from torch import Tensor

from ludic.batches.packing import MicroBatch
from ludic.training.loss_config import LossConfig
from ludic.training.losses.ratios import bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """Inputs of an objective; all (A,), and 0 at tokens that were not sampled."""

    logprobs: Tensor
    """The trainer's logprobs, with gradient."""
    sampler_logprobs: Tensor
    log_ratio: Tensor
    """log(trainer / sampler), with gradient, clamped to MAX_LOG_RATIO."""
    advantages: Tensor
    mask: Tensor
    """bool: sampled tokens."""
    sequence_ids: Tensor
    """int64, below A; see `loss_units`."""
    log_reference: Tensor | None = None
    """log(reference / trainer), with gradient; None without a reference."""

    @property
    def ratio(self) -> Tensor:
        return self.log_ratio.exp()

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Return, at each token, the sum over the sampled tokens of its sequence."""
        sums = torch.zeros_like(values).index_add(0, self.sequence_ids, torch.where(self.mask, values, 0))
        return sums[self.sequence_ids]

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return, at each token, the mean over the sampled tokens of its sequence."""
        return self.sequence_sum(values) / self.sequence_lengths

    @property
    def sequence_lengths(self) -> Tensor:
        """Number of sampled tokens of each token's sequence, at least 1."""
        return self.sequence_sum(torch.ones_like(self.log_ratio)).clamp(min=1)


def loss_units(batch: MicroBatch, config: LossConfig) -> Tensor:
    """Return (A,) int64: the number of each token's sequence in the loss; for pairs, the number of its pair."""
    return batch.pair_ids if config.is_paired else batch.sequence_ids


def make_terms(
    trainer_logprobs: Tensor, batch: MicroBatch, reference_logprobs: Tensor | None, config: LossConfig
) -> TokenTerms:
    """Build the terms. Inputs are masked first, so that no inf or nan reaches the gradient."""
    mask = batch.action_mask
    logprobs, sampler_logprobs = (torch.where(mask, each, 0) for each in (trainer_logprobs, batch.sampler_logprobs))
    return TokenTerms(
        logprobs=logprobs,
        sampler_logprobs=sampler_logprobs,
        log_ratio=bounded(logprobs - sampler_logprobs),
        advantages=torch.where(mask, batch.advantages, 0),
        mask=mask,
        sequence_ids=loss_units(batch, config),
        log_reference=None if reference_logprobs is None else torch.where(mask, reference_logprobs, 0) - logprobs,
    )
