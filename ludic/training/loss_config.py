"""Settings of the loss: objective, averaging and KL to the reference. Imports no torch."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from ludic.errors import ConfigError
from ludic.settings import Needs, Tokens, Weight, check
from ludic.training.objectives import Objective, OffPolicy, Paired, Reinforce


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Objective, averaging and KL to a reference. None disables a setting, unless its text says otherwise."""

    objective: Objective = field(default_factory=Reinforce)
    """Objective maximised at each token: a function in ludic.training.losses; docs/algorithms.md has the formulas."""
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
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], Needs("kl_weight")] = "k3"
    """Estimator of the KL that kl_weight multiplies; see ludic.training.losses."""

    @property
    def loss_unit(self) -> Literal["row", "pair", "episode"]:
        """What the loss averages over; see ludic.sql.planner.BatchRules."""
        if self.is_paired:
            return "pair"
        return "episode" if self.loss_normalization == "episodes" else "row"

    @property
    def is_paired(self) -> bool:
        """Return whether the objective compares the two sides of a pair."""
        return isinstance(self.objective, Paired)

    @property
    def kl_placement(self) -> Literal["loss", "reward", "return"]:
        """Where the KL that kl_weight multiplies is added."""
        return self.objective.kl_placement if isinstance(self.objective, OffPolicy) else "loss"

    def __post_init__(self) -> None:
        """Raises ConfigError if a value is out of range or contradicts another setting."""
        check(self)
        for name in ("kl_weight", "reference_offload", "reference_cache"):
            if getattr(self, name) and self.reference is None:
                value = getattr(self, name)
                raise ConfigError(f"{name} is {value} but there is no reference; set reference to a model")
        if (self.loss_normalization == "constant") != (self.constant_tokens is not None):
            raise ConfigError(
                f"loss_normalization is {self.loss_normalization} and constant_tokens is {self.constant_tokens}; "
                "set constant_tokens with loss_normalization constant, and only then"
            )
        if isinstance(self.objective, Paired):
            self._check_paired(self.objective)

    def _check_paired(self, objective: Paired) -> None:
        if objective.wants_reference and self.reference is None:
            raise ConfigError(
                f"objective is {objective.name} but there is no reference; set reference to a model, such as the first "
                "one"
            )
        if self.loss_normalization != "sequences":
            raise ConfigError(
                f"loss_normalization is {self.loss_normalization}, and {objective.name} takes the mean over pairs; "
                "set it to sequences"
            )
