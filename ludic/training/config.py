"""Settings of one trainer process, in groups. Settings shared with workers are in run.json.

    TrainConfig(num_steps=10, optimizer=OptimizerConfig(learning_rate=1e-4))
    TrainConfig.of(num_steps=10, learning_rate=1e-4)    # the same, by the names of the flags

Imports no torch, so that `--help` answers at once.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from ludic.batches.config import BatchConfig
from ludic.defaults import LEASE_S
from ludic.errors import ConfigError
from ludic.settings import LEASE_RANGE, Count, CountOr0, Range, Tokens, Weight, check, convert, flat
from ludic.training.loss_config import LossConfig

_SIZE = re.compile(r"\d+(\.\d+)?(KB|MB|GB|TB)")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning rate schedule."""

    learning_rate: Annotated[float, Range(0, 1000, above=True)] = 1e-6
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

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of forward and backward passes and of frozen weights; trained weights and the optimizer stay float32."""
    device: Literal["cpu", "cuda"] | None = None
    """Device to train on; None takes CUDA if available."""
    lora_rank: Annotated[int, Range(1, 10**5)] | None = None
    """Rank of LoRA adapters; the model's own weights are frozen. None trains all weights."""
    lora_alpha: Annotated[int, Range(1, 10**6)] = 32
    """LoRA alpha: adapters are scaled by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, such as q_proj v_proj; if empty, all but the head."""
    publish_lora: Literal["merged", "adapter"] = "merged"
    """Publish whole weights with the adapters merged, or only the adapters, for workers that can read the run's
    model."""
    publish_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype of published weights, which workers sample with; None is the dtype of the forward pass."""
    logprob_chunk_tokens: Tokens = 1024
    """Tokens whose logits are in memory at once, in training and for the reference; each takes 4 bytes times the
    vocabulary."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    compile: bool = False
    """Compile each decoder layer, except its attention, with torch.compile; the first steps take longer."""

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

    checkpoint_every: Count | None = 20
    """Steps between checkpoints; None writes one at the end only."""
    keep_checkpoints: Count | None = 3
    """Number of newest checkpoints to keep; None keeps all."""
    keep_checkpoints_every: Count | None = None
    """Keep checkpoints whose step is a multiple of this, in addition to the newest; None keeps only the newest."""
    async_checkpoint: bool = True
    """Write checkpoints in the background, from a copy in memory; the run waits for its last one."""
    max_shard_size: str = "5GB"
    """Maximum size of a file of saved weights, such as 500MB; larger weights are split into shards with an index."""
    keep_policies: Count | None = 4
    """Number of newest published versions whose weights to keep; None keeps all."""
    full_version_every: Count | None = None
    """Publish one version of so many in full, the others as differences to the version before; None publishes all in
    full."""

    def __post_init__(self) -> None:
        """Raises ConfigError if a value is out of range."""
        check(self)
        if not _SIZE.fullmatch(self.max_shard_size):
            raise ConfigError(f"max_shard_size is {self.max_shard_size!r}, wanted a size such as 500MB or 5GB")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of a trainer. None means off, unless the setting says otherwise."""

    num_steps: Count = 100
    """Total number of gradient steps, including those before a resume."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    num_threads: Annotated[int, Range(1, 1024)] | None = None
    """CPU threads of each rank; None keeps those of the resumed or replayed attempt, else OMP_NUM_THREADS or all
    cores."""
    lease_s: Annotated[float, LEASE_RANGE] = LEASE_S
    """Seconds without a renewal of the lease after which another trainer may take over; renewed every third of it."""
    keep_token_stats: bool = False
    """Write logprob, entropy, clipping and gradient weight of each trained token to token_stats/."""
    log_to: Literal["none", "tensorboard", "wandb"] = "none"
    """Metrics logger, in addition to the root's metrics table."""

    def __post_init__(self) -> None:
        """Raises ConfigError if a value is out of range or contradicts another setting."""
        check(self)
        if self.optimizer.warmup_steps >= self.num_steps:
            raise ConfigError(
                f"warmup_steps is {self.optimizer.warmup_steps}, wanted less than num_steps ({self.num_steps})"
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
