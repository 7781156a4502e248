"""Settings of one trainer process, in groups. Settings shared with workers are in run.json.

    TrainConfig(num_steps=10, loss=LossConfig(objective=PpoClip(clip_high=0.28)))
    TrainConfig.of(num_steps=10, objective="ppo_clip", clip_high=0.28)    # the same, by the names of the flags

None disables a setting, unless its text says otherwise. Raises ConfigError. Imports no torch, so that `--help` answers
at once.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from ludic.base import LEASE_S, MOST_LEASE_S
from ludic.errors import ConfigError
from ludic.settings import (
    OBJECTIVE,
    TRACKER,
    CountOr0,
    Needs,
    PositiveCount,
    Range,
    Role,
    Tokens,
    Weight,
    convert,
    flat,
    settings_of,
)
from ludic.settings.table import check
from ludic.training.batches.config import BatchConfig, OfLoss

# --- Objectives, each with the settings that it reads ------------------------------------------------------------


Bounds = Annotated[tuple[float, float], Range(0, 10**6)]
"""Two bounds of an importance ratio, below and above 1."""
PositiveByGain = Annotated[tuple[float, float], Range(0, 10**6, above=True)]
"""Two numbers above 0: for positive and for negative advantages."""


# Policy gradients.


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicy:
    """Settings of all objectives that use advantages and importance ratios."""

    name: ClassVar[str]
    needs_logprobs: ClassVar[bool] = True
    """Whether the objective reads the logprobs of the sampler; a row of which nobody kept them is dropped."""
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

    sapo_tau: PositiveByGain = (1.0, 1.05)
    """Temperature of the SAPO gate, for positive and for negative advantages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dppo(OffPolicy):
    """Ratio of the tokens whose probability has moved little."""

    name = "dppo"

    dppo_bounds: PositiveByGain = (0.2, 0.2)
    """Mask tokens with a positive advantage whose probability has risen by more than the first number, and those with a
    negative one whose probability has fallen by more than the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vespo(OffPolicy):
    """Weights that decay smoothly as a sequence's ratio moves away from 1."""

    name = "vespo"

    vespo_k: PositiveByGain = (2.0, 3.0)
    """Exponent of the sequence's ratio, for positive and for negative advantages."""
    vespo_lambda: PositiveByGain = (3.0, 2.0)
    """Decay rate in the sequence's ratio, for positive and for negative advantages."""


# Likelihood and pairs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sft:
    """Maximum likelihood of the stored tokens."""

    name: ClassVar[str] = "sft"
    needs_logprobs: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Objectives that compare the two sides of a pair."""

    name: ClassVar[str]
    needs_logprobs: ClassVar[bool] = False
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


# --- The loss ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Objective, averaging and KL to a reference. None disables a setting, unless its text says otherwise."""

    objective: Annotated[Objective, OBJECTIVE, Role(on_card=True, of_algorithm=True)] = field(default_factory=Reinforce)
    """Objective maximised at each token: a function in ludic.training.losses; docs/algorithms.md has the formulas."""
    loss_normalization: Annotated[Literal["tokens", "sequences", "episodes", "constant"], Role(of_algorithm=True)] = (
        "tokens"
    )
    """Average the loss over the batch's tokens (DAPO), over its sequences' means (GRPO), over its episodes' means, or
    divide each sequence's sum by a constant (Dr. GRPO). With episodes the rows of a trajectory count as one. For dpo,
    ipo and orpo, sequences means pairs."""
    constant_tokens: Annotated[Tokens | None, Role(of_algorithm=True)] = None
    """Tokens that replace each sequence's length if loss_normalization is constant; usually max_tokens."""
    entropy_weight: Annotated[Weight | None, Role(of_algorithm=True)] = None
    """Weight of the policy's entropy, which is subtracted from the loss and averaged as loss_normalization says; None
    is off."""
    router_balance_weight: Annotated[Annotated[float, Range(0, 10**6)] | None, Role(of_algorithm=True)] = None
    """Mixtures of experts: weight of the load-balancing loss of Switch Transformers, such as 0.001. 0 only measures how
    evenly experts are chosen; None is off. Usual for sft, and not for RL."""
    router_z_weight: Annotated[Weight | None, Role(of_algorithm=True)] = None
    """Mixtures of experts: weight of ST-MoE's z-loss, which keeps the routers' logits small, such as 0.001; None is
    off."""
    reference: str | None = None
    """Folder, URL or Hugging Face id of the reference model or teacher, for reference_kl, dpo and ipo; None is off.
    With LoRA, the run's own model takes no extra memory."""
    reference_offload: Annotated[bool, Role(changes_weights=False)] = False
    """Keep the reference in CPU memory and move it to the device one layer at a time."""
    reference_cache: Annotated[bool, Role(changes_weights=False)] = False
    """Store the reference's logprobs under the root and reuse stored ones."""
    kl_weight: Annotated[Weight | None, Role(of_algorithm=True)] = None
    """Weight of the KL to the reference; None only measures it."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], Needs("kl_weight"), Role(of_algorithm=True)] = "k3"
    """Estimator of the KL that kl_weight multiplies; see ludic.training.losses."""

    @property
    def loss_unit(self) -> Literal["row", "pair", "episode"]:
        """What the loss averages over; see ludic.root.sql.planner.BatchRules."""
        if self.is_paired:
            return "pair"
        return "episode" if self.loss_normalization == "episodes" else "row"

    @property
    def of_batches(self) -> OfLoss:
        """What the plan of a batch must know of the loss."""
        return {"loss_unit": self.loss_unit, "needs_logprobs": self.objective.needs_logprobs}

    @property
    def is_paired(self) -> bool:
        """Return whether the objective compares the two sides of a pair."""
        return isinstance(self.objective, Paired)

    @property
    def has_router_losses(self) -> bool:
        """Return whether the routers of a mixture of experts are measured or have a loss."""
        return self.router_balance_weight is not None or self.router_z_weight is not None

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


# --- The trainer -------------------------------------------------------------------------------------------------


_SIZE = re.compile(r"\d+(\.\d+)?(KB|MB|GB|TB)")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning rate schedule."""

    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW with moments in float32, or in 8 bits with a scale for each 256 of them (2 bytes a weight instead of 8),
    for which the extra `8bit` is needed."""
    fused_adamw: Annotated[bool | None, Role(on_cpu=False)] = None
    """Update all weights in one kernel, without temporaries of their size; None does so on CUDA. Not for adamw_8bit."""
    learning_rate: Annotated[float, Range(0, 1000, above=True), Role(first_page=True, on_card=True)] = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule from the end of the warm-up to num_steps; linear and cosine fall towards 0."""
    warmup_steps: CountOr0 = 0
    """Steps over which the learning rate rises linearly; 0 is no warm-up."""
    weight_decay: Annotated[float, Range(0, 1000)] = 0.0
    """AdamW weight decay of matrices; biases and norms do not decay."""
    betas: Annotated[tuple[float, float], Range(0, 1)] = (0.9, 0.999)
    """AdamW beta1 and beta2."""
    max_grad_norm: Weight | None = 1.0
    """Clip gradients to this L2 norm; None does not clip."""

    def __post_init__(self) -> None:
        """Raises ConfigError if a value is out of range."""
        check(self)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas is {self.betas}, wanted two numbers from 0 to below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """How the model is trained: dtype, device, LoRA adapters and memory."""

    dtype: Annotated[Literal["float32", "bfloat16"] | None, Role(on_cpu="float32")] = None
    """Dtype of forward and backward passes and of frozen weights; trained weights and the optimizer stay float32. None
    is bfloat16 on a GPU that has it, float32 elsewhere."""
    tf32: Annotated[bool | None, Role(on_cpu=False)] = None
    """Multiply float32 matrices in TF32, with 10 bits of precision; None does so on CUDA. Not used on the CPU."""
    device: Annotated[Literal["cpu", "cuda"] | None, Role(changes_weights=False)] = None
    """Device to train on; None takes CUDA if available."""
    lora_rank: Annotated[Annotated[int, Range(1, 10**5)] | None, Role(first_page=True)] = None
    """Rank of LoRA adapters; the model's own weights are frozen. None trains all weights."""
    lora_alpha: Annotated[int, Range(1, 10**6)] = 32
    """LoRA alpha: adapters are scaled by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, such as q_proj v_proj; if empty, all but the head."""
    publish_lora: Annotated[Literal["merged", "adapter"], Role(changes_weights=False)] = "merged"
    """Publish whole weights with the adapters merged, or only the adapters, for workers that can read the run's
    model."""
    publish_dtype: Annotated[Literal["float32", "bfloat16"] | None, Role(changes_weights=False)] = None
    """Dtype of published weights, which workers sample with; None is the dtype of the forward pass."""
    logprob_chunk_tokens: Annotated[Tokens | None, Role(on_cpu=1024)] = None
    """Tokens whose logits are in memory at once, in training and for the reference; each takes about 12 bytes times the
    vocabulary. None is 1024 on the CPU, and fits the memory of a GPU."""
    activation_checkpointing: Annotated[bool | None, Role(on_cpu=False)] = None
    """Recompute activations in the backward pass instead of keeping them; None does so on CUDA."""
    compile: Annotated[bool | None, Role(on_cpu=False)] = None
    """Compile each decoder layer, except its attention, with torch.compile; the first steps take longer. None does so
    on CUDA, if Triton is installed."""

    def __post_init__(self) -> None:
        """Raises ConfigError if a value is out of range or contradicts another setting."""
        check(self)
        if self.lora_rank is None and (self.lora_targets or self.publish_lora == "adapter"):
            name = "lora_targets" if self.lora_targets else "publish_lora"
            raise ConfigError(f"{name} is {getattr(self, name)} but there are no adapters; set lora_rank")
        if self.publish_dtype is not None and self.publish_lora == "adapter":
            raise ConfigError(
                f"publish_dtype is {self.publish_dtype}, but adapters are published in float32; leave it out, or set "
                "publish_lora to merged"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """How often checkpoints and weights are written, and how many are kept."""

    checkpoint_every: Annotated[PositiveCount | None, Role(changes_weights=False)] = 20
    """Steps between checkpoints; None writes one at the end only."""
    keep_checkpoints: Annotated[PositiveCount | None, Role(changes_weights=False)] = 3
    """Number of newest checkpoints to keep; None keeps all."""
    async_checkpoint: Annotated[bool, Role(changes_weights=False)] = True
    """Write checkpoints in the background, from a copy in memory; the run waits for its last one."""
    max_shard_size: Annotated[str, Role(changes_weights=False)] = "5GB"
    """Maximum size of a file of saved weights, such as 500MB; larger weights are split into shards with an index."""
    keep_policies: Annotated[PositiveCount | None, Role(changes_weights=False)] = 4
    """Number of newest published versions whose weights to keep; None keeps all."""
    full_version_every: Annotated[PositiveCount | None, Role(changes_weights=False)] = None
    """Publish one version of so many in full, the others as differences to the version before; None publishes all in
    full."""

    def __post_init__(self) -> None:
        """Raises ConfigError if a value is out of range."""
        check(self)
        if not _SIZE.fullmatch(self.max_shard_size):
            raise ConfigError(f"max_shard_size is {self.max_shard_size!r}, wanted a size such as 500MB or 5GB")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerConfig:
    """Another program that shows metrics, evaluations and samples; the root holds all of them anyway."""

    log_to: Annotated[str, TRACKER, Role(changes_weights=False)] = "none"
    """Program that shows the run, in addition to the root's own tables; docs/watching.md lists what it gets. Place,
    project and login come from the program's own environment variables."""
    tracker_samples_every: Annotated[PositiveCount | None, Role(changes_weights=False)] = 20
    """Steps between tables of answers, the best and the worst of some groups of each environment; None sends none."""

    def __post_init__(self) -> None:
        """Raises ConfigError if a value is out of range."""
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of a trainer. None means off, unless the setting says otherwise."""

    num_steps: Annotated[PositiveCount, Role(first_page=True, on_card=True)] = 100
    """Total number of gradient steps, including those before a resume."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    num_threads: Annotated[Annotated[int, Range(1, 1024)] | None, Role(changes_weights=False)] = None
    """CPU threads of each rank; None keeps those of the resumed or replayed attempt, else OMP_NUM_THREADS or all
    cores."""
    lease_s: Annotated[float, Range(0, MOST_LEASE_S, above=True), Role(changes_weights=False)] = LEASE_S
    """Seconds without a renewal of the lease after which another trainer may take over; renewed every third of it."""
    keep_token_stats: Annotated[bool, Role(changes_weights=False)] = False
    """Write logprob, entropy, clipping and gradient weight of each trained token to token_stats/."""

    def __post_init__(self) -> None:
        """Raises ConfigError if a value is out of range or contradicts another setting."""
        check(self)
        if self.optimizer.warmup_steps >= self.num_steps:
            raise ConfigError(
                f"warmup_steps is {self.optimizer.warmup_steps}, wanted less than num_steps ({self.num_steps})"
            )
        if self.batch.compute_logprobs and not self.loss.objective.needs_logprobs:
            raise ConfigError(
                f"compute_logprobs is set, and {self.loss.objective.name} reads no sampler's logprobs; set it to False"
            )
        if self.batch.training_unit == "turn":
            self._check_turns()

    def _check_turns(self) -> None:
        """Raise ConfigError if a setting needs whole rows."""
        whole = {
            "keep_token_stats": self.keep_token_stats,
            "reference_cache": self.loss.reference_cache,
            f"objective {self.loss.objective.name}": self.loss.is_paired,
            "loss_normalization episodes": self.loss.loss_unit == "episode",
        }
        for name in (name for name, is_set in whole.items() if is_set):
            raise ConfigError(f"training_unit is turn, and {name} looks at whole rows; set training_unit to episode")

    @property
    def steps_to_reach(self) -> int | None:
        """Step at which training ends; None if the stored rollouts decide."""
        return None if self.batch.is_stored else self.num_steps

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """Return the configuration with these settings, by the names of the flags: `of(learning_rate=1e-4)`.

        Raises ConfigError for an unknown name, with a similar one, and as the groups do.
        """
        return convert(cls, settings)

    def replace(self, **settings: Any) -> Self:
        """Return a copy with these settings, by the names of the flags. Raises ConfigError as `of` does."""
        return convert(type(self), {**self.flat(), **settings})

    def flat(self) -> dict[str, Any]:
        """Return all settings by the names of the flags, as in attempts/N.json: `of(**config.flat()) == config`."""
        return flat(self)


ON_CPU: Mapping[str, Any] = MappingProxyType(
    {each.name: each.role.on_cpu for each in settings_of(TrainConfig) if each.role.on_cpu is not None}
)
"""Settings that follow the device if they are None, with their values on the CPU. Trainers of older ludic versions had
these on every device. ludic.training.device_defaults chooses the values on CUDA."""


def describe_computing(settings: Mapping[str, Any]) -> str:
    """Return in words how a trainer computes; "" for settings, by name, that an older ludic recorded."""
    if any(settings.get(name) is None for name in ON_CPU):
        return ""
    kinds = {"tf32": "TF32", "compile": "compiled", "activation_checkpointing": "activations recomputed"}
    fused = "fused " if settings["fused_adamw"] and settings.get("optimizer") == "adamw" else ""
    return "; ".join(
        [
            ", ".join([settings["dtype"], *(words for name, words in kinds.items() if settings[name])]),
            f"{fused}{settings.get('optimizer', 'adamw')}",
            f"micro-batches of up to {settings['max_tokens_per_micro_batch']:,} tokens, balanced by "
            f"{settings['balance_by']}",
            f"logits of {settings['logprob_chunk_tokens']:,} tokens at a time",
        ]
    )
