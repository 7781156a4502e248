"""Check the fields of a call's body by a table: each is used, recorded, or refused by its name.

Pure. Raises RefusedCallError.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ludic.base import finite_float, storable
from ludic.errors import RefusedRecordError
from ludic.gateway.calls import RefusalReason, RefusedCallError, refused
from ludic.records import Message, read_messages, read_tools, refusal

MAX_DEPTH = 100
"""Maximum depth of objects and lists in a body; chat templates and schemas recurse."""
MAX_MESSAGES = 20_000
"""Maximum messages of a call; reading them takes 0.2 s, in which nothing else is answered."""
MAX_ITEMS = 40_000
"""Maximum items of a Responses input, of which several may be one message."""
MAX_OBJECTS = 100_000
"""Maximum objects and lists in a body: of content, tool calls and schemas. A body of 32 MB could have ten million, and
they would take minutes."""
MAX_TOOLS = 2_000
MAX_STOPS = 256
HARMLESS = frozenset({
    "annotations", "cache_control", "caller", "citations", "eager_input_streaming", "id", "index", "is_error",
    "logprobs", "phase", "provider_specific_fields", "signature", "status",
})  # fmt: skip
"""Fields of messages and parts that say nothing to the model; CallRequest.asked counts them."""
_NEUTRAL: Mapping[str, Any] = {"defer_loading": False, "allowed_callers": ["direct"]}
"""Fields of tools, with the values at which they change nothing."""


def wrong(name: str, value: Any, wanted: str, *, reason: RefusalReason = "invalid") -> RefusedCallError:
    """Return the error for a field with an unusable value."""
    return refused(reason, str(refusal(name, value, wanted)), field=name)


# --- The body ---------------------------------------------------------------------------------------------------------


def read_body(body: bytes) -> dict[str, Any]:
    """Return the object of a body, whose texts UTF-8 can hold and whose depth is limited."""
    try:
        value = _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise refused("invalid", f"the body is not UTF-8: byte {error.start} is {body[error.start]:#04x}") from None
    except RecursionError:
        raise _too_deep("the body") from None
    except ValueError as error:
        # Without Python's advice behind a number with too many digits.
        cause = str(error).partition(";")[0]
        raise refused("invalid", f"the body is not JSON: {cause}" if body else "the body is empty") from None
    if not isinstance(value, dict):
        raise wrong("the body", value, "a JSON object")
    num_objects = 0
    for name, each in value.items():
        _check_text(name, "a field's name")
        num_objects += _check_value(each, name)
    if num_objects > MAX_OBJECTS:
        raise refused("invalid", f"the body has {num_objects:,} objects and lists, wanted at most {MAX_OBJECTS:,}")
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        # Not by `count`, which would take hours for a body of many names.
        twice = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise ValueError(f"an object has the key {twice[:60]!r} twice")
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_float=finite_float)


def _check_value(value: Any, name: str) -> int:
    """Return the number of objects and lists in a value."""
    level, num_objects = [value], 0
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            if isinstance(each, str):
                _check_text(each, name)
            elif isinstance(each, list):
                num_objects += 1
                below += each
            elif isinstance(each, dict):
                num_objects += 1
                below += each
                below += each.values()
        if not below:
            return num_objects
        level = below
    raise _too_deep(name)


def _check_text(text: str, name: str) -> None:
    if not text.isascii() and text != storable(text):
        shown = storable(name)
        sentence = f"{shown} has half of a surrogate pair, as of a cut emoji; wanted text that UTF-8 can hold"
        raise refused("invalid", sentence, field=shown)


def _too_deep(name: str) -> RefusedCallError:
    return refused("invalid", f"{name} is nested too deeply, wanted at most {MAX_DEPTH} levels")


# --- The table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is done with a field of a body. A field whose value is null is absent."""

    accepts: Callable[[Any], bool] = lambda value: True
    wanted: str = ""
    """The accepted values, for errors."""
    is_recorded: bool = True
    """Whether CallRequest.asked has it; other fields are read by their dialect."""
    lenient: bool = False
    """Whether --lenient treats other values as if the field were absent."""
    reason: RefusalReason = "invalid"


def is_number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_integer(value: Any) -> bool:
    """Return whether a value is a whole number of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_stops(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and len(texts) <= MAX_STOPS and all(isinstance(text, str) and text for text in texts)


READ = Rule(is_recorded=False)
BOOLEAN = Rule(accepts=lambda value: isinstance(value, bool), wanted="true or false")
NUMBER = Rule(accepts=is_number, wanted="a number")
INTEGER = Rule(accepts=is_integer, wanted="a whole number")
TEXT = Rule(accepts=lambda value: isinstance(value, str), wanted="a text")
OBJECT = Rule(accepts=lambda value: isinstance(value, dict), wanted="an object")
SWITCH = Rule(accepts=lambda value: isinstance(value, bool), wanted="true or false", is_recorded=False)
NAME = Rule(accepts=lambda value: isinstance(value, str) and value != "", wanted="a text", is_recorded=False)
LIMIT = Rule(accepts=lambda value: is_integer(value) and value > 0, wanted="a positive whole number", is_recorded=False)
_STOPS = f"a text, or a list of texts, none of them empty, at most {MAX_STOPS}"
STOPS = Rule(accepts=_is_stops, wanted=_STOPS, is_recorded=False)


def only(*values: Any, why: str = "", lenient: bool = False) -> Rule:
    """Return the rule of a field that can be recorded exactly at these values alone, which change nothing."""
    shown = " or ".join(json.dumps(value) for value in values) or "none"
    wanted = shown + (f"; {why}" if why else "")
    # A bool equals a number in Python.
    accepts = lambda value: any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)  # noqa: E731
    return Rule(accepts=accepts, wanted=wanted, lenient=lenient, reason="not_recordable")


@dataclass(slots=True)
class Fields:
    """The fields of a body that are present and accepted."""

    values: dict[str, Any]
    lenient: bool
    asked: dict[str, Any] = field(default_factory=dict)
    """As in CallRequest."""
    treated: list[str] = field(default_factory=list)
    """As in CallRequest."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field."""
        return self.values.get(name, default)

    def treat(self, name: str, value: Any, wanted: str) -> None:
        """Treat a field as auto if the gateway is lenient. Raises RefusedCallError otherwise."""
        if not self.lenient:
            raise wrong(name, value, f"{wanted}. A gateway with --lenient accepts it", reason="not_recordable")
        self.treated.append(name)
        self.asked[name] = value

    def note(self, names: Mapping[str, int]) -> None:
        """Count harmless fields that the model is not shown. Raises RefusedCallError for other fields."""
        for name, number in names.items():
            if name.rpartition(".")[2] not in HARMLESS:
                shown = name[:100]
                raise refused("invalid", f"{shown} is not a field that ludic reads; remove it", field=shown)
            self.asked[name] = self.asked.get(name, 0) + number


def read_fields(body: bytes, rules: Mapping[str, Rule], api: str, *, lenient: bool, names: Collection[str]) -> Fields:
    """Return the fields of a body by their rules. api: name of the API, for errors. names: of the models, if any."""
    fields = Fields(read_body(body), lenient)
    for name, value in [*fields.values.items()]:
        rule = rules.get(name)
        if value is None:
            del fields.values[name]
        elif rule is None:
            raise refused(
                "invalid", f"{name[:60]} is not a field of {api} that ludic reads; remove it", field=name[:60]
            )
        elif not rule.accepts(value):
            if not rule.lenient:
                raise wrong(name, value, rule.wanted, reason=rule.reason)
            fields.treat(name, value, rule.wanted)
        elif rule.is_recorded:
            fields.asked[name] = value
    model = fields.get("model")
    if model is None:
        raise refused("invalid", f"model is missing, wanted {_one_of(names)}", field="model")
    if names and model not in names:
        if not lenient:
            raise wrong("model", model, _one_of(names), reason="unknown_model")
        fields.treated.append("model")
    return fields


def _one_of(names: Collection[str]) -> str:
    return f"one of {', '.join(names)}" if names else "the name of a model"


# --- Messages and tools ----------------------------------------------------------------------------------------------


def conversation(fields: Fields, values: Any, name: str = "messages", names: Sequence[str] = ()) -> tuple[Message, ...]:
    """Return the messages of a body, at least one. names: of each value, for errors; else name[0], name[1] ..."""
    if not isinstance(values, list) or not values:
        shown = "missing" if values is None else "empty" if values == [] else "no list"
        raise refused("invalid", f"{name} is {shown}, wanted a list of messages", field=name)
    if len(values) > MAX_MESSAGES:
        sentence = f"{name} has {len(values):,} messages, wanted at most {MAX_MESSAGES:,}"
        raise refused("invalid", sentence, field=name)
    try:
        read = read_messages(values, name, names=names)
    except RefusedRecordError as error:
        raise refused("invalid", str(error), field=name) from None
    for message, trained, source in zip(read.messages, read.trained, read.sources, strict=True):
        if trained != (message.role == "assistant"):
            at = names[source] if names else f"{name}[{source}]"
            raise refused("invalid", f"{at} is marked for training, wanted a message without the mark", field=name)
    fields.note(read.unread)
    return read.messages


def function_tool(fields: Fields, tool: Any, at: str, known: Collection[str]) -> dict[str, Any]:
    """Return the schema of a function in OpenAI's form. tool: the object with name. known: its other fields."""
    if not isinstance(tool, dict):
        raise wrong(at, tool, "an object with a name and a JSON schema")
    name, text = tool.get("name"), tool.get("description")
    if not isinstance(name, str) or not name:
        raise wrong(f"{at}.name", name, "the name of the tool")
    if not isinstance(text, str | None):
        raise wrong(f"{at}.description", text, "a text")
    for each in ("parameters", "input_schema"):
        if each in known and not isinstance(tool.get(each), dict | None):
            raise wrong(f"{at}.{each}", tool[each], "a JSON schema, which is an object")
    asking = {name: value for name, value in tool.items() if name not in _NEUTRAL or value != _NEUTRAL[name]}
    return read_tools([known_fields(fields, asking, {"name", "description", *known}, at)])[0]


def known_fields(fields: Fields, value: Mapping[str, Any], known: Collection[str], at: str) -> dict[str, Any]:
    """Return the known fields of an object that are present, and count harmless ones.

    Raises RefusedCallError for others.
    """
    if not isinstance(value, Mapping):
        raise wrong(at, value, "an object")
    present = {name: each for name, each in value.items() if each is not None}
    # The index is left out of the name, so that the fields of all items are counted together.
    fields.note({f"{re.sub(r'[0-9]+', '', at)}.{name}": 1 for name in sorted(present.keys() - known - {"type"})})
    return {name: each for name, each in present.items() if name in known}


def custom_tool(fields: Fields, tool: Any, at: str) -> dict[str, Any]:
    """Return the schema of a function with one text `input` for a custom tool, whose input is free text.

    A grammar of the input is shown to the model; it is not enforced.
    """
    if not isinstance(tool, dict):
        raise wrong(at, tool, "an object with a name")
    form = tool.get("format")
    schema = function_tool(fields, {name: each for name, each in tool.items() if name != "format"}, at, ())
    function = schema["function"]
    if form is not None:
        function["description"] = "\n\n".join([*filter(None, [function.get("description"), _grammar(form, at)])])
    text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    function["parameters"] = text | {"additionalProperties": False}
    return schema


def _grammar(form: Any, at: str) -> str:
    """Return the sentence about the format of a custom tool; empty for plain text."""
    inner = form.get("grammar", form) if isinstance(form, dict) else form
    match form, inner:
        case {"type": "text"}, _:
            return ""
        case {"type": "grammar"}, {"syntax": str(syntax), "definition": str(definition)}:
            return f"The input follows this {syntax} grammar:\n{definition}"
    raise wrong(f"{at}.format", form, "a format of type text, or a grammar with syntax and definition")


def tool_list(fields: Fields) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the field's name and the object of each tool of a body."""
    tools = fields.get("tools", [])
    if not isinstance(tools, list):
        raise wrong("tools", tools, "a list of tools")
    if len(tools) > MAX_TOOLS:
        raise refused("invalid", f"tools has {len(tools):,} tools, wanted at most {MAX_TOOLS:,}", field="tools")
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise wrong(f"tools[{number}]", tool, "an object")
        yield f"tools[{number}]", tool


def refuse_same_names(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise RefusedCallError if two tools have one name, which the model can't distinguish."""
    seen: set[str] = set()
    for number, tool in enumerate(tools):
        name = tool["function"]["name"]
        if name in seen:
            raise wrong(f"tools[{number}]", name, "a name that no other tool has", reason="invalid")
        seen.add(name)


def only_auto(fields: Fields, choice: Any, kind: Any) -> bool:
    """Return whether tools may be called. choice: value of tool_choice; kind: its name. Raises RefusedCallError."""
    if choice is None:
        return True
    if kind not in ("auto", "none"):
        fields.treat("tool_choice", choice, "auto or none; a forced call is not sampled by the model alone")
        return True
    fields.asked["tool_choice"] = choice
    return bool(kind == "auto")


def stop_texts(value: Any) -> tuple[str, ...]:
    """Return the stop texts of a field with the rule STOPS."""
    return (value,) if isinstance(value, str) else tuple(value or ())
