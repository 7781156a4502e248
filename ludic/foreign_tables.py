"""Settings of TRL, verl and prime-rl, and what they are called in ludic: one table for errors and docs/coming_from.md.

The names are those of TRL 1.16 (GRPOConfig, SFTConfig, DPOConfig and their trainers, with TrainingArguments of
transformers 5.19 and LoraConfig of peft 0.21), verl 0.9 (verl/trainer/config/_generated_ppo_trainer.yaml) and prime-rl
0.8 (packages/prime-rl-configs). A name that ludic has with the same meaning is in the table too, so that the table is
complete; it never leads to an error.
"""

from dataclasses import dataclass


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
    """Another program, or one of its trainers, with its settings."""

    name: str
    config: str
    """Where its settings are, such as GRPOConfig."""
    settings: tuple[Foreign, ...]
    algorithms: tuple[str, ...] = ()
    """Algorithms of ludic that its trainer is; empty for one that is not of a single trainer."""
    but: tuple[str, ...] = ()
    """Algorithms that its trainer is not."""

    def is_for(self, algorithm: str | None) -> bool:
        """Return whether the settings mean something in an algorithm of ludic; None is one that is not known."""
        return algorithm is None or (algorithm not in self.but and algorithm in (self.algorithms or (algorithm,)))


STORED = ("sft", "dpo", "ipo", "orpo")
"""Algorithms that train on the answers of a data set; those of TRL have a trainer of their own for each."""
_ALGORITHM_OF_PAIRS = 'sigmoid is ludic.dpo, ipo is algorithm = "ipo"; ludic has none of the others'
_ROWS_A_STEP = "per_device_train_batch_size * gradient_accumulation_steps * processes"
_PASSES = "one pass is the default of ludic.{0}; `ludic train` takes num_steps, too"
_NO_EVALUATION = "training looks at no loss of other rows; `ludic eval ROOT --env qa/FILE` evaluates its versions"
_PACKED = "sequences are always packed without padding, and never see each other"
_BATCH = "per_device_train_batch_size * gradient_accumulation_steps * processes / num_generations"
_ENVIRONMENT_STEPS = "max_steps of ludic is the most steps of an episode"
_TOOL_CALLS = "tokens limit the calls of tools; max_steps counts the steps of the environment"

GRPO = Program(
    name="TRL",
    config="GRPOConfig",
    but=STORED,
    settings=(
        # The model, the data and the reward
        Foreign(
            "train_dataset", "env", 'env = ["qa/FILE.jsonl"]: a data file, a folder of save_to_disk, or a Hub name'
        ),
        Foreign("eval_dataset", "env_options", "option heldout: another file, or another split"),
        Foreign("reward_funcs", "env_options", 'option scorer = "trl:rewards.py:accuracy", or a list of them'),
        Foreign("reward_weights", "env_options", "option scorer: a table of functions with their weights"),
        Foreign("chat_template_kwargs", "", "change the tokenizer's chat template"),
        Foreign(
            "reward_processing_classes", "", 'option scorer = "model:PATH" reads a reward model with its tokenizer'
        ),
        Foreign("rollout_func", "protocol", "path/to/file.py:function (docs/agents.md)"),
        Foreign("environment_factory", "env", 'env = ["path/to/file.py:ClassName"] (docs/environments.md)'),
        Foreign("tools", "tools", "path/to/file.py:function for each tool"),
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
        Foreign(
            "vllm_model_impl vllm_server_timeout vllm_group_port ds3_gather_for_generation cache_implementation "
            "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged",
            "engine_options",
            "settings of vLLM's engine; the engine of transformers batches by itself",
        ),
        Foreign("vllm_structured_outputs_regex", "", "the trainer could not compute their probabilities"),
        # Batches and steps
        Foreign("per_device_train_batch_size", "groups_per_batch", _BATCH),
        Foreign(
            "generation_batch_size", "groups_per_batch", "generation_batch_size / num_generations / steps_per_version"
        ),
        Foreign(
            "steps_per_generation",
            "steps_per_version",
            "gradient steps between two versions of the weights: steps_per_generation / gradient_accumulation_steps",
        ),
        Foreign("num_iterations", "max_uses"),
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
        Foreign("top_entropy_quantile", "", "all sampled tokens are trained on"),
        Foreign(
            "use_adaptive_entropy entropy_target entropy_coef_min entropy_coef_max entropy_coef_delta",
            "",
            "entropy_weight does not change",
        ),
        Foreign("cast_lm_head_to_fp32", "float32_head"),
        # What is kept and shown
        Foreign("eval_steps", "eval_every", "in versions of the weights"),
        Foreign("eval_strategy", "eval_every", '"no" is None; the first and the last version are evaluated by default'),
        Foreign(
            "per_device_eval_batch_size eval_on_start eval_delay eval_accumulation_steps",
            "",
            "a process of its own evaluates versions of the weights; eval_options are its settings",
        ),
        Foreign("num_generations_eval", "eval_options", '{"n": 4}'),
        Foreign(
            "log_completions num_completions_to_print log_unique_prompts log_multimodal log_completions_hub_repo",
            "tracker_samples_every",
            "for W&B and TensorBoard; every rollout is stored: `ludic view ROOT`",
        ),
    ),
)

SFT = Program(
    name="TRL",
    config="SFTConfig",
    algorithms=("sft",),
    settings=(
        Foreign(
            "train_dataset", "", "dataset of ludic.sft, or `ludic import ROOT FILE --from jsonl` (docs/offline.md)"
        ),
        Foreign(
            "formatting_func dataset_text_field dataset_kwargs", "", "rows have messages, or prompt and completion"
        ),
        Foreign("chat_template_path chat_template_kwargs", "", "change the tokenizer's chat template"),
        Foreign("eval_dataset eval_strategy eval_steps eval_packing", "", _NO_EVALUATION),
        Foreign("num_train_epochs", "epochs", _PASSES.format("sft")),
        Foreign("per_device_train_batch_size", "groups_per_batch", f"rows of a step: {_ROWS_A_STEP}"),
        Foreign("max_length max_seq_length", "max_seq_len", "TRL's default is 1024; ludic's, None, does not cut"),
        Foreign("truncation_mode", "", "the end of the last answer is cut, which is keep_start"),
        Foreign("packing packing_strategy", "", _PACKED),
        Foreign(
            "assistant_only_loss completion_only_loss",
            "",
            "the answers of the assistant, or the completion, are trained on, and nothing else",
        ),
        Foreign("loss_type", "", "nll, its default, is what sft computes; there is no dft"),
        Foreign("eos_token", "", "the model's folder names it"),
        Foreign("compute_loss_func", "", "an objective is a function in ludic/training/losses.py (ARCHITECTURE.md)"),
    ),
)

DPO = Program(
    name="TRL",
    config="DPOConfig",
    algorithms=("dpo", "ipo", "orpo"),
    settings=(
        Foreign("train_dataset", "", "dataset of ludic.dpo; rows have prompt, chosen and rejected"),
        Foreign("beta", "dpo_beta", "of dpo and ipo; ORPOConfig's beta is orpo_weight"),
        Foreign("ref_model", "reference", "the default is the model"),
        Foreign("loss_type", "algorithm", _ALGORITHM_OF_PAIRS),
        Foreign(
            "label_smoothing loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting "
            "discopop_tau",
            "",
            "the loss is that of dpo, ipo or orpo without variations (docs/algorithms.md)",
        ),
        Foreign("precompute_ref_log_probs precompute_ref_batch_size", "reference_cache"),
        Foreign("eval_dataset eval_strategy eval_steps", "", _NO_EVALUATION),
        Foreign("num_train_epochs", "epochs", _PASSES.format("dpo")),
        Foreign("per_device_train_batch_size", "groups_per_batch", f"pairs of a step: {_ROWS_A_STEP}"),
        Foreign(
            "max_length",
            "max_seq_len",
            "of the prompt with one answer; TRL's default is 1024, ludic's, None, does not cut",
        ),
        Foreign("truncation_mode", "", "the end of the answer is cut, which is keep_start"),
    ),
)

ALL_TRAINERS = Program(
    name="TRL",
    config="TrainingArguments",
    settings=(
        # Model and data
        Foreign("processing_class", "", "the tokenizer is that of the model's folder"),
        Foreign("trust_remote_code", "", "code in a model's folder is never run"),
        Foreign("padding_free pad_to_multiple_of pad_token", "", _PACKED),
        Foreign("disable_dropout", "", "dropout is always off"),
        Foreign("neftune_noise_alpha", "", "no noise is added to embeddings"),
        Foreign("label_smoothing_factor", "", "no loss smooths its labels"),
        Foreign(
            "quantization_config load_in_4bit load_in_8bit",
            "",
            'base weights are never quantised; LoRA and optimizer = "adamw_8bit" save memory',
        ),
        Foreign("data_collator dataset_num_proc", "", "rows are converted as they are read"),
        Foreign(
            "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
            "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order train_sampling_strategy "
            "length_column_name group_by_length remove_unused_columns label_names",
            "",
            "a thread reads and packs the batch of the next step",
        ),
        # LoraConfig
        Foreign("r", "lora_rank"),
        Foreign("lora_alpha", "lora_alpha"),
        Foreign("target_modules", "lora_targets", "all-linear is the default"),
        Foreign("lora_dropout", "", "dropout is always off, as in TRL with lora_dropout=0"),
        Foreign(
            "use_rslora", "lora_alpha", "adapters are scaled by lora_alpha / lora_rank: multiply by sqrt(lora_rank)"
        ),
        Foreign(
            "modules_to_save bias lora_bias exclude_modules layers_to_transform layers_pattern rank_pattern "
            "alpha_pattern trainable_token_indices target_parameters layer_replication fan_in_fan_out "
            "ensure_weight_tying",
            "",
            "lora_targets names linear layers; all other weights are frozen",
        ),
        Foreign(
            "init_lora_weights loftq_config eva_config corda_config lora_ga_config use_dora velora_config use_qalora "
            "qalora_group_size monteclora_config use_bdlora arrow_config kasa_config alora_invocation_tokens",
            "",
            "adapters are plain LoRA, whose second matrix begins at 0",
        ),
        # Optimizer and steps
        Foreign("model_init_kwargs", "dtype", 'dtype = "bfloat16"'),
        Foreign("peft_config", "lora_rank lora_alpha lora_targets", "r, lora_alpha and target_modules of LoraConfig"),
        Foreign("shuffle_dataset", "", "each pass over the rows has its own order, which the seed decides"),
        Foreign(
            "gradient_accumulation_steps",
            "max_tokens_per_micro_batch",
            "micro-batches are packed by tokens; groups_per_batch alone sets the batch",
        ),
        Foreign("max_steps", "num_steps", _ENVIRONMENT_STEPS),
        Foreign("router_aux_loss_coef", "router_balance_weight", "TRL's 0 is None; its default is 0.001"),
        Foreign("sync_ref_model ref_model_mixup_alpha ref_model_sync_steps", "", "the reference does not change"),
        Foreign("learning_rate", "learning_rate"),
        Foreign("lr_scheduler_type", "schedule", "constant, linear or cosine"),
        Foreign("warmup_steps", "warmup_steps", "whole steps; a share of the steps must be multiplied"),
        Foreign("warmup_ratio", "warmup_steps", "warmup_ratio * num_steps; a name of older transformers"),
        Foreign("lr_scheduler_kwargs", "", "linear and cosine fall towards 0 at num_steps"),
        Foreign("weight_decay", "weight_decay"),
        Foreign(
            "adam_epsilon optim_args optim_target_modules optimizers optimizer_cls_and_kwargs",
            "",
            "AdamW has learning_rate, betas and weight_decay alone",
        ),
        Foreign("adam_beta1 adam_beta2", "betas", "both values"),
        Foreign("max_grad_norm", "max_grad_norm"),
        Foreign("bf16", "dtype", 'dtype = "bfloat16"'),
        Foreign("gradient_checkpointing", "activation_checkpointing"),
        Foreign(
            "gradient_checkpointing_kwargs activation_offloading use_cache torch_empty_cache_steps",
            "",
            "activation_checkpointing and max_tokens_per_micro_batch limit the memory",
        ),
        Foreign(
            "auto_find_batch_size", "", "micro-batches fit the memory of a GPU unless max_tokens_per_micro_batch is set"
        ),
        Foreign("fp16 bf16_full_eval fp16_full_eval", "dtype", "float32 or bfloat16"),
        Foreign("tf32", "tf32"),
        Foreign("use_cpu no_cuda", "device", 'device = "cpu"'),
        Foreign("torch_compile", "compile"),
        Foreign("torch_compile_backend torch_compile_mode", "", "compile has no options"),
        Foreign("seed data_seed", "seed"),
        Foreign("liger_kernel_config", "", "the losses are computed by torch"),
        Foreign("use_liger_kernel", "logprob_chunk_tokens", "logits are always computed in chunks of so many tokens"),
        Foreign(
            "fsdp fsdp_config deepspeed parallelism_config accelerator_config",
            "ranks",
            "several ranks always shard with FSDP2",
        ),
        Foreign("optim", "optimizer", "adamw_torch is adamw, adamw_bnb_8bit is adamw_8bit; there are no others"),
        Foreign("output_dir", "root", "the first argument of each command"),
        Foreign("save_steps", "checkpoint_every"),
        Foreign(
            "save_strategy", "checkpoint_every", '"steps" with save_steps; "no" is None, which writes one at the end'
        ),
        Foreign(
            "save_only_model save_on_each_node enable_jit_checkpoint", "", "a checkpoint is all that a resume needs"
        ),
        Foreign("save_total_limit", "keep_checkpoints"),
        Foreign(
            "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint",
            "",
            "`ludic run ROOT`, `ludic train ROOT` and the same call resume by themselves",
        ),
        Foreign("report_to", "log_to", "tensorboard or wandb; the root holds all metrics anyway"),
        Foreign("run_name", "tracker_name", "else the last part of the root's location"),
        Foreign("project", "tracker_project"),
        Foreign("trackio_space_id trackio_bucket_id trackio_static_space_id", "", "log_to knows TensorBoard and W&B"),
        Foreign(
            "logging_steps logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter log_level "
            "log_level_replica disable_tqdm include_num_input_tokens_seen skip_memory_metrics",
            "",
            "every step is stored: `ludic watch ROOT`",
        ),
        Foreign(
            "push_to_hub hub_model_id hub_token hub_private_repo hub_strategy hub_always_push hub_revision",
            "",
            "`ludic export ROOT --format hf` writes a folder to upload",
        ),
        # What people hang into a trainer
        Foreign(
            "callbacks compute_metrics preprocess_logits_for_metrics",
            "",
            "pipelines/own_trainer.py is a loop of your own over stored rollouts; metrics are in SQL",
        ),
        Foreign(
            "load_best_model_at_end metric_for_best_model greater_is_better",
            "",
            "every version stays as keep_policies says; `ludic eval compare` finds the best",
        ),
        Foreign(
            "do_train do_eval do_predict prediction_loss_only include_for_metrics batch_eval_metrics "
            "eval_do_concat_batches eval_use_gather_object per_device_eval_batch_size "
            "eval_on_start eval_delay eval_accumulation_steps",
            "",
            "`ludic eval` is a command, and a process, of its own",
        ),
        Foreign(
            "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend "
            "ddp_timeout local_rank average_tokens_across_devices",
            "ranks",
            "`ludic run` starts the ranks; a loss is divided by counts of the whole batch",
        ),
        Foreign("full_determinism debug", "", "batches of a run are replayed bit for bit by replay_batches"),
    ),
)

VERL = Program(
    name="verl",
    config="ppo_trainer.yaml",
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
    config="rl.toml",
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
        Foreign("trainer.optim.type", "optimizer", "adamw is adamw; there is no other but adamw_8bit"),
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

SHORT = Program(
    name="",
    config="",
    settings=(
        Foreign("lr", "learning_rate"),
        Foreign(
            "batch_size", "groups_per_batch", "of rollouts: groups of group_size answers; of sft rows, of dpo pairs"
        ),
        Foreign("n num_return_sequences", "group_size", "answers to a question; of evaluations, n in eval_options"),
        Foreign("max_new_tokens", "max_tokens"),
        Foreign(
            "gpus num_gpus n_gpus", "trainer_gpus worker_gpus", "their numbers, such as 0,1; ranks is how many train"
        ),
        Foreign("workers", "num_workers"),
        Foreign("steps total_steps", "num_steps"),
        Foreign("grad_accum", "max_tokens_per_micro_batch", "groups_per_batch alone sets the batch"),
        Foreign(
            "num_epochs", "epochs", "of offline training; workers sample num_steps = rows * epochs / groups_per_batch"
        ),
        Foreign("resume", "", "`ludic run ROOT` and `ludic train ROOT` resume by themselves"),
        Foreign(
            "stop", "", "an answer ends at eos_token_id of generation_config.json, or at max_tokens; Ctrl-C stops a run"
        ),
        Foreign("logs log_dir logging_dir", "", "logs are files in ROOT/logs, and metrics are SQL"),
    ),
)
"""Short words that people try, of no program alone."""

PROGRAMS = (GRPO, SFT, DPO, ALL_TRAINERS, VERL, PRIME_RL)
