"""The table of settings: every number has a range, and one annotated field is a flag, a key and an argument."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import pytest
from command_settings import parsed as parsed_of

from ludic.app.cli.commands import COMMANDS
from ludic.app.cli.docs import settings_pages, texts_below
from ludic.app.cli.docs import table as table_of
from ludic.app.operations.create import RootUrl
from ludic.app.operations.exchange import ExportOptions
from ludic.app.operations.operation import operation
from ludic.engines.engine import SamplingParams
from ludic.errors import ConfigError
from ludic.eval.config import EvalConfig
from ludic.rollouts.worker import WorkerConfig
from ludic.root.maintenance.expiry_rule import ExpiryRule
from ludic.run.config import RunConfig
from ludic.settings.flags import read_flags
from ludic.settings.table import (
    Needs,
    Overrides,
    Range,
    Role,
    Setting,
    arguments,
    check,
    convert,
    flat,
    given,
    overridden,
    settings_of,
)
from ludic.training.batches.config import BatchConfig
from ludic.training.config import (
    CheckpointConfig,
    Clipping,
    LossConfig,
    ModelConfig,
    Objective,
    OptimizerConfig,
    TrainConfig,
)

CONFIGS = {
    RunConfig: {"model": "m", "env": ("addition",)},
    TrainConfig: {},
    BatchConfig: {},
    LossConfig: {},
    **{each: {} for each in get_args(Objective) if not issubclass(each, Clipping)},
    **{each: {"clip_low": 0.1, "clip_high": 0.2} for each in get_args(Objective) if issubclass(each, Clipping)},
    OptimizerConfig: {},
    ModelConfig: {},
    CheckpointConfig: {},
    WorkerConfig: {},
    SamplingParams: {},
}


def settings_of_commands() -> Iterator[Callable[..., Any]]:
    for command in COMMANDS.values():
        yield command.operation


def numbers(config: Callable[..., Any]) -> Iterator[Setting]:
    """The settings of a dataclass or an operation that are numbers."""
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
        if needed is not None and not setting.path and not setting.within:
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
    from ludic.app.cli.main import main

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
        ({"objective": "ppo"}, "objective 'ppo' is unknown; did you mean 'dppo' "),
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

    num_patient: Annotated[int, Range(1, 50)] | None = 5
    """Steps without progress before the end. None never ends."""

    def __post_init__(self) -> None:
        check(self)


@operation(patience=Patience)
def wait(root: RootUrl, **settings: Any) -> None:
    """Wait."""


def test_one_annotated_field_is_all_that_a_setting_needs(tmp_path, capsys):
    def parsed(*args: str) -> Patience:
        return parsed_of(wait, "here", *args, program="ludic patience").patience

    assert parsed("--num-patient", "7").num_patient == 7
    for name, text in [("a.toml", "num_patient = 7"), ("a.json", '{"num_patient": 7}')]:
        (tmp_path / name).write_text(text)
        assert parsed("--config", str(tmp_path / name)) == Patience(num_patient=7)
        assert parsed("--config", str(tmp_path / name), "--num-patient", "None").num_patient is None
        (tmp_path / name).write_text(text.replace("7", "51"))
        with pytest.raises(ConfigError, match=rf"{name}: num_patient is 51, wanted at most 50$"):
            parsed("--config", str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"^num_patient is 51, wanted at most 50$"):
        Patience(num_patient=51)
    with pytest.raises(ConfigError, match=r"^num_patient is 'x', wanted a whole number or None$"):
        Patience(num_patient="x")
    for args, code in [(["--num-patient", "51"], 2), (["--num-patiens", "3"], 2), (["--help"], 0)]:
        with pytest.raises(SystemExit) as ended:
            parsed(*args)
        assert ended.value.code == code
    out, err = capsys.readouterr()
    assert "--num-patient INT" in out
    assert "--num-patient INT            (default: 5)" in out
    assert texts_below(Patience) == {"num_patient": "Steps without progress before the end. None never ends."}
    assert err.splitlines() == [
        "ludic: --num-patient is 51, wanted at most 50; `ludic patience --help` lists the options",
        "ludic: there is no option --num-patiens; did you mean --num-patient?",
    ]
    assert "| `num_patient` | a whole number or None, 1 to 50 | 5 |  |" in table_of(Patience)


@dataclass(frozen=True, kw_only=True)
class Walk:
    """A way on foot."""

    name: ClassVar[str] = "walk"
    pace: Annotated[float, Range(0, 10), Role(in_evaluations=True)] = 5.0
    """Kilometres an hour."""


@dataclass(frozen=True, kw_only=True)
class Ride(Walk):
    """A way by bicycle."""

    name = "ride"
    gear: Annotated[int, Range(1, 30), Role(in_evaluations=True)] = 1
    """Gear to ride in."""
    paid_from: Annotated[str, Needs("budget")] = "purse"
    """What the bicycle is paid from."""


@dataclass(frozen=True, kw_only=True)
class Rest:
    """No way."""

    name: ClassVar[str] = "rest"


@dataclass(frozen=True, kw_only=True)
class Trip:
    """Settings that only this test knows, with a choice."""

    way: Walk | Ride | Rest = field(default_factory=Walk)
    """How to get there."""
    budget: int | None = None

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Outing:
    trip: Trip = field(default_factory=Trip)


def test_a_choice_between_dataclasses_is_a_name_and_the_settings_of_all_of_them():
    table = {each.name: each for each in settings_of(Outing)}
    assert [*table] == ["way", "pace", "gear", "paid_from", "budget"]
    assert {each.group for each in table.values()} == {"trip"}
    assert (table["way"].choices, table["way"].default) == (("walk", "ride", "rest"), "walk")
    assert [table[name].help for name in ("way", "pace", "gear")] == ["", "Not for rest.", "For ride."]
    ride = Outing(trip=Trip(way=Ride(gear=3)))
    for settings in ({"way": "ride", "gear": 3}, {"way": {"name": "ride", "gear": 3}}, {"way": Ride(gear=3)}):
        assert convert(Outing, settings) == ride
    assert convert(Outing, {"pace": 4}) == Outing(trip=Trip(way=Walk(pace=4.0)))
    assert flat(ride) == {"way": "ride", "pace": 5.0, "gear": 3, "paid_from": "purse", "budget": None}
    assert flat(Outing(trip=Trip(way=Rest()))) == {"way": "rest", "budget": None}
    assert convert(Outing, flat(ride)) == ride


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gear": 3}, "gear is 3, which walk ignores; leave it out, or set way to ride"),
        ({"way": "rest", "pace": 4}, "pace is 4.0, which rest ignores; leave it out, or set way to walk or ride"),
        ({"way": "fly"}, "way is 'fly', wanted one of 'walk', 'ride', 'rest'"),
        ({"way": {"gear": 3}}, "way has no name, wanted name = one of 'walk', 'ride', 'rest'"),
        ({"way": {"name": "ride", "gear": 99}}, "gear is 99, wanted at most 30"),
        ({"way": {"name": "ride", "gear": 3}, "gear": 3}, "gear is given twice, in the table way and beside it"),
        (
            {"way": "ride", "paid_from": "card"},
            "paid_from is card, but there is no budget; set budget, or leave it out",
        ),
    ],
)
def test_what_a_choice_lacks_is_refused(settings, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        convert(Outing, settings)


def test_what_is_stored_and_has_no_effect_is_dropped():
    stored = given({"way": "ride", "gear": 3, "pace": 4, "paid_from": "card"}, "before", "stored")
    assert convert(Outing, stored) == Outing(trip=Trip(way=Ride(gear=3, pace=4.0)))
    assert convert(Outing, {**stored, "way": "walk"}) == Outing(trip=Trip(way=Walk(pace=4.0)))
    assert convert(Outing, {**stored, "budget": 5}) == Outing(
        trip=Trip(way=Ride(gear=3, pace=4.0, paid_from="card"), budget=5)
    )
    with pytest.raises(ConfigError, match=r"^gear is 7, which walk ignores"):
        convert(Outing, {**stored, "way": "walk", "gear": 7})


def test_a_choice_in_python_is_one_of_its_dataclasses():
    for way in ("ride", Patience):
        with pytest.raises(ConfigError, match=r"^way is .*, wanted one of the dataclasses Walk, Ride, Rest$"):
            Trip(way=way)
    with pytest.raises(ConfigError, match=r"^paid_from is card, but there is no budget"):
        Trip(way=Ride(paid_from="card"))


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """Settings that only this test knows, which override those of another dataclass."""

    ride: Annotated[Mapping[str, Any], Overrides(Ride, "in_evaluations", "None is the ride's.")] = field(
        default_factory=dict
    )
    times: int = 1

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Training:
    repeat: Repeat = field(default_factory=Repeat)


def test_overrides_are_settings_of_another_dataclass_each_none_unless_given(capsys):
    table = {each.name: each for each in settings_of(Training)}
    assert [*table] == ["pace", "gear", "times"]
    assert {each.group for each in table.values()} == {"repeat"}
    assert (table["gear"].help, table["gear"].default) == ("None is the ride's.", None)
    assert table["gear"].ranges == (Range(1, 30),)
    faster = Training(repeat=Repeat(ride={"pace": 7.0}))
    assert convert(Training, {"pace": 7, "gear": None}) == faster
    assert flat(faster) == {"pace": 7.0, "gear": None, "times": 1}
    assert convert(Training, flat(faster)) == faster
    assert overridden(Ride(gear=3), ("pace", "gear"), faster.repeat.ride) == {"pace": 7.0, "gear": 3}
    flags = read_flags(settings_of(Training), ["--gear", "4", "--times", "2"])
    assert Training(**arguments(Training, flags)) == Training(repeat=Repeat(ride={"gear": 4}, times=2))
    assert "| `gear` | a whole number or None, 1 to 30 | None | None is the ride's. |" in table_of(Training)


@pytest.mark.parametrize(
    ("ride", "message"),
    [
        ({"gear": 99}, "gear is 99, wanted at most 30"),
        ({"gear": "x"}, "gear is 'x', wanted a whole number or None"),
        ({"gaer": 3}, "ride: setting 'gaer' is unknown; did you mean 'gear'?"),
        ({"paid_from": "card"}, "ride: setting 'paid_from' is unknown; there are pace, gear"),
    ],
)
def test_a_wrong_override_is_refused_in_the_words_of_the_other_dataclass(ride, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        Repeat(ride=ride)


def test_what_is_said_of_none_is_not_said_of_overrides():
    helps = {each.name: each.help for each in settings_of(EvalConfig)}
    assert helps["top_k"] == "Sample from this number of the most likely tokens. None is the run's."
    assert helps["max_steps"] == "Maximum steps of the environment in an episode. None is the run's."


def test_the_page_of_settings_has_every_setting_of_every_command():
    text = "\n".join(settings_pages().values())
    for settings in settings_of_commands():
        for each in settings_of(settings):
            if each.name == "json":  # of every command with a result, as the introduction says
                continue
            name = each.shown.metavar if each.shown is not None and not each.has_flag else each.name
            escaped = name.replace("|", "\\|")
            assert f"| `{escaped}` | " in text, each


def test_a_repeated_setting_has_one_range():
    ranges: dict[str, set[tuple[Range, ...]]] = {}
    for _, each in EVERY:
        ranges.setdefault(each.name, set()).add(each.ranges)
    assert [name for name, found in ranges.items() if len(found) > 1] == []
