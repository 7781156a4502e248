"""Objectives over pairs of a chosen and a rejected side: what is to be maximised at each token. Pure tensor code.

A positive advantage marks the chosen side. sequence_ids number pairs (`loss_units`), so that the mean over sequences is
one over pairs; each objective has one value a pair, at each of its tokens.
"""

# Shapes: A = response tokens of a micro-batch. Logprobs are in nats.

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ludic.training.config import TrainConfig
from ludic.training.losses.terms import TokenTerms

_LEAST_SURPRISE = 1e-6
"""Nats a token below which a side counts as no surer: the odds of a certain one are infinite."""


def dpo(terms: TokenTerms, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Log-likelihood of the choice: Rafailov et al. 2023 (arXiv 2305.18290), eq. 7."""
    return logsigmoid(config.dpo_beta * _gain(terms)), torch.zeros_like(terms.mask)


def ipo(terms: TokenTerms, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Regression of the gain to 1 / (2 beta): Azar et al. 2023 (arXiv 2310.12036), eq. 17, with beta for its tau."""
    return -(_gain(terms) - 1 / (2 * config.dpo_beta)).square(), torch.zeros_like(terms.mask)


def orpo(terms: TokenTerms, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Likelihood of the chosen side, and its odds over the rejected one: Hong et al. 2024 (arXiv 2403.07691), eq. 6, 7.

    Without a reference. Likelihoods are geometric means over a side's tokens (eq. 3).
    """
    chosen, rejected = _mean_logprob(terms, terms.advantages > 0), _mean_logprob(terms, terms.advantages < 0)
    likelier = logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    return chosen + config.orpo_weight * likelier, torch.zeros_like(terms.mask)


def preferences(terms: TokenTerms, config: TrainConfig, tokens_per_pair: float) -> dict[str, Tensor]:
    """Sums that are means over pairs once they are divided by the number of tokens."""
    margins = margin(terms, config).detach()
    share = tokens_per_pair / terms.sequence_lengths
    values = {"preference_margin": margins, "preference_accuracy": (margins > 0).to(margins)}
    return {name: torch.where(terms.mask, value * share, 0).sum() for name, value in values.items()}


def margin(terms: TokenTerms, config: TrainConfig) -> Tensor:
    """(A,): how much the chosen side of a token's pair is preferred: beta times the gain, or for orpo log odds."""
    if config.objective == "orpo":
        sides = (_log_odds(_mean_logprob(terms, side)) for side in (terms.advantages > 0, terms.advantages < 0))
        return next(sides) - next(sides)
    return config.dpo_beta * _gain(terms)


def _gain(terms: TokenTerms) -> Tensor:
    """(A,): the log ratio to the reference of the pair's chosen side less that of the rejected one."""
    assert terms.log_reference is not None, "dpo and ipo need reference_logprobs"
    return terms.sequence_sum(-terms.log_reference * terms.advantages.sign())


def _mean_logprob(terms: TokenTerms, side: Tensor) -> Tensor:
    """(A,): at each token of a pair, the mean logprob of one side's tokens."""
    length = terms.sequence_sum(side.to(terms.logprobs)).clamp(min=1)
    return terms.sequence_sum(torch.where(side, terms.logprobs, 0)) / length


def _log_odds(logprob: Tensor) -> Tensor:
    """log p - log(1 - p)."""
    logprob = logprob.clamp(max=-_LEAST_SURPRISE)
    return logprob - torch.log(-torch.expm1(logprob))
