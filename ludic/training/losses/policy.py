"""Policy-gradient objectives and sft, to maximise at each token. Pure tensor code.

Each returns the objective, and where the ratio was clipped, capped or gated off; both (A,). docs/algorithms.md has
the formulas.
"""

# Shapes: A = response tokens of a micro-batch. Logprobs are in nats.

import math

import torch
from torch import Tensor

from ludic.training.losses.ratios import bounded
from ludic.training.losses.terms import TokenTerms
from ludic.training.objectives import (
    Cispo,
    Clipping,
    Dppo,
    DualClipping,
    Gmpo,
    Gspo,
    OffPolicy,
    PpoClip,
    Reinforce,
    Sapo,
    Sft,
    Vespo,
)


def reinforce(terms: TokenTerms, config: Reinforce) -> tuple[Tensor, Tensor]:
    """Advantage times logprob, weighted by the importance ratio without gradient through it (Williams 1992).

    With is_ratio_cap it is truncated importance sampling (Ionides 2008). It also equals decoupled PPO (Hilton et al.
    2021, arXiv 2110.00641) if, as here, a batch makes one step: the proximal policy is the trainer's at that step.
    """
    ratio = level_ratio(terms, config)
    weight = ratio if config.is_ratio_cap is None else ratio.clamp(max=config.is_ratio_cap)
    return weight * terms.logprobs * terms.advantages, weight != ratio


def level_ratio(terms: TokenTerms, config: OffPolicy) -> Tensor:
    """Return the token's ratio, or with ratio_level sequence the product over its sequence; without gradient."""
    is_of_sequence = isinstance(config, Reinforce) and config.ratio_level == "sequence"
    log_ratio = terms.sequence_sum(terms.log_ratio) if is_of_sequence else terms.log_ratio
    return bounded(log_ratio.detach()).exp()


def ppo_clip(terms: TokenTerms, config: PpoClip) -> tuple[Tensor, Tensor]:
    """PPO's clipped ratio: Schulman et al. 2017 (arXiv 1707.06347), eq. 7; two bounds as in DAPO (2503.14476), eq. 10.

    dual_clip bounds the objective at a negative advantage by dual_clip times the advantage (Ye et al. 2020, arXiv
    1912.09729, eq. 5).
    """
    return _clipped(terms.ratio, terms.advantages, config)


def _clipped(ratio: Tensor, advantages: Tensor, config: DualClipping) -> tuple[Tensor, Tensor]:
    objective = ratio * advantages
    bounded = torch.minimum(objective, _clamp(ratio, config) * advantages)
    if config.dual_clip is not None:
        floor = torch.where(advantages < 0, config.dual_clip * advantages, -math.inf)
        bounded = torch.maximum(bounded, floor)
    return bounded, bounded != objective


def _clamp(ratio: Tensor, config: Clipping) -> Tensor:
    low = None if config.clip_low is None else 1 - config.clip_low
    high = None if config.clip_high is None else 1 + config.clip_high
    return ratio if low is None and high is None else ratio.clamp(low, high)


def cispo(terms: TokenTerms, config: Cispo) -> tuple[Tensor, Tensor]:
    """Clipped importance weights that keep every token's gradient: MiniMax-M1 (arXiv 2506.13585), eq. 4 and 5."""
    ratio = terms.ratio.detach()
    weight = _clamp(ratio, config)
    return weight * terms.logprobs * terms.advantages, weight != ratio


def gspo(terms: TokenTerms, config: Gspo) -> tuple[Tensor, Tensor]:
    """Clipped geometric mean of a sequence's ratios: Zheng et al. 2025 (arXiv 2507.18071), eq. 5 and 7.

    Uses the paper's token form (eq. 14), which has the same value and gradient if a sequence has one advantage.
    """
    of_sequence = terms.sequence_mean(terms.log_ratio).detach().exp()
    return _clipped(of_sequence * (terms.logprobs - terms.logprobs.detach()).exp(), terms.advantages, config)


def gmpo(terms: TokenTerms, config: Gmpo) -> tuple[Tensor, Tensor]:
    """Geometric mean of ratios clipped per token: Zhao et al. 2025 (arXiv 2507.20673), eq. 4."""
    log_ratio = terms.log_ratio
    low = -math.inf if config.clip_low in (None, 1) else math.log(1 - config.clip_low)
    high = math.inf if config.clip_high is None else math.log1p(config.clip_high)
    bounded = log_ratio.clamp(low, high)
    gains = terms.advantages >= 0
    chosen = torch.where(gains, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    return terms.sequence_mean(chosen).exp() * terms.advantages, chosen != log_ratio


def sapo(terms: TokenTerms, config: Sapo) -> tuple[Tensor, Tensor]:
    """Soft gate instead of a clip: Gao et al. 2025 (arXiv 2511.20347), eq. 5 and 6."""
    tau = torch.where(terms.advantages > 0, config.sapo_tau_positive, config.sapo_tau_negative).to(terms.log_ratio)
    gate = torch.sigmoid(tau * (terms.ratio - 1)) * 4 / tau
    return gate * terms.advantages, torch.zeros_like(terms.mask)


def dppo(terms: TokenTerms, config: Dppo) -> tuple[Tensor, Tensor]:
    """Ratio of tokens whose probability moved little: Qi et al. 2026 (DPPO, arXiv 2602.04879), binary TV.

    A token is masked if its probability has risen by more than dppo_high at a positive advantage, or fallen by more
    than dppo_low otherwise.
    """
    moved = terms.logprobs.detach().exp() - terms.sampler_logprobs.exp()
    too_far = torch.where(terms.advantages > 0, moved > config.dppo_high, moved < -config.dppo_low)
    return torch.where(too_far, 0, terms.ratio * terms.advantages), too_far


def vespo(terms: TokenTerms, config: Vespo) -> tuple[Tensor, Tensor]:
    """Weights that decay smoothly as a sequence's ratio W moves away from 1: W^k exp(lambda (1 - W)), without gradient.

    Shen et al. 2026 (arXiv 2602.10693), section 3.4; k and lambda depend on the sign of the advantage.
    """
    log_ratio = bounded(terms.sequence_sum(terms.log_ratio.detach()))
    gains = terms.advantages >= 0
    k = torch.where(gains, *config.vespo_k).to(log_ratio)
    decay = torch.where(gains, *config.vespo_lambda).to(log_ratio)
    weight = (k * log_ratio + decay * (1 - log_ratio.exp())).exp()
    return weight * terms.logprobs * terms.advantages, torch.zeros_like(terms.mask)


def masked_out(terms: TokenTerms, config: OffPolicy) -> Tensor:
    """Return (A,) bool: tokens whose objective is set to 0, because the policy moved too far from the sampler there.

    is_ratio_bounds: IcePop (arXiv 2510.18855). is_sequence_ratio_bounds: geometric mean over the sequence, as in verl's
    seq_mean_k1. mask_sequence_kl: sequences with a negative advantage, DeepSeek-V3.2 (arXiv 2512.02556).
    """
    out = torch.zeros_like(terms.mask)
    mean_log_ratio = terms.sequence_mean(terms.log_ratio.detach())
    if config.is_ratio_bounds is not None:
        out = out | _is_outside(level_ratio(terms, config), config.is_ratio_bounds)
    if config.is_sequence_ratio_bounds is not None:
        out = out | _is_outside(mean_log_ratio.exp(), config.is_sequence_ratio_bounds)
    if config.mask_sequence_kl is not None:
        out = out | ((terms.advantages < 0) & (-mean_log_ratio > config.mask_sequence_kl))
    return out & terms.mask


def _is_outside(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (values < bounds[0]) | (values > bounds[1])


def sft(terms: TokenTerms, config: Sft) -> tuple[Tensor, Tensor]:
    """Maximum likelihood of the stored tokens, whatever their advantage; filters choose the rollouts."""
    return terms.logprobs, torch.zeros_like(terms.mask)
