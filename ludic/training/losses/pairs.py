"""Objectives over pairs of a chosen and a rejected side, to maximise at each token. Pure tensor code.

A positive advantage marks the chosen side. sequence_ids number pairs (`loss_units`), so a mean over sequences is
a mean over pairs. Each objective has one value per pair, repeated at each of its tokens.
"""

# Shapes: A = response tokens of a micro-batch. Logprobs are in nats.

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ludic.training.losses.terms import TokenTerms
from ludic.training.objectives import Dpo, Ipo, OfReference, Orpo, Paired

_LEAST_SURPRISE = 1e-6
"""Lower bound of a side's -logprob, in nats per token: the odds of a probability of 1 are infinite."""


def dpo(terms: TokenTerms, config: Dpo) -> tuple[Tensor, Tensor]:
    """Log-likelihood of choosing the chosen side: Rafailov et al. 2023 (arXiv 2305.18290), eq. 7."""
    return logsigmoid(config.dpo_beta * _gain(terms)), torch.zeros_like(terms.mask)


def ipo(terms: TokenTerms, config: Ipo) -> tuple[Tensor, Tensor]:
    """Regression of the gain to 1 / (2 beta): Azar et al. 2023 (arXiv 2310.12036), eq. 17, with beta for its tau."""
    return -(_gain(terms) - 1 / (2 * config.dpo_beta)).square(), torch.zeros_like(terms.mask)


def orpo(terms: TokenTerms, config: Orpo) -> tuple[Tensor, Tensor]:
    """Likelihood of the chosen side and odds ratio of both sides: Hong et al. 2024 (arXiv 2403.07691), eq. 6, 7.

    Uses no reference. Likelihoods are geometric means over a side's tokens (eq. 3).
    """
    chosen, rejected = _mean_logprob(terms, terms.advantages > 0), _mean_logprob(terms, terms.advantages < 0)
    likelier = logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    return chosen + config.orpo_weight * likelier, torch.zeros_like(terms.mask)


def preferences(terms: TokenTerms, config: Paired, tokens_per_pair: float) -> dict[str, Tensor]:
    """Return preference metrics as sums; divided by the number of action tokens they are means over pairs."""
    margins = margin(terms, config).detach()
    share = tokens_per_pair / terms.sequence_lengths
    values = {"preference_margin": margins, "preference_accuracy": (margins > 0).to(margins)}
    return {name: torch.where(terms.mask, value * share, 0).sum() for name, value in values.items()}


def margin(terms: TokenTerms, config: Paired) -> Tensor:
    """Return (A,): preference margin of each token's pair: dpo_beta times the gain, or the log odds ratio for orpo."""
    if isinstance(config, OfReference):
        return config.dpo_beta * _gain(terms)
    sides = (_log_odds(_mean_logprob(terms, side)) for side in (terms.advantages > 0, terms.advantages < 0))
    return next(sides) - next(sides)


def _gain(terms: TokenTerms) -> Tensor:
    """Return (A,): log ratio to the reference of the pair's chosen side minus that of its rejected side."""
    assert terms.log_reference is not None, "dpo and ipo need reference_logprobs"
    return terms.sequence_sum(-terms.log_reference * terms.advantages.sign())


def _mean_logprob(terms: TokenTerms, side: Tensor) -> Tensor:
    """Return (A,): at each token of a pair, the mean logprob of one side's tokens."""
    length = terms.sequence_sum(side.to(terms.logprobs)).clamp(min=1)
    return terms.sequence_sum(torch.where(side, terms.logprobs, 0)) / length


def _log_odds(logprob: Tensor) -> Tensor:
    """Return log p - log(1 - p)."""
    logprob = logprob.clamp(max=-_LEAST_SURPRISE)
    return logprob - torch.log(-torch.expm1(logprob))
