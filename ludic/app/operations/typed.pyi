"""Types of the operations' `**settings`, by which editors complete them and type checkers find mistakes.

Written by `make format` from the dataclasses of the settings.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from ludic.training.config import Cispo, Dpo, Dppo, Gmpo, Gspo, Ipo, Orpo, PpoClip, Reinforce, Sapo, Sft, Vespo

class RunConfigValues(TypedDict, total=False):
    env_options: Mapping[str, Any]
    group_size: int
    close_groups_at: int | None
    groups_per_batch: int
    steps_per_version: int
    batches_ahead: int | None
    num_workers: int
    temperature: float
    top_p: float
    top_k: int | None
    max_tokens: int
    keep_sampling_mask: bool | None
    keep_experts: bool
    sweep: Mapping[str, Any]
    curriculum: int | None
    accept_incomplete: bool
    max_steps: int | None
    max_sequence_tokens: int | None
    longrope: Literal["short", "long"] | None
    max_observation_characters: int | None
    max_column_characters: int
    parser: str
    format_reward: float
    context: str
    tools: Sequence[str]
    tool_format: str | None
    protocol: str | None
    sub_agents: Sequence[str]
    max_depth: int
    max_children: int
    max_child_tokens: int | None
    agent: str | None
    agent_command: str | None
    agent_variables: Sequence[str]
    agent_cpu_s: int | None
    agent_memory_mb: int | None
    agent_open_files: int | None
    agent_file_mb: int | None
    agent_lenient: bool
    agent_keep_thinking: bool
    agent_replay: bool
    score_command: str | None
    posted_scores: bool
    float32_head: bool
    seed: int
    extra_columns: Mapping[str, str]

class TrainConfigValues(TypedDict, total=False):
    num_steps: int
    advantage: str
    filters: Sequence[str]
    where: str | None
    selection: str | None
    sql_params: Mapping[str, float | int | str]
    max_uses: int
    max_off_policy_steps: int | None
    max_age_s: float | None
    baseline_over: Literal["group", "kept"]
    scorers: Sequence[str]
    reward_scorer: str | None
    mixed_scorers: bool
    wait_for_scores_s: float | None
    offline: bool
    sources: Sequence[str]
    epochs: int | None
    compute_logprobs: bool
    replay_batches: str | None
    replan_from: int | None
    max_seq_len: int | None
    training_unit: Literal["episode", "turn"]
    max_tokens_per_micro_batch: int | None
    replay_experts: bool | None
    balance_by: Literal["tokens", "cost"] | None
    rollout_timeout_s: float | None
    objective: (
        Literal["reinforce", "ppo_clip", "cispo", "gspo", "gmpo", "sapo", "dppo", "vespo", "sft", "dpo", "ipo", "orpo"]
        | Mapping[str, Any]
        | Reinforce
        | PpoClip
        | Cispo
        | Gspo
        | Gmpo
        | Sapo
        | Dppo
        | Vespo
        | Sft
        | Dpo
        | Ipo
        | Orpo
    )
    is_ratio_bounds: Sequence[float] | None
    is_sequence_ratio_bounds: Sequence[float] | None
    mask_sequence_kl: float | None
    log_ratio_weight: float | None
    whiten_advantages: bool
    kl_placement: Literal["loss", "reward", "return"]
    is_ratio_cap: float | None
    ratio_level: Literal["token", "sequence"]
    clip_low: float | None
    clip_high: float | None
    dual_clip: float | None
    sapo_tau: Sequence[float]
    dppo_bounds: Sequence[float]
    vespo_k: Sequence[float]
    vespo_lambda: Sequence[float]
    dpo_beta: float
    orpo_weight: float
    loss_normalization: Literal["tokens", "sequences", "episodes", "constant"]
    constant_tokens: int | None
    entropy_weight: float | None
    router_balance_weight: float | None
    router_z_weight: float | None
    reference: str | None
    reference_offload: bool
    reference_cache: bool
    kl_weight: float | None
    kl_estimator: Literal["k1", "k2", "k3"]
    optimizer: Literal["adamw", "adamw_8bit"]
    fused_adamw: bool | None
    learning_rate: float
    schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    weight_decay: float
    betas: Sequence[float]
    max_grad_norm: float | None
    dtype: Literal["float32", "bfloat16"] | None
    tf32: bool | None
    device: Literal["cpu", "cuda"] | None
    lora_rank: int | None
    lora_alpha: int
    lora_targets: Sequence[str]
    publish_lora: Literal["merged", "adapter"]
    publish_dtype: Literal["float32", "bfloat16"] | None
    logprob_chunk_tokens: int | None
    activation_checkpointing: bool | None
    compile: bool | None
    checkpoint_every: int | None
    keep_checkpoints: int | None
    async_checkpoint: bool
    max_shard_size: str
    keep_policies: int | None
    full_version_every: int | None
    log_to: str
    tracker_samples_every: int | None
    num_threads: int | None
    lease_s: float
    keep_token_stats: bool

class CodeSettingsValues(TypedDict, total=False):
    trust_code: bool
    update_code: bool

class EngineConfigValues(TypedDict, total=False):
    max_batch: int
    tensor_parallel: int
    gpu_memory: float | None
    server_url: Sequence[str]
    engine_options: Mapping[str, Any]

class LaunchConfigValues(TypedDict, total=False):
    in_flight: int | None
    swap: Literal["token", "completion", "episode"]
    env_timeout_s: float | None
    episode_timeout_s: float | None
    local_workers: int | None
    ranks: int
    trainer_gpus: str | None
    worker_gpus: str | None
    eval_every: int | None
    eval_options: Mapping[str, Any]
    take_over: bool
    stop_within_s: int
    launcher: str

class MeasureConfigValues(TypedDict, total=False):
    measures: Sequence[str]
    params: Mapping[str, Any]
    confidence: float

class EvalConfigValues(TypedDict, total=False):
    every: int | None
    until_step: int | None
    env: Sequence[str]
    env_options: Mapping[str, Any]
    num_examples: int
    n: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    max_tokens: int | None
    accept_incomplete: bool | None
    max_steps: int | None
    max_sequence_tokens: int | None
    parser: str | None
    format_reward: float | None
    context: str | None
    tools: Sequence[str] | None
    tool_format: str | None
    protocol: str | None
    agent: str | None
    agent_command: str | None
    agent_variables: Sequence[str] | None
    agent_cpu_s: int | None
    agent_memory_mb: int | None
    agent_open_files: int | None
    agent_file_mb: int | None
    agent_lenient: bool | None
    agent_keep_thinking: bool | None
    score_command: str | None
    posted_scores: bool | None
    seed: int
    in_flight: int | None
    examples_per_call: int
    env_timeout_s: float | None
    episode_timeout_s: float | None

class ExpiryRuleValues(TypedDict, total=False):
    folder: str
    keep_versions: int | None
    before: int | None
    older_than: str | None
    where: str | None

class ExportOptionsValues(TypedDict, total=False):
    table: Literal["rollouts", "evals"]
    where: str | None
    sql: str | None
    step: int | None
    version: int | None
    model: str | None

class GatewayProcessValues(TypedDict, total=False):
    host: str
    port: int
    upstream: str | None
    command: str | None

class GatewaySettingsValues(TypedDict, total=False):
    lenient: bool
    keep_thinking: bool
    max_in_flight: int
    max_episodes: int
    episode_timeout_s: float
    max_body_bytes: int
    drain_timeout_s: float

class HttpSettingsValues(TypedDict, total=False):
    host_names: Sequence[str]
    open_stream_after_s: float
    keep_alive_s: float
    receive_within_s: float
    send_within_s: float
    idle_s: float
    max_held_mb: int
    max_header_bytes: int

class UpstreamSettingsValues(TypedDict, total=False):
    upstream_key: str
    upstream_timeout_s: float

class QuestionValues(TypedDict, total=False):
    system: str | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    max_tokens: int | None
    seed: int
    device: Literal["cpu", "cuda"] | None

class ScoreOptionsValues(TypedDict, total=False):
    scorer_options: Mapping[str, Any]
    name: str | None
    table: Literal["rollouts", "evals"]
    where: str | None
    concurrency: int
    scorer_timeout_s: float
    retry_failed: bool
    judge_url: str | None
    judge_model: str | None
    judge_prompt: str | None
    judge_pattern: str | None
    judge_options: Mapping[str, Any]
    judge_tries: int
    judge_key_env: str | None
    judge_input_price: float | None
    judge_output_price: float | None

class ServeConfigValues(TypedDict, total=False):
    host: str
    port: int
    max_batch: int
    tensor_parallel: int
    gpu_memory: float | None
    engine_options: Mapping[str, Any]

class ViewOptionsValues(TypedDict, total=False):
    author: str | None
    picture: str | PathLike[str] | None
    web: bool
    host: str
    host_names: Sequence[str]
    port: int

class WorkerConfigValues(TypedDict, total=False):
    in_flight: int | None
    swap: Literal["token", "completion", "episode"]
    env_timeout_s: float | None
    episode_timeout_s: float | None
    slot: int | None
    follow_budget: bool

class CheckSettings(
    RunConfigValues, TrainConfigValues, CodeSettingsValues, EngineConfigValues, LaunchConfigValues, total=False
):
    """Settings of `start.check`."""

    model: str
    env: Sequence[str]

class ClusterSettings(TrainConfigValues, EngineConfigValues, total=False):
    """Settings of `machines.cluster`."""

class CompareSettings(MeasureConfigValues, total=False):
    """Settings of `evaluations.compare`."""

class CreateSettings(RunConfigValues, CodeSettingsValues, total=False):
    """Settings of `create.create`."""

class EvalSettings(EvalConfigValues, MeasureConfigValues, CodeSettingsValues, total=False):
    """Settings of `evaluations.eval_`."""

class ExpireSettings(ExpiryRuleValues, total=False):
    """Settings of `maintain.expire`."""

class ExportSettings(ExportOptionsValues, total=False):
    """Settings of `exchange.export`."""

class FitSettings(
    RunConfigValues, TrainConfigValues, CodeSettingsValues, EngineConfigValues, LaunchConfigValues, total=False
):
    """Settings of `fit.fit`."""

    env: Sequence[str]
    engine: str

class GatewaySettings(
    GatewayProcessValues,
    GatewaySettingsValues,
    HttpSettingsValues,
    UpstreamSettingsValues,
    EngineConfigValues,
    total=False,
):
    """Settings of `gateway.gateway`."""

class GridSettings(
    RunConfigValues, TrainConfigValues, CodeSettingsValues, EngineConfigValues, LaunchConfigValues, total=False
):
    """Settings of `runs.grid`."""

    model: str
    env: Sequence[str]

class PlanSettings(
    RunConfigValues, TrainConfigValues, CodeSettingsValues, EngineConfigValues, LaunchConfigValues, total=False
):
    """Settings of `machines.plan`."""

    model: str
    env: Sequence[str]
    engine: str

class ReportSettings(MeasureConfigValues, total=False):
    """Settings of `inspect_run.report`."""

class RunSettings(
    RunConfigValues, TrainConfigValues, CodeSettingsValues, EngineConfigValues, LaunchConfigValues, total=False
):
    """Settings of `start.run`."""

    model: str
    env: Sequence[str]

class SampleSettings(QuestionValues, total=False):
    """Settings of `inspect_run.sample`."""

class ScoreSettings(ScoreOptionsValues, total=False):
    """Settings of `evaluations.score`."""

class ServeSettings(ServeConfigValues, total=False):
    """Settings of `machines.serve`."""

class TrainSettings(TrainConfigValues, CodeSettingsValues, total=False):
    """Settings of `start.train`."""

class ViewSettings(ViewOptionsValues, total=False):
    """Settings of `inspect_run.view`."""

class WorkerSettings(WorkerConfigValues, CodeSettingsValues, EngineConfigValues, total=False):
    """Settings of `start.worker`."""
