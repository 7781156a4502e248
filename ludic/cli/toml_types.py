"""Check the values of a TOML file against the types of the settings, so that an error names the file and the setting.

Touches no file. Raises ConfigError.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ludic.errors import ConfigError

_IN_TOML = {str: "a string", int: "an integer", float: "a number", bool: "true or false", Path: "a string"}


def check_types(values: Mapping[str, Any], where: str, *settings: type) -> None:
    """Raises ConfigError for a value that does not fit the field of that name. where: the file."""
    types = {name: kind for each in settings for name, kind in _field_types(each).items()}
    for name, value in values.items():
        if name in types and not _fits(value, types[name]):
            raise ConfigError(f"{where}: {name} is {value!r}, wanted {_describe(types[name])}")


def _field_types(settings: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, including the fields of nested dataclasses."""
    hints = get_type_hints(settings)
    types: dict[str, Any] = {}
    for field in fields(settings):
        kind = hints[field.name]
        types.update(_field_types(kind) if isinstance(kind, type) and is_dataclass(kind) else {field.name: kind})
    return types


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value fits a type. TOML has no null, so the text "None" means null."""
    import msgspec  # takes longer than the rest of `ludic --help`

    if value == "None" and NoneType in get_args(kind):
        return True
    if get_origin(kind) is Mapping:
        return isinstance(value, Mapping)  # what it holds is checked by the settings, which name the wrong key
    if get_origin(kind) is tuple and not isinstance(value, list):
        value = [value]
    try:
        msgspec.convert(value, kind, dec_hook=lambda kind, text: kind(text))  # of the types here, only Path needs it
    except msgspec.ValidationError:
        return False
    return True


def _describe(kind: Any) -> str:
    """Describe a type for errors, such as: an integer or "None"."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(map(_describe, inner))
    if kind is NoneType:
        return '"None"'
    if origin is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if origin is tuple:
        return f"a list, each {_describe(inner[0])}"
    return _IN_TOML.get(kind, "a table")
