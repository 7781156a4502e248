"""Fill a command's settings dataclass from flags, else a TOML file, else an algorithm's preset, else defaults.

A preset, a file, and the settings of an earlier trainer are turned into flags in front of the user's flags. So one
parser checks all of them, and the user's flags win.
"""

import contextlib
import io
import json
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar, cast, get_args, get_origin

import tyro

from ludic.cli.toml_types import check_types
from ludic.errors import ConfigError
from ludic.launch.flags import to_flags
from ludic.paths import local_path
from ludic.renamed_settings import close_names
from ludic.run_config import RunConfig
from ludic.training.config import TrainConfig
from ludic.training.presets import algorithm_names, load_algorithm

S = TypeVar("S")

RootUrl = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ROOT")]
"""Type of a field for the run's folder or URL, a positional argument."""

Algorithm = Annotated[str | None, tyro.conf.arg(metavar=f"{{{','.join(algorithm_names())}}}")]
"""Type of a field for the name of a preset; the file and the flags override the preset's settings."""

_POSITIONAL = get_args(tyro.conf.Positional[str])[1]

_FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=.*)?$", re.DOTALL)
"""Matches an argument that can only be a flag."""

_USAGE = re.compile(r" \[-h\] \[OPTIONS\] ([A-Z][A-Z |]*[A-Z])")
"""Matches a usage line of tyro: options, then positional arguments."""

_EXPERIMENT = {"groups_per_batch", "in_flight", "num_steps"}
"""A command with one of these settings reads experiment files: it skips settings that are for other commands."""

_registry = tyro.constructors.ConstructorRegistry()
_being_read: list[Any] = []
"""Types whose rule is being looked up."""


@_registry.primitive_rule
def _mapping_as_json(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """Parse a mapping, such as env_options, from one flag of JSON text; returns None for other types."""
    if get_origin(info.type) is not Mapping:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda texts: _parse_json(texts[0]),
        is_instance=lambda value: isinstance(value, Mapping),
        str_from_instance=lambda value: [json.dumps(value)],
    )


@_registry.struct_rule
def _dataclass_with_joined_help(
    info: tyro.constructors.StructTypeInfo,
) -> tyro.constructors.StructConstructorSpec | None:
    """A dataclass as tyro reads it, its fields' docstrings as one paragraph each."""
    if not is_dataclass(info.type) or info.type in _being_read:
        return None  # tyro's own rule is asked
    _being_read.append(info.type)
    try:
        spec = tyro.constructors.ConstructorRegistry.get_struct_spec(info)
    finally:
        _being_read.pop()
    if not isinstance(spec, tyro.constructors.StructConstructorSpec):
        return None
    return replace(spec, fields=tuple(replace(each, helptext=partial(_joined, each.helptext)) for each in spec.fields))


def _joined(helptext: str | Callable[[], str | None] | None) -> str | None:
    text = helptext() if callable(helptext) else helptext
    return None if text is None else " ".join(text.split())


def _parse_json(text: str) -> Mapping[str, Any]:
    value = json.loads(text)
    if not isinstance(value, Mapping):
        raise ValueError(f"{text} is no JSON object")
    return value


def parse(
    settings: type[S], args: Sequence[str], *, program: str, description: str, earlier: Mapping[str, Any] | None = None
) -> S:
    """Return settings from `earlier`, overridden by the preset, then by `--config FILE.toml`, then by the other flags.

    `--algorithm NAME` chooses the preset, else `algorithm` in the file does.
    Wrong usage prints the mistake and exits with 2. Raises ConfigError if the file is bad.
    """
    args, values = take_config(args, settings)
    check_flags(args, settings, program)
    inserted = to_flags(earlier or {}) + to_flags(_preset(args, values, settings)) + to_flags(values)
    # Insert after the positional arguments: a flag that takes any number of values would swallow them.
    head = next((index for index, arg in enumerate(args) if arg.startswith("-")), len(args))
    args = [*args[:head], *inserted, *args[head:]]
    description = f"{description}. --config FILE.toml sets options."
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            with contextlib.redirect_stdout(cast(TextIO, _RootFirst(sys.stdout))):
                return tyro.cli(settings, args=args, prog=program, description=description, registry=_registry)
        except SystemExit as end:
            wrong = _in_a_line(said.getvalue()) if end.code else None
    if wrong:
        print(f"ludic: {wrong}; `{program} --help` lists the options", file=sys.stderr)
    sys.exit(2 if wrong else 0)


class _RootFirst:
    """Standard output that rewrites tyro's usage line to the order of a call: ludic train ROOT [OPTIONS]."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._stream.write(_USAGE.sub(r" \1 [OPTIONS]", text, count=1))


def _in_a_line(box: str) -> str:
    """Return tyro's error box as one line: its first part, without title, further help and names of our classes."""
    # The left border is one character; on an ASCII-only terminal a space, with a rule below the title.
    rows = [row[1:].rstrip(" │") for row in box.splitlines()[1:]]
    parts = groupby(rows, lambda row: bool(re.match(" *[─-]{3}", row)))
    rows = next((list(part) for is_rule, part in parts if not is_rule), [])
    if rows and rows[0].startswith(" Missing from "):
        # Five spaces precede each name, more precede its help.
        return "missing: " + ", ".join(row.strip() for row in rows if re.match(r" {5}\S", row))
    text = " ".join(row.strip() for row in rows) or " ".join(box.split())
    return re.sub(r"^Error parsing (?:[A-Za-z][\w.]*: )?", "", text).rstrip(".")


def check_flags(args: Sequence[str], settings: type, program: str) -> None:
    """Print one line and exit with 2 if a flag matches no setting."""
    # A field named after a Python keyword ends with an underscore; its flag does not.
    names = [name.rstrip("_").replace("_", "-") for name in field_names(settings)]
    for flag in (match[1] for match in map(_FLAG.match, args) if match):
        name = flag.replace("_", "-").removeprefix("no-")
        if name in (*names, "help") or flag.startswith("tyro-"):
            continue
        close = close_names(name.replace("-", "_"), [*field_names(settings), "config"], n=1)
        similar = close[0].rstrip("_").replace("_", "-") if close else None
        prefix = "no-" if flag.startswith("no-") else ""
        hint = f"did you mean --{prefix}{similar}?" if similar else f"`{program} --help` lists the options"
        print(f"ludic: there is no option --{flag}; {hint}", file=sys.stderr)
        sys.exit(2)


def take_config(args: Sequence[str], settings: type) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments without --config, and the settings in its file. Raises ConfigError if the file is bad."""
    rest, path = take_option(list(args), "--config", "a TOML file")
    return rest, _read_toml(local_path(path, "--config"), settings) if path else {}


def _preset(args: list[str], values: Mapping[str, Any], settings: type) -> dict[str, Any]:
    """Return the settings of the algorithm named by the flags, else by the file; {} if neither names one."""
    if not {"algorithm", "objective"} <= set(field_names(settings)):  # what-if takes only the rules of a preset
        return {}
    _, name = take_option(args, "--algorithm", f"one of {', '.join(algorithm_names())}")
    name = name or values.get("algorithm")
    return load_algorithm(str(name)) if name not in (None, "None") else {}


def take_option(args: list[str], flag: str, wanted: str) -> tuple[list[str], str | None]:
    """Return the arguments without a flag and its value, and the value, None if the flag is absent.

    Raises ConfigError if the flag has no value.
    """
    args = [part for arg in args for part in (arg.split("=", 1) if arg.startswith(f"{flag}=") else [arg])]
    if flag not in args:
        return args, None
    if args.count(flag) > 1:
        raise ConfigError(f"{flag} is given twice")
    index = args.index(flag)
    if index + 1 == len(args):
        raise ConfigError(f"{flag} needs {wanted} after it")
    return args[:index] + args[index + 2 :], args[index + 1]


def given_settings(args: Sequence[str], names: Collection[str]) -> dict[str, str]:
    """Return the values, as texts, that flags give to some settings; the last value of a repeated flag."""
    found = {}
    for index, arg in enumerate(args):
        head, equals, value = arg.partition("=")
        name = head.removeprefix("--").replace("-", "_")
        values = [value] if equals else args[index + 1 : index + 2]
        if head.startswith("--") and name in names and values:
            found[name] = values[0]
    return found


def _read_toml(path: Path, settings: type) -> dict[str, Any]:
    """Read a file's settings, without those that an experiment file holds for other commands.

    `ludic create` takes the run's settings, `ludic train` the trainer's, `ludic worker` its own: one file serves all.
    Raises ConfigError if the file can't be read or holds an unknown setting.
    """
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    names = list(field_names(settings))
    of_experiment = (
        {"algorithm", *field_names(RunConfig), *field_names(TrainConfig)} if _EXPERIMENT & {*names} else set()
    )
    for name in values:
        if name not in names and name not in of_experiment:
            close = close_names(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
            raise ConfigError(f"{path}: no setting is called {name!r}; {hint}")
    if "algorithm" in of_experiment:
        _check_algorithm(values.get("algorithm"), path)
    check_types(values, str(path), *([RunConfig, TrainConfig] if of_experiment else []), settings)
    return {name: value for name, value in values.items() if name in names}


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


def field_names(settings: type) -> Iterator[str]:
    """Yield the names of a dataclass's fields, with nested dataclasses expanded and without positional arguments."""
    for field in fields(settings):
        nested = getattr(field.type, "__args__", (field.type,))[0]
        if isinstance(nested, type) and is_dataclass(nested):
            yield from field_names(nested)
        elif _POSITIONAL not in getattr(field.type, "__metadata__", ()):
            yield field.name
