"""A command's settings: from a file and flags, these over those.

All are values by the names of the settings; ludic.settings has the table and the conversion. Flags that are wrong are
answered in one line, with exit code 2; a bad file raises ConfigError.
"""

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, get_origin

from ludic.app.cli.commands import COMMANDS
from ludic.app.operations.operation import command_name
from ludic.base import local_path, read_config
from ludic.errors import ConfigError, similar_names
from ludic.settings import (
    MissingSettingsError,
    Setting,
    SettingsError,
    WrongUsageError,
    check_not_missing,
    exit_with,
    help_of,
    meaning_elsewhere,
    missing_text,
    read_flags,
    refuse,
    settings_of,
    without_tables,
)
from ludic.settings.table import unknown

JSON = "json"
"""Setting of every command that prints a result."""
_NO_RESULT = (None, "None", "pl.DataFrame")
"""Return types of operations whose command has no --json: they print nothing, or rows in a format of their own."""


def settings_of_command(operation: Callable[..., Any]) -> tuple[Setting, ...]:
    """Return the settings of an operation, and --json if it returns a result."""
    command = COMMANDS.get(command_name(operation))
    table = settings_of(operation)
    if command is not None and command.operation is operation:
        in_file = {each.name for owner in command.only_in_file for each in settings_of(owner)}
        table = tuple(
            replace(each, default=command.defaults.get(each.name, each.default), only_in_file=each.name in in_file)
            for each in table
        )
    if JSON in {each.name for each in table} or inspect.signature(operation).return_annotation in _NO_RESULT:
        return table
    return (*table, *settings_of(_printing))


def _printing(*, json: bool = False) -> None:
    """Settings of every command that prints a result.

    Args:
        json: Print the result as JSON.
    """


def parse(
    operation: Callable[..., Any],
    args: Sequence[str],
    *,
    program: str,
    description: str,
) -> dict[str, Any]:
    """Return the settings that flags and a file give, by name, each in its type.

    Prints help and exits; wrong usage prints the mistake and exits with 2. Raises ConfigError if the file is bad.
    """
    table = settings_of_command(operation)
    try:
        flags = read_flags(table, args)
        if "help" in flags:
            description = f"{description}. --config FILE.toml sets options from a file."
            if groups := {each.group or each.name for each in table if each.only_in_file}:
                description += f" These come from it alone: {', '.join(sorted(groups))} (docs/settings.md)."
            print(help_of(table, flags["help"], program, description))
            sys.exit(0)
        config = flags.pop("config", None)
        if config == "":
            raise ConfigError("--config is empty, wanted a TOML file")
        algorithm = flags.get("algorithm")
        from_file = {} if config is None else _read_file(local_path(config, "--config"), table, algorithm)
        values = from_file | flags
        if config is not None and any(each.name == "config" for each in table):  # it names the file by its position
            values["config"] = config
        check_not_missing(operation, values, program)
    except WrongUsageError as error:
        exit_with(error, program)
    return values


def exit_with_settings(operation: Callable[..., Any], error: SettingsError, program: str) -> NoReturn:
    """Print what is wrong with the settings of an operation, those that are missing by their flags; exit with 2."""
    table = {each.name: each for each in settings_of(operation)}
    if isinstance(error, MissingSettingsError) and table.keys() >= {*error.names}:
        exit_with(ConfigError(missing_text([table[name] for name in error.names], table.values(), program)), program)
    exit_with(error, program)


def _read_file(path: Path, settings: Sequence[Setting], algorithm: str | None) -> dict[str, Any]:
    """Read a TOML or a JSON file's settings, without those that an experiment file holds for other commands.

    `ludic train` takes the trainer's settings, `ludic worker` its own: one file serves all that share settings with
    `ludic run`, and holds what `ludic run` takes. algorithm: that of the flags.
    Raises ConfigError if the file can't be read, or holds an unknown setting or a value that does not fit one.
    """
    table = {each.name: each for each in settings if each.may_be_in_file}
    of_others: dict[str, Setting] = {}
    of_run = settings_of(COMMANDS["run"].operation)
    if {each.owner for each in settings} & {each.owner for each in of_run}:  # they share a dataclass
        of_others = {each.name: each for each in of_run if each.has_flag}
    all_settings = {**of_others, **table}
    try:
        values = read_config(path, all_settings)
    except FileNotFoundError as error:
        raise ConfigError(_no_file(path)) from error
    refuse(list(_unknown_in(values, table, all_settings, algorithm)), where=f"{path}: ")
    found = {}
    for name, value in without_tables(values, all_settings, where=f"{path}: ").items():
        if each := table.get(name) or of_others.get(name):
            converted = each.convert(value, f"{path}: {name}", "file")
            if name in table:
                found[name] = converted
    return found


def _unknown_in(
    values: Mapping[str, Any], own: Collection[str], settings: Mapping[str, Setting], algorithm: str | None
) -> Iterator[str]:
    """Describe all names of a file that ludic does not know, those in a table of another program's file, too.

    own: settings of the command. settings: those that the file may hold. algorithm: that of the flags.
    """
    algorithm = algorithm or (values["algorithm"] if isinstance(values.get("algorithm"), str) else None)
    for name, value in values.items():
        each = settings.get(name)
        if each is not None and (each.is_choice or any(get_origin(kind) is Mapping for kind in each.kinds)):
            continue
        inner = [dotted for dotted in dotted_names(name, value) if dotted != name]
        answers = {dotted: meaning_elsewhere(dotted, settings, algorithm=algorithm) for dotted in inner}
        if any(answers.values()):
            yield from (f"{dotted} is {meaning or 'unknown'}" for dotted, meaning in answers.items())
        elif each is None and _is_table(value):
            known = next((inside for dotted in inner if (inside := dotted.rpartition(".")[2]) in settings), None)
            example = "" if known is None else f": write {known} = ... at the top"
            yield (
                f"setting {name!r} is unknown, and a table; settings of ludic stand above all tables{example} "
                "(docs/coming_from.md has the names of other trainers' settings)"
            )
        elif each is None and not (name == "algorithm" and len(settings) > len(own)):
            yield unknown(name, own, algorithm=algorithm)


def dotted_names(name: str, value: Any) -> Iterator[str]:
    """Yield the settings in a table of a file by dotted names, such as trainer.optim.lr; of lists of tables, too."""
    tables = value if isinstance(value, list) else [value]
    if not all(isinstance(each, Mapping) for each in tables):
        yield name
        return
    for table in tables:
        for key, each in table.items():
            yield from dotted_names(f"{name}.{key}", each)


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) for each in value)
    )


def _no_file(path: Path) -> str:
    folder = path.absolute().parent
    files = sorted(each.name for suffix in ("toml", "json") for each in folder.glob(f"*.{suffix}"))
    close = similar_names(path.name, files)
    advice = f"did you mean {' or '.join(close)}?" if close else "--config wants a TOML or JSON file of settings"
    return f"{path}: there is no such file in {folder}; {advice}"
