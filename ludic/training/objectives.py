"""Objectives of the loss, each with the settings that it reads. Imports no torch.

`LossConfig.objective` is one of these dataclasses; their functions are in ludic.training.losses, and docs/algorithms.md
has the formulas. None disables a setting, unless its text says otherwise. Raises ConfigError.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from ludic.errors import ConfigError
from ludic.settings import Needs, Range, Weight, check

Bounds = Annotated[tuple[float, float], Range(0, 10**6)]
"""Two bounds of an importance ratio, below and above 1."""
ByGain = Annotated[tuple[float, float], Range(0, 10**6)]
"""Two numbers: for positive and for negative advantages."""


# --- Policy gradients ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicy:
    """Settings of all objectives that use advantages and importance ratios."""

    name: ClassVar[str]
    bounded_by: ClassVar[tuple[str, ...]] = ()
    """Settings that bound the importance ratio."""

    is_ratio_bounds: Bounds | None = None
    """Mask tokens whose importance ratio is outside these two bounds (IcePop); None is off."""
    is_sequence_ratio_bounds: Bounds | None = None
    """Mask sequences whose geometric mean of importance ratios is outside these two bounds; None is off."""
    mask_sequence_kl: Weight | None = None
    """Mask sequences with a negative advantage whose mean log(sampler / trainer) is above this (DeepSeek-V3.2); None
    is off."""
    log_ratio_weight: Weight | None = None
    """Weight of the squared log ratio in the loss, which keeps the policy close to the sampler; None is off."""
    whiten_advantages: bool = False
    """Scale advantages to mean 0 and variance 1 over the sampled tokens of the batch (REINFORCE++)."""
    kl_placement: Annotated[Literal["loss", "reward", "return"], Needs("kl_weight")] = "loss"
    """Add the KL to the loss, or subtract it from each token's advantage: the token's own KL (reward), or the sum from
    the token to the end (return)."""

    def __post_init__(self) -> None:
        """Raises ConfigError if a value is out of range."""
        check(self)
        for name in ("is_ratio_bounds", "is_sequence_ratio_bounds"):
            bounds = getattr(self, name)
            if bounds is not None and not bounds[0] < 1 < bounds[1]:
                raise ConfigError(f"{name} is {bounds}, wanted one bound from 0 to below 1 and one above 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce(OffPolicy):
    """Advantage times logprob, weighted by the importance ratio without gradient through it."""

    name = "reinforce"
    bounded_by = ("is_ratio_cap", "is_ratio_bounds")

    is_ratio_cap: Weight | None = None
    """Truncated importance sampling: largest importance weight; None is off."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Importance weight of a token: its own ratio, or the product of the ratios of its sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipping(OffPolicy):
    """Settings of all objectives that clip the importance ratio."""

    bounded_by: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")

    clip_low: Weight | None = None
    """Clip importance ratios below 1 - clip_low; None sets no lower bound."""
    clip_high: Weight | None = None
    """Clip importance ratios above 1 + clip_high; None sets no upper bound."""

    def __post_init__(self) -> None:
        """Raises ConfigError if a value is out of range, or nothing bounds the ratio."""
        OffPolicy.__post_init__(self)
        if self.clip_low is not None and self.clip_low > 1:
            raise ConfigError(f"clip_low is {self.clip_low}, wanted at most 1: a ratio is never below 0")
        if all(getattr(self, name) is None for name in self.bounded_by):
            raise ConfigError(
                f"objective is {self.name}, which clips the importance ratio, but there is no bound to clip at; "
                f"set {' or '.join(self.bounded_by)}, such as clip_high 0.2"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DualClipping(Clipping):
    """Settings of all objectives that clip the ratio's product with the advantage."""

    bounded_by = ("clip_low", "clip_high", "dual_clip")

    dual_clip: Weight | None = None
    """Lower bound of the objective at a negative advantage, as a multiple of that advantage; above 1. None sets no
    bound."""

    def __post_init__(self) -> None:
        """Raises ConfigError if a value is out of range, or nothing bounds the ratio."""
        Clipping.__post_init__(self)
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip is {self.dual_clip}, wanted above 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoClip(DualClipping):
    """PPO's clipped ratio of each token."""

    name = "ppo_clip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo(Clipping):
    """Clipped importance weights that keep every token's gradient."""

    name = "cispo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo(DualClipping):
    """Clipped geometric mean of a sequence's ratios."""

    name = "gspo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gmpo(Clipping):
    """Geometric mean of ratios that are clipped token by token."""

    name = "gmpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sapo(OffPolicy):
    """A soft gate instead of a clip."""

    name = "sapo"

    sapo_tau_positive: Weight = 1.0
    """Temperature of the SAPO gate for positive advantages."""
    sapo_tau_negative: Weight = 1.05
    """Temperature of the SAPO gate for negative advantages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dppo(OffPolicy):
    """Ratio of the tokens whose probability has moved little."""

    name = "dppo"

    dppo_low: Weight = 0.2
    """Mask tokens with a negative advantage whose probability has fallen by more than this."""
    dppo_high: Weight = 0.2
    """Mask tokens with a positive advantage whose probability has risen by more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vespo(OffPolicy):
    """Weights that decay smoothly as a sequence's ratio moves away from 1."""

    name = "vespo"

    vespo_k: ByGain = (2.0, 3.0)
    """Exponent of the sequence's ratio, for positive and for negative advantages."""
    vespo_lambda: ByGain = (3.0, 2.0)
    """Decay rate in the sequence's ratio, for positive and for negative advantages."""

    def __post_init__(self) -> None:
        """Raises ConfigError if a value is out of range."""
        OffPolicy.__post_init__(self)
        for name in ("vespo_k", "vespo_lambda"):
            if not all(0 < value < float("inf") for value in getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)}, wanted two numbers above 0")


# --- Likelihood and pairs --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sft:
    """Maximum likelihood of the stored tokens."""

    name: ClassVar[str] = "sft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Objectives that compare the two sides of a pair."""

    name: ClassVar[str]
    wants_reference: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raises ConfigError if a value is out of range."""
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfReference(Paired):
    """Settings of all objectives of pairs that compare with a reference."""

    wants_reference = True

    dpo_beta: Weight = 0.1
    """Strength of the pull towards the reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dpo(OfReference):
    """Log-likelihood of choosing the chosen side."""

    name = "dpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ipo(OfReference):
    """Regression of the gain over the reference."""

    name = "ipo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Orpo(Paired):
    """Likelihood of the chosen side and odds ratio of both sides."""

    name = "orpo"

    orpo_weight: Weight = 0.1
    """Weight of the odds-ratio term, added to the likelihood of the chosen side."""


Objective = Reinforce | PpoClip | Cispo | Gspo | Gmpo | Sapo | Dppo | Vespo | Sft | Dpo | Ipo | Orpo
