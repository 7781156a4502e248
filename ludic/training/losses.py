"""Compute the loss of a micro-batch from an objective over its response tokens. Pure tensor code.

The importance ratio is trainer over sampler, per token. It uses the logprobs stored by the sampler, not a second
forward pass. docs/algorithms.md has papers and formulas.

An objective is maximised at each token. It gets its own settings (ludic.training.config), and returns its values and a
mask of the tokens whose ratio was clipped, capped or gated off; both (A,).
"""

# Shapes: A = response tokens of a micro-batch. Logprobs, log ratios and KLs are in nats.

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ludic.records import array_columns
from ludic.settings import OBJECTIVE, find
from ludic.training.batches.packing import MicroBatch
from ludic.training.config import (
    Cispo,
    Clipping,
    Dpo,
    Dppo,
    DualClipping,
    Gmpo,
    Gspo,
    Ipo,
    LossConfig,
    OffPolicy,
    OfReference,
    Orpo,
    Paired,
    PpoClip,
    Reinforce,
    Sapo,
    Sft,
    Vespo,
)

# --- Log ratios and estimators of the KL -------------------------------------------------------------------------


MAX_LOG_RATIO = 20.0
"""Bound, on both sides and in nats, of every log ratio that goes through exp, as in verl (core_algos.py,
rollout_corr_helper.py). exp(20) is 4.9e8; exp(89) is infinite in float32 and makes the gradient NaN even if the term
is clipped. Beyond the bound a token has no gradient through its ratio."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return the log ratio clamped to MAX_LOG_RATIO."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# Estimators of KL(policy || reference) at samples of the policy, from log(reference / policy); Schulman 2020,
# "Approximating KL divergence". As a loss on-policy, k1 has an expected gradient of 0, and k2 the right gradient.


def k1(log_ratio: Tensor) -> Tensor:
    """-log(p/q): unbiased, of either sign."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """log(p/q)^2 / 2: biased, never below 0."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """p/q - 1 - log(p/q): unbiased within MAX_LOG_RATIO, never below 0."""
    log_ratio = bounded(log_ratio)
    return log_ratio.expm1() - log_ratio


KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


# --- Inputs of objectives ----------------------------------------------------------------------------------------


class TermColumns(Mapping[str, Any]):
    """Arrays of the rows of a batch, as in MicroBatch.columns, for an objective that needs more than the terms.

    Those along the response and along the row are 0 at tokens that were not sampled, like the terms; they must not be
    ragged. All others are unchanged. The names are the same in all micro-batches of a step, on every rank, so that all
    ranks take the same path; any other name is a KeyError (MicroBatch.column). Where no row of a micro-batch has a
    column, it has one unknown value a token. Such a value has as many numbers as the rank's other rows of the step; on
    a rank without any, 1 in each dimension: an objective must not need k of them.
    """

    def __init__(self, batch: MicroBatch) -> None:
        self._batch = batch

    def __getitem__(self, name: str) -> Any:
        values, column = self._batch.column(name), array_columns()[name]
        if column.ragged or column.along not in ("response", "row"):
            return values
        mask = self._batch.action_mask.reshape(-1, *[1] * (values.ndim - 1))
        return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))

    def __iter__(self) -> Iterator[str]:
        return filter(self.__contains__, array_columns())

    def __contains__(self, name: object) -> bool:
        return name in self._batch.columns or name in self._batch.absent

    def __len__(self) -> int:
        return len(self._batch.columns) + len(self._batch.absent)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """Inputs of an objective; all but `columns` (A,), and 0 at tokens that were not sampled."""

    logprobs: Tensor
    """The trainer's logprobs, with gradient."""
    sampler_logprobs: Tensor
    """NaN at tokens of rows without stored logprobs, which only objectives without needs_logprobs get."""
    log_ratio: Tensor
    """log(trainer / sampler), with gradient, clamped to MAX_LOG_RATIO; NaN where sampler_logprobs is NaN."""
    advantages: Tensor
    mask: Tensor
    """bool: sampled tokens."""
    sequence_ids: Tensor
    """int64, below A; see `loss_units`."""
    columns: Mapping[str, Any]
    """Arrays of the rows by the name of their column (TermColumns)."""
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
        columns=TermColumns(batch),
        log_reference=None if reference_logprobs is None else torch.where(mask, reference_logprobs, 0) - logprobs,
    )


# --- Objectives of policy gradients, and sft ---------------------------------------------------------------------


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
    tau = torch.where(terms.advantages > 0, *config.sapo_tau).to(terms.log_ratio)
    gate = torch.sigmoid(tau * (terms.ratio - 1)) * 4 / tau
    return gate * terms.advantages, torch.zeros_like(terms.mask)


def dppo(terms: TokenTerms, config: Dppo) -> tuple[Tensor, Tensor]:
    """Ratio of tokens whose probability moved little: Qi et al. 2026 (DPPO, arXiv 2602.04879), binary TV.

    A token is masked if its probability has risen by more than the first of dppo_bounds at a positive advantage, or
    fallen by more than the second otherwise.
    """
    moved = terms.logprobs.detach().exp() - terms.sampler_logprobs.exp()
    high, low = config.dppo_bounds
    too_far = torch.where(terms.advantages > 0, moved > high, moved < -low)
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


# --- Objectives of pairs of a chosen and a rejected side ---------------------------------------------------------


# A positive advantage marks the chosen side. sequence_ids number pairs (`loss_units`), so a mean over sequences is a
# mean over pairs. Each objective has one value per pair, repeated at each of its tokens.

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


# --- The loss ----------------------------------------------------------------------------------------------------


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
    ratio_max, a maximum. Tokens without a sampler's logprob add nothing to ratio, sampler_kl and sampler_kl_k1.
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
    """Return the objective at each token, and a mask of clipped, capped or masked ratios; both (A,)."""
    chosen = config.objective
    objective, clipped = find(OBJECTIVE, chosen.name)(_with_kl_reward(terms, config), chosen)
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
    is_known = terms.mask & terms.sampler_logprobs.isfinite()
    log_ratio = torch.where(is_known, terms.log_ratio, 0)
    ratio = log_ratio.exp() * is_known
    sums = {"ratio": ratio, "clipped": clipped & terms.mask}
    sums |= {"sampler_kl": k3(log_ratio) * is_known, "sampler_kl_k1": k1(log_ratio) * is_known}
    if terms.log_reference is not None:
        sums["reference_kl"] = k3(terms.log_reference) * terms.mask
    return {name: value.detach().sum() for name, value in sums.items()} | {"ratio_max": ratio.detach().max()}
