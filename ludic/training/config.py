"""Settings of one trainer process. Settings shared with workers are in run.json.

Imports no torch, so that `--help` answers at once.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Literal

from ludic.batches.config import BatchConfig
from ludic.bounds import check_numbers
from ludic.defaults import LEASE_S
from ludic.errors import ConfigError
from ludic.training.objective_settings import PAIRED, Objective, check_objective

OFFLINE_SETTINGS = ("offline", "sources", "epochs", "replay_batches")
"""Settings that select training on stored rollouts."""
_SIZE = re.compile(r"\d+(\.\d+)?(KB|MB|GB|TB)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of a trainer. None means off, unless the setting says otherwise."""

    num_steps: int = 100
    """Total number of gradient steps, including those before a resume."""

    advantage: str = "rloo"
    """Advantage estimator: a name in ludic/sql/advantages, path/to/file.sql, or path/to/file.py:function."""
    filters: tuple[str, ...] = ()
    """Filters that drop rollouts: names in ludic/sql/filters, or paths of .sql files."""
    where: str | None = None
    """Train only on rollouts for which this SQL predicate is true; None trains on all. Advantages still use the whole
    group, unless baseline_over is kept."""
    selection: str | None = None
    """Order in which groups are put into batches: a name in ludic/sql/selections, or path/to/file.sql. None uses fifo
    online and epochs offline."""
    sql_params: Mapping[str, float | int | str] = field(default_factory=dict)
    """Values of the $parameters of advantage, filters and selection; docs/algorithms.md lists them."""
    max_uses: int = 1
    """Maximum number of steps that train on one group, online."""
    max_off_policy_steps: int | None = 8
    """Drop rollouts sampled more than this many policy versions before the trainer's version; None keeps all. Not used
    offline."""
    max_age_s: float | None = None
    """Drop rollouts written more than this many seconds ago; None keeps all. Not used offline."""
    baseline_over: Literal["group", "kept"] = "group"
    """Rollouts that the baseline is computed from: the whole group, or only those that the filters keep."""

    offline: bool = False
    """Train on the rollouts that are stored now, not on those that workers deliver."""
    sources: tuple[str, ...] = ()
    """Roots whose rollouts to train on offline; if empty, the run's own root."""
    epochs: int | None = None
    """Offline passes over the stored rollouts; num_steps is computed from it. None trains until num_steps."""
    replay_batches: str | None = None
    """Root of another run whose batches to repeat, step by step, with its settings; None is off."""

    objective: Objective = "reinforce"
    """Objective maximised at each token: a function in ludic.training.losses; docs/algorithms.md has the formulas."""
    clip_low: float | None = None
    """Clip importance ratios below 1 - clip_low (ppo_clip, cispo, gspo, gmpo); None sets no lower bound."""
    clip_high: float | None = None
    """Clip importance ratios above 1 + clip_high (ppo_clip, cispo, gspo, gmpo); None sets no upper bound."""
    dual_clip: float | None = None
    """Lower bound of the objective at a negative advantage, as a multiple of that advantage (ppo_clip, gspo); above 1.
    None sets no bound."""
    truncate_ratio: float | None = None
    """Truncated importance sampling: largest importance weight (reinforce); None is off."""
    mask_ratio: tuple[float, float] | None = None
    """Mask tokens whose importance ratio is outside these two bounds (IcePop); None is off. Not for sft and pairs."""
    mask_sequence_ratio: tuple[float, float] | None = None
    """Mask sequences whose geometric mean of importance ratios is outside these two bounds; None is off. Not for sft
    and pairs."""
    mask_sequence_kl: float | None = None
    """Mask sequences with a negative advantage whose mean log(sampler / trainer) is above this (DeepSeek-V3.2); None
    is off. Not for sft and pairs."""
    log_ratio_weight: float | None = None
    """Weight of the squared log ratio in the loss, which keeps the policy close to the sampler; None is off. Not for
    sft and pairs."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Importance weight of a token: its own ratio, or the product of the ratios of its sequence (reinforce)."""
    sapo_tau_positive: float = 1.0
    """Temperature of the SAPO gate for positive advantages (sapo)."""
    sapo_tau_negative: float = 1.05
    """Temperature of the SAPO gate for negative advantages (sapo)."""
    dppo_low: float = 0.2
    """Mask tokens with a negative advantage whose probability has fallen by more than this (dppo)."""
    dppo_high: float = 0.2
    """Mask tokens with a positive advantage whose probability has risen by more than this (dppo)."""
    vespo_k: tuple[float, float] = (2.0, 3.0)
    """Exponent of the sequence's ratio, for positive and for negative advantages (vespo)."""
    vespo_lambda: tuple[float, float] = (3.0, 2.0)
    """Decay rate in the sequence's ratio, for positive and for negative advantages (vespo)."""
    dpo_beta: float = 0.1
    """Strength of the pull towards the reference (dpo, ipo)."""
    orpo_weight: float = 0.1
    """Weight of the odds-ratio term, added to the likelihood of the chosen side (orpo)."""
    whiten_advantages: bool = False
    """Scale advantages to mean 0 and variance 1 over the sampled tokens of the batch (REINFORCE++)."""
    normalize_over: Literal["tokens", "sequences", "constant"] = "tokens"
    """Average the loss over the batch's tokens (DAPO), over its sequences' means (GRPO), or divide each sequence's sum
    by a constant (Dr. GRPO). For dpo, ipo and
    orpo, sequences means pairs."""
    constant_tokens: int | None = None
    """Tokens that replace each sequence's length if normalize_over is constant; usually max_tokens."""
    entropy_weight: float | None = None
    """Weight of the policy's entropy, which is subtracted from the loss and averaged as normalize_over says; None is
    off."""
    reference: str | None = None
    """Folder, URL or Hugging Face id of the reference model or teacher, for reference_kl, dpo and ipo; None is off.
    With LoRA, the run's own model takes no extra memory."""
    reference_offload: bool = False
    """Keep the reference in CPU memory and move it to the device one layer at a time."""
    reference_cache: bool = False
    """Store the reference's logprobs under the root and reuse stored ones."""
    kl_weight: float | None = None
    """Weight of the KL to the reference; None only measures it."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL that kl_weight multiplies; see ludic.training.losses."""
    kl_in: Literal["loss", "reward", "return"] = "loss"
    """Add the KL to the loss, or subtract it from each token's advantage: the token's own KL (reward), or the sum from
    the token to the end (return)."""

    learning_rate: float = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule from the end of the warm-up to num_steps; linear and cosine fall towards 0."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly; 0 is no warm-up."""
    weight_decay: float = 0.0
    """AdamW weight decay of matrices; biases and norms do not decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW beta1 and beta2."""
    max_grad_norm: float | None = 1.0
    """Clip gradients to this L2 norm; None does not clip."""

    micro_token_budget: int = 16384
    """Maximum tokens in one forward pass of a rank; a longer sequence gets its own pass."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits are in memory at once, in training and for the reference; each takes 4 bytes times the
    vocabulary."""
    max_seq_len: int | None = None
    """Maximum tokens of a sequence; longer ones lose the end of their response. None does not cut."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of forward and backward passes and of frozen weights; trained weights and the optimizer stay float32."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    compile: bool = False
    """Compile each decoder layer, except its attention, with torch.compile; the first steps take longer."""
    lora_rank: int | None = None
    """Rank of LoRA adapters; the model's own weights are frozen. None trains all weights."""
    lora_alpha: int = 32
    """LoRA alpha: adapters are scaled by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, such as q_proj v_proj; if empty, all but the head."""
    publish_lora: Literal["merged", "adapter"] = "merged"
    """Publish whole weights with the adapters merged, or only the adapters, for workers that can read the run's
    model."""
    device: Literal["cpu", "cuda"] | None = None
    """Device to train on; None takes CUDA if available."""
    num_threads: int | None = None
    """CPU threads of each rank; None keeps those of the resumed or replayed attempt, else OMP_NUM_THREADS or all
    cores."""

    checkpoint_every: int | None = 20
    """Steps between checkpoints; None writes one at the end only."""
    keep_checkpoints: int | None = 3
    """Number of newest checkpoints to keep; None keeps all."""
    keep_checkpoints_every: int | None = None
    """Keep checkpoints whose step is a multiple of this, in addition to the newest; None keeps only the newest."""
    async_checkpoint: bool = True
    """Write checkpoints in the background, from a copy in memory; the run waits for its last one."""
    max_shard_size: str = "5GB"
    """Maximum size of a file of saved weights, such as 500MB; larger weights are split into shards with an index."""
    keep_policies: int | None = 4
    """Number of newest published versions whose weights to keep; None keeps all."""
    stall_limit_s: float | None = 1800.0
    """Seconds without new rollouts before the trainer stops with an error; None waits forever."""
    lease_s: float = LEASE_S
    """Seconds without a renewal of the lease after which another trainer may take over; renewed every third of it."""
    keep_token_stats: bool = False
    """Write logprob, entropy, clipping and gradient weight of each trained token to token_stats/."""
    log_to: Literal["none", "tensorboard", "wandb"] = "none"
    """Metrics logger, in addition to the root's metrics table."""

    def __post_init__(self) -> None:
        """Raises ConfigError if a value is out of range or contradicts another setting."""
        check_numbers(self)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas is {self.betas}, wanted two numbers from 0 to below 1")
        if self.warmup_steps >= self.num_steps:
            raise ConfigError(f"warmup_steps is {self.warmup_steps}, wanted less than num_steps ({self.num_steps})")
        self._check_stored()
        self._check_reference()
        self._check_lora()
        check_objective(
            {field.name: getattr(self, field.name) for field in fields(self)},
            {field.name: field.default for field in fields(self) if field.default is not MISSING},
        )
        if not _SIZE.fullmatch(self.max_shard_size):
            raise ConfigError(f"max_shard_size is {self.max_shard_size!r}, wanted a size such as 500MB or 5GB")
        for name, param in self.sql_params.items():
            if not isinstance(param, float | int | str):
                raise ConfigError(f"sql_params has {name!r} = {param!r}, wanted a number or a text")

    @property
    def is_stored(self) -> bool:
        """Return whether training reads stored batches or rollouts instead of waiting for workers."""
        return self.offline or self.replay_batches is not None

    @property
    def batch(self) -> BatchConfig:
        """Settings of batches."""
        return BatchConfig(**{field.name: getattr(self, field.name) for field in fields(BatchConfig)})

    @property
    def trains_on_pairs(self) -> bool:
        """Return whether the objective compares the two sides of pairs."""
        return self.objective in PAIRED

    def _check_stored(self) -> None:
        if not self.offline and (self.sources or self.epochs):
            name = "sources" if self.sources else "epochs"
            raise ConfigError(f"{name} is {getattr(self, name)}, which only offline training looks at; set offline")
        if self.offline and self.replay_batches is not None:
            raise ConfigError(f"replay_batches is {self.replay_batches} and offline is set; choose one of them")
        if self.offline and self.max_uses > 1:
            raise ConfigError(f"max_uses is {self.max_uses}, which offline training does not look at; set epochs")

    def _check_reference(self) -> None:
        for name in ("kl_weight", "reference_offload", "reference_cache"):
            if getattr(self, name) and self.reference is None:
                value = getattr(self, name)
                raise ConfigError(f"{name} is {value} but there is no reference; set reference to a model")

    def _check_lora(self) -> None:
        if self.lora_rank is None and (self.lora_targets or self.publish_lora == "adapter"):
            name = "lora_targets" if self.lora_targets else "publish_lora"
            raise ConfigError(f"{name} is {getattr(self, name)} but there are no adapters; set lora_rank")
