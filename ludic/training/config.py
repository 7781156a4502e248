"""The settings of one trainer process; what workers must agree with it on is in run.json.

Imports no torch, so that the command line answers `--help` at once.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Literal

from ludic.bounds import check_numbers
from ludic.errors import ConfigError
from ludic.store.lease import LEASE_S
from ludic.training.objective_settings import Objective, check_objective

OFFLINE_SETTINGS = ("offline", "sources", "epochs", "replay_batches")
"""Those that choose to train on what is stored."""
_SIZE = re.compile(r"\d+(\.\d+)?(KB|MB|GB|TB)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How a trainer learns from a root; None is off. Raises ConfigError for a value out of range."""

    num_steps: int = 100
    """Gradient steps in all, those before a resume included."""

    advantage: str = "rloo"
    """Advantage estimator: a name in ludic/sql/advantages, path/to/file.sql, or path/to/file.py:function."""
    filters: tuple[str, ...] = ()
    """Filters that drop rollouts: names in ludic/sql/filters, or paths of files."""
    where: str | None = None
    """Train only on rollouts that this SQL predicate is true of; advantages are still those of whole groups."""
    selection: str | None = None
    """Which groups make the next batch: a name in ludic/sql/selections, or path/to/file.sql; None is fifo, offline
    epochs."""
    sql_params: Mapping[str, float | int | str] = field(default_factory=dict)
    """Values of the $parameters of advantage, filters and selection; docs/algorithms.md lists them."""
    max_uses: int = 1
    """Steps that may train on one group."""
    max_off_policy_steps: int | None = 8
    """Drop rollouts whose weights are more versions old than this."""
    max_age_s: float | None = None
    """Drop rollouts that were written more seconds ago than this."""
    baseline_over: Literal["group", "kept"] = "group"
    """Take the baseline over the whole group, or over what the filters kept of it."""

    offline: bool = False
    """Train on the rollouts that are stored now, not on those that workers deliver."""
    sources: tuple[str, ...] = ()
    """Runs whose rollouts to train on offline; none is the root's own."""
    epochs: int | None = None
    """Passes over the stored rollouts, which num_steps then follows from; None goes on until num_steps."""
    replay_batches: str | None = None
    """Run whose batches to train on again, step by step, with its settings."""

    objective: Objective = "reinforce"
    """What is maximised at each token; a function in ludic.training.losses, docs/algorithms.md has the formulas."""
    clip_low: float | None = None
    """Importance ratios below 1 - clip_low are clipped (ppo_clip, cispo, gspo, gmpo)."""
    clip_high: float | None = None
    """Importance ratios above 1 + clip_high are clipped (ppo_clip, cispo, gspo, gmpo)."""
    dual_clip: float | None = None
    """A negative advantage costs at most so many times itself (ppo_clip, gspo); above 1."""
    truncate_ratio: float | None = None
    """Truncated importance sampling: the largest importance weight (reinforce)."""
    mask_ratio: tuple[float, float] | None = None
    """Leave out tokens whose importance ratio is outside of these two bounds (IcePop); not for sft and pairs."""
    mask_sequence_ratio: tuple[float, float] | None = None
    """Leave out sequences whose geometric mean of ratios is outside of these two bounds; not for sft and pairs."""
    mask_sequence_kl: float | None = None
    """Leave out sequences of a negative advantage whose mean log(sampler / trainer) is above this (DeepSeek-V3.2)."""
    log_ratio_weight: float | None = None
    """Weight of the squared log ratio, added to the loss: holds the policy to the sampler; not for sft and pairs."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Weigh a token by its own ratio, or by that of its whole sequence (reinforce)."""
    sapo_tau_positive: float = 1.0
    """Temperature of the SAPO gate for positive advantages (sapo)."""
    sapo_tau_negative: float = 1.05
    """Temperature of the SAPO gate for the other advantages (sapo)."""
    dppo_low: float = 0.2
    """Leave out tokens that a negative advantage made less probable by more than this (dppo)."""
    dppo_high: float = 0.2
    """Leave out tokens that a positive advantage made more probable by more than this (dppo)."""
    vespo_k: tuple[float, float] = (2.0, 3.0)
    """Power of the sequence's ratio, for positive and for negative advantages (vespo)."""
    vespo_lambda: tuple[float, float] = (3.0, 2.0)
    """Decay in the sequence's ratio, for positive and for negative advantages (vespo)."""
    dpo_beta: float = 0.1
    """How strongly the policy is held to the reference (dpo, ipo)."""
    orpo_weight: float = 0.1
    """Weight of the odds ratio beside the likelihood of the chosen side (orpo)."""
    whiten_advantages: bool = False
    """Give advantages mean 0 and variance 1 over the sampled tokens of the batch (REINFORCE++)."""
    normalize_over: Literal["tokens", "sequences", "constant"] = "tokens"
    """The mean is over the batch's tokens (DAPO), over its sequences' means (GRPO), or over a constant (Dr. GRPO).

    For pairs (dpo, ipo, orpo), sequences is over pairs.
    """
    constant_tokens: int | None = None
    """Tokens that stand for a sequence's length where normalize_over is constant; usually max_tokens."""
    entropy_weight: float | None = None
    """Weight of the policy's entropy, subtracted from the loss; its mean is over what normalize_over says."""
    reference: str | None = None
    """Folder or Hugging Face id of a model that reference_kl, dpo and ipo are measured against, or of a teacher; with
    LoRA the run's own is shared."""
    reference_offload: bool = False
    """Keep the reference in the CPU's memory between uses, and bring it to the device layer by layer."""
    reference_cache: bool = False
    """Keep the reference's logprobs under the root, and use those that are there."""
    kl_weight: float | None = None
    """Weight of reference_kl; None only measures it."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL that kl_weight multiplies; see ludic.training.losses."""
    kl_in: Literal["loss", "reward", "return"] = "loss"
    """Add the KL to the loss, or take it from each token's advantage: the token's own, or all from the token on."""

    learning_rate: float = 1e-6
    """Largest learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after its warm-up, until num_steps."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly."""
    weight_decay: float = 0.0
    """Of AdamW, on matrices only."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Of AdamW."""
    max_grad_norm: float | None = 1.0
    """L2 norm that gradients are scaled down to."""

    micro_token_budget: int = 16384
    """Most tokens in one forward pass of a rank; a longer sequence gets a pass of its own."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits are in memory at once, in training and for the reference: 4 bytes times the vocabulary."""
    max_seq_len: int | None = None
    """Most tokens of a sequence; longer ones lose the end of their response."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of forward and backward, and of weights that don't train; those that do, and the optimizer, stay float32."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    compile: bool = False
    """Compile each decoder layer with torch.compile, its attention aside; the first steps take longer."""
    lora_rank: int | None = None
    """Train low-rank adapters of this rank, with the model's own weights left as they are; None trains all weights."""
    lora_alpha: int = 32
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_targets: tuple[str, ...] = ()
    """Layers that get an adapter, such as q_proj v_proj; none named: all linear ones but the head."""
    publish_lora: Literal["merged", "adapter"] = "merged"
    """Publish whole weights with the adapters merged, or adapters alone, for workers that see the run's model."""
    device: Literal["cpu", "cuda"] | None = None
    """Where to train; None takes CUDA when there is one."""
    num_threads: int | None = None
    """CPU threads of each rank; None keeps those of the attempt that is resumed or replayed, else OMP_NUM_THREADS or
    all cores."""

    checkpoint_every: int | None = 20
    """Steps between two checkpoints; None writes one at the end only."""
    keep_checkpoints: int | None = 3
    """Newest checkpoints to keep; None keeps all."""
    keep_checkpoints_every: int | None = None
    """Also keep the checkpoints of steps that this number divides; None keeps no others."""
    async_checkpoint: bool = True
    """Write checkpoints while training goes on, from a copy in memory; a run's last one is waited for."""
    max_shard_size: str = "5GB"
    """Most bytes of a file of saved weights, such as 500MB; larger ones are split, and an index names the parts."""
    keep_policies: int | None = 4
    """Newest published versions whose weights to keep; None keeps all."""
    stall_limit_s: float | None = 1800.0
    """Give up when no rollouts arrive for so many seconds; None waits for ever."""
    lease_s: float = LEASE_S
    """Seconds without a sign of life after which another trainer may take over; thrice as many signs are given."""
    keep_token_stats: bool = False
    """Write the trainer's logprob, entropy, clipping and gradient weight of each token trained on to token_stats/."""
    log_to: Literal["none", "tensorboard", "wandb"] = "none"
    """Where metrics go besides the root."""

    def __post_init__(self) -> None:
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
        """Whether what is trained on is there before training begins."""
        return self.offline or self.replay_batches is not None

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
