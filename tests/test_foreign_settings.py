"""Settings of TRL, verl and prime-rl are answered with those of ludic, in flags, files and Python."""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_settings import parsed
from peft import LoraConfig
from transformers import TrainingArguments

import ludic
from ludic.adapters.foreign_settings import Foreign, Program, answer, others
from ludic.app.cli.commands import COMMANDS
from ludic.app.cli.main import _INSTEAD, main
from ludic.app.cli.settings import dotted_names, parse
from ludic.app.launch.config import LaunchConfig
from ludic.app.operations.fit import STORED, fit
from ludic.app.operations.start import run, train, worker
from ludic.engines.config import EngineConfig
from ludic.errors import ConfigError
from ludic.run.config import RunConfig
from ludic.settings.flags import answer_word, read_flags
from ludic.settings.kinds import ADVANTAGE, ALGORITHM, FILTER
from ludic.settings.table import convert, settings_of
from ludic.training.config import TrainConfig
from ludic.training.presets import load_algorithm

ALL = {each.name: each for owner in (RunConfig, TrainConfig, EngineConfig, LaunchConfig) for each in settings_of(owner)}
PROGRAMS, SHORT = others().programs, others().short
GRPO, SFT, DPO, ALL_TRAINERS, VERL, PRIME_RL = PROGRAMS
ROWS = [(program.config, row) for program in (*PROGRAMS, SHORT) for row in program.settings]

# Fields of GRPOConfig, SFTConfig and DPOConfig, with those of TRL's own base class, and arguments of their trainers.
TRL_1_16 = {
    "grpo": """
        logging_steps gradient_checkpointing bf16 lr_scheduler_kwargs use_liger_kernel torch_empty_cache_steps
        learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout
        cast_lm_head_to_fp32 remove_unused_columns num_generations num_generations_eval max_completion_length
        ds3_gather_for_generation shuffle_dataset pad_to_multiple_of generation_batch_size steps_per_generation
        temperature top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty
        cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode
        vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
        vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta
        num_iterations epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos
        vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level reward_weights
        multi_objective_aggregation scale_rewards loss_type mask_truncated_completions sync_ref_model
        ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy
        entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
        vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
        vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl log_completions
        log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo
        use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
        vllm_importance_sampling_cap reward_funcs train_dataset eval_dataset processing_class
        reward_processing_classes callbacks optimizers quantization_config peft_config tools rollout_func
        environment_factory
    """,
    "sft": """
        logging_steps gradient_checkpointing bf16 lr_scheduler_kwargs use_liger_kernel torch_empty_cache_steps
        learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef chat_template_path
        dataset_text_field dataset_kwargs dataset_num_proc eos_token max_length truncation_mode shuffle_dataset
        packing packing_strategy padding_free pad_to_multiple_of eval_packing completion_only_loss
        assistant_only_loss loss_type activation_offloading pad_token data_collator train_dataset eval_dataset
        processing_class compute_loss_func compute_metrics callbacks optimizers optimizer_cls_and_kwargs
        preprocess_logits_for_metrics quantization_config peft_config formatting_func
    """,
    "dpo": """
        logging_steps gradient_checkpointing bf16 lr_scheduler_kwargs use_liger_kernel torch_empty_cache_steps
        learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout dataset_num_proc
        max_length truncation_mode padding_free pad_to_multiple_of precompute_ref_log_probs
        precompute_ref_batch_size loss_type loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef
        label_smoothing beta use_weighting discopop_tau activation_offloading sync_ref_model
        ref_model_mixup_alpha ref_model_sync_steps pad_token ref_model data_collator train_dataset eval_dataset
        processing_class compute_metrics callbacks optimizers quantization_config peft_config
    """,
}


SCRIPT = """
    num_generations max_completion_length per_device_train_batch_size gradient_accumulation_steps num_train_epochs beta
    epsilon_high lr_scheduler_type callbacks lora_dropout modules_to_save eval_strategy save_strategy reward_funcs
"""
"""What a script of TRL sets, 14 names."""
WORDS = ("lr", "batch_size", "n", "gpus", "resume", "stop", "logs")


@pytest.mark.parametrize(("program", "row"), ROWS, ids=lambda each: getattr(each, "names", each))
def test_each_row_names_settings_that_ludic_has_or_says_what_to_do(program: str, row: Foreign):
    assert {*row.ours.split()} <= {*ALL, "root", "algorithm"}
    assert row.ours or row.note
    assert not row.note.endswith(".")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.config)
def test_each_program_is_one_that_ludic_knows_and_names_algorithms_of_ludic(program: Program):
    assert program.name in ("TRL", "verl", "prime-rl")
    assert {*program.algorithms, *program.but, *program.by_algorithm} <= {*ALGORITHM.names()}
    assert program.by_algorithm.keys() <= {*program.algorithms}
    theirs = {name for row in program.settings for name in row.names.split()}
    assert {row.names for row in program.in_fit} <= theirs
    assert {row.ours for row in program.in_fit} <= {*inspect.signature(fit).parameters}
    of_algorithms = [row for rows in program.by_algorithm.values() for row in rows]
    assert {row.names for row in of_algorithms} <= theirs
    assert {row.ours for row in of_algorithms} <= {*ALL}


def test_algorithms_of_stored_answers_have_trainers_of_their_own():
    assert STORED == GRPO.but == (*SFT.algorithms, *DPO.algorithms)


def test_names_with_another_meaning_are_ludics_own():
    assert others().other_meaning <= {*ALL}


def test_no_setting_of_a_program_is_in_the_table_twice():
    names = [(program, name) for program, row in ROWS for name in row.names.split()]
    assert sorted({*names}) == sorted(names)
    of_all = {name for row in ALL_TRAINERS.settings for name in row.names.split()}
    short = {name for row in SHORT.settings for name in row.names.split()}
    others = {
        name
        for program in PROGRAMS
        if program.name == "TRL" and program is not ALL_TRAINERS
        for row in program.settings
        for name in row.names.split()
    }
    # The settings of evaluations are of GRPO's trainer where ludic has them, and of no other one.
    assert of_all & others <= {"eval_on_start", "eval_delay", "eval_accumulation_steps", "per_device_eval_batch_size"}
    assert not short & (of_all | others)


def test_the_parts_that_notes_name_exist():
    algorithms = {"grpo", "dr_grpo", "cispo", "sapo", "vespo", "rloo", "opo", "gdpo", "reinforce_pp", "pass_at_k"}
    assert algorithms | {"dppo", "distillation", "spiral", "sft"} <= {*ALGORITHM.names()}
    assert {"grpo", "dr_grpo", "lite_ppo", "gdpo", "overlong", "turn_returns"} <= {*ADVANTAGE.names()}
    assert {"drop_zero_variance_groups", "drop_incomplete_completions"} <= {*FILTER.names()}
    assert {"ppo_clip", "gspo", "sapo", "cispo", "gmpo", "dppo"} <= {*ALL["objective"].choices}
    assert {"tokens", "sequences", "constant"} <= {*ALL["loss_normalization"].choices}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-generations", "8"], "--num-generations is TRL's; in ludic it is --group-size (docs/coming_from.md)"),
        (["--max_completion_length=8"], "--max_completion_length is TRL's; in ludic it is --max-tokens ("),
        (["--no-bf16"], "--no-bf16 is TRL's; in ludic it is --dtype: "),
        (["--beta", "0.1"], "in ludic it is --kl-weight: set reference as well"),
        (["--epsilon", "0.2"], "in ludic it is --clip-low and --clip-high: both, unless"),
        (["--push-to-hub"], "--push-to-hub is TRL's; ludic has no counterpart: `ludic export ROOT --format hf` writes"),
        (["actor.lr=1e-6"], "actor.lr is verl's actor_rollout_ref.actor.optim.lr; in ludic it is --learning-rate ("),
        (["rollout.n=8"], "rollout.n is verl's actor_rollout_ref.rollout.n; in ludic it is --group-size ("),
        (["data.train_batch_size=1024"], "data.train_batch_size is verl's; in ludic it is --groups-per-batch and"),
        (["+algorithm.kl_ctrl.kl_coef=0.01"], "+algorithm.kl_ctrl.kl_coef is verl's; in ludic it is --kl-weight: "),
        (
            ["--trainer.optim.lr", "1e-6"],
            "--trainer.optim.lr is prime-rl's; in ludic it is --learning-rate",
        ),
        (
            ["--orchestrator.batch-size", "9"],
            "--orchestrator.batch-size is prime-rl's; in ludic it is --groups-per-batch",
        ),
    ],
)
def test_a_flag_or_a_word_of_another_program_is_answered_with_ours(args, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parsed(run, "runs/mine", "--env", "moar_cats", *args)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_command_that_does_not_take_our_setting_says_so(capsys):
    with pytest.raises(SystemExit):
        parsed(worker, "runs/mine", "--num-generations", "8")
    assert "in ludic it is --group-size, a setting of another command (" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["reward=1.5", "temperature=1", "a.b=1"])
def test_what_only_looks_like_a_setting_is_a_value(where: str):
    settings = parsed(run, "runs/mine", "--model", "data.seed", "--env", "moar_cats", "--where", where)
    assert (settings.run.model, settings.train.batch.where) == ("data.seed", where)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_generations = 8", "setting 'num_generations' is TRL's; in ludic it is group_size"),
        ("[trainer.optim]\nlr = 3e-6", "trainer.optim.lr is prime-rl's; in ludic it is learning_rate"),
        ('[model]\nname = "Qwen/Qwen3-0.6B"', "model.name is prime-rl's; in ludic it is model"),
        ("[orchestrator]\nbatch_size = 128", "orchestrator.batch_size is prime-rl's; in ludic it is "),
        (
            '[[orchestrator.train.source]]\nname = "reverse-text"',
            "orchestrator.train.source.name is prime-rl's; in ludic it is env: ",
        ),
        ("seq_len = 2048", "setting 'seq_len' is prime-rl's; in ludic it is max_seq_len: for the trainer"),
        (
            "[made_up]\nlr = 1",
            "setting 'made_up' is unknown, and a table; settings of ludic stand above all tables (docs",
        ),
        ("[foo]\nbar = 1", "setting 'foo' is unknown, and a table; settings of ludic stand above all tables (docs"),
        (
            "[foo]\nnum_steps = 1",
            "setting 'foo' is unknown, and a table; settings of ludic stand above all tables: write num_steps = ... at",
        ),
        ("[a]\nlr = 1\n[[b]]\nx = 2", "2 settings are unknown"),
    ],
)
def test_a_file_of_another_program_is_answered_with_ours(tmp_path: Path, text: str, message: str):
    (tmp_path / "theirs.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        parsed(run, "runs/mine", "--config", str(tmp_path / "theirs.toml"))
    assert f"theirs.toml: {message}" in str(caught.value)


def test_a_table_that_is_ludics_own_is_read(tmp_path: Path):
    text = 'model = "m"\nenv = ["qa/a.jsonl"]\n[env_options."qa/a.jsonl".scorer]\nexact = 1\n[objective]\nname = "sft"'
    (tmp_path / "ours.toml").write_text(text)
    settings = parsed(run, "runs/mine", "--config", str(tmp_path / "ours.toml"))
    assert settings.run.env_options == {"qa/a.jsonl": {"scorer": {"exact": 1}}}
    assert settings.train.loss.objective.name == "sft"


def test_python_is_answered_with_ours(tmp_path: Path):
    with pytest.raises(ConfigError, match="'num_generations' is TRL's; in ludic it is group_size"):
        ludic.create(str(tmp_path / "run"), model="m", env="moar_cats", num_generations=8)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="'epsilon_high' is TRL's; in ludic it is clip_high"):
        TrainConfig.of(epsilon_high=0.28)
    assert not (tmp_path / "run").exists()


def test_a_name_that_ludic_has_is_never_answered_with_another():
    assert {answer(name, ALL) for name in ALL} == {None}
    assert {answer_word(word, ALL) for word in ("cats.toml", "a/b.lr=1", "lr=1", "n=8", "trainer.optim.lr")} == {None}


GOOD_FLAGS = """
import sys
read = []
sys.addaudithook(lambda event, values: read.append(str(values[0])) if event == "open" else None)
import ludic.run.config
from ludic.settings.flags import read_flags
from ludic.settings.table import settings_of
from ludic.training.config import TrainConfig
table = settings_of(TrainConfig)
found = read_flags(table, ["--learning-rate", "0.5", "--where", "reward > 0.5", "--betas=0.9", "0.95"])
assert TrainConfig.of(**found).optimizer.learning_rate == 0.5
assert any("/config." in each for each in read)  # config.py, or its bytecode
asked = lambda: [each for each in (*read, *sys.modules) if "coming_from" in each or "foreign" in each]
before = asked()
try:
    read_flags(table, WRONG)
except Exception as error:
    print(error)
print(before, len(asked()) > 0)
"""


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--lr", "1"], "--lr is a short name; in ludic it is --learning-rate (docs/coming_from.md)"),
        (["actor.lr=1"], "actor.lr is verl's actor_rollout_ref.actor.optim.lr; in ludic it is --learning-rate"),
    ],
)
def test_names_of_others_are_read_once_a_name_is_unknown(wrong: list[str], said: str):
    done = subprocess.run(
        [sys.executable, "-c", GOOD_FLAGS.replace("WRONG", repr(wrong))], capture_output=True, text=True, check=True
    )
    told, asked = done.stdout.splitlines()
    assert told.startswith(said)
    assert asked == "[] True"


def test_tables_in_a_file_have_dotted_names():
    tables = {"train": {"source": [{"name": "a"}, {"ratio": 1}], "x": [1, 2]}}
    assert [*dotted_names("o", tables)] == ["o.train.source.name", "o.train.source.ratio", "o.train.x"]
    assert PRIME_RL in PROGRAMS


FOREIGN_NAMES = [name for _, row in ROWS for name in row.names.split()]


@pytest.mark.parametrize(
    ("suffix", "names"),
    [
        pytest.param(".yaml", FOREIGN_NAMES, marks=pytest.mark.slow),
        *((suffix, FOREIGN_NAMES[:: len(FOREIGN_NAMES) // 8]) for suffix in (".yaml", ".yml", ".toml", "")),
    ],
)
def test_yaml_with_any_setting_of_another_program_is_told_as_yaml(tmp_path: Path, suffix: str, names: list[str]):
    file = tmp_path / f"theirs{suffix}"
    for name in names:
        value: object = 1e-6
        for part in reversed(name.split(".")):
            value = {part: value}
        file.write_text(yaml.safe_dump(value))
        with pytest.raises(ConfigError, match=rf"{file.name} is YAML, wanted TOML; write `[^`]*: [^`]*` as `"):
            parsed(run, "runs/mine", "--config", str(file))


# --- TRL's names by algorithm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", TRL_1_16)
def test_every_name_of_a_trainer_of_trl_is_answered_in_its_algorithm(algorithm: str):
    names = {*TRL_1_16[algorithm].split(), *(each.name for each in dataclasses.fields(TrainingArguments))}
    unanswered = {name for name in names if name not in ALL and not answer(name, ALL, algorithm=algorithm)}
    assert unanswered == set()
    assert not any(" leave it out: " in (answer(name, ALL, algorithm=algorithm) or "") for name in names)


def test_every_field_of_a_lora_config_is_answered():
    of_peft_itself = {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"}
    of_peft_itself |= {"inference_mode", "runtime_config", "megatron_config", "megatron_core"}
    names = {each.name for each in dataclasses.fields(LoraConfig)} - of_peft_itself - {*ALL}
    assert {name for name in names if not answer(name, ALL)} == set()


@pytest.mark.parametrize(
    ("algorithm", "name", "ours"),
    [
        ("grpo", "beta", "kl_weight: set reference"),
        ("dpo", "beta", "dpo_beta"),
        ("ipo", "beta", "dpo_beta"),
        ("orpo", "beta", "orpo_weight ("),
        ("sft", "num_train_epochs", "epochs: the default of ludic.sft is one pass"),
        ("dpo", "num_train_epochs", "epochs: the default of ludic.dpo is one pass"),
        ("grpo", "num_train_epochs", "num_steps: rows * epochs / groups_per_batch"),
        ("sft", "per_device_train_batch_size", "groups_per_batch: rows per step"),
        ("dpo", "max_length", "max_seq_len: for the prompt with one answer"),
        ("dpo", "ref_model", "reference: the default is the model"),
        ("sft", "train_dataset", "dataset ("),
        ("grpo", "train_dataset", "dataset ("),
    ],
)
def test_a_name_of_trl_means_what_its_trainer_means_by_it(algorithm: str, name: str, ours: str):
    with pytest.raises(ConfigError) as caught:
        ludic.fit(algorithm=algorithm, model="m", root="runs/mine", **{name: 1})  # type: ignore[call-arg, arg-type]
    assert f"setting '{name}' is TRL's; in ludic it is {ours}" in str(caught.value)
    if algorithm in ("grpo", "sft", "dpo"):
        with pytest.raises(ConfigError) as by_name:
            getattr(ludic, algorithm)(**{name: 1})  # model and root are missing, too
        assert str(by_name.value) == str(caught.value)


@pytest.mark.parametrize("name", ["packing", "completion_only_loss", "assistant_only_loss", "eval_dataset"])
def test_what_has_no_counterpart_in_sft_says_what_to_do(name: str):
    with pytest.raises(ConfigError, match=f"'{name}' is TRL's; ludic has no counterpart: .* \\(docs/coming_from.md\\)"):
        ludic.sft(model="m", root="runs/mine", dataset=[], **{name: 1})  # type: ignore[call-arg]


def test_a_name_of_another_trainer_is_left_out():
    with pytest.raises(ConfigError, match="is TRL's, of GRPOConfig; leave it out: sft has no such setting"):
        ludic.sft(model="m", root="runs/mine", dataset=[], num_generations=8)  # type: ignore[call-arg]


def test_flags_and_a_file_know_the_algorithm_that_they_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for args in (["--algorithm", "dpo", "--beta", "0.1"], ["--beta", "0.1", "--algorithm=dpo"]):
        with pytest.raises(SystemExit):
            parsed(train, "runs/mine", *args)
        assert "--beta is TRL's; in ludic it is --dpo-beta" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parsed(train, "runs/mine", "--beta", "0.1")
    told = capsys.readouterr().err
    assert "--kl-weight: set reference as well" in told
    assert "; with algorithm dpo, ipo: --dpo-beta (" in told
    file = tmp_path / "theirs.toml"
    file.write_text('algorithm = "orpo"\nbeta = 0.1')
    with pytest.raises(ConfigError, match=r"theirs\.toml: setting 'beta' is TRL's; in ludic it is orpo_weight"):
        parsed(train, "runs/mine", "--config", str(file))
    file.write_text("beta = 0.1")
    with pytest.raises(ConfigError, match=r"theirs\.toml: setting 'beta' is TRL's; in ludic it is dpo_beta"):
        parsed(train, "runs/mine", "--config", str(file), "--algorithm", "dpo")


def test_ppo_is_answered_with_what_clips_as_it_does():
    with pytest.raises(ConfigError, match=r"algorithm 'ppo' is unknown: .* grpo and reinforce_pp clip ratios"):
        ludic.fit(algorithm="ppo", model="m", root="runs/mine", dataset=[])  # type: ignore[arg-type]
    assert all(load_algorithm(name)["objective"] == "ppo_clip" for name in ("grpo", "reinforce_pp"))


def test_max_steps_of_a_trainer_is_not_taken_for_that_of_an_episode():
    for algorithm in STORED:
        with pytest.raises(ConfigError, match=f"max_steps does not apply to {algorithm}: .* set num_steps"):
            ludic.fit(algorithm=algorithm, model="m", root="runs/mine", dataset=[], max_steps=100)


# --- All names at once -----------------------------------------------------------------------------------------------


def lines_of(error: ConfigError) -> list[str]:
    assert error.detail is not None
    assert error.detail in error.__notes__  # what Python prints below the message
    return error.detail.splitlines()


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_answers_all_unknown_flags_at_once(name: str, capsys: pytest.CaptureFixture[str]):
    program, wrong = f"ludic {name}", ["--num-generations", "8", "--zzzzz", "--epsilon-high=1"]
    with pytest.raises(SystemExit):
        parse(COMMANDS[name].operation, wrong, program=program, description="")
    first, *answers = capsys.readouterr().err.splitlines()
    assert first == f"ludic: 3 settings are unknown; `{program} --help` lists the options"
    assert [line.partition(" is TRL's; in ludic it is ")[0].strip() for line in answers] == [
        "--num-generations",
        "there is no option --zzzzz",
        "--epsilon-high",
    ]


def test_a_script_of_14_names_gets_14_answers_as_flags_as_a_file_and_as_a_call(tmp_path: Path):
    names = SCRIPT.split()
    with pytest.raises(ConfigError) as by_flags:
        read_flags(settings_of(run), [word for name in names for word in (f"--{name}", "1")])
    file = tmp_path / "theirs.toml"
    file.write_text("".join(f"{name} = 1\n" for name in names))
    with pytest.raises(ConfigError) as by_file:
        parsed(run, "runs/mine", "--config", str(file))
    with pytest.raises(ConfigError) as by_call:
        ludic.grpo(**dict.fromkeys(names, 1))  # type: ignore[arg-type]
    for caught, shown in ((by_flags, "--{}"), (by_file, "setting '{}'"), (by_call, "setting '{}'")):
        assert "14 settings are unknown" in str(caught.value)
        found = lines_of(caught.value)
        assert [line.partition(" is TRL's; ")[0] for line in found] == [shown.format(name) for name in names]
    assert str(by_file.value).startswith(f"{file}: 14 settings")


def test_a_file_of_tables_gets_all_its_answers(tmp_path: Path):
    file = tmp_path / "theirs.toml"
    file.write_text('max_steps = 3\nzzz = 1\n[model]\nname = "m"\n[trainer.optim]\nlr = 1\nnesterov = true\n')
    with pytest.raises(ConfigError) as caught:
        parsed(run, "runs/mine", "--config", str(file))
    assert lines_of(caught.value) == [
        "setting 'zzz' is unknown; docs/settings.md and `--help all` list them",
        "model.name is prime-rl's; in ludic it is model (docs/coming_from.md)",
        "trainer.optim.lr is prime-rl's; in ludic it is learning_rate (docs/coming_from.md)",
        "trainer.optim.nesterov is unknown",
    ]


@pytest.mark.parametrize("owner", [RunConfig, TrainConfig, EngineConfig, LaunchConfig])
def test_settings_by_name_in_python_are_answered_at_once(owner: type):
    with pytest.raises(ConfigError, match="2 settings are unknown") as caught:
        convert(owner, {"num_generations": 8, "zzz": 1})
    assert len(lines_of(caught.value)) == 2


# --- Short names -----------------------------------------------------------------------------------------------------


def test_short_names_are_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parsed(run, "runs/mine", *(f"--{word}" for word in WORDS))
    _, *answers = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in answers] == [f"--{word}" for word in WORDS]
    assert all(" is a short name; " in line for line in answers)
    (tmp_path / "mine.toml").write_text("lr = 1e-6\nbatch_size = 8")
    with pytest.raises(ConfigError) as caught:
        parsed(run, "runs/mine", "--config", str(tmp_path / "mine.toml"))
    assert [line.partition("; in ludic it is ")[2].split()[0] for line in lines_of(caught.value)] == [
        "learning_rate",
        "groups_per_batch:",
    ]
    with pytest.raises(ConfigError, match="'lr' is a short name; in ludic it is learning_rate"):
        ludic.sft(model="m", root="runs/mine", dataset=[], lr=1e-5)  # type: ignore[call-arg]


def test_one_hyphen_too_few_is_no_short_name(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(COMMANDS["eval"].operation, ["runs/mine", "-n", "4"], program="ludic eval", description="")
    assert "there is no option -n; did you mean --n?" in capsys.readouterr().err


def test_epochs_of_a_run_that_samples_are_steps():
    with pytest.raises(ConfigError, match="set offline, or num_steps = rows \\* epochs / groups_per_batch"):
        TrainConfig.of(epochs=3)


@pytest.mark.parametrize("word", ["start", "resume", "stop", "status", "logs"])
def test_a_command_that_people_look_for_is_answered(word: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([word, "runs/mine"])
    assert ended.value.code == 2
    assert f"ludic: there is no command '{word}'; {_INSTEAD[word]}\n" == capsys.readouterr().err
