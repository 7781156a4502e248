"""Find tool calls in a completion, in the formats of the common model families.

    hermes     <tool_call>{"name": ..., "arguments": {...}}</tool_call>                Hermes, Qwen 2.5 and 3
    llama      {"name": ..., "parameters": {...}}, also after <|python_tag|>            Llama 3.1 and later
    mistral    [TOOL_CALLS][{"name": ..., "arguments": {...}}], [TOOL_CALLS]name[ARGS]{...}
    json       ```json {"name": ..., "arguments": {...}} ```
    json:TAG   <TAG>{"name": ..., "arguments": {...}}</TAG>
    qwen3_coder  XML (ludic.agents.tools.xml_calls)                                    Qwen3-Coder, Qwen 3.5

Pure text; raises nothing for any text. [TOOL_CALLS], [ARGS] and <|python_tag|> are special tokens of their tokenizers:
decode a completion with its special tokens before it is parsed as llama or mistral.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ludic.agents.tools.xml_calls import CALL, EXAMPLE, FUNCTION, Tools, UnreadableError, near, read_calls, skip_space
from ludic.base import find_json, read_json, storable
from ludic.errors import ModelError
from ludic.models import render_text
from ludic.records import Message, ToolCall
from ludic.settings import TOOL_FORMAT, find
from ludic.settings.kinds import unknown

DEFAULT_FORMAT = "hermes"
"""Default format, if the chat template does not show one."""
MAX_UNREADABLE = 3
"""Unreadable calls after which the rest of a text is not searched: a model in a loop may write thousands of them."""

_TOO_DEEP = "the JSON of the call is nested too deeply"
_WRITTEN = '{"name": "TOOL", "arguments": {...}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCalls:
    """Tool calls found in a text."""

    calls: tuple[ToolCall, ...]
    """Calls in the order of the text, without results; ids count from 0 in each text."""
    feedback: str | None = None
    """Message to the model about unreadable markup; None if there is none."""
    rest: str = ""
    """The text around the calls."""


class ToolFormat(Protocol):
    """The way a model family writes tool calls."""

    @property
    def calls_apart(self) -> bool:
        """True if chat templates of the family need calls apart from the text of a message."""

    def parse(self, text: str, tools: Tools = ()) -> ParsedCalls:
        """Find the calls in a completion. Never raises. tools: schemas, for formats without types of values."""


_Call = tuple[str, str]
"""Name and arguments, the latter as JSON text."""
_Read = Callable[[str, int, Tools], tuple[list[_Call], int]]
"""Read calls that begin at an index of a text; returns them and the index of their end, or raises UnreadableError."""


@dataclass(frozen=True, slots=True)
class _Markup:
    """A format defined by the start of its calls and a function that reads them."""

    start: re.Pattern[str]
    read: _Read
    example: str
    calls_apart: bool = False

    def parse(self, text: str, tools: Tools = ()) -> ParsedCalls:
        found: list[_Call] = []
        problems: list[str] = []
        around: list[str] = []
        position = end = 0
        while len(problems) < MAX_UNREADABLE and (match := self.start.search(text, position)):
            try:
                calls, position = self.read(text, match.end(), tools)
            # RecursionError: for a value that the decoder accepts but the encoder does not.
            except (UnreadableError, RecursionError) as error:
                problems.append(str(error) if isinstance(error, UnreadableError) else _TOO_DEEP)
                # A start may be an empty match, which the next search would find again.
                calls, position = [], max(match.end(), match.start() + 1, getattr(error, "position", 0))
            if calls:
                around.append(text[end : match.start()])
                end = position
            found += calls
        around.append(text[end:])
        calls_with_ids = (ToolCall(id=f"call_{i}", name=name, arguments=a) for i, (name, a) in enumerate(found))
        return ParsedCalls(
            calls=tuple(calls_with_ids), feedback=_feedback(problems, self.example), rest="".join(around).strip()
        )


def make_tool_format(name: str) -> ToolFormat:
    """Return a format by its name in TOOL_FORMAT, such as hermes or json:TAG.

    Raises ConfigError for any other name.
    """
    _, colon, tag = name.partition(":")
    if colon and not re.fullmatch(r"[A-Za-z_][\w.-]*", tag):
        raise unknown(TOOL_FORMAT, name)
    found = find(TOOL_FORMAT, name)
    made: ToolFormat = found() if colon else found
    return made


_PROBE = {"word": "cats", "number": 7}
PROBE_SCHEMA = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Look.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "A word."},
                "number": {"type": "integer", "description": "A number."},
            },
            "required": ["word", "number"],
        },
    },
}
"""Schema of a tool for synthetic conversations, by which the behaviour of chat templates is found."""


def format_of_template(tokenizer: Any) -> str | None:
    """Return the format in which a tokenizer's chat template shows a tool call; None if it shows no known format.

    The template renders a call, which the format reads back.
    """
    call = ToolCall(id="call00000", name="probe", arguments=_json_text(_PROBE))
    question = Message(role="user", content="LUDIC ASKS")
    answer = Message(role="assistant", content="", tool_calls=(call,))
    result = Message(role="tool", content="LUDIC ANSWERS", name="probe")  # some templates require one after a call
    try:
        text = render_text(tokenizer, [question, answer, result], tools=[PROBE_SCHEMA], add_generation_prompt=False)
    except ModelError:
        return None
    shown = text.rpartition(question.content)[2].partition(result.content)[0]
    is_marked = False
    formats: dict[str, _Markup] = {name: find(TOOL_FORMAT, name) for name in TOOL_FORMAT.names() if ":" not in name}
    for name, each in formats.items():
        is_it = _is_probe(each.parse(shown, [PROBE_SCHEMA]).calls)
        if is_it and not (is_marked and name == _WITHOUT_MARKUP):
            return name
        is_marked |= each.start.search(shown) is not None
    return None


def _is_probe(calls: Sequence[ToolCall]) -> bool:
    try:
        return [(call.name, read_json(call.arguments)) for call in calls] == [("probe", _PROBE)]
    except (ValueError, RecursionError):  # arguments in a text that is not JSON
        return False


def likely_format(tokenizer: Any) -> tuple[str, str | None]:
    """Return the default format of a run, and a doubt about it; no doubt (None) if the template shows the format."""
    shown = format_of_template(tokenizer)
    if shown is not None:
        return shown, None
    return DEFAULT_FORMAT, "the chat template shows no tool call in a format that ludic knows; --tool-format sets it"


def json_in_tag(tag: str) -> _Markup:
    """Return the format json:TAG."""
    read = partial(_read_until, f"</{tag}>", True)
    return _Markup(re.compile(re.escape(f"<{tag}>")), read, f"<{tag}>{_WRITTEN}</{tag}>")


def _read_until(close: str, only_calls: bool, text: str, start: int, _: Tools) -> tuple[list[_Call], int]:
    """Read one call or a list of calls, then the closing markup; it may be missing at the end of the text.

    only_calls: whether other JSON is an error; otherwise it is a part of the text.
    """
    value, end = _read_json(text, start)
    calls = _calls_of(value, strict=only_calls)
    end = skip_space(text, end)
    if text.startswith(close, end):
        return calls, end + len(close)
    if end < len(text):
        raise UnreadableError(f"after the JSON of the call comes {near(text, end)} instead of {close}")
    return calls, end


def _read_llama(text: str, start: int, _: Tools) -> tuple[list[_Call], int]:
    """Read calls of Llama, of which `;` separates several. Other JSON is an answer, and so a part of the text."""
    after_tag = text.startswith(_PYTHON_TAG, start)
    value, end = _read_json(text, start + len(_PYTHON_TAG) if after_tag else start)
    is_call = isinstance(value, dict) and ("parameters" in value or "arguments" in value)
    calls = _calls_of(value, strict=True) if after_tag or is_call else []
    separator = _SEPARATOR.match(text, end) if calls else None
    return calls, separator.end() if separator else end


def _read_mistral(text: str, start: int, _: Tools) -> tuple[list[_Call], int]:
    """Read a JSON list of calls, or calls of the form name[ARGS]{...} (after mistral-common's tokenizer v11)."""
    start = skip_space(text, start)
    if text[start : start + 1] in ("[", "{"):
        value, end = _read_json(text, start)
        return _calls_of(value, strict=True), end
    calls: list[_Call] = []
    while match := _MISTRAL_NAME.match(text, start):
        arguments, start = _read_json(text, match.end())
        calls.append((match["name"], _json_text(arguments)))
    if not calls:
        raise UnreadableError(f"after [TOOL_CALLS] comes {near(text, start)}")
    return calls, start


def _read_xml(text: str, start: int, tools: Tools) -> tuple[list[_Call], int]:
    calls, end = read_calls(text, start, tools)
    try:
        return [(storable(name), _json_text(arguments)) for name, arguments in calls], end
    except RecursionError:
        raise UnreadableError(_TOO_DEEP, end) from None


_PYTHON_TAG = "<|python_tag|>"
_SEPARATOR = re.compile(r"\s*;\s*")
_MISTRAL_NAME = re.compile(r"\s*(?P<name>[\w./-]+)(?:\[CALL_ID\]\w*)?\[ARGS\]")
# A lookahead, so that the tag or the brace is read again. Llama begins with any key of a call.
_LLAMA_START = re.compile(rf'(?={re.escape(_PYTHON_TAG)}|\{{\s*"(?:name|parameters|arguments|type)"\s*:)')
_XML_START = re.compile(f"(?={CALL}|{FUNCTION})")
_WITHOUT_MARKUP = "llama"
"""The last format: it would read JSON in the markup of the others, too."""
HERMES = json_in_tag("tool_call")
QWEN3_CODER = _Markup(_XML_START, _read_xml, EXAMPLE)
MISTRAL = _Markup(re.compile(r"\[TOOL_CALLS\]"), _read_mistral, f"[TOOL_CALLS][{_WRITTEN}]", calls_apart=True)
JSON = _Markup(re.compile(r"```json\b"), partial(_read_until, "```", False), f"```json\n{_WRITTEN}\n```")
LLAMA = _Markup(_LLAMA_START, _read_llama, '{"name": "TOOL", "parameters": {...}}')


def _calls_of(value: Any, *, strict: bool) -> list[_Call]:
    """Return the calls that JSON describes. For anything else, raise UnreadableError if strict, else return none."""
    entries = value if isinstance(value, list) else [value]
    try:
        calls = [_call_of(entry) for entry in entries]
    except UnreadableError:
        if strict:
            raise
        return []
    if strict and not calls:
        raise UnreadableError("the list of calls is empty")
    return calls


def _call_of(entry: Any) -> _Call:
    if not isinstance(entry, dict):
        raise UnreadableError(f"a call is a JSON object, not {_json_text(entry)[:40]}")
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        raise UnreadableError('the JSON of the call has no "name"')
    arguments = entry.get("arguments", entry.get("parameters", {}))
    # Some models write the arguments as JSON inside a string, as OpenAI's API does.
    return storable(name), storable(arguments) if isinstance(arguments, str) else _json_text(arguments)


def _read_json(text: str, start: int) -> tuple[Any, int]:
    start = skip_space(text, start)
    try:
        return find_json(text, start)
    except json.JSONDecodeError as error:
        problem = f"the JSON of the call is broken: {error.msg} at {near(text, error.pos)}"
        raise UnreadableError(problem, error.pos) from error
    except ValueError as error:
        raise UnreadableError(f"the JSON of the call can't be read: {error}") from error


def _json_text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if text == storable(text) else json.dumps(value, ensure_ascii=True)


def _feedback(problems: Iterable[str], example: str) -> str | None:
    listed = "; ".join(problems)
    return f"A tool call could not be read: {listed}. Write each call as {example}" if listed else None
