"""Settings of a command as its operation gets them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ludic.app.cli.settings import parse
from ludic.app.operations.start import train
from ludic.settings.table import arguments, convert, groups_in, settings_of, split
from ludic.training.config import TrainConfig
from ludic.training.inherited_settings import next_config


def parsed(operation: Callable[..., Any], *args: str, program: str = "ludic example") -> SimpleNamespace:
    """The settings by name; those of a dataclass as one, by the name of its group."""
    values = parse(operation, args, program=program, description="An example")
    arguments(operation, values)
    groups = groups_in(operation)
    own = {each.name: values.get(each.name, each.default) for each in settings_of(operation) if not each.path}
    of_groups = split({name: value for name, value in values.items() if name not in own}, **groups)
    return SimpleNamespace(**own, **{name: convert(kind, of_groups[name]) for name, kind in groups.items()})


def train_settings(root: str, *args: str) -> TrainConfig:
    """Settings of `ludic train` with these arguments, over those that the root holds."""
    values = parse(train, [root, *args], program="ludic train", description="")
    own = {each.name for each in settings_of(TrainConfig)}
    given = {name: value for name, value in values.items() if name in own}
    return next_config(root, given, values.get("algorithm"))
