"""The table of settings: every number has a range, and one annotated field is a flag, a key and an argument."""

import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Annotated, Literal, get_args, get_origin

import pytest

from ludic.adapters.exports.exporting import ExportOptions
from ludic.batches.config import BatchConfig
from ludic.cli.docs import page, table
from ludic.cli.main import COMMANDS, module_of
from ludic.cli.settings import RootUrl, parse
from ludic.engines.engine import SamplingParams
from ludic.errors import ConfigError
from ludic.maintenance.expiry_rule import ExpiryRule
from ludic.rollouts.worker import WorkerConfig
from ludic.settings import Range, Setting, check, settings_of
from ludic.store import RunConfig
from ludic.training.config import CheckpointConfig, ModelConfig, OptimizerConfig, TrainConfig
from ludic.training.loss_config import LossConfig

CONFIGS = {
    RunConfig: {"model": "m", "env": ("addition",)},
    TrainConfig: {},
    BatchConfig: {},
    LossConfig: {},
    OptimizerConfig: {},
    ModelConfig: {},
    CheckpointConfig: {},
    WorkerConfig: {},
    SamplingParams: {},
}


def settings_of_commands() -> Iterator[type]:
    for name in COMMANDS:
        yield importlib.import_module(f"ludic.cli.{module_of(name)}").Settings


def numbers(config: type) -> Iterator[Setting]:
    """The settings of a dataclass that are numbers."""
    yield from (each for each in settings_of(config) if {int, float} & {*scalars(each)})


def scalars(setting: Setting) -> Iterator[object]:
    for kind in setting.kinds:
        if get_origin(kind) not in (Mapping, Literal):
            yield from get_args(kind) or (kind,)


EVERY = [(config, each) for config in (*CONFIGS, *settings_of_commands()) for each in numbers(config)]
NOT_SETTINGS = {"stop_token_ids"}


def out_of_range(setting: Setting) -> list[float]:
    (limit,) = setting.ranges
    low = [-1] if limit.low >= 0 else [-(10**25)]
    return [10**25, *low, *([math.nan, math.inf, -math.inf] if float in scalars(setting) else [])]


@pytest.mark.parametrize(
    ("config", "setting"), EVERY, ids=[f"{config.__module__}.{config.__name__}.{each.name}" for config, each in EVERY]
)
def test_a_number_beyond_its_range_is_refused_by_name(config, setting):
    if setting.name in NOT_SETTINGS:
        return
    needed = CONFIGS.get(config)
    for value in out_of_range(setting):
        wrong = (0.5, value) if setting.is_list else value
        said = rf"^{setting.name} is .*, wanted (at least|at most|a number above) [^\n]*$"
        with pytest.raises(ConfigError, match=said):
            setting.convert(wrong)
        if needed is not None and not setting.path:
            with pytest.raises(ConfigError, match=said):
                config(**(needed | {setting.field: wrong}))


@pytest.mark.parametrize(
    "args",
    [
        ("compact", "--target-mb"),
        ("demo", "--num-steps"),
        ("expire", "--keep-versions"),
        ("export", "--format", "hf", "--version"),
        ("import", "FILE", "--from", "jsonl", "--env", "e", "--model", "m", "--group-size"),
        ("run", "--model", "m", "--env", "addition", "--ranks"),
        ("sample", "--prompt", "p", "--n"),
        ("sql", "select 1", "--max-rows"),
        ("train", "--ranks"),
        ("watch", "--interval-s"),
        ("worker", "--in-flight"),
    ],
    ids=lambda args: args[0],
)
def test_each_command_checks_its_numbers(args, capsys):
    from ludic.cli.main import main

    command, *rest = args
    root = [] if command == "demo" else ["nowhere"]
    with pytest.raises(SystemExit) as ended:
        main([command, *root, *rest, str(10**25)])
    assert ended.value.code in (1, 2)
    said = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert f"{rest[-1]} is 1" in said
    assert "wanted at most" in said


def test_every_default_is_within_its_range():
    for config, needed in CONFIGS.items():
        config(**needed)
    for _, setting in EVERY:
        if setting.default is not MISSING:
            assert setting.convert(setting.default) == setting.default


def test_a_bound_is_named():
    for value, wanted in [(0, "at least 1"), (100_001, "at most 100,000")]:
        with pytest.raises(ConfigError, match=f"^group_size is {value}, wanted {wanted}$"):
            RunConfig(model="m", env=("addition",), group_size=value)


def test_settings_that_were_json_are_checked_in_their_lists():
    assert TrainConfig.of(betas=[0.9, 0.99]).optimizer.betas == (0.9, 0.99)
    assert OptimizerConfig(betas=[0.9, 0.99]).betas == [0.9, 0.99]
    with pytest.raises(ConfigError, match="wanted at most 1"):
        TrainConfig.of(betas=[0.9, 10**25])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "ppo"}, "objective is 'ppo', wanted one of 'reinforce', "),
        ({"schedule": None}, "schedule is None, wanted one of 'constant', 'linear', 'cosine'"),
        ({"device": "tpu"}, "device is 'tpu', wanted one of 'cpu', 'cuda' or None"),
        ({"learning_rate": "1e-3"}, "learning_rate is '1e-3', wanted a number"),
        ({"num_steps": 2.5}, "num_steps is 2.5, wanted a whole number"),
        ({"offline": "no"}, "offline is 'no', wanted true or false"),
        ({"sources": "runs/mine"}, "sources is 'runs/mine', wanted a list, each a text"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig.of(**settings)


def test_an_unknown_folder_or_table_is_refused():
    with pytest.raises(ConfigError, match="folder is 'rollouts/', wanted one of 'rollouts', 'evals', 'requests', "):
        ExpiryRule(folder="rollouts/", before=1)
    with pytest.raises(ConfigError, match="table is 'metrics', wanted one of 'rollouts', 'evals'"):
        ExportOptions(format="delta", table="metrics")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Settings that only this test knows."""

    root: RootUrl
    num_patient: Annotated[int, Range(1, 50)] | None = 5
    """Steps without progress before the end. None never ends."""

    def __post_init__(self) -> None:
        check(self)


def test_one_annotated_field_is_all_that_a_setting_needs(tmp_path, capsys):
    def parsed(*args: str) -> Patience:
        return parse(Patience, ["here", *args], program="ludic patience", description="Wait")

    assert parsed("--num-patient", "7").num_patient == 7
    for name, text in [("a.toml", "num_patient = 7"), ("a.json", '{"num_patient": 7}')]:
        (tmp_path / name).write_text(text)
        assert parsed("--config", str(tmp_path / name)) == Patience(root="here", num_patient=7)
        assert parsed("--config", str(tmp_path / name), "--num-patient", "None").num_patient is None
        (tmp_path / name).write_text(text.replace("7", "51"))
        with pytest.raises(ConfigError, match=rf"{name}: num_patient is 51, wanted at most 50$"):
            parsed("--config", str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"^num_patient is 51, wanted at most 50$"):
        Patience(root="here", num_patient=51)
    with pytest.raises(ConfigError, match=r"^num_patient is 'x', wanted a whole number or None$"):
        Patience(root="here", num_patient="x")
    for args, code in [(["--num-patient", "51"], 2), (["--num-patiens", "3"], 2), (["--help"], 0)]:
        with pytest.raises(SystemExit) as ended:
            parsed(*args)
        assert ended.value.code == code
    out, err = capsys.readouterr()
    assert "--num-patient INT" in out
    assert "Steps without progress before the end. None never ends. (default: 5)" in " ".join(out.split())
    assert err.splitlines() == [
        "ludic: --num-patient is 51, wanted at most 50; `ludic patience --help` lists the options",
        "ludic: there is no option --num-patiens; did you mean --num-patient?",
    ]
    meaning = "Steps without progress before the end. None never ends."
    assert f"| `num_patient` | a whole number or None, 1 to 50 | 5 | {meaning} |" in table(Patience)


@pytest.mark.slow
def test_the_page_of_settings_has_every_setting_of_every_command():
    for settings in settings_of_commands():
        for each in settings_of(settings):
            if each.path:
                assert f"| `{each.name}` | " in page(), each


def test_a_repeated_setting_has_one_range():
    ranges: dict[str, set[tuple[Range, ...]]] = {}
    for _, each in EVERY:
        ranges.setdefault(each.name, set()).add(each.ranges)
    assert [name for name, found in ranges.items() if len(found) > 1] == []
