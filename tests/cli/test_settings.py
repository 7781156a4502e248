"""Settings from flags, a TOML file, and an earlier start, in that order of say."""

import io
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import tyro

from ludic.cli import train, worker
from ludic.cli.settings import RootUrl, field_names, given_settings, parse
from ludic.errors import ConfigError
from ludic.launch.flags import to_flags
from ludic.store import Root, RunConfig
from ludic.store.attempts import start_attempt
from ludic.training.config import TrainConfig
from ludic.training.objectives import without_ignored
from ludic.training.presets import load_algorithm

OPTIONS = "; `ludic example --help` lists the options"


@dataclass(frozen=True, kw_only=True)
class Nested:
    learning_rate: float = 0.1
    filters: tuple[str, ...] = ()
    max_lag: int | None = 8
    options: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False

    def __post_init__(self) -> None:
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}, wanted a number above 0")


@dataclass(frozen=True, kw_only=True)
class Example:
    root: RootUrl
    nested: tyro.conf.OmitArgPrefixes[Nested] = field(default_factory=Nested)
    ranks: int = 1
    format: Literal["csv", "json"] = "csv"


def parsed(*args: str, earlier: Mapping[str, Any] | None = None) -> Example:
    return parse(Example, args, program="ludic example", description="An example", earlier=earlier)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What went to stderr, which ends with its only line break."""
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text.removesuffix("\n")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "example.toml"
    path.write_text(
        'learning_rate = 0.5\nfilters = ["a", "b"]\nresume = true\nranks = 3\noptions = { moar_cats = { n = 2 } }\n'
    )
    return path


def test_a_file_sets_options_nested_ones_too(config: Path) -> None:
    settings = parsed("here", "--config", str(config))
    options = {"moar_cats": {"n": 2}}
    nested = Nested(learning_rate=0.5, filters=("a", "b"), resume=True, options=options)
    assert settings == Example(root="here", nested=nested, ranks=3)


def test_flags_overrule_the_file_wherever_they_stand(config: Path) -> None:
    args = ["--ranks", "2", "--config", str(config), "--filters", "c", "--no-resume"]
    settings = parsed("here", *args)
    assert (settings.ranks, settings.nested.filters, settings.nested.resume) == (2, ("c",), False)
    assert settings.nested.learning_rate == 0.5


def test_an_earlier_start_is_overruled_by_the_file_and_the_file_by_flags(config: Path) -> None:
    earlier = {"learning_rate": 0.25, "max_lag": None, "ranks": 7}
    settings = parsed("here", "--config", str(config), "--ranks", "2", earlier=earlier)
    assert settings.nested.learning_rate == 0.5
    assert settings.nested.max_lag is None
    assert settings.ranks == 2


def test_an_unknown_key_names_the_file_and_the_likely_one(tmp_path: Path) -> None:
    path = tmp_path / "typo.toml"
    path.write_text("learing_rate = 0.5")
    with pytest.raises(
        ConfigError, match=r"typo\.toml: no setting is called 'learing_rate'; did you mean 'learning_rate'\?"
    ):
        parsed("here", "--config", str(path))


def test_a_key_like_no_other_is_answered_with_all_there_are(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text("zzz = 1")
    with pytest.raises(ConfigError, match="'zzz'; there are learning_rate, filters, max_lag, options, resume, ranks"):
        parsed("here", "--config", str(path))


def test_what_is_given_by_position_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "root.toml"
    path.write_text('root = "elsewhere"')
    with pytest.raises(ConfigError, match="no setting is called 'root'"):
        parsed("here", "--config", str(path))


@pytest.mark.parametrize("content", [b"ranks = ", b"\xff\xfe", b"ranks = 1\nranks = 2"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml: "):
        parsed("here", "--config", str(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: .*No such file"):
        parsed("here", "--config", str(tmp_path / "none.toml"))


def test_config_without_a_file_is_explained() -> None:
    with pytest.raises(ConfigError, match="--config needs a TOML file after it"):
        parsed("here", "--config")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('ranks = "many"', "ranks is 'many', wanted an integer"),
        ("ranks = true", "ranks is True, wanted an integer"),
        ('learning_rate = "1e-6"', "learning_rate is '1e-6', wanted a number"),
        ('max_lag = "8"', "max_lag is '8', wanted an integer or \"None\""),
        ('resume = "yes"', "resume is 'yes', wanted true or false"),
        ('filters = ["a", 1]', "filters is ['a', 1], wanted a list, each a string"),
        ("options = 1", "options is 1, wanted a table"),
        ('format = "xml"', "format is 'xml', wanted one of 'csv', 'json'"),
    ],
)
def test_a_value_of_the_wrong_type_names_file_and_setting(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "type.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{path}: {message}')}$"):
        parsed("here", "--config", str(path))


def test_none_and_a_single_value_of_a_list_fit(tmp_path: Path) -> None:
    path = tmp_path / "type.toml"
    path.write_text('max_lag = "None"\nfilters = "a"\nlearning_rate = 1\n')
    nested = parsed("here", "--config", str(path)).nested
    assert (nested.max_lag, nested.filters, nested.learning_rate) == (None, ("a",), 1.0)


@pytest.mark.parametrize("command", ["create", "worker", "train", "run"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm = 3", "algorithm is 3, wanted one of cispo, dapo, "),
        ('algorithm = "grp"', "algorithm 'grp' is unknown; did you mean 'grpo'"),
        ('algorithm = "zzz"', "algorithm 'zzz' is unknown; there are cispo, dapo, "),
        ('accept_incomplete = "yes"', "accept_incomplete is 'yes', wanted true or false"),
        ("group_size = true", "group_size is True, wanted an integer"),
    ],
)
def test_every_command_checks_the_whole_experiment(
    ludic, started, tmp_path: Path, command: str, text: str, message: str
) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(text)
    result = ludic(command, started.url, "--config", path)
    assert result.code == 1
    assert result.err.startswith(f"ludic: {path}: {message}")


def test_a_worker_takes_its_own_of_an_experiment(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text('env = ["moar_cats"]\nlearning_rate = 0.5\nalgorithm = "grpo"\nin_flight = 3\n')
    settings = parse(worker.Settings, ["here", "--config", str(path)], program="ludic worker", description="")
    assert settings.worker.in_flight == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["here", "--learning-rate", "nan"], "learning_rate is nan, wanted a number above 0"),
        (["here", "--ranks"], "Missing value for argument '--ranks'. Expected 1 values"),
        (["here", "there"], "Unrecognized options: there"),
        ([], "missing: ROOT"),
        (["here", "--options", "[]"], "--options: [] is no JSON object"),
        (["here", "--format", "xml"], "invalid choice 'xml' for argument '--format'. Expected one of ('csv', 'json')"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_wrong_usage_is_answered_with_2_and_a_line(
    args: list[str], message: str, encoding: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    with pytest.raises(SystemExit) as ended:
        parsed(*args)
    assert ended.value.code == 2
    assert one_line(capsys) == f"ludic: {message}{OPTIONS}"


def test_help_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("--help")
    assert ended.value.code in (0, None)
    out, err = capsys.readouterr()
    assert "--learning-rate" in out
    assert err == ""


@pytest.mark.parametrize("command", ["run", "train"])
def test_help_has_no_line_break_within_a_sentence(ludic, command: str) -> None:
    rows = [row.strip("│ ") for row in ludic(command, "--help").out.splitlines()]
    assert "" not in rows[4:]
    text = " ".join(" ".join(rows).split())
    assert "Without this flag, code that came with somebody else's root is refused" in text
    # Rows have up to 70 columns; the last word stays with the default behind it.
    for row, following in pairwise(rows):
        if row and following[:1].islower() and not row.startswith(("-", "╭", "─")):
            assert len(row) + len(following.split()[0]) > 55, row


def test_an_algorithm_is_named_in_a_file_and_what_is_set_besides_overrules_it(tmp_path: Path) -> None:
    # dapo clips at .2 and .28, and drops groups of equal rewards
    path = tmp_path / "experiment.toml"
    path.write_text('algorithm = "dapo"\nclip_high = 0.4\n')
    settings = train_settings("here", "--config", str(path), "--filters", "drop_errors")
    assert (settings.batch.advantage, settings.loss.objective) == ("grpo", "ppo_clip")
    assert (settings.loss.clip_low, settings.loss.clip_high) == (0.2, 0.4)
    assert settings.batch.filters == ("drop_errors",)


def test_an_algorithm_among_the_flags_overrules_that_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text('algorithm = "dapo"\nlearning_rate = 0.5\n')
    for flags in (["--algorithm", "sft"], ["--algorithm=sft"]):
        settings = train_settings("here", "--config", str(path), *flags)
        assert settings == TrainConfig.of(**load_algorithm("sft"), learning_rate=0.5)


def test_an_unknown_algorithm_is_answered_with_a_close_one(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text('algorithm = "dappo"')
    for args in (["--algorithm", "dappo"], ["--config", str(path)]):
        with pytest.raises(ConfigError, match=r"algorithm 'dappo' is unknown; did you mean .*dapo"):
            train_settings("here", *args)


@pytest.mark.parametrize("command", ["train", "run"])
@pytest.mark.parametrize("flag", ["--config", "--algorithm"])
def test_a_flag_that_decides_others_is_given_once(ludic, started, command: str, flag: str) -> None:
    for flags in ([flag, "dapo", flag, "sft"], [f"{flag}=dapo", f"{flag}=sft"]):
        result = ludic(command, started.url, *flags)
        assert (result.code, result.err) == (1, f"ludic: {flag} is given twice\n")


@pytest.mark.parametrize("command", ["run", "train"])
def test_algorithm_is_in_the_list_of_options_with_its_choices(ludic, command: str) -> None:
    options = ludic(command, "--help").out.partition("options")[2]
    index = options.index("--algorithm {")
    assert {"cispo", "dapo", "sft"} <= set(re.findall(r"\w+", options[index : index + 300]))


def train_settings(*args: str) -> TrainConfig:
    return parse(train.Settings, args, program="ludic train", description="").train


def test_settings_survive_the_way_through_flags() -> None:
    values = {"learning_rate": 1e-06, "filters": ("a",), "max_lag": None, "options": {"a": {"b": [1]}}, "resume": True}
    assert to_flags(values)[:2] == ["--learning-rate", "1e-06"]
    assert parsed("here", *to_flags(values)).nested == Nested(**values)


def test_names_are_those_of_the_flags() -> None:
    assert [*field_names(Example)] == ["learning_rate", "filters", "max_lag", "options", "resume", "ranks", "format"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["stats", "verify"])
def test_a_command_takes_its_options_from_a_file(ludic, trained, tmp_path: Path, command: str) -> None:
    path = tmp_path / "json.toml"
    path.write_text("json = true")
    assert ludic(command, trained.url, "--config", path).out.startswith("{")
    assert not ludic(command, trained.url, "--config", path, "--no-json").out.startswith("{")


def test_a_resumed_trainer_takes_over_the_settings_of_the_one_before(trained) -> None:
    earlier = train.earlier_settings(trained.url, {})
    settings = parse(
        train.Settings, [trained.url, "--num-steps", "9"], program="ludic train", description="", earlier=earlier
    )
    assert settings.train.num_steps == 9
    assert settings.train.batch.filters == ("drop_zero_variance_groups",)
    assert settings.train.optimizer.learning_rate == 1e-3


CLIPPED = {"objective": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3, "learning_rate": 0.25}
WITH_KL = {"objective": "ppo_clip", "clip_high": 0.3, "reference": "first", "kl_weight": 0.5, "kl_placement": "reward"}


def resumed_with(folder: Path, before: Mapping[str, Any], *args: str) -> TrainConfig:
    """Settings of `ludic train` with these flags where an earlier trainer had those."""
    root = Root.create(str(folder / "run"), RunConfig(model="model", env=("moar_cats",)))
    start_attempt(root, config=json.loads(json.dumps(TrainConfig.of(**before).flat())))
    earlier = train.earlier_settings(root.url, given_settings(args, ("objective", "kl_weight", "algorithm")))
    return parse(train.Settings, [root.url, *args], program="ludic train", description="", earlier=earlier).train


@pytest.mark.parametrize("flags", [["--objective", "reinforce"], ["--objective=ppo_clip", "--objective=reinforce"]])
def test_another_objective_drops_what_it_ignores_of_the_trainer_before(tmp_path: Path, flags: list[str]) -> None:
    assert resumed_with(tmp_path, CLIPPED, *flags) == TrainConfig.of(objective="reinforce", learning_rate=0.25)


def test_an_objective_that_reads_them_keeps_the_settings_of_the_trainer_before(tmp_path: Path) -> None:
    assert resumed_with(tmp_path, CLIPPED, "--objective", "cispo") == TrainConfig.of(**CLIPPED | {"objective": "cispo"})


def test_a_run_that_an_older_version_began_keeps_its_settings(tmp_path: Path) -> None:
    root = Root.create(str(tmp_path / "run"), RunConfig(model="model", env=("moar_cats",)))
    root.put("attempts/1.json", Path(__file__).parents[1].joinpath("golden", "attempt-former-names.json").read_bytes())
    earlier = train.earlier_settings(root.url, {})
    settings = parse(train.Settings, [root.url], program="ludic train", description="", earlier=earlier).train
    assert settings == TrainConfig.of(
        num_steps=40,
        learning_rate=0.004,
        max_off_policy_steps=8,
        objective="ppo_clip",
        clip_high=0.28,
        is_ratio_bounds=(0.5, 2.0),
        is_sequence_ratio_bounds=(0.5, 2.0),
        loss_normalization="sequences",
        reference="first",
        kl_weight=0.04,
        kl_placement="reward",
        rollout_timeout_s=60.0,
        max_tokens_per_micro_batch=512,
        lora_targets=("q_proj", "v_proj"),
        lora_rank=8,
        sql_params={"margin": 4},
        device="cpu",
    )


def test_a_flag_of_an_older_version_names_its_successor(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_settings("here", "--stall-limit-s", "5")
    assert "there is no option --stall-limit-s; did you mean --rollout-timeout-s?" in capsys.readouterr().err


def test_no_kl_drops_how_it_was_used(tmp_path: Path) -> None:
    without = {name: value for name, value in WITH_KL.items() if not name.startswith("kl")}
    assert resumed_with(tmp_path, WITH_KL, "--kl_weight", "None") == TrainConfig.of(**without)


def test_an_objective_of_a_preset_drops_what_it_ignores(tmp_path: Path) -> None:
    settings = resumed_with(tmp_path, WITH_KL | {"is_ratio_bounds": (0.5, 2.0)}, "--algorithm", "sft")
    assert settings == TrainConfig.of(**load_algorithm("sft"), reference="first")


def test_what_is_given_now_is_refused_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((ConfigError, SystemExit)):
        resumed_with(tmp_path, CLIPPED, "--objective", "reinforce", "--clip-low", "0.2")
    assert "clip_low is 0.2, which reinforce ignores" in capsys.readouterr().err


def test_an_algorithm_keeps_nothing_of_the_algorithm_before() -> None:
    distilled = train_settings(
        "here", "--algorithm", "distillation", "--reference", "teacher", "--learning-rate", "0.5"
    )
    assert (distilled.loss.kl_weight, distilled.loss.kl_estimator, distilled.loss.kl_placement) == (1.0, "k1", "reward")
    earlier = without_ignored(distilled.flat())
    args = ["here", "--algorithm", "grpo"]
    settings = parse(train.Settings, args, program="ludic train", description="", earlier=earlier).train
    assert settings == TrainConfig.of(**load_algorithm("grpo"), reference="teacher", learning_rate=0.5)
    assert (settings.loss.kl_weight, settings.loss.kl_estimator, settings.loss.kl_placement) == (None, "k3", "loss")


def test_settings_that_an_earlier_trainer_ignored_do_not_keep_it_from_being_resumed(tmp_path: Path) -> None:
    root = Root.create(str(tmp_path / "run"), RunConfig(model="model", env=("moar_cats",)))
    start_attempt(root, config={"objective": "sft", "ratio_level": "sequence", "dpo_beta": 0.5, "learning_rate": 0.25})
    earlier = train.earlier_settings(root.url, {})
    settings = parse(train.Settings, [root.url], program="ludic train", description="", earlier=earlier)
    assert settings.train == TrainConfig.of(objective="sft", learning_rate=0.25)
