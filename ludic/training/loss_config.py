"""Settings of the loss: objective, averaging and KL to the reference. Imports no torch."""

from dataclasses import asdict, dataclass, fields
from typing import Annotated, Literal

from ludic.errors import ConfigError
from ludic.settings import Range, Tokens, Weight, check
from ludic.training.objectives import PAIRED, Objective, check_objective


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Objective, averaging and KL to a reference. None disables a setting, unless its text says otherwise."""

    objective: Objective = "reinforce"
    """Objective maximised at each token: a function in ludic.training.losses; docs/algorithms.md has the formulas."""
    clip_low: Weight | None = None
    """Clip importance ratios below 1 - clip_low (ppo_clip, cispo, gspo, gmpo); None sets no lower bound."""
    clip_high: Weight | None = None
    """Clip importance ratios above 1 + clip_high (ppo_clip, cispo, gspo, gmpo); None sets no upper bound."""
    dual_clip: Weight | None = None
    """Lower bound of the objective at a negative advantage, as a multiple of that advantage (ppo_clip, gspo); above 1.
    None sets no bound."""
    is_ratio_cap: Weight | None = None
    """Truncated importance sampling: largest importance weight (reinforce); None is off."""
    is_ratio_bounds: Annotated[tuple[float, float], Range(0, 10**6)] | None = None
    """Mask tokens whose importance ratio is outside these two bounds (IcePop); None is off. Not for sft and pairs."""
    is_sequence_ratio_bounds: Annotated[tuple[float, float], Range(0, 10**6)] | None = None
    """Mask sequences whose geometric mean of importance ratios is outside these two bounds; None is off. Not for sft
    and pairs."""
    mask_sequence_kl: Weight | None = None
    """Mask sequences with a negative advantage whose mean log(sampler / trainer) is above this (DeepSeek-V3.2); None
    is off. Not for sft and pairs."""
    log_ratio_weight: Weight | None = None
    """Weight of the squared log ratio in the loss, which keeps the policy close to the sampler; None is off. Not for
    sft and pairs."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Importance weight of a token: its own ratio, or the product of the ratios of its sequence (reinforce)."""
    sapo_tau_positive: Weight = 1.0
    """Temperature of the SAPO gate for positive advantages (sapo)."""
    sapo_tau_negative: Weight = 1.05
    """Temperature of the SAPO gate for negative advantages (sapo)."""
    dppo_low: Weight = 0.2
    """Mask tokens with a negative advantage whose probability has fallen by more than this (dppo)."""
    dppo_high: Weight = 0.2
    """Mask tokens with a positive advantage whose probability has risen by more than this (dppo)."""
    vespo_k: Annotated[tuple[float, float], Range(0, 10**6)] = (2.0, 3.0)
    """Exponent of the sequence's ratio, for positive and for negative advantages (vespo)."""
    vespo_lambda: Annotated[tuple[float, float], Range(0, 10**6)] = (3.0, 2.0)
    """Decay rate in the sequence's ratio, for positive and for negative advantages (vespo)."""
    dpo_beta: Weight = 0.1
    """Strength of the pull towards the reference (dpo, ipo)."""
    orpo_weight: Weight = 0.1
    """Weight of the odds-ratio term, added to the likelihood of the chosen side (orpo)."""
    whiten_advantages: bool = False
    """Scale advantages to mean 0 and variance 1 over the sampled tokens of the batch (REINFORCE++)."""
    loss_normalization: Literal["tokens", "sequences", "episodes", "constant"] = "tokens"
    """Average the loss over the batch's tokens (DAPO), over its sequences' means (GRPO), over its episodes' means, or
    divide each sequence's sum by a constant (Dr. GRPO). An agent's rows of an episode count as one with episodes. For
    dpo, ipo and orpo, sequences means pairs."""
    constant_tokens: Tokens | None = None
    """Tokens that replace each sequence's length if loss_normalization is constant; usually max_tokens."""
    entropy_weight: Weight | None = None
    """Weight of the policy's entropy, which is subtracted from the loss and averaged as loss_normalization says; None
    is off."""
    reference: str | None = None
    """Folder, URL or Hugging Face id of the reference model or teacher, for reference_kl, dpo and ipo; None is off.
    With LoRA, the run's own model takes no extra memory."""
    reference_offload: bool = False
    """Keep the reference in CPU memory and move it to the device one layer at a time."""
    reference_cache: bool = False
    """Store the reference's logprobs under the root and reuse stored ones."""
    kl_weight: Weight | None = None
    """Weight of the KL to the reference; None only measures it."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL that kl_weight multiplies; see ludic.training.losses."""
    kl_placement: Literal["loss", "reward", "return"] = "loss"
    """Add the KL to the loss, or subtract it from each token's advantage: the token's own KL (reward), or the sum from
    the token to the end (return)."""

    @property
    def loss_unit(self) -> Literal["row", "pair", "episode"]:
        """What the loss averages over; see ludic.sql.planner.BatchRules."""
        if self.is_paired:
            return "pair"
        return "episode" if self.loss_normalization == "episodes" else "row"

    @property
    def is_paired(self) -> bool:
        """Return whether the objective compares the two sides of a pair."""
        return self.objective in PAIRED

    def __post_init__(self) -> None:
        """Raises ConfigError if a value is out of range or contradicts another setting."""
        check(self)
        for name in ("kl_weight", "reference_offload", "reference_cache"):
            if getattr(self, name) and self.reference is None:
                value = getattr(self, name)
                raise ConfigError(f"{name} is {value} but there is no reference; set reference to a model")
        check_objective(asdict(self), {field.name: field.default for field in fields(self)})
