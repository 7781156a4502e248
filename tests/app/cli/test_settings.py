"""Settings from flags, a TOML file, and an earlier start, in that order of say."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from command_settings import parsed as parsed_of
from command_settings import train_settings

import ludic
from ludic.app.cli.commands import COMMANDS
from ludic.app.cli.settings import parse, settings_of_command
from ludic.app.operations.start import run, train, worker
from ludic.errors import ConfigError
from ludic.root.attempts import start_attempt
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run
from ludic.settings.flags import MOST_LISTED, first_options, run_script
from ludic.settings.table import Range, Setting, SettingsError, check, settings_of, to_flags
from ludic.training.config import ON_CPU, LossConfig, PpoClip, TrainConfig
from ludic.training.inherited_settings import next_config
from ludic.training.presets import load_algorithm

OPTIONS = "; `ludic example --help` lists the options"


@dataclass(frozen=True, kw_only=True)
class Nested:
    """What is nested. A second sentence."""

    learning_rate: Annotated[float, Range(0, 1000, above=True)] = 0.1
    """Peak learning rate."""
    filters: tuple[str, ...] = ()
    max_lag: Annotated[int, Range(0, 100)] | None = 8
    options: Mapping[str, Any] = field(default_factory=dict)
    resume: bool = False
    keep_mask: bool | None = None
    betas: Annotated[tuple[float, float], Range(0, 1)] = (0.5, 0.9)

    def __post_init__(self) -> None:
        check(self)
        if self.keep_mask and self.max_lag is None:
            raise ConfigError("keep_mask needs max_lag")


def example(
    run: "ludic.Run",
    *,
    nested: Nested,
    ranks: Annotated[int, Range(1, 64)] = 1,
    format: Literal["csv", "json"] = "csv",
) -> None:
    """An operation."""


def parsed(*args: str) -> SimpleNamespace:
    return parsed_of(example, *args)


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
    assert (settings.root, settings.nested, settings.ranks, settings.format) == ("here", nested, 3, "csv")


def test_flags_overrule_the_file_wherever_they_stand(config: Path) -> None:
    args = ["--ranks", "2", "--config", str(config), "--filters", "c", "--no-resume"]
    settings = parsed("here", *args)
    assert (settings.ranks, settings.nested.filters, settings.nested.resume) == (2, ("c",), False)
    assert settings.nested.learning_rate == 0.5


def test_an_earlier_start_is_overruled_by_the_file_and_the_file_by_flags(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text("learning_rate = 0.5\nweight_decay = 0.1\n")
    earlier = {"learning_rate": 0.25, "weight_decay": 0.2, "max_grad_norm": None}
    settings = resumed_with(tmp_path, earlier, "--config", str(path), "--weight-decay", "0.3").optimizer
    assert (settings.learning_rate, settings.weight_decay, settings.max_grad_norm) == (0.5, 0.3, None)


def test_an_unknown_key_names_the_file_and_the_likely_one(tmp_path: Path) -> None:
    path = tmp_path / "typo.toml"
    path.write_text("learing_rate = 0.5")
    with pytest.raises(
        ConfigError, match=r"typo\.toml: setting 'learing_rate' is unknown; did you mean 'learning_rate'\?"
    ):
        parsed("here", "--config", str(path))


def test_a_key_like_no_other_is_answered_with_all_there_are(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text("zzz = 1")
    with pytest.raises(
        ConfigError, match=r"'zzz' is unknown; there are ranks, format, learning_rate, filters, .*, betas"
    ):
        parsed("here", "--config", str(path))


def test_what_is_given_by_position_is_no_key(tmp_path: Path) -> None:
    path = tmp_path / "root.toml"
    path.write_text('root = "elsewhere"')
    with pytest.raises(ConfigError, match="setting 'root' is unknown"):
        parsed("here", "--config", str(path))


@pytest.mark.parametrize("content", [b"ranks = ", b"\xff\xfe", b"ranks = 1\nranks = 2"])
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.toml: "):
        parsed("here", "--config", str(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"none\.toml: there is no such file in /.*; --config wants a TOML or JSON file"
    ):
        parsed("here", "--config", str(tmp_path / "none.toml"))


def test_a_file_of_json_sets_the_same(tmp_path: Path) -> None:
    path = tmp_path / "example.json"
    values = {"learning_rate": 0.5, "filters": ["a"], "max_lag": None, "options": {"a": [1]}, "betas": [0.1, 0.2]}
    path.write_text(json.dumps(values))
    nested = parsed("here", "--config", str(path)).nested
    assert nested == Nested(learning_rate=0.5, filters=("a",), max_lag=None, options={"a": [1]}, betas=(0.1, 0.2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('ranks = "many"', "ranks is 'many', wanted a whole number"),
        ("ranks = true", "ranks is True, wanted a whole number"),
        ('learning_rate = "1e-6"', "learning_rate is '1e-6', wanted a number"),
        ('max_lag = "8"', "max_lag is '8', wanted a whole number or None"),
        ('resume = "yes"', "resume is 'yes', wanted true or false"),
        ('filters = ["a", 1]', "filters is ['a', 1], wanted a list, each a text"),
        ("options = 1", "options is 1, wanted a table"),
        ("ranks = 0", "ranks is 0, wanted at least 1"),
        ("ranks = 2.5", "ranks is 2.5, wanted a whole number"),
        ("learning_rate = nan", "learning_rate is nan, wanted a number above 0"),
        ("betas = [0.9]", "betas is [0.9], wanted 2 values, each a number"),
        ("betas = [0.9, 2]", "betas is [0.9, 2], wanted at most 1"),
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


@pytest.mark.parametrize("command", ["worker", "train", "run"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algorithm = 3", "algorithm is 3, wanted a name or None"),
        ('algorithm = "grp"', "algorithm 'grp' is unknown; did you mean 'grpo'"),
        ('algorithm = "zzz"', "algorithm 'zzz' is unknown; there are cispo, dapo, "),
        ('accept_incomplete = "yes"', "accept_incomplete is 'yes', wanted true or false"),
        ("group_size = true", "group_size is True, wanted a whole number"),
        ("group_size = 0", "group_size is 0, wanted at least 1"),
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
    assert parsed_of(worker, "here", "--config", str(path)).worker.in_flight == 3


@pytest.mark.parametrize("operation", [worker, train, run])
def test_a_file_for_ludic_run_serves_the_commands_that_take_a_part_of_it(operation: Any, tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    settings = 'env = ["moar_cats"]\nmodel = "m"\neval_every = 20\nlocal_workers = 2\nengine = "vllm"\n'
    path.write_text(settings)
    values = parse(operation, ["here", "--config", str(path)], program="ludic example", description="")
    assert values.get("eval_every") == (20 if operation is run else None)
    path.write_text(settings.replace("eval_every", "eval_evry"))
    with pytest.raises(ConfigError, match=r"experiment\.toml: setting 'eval_evry' is unknown"):
        parse(operation, ["here", "--config", str(path)], program="ludic example", description="")
    path.write_text(settings.replace("= 20", "= 0"))
    with pytest.raises(ConfigError, match=r"experiment\.toml: eval_every is 0, wanted at least 1"):
        parse(operation, ["here", "--config", str(path)], program="ludic example", description="")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["here", "--learning-rate", "nan"], "--learning-rate is nan, wanted a number above 0"),
        (["here", "--ranks", "2.5"], "--ranks is '2.5', wanted a whole number"),
        (["here", "--ranks=65"], "--ranks is 65, wanted at most 64"),
        (["here", "--ranks"], "--ranks needs a value: a whole number"),
        (["here", "--config"], "--config needs a value: a TOML file"),
        (["here", "--resume=true"], "--resume takes no value"),
        (["here", "there"], "'there' is one argument too many"),
        (["here", "--max-lag", "x"], "--max-lag is 'x', wanted a whole number or None"),
        (["here", "--betas", "0.9"], "--betas is '0.9', wanted 2 values, each a number"),
        (["here", "--betas", "0.9", "1.5"], "--betas is 0.9 1.5, wanted at most 1"),
        (["here", "--options", "[]"], "--options is '[]', wanted a JSON object"),
        (["here", "--format", "xml"], "--format is 'xml', wanted one of 'csv', 'json'"),
    ],
)
def test_wrong_usage_is_answered_with_2_and_a_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*args)
    assert ended.value.code == 2
    assert one_line(capsys) == f"ludic: {message}{OPTIONS}"


def test_settings_that_contradict_each_other_are_told_from_wrong_values() -> None:
    with pytest.raises(SettingsError, match="keep_mask needs max_lag"):
        parsed("here", "--keep-mask", "--max-lag", "None")


def test_a_missing_root_is_said_to_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("--filters", "a", "here")
    assert ended.value.code == 2
    assert one_line(capsys) == "ludic: missing: ROOT; ROOT comes first: ludic example ROOT [OPTIONS]"


@pytest.mark.parametrize(
    ("args", "value"),
    [([], None), (["--keep-mask"], True), (["--no-keep-mask"], False), (["--keep-mask", "None"], None)],
)
def test_a_switch_may_have_a_third_state(args: list[str], value: bool | None) -> None:
    assert parsed("here", *args).nested.keep_mask is value


def test_a_repeated_flag_counts_as_its_last_one() -> None:
    settings = parsed("here", "--ranks", "2", "--filters", "a", "b", "--ranks=3", "--filters", "c")
    assert (settings.ranks, settings.nested.filters) == (3, ("c",))


def test_options_may_stand_before_the_root_and_have_underscores() -> None:
    assert parsed("--max_lag", "3", "here", "--no_resume").nested.max_lag == 3


def test_help_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed("--help")
    assert ended.value.code in (0, None)
    out, err = capsys.readouterr()
    assert "--learning-rate" in out
    assert err == ""


@pytest.mark.parametrize("command", ["run", "train"])
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_help_has_no_line_break_within_a_sentence(ludic, command: str, columns: int, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = ludic(command, "--help", "all").out.splitlines()
    assert max(map(len, rows)) <= min(columns, 120)
    text = " ".join(" ".join(rows).split())
    assert "Without this flag, code that came with somebody else's root is refused" in text


def options_of(name: str) -> list[Setting]:
    return [each for each in settings_of_command(COMMANDS[name].operation) if each.has_flag]


PAGES = [name for name in COMMANDS if len(options_of(name)) > MOST_LISTED]


@pytest.mark.parametrize("command", PAGES)
def test_the_first_page_of_help_has_a_dozen_options_and_the_names_of_groups(ludic, command: str) -> None:
    page = ludic(command, "--help").out
    settings = settings_of_command(COMMANDS[command].operation)
    options = re.findall(r"^  (--[\w-]+)", page.partition("more options")[0], re.MULTILINE)
    assert options == [each.flag for each in first_options([each for each in settings if each.has_flag])]
    assert 7 <= len(options) <= 17
    groups = {each.group for each in settings if each.group}
    assert {*re.findall(r"^  --help (\w+)", page, re.MULTILINE)} == groups
    for group in groups:
        shown = ludic(command, "--help", group).out
        for each in settings:
            assert bool(re.search(rf"^  {each.flag}\b(?!-)", shown, re.MULTILINE)) == (
                group in (each.group, each.name)
            ), each.flag
    whole = ludic(command, "--help", "all").out
    assert all(each.flag in whole for each in settings if each.has_flag)


def test_help_explains_one_option_and_refuses_what_is_none(ludic) -> None:
    text = ludic("train", "--help", "warmup-steps").out
    assert "--warmup-steps INT" in text
    assert "--learning-rate" not in text
    refused = ludic("train", "--help", "optimiser")
    assert (refused.code, refused.err) == (
        2,
        "ludic: group or option 'optimiser' is unknown; did you mean 'optimizer'? There are train, batch, loss, "
        "optimizer, model, checkpoint, tracker, code, all\n",
    )


def test_a_script_gets_its_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def main(root: str, sizes: tuple[int, ...] = (1,), quick: bool = False) -> None:
        """Measure it.

        Args:
            root: Folder of the run,
                which is long.
            sizes: Sizes to measure.
        """
        calls.append((root, sizes, quick))

    run_script(main, ["--root", "here", "--sizes", "3", "4", "--quick"])
    assert calls == [("here", (3, 4), True)]
    with pytest.raises(SystemExit) as ended:
        run_script(main, ["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "Measure it." in out
    assert "Folder of the run, which is long. (required)" in " ".join(out.split())
    for args, message in [
        (["--sizes", "x", "--root", "r"], "--sizes is 'x', wanted a list"),
        (["--root", "r", "--config", "x"], "there is no option --config"),
        ([], "missing: --root"),
    ]:
        with pytest.raises(SystemExit) as ended:
            run_script(main, args)
        assert ended.value.code == 2
        assert message in one_line(capsys)
    assert len(calls) == 1


def test_an_algorithm_is_named_in_a_file_and_what_is_set_besides_overrules_it(tmp_path: Path) -> None:
    # dapo clips at .2 and .28, and drops groups of equal rewards
    path = tmp_path / "experiment.toml"
    path.write_text('algorithm = "dapo"\nclip_high = 0.4\n')
    settings = train_settings("here", "--config", str(path), "--filters", "drop_errors")
    assert (settings.batch.advantage, settings.loss.objective.name) == ("grpo", "ppo_clip")
    assert settings.loss.objective == PpoClip(clip_low=0.2, clip_high=0.4)
    assert settings.batch.filters == ("drop_errors",)


def test_an_algorithm_among_the_flags_overrules_that_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text('algorithm = "dapo"\nlearning_rate = 0.5\n')
    for flags in (["--algorithm", "sft"], ["--algorithm=sft"]):
        settings = train_settings("here", "--config", str(path), *flags)
        assert settings == TrainConfig.of(**load_algorithm("sft"), learning_rate=0.5)


def test_an_unknown_algorithm_is_answered_with_a_close_one(ludic, tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text('algorithm = "dappo"')
    for args, where in ((["--algorithm", "dappo"], ""), (["--config", path], f"{path}: ")):
        result = ludic("train", "here", *args)
        assert result.err.startswith(f"ludic: {where}algorithm 'dappo' is unknown; did you mean 'dppo' or 'dapo' ")


@pytest.mark.parametrize("command", ["train", "run"])
@pytest.mark.parametrize("flag", ["--config", "--algorithm"])
def test_a_flag_that_decides_others_is_given_once(ludic, started, command: str, flag: str) -> None:
    for flags in ([flag, "dapo", flag, "sft"], [f"{flag}=dapo", f"{flag}=sft"]):
        result = ludic(command, started.url, *flags)
        assert (result.code, result.err) == (1, f"ludic: {flag} is given twice\n")


@pytest.mark.parametrize("command", ["run", "train"])
def test_algorithm_is_in_the_list_of_options_with_its_choices(ludic, command: str) -> None:
    options = ludic(command, "--help").out.partition("first options")[2]
    index = options.index("--algorithm {")
    assert {"cispo", "dapo", "sft"} <= set(re.findall(r"\w+", options[index : index + 300]))


def test_settings_survive_the_way_through_flags() -> None:
    options = {"a": {"b": [1]}}
    values = {"learning_rate": 1e-06, "filters": ("a",), "max_lag": 3, "options": options, "keep_mask": None}
    assert to_flags(values)[:2] == ["--learning-rate", "1e-06"]
    assert parsed("here", *to_flags(values)).nested == Nested(**values)


def test_names_are_those_of_the_flags() -> None:
    names = [
        "root",
        "ranks",
        "format",
        "learning_rate",
        "filters",
        "max_lag",
        "options",
        "resume",
        "keep_mask",
        "betas",
    ]
    assert [each.name for each in settings_of(example)] == names


@pytest.mark.slow
def test_a_command_takes_its_options_from_a_file(ludic, trained, tmp_path: Path) -> None:
    path = tmp_path / "json.toml"
    path.write_text("json = true")
    assert ludic("verify", trained.url, "--config", path).out.startswith("{")
    assert not ludic("verify", trained.url, "--config", path, "--no-json").out.startswith("{")


def test_a_resumed_trainer_takes_over_the_settings_of_the_one_before(trained) -> None:
    settings = train_settings(trained.url, "--num-steps", "9")
    assert settings.num_steps == 9
    assert settings.batch.filters == ("drop_zero_variance_groups",)
    assert settings.optimizer.learning_rate == 1e-3


CLIPPED = {"objective": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3, "learning_rate": 0.25}
WITH_KL = {"objective": "ppo_clip", "clip_high": 0.3, "reference": "first", "kl_weight": 0.5, "kl_placement": "reward"}


def resumed_with(folder: Path, before: Mapping[str, Any], *args: str) -> TrainConfig:
    """Settings of `ludic train` with these flags where an earlier trainer had those."""
    root = put_run(str(folder / "run"), RunConfig(model="model", env=("moar_cats",)))
    start_attempt(root, config=json.loads(json.dumps(TrainConfig.of(**before).flat())))
    return train_settings(root.url, *args)


@pytest.mark.parametrize("flags", [["--objective", "reinforce"], ["--objective=ppo_clip", "--objective=reinforce"]])
def test_another_objective_drops_what_it_ignores_of_the_trainer_before(tmp_path: Path, flags: list[str]) -> None:
    assert resumed_with(tmp_path, CLIPPED, *flags) == TrainConfig.of(objective="reinforce", learning_rate=0.25)


def test_an_objective_that_reads_them_keeps_the_settings_of_the_trainer_before(tmp_path: Path) -> None:
    assert resumed_with(tmp_path, CLIPPED, "--objective", "cispo") == TrainConfig.of(**CLIPPED | {"objective": "cispo"})


def on_cpu(**settings: Any) -> TrainConfig:
    """Settings as a trainer on the CPU has them; an older ludic had them on every device."""
    return TrainConfig.of(**{**ON_CPU, **settings})


def test_a_run_that_an_older_version_began_keeps_its_settings(tmp_path: Path) -> None:
    root = put_run(str(tmp_path / "run"), RunConfig(model="model", env=("moar_cats",)))
    root.put("attempts/1.json", Path(__file__).parents[2].joinpath("golden", "attempt-former-names.json").read_bytes())
    assert train_settings(root.url) == on_cpu(
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


def test_a_run_that_began_with_the_settings_of_all_objectives_is_resumed(tmp_path: Path) -> None:
    # Before, attempts/N.json held the settings of all objectives, whichever was chosen.
    root = put_run(str(tmp_path / "run"), RunConfig(model="model", env=("moar_cats",)))
    stored = Path(__file__).parents[2].joinpath("golden", "attempt-all-objectives.json").read_bytes()
    root.put("attempts/1.json", stored)
    assert {"orpo_weight", "vespo_k", "is_ratio_cap"} <= json.loads(stored)["config"].keys()
    others = {"num_steps": 40, "learning_rate": 0.004, "device": "cpu", "reference": "first", "kl_weight": 0.04}
    others |= {"kl_estimator": "k2", "loss_normalization": "sequences"}
    clips = {"clip_low": 3e-4, "clip_high": 4e-4, "mask_sequence_kl": 0.05}
    config = on_cpu(objective="gspo", dual_clip=3.0, **clips, **others)
    assert train_settings(root.url) == next_config(root.url, {}) == config
    later = {
        "tracker_samples_every": 20,
        "optimizer": "adamw",
        "replay_experts": None,
        "compute_logprobs": False,
        **ON_CPU,
    }
    later |= dict.fromkeys(("router_balance_weight", "router_z_weight"))
    assert json.loads(json.dumps(config.flat())).items() <= (json.loads(stored)["config"] | later).items()
    assert train_settings(root.url, "--objective", "cispo") == on_cpu(objective="cispo", **clips, **others)
    others.pop("kl_estimator")
    assert next_config(root.url, {"objective": "sft", "kl_weight": None}) == on_cpu(
        objective="sft", **others | {"kl_weight": None}
    )


SPELLINGS = {
    "flat.toml": 'objective = "ppo_clip"\nclip_high = 0.28\nnum_steps = 7',
    "table.toml": 'num_steps = 7\n[objective]\nname = "ppo_clip"\nclip_high = 0.28',
    "flat.json": '{"objective": "ppo_clip", "clip_high": 0.28, "num_steps": 7}',
    "table.json": '{"objective": {"name": "ppo_clip", "clip_high": 0.28}, "num_steps": 7}',
}


def test_an_objective_is_spelled_in_many_ways_that_mean_the_same(tmp_path: Path) -> None:
    config = TrainConfig(num_steps=7, loss=LossConfig(objective=PpoClip(clip_high=0.28)))
    assert train_settings("here", "--objective", "ppo_clip", "--clip-high", "0.28", "--num-steps", "7") == config
    for name, text in SPELLINGS.items():
        (tmp_path / name).write_text(text)
        assert train_settings("here", "--config", str(tmp_path / name)) == config, name
        changed = train_settings("here", "--config", str(tmp_path / name), "--clip-high", "0.4")
        assert changed.loss.objective == PpoClip(clip_high=0.4)
    assert TrainConfig.of(objective="ppo_clip", clip_high=0.28, num_steps=7) == config
    assert TrainConfig.of(objective={"name": "ppo_clip", "clip_high": 0.28}, num_steps=7) == config
    assert TrainConfig.of(objective=PpoClip(clip_high=0.28), num_steps=7) == config


def test_a_table_of_an_objective_serves_all_commands(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(f'model = "m"\nenv = ["addition"]\n{SPELLINGS["table.toml"]}')
    assert parsed_of(run, "here", "--config", str(path)).run.model == "m"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[objective]\nclip_high = 0.28", "objective has no name, wanted name = one of 'reinforce', "),
        ('[objective]\nname = "ppo"', "objective 'ppo' is unknown; did you mean 'dppo' "),
        ('[objective]\nname = "ppo_clip"\nclip_hihg = 1', r"objective: setting 'clip_hihg' is unknown; did you mean "),
        ('[objective]\nname = "ppo_clip"\nnum_steps = 1', r"objective: setting 'num_steps' is unknown"),
        ('[objective]\nname = "ppo_clip"\nclip_high = -1', r"clip_high is -1, wanted a number above 0"),
        (
            'clip_high = 0.3\n[objective]\nname = "ppo_clip"\nclip_high = 0.2',
            "clip_high is given twice, in the table objective and beside it",
        ),
    ],
)
def test_a_wrong_table_of_an_objective_is_refused_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{path}: {message}"):
        train_settings("here", "--config", str(path))


def test_each_setting_of_an_objective_says_which_have_it(ludic) -> None:
    assert "For ppo_clip and gspo." in one_text(ludic("train", "--help", "dual-clip").out)
    assert "Not for sft, dpo, ipo and orpo." in one_text(ludic("train", "--help", "whiten-advantages").out)
    assert "{reinforce, ppo_clip, cispo," in ludic("train", "--help", "objective").out


def one_text(text: str) -> str:
    return " ".join(text.split())


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


def test_a_table_or_a_dataclass_of_an_objective_overrides_that_of_the_trainer_before(tmp_path: Path) -> None:
    wanted = TrainConfig.of(objective="ppo_clip", clip_high=0.4, learning_rate=0.25)
    root = put_run(str(tmp_path / "run"), RunConfig(model="model", env=("moar_cats",)))
    start_attempt(root, config=TrainConfig.of(**CLIPPED | {"clip_low": None}).flat())
    for objective in ({"name": "ppo_clip", "clip_high": 0.4}, PpoClip(clip_high=0.4)):
        assert next_config(root.url, {"objective": objective}) == wanted
        assert next_config(root.url, {"objective": objective}, "dapo").loss.objective.name == "ppo_clip"


def test_what_is_given_now_is_refused_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"clip_low is 0\.2, which reinforce ignores"):
        resumed_with(tmp_path, CLIPPED, "--objective", "reinforce", "--clip-low", "0.2")


def test_an_algorithm_keeps_nothing_of_the_algorithm_before(tmp_path: Path) -> None:
    distilled = train_settings(
        "here", "--algorithm", "distillation", "--reference", "teacher", "--learning-rate", "0.5"
    )
    assert (distilled.loss.kl_weight, distilled.loss.kl_estimator, distilled.loss.kl_placement) == (1.0, "k1", "reward")
    settings = resumed_with(tmp_path, distilled.flat(), "--algorithm", "grpo")
    assert settings == TrainConfig.of(**load_algorithm("grpo"), reference="teacher", learning_rate=0.5)
    assert (settings.loss.kl_weight, settings.loss.kl_estimator, settings.loss.kl_placement) == (None, "k3", "loss")


def test_settings_that_an_earlier_trainer_ignored_do_not_keep_it_from_being_resumed(tmp_path: Path) -> None:
    root = put_run(str(tmp_path / "run"), RunConfig(model="model", env=("moar_cats",)))
    start_attempt(root, config={"objective": "sft", "ratio_level": "sequence", "dpo_beta": 0.5, "learning_rate": 0.25})
    assert train_settings(root.url) == on_cpu(objective="sft", learning_rate=0.25)
