"""Every number that a user can set has a bound, and what is beyond it is refused in one line that names the bound."""

import importlib
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import get_args

import pytest

from ludic.adapters.exports.exporting import ExportOptions
from ludic.batches.config import BatchConfig
from ludic.bounds import BOUNDS, check_numbers
from ludic.cli.main import COMMANDS, module_of
from ludic.engines.engine import SamplingParams
from ludic.errors import ConfigError
from ludic.maintenance.expiry_rule import ExpiryRule
from ludic.rollouts.worker import WorkerConfig
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


def kinds(hint: object) -> set[object]:
    """The types that a field's annotation is made of, apart from a mapping's and a Literal's."""
    if "Mapping" in str(hint) or "Literal" in str(hint):
        return set()
    return {hint}.union(*map(kinds, get_args(hint)))


def numbers(config: type) -> Iterator[tuple[str, bool, bool]]:
    """Name of each numeric field, whether it is a float, and whether there are two in a tuple."""
    for field in fields(config):
        found = kinds(field.type)
        if not any(isinstance(kind, type) and is_dataclass(kind) for kind in found) and found & {int, float}:
            yield field.name, float in found, "tuple" in str(field.type)


EVERY = [(config, *number) for config in (*CONFIGS, *settings_of_commands()) for number in numbers(config)]
NOT_SETTINGS = {"stop_token_ids"}


def out_of_range(name: str, is_float: bool) -> list[float]:
    low = [-1] if BOUNDS[name].low >= 0 else [-(10**25)]
    return [10**25, *low, *([math.nan, math.inf, -math.inf] if is_float else [])]


@pytest.mark.parametrize(
    ("config", "name", "is_float", "is_pair"), EVERY, ids=[f"{c.__module__}.{c.__name__}.{n}" for c, n, *_ in EVERY]
)
def test_a_number_beyond_its_bound_is_refused_by_name(config, name, is_float, is_pair):
    if name in NOT_SETTINGS:
        return
    needed = CONFIGS.get(config)
    for value in out_of_range(name, is_float):
        wrong = (0.5, value) if is_pair else value
        with pytest.raises(ConfigError, match=rf"^{name} is .*, wanted (at least|at most|a number above) [^\n]*$"):
            check_numbers(Lone(name, wrong)) if needed is None else config(**(needed | {name: wrong}))


class Lone:
    """Settings of a command, whose other fields are not to be filled here; `test_each_command_checks` does."""

    def __init__(self, name, value):
        setattr(self, name, value)


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
    assert f"{rest[-1].lstrip('-').replace('-', '_')} is 1" in said
    assert "wanted at most" in said


def test_every_default_is_within_its_bound():
    for config, needed in CONFIGS.items():
        config(**needed)
    for config, name, *_ in EVERY:
        default = next(field.default for field in fields(config) if field.name == name)
        check_numbers(Lone(name, default if isinstance(default, int | float) else None))


def test_a_bound_is_named():
    for value, wanted in [(0, "at least 1"), (100_001, "at most 100,000")]:
        with pytest.raises(ConfigError, match=f"^group_size is {value}, wanted {wanted}$"):
            RunConfig(model="m", env=("addition",), group_size=value)


def test_settings_that_were_json_are_checked_in_their_lists():
    assert TrainConfig.of(betas=[0.9, 0.99]).optimizer.betas == [0.9, 0.99]
    with pytest.raises(ConfigError, match="wanted at most 1"):
        TrainConfig.of(betas=[0.9, 10**25])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "ppo"}, "objective is 'ppo', wanted one of 'reinforce', "),
        ({"schedule": None}, "schedule is None, wanted one of 'constant', 'linear', 'cosine'"),
        ({"device": "tpu"}, "device is 'tpu', wanted one of 'cpu', 'cuda' or None"),
        ({"learning_rate": "1e-3"}, "learning_rate is '1e-3', wanted float"),
        ({"num_steps": 2.5}, "num_steps is 2.5, wanted int"),
        ({"offline": "no"}, "offline is 'no', wanted bool"),
        ({"sources": "runs/mine"}, r"sources is 'runs/mine', wanted tuple\[str, \.\.\.\]"),
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
