"""Policy-gradient losses over the response tokens of a micro-batch. Pure tensor code.

The importance ratio is trainer over sampler, token by token, with the logprobs that the
rollouts were sampled with: no second forward pass stands in for the sampler.
"""

# Shapes: A = response tokens of a micro-batch, V = vocabulary. Logprobs and KLs are in nats.

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ludic.training.config import LossConfig
from ludic.training.packing import MicroBatch

# Rows of logits turned to float32 at once: 150 MB at a vocabulary of 150,000.
_ROWS = 256


def token_logprobs_and_entropy(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Logprob of each target, and entropy of each row (without gradient), both (A,) float32 nats.

    logits: (A, V) any float dtype. targets: (A,) int64. temperatures: (A,) float32 above 0,
    which divide the logits. No float32 copy of all logits is kept: rows are taken in chunks
    and computed again in the backward pass.
    """
    parts = zip(logits.split(_ROWS), targets.split(_ROWS), temperatures.split(_ROWS), strict=True)
    if logits.requires_grad:
        results = [checkpoint(_logprobs_and_entropy, *part, use_reentrant=False) for part in parts]
    else:
        results = [_logprobs_and_entropy(*part) for part in parts]
    logprobs, entropies = zip(*results, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _logprobs_and_entropy(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    scaled = logits.float() / temperatures[:, None]
    log_normalizer = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, targets[:, None]).squeeze(-1) - log_normalizer
    with torch.no_grad():
        entropy = log_normalizer - (scaled.softmax(-1) * scaled).sum(-1)
    return logprobs, entropy


def policy_gradient_loss(
    trainer_logprobs: Tensor,
    batch: MicroBatch,
    config: LossConfig,
    *,
    num_action_tokens: int,
    reference_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the loss: a scalar, nats per action token of the global batch.

    trainer_logprobs: (A,) float32 with gradient. reference_logprobs: (A,) float32 without.
    num_action_tokens: of all micro-batches of all ranks; shares add up to the step's loss.
    An empty mask gives a zero that still has a gradient: a rank that raised alone would hang
    the others.

    Also returns detached sums over action tokens, to be divided by num_action_tokens: ratio,
    clipped (a count), sampler_kl, and reference_kl where there is a reference; and ratio_max.
    Both KLs are k3 estimates (Schulman 2020, "Approximating KL divergence").
    """
    assert num_action_tokens > 0, "a step without action tokens has no loss"
    assert config.kl_weight is None or reference_logprobs is not None, "kl_weight needs reference_logprobs"
    mask = batch.action_mask
    # Masked before anything is computed from it, so that no inf or nan reaches the gradient.
    logprobs = torch.where(mask, trainer_logprobs, 0)
    log_ratio = logprobs - torch.where(mask, batch.sampler_logprobs, 0)
    ratio = log_ratio.exp()
    objective, clipped = _objective(logprobs, ratio, batch.advantages, config)
    token_loss = -objective
    sums = {
        "ratio": ratio * mask,
        "clipped": clipped & mask,
        "sampler_kl": k3(log_ratio) * mask,
    }
    if reference_logprobs is not None:
        sums["reference_kl"] = reference_kl = k3(torch.where(mask, reference_logprobs, 0) - logprobs) * mask
        if config.kl_weight is not None:
            token_loss = token_loss + config.kl_weight * reference_kl
    loss = torch.where(mask, token_loss * batch.weights, 0).sum() / num_action_tokens
    return loss, {name: value.detach().sum() for name, value in sums.items()} | {
        "ratio_max": (ratio * mask).detach().max()
    }


def _objective(logprobs: Tensor, ratio: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """What is to be maximised at each token, and where the ratio was clipped or capped; both (A,)."""
    if config.truncate_ratio is not None:
        # Truncated importance sampling (Ionides 2008); as a policy gradient, CISPO (arXiv 2506.13585, eq. 4).
        return ratio.clamp(max=config.truncate_ratio).detach() * logprobs * advantages, ratio > config.truncate_ratio
    objective = ratio * advantages
    if config.clip_low is None and config.clip_high is None:
        return objective, torch.zeros_like(ratio, dtype=torch.bool)
    # Schulman et al. 2017 (arXiv 1707.06347), eq. 7; with two bounds as DAPO (arXiv 2503.14476), eq. 10.
    low = None if config.clip_low is None else 1 - config.clip_low
    high = None if config.clip_high is None else 1 + config.clip_high
    bounded = ratio.clamp(low, high) * advantages
    return torch.minimum(objective, bounded), bounded < objective


def k3(log_ratio: Tensor) -> Tensor:
    """Estimates KL(q || p) at samples of q, never below 0: p/q - 1 - log(p/q). log_ratio is log(p/q)."""
    return log_ratio.expm1() - log_ratio
