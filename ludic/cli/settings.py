"""Settings of a command: a dataclass filled from flags, then a TOML file, then an algorithm's preset, then defaults.

A preset, a file, and the settings of an earlier trainer, become flags in front of the user's own, so that
one parser checks them all and the last word is the user's.
"""

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import tyro

from ludic.errors import ConfigError
from ludic.training.presets import algorithm_names, load_algorithm

S = TypeVar("S")

RootUrl = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ROOT")]
"""A field for the run's folder or URL, given by place."""

_POSITIONAL = get_args(tyro.conf.Positional[str])[1]

_registry = tyro.constructors.ConstructorRegistry()


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


def _parse_json(text: str) -> Mapping[str, Any]:
    value = json.loads(text)
    if not isinstance(value, Mapping):
        raise ValueError(f"{text} is no JSON object")
    return value


def parse(
    settings: type[S], args: Sequence[str], *, program: str, description: str, earlier: Mapping[str, Any] | None = None
) -> S:
    """Settings from `earlier`, overruled by `--algorithm NAME`, by `--config FILE.toml`, and by the other flags.

    Wrong usage prints what is wrong and exits with 2; a bad file raises ConfigError.
    """
    args, path = take_option(list(args), "--config", "a TOML file")
    values = _read_toml(Path(path), settings) if path else {}
    presets: dict[str, Any] = {}
    has_algorithms = "objective" in field_names(settings)
    if has_algorithms:
        args, algorithm = take_option(args, "--algorithm", f"one of {', '.join(algorithm_names())}")
        presets = load_algorithm(algorithm) if algorithm else {}
    inserted = to_flags(earlier or {}) + to_flags(presets) + to_flags(values)
    # After a leading ROOT: a flag that takes any number of values would swallow it.
    head = 1 if args and not args[0].startswith("-") else 0
    args = [*args[:head], *inserted, *args[head:]]
    description = f"{description}. --config FILE.toml sets options."
    if has_algorithms:
        description += f" --algorithm sets those of {', '.join(algorithm_names())} (docs/algorithms.md)."
    return tyro.cli(settings, args=args, prog=program, description=description, registry=_registry)


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
    place = args.index(flag)
    if place + 1 == len(args):
        raise ConfigError(f"{flag} wants {wanted} after it")
    return args[:place] + args[place + 2 :], args[place + 1]


def _read_toml(path: Path, settings: type) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    names = list(field_names(settings))
    for name in values:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}"
            raise ConfigError(f"{path}: no setting is called {name!r}; {hint}")
    return values


def field_names(settings: type) -> Iterator[str]:
    """Names of a dataclass's fields, those of nested ones in their place, without those that are given by place."""
    for field in fields(settings):
        nested = getattr(field.type, "__args__", (field.type,))[0]
        if isinstance(nested, type) and is_dataclass(nested):
            yield from field_names(nested)
        elif _POSITIONAL not in getattr(field.type, "__metadata__", ()):
            yield field.name
