"""Read tool calls in the XML of Qwen3-Coder and Qwen3.5, whose values are typed by the tool's JSON schema.

    <tool_call>
    <function=find>
    <parameter=query>
    cats
    </parameter>
    </function>
    </tool_call>

The format escapes nothing. A tag in a value is part of it unless it is where a tag of the call is expected: at the
beginning of a line, or for </parameter> also before another tag of the call. The text between the line breaks around it
is the value. Raises UnreadableError, which names the position; RecursionError for deep JSON.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ludic.base import find_json

EXAMPLE = "<tool_call>\n<function=TOOL>\n<parameter=NAME>\nVALUE\n</parameter>\n</function>\n</tool_call>"
CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
FUNCTION = "<function="

Tools = Sequence[Mapping[str, Any]]
"""Schemas of tools, as chat templates take them."""

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^<>\n]+>")
_PARAMETER, _END_OF_VALUE, _END_OF_FUNCTION = "<parameter=", "</parameter>", "</function>"
_TAGS = re.compile("|".join(map(re.escape, (_END_OF_VALUE, _PARAMETER, _END_OF_FUNCTION, CALL))))
_AFTER_VALUE = re.compile(rf"\s*(?:{_PARAMETER}|{_END_OF_FUNCTION}|\Z)")
_AFTER_FUNCTION = re.compile(rf"\s*(?:{END_OF_CALL}|\Z)")
_WORDS_OF_PYTHON = {"True": True, "False": False, "None": None}
"""Spelling of these JSON values in the templates of the family."""


class UnreadableError(Exception):
    """Call markup that can't be read."""

    def __init__(self, problem: str, position: int = 0) -> None:
        """position: index in the text up to which the call was read; 0 if unknown."""
        super().__init__(problem)
        self.position = position


def read_calls(text: str, start: int, tools: Tools) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """Read the call that begins with <tool_call> or <function= at an index; return names with arguments, and the end's
    index."""
    is_tagged = text.startswith(CALL, start)
    at = skip_space(text, start + len(CALL)) if is_tagged else start
    calls = []
    while text.startswith(FUNCTION, at):
        name, arguments, at = _read_function(text, at, tools)
        calls.append((name, arguments))
        end, at = at, skip_space(text, at)
        if text.startswith(END_OF_CALL, at):
            return calls, at + len(END_OF_CALL)
        if not is_tagged or at == len(text):  # models leave out tags of the call
            return calls, end
    place = f"the call of {calls[-1][0]}" if calls else CALL
    wanted = END_OF_CALL if calls else f"{FUNCTION}TOOL>"
    raise UnreadableError(f"after {place} comes {near(text, at)} instead of {wanted}", at)


def _read_function(text: str, start: int, tools: Tools) -> tuple[str, dict[str, Any], int]:
    name, at = _read_name(text, start, FUNCTION)
    schema_of = _schemas(name, tools)
    arguments: dict[str, Any] = {}
    while True:
        at = skip_space(text, at)
        if text.startswith(_END_OF_FUNCTION, at):
            return name, arguments, at + len(_END_OF_FUNCTION)
        if not text.startswith(_PARAMETER, at):
            wanted = f"{_PARAMETER}NAME> or {_END_OF_FUNCTION}"
            raise UnreadableError(f"in the call of {name} comes {near(text, at)} instead of {wanted}", at)
        key, at = _read_name(text, at, _PARAMETER)
        value, at = _read_value(text, at, f"parameter {key} of {name}")
        if key in arguments:
            raise UnreadableError(f"parameter {key} of {name} is given twice", at)
        arguments[key] = _typed(value, schema_of(key), f"parameter {key} of {name}", at)


def _read_name(text: str, start: int, tag: str) -> tuple[str, int]:
    match = _NAME.match(text, start + len(tag))
    if match is None or not match[0][:-1].strip():
        raise UnreadableError(f"a name and > are missing in {near(text, start)}", start + len(tag))
    return match[0][:-1].strip(), match.end()


def _read_value(text: str, start: int, what: str) -> tuple[str, int]:
    """Return the text of a value, and the index behind its closing tag."""
    for tag in _TAGS.finditer(text, start):
        begins_a_line = text[tag.start() - 1] == "\n"
        if tag[0] == _END_OF_VALUE:
            if begins_a_line or _AFTER_VALUE.match(text, tag.end()):
                value = text[start : tag.start()]
                return value.removeprefix("\n").removesuffix("\n"), tag.end()
        elif begins_a_line and (tag[0] != _END_OF_FUNCTION or _AFTER_FUNCTION.match(text, tag.end())):
            raise UnreadableError(f"{what} has no {_END_OF_VALUE} before {near(text, tag.start())}", tag.start())
    raise UnreadableError(f"{what} has no {_END_OF_VALUE}", len(text))


# --- Types -----------------------------------------------------------------------------------------------


def _schemas(name: str, tools: Tools) -> Callable[[str], Any]:
    """Return a function that returns the schema of a tool's parameter; a text schema for an undeclared one."""
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
    parameters = next((each.get("parameters") for each in functions if each.get("name") == name), None)
    known = parameters if isinstance(parameters, Mapping) else {}
    properties, others = known.get("properties"), known.get("additionalProperties")
    others = others if isinstance(others, Mapping) else {"type": "string"}
    return lambda key: properties.get(key, others) if isinstance(properties, Mapping) else others


def _typed(text: str, schema: Any, what: str, end: int) -> Any:
    """Return the value of a text: the text itself if the schema wants one, else its value as JSON."""
    kinds = set(_kinds(schema))
    if kinds == {"string"}:
        return text
    try:
        value, is_json = _as_json(text)
    except RecursionError:
        raise UnreadableError(f"{what} is nested too deeply", end) from None
    if not kinds:  # any type, or one that is defined elsewhere
        return value if is_json else text
    if "string" in kinds:
        kind = _kind_of(value)
        is_one = kind != "string" and (kind in kinds or (kind == "integer" and "number" in kinds))
        return value if is_json and is_one else text
    if is_json:
        return value
    shown = repr(text) if len(text) <= 40 else f"{text[:40]!r}..."
    raise UnreadableError(f"{what} is {shown}, wanted {' or '.join(sorted(kinds))} as JSON", end)


def _as_json(text: str) -> tuple[Any, bool]:
    """Return the value of a text, and whether it has one."""
    stripped = text.strip()
    if stripped in _WORDS_OF_PYTHON:
        return _WORDS_OF_PYTHON[stripped], True
    try:
        value, end = find_json(stripped, 0)
    except ValueError:
        return None, False
    return (value, True) if end == len(stripped) else (None, False)


def _kinds(schema: Any) -> Iterator[str]:
    """Yield the types of JSON schema that a value may have; none if the schema does not say."""
    if not isinstance(schema, Mapping):
        return
    types = schema.get("type")
    yield from (each for each in ([types] if isinstance(types, str) else _listed(types)) if isinstance(each, str))
    if types is None:
        yield from map(_kind_of, _listed(schema.get("enum")) or [schema[each] for each in ("const",) if each in schema])
        for each in (*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))):
            yield from _kinds(each)
    if schema.get("nullable"):
        yield "null"


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _kind_of(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


# --- Texts -----------------------------------------------------------------------------------------------


def skip_space(text: str, start: int) -> int:
    """Return where the white space that begins at an index of a text ends."""
    match = _SPACE.match(text, start)
    assert match is not None
    return match.end()


def near(text: str, position: int) -> str:
    """Show a place of a text for a message."""
    return repr(text[position : position + 20]) if position < len(text) else "the end of the text"
