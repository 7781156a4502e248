"""Settings of TRL, verl and prime-rl, and what they are called in ludic: one table for errors and docs/coming_from.md.

The names are those of TRL 1.16 (GRPOConfig, with transformers' TrainingArguments), verl 0.9
(verl/trainer/config/_generated_ppo_trainer.yaml) and prime-rl 0.8 (packages/prime-rl-configs). A name that ludic has
with the same meaning is in the table too, so that the table is complete; it never leads to an error.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PAGE = "docs/coming_from.md"

_WORD = re.compile(r"(?:--|\+{1,2}|~)?([A-Za-z_][\w-]*(?:\.[\w-]+)+)(?:=(.*))?", re.DOTALL)
"""Matches a setting as verl and prime-rl take it: actor_rollout_ref.rollout.n=8, --trainer.optim.lr."""
_OTHER_MEANING = frozenset({"max_steps"})
"""Names that ludic has, too, with another meaning: they can't be told from its own."""
_OF_EACH = frozenset({"root", "algorithm"})
"""Parameters that are no settings of a process, and so are not listed among those that are known."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A setting of another program."""

    names: str
    """Its name; several that are set together, separated by blanks."""
    ours: str = ""
    """Settings of ludic that it becomes, separated by blanks; empty if there are none."""
    note: str = ""
    """What else to know: how to compute the value, or what ludic does instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Another program with its settings."""

    name: str
    settings: tuple[Foreign, ...]


_BATCH = "per_device_train_batch_size * gradient_accumulation_steps * processes / num_generations"
_ENVIRONMENT_STEPS = "max_steps of ludic is the most steps of an episode"
_TOOL_CALLS = "tokens limit the calls of tools; max_steps counts the steps of the environment"

TRL = Program(
    name="TRL",
    settings=(
        # The model, the data and the reward
        Foreign("model_init_kwargs", "dtype", 'dtype = "bfloat16"'),
        Foreign(
            "train_dataset",
            "env",
            'env = ["qa/FILE.jsonl"]: a data file, a folder of save_to_disk, or a Hub name',
        ),
        Foreign("eval_dataset", "env_options", "option heldout: another file, or another split"),
        Foreign("reward_funcs", "env_options", 'option scorer = "trl:rewards.py:accuracy", or a list of them'),
        Foreign("reward_weights", "env_options", "option scorer: a table of functions with their weights"),
        Foreign("peft_config", "lora_rank lora_alpha lora_targets", "r, lora_alpha and target_modules of LoraConfig"),
        Foreign("shuffle_dataset", "", "each pass over the questions has its own order, which the seed decides"),
        Foreign("chat_template_kwargs", "", "change the tokenizer's chat template"),
        # Sampling
        Foreign("num_generations", "group_size"),
        Foreign("max_completion_length", "max_tokens"),
        Foreign(
            "max_prompt_length",
            "max_sequence_tokens",
            "tokens of prompt and completions together; a name of TRL before 1.0",
        ),
        Foreign("temperature", "temperature"),
        Foreign("top_p", "top_p"),
        Foreign("top_k", "top_k", "TRL's 0 is None"),
        Foreign("min_p repetition_penalty generation_kwargs", "", "the trainer could not compute their probabilities"),
        Foreign("max_tool_calling_iterations", "max_sequence_tokens", _TOOL_CALLS),
        Foreign("use_vllm", "engine", 'engine = "vllm"'),
        Foreign("vllm_mode", "engine", 'colocate is engine = "vllm"; server is engine = "server" with server_url'),
        Foreign("vllm_server_base_url vllm_server_host vllm_server_port", "server_url", "such as http://node1:8000"),
        Foreign("vllm_gpu_memory_utilization", "gpu_memory"),
        Foreign("vllm_tensor_parallel_size", "tensor_parallel"),
        Foreign("vllm_max_model_length", "engine_options", '{"max_model_len": 8192}'),
        Foreign(
            "vllm_enable_sleep_mode", "", "trainer and workers are processes of their own and run at the same time"
        ),
        # Batches and steps
        Foreign("per_device_train_batch_size", "groups_per_batch", _BATCH),
        Foreign(
            "generation_batch_size", "groups_per_batch", "generation_batch_size / num_generations / steps_per_version"
        ),
        Foreign(
            "gradient_accumulation_steps",
            "max_tokens_per_micro_batch",
            "micro-batches are packed by tokens; groups_per_batch alone sets the batch",
        ),
        Foreign(
            "steps_per_generation",
            "steps_per_version",
            "gradient steps between two versions of the weights: steps_per_generation / gradient_accumulation_steps",
        ),
        Foreign("num_iterations", "max_uses"),
        Foreign("max_steps", "num_steps", _ENVIRONMENT_STEPS),
        Foreign("num_train_epochs", "num_steps", "rows * epochs / groups_per_batch"),
        # Algorithm
        Foreign(
            "loss_type",
            "algorithm",
            'grpo, dr_grpo, cispo, sapo and vespo have these names; TRL\'s dapo is algorithm = "grpo" with '
            'loss_normalization = "tokens"; luspo and bnpo have no counterpart',
        ),
        Foreign("scale_rewards", "advantage", "group is grpo, none is dr_grpo, batch is lite_ppo"),
        Foreign("multi_objective_aggregation", "advantage", "normalize_then_sum is gdpo"),
        Foreign("importance_sampling_level", "objective", 'sequence is objective = "gspo"'),
        Foreign("beta", "kl_weight", "set reference as well, such as to the model itself, and kl_estimator"),
        Foreign(
            "use_bias_correction_kl",
            "kl_estimator",
            'True, TRL\'s default: "k2" has the same gradient on-policy; False: "k3", the default here',
        ),
        Foreign("epsilon", "clip_low clip_high", "both, unless epsilon_high is set"),
        Foreign("epsilon_high", "clip_high"),
        Foreign("delta", "dual_clip"),
        Foreign("sapo_temperature_pos", "sapo_tau_positive"),
        Foreign("sapo_temperature_neg", "sapo_tau_negative"),
        Foreign("vespo_k_pos vespo_k_neg", "vespo_k", "both values"),
        Foreign("vespo_lambda_pos vespo_lambda_neg", "vespo_lambda", "both values"),
        Foreign("entropy_coef", "entropy_weight"),
        Foreign("router_aux_loss_coef", "router_balance_weight", "TRL's 0 is None; its default is 0.001"),
        Foreign("off_policy_mask_threshold", "mask_sequence_kl"),
        Foreign(
            "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min vllm_importance_sampling_cap",
            "is_ratio_bounds",
            "masks tokens; is_ratio_cap of the objective reinforce truncates",
        ),
        Foreign(
            "vllm_importance_sampling_correction vllm_importance_sampling_mode",
            "is_ratio_bounds is_sequence_ratio_bounds",
            "ratios are always to the sampler's own logprobs; the bounds mask tokens or sequences",
        ),
        Foreign(
            "mask_truncated_completions",
            "accept_incomplete",
            "False is accept_incomplete = true; for True, filter by drop_incomplete_completions",
        ),
        Foreign("sync_ref_model ref_model_mixup_alpha ref_model_sync_steps", "", "the reference does not change"),
        Foreign("top_entropy_quantile", "", "all sampled tokens are trained on"),
        Foreign("use_adaptive_entropy entropy_target", "", "entropy_weight does not change"),
        # Optimizer and model
        Foreign("learning_rate", "learning_rate"),
        Foreign("lr_scheduler_type", "schedule", "constant, linear or cosine"),
        Foreign("warmup_steps", "warmup_steps", "whole steps; a share of the steps must be multiplied"),
        Foreign("warmup_ratio", "warmup_steps", "warmup_ratio * num_steps; a name of older transformers"),
        Foreign("weight_decay", "weight_decay"),
        Foreign("adam_beta1 adam_beta2", "betas", "both values"),
        Foreign("max_grad_norm", "max_grad_norm"),
        Foreign("bf16", "dtype", 'dtype = "bfloat16"'),
        Foreign("gradient_checkpointing", "activation_checkpointing"),
        Foreign("torch_compile", "compile"),
        Foreign("seed", "seed"),
        Foreign("use_liger_kernel", "logprob_chunk_tokens", "logits are always computed in chunks of so many tokens"),
        Foreign("deepspeed fsdp", "ranks", "several ranks always shard with FSDP2"),
        Foreign("optim", "", "the optimizer is AdamW"),
        # What is kept and shown
        Foreign("output_dir", "root", "the first argument of each command"),
        Foreign("save_steps", "checkpoint_every"),
        Foreign("save_total_limit", "keep_checkpoints"),
        Foreign("resume_from_checkpoint", "", "`ludic run ROOT` resumes by itself"),
        Foreign("eval_steps", "eval_every"),
        Foreign("num_generations_eval", "eval_options", '{"n": 4}'),
        Foreign("report_to", "log_to", "tensorboard or wandb; the root holds all metrics anyway"),
        Foreign("run_name", "tracker_name", "else the last part of the root's location"),
        Foreign("logging_steps", "", "every step is stored"),
        Foreign(
            "log_completions num_completions_to_print",
            "tracker_samples_every",
            "for W&B and TensorBoard; every rollout is stored: `ludic view ROOT`",
        ),
        Foreign("push_to_hub", "", "`ludic export ROOT --format hf` writes a folder to upload"),
    ),
)

VERL = Program(
    name="verl",
    settings=(
        Foreign("actor_rollout_ref.model.path", "model"),
        Foreign("data.train_files", "env", 'env = ["qa/train.parquet"]; verl\'s own files are read as they are'),
        Foreign("data.val_files", "env_options", 'option heldout = "test.parquet"'),
        Foreign("data.prompt_key", "env_options", "option question"),
        Foreign("data.max_prompt_length", "max_sequence_tokens", "tokens of prompt and completions together"),
        Foreign("data.max_response_length", "max_tokens"),
        Foreign("data.train_batch_size", "groups_per_batch steps_per_version", "see ppo_mini_batch_size"),
        Foreign("data.seed", "seed"),
        Foreign("data.shuffle", "", "each pass over the questions has its own order, which the seed decides"),
        Foreign(
            "data.filter_overlong_prompts data.truncation", "", "an episode that is too long is stored as truncated"
        ),
        Foreign(
            "reward.custom_reward_function.path reward.custom_reward_function.name",
            "env_options",
            'option scorer = "verl:FILE.py:FUNCTION"',
        ),
        Foreign("reward.reward_manager.name", "advantage", 'dapo, with its overlong buffer, is advantage = "overlong"'),
        Foreign("reward.reward_model.model_path", "env_options", 'option scorer = "model:PATH_OR_ID" or "pooling:URL"'),
        Foreign("actor_rollout_ref.rollout.n", "group_size"),
        Foreign("actor_rollout_ref.rollout.name", "engine", "vllm or server; sglang has no counterpart"),
        Foreign("actor_rollout_ref.rollout.temperature", "temperature"),
        Foreign("actor_rollout_ref.rollout.top_p", "top_p"),
        Foreign("actor_rollout_ref.rollout.top_k", "top_k", "verl's -1 is None"),
        Foreign("actor_rollout_ref.rollout.gpu_memory_utilization", "gpu_memory"),
        Foreign("actor_rollout_ref.rollout.tensor_model_parallel_size", "tensor_parallel"),
        Foreign("actor_rollout_ref.rollout.max_num_seqs", "max_batch"),
        Foreign("actor_rollout_ref.rollout.max_model_len", "engine_options", '{"max_model_len": 8192}'),
        Foreign("actor_rollout_ref.rollout.val_kwargs.n", "eval_options", '{"n": 4}'),
        Foreign("actor_rollout_ref.rollout.val_kwargs.temperature", "eval_options", '{"temperature": 0}'),
        Foreign(
            "actor_rollout_ref.rollout.multi_turn.tool_config_path", "tools", "path/to/file.py:function for each tool"
        ),
        Foreign("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "max_sequence_tokens", _TOOL_CALLS),
        Foreign("actor_rollout_ref.rollout.multi_turn.format", "tool_format"),
        Foreign("actor_rollout_ref.rollout.calculate_log_probs", "", "the sampler's logprobs are always stored"),
        Foreign("actor_rollout_ref.rollout.free_cache_engine", "", "trainer and workers run at the same time"),
        Foreign(
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "groups_per_batch",
            "steps_per_version is data.train_batch_size / ppo_mini_batch_size",
        ),
        Foreign(
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu actor_rollout_ref.actor.ppo_micro_batch_size "
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu actor_rollout_ref.actor.use_dynamic_bsz",
            "max_tokens_per_micro_batch",
            "micro-batches are always packed by tokens",
        ),
        Foreign("actor_rollout_ref.actor.ppo_epochs", "max_uses"),
        Foreign("actor_rollout_ref.actor.optim.lr", "learning_rate"),
        Foreign("actor_rollout_ref.actor.optim.lr_warmup_steps", "warmup_steps"),
        Foreign("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio", "warmup_steps", "ratio * num_steps"),
        Foreign("actor_rollout_ref.actor.optim.lr_scheduler_type", "schedule", "constant or cosine"),
        Foreign("actor_rollout_ref.actor.optim.weight_decay", "weight_decay"),
        Foreign("actor_rollout_ref.actor.optim.betas", "betas"),
        Foreign("actor_rollout_ref.actor.optim.clip_grad actor_rollout_ref.actor.grad_clip", "max_grad_norm"),
        Foreign("actor_rollout_ref.actor.clip_ratio", "clip_low clip_high", "both"),
        Foreign("actor_rollout_ref.actor.clip_ratio_low", "clip_low"),
        Foreign("actor_rollout_ref.actor.clip_ratio_high", "clip_high"),
        Foreign("actor_rollout_ref.actor.clip_ratio_c", "dual_clip", "verl's default is 3.0"),
        Foreign(
            "actor_rollout_ref.actor.loss_agg_mode",
            "loss_normalization",
            "token-mean is tokens, seq-mean-token-mean is sequences, seq-mean-token-sum-norm is constant",
        ),
        Foreign(
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            "objective",
            "vanilla is ppo_clip, geo_mean is gmpo, dppo_tv is dppo; gspo, sapo and cispo have these names",
        ),
        Foreign("actor_rollout_ref.actor.entropy_coeff", "entropy_weight"),
        Foreign(
            "actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff", "router_balance_weight"
        ),
        Foreign("actor_rollout_ref.actor.megatron.override_transformer_config.moe_z_loss_coeff", "router_z_weight"),
        Foreign(
            "actor_rollout_ref.actor.use_kl_loss", "kl_placement", 'kl_placement = "loss", with kl_weight and reference'
        ),
        Foreign(
            "actor_rollout_ref.actor.kl_loss_coef", "kl_weight", "set reference as well, such as to the model itself"
        ),
        Foreign("actor_rollout_ref.actor.kl_loss_type", "kl_estimator", "kl is k1, mse is k2, low_var_kl is k3"),
        Foreign(
            "actor_rollout_ref.actor.fsdp_config.param_offload actor_rollout_ref.actor.fsdp_config.optimizer_offload",
            "",
            "only the reference can be kept in CPU memory: reference_offload",
        ),
        Foreign("actor_rollout_ref.ref.fsdp_config.param_offload", "reference_offload"),
        Foreign("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "", "one rank computes a whole sequence"),
        Foreign("actor_rollout_ref.model.lora_rank", "lora_rank"),
        Foreign("actor_rollout_ref.model.lora_alpha", "lora_alpha"),
        Foreign("actor_rollout_ref.model.target_modules", "lora_targets", "all-linear is the default"),
        Foreign("actor_rollout_ref.model.enable_gradient_checkpointing", "activation_checkpointing"),
        Foreign("actor_rollout_ref.model.use_remove_padding", "", "sequences are always packed without padding"),
        Foreign(
            "algorithm.adv_estimator",
            "algorithm",
            "grpo, rloo, opo and gdpo have these names; reinforce_plus_plus is reinforce_pp, grpo_passk is pass_at_k; "
            "gae and remax have no counterpart",
        ),
        Foreign("algorithm.norm_adv_by_std_in_grpo", "advantage", 'False is advantage = "dr_grpo"'),
        Foreign("algorithm.use_kl_in_reward", "kl_placement", 'kl_placement = "reward"'),
        Foreign("algorithm.kl_ctrl.kl_coef", "kl_weight", "set reference as well; the coefficient is fixed"),
        Foreign("algorithm.kl_penalty", "kl_estimator", "kl is k1, mse is k2, low_var_kl is k3"),
        Foreign("algorithm.gamma", "sql_params", '{"discount": 0.9} with advantage = "turn_returns"'),
        Foreign("algorithm.lam", "", "there is no critic, and so no GAE"),
        Foreign("algorithm.filter_groups.enable", "filters", 'filters = ["drop_zero_variance_groups"]'),
        Foreign("algorithm.rollout_correction.rollout_is_threshold", "is_ratio_cap", "of the objective reinforce"),
        Foreign("algorithm.rollout_correction.rollout_rs_threshold", "is_ratio_bounds is_sequence_ratio_bounds"),
        Foreign("critic.optim.lr critic.model.path", "", "there is no critic; the baselines are computed from groups"),
        Foreign(
            "trainer.total_training_steps",
            "num_steps",
            "a step of verl is data.train_batch_size / ppo_mini_batch_size gradient steps",
        ),
        Foreign("trainer.total_epochs", "num_steps", "rows * epochs / groups_per_batch"),
        Foreign(
            "trainer.n_gpus_per_node", "ranks trainer_gpus worker_gpus", "trainer and workers have GPUs of their own"
        ),
        Foreign("trainer.nnodes", "", "`ludic launch slurm|kubernetes|skypilot ROOT --nodes 2`"),
        Foreign("trainer.save_freq", "checkpoint_every", "in gradient steps; verl's -1 is None"),
        Foreign("trainer.max_actor_ckpt_to_keep", "keep_checkpoints"),
        Foreign("trainer.resume_mode", "", "`ludic run ROOT` resumes by itself"),
        Foreign("trainer.test_freq trainer.val_before_train", "eval_every", "in versions; version 0 is evaluated, too"),
        Foreign("trainer.default_local_dir", "root", "the first argument of each command"),
        Foreign("trainer.project_name", "tracker_project"),
        Foreign("trainer.experiment_name", "tracker_name", "else the last part of the root's location"),
        Foreign("trainer.logger", "log_to", "tensorboard or wandb; the root holds all metrics anyway"),
        Foreign(
            "trainer.rollout_data_dir trainer.log_val_generations", "", "every rollout is stored: `ludic view ROOT`"
        ),
    ),
)

PRIME_RL = Program(
    name="prime-rl",
    settings=(
        Foreign("model.name", "model"),
        Foreign("max_steps", "num_steps", _ENVIRONMENT_STEPS),
        Foreign("seq_len", "max_seq_len", "of the trainer; max_sequence_tokens limits episodes"),
        Foreign("output_dir", "root", "the first argument of each command"),
        Foreign("orchestrator.batch_size", "groups_per_batch", "batch_size / group_size"),
        Foreign("orchestrator.token_batch_size", "groups_per_batch", "a batch is counted in groups"),
        Foreign("orchestrator.group_size", "group_size"),
        Foreign("orchestrator.rollouts_per_example", "group_size", "a name of prime-rl before 0.8"),
        Foreign("orchestrator.max_off_policy_steps", "max_off_policy_steps"),
        Foreign("orchestrator.max_async_level", "batches_ahead", "a name of prime-rl before June 2026"),
        Foreign("orchestrator.concurrency.max_inflight", "in_flight", "of each worker"),
        Foreign("orchestrator.seq_len", "max_sequence_tokens"),
        Foreign(
            "orchestrator.train.source.name orchestrator.train.source.env.taskset.id orchestrator.train.env.id",
            "env",
            'env = ["verifiers/NAME"]; the other keys of the taskset are env_options',
        ),
        Foreign("orchestrator.train.source.ratio", "", "environments take turns"),
        Foreign("orchestrator.train.source.group_size", "group_size", "one for all environments"),
        Foreign("orchestrator.train.sampling.temperature", "temperature"),
        Foreign("orchestrator.train.sampling.max_completion_tokens", "max_tokens"),
        Foreign("orchestrator.train.filter_zero_advantages", "filters", 'filters = ["drop_zero_variance_groups"]'),
        Foreign(
            "orchestrator.algo.type",
            "algorithm",
            'grpo with the default loss is algorithm = "dppo"; opd is distillation, rae is spiral, sft is sft',
        ),
        Foreign("orchestrator.algo.teacher.name", "reference", 'with algorithm = "distillation"'),
        Foreign("orchestrator.model.client.base_url", "server_url", "without /v1"),
        Foreign("orchestrator.eval.interval", "eval_every"),
        Foreign("orchestrator.eval.num_examples", "eval_options", '{"num_examples": 64}'),
        Foreign("orchestrator.eval.group_size", "eval_options", '{"n": 4}'),
        Foreign("orchestrator.eval.source.env.taskset.id", "eval_options", '{"env": ["verifiers/NAME"]}'),
        Foreign("trainer.optim.lr", "learning_rate"),
        Foreign("trainer.optim.type", "", "the optimizer is AdamW"),
        Foreign("trainer.optim.weight_decay", "weight_decay"),
        Foreign("trainer.optim.betas1 trainer.optim.betas2", "betas", "both values"),
        Foreign("trainer.optim.max_norm", "max_grad_norm"),
        Foreign("trainer.scheduler.type", "schedule"),
        Foreign("trainer.scheduler.warmup_steps", "warmup_steps"),
        Foreign("trainer.scheduler.decay_steps trainer.scheduler.min_lr", "", "schedules fall towards 0 at num_steps"),
        Foreign("trainer.loss.dppo_mask_low", "dppo_low"),
        Foreign("trainer.loss.dppo_mask_high", "dppo_high"),
        Foreign("trainer.loss.kl_tau", "log_ratio_weight"),
        Foreign("trainer.loss.adv_tau", "", "write the factor into your own advantage, one SELECT"),
        Foreign(
            "trainer.loss.import_path", "", "an objective is a function in ludic/training/losses.py (ARCHITECTURE.md)"
        ),
        Foreign("trainer.model.seq_len", "max_seq_len"),
        Foreign("trainer.model.lora.rank", "lora_rank"),
        Foreign("trainer.model.lora.alpha", "lora_alpha"),
        Foreign("trainer.model.lora.target_modules", "lora_targets"),
        Foreign("trainer.model.ac", "activation_checkpointing"),
        Foreign("trainer.model.compile", "compile"),
        Foreign("trainer.model.fused_lm_head_token_chunk_size", "logprob_chunk_tokens"),
        Foreign(
            "trainer.model.cp trainer.model.ep trainer.model.dp_replicate", "", "several ranks always shard with FSDP2"
        ),
        Foreign(
            "trainer.model.optim_cpu_offload trainer.model.fsdp_cpu_offload",
            "",
            "weights and optimizer stay on the GPU",
        ),
        Foreign("ckpt.interval", "checkpoint_every"),
        Foreign("ckpt.keep_last", "keep_checkpoints"),
        Foreign("ckpt.keep_interval", "keep_checkpoints_every"),
        Foreign("resume.step resume.dir", "", "`ludic run ROOT` resumes by itself"),
        Foreign("deployment.num_train_gpus", "ranks trainer_gpus"),
        Foreign("deployment.num_infer_gpus", "num_workers worker_gpus"),
        Foreign("inference.vllm.tensor_parallel_size", "tensor_parallel"),
        Foreign("inference.vllm.gpu_memory_utilization", "gpu_memory"),
        Foreign("inference.vllm.max_model_len", "engine_options", '{"max_model_len": 8192}'),
        Foreign("inference.server.port", "", "`ludic serve ROOT --port`"),
        Foreign("weight_broadcast.type rollout_transport.type", "", "all processes meet in the root"),
        Foreign("monitors.wandb.project", "tracker_project", 'with log_to = "wandb"'),
        Foreign("slurm.partition slurm.account slurm.job_name", "", "`ludic launch slurm ROOT --partition --account`"),
    ),
)

PROGRAMS = (TRL, VERL, PRIME_RL)


_IN_PYTHON = {
    "reward_funcs": (
        "reward",
        "functions with TRL's signature are taken as they are, such as reward=[accuracy, length]",
    ),
    "reward_weights": ("reward", "a dict of functions with weights, such as reward={'right': (right, 1.0)}"),
    "train_dataset": ("dataset", ""),
    "eval_dataset": ("heldout", "a share of the questions, or a file"),
}
"""Arguments of ludic.fit in the place of TRL's."""


def answer(name: str, known: Collection[str], shown: Callable[[str], str] = str) -> str | None:
    """Return what a setting of another program is here, as the end of a message; None for a name that none has.

    name: as it was given; of a dotted name, parts between the first and the last may be left out. known: settings that
    may be given here. shown: how a setting is written, such as with hyphens as a flag.
    """
    found = _find(name)
    if found is None:
        return None
    program, full, row = found
    if full in _IN_PYTHON and _IN_PYTHON[full][0] in known:
        row = Foreign(full, *_IN_PYTHON[full])
    if full in {*row.ours.split(), *_OTHER_MEANING}:
        return None
    which = f"{program}'s" if full == name else f"{program}'s {full}"
    if not row.ours:
        return f"{which}; ludic has no counterpart: {row.note} ({PAGE})"
    ours = row.ours.split()
    named = " and ".join(each if each == "root" else shown(each) for each in ours)
    elsewhere = "" if {*ours} & {*known, *_OF_EACH} else ", a setting of another command"
    note = f": {row.note}" if row.note else ""
    return f"{which}; in ludic it is {named}{elsewhere}{note} ({PAGE})"


def answer_word(word: str, known: Collection[str], shown: Callable[[str], str] = str) -> str | None:
    """Return the same for an argument such as actor.lr=1e-6 or --trainer.optim.lr; None for any other word."""
    match = _WORD.fullmatch(word)
    if match is None or (match[2] is None and not word.startswith("--")):
        return None
    return answer(match[1].replace("-", "_"), known, shown)


def dotted_names(name: str, value: Any) -> Iterator[str]:
    """Yield the settings in a table of a file by dotted names, such as trainer.optim.lr; of lists of tables, too."""
    tables = value if isinstance(value, list) else [value]
    if not all(isinstance(each, Mapping) for each in tables):
        yield name
        return
    for table in tables:
        for key, each in table.items():
            yield from dotted_names(f"{name}.{key}", each)


def _find(name: str) -> tuple[str, str, Foreign] | None:
    """Return the program, the full name and the row of a name; None if there is none."""
    rows = [(program.name, full, row) for program in PROGRAMS for row in program.settings for full in row.names.split()]
    parts = name.split(".")
    exact = [each for each in rows if each[1] == name]
    # A name without dots is looked for among names without dots: `n` or `type` alone would mean too much.
    alike = [each for each in rows if len(parts) > 1 and _is_short_for(parts, each[1].split("."))]
    return next(iter(exact or sorted(alike, key=lambda each: each[1].count("."))), None)


def _is_short_for(parts: list[str], full: list[str]) -> bool:
    """Return whether parts are those of a full name in their order, the last one included."""
    rest = iter(full)
    return parts[-1] == full[-1] and all(part in rest for part in parts)
