"""Settings of a command: a dataclass filled from flags, then a TOML file, then an algorithm's preset, then defaults.

A preset, a file, and the settings of an earlier trainer, become flags in front of the user's own, so that
one parser checks them all and the last word is the user's.
"""

import contextlib
import difflib
import io
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar, cast, get_args, get_origin

import tyro

from ludic.cli.toml_types import check_types
from ludic.errors import ConfigError
from ludic.paths import local_path
from ludic.store.run import RunConfig
from ludic.training.config import TrainConfig
from ludic.training.presets import algorithm_names, load_algorithm

S = TypeVar("S")

RootUrl = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ROOT")]
"""A field for the run's folder or URL, given by place."""

Algorithm = Annotated[str | None, tyro.conf.arg(metavar=f"{{{','.join(algorithm_names())}}}")]
"""A field for the name of a preset, whose settings come before those of the file and the flags."""

_POSITIONAL = get_args(tyro.conf.Positional[str])[1]

_FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=.*)?$", re.DOTALL)
"""An argument that can only be meant as a flag."""

_USAGE = re.compile(r" \[-h\] \[OPTIONS\] ([A-Z][A-Z |]*[A-Z])")
"""Usage as tyro prints it: options, then what is given by place."""

_EXPERIMENT = {"groups_per_batch", "groups_per_call", "num_steps"}
"""Settings by which a command is known to take some of an experiment's."""

_registry = tyro.constructors.ConstructorRegistry()
_being_read: list[Any] = []
"""Types whose rule is being looked for."""


@_registry.primitive_rule
def _mapping_as_json(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec | None:
    """A mapping, such as env_options, is one flag of JSON text."""
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
    """Settings from `earlier`, overruled by an algorithm's preset, by `--config FILE.toml`, and by the other flags.

    `--algorithm NAME` chooses the preset, or else `algorithm` in the file.
    Wrong usage prints what is wrong and exits with 2; a bad file raises ConfigError.
    """
    args, values = take_config(args, settings)
    check_flags(args, settings, program)
    inserted = to_flags(earlier or {}) + to_flags(_preset(args, values, settings)) + to_flags(values)
    # After a leading ROOT: a flag that takes any number of values would swallow it.
    head = 1 if args and not args[0].startswith("-") else 0
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
    """Standard output, with the usage line in the order of a call: ludic train ROOT [OPTIONS]."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._stream.write(_USAGE.sub(r" \1 [OPTIONS]", text, count=1))


def _in_a_line(box: str) -> str:
    """A box of tyro's as one line: its first part, without the title, the rest of help and names of our classes."""
    # One character of border on the left; where the terminal knows ASCII only, a space, and a rule below the title.
    rows = [row[1:].rstrip(" │") for row in box.splitlines()[1:]]
    parts = groupby(rows, lambda row: bool(re.match(" *[─-]{3}", row)))
    rows = next((list(part) for is_rule, part in parts if not is_rule), [])
    if rows and rows[0].startswith(" Missing from "):
        # Each name has five spaces before it, its help has more.
        return "missing: " + ", ".join(row.strip() for row in rows if re.match(r" {5}\S", row))
    text = " ".join(row.strip() for row in rows) or " ".join(box.split())
    return re.sub(r"^Error parsing (?:[A-Za-z]\w*: )?", "", text).rstrip(".")


def check_flags(args: Sequence[str], settings: type, program: str) -> None:
    """Exit with 2 and a line for a flag that no setting has."""
    # A keyword of Python has an underscore behind it as a field, and none as a flag.
    names = [name.rstrip("_").replace("_", "-") for name in field_names(settings)]
    for flag in (match[1] for match in map(_FLAG.match, args) if match):
        name = flag.replace("_", "-").removeprefix("no-")
        if name in (*names, "help") or flag.startswith("tyro-"):
            continue
        close = difflib.get_close_matches(name, [*names, "config"], n=1)
        hint = f"did you mean --{close[0]}?" if close else f"`{program} --help` lists the options"
        print(f"ludic: there is no option --{flag}; {hint}", file=sys.stderr)
        sys.exit(2)


def take_config(args: Sequence[str], settings: type) -> tuple[list[str], dict[str, Any]]:
    """The arguments without --config, and the settings in its file; raises ConfigError for a bad file."""
    rest, path = take_option(list(args), "--config", "a TOML file")
    return rest, _read_toml(local_path(path, "--config"), settings) if path else {}


def _preset(args: list[str], values: Mapping[str, Any], settings: type) -> dict[str, Any]:
    """The settings of the algorithm that the flags name, or else the file; {} where neither does."""
    if "algorithm" not in field_names(settings):
        return {}
    _, name = take_option(args, "--algorithm", f"one of {', '.join(algorithm_names())}")
    name = name or values.get("algorithm")
    return load_algorithm(str(name)) if name not in (None, "None") else {}


def to_flags(values: Mapping[str, Any]) -> list[str]:
    """The flags that set these fields: ["--learning-rate", "0.003", "--no-resume", ...]."""
    return [part for name, value in values.items() for part in _to_flag(name.replace("_", "-"), value)]


def _to_flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list | tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, Mapping) else str(value)]


def take_option(args: list[str], flag: str, wanted: str) -> tuple[list[str], str | None]:
    """The arguments without a flag and its value, and the value; raises ConfigError for a flag without one."""
    args = [part for arg in args for part in (arg.split("=", 1) if arg.startswith(f"{flag}=") else [arg])]
    if flag not in args:
        return args, None
    if args.count(flag) > 1:
        raise ConfigError(f"{flag} is given twice")
    place = args.index(flag)
    if place + 1 == len(args):
        raise ConfigError(f"{flag} wants {wanted} after it")
    return args[:place] + args[place + 2 :], args[place + 1]


def _read_toml(path: Path, settings: type) -> dict[str, Any]:
    """Settings in a file, less what an experiment holds for other commands.

    `ludic create` takes those of the run, `ludic train` those of the trainer, `ludic worker` its own, so that one file
    serves all.
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
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
            raise ConfigError(f"{path}: no setting is called {name!r}; {hint}")
    if "algorithm" in of_experiment:
        _check_algorithm(values.get("algorithm"), path)
    check_types(values, str(path), *([RunConfig, TrainConfig] if of_experiment else []), settings)
    return {name: value for name, value in values.items() if name in names}


def _check_algorithm(name: Any, path: Path) -> None:
    """Also where the command leaves it to another one. Raises ConfigError."""
    if name in (None, "None"):
        return
    if not isinstance(name, str):
        raise ConfigError(f"{path}: algorithm is {name!r}, wanted one of {', '.join(algorithm_names())}")
    try:
        load_algorithm(name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def field_names(settings: type) -> Iterator[str]:
    """Names of a dataclass's fields, those of nested ones in their place, without those that are given by place."""
    for field in fields(settings):
        nested = getattr(field.type, "__args__", (field.type,))[0]
        if isinstance(nested, type) and is_dataclass(nested):
            yield from field_names(nested)
        elif _POSITIONAL not in getattr(field.type, "__metadata__", ()):
            yield field.name
