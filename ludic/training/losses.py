"""Objectives over the response tokens of a micro-batch, and what turns them into a loss. Pure tensor code.

The importance ratio is trainer over sampler, token by token, with the logprobs that the rollouts were
sampled with: no second forward pass stands in for the sampler. docs/algorithms.md has papers and formulas.
"""

# Shapes: A = response tokens of a micro-batch. Logprobs and KLs are in nats.

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ludic.training.config import Objective, TrainConfig
from ludic.training.packing import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """What an objective is made of; all (A,), and 0 where nothing was sampled."""

    logprobs: Tensor
    """Of the trainer, with gradient."""
    log_ratio: Tensor
    """Trainer over sampler, with gradient."""
    advantages: Tensor
    mask: Tensor
    """bool: sampled tokens."""
    sequence_ids: Tensor
    """int64, below A: `loss_units`."""
    log_reference: Tensor | None = None
    """Reference over trainer, with gradient; None without a reference."""

    @property
    def ratio(self) -> Tensor:
        return self.log_ratio.exp()

    def sequence_sum(self, values: Tensor) -> Tensor:
        """At each token, the sum over the sampled tokens of its sequence."""
        sums = torch.zeros_like(values).index_add(0, self.sequence_ids, torch.where(self.mask, values, 0))
        return sums[self.sequence_ids]

    def sequence_mean(self, values: Tensor) -> Tensor:
        """At each token, the mean over the sampled tokens of its sequence."""
        return self.sequence_sum(values) / self.sequence_lengths

    @property
    def sequence_lengths(self) -> Tensor:
        """Sampled tokens of the token's sequence, at least 1."""
        return self.sequence_sum(torch.ones_like(self.log_ratio)).clamp(min=1)


def rl_loss(
    trainer_logprobs: Tensor,
    batch: MicroBatch,
    config: TrainConfig,
    *,
    num_action_tokens: int,
    num_sequences: int,
    entropies: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the loss: a scalar, nats per action token or sequence of the global batch.

    trainer_logprobs: (A,) float32 with gradient; entropies: (A,), with gradient where entropy_weight is set;
    reference_logprobs: (A,) float32 without. num_action_tokens, num_sequences: of all micro-batches of all
    ranks, `loss_units` at each token; shares add up to the step's loss. An empty mask gives a zero that still has a
    gradient: a rank that raised alone would hang the others.

    Also returns detached sums over action tokens, to be divided by num_action_tokens: ratio, clipped (a
    count), sampler_kl, and reference_kl where there is a reference; and ratio_max. These KLs are k3 estimates. With dpo
    also preference_margin and preference_accuracy, which then are means over pairs.
    """
    assert num_action_tokens > 0, "a step without action tokens has no loss"
    assert num_sequences > 0, "a step without sequences has no loss"
    terms = _terms(trainer_logprobs, batch, reference_logprobs, config)
    objective, clipped = OBJECTIVES[config.objective](_with_kl_reward(terms, config), config)
    token_loss = -objective
    if config.entropy_weight is not None:
        assert entropies is not None, "entropy_weight needs entropies"
        token_loss = token_loss - config.entropy_weight * entropies
    if config.kl_weight is not None and config.kl_in == "loss":
        assert terms.log_reference is not None, "kl_weight needs reference_logprobs"
        token_loss = token_loss + config.kl_weight * KL_ESTIMATORS[config.kl_estimator](terms.log_reference)
    share = batch.weights * token_shares(
        terms, config, num_action_tokens=num_action_tokens, num_sequences=num_sequences
    )
    loss = torch.where(terms.mask, token_loss * share, 0).sum()
    measures = _measures(terms, clipped)
    if config.objective == "dpo":
        measures |= _preferences(terms, config, num_action_tokens / num_sequences)
    return loss, measures


def loss_units(batch: MicroBatch, config: TrainConfig) -> Tensor:
    """(A,) int64: what the loss takes for one sequence at each token; for dpo, both sides of a pair."""
    return batch.pair_ids if config.objective == "dpo" else batch.sequence_ids


def _terms(
    trainer_logprobs: Tensor, batch: MicroBatch, reference_logprobs: Tensor | None, config: TrainConfig
) -> TokenTerms:
    # Masked before anything is computed from it, so that no inf or nan reaches the gradient.
    mask = batch.action_mask
    logprobs = torch.where(mask, trainer_logprobs, 0)
    return TokenTerms(
        logprobs=logprobs,
        log_ratio=logprobs - torch.where(mask, batch.sampler_logprobs, 0),
        advantages=torch.where(mask, batch.advantages, 0),
        mask=mask,
        sequence_ids=loss_units(batch, config),
        log_reference=None if reference_logprobs is None else torch.where(mask, reference_logprobs, 0) - logprobs,
    )


def _with_kl_reward(terms: TokenTerms, config: TrainConfig) -> TokenTerms:
    """Terms whose advantage pays for the KL at the token, without a gradient through it, if the settings say so."""
    if config.kl_weight is None or config.kl_in != "reward":
        return terms
    assert terms.log_reference is not None, "kl_weight needs reference_logprobs"
    penalty = config.kl_weight * KL_ESTIMATORS[config.kl_estimator](terms.log_reference.detach())
    return replace(terms, advantages=terms.advantages - penalty)


def token_shares(terms: TokenTerms, config: TrainConfig, *, num_action_tokens: int, num_sequences: int) -> Tensor:
    """(A,): what each token's loss is multiplied by, so that the shares of a global batch add up to its mean."""
    match config.normalize_over:
        case "tokens":  # DAPO (arXiv 2503.14476), eq. 8: every token of the batch alike
            return torch.full_like(terms.log_ratio, 1 / num_action_tokens)
        case "sequences":  # GRPO (arXiv 2402.03300), eq. 3: every sequence alike
            return 1 / (terms.sequence_lengths * num_sequences)
        case "constant":  # Dr. GRPO (arXiv 2503.20783), section 3.2: a length that no sequence can change
            assert config.constant_tokens is not None
            return torch.full_like(terms.log_ratio, 1 / (config.constant_tokens * num_sequences))


def _measures(terms: TokenTerms, clipped: Tensor) -> dict[str, Tensor]:
    ratio = terms.ratio * terms.mask
    sums = {"ratio": ratio, "clipped": clipped & terms.mask, "sampler_kl": k3(terms.log_ratio) * terms.mask}
    if terms.log_reference is not None:
        sums["reference_kl"] = k3(terms.log_reference) * terms.mask
    return {name: value.detach().sum() for name, value in sums.items()} | {"ratio_max": ratio.detach().max()}


def _preferences(terms: TokenTerms, config: TrainConfig, tokens_per_pair: float) -> dict[str, Tensor]:
    margins = _margins(terms, config).detach()
    share = tokens_per_pair / terms.sequence_lengths
    values = {"preference_margin": margins, "preference_accuracy": (margins > 0).to(margins)}
    return {name: torch.where(terms.mask, value * share, 0).sum() for name, value in values.items()}


# Objectives: what is to be maximised at each token, and where the ratio was clipped, capped or masked; both (A,).


def reinforce(terms: TokenTerms, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Advantage times logprob, weighed by the importance ratio without a gradient through it (Williams 1992).

    The ratio is the token's, or that of its whole sequence. Capped at truncate_ratio it is truncated importance
    sampling (Ionides 2008); set to 0 outside of mask_ratio, masked importance sampling (IcePop, arXiv 2510.18855).
    """
    log_ratio = terms.log_ratio if config.ratio_level == "token" else terms.sequence_sum(terms.log_ratio)
    ratio = log_ratio.detach().exp()
    bounded = torch.zeros_like(terms.mask)
    weight = ratio
    if config.truncate_ratio is not None:
        weight, bounded = ratio.clamp(max=config.truncate_ratio), ratio > config.truncate_ratio
    if config.mask_ratio is not None:
        low, high = config.mask_ratio
        bounded = (ratio < low) | (ratio > high)
        weight = torch.where(bounded, 0, weight)
    return weight * terms.logprobs * terms.advantages, bounded


def ppo_clip(terms: TokenTerms, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Schulman et al. 2017 (arXiv 1707.06347), eq. 7; with two bounds as in DAPO (arXiv 2503.14476), eq. 10.

    With dual_clip, a negative advantage costs at most dual_clip times itself (Ye et al. 2020, arXiv 1912.09729, eq. 5).
    """
    return _clipped(terms.ratio, terms.advantages, config)


def _clipped(ratio: Tensor, advantages: Tensor, config: TrainConfig) -> tuple[Tensor, Tensor]:
    objective = ratio * advantages
    bounded = torch.minimum(objective, _clamp(ratio, config) * advantages)
    if config.dual_clip is not None:
        floor = torch.where(advantages < 0, config.dual_clip * advantages, -math.inf)
        bounded = torch.maximum(bounded, floor)
    return bounded, bounded != objective


def _clamp(ratio: Tensor, config: TrainConfig) -> Tensor:
    low = None if config.clip_low is None else 1 - config.clip_low
    high = None if config.clip_high is None else 1 + config.clip_high
    return ratio if low is None and high is None else ratio.clamp(low, high)


def cispo(terms: TokenTerms, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Clipped importance weights that leave every token its gradient: MiniMax-M1 (arXiv 2506.13585), eq. 4 and 5."""
    ratio = terms.ratio.detach()
    weight = _clamp(ratio, config)
    return weight * terms.logprobs * terms.advantages, weight != ratio


def gspo(terms: TokenTerms, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Clips the geometric mean of a sequence's ratios: Zheng et al. 2025 (arXiv 2507.18071), eq. 5 and 7.

    In the paper's token form (eq. 14), whose value and gradient are the same for one advantage a sequence.
    """
    of_sequence = terms.sequence_mean(terms.log_ratio).detach().exp()
    return _clipped(of_sequence * (terms.logprobs - terms.logprobs.detach()).exp(), terms.advantages, config)


def gmpo(terms: TokenTerms, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Geometric mean of ratios that are clipped token by token: Zhao et al. 2025 (arXiv 2507.20673), eq. 4."""
    log_ratio = terms.log_ratio
    low = -math.inf if config.clip_low in (None, 1) else math.log(1 - config.clip_low)
    high = math.inf if config.clip_high is None else math.log1p(config.clip_high)
    bounded = log_ratio.clamp(low, high)
    gains = terms.advantages >= 0
    chosen = torch.where(gains, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    return terms.sequence_mean(chosen).exp() * terms.advantages, chosen != log_ratio


def sapo(terms: TokenTerms, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """A soft gate in the place of the clip: Gao et al. 2025 (arXiv 2511.20347), eq. 5 and 6."""
    tau = torch.where(terms.advantages > 0, config.sapo_tau_positive, config.sapo_tau_negative).to(terms.log_ratio)
    gate = torch.sigmoid(tau * (terms.ratio - 1)) * 4 / tau
    return gate * terms.advantages, torch.zeros_like(terms.mask)


def sft(terms: TokenTerms, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Maximum likelihood of what was stored, whatever its advantage; filters choose what is good enough."""
    return terms.logprobs, torch.zeros_like(terms.mask)


def dpo(terms: TokenTerms, config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Log-likelihood of the choice of a pair, at each of its tokens: Rafailov et al. 2023 (arXiv 2305.18290), eq. 7.

    A positive advantage marks the chosen side. sequence_ids number pairs (`loss_units`), so that the mean over
    sequences is one over pairs.
    """
    return logsigmoid(_margins(terms, config)), torch.zeros_like(terms.mask)


def _margins(terms: TokenTerms, config: TrainConfig) -> Tensor:
    """(A,): at each token, the implicit reward of its pair's chosen side less that of the rejected one."""
    assert terms.log_reference is not None, "dpo needs reference_logprobs"
    return config.dpo_beta * terms.sequence_sum(-terms.log_reference * terms.advantages.sign())


OBJECTIVES: Mapping[Objective, Callable[[TokenTerms, TrainConfig], tuple[Tensor, Tensor]]] = {
    "reinforce": reinforce,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "gspo": gspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "sft": sft,
    "dpo": dpo,
}


# KL(trainer || reference) at samples of the trainer, from log(reference / trainer); Schulman 2020,
# "Approximating KL divergence". As a loss, k1 has a gradient that is 0 on average, k2 the right one on-policy.


def k1(log_ratio: Tensor) -> Tensor:
    """-log(p/q): unbiased, of either sign."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """log(p/q)^2 / 2: biased, never below 0."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """p/q - 1 - log(p/q): unbiased, never below 0."""
    return log_ratio.expm1() - log_ratio


KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
