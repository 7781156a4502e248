"""A command's settings: from an earlier start, an algorithm's preset, a file and flags, each over those before it.

All are values by the names of the settings; ludic.settings has the table and the conversion. Flags that are wrong are
answered in one line, with exit code 2; a bad file raises ConfigError.
"""

import json
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from ludic.errors import ConfigError
from ludic.flags import WrongUsageError, check_not_missing, exit_with, help_of, read_flags
from ludic.paths import local_path
from ludic.run_config import RunConfig
from ludic.settings import Setting, Shown, arguments, given, settings_of, typed, unknown, without_tables
from ludic.training.config import TrainConfig
from ludic.training.presets import algorithm_names, load_algorithm

S = TypeVar("S")
Values = Mapping[str, Any]

RootUrl = Annotated[str, Shown("ROOT", by_position=True)]
"""Type of a field for the run's folder or URL, a positional argument."""

Algorithm = Annotated[str | None, Shown(f"{{{','.join(algorithm_names())}}}")]
"""Type of a field for the name of a preset; the file and the flags override the preset's settings."""

_EXPERIMENT = {"groups_per_batch", "in_flight", "num_steps"}
"""A command with one of these settings reads experiment files: it skips settings that are for other commands."""


def parse(
    settings: Callable[..., S],
    args: Sequence[str],
    *,
    program: str,
    description: str,
    earlier: Callable[[Values], Values] | None = None,
    first: Collection[str] = (),
) -> S:
    """Return a command's settings, a dataclass.

    earlier: returns the settings of an earlier start; it gets those that flags and file give. first: settings that
    --help shows of a command with many. Prints help and exits; wrong usage prints the mistake and exits with 2. Raises
    ConfigError if the file is bad.
    """
    try:
        values = _read(settings, args, program, description, earlier, first)
        try:
            return settings(**arguments(settings, values))
        except ConfigError as error:  # settings that contradict each other
            raise WrongUsageError(str(error)) from error
    except WrongUsageError as error:
        exit_with(error, program)


def _read(
    owner: Any,
    args: Sequence[str],
    program: str,
    description: str,
    earlier: Callable[[Values], Values] | None,
    first: Collection[str],
) -> dict[str, Any]:
    """Return all settings by name, each in its type."""
    names = {each.name for each in settings_of(owner)}
    flags = read_flags(owner, args)
    if "help" in flags:
        description = f"{description}. --config FILE.toml sets options from a file."
        print(help_of(owner, flags["help"], program, description, first))
        sys.exit(0)
    config = flags.pop("config", None)
    if config == "":
        raise ConfigError("--config is empty, wanted a TOML file")
    from_file = {} if config is None else _read_file(local_path(config, "--config"), owner)
    chosen = from_file | flags
    before: Values = {}
    if earlier is not None and chosen.get("root"):
        before = given(earlier(chosen), f"earlier settings of {chosen['root']}", "stored")
    algorithm = chosen.get("algorithm") if {"algorithm", "objective"} <= names else None  # what-if takes only its rules
    preset = {} if algorithm is None else given(load_algorithm(algorithm), f"algorithm {algorithm}")
    values = typed(owner, {**before, **preset, **chosen})
    check_not_missing(owner, values, program)
    return values


def _read_file(path: Path, owner: Any) -> dict[str, Any]:
    """Read a TOML or a JSON file's settings, without those that an experiment file holds for other commands.

    `ludic create` takes the run's settings, `ludic train` the trainer's, `ludic worker` its own: one file serves all.
    Raises ConfigError if the file can't be read, or holds an unknown setting or a value that does not fit one.
    """
    try:
        text = path.read_text()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: wanted a JSON object of settings")
    table = {each.name: each for each in settings_of(owner) if each.has_flag}
    of_others: dict[str, Setting] = {}
    if table.keys() & _EXPERIMENT:
        of_others = {each.name: each for config in (RunConfig, TrainConfig) for each in settings_of(config)}
    found = {}
    for name, value in without_tables(values, {**of_others, **table}, where=f"{path}: ").items():
        if name == "algorithm" and of_others:
            _check_algorithm(value, path)
        elif name not in table and name not in of_others:
            raise ConfigError(f"{path}: {unknown(name, table)}")
        if each := table.get(name) or of_others.get(name):
            converted = each.convert(value, f"{path}: {name}", "file")
            if name in table:
                found[name] = converted
    return found


def _check_algorithm(name: Any, path: Path) -> None:
    """Raise ConfigError for an unknown algorithm, also if only another command uses it."""
    if name in (None, "None"):
        return
    if not isinstance(name, str):
        raise ConfigError(f"{path}: algorithm is {name!r}, wanted one of {', '.join(algorithm_names())}")
    try:
        load_algorithm(name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
