"""Loss of a micro-batch from an objective over its response tokens. Pure tensor code.

The importance ratio is trainer over sampler, per token. It uses the logprobs stored by the sampler, not a second
forward pass. docs/algorithms.md has papers and formulas.

ratios: log ratios and KL estimators; terms: inputs of objectives; policy, pairs: the objectives.
"""

# Shapes: A = response tokens of a micro-batch. Logprobs and KLs are in nats.

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ludic.batches.packing import MicroBatch
from ludic.training.loss_config import LossConfig
from ludic.training.losses.pairs import dpo, ipo, orpo, preferences
from ludic.training.losses.policy import cispo, dppo, gmpo, gspo, masked_out, ppo_clip, reinforce, sapo, sft, vespo
from ludic.training.losses.ratios import KL_ESTIMATORS, k1, k3
from ludic.training.losses.terms import TokenTerms, loss_units, make_terms
from ludic.training.objectives import OffPolicy, Paired

__all__ = ["OBJECTIVES", "clipped_tokens", "loss_units", "rl_loss"]

OBJECTIVES: Mapping[str, Callable[[TokenTerms, Any], tuple[Tensor, Tensor]]] = {
    "reinforce": reinforce,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "gspo": gspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "dppo": dppo,
    "vespo": vespo,
    "sft": sft,
    "dpo": dpo,
    "ipo": ipo,
    "orpo": orpo,
}
"""Objectives by name. Each takes its own settings (ludic.training.objectives), and returns the objective at each token
and where the ratio was clipped, capped or gated off; both (A,)."""


def rl_loss(
    trainer_logprobs: Tensor,
    batch: MicroBatch,
    config: LossConfig,
    *,
    num_action_tokens: int,
    num_sequences: int,
    entropies: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the micro-batch's share of the loss, a scalar in nats per action token or sequence of the global batch.

    trainer_logprobs: (A,) float32 with gradient; entropies: (A,), with gradient if entropy_weight is set;
    reference_logprobs: (A,) float32 without gradient. num_action_tokens, num_sequences: counts over all micro-batches
    of all ranks, where a sequence is one of `loss_units`; the shares add up to the step's loss. An empty mask gives a
    zero that still has a gradient: a rank that raised alone would hang the others.

    Also returns detached sums over action tokens, to be divided by num_action_tokens: ratio, clipped (a
    count), sampler_kl and sampler_kl_k1 (k3 and k1 estimates), and reference_kl (k3) if there is a reference; and
    ratio_max, a maximum.
    For pairs it also returns preference_margin and preference_accuracy, which become means over pairs.
    """
    assert num_action_tokens > 0, "a step without action tokens has no loss"
    assert num_sequences > 0, "a step without sequences has no loss"
    terms = make_terms(trainer_logprobs, batch, reference_logprobs, config)
    objective, clipped = _apply_objective(terms, config)
    token_loss = -objective
    if isinstance(config.objective, OffPolicy) and config.objective.log_ratio_weight is not None:
        token_loss = token_loss + config.objective.log_ratio_weight * terms.log_ratio.square()
    if config.entropy_weight is not None:
        assert entropies is not None, "entropy_weight needs entropies"
        token_loss = token_loss - config.entropy_weight * entropies
    if config.kl_weight is not None and config.kl_placement == "loss":
        assert terms.log_reference is not None, "kl_weight needs reference_logprobs"
        token_loss = token_loss + config.kl_weight * KL_ESTIMATORS[config.kl_estimator](terms.log_reference)
    share = batch.weights * token_shares(
        terms, config, num_action_tokens=num_action_tokens, num_sequences=num_sequences
    )
    loss = torch.where(terms.mask, token_loss * share, 0).sum()
    measures = _measures(terms, clipped)
    if isinstance(config.objective, Paired):
        measures |= preferences(terms, config.objective, num_action_tokens / num_sequences)
    return loss, measures


@torch.no_grad()
def clipped_tokens(
    trainer_logprobs: Tensor, batch: MicroBatch, config: LossConfig, reference_logprobs: Tensor | None = None
) -> Tensor:
    """Return (A,) bool: tokens whose importance ratio is clipped, capped or masked. Arguments: see `rl_loss`."""
    terms = make_terms(trainer_logprobs, batch, reference_logprobs, config)
    return _apply_objective(terms, config)[1] & terms.mask


def _apply_objective(terms: TokenTerms, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Return the objective at each token, and where the ratio was clipped, capped or masked; both (A,)."""
    chosen = config.objective
    objective, clipped = OBJECTIVES[chosen.name](_with_kl_reward(terms, config), chosen)
    if not isinstance(chosen, OffPolicy):
        return objective, clipped
    out = masked_out(terms, chosen)
    return torch.where(out, 0, objective), clipped | out


def _with_kl_reward(terms: TokenTerms, config: LossConfig) -> TokenTerms:
    """Subtract each token's weighted KL from its advantage, without gradient, if kl_placement is reward."""
    if config.kl_weight is None or config.kl_placement != "reward":
        return terms
    assert terms.log_reference is not None, "kl_weight needs reference_logprobs"
    penalty = config.kl_weight * KL_ESTIMATORS[config.kl_estimator](terms.log_reference.detach())
    return replace(terms, advantages=terms.advantages - penalty)


def token_shares(terms: TokenTerms, config: LossConfig, *, num_action_tokens: int, num_sequences: int) -> Tensor:
    """Return (A,): the factor of each token's loss, so that the shares of a global batch add up to its mean."""
    match config.loss_normalization:
        case "tokens":  # DAPO (arXiv 2503.14476), eq. 8: equal weight per token
            return torch.full_like(terms.log_ratio, 1 / num_action_tokens)
        case "sequences" | "episodes":  # GRPO (arXiv 2402.03300), eq. 3; the plan's weights join an episode's rows
            return 1 / (terms.sequence_lengths * num_sequences)
        case "constant":  # Dr. GRPO (arXiv 2503.20783), section 3.2: a constant length
            assert config.constant_tokens is not None
            return torch.full_like(terms.log_ratio, 1 / (config.constant_tokens * num_sequences))


def _measures(terms: TokenTerms, clipped: Tensor) -> dict[str, Tensor]:
    ratio = terms.ratio * terms.mask
    sums = {"ratio": ratio, "clipped": clipped & terms.mask}
    sums |= {"sampler_kl": k3(terms.log_ratio) * terms.mask, "sampler_kl_k1": k1(terms.log_ratio) * terms.mask}
    if terms.log_reference is not None:
        sums["reference_kl"] = k3(terms.log_reference) * terms.mask
    return {name: value.detach().sum() for name, value in sums.items()} | {"ratio_max": ratio.detach().max()}
