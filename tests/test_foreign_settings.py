"""Settings of TRL, verl and prime-rl are answered with those of ludic, in flags, files and Python."""

from pathlib import Path

import pytest
import yaml
from command_settings import parsed

import ludic
from ludic.code.kinds import ADVANTAGE, FILTER
from ludic.engines.config import EngineConfig
from ludic.errors import ConfigError
from ludic.foreign_settings import PRIME_RL, PROGRAMS, Foreign, answer, answer_word, dotted_names
from ludic.launch.config import LaunchConfig
from ludic.operations.start import run, worker
from ludic.run_config import RunConfig
from ludic.settings import settings_of
from ludic.training.config import TrainConfig
from ludic.training.presets import algorithm_names

ALL = {each.name: each for owner in (RunConfig, TrainConfig, EngineConfig, LaunchConfig) for each in settings_of(owner)}
ROWS = [(program.name, row) for program in PROGRAMS for row in program.settings]


@pytest.mark.parametrize(("program", "row"), ROWS, ids=lambda each: getattr(each, "names", each))
def test_each_row_names_settings_that_ludic_has_or_says_what_to_do(program: str, row: Foreign):
    assert {*row.ours.split()} <= {*ALL, "root", "algorithm"}
    assert row.ours or row.note
    assert not row.note.endswith(".")


def test_no_setting_of_a_program_is_in_the_table_twice():
    names = [(program, name) for program, row in ROWS for name in row.names.split()]
    assert sorted({*names}) == sorted(names)


def test_the_parts_that_notes_name_exist():
    algorithms = {"grpo", "dr_grpo", "cispo", "sapo", "vespo", "rloo", "opo", "gdpo", "reinforce_pp", "pass_at_k"}
    assert algorithms | {"dppo", "distillation", "spiral", "sft"} <= {*algorithm_names()}
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
        ("[orchestrator]\nbatch_size = 128\ngroup_size = 16", "orchestrator.batch_size is prime-rl's; in ludic it is "),
        (
            '[[orchestrator.train.source]]\nname = "reverse-text"',
            "orchestrator.train.source.name is prime-rl's; in ludic it is env: ",
        ),
        ("seq_len = 2048", "setting 'seq_len' is prime-rl's; in ludic it is max_seq_len: of the trainer"),
        ("[made_up]\nlr = 1", "setting 'made_up' is unknown, and a table; settings of ludic stand above all tables"),
        ("[a]\nlr = 1\n[[b]]\nx = 2", "settings 'a', 'b' are unknown, and a table"),
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


def test_tables_in_a_file_have_dotted_names():
    tables = {"train": {"source": [{"name": "a"}, {"ratio": 1}], "x": [1, 2]}}
    assert [*dotted_names("o", tables)] == ["o.train.source.name", "o.train.source.ratio", "o.train.x"]
    assert PRIME_RL in PROGRAMS


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".toml", ""])
def test_yaml_with_any_setting_of_another_program_is_told_as_yaml(tmp_path: Path, suffix: str):
    file = tmp_path / f"theirs{suffix}"
    for name in (name for _, row in ROWS for name in row.names.split()):
        value: object = 1e-6
        for part in reversed(name.split(".")):
            value = {part: value}
        file.write_text(yaml.safe_dump(value))
        with pytest.raises(ConfigError, match=rf"{file.name} is YAML, wanted TOML; write `[^`]*: [^`]*` as `"):
            parsed(run, "runs/mine", "--config", str(file))
