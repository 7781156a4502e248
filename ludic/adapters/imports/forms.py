"""Read the forms in which files hold conversations and pairs of answers, as records of the format jsonl.

A row's fields say its form; a file has one. The rows of `ludic.sft` and `ludic.dpo` and the records of
`ludic import --from jsonl` are read here, and their messages by ludic.records.messages. Pure. Raises RefusedRecordError
for a record, ConfigError for a file, whose texts name the row, the field, what was found and what was wanted.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import to_builtins

from ludic.adapters.imports.episodes import wanted_text
from ludic.base import plural
from ludic.errors import ConfigError, RefusedRecordError
from ludic.records import MEDIA, ROLES, Message, marked, read_messages, read_tools, refusal
from ludic.root import OWN_FORM

FormRow = Mapping[str, Any]
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form of rows."""

    name: str
    """Completes: read as ..."""
    fields: str
    """The fields that make it, for messages and docs/fit.md."""
    fits: Callable[[FormRow], bool]
    read: Callable[[FormRow], dict[str, Any]]
    """Returns `messages`, or `prompt` and `completion`, of pairs `prompt` alone, which may be None; and other fields
    under the names of the format jsonl."""
    reads: tuple[str, ...]
    """All fields that `read` uses."""
    note: str = ""
    """What must be told of them where they are trained on."""


class LeftOutError(RefusedRecordError):
    """A row that can be read and must not be trained on. Rows are counted by this text, which has no values."""


# --- Parts of all forms ----------------------------------------------------------------------------------------------

_CHATS = ("messages", "conversations", "conversation")
"""Columns of whole conversations."""
_BEGINNING = ("system", "developer", "user")
"""Roles of the messages that a whole conversation begins with, and an answer does not."""


def _chat_columns(row: FormRow) -> list[str]:
    return [name for name in _CHATS if row.get(name) is not None]


def _chat(row: FormRow) -> tuple[str, Any]:
    """Return the column of the conversation and its value, which may be JSON text."""
    names = _chat_columns(row)
    if len(names) > 1:
        raise RefusedRecordError(f"has {' and '.join(names)}, wanted one conversation a row")
    return names[0], _parsed(row[names[0]])


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _listed(value: Any) -> Any:
    """Return the messages in JSON text, as tables without nested types hold them; other values as they are."""
    parsed = _parsed(value) if isinstance(value, str) else None
    return parsed if any(map(_is_message, parsed if isinstance(parsed, list) else [parsed])) else value


def _is_message(value: Any) -> bool:
    """Return whether an object is a message; others are answers in JSON."""
    if not isinstance(value, Mapping):
        return False
    is_turn = "value" in value and value.get("from") in (*_ROLES, _CALL)
    return is_turn or (value.get("role") in _MESSAGE_ROLES and not value.keys().isdisjoint(_OF_MESSAGES))


_MESSAGE_ROLES = (*ROLES, "function")
_OF_MESSAGES = ("content", "tool_calls", "function_call", "refusal")
_PYTHON_TEXT = re.compile(r"\s*(?:\[\s*)?\{\s*'(role|content|from|value)'")
"""A list of messages as Python shows it, which pandas writes into CSV files."""


def _messages(value: Any, name: str, role: str | None = None) -> Messages:
    """Return messages without nulls; a text is one message of `role`, and a message is a list of one.

    Only an answer may be an empty text.
    """
    if isinstance(value, str) and _PYTHON_TEXT.match(value):
        raise refusal(name, value, "messages as JSON; this is Python's text of a list")
    value = _listed(value)
    if isinstance(value, str) and (value.strip() or role == "assistant") and role is not None:
        return [{"role": role, "content": value}]
    listed = [value] if isinstance(value, Mapping) else value
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise refusal(name, value, "messages" if role is None else "a text or messages")
    if isinstance(listed[0], Mapping) and listed[0].get("from") is not None:
        listed = [_turn(each, name) for each in listed]
    listed = [to_builtins(each) if isinstance(each, Message) else each for each in listed]
    read_messages(listed, name)  # refuses what can't be read
    return [{key: part for key, part in each.items() if part is not None} for each in listed]


def _text(row: FormRow, name: str, *, may_be_absent: bool = False) -> str:
    value = row.get(name)
    if value is None and may_be_absent:
        return ""
    if not isinstance(value, str):
        raise refusal(name, value, "a text")
    return value


_TOOLS = ("tools", "functions", "tool_defs")


def _tools(row: FormRow) -> dict[str, Any]:
    """Return the schemas of tools as `tools`. Raises RefusedRecordError if they can't be read."""
    names = [name for name in _TOOLS if row.get(name)]
    if len(names) > 1:
        raise RefusedRecordError(f"has {' and '.join(names)}, wanted the schemas of tools once")
    if names and names[0] != "tools":
        return {"tools": read_tools(row[names[0]])}
    if row.get("tools") in (None, ""):
        return {}
    read_tools(row["tools"])  # refuses what can't be read
    return {"tools": row["tools"]}


def _with_system(messages: Messages, row: FormRow) -> Messages:
    """Return messages that begin with the text of the column system, if there is one."""
    system = row.get("system")
    if isinstance(system, Sequence) and not isinstance(system, str):  # parts of text, as Anthropic has them
        (read,) = read_messages([{"role": "system", "content": system}], "system").messages
        system = read.content
    else:
        system = _text(row, "system", may_be_absent=True)
    if not system.strip():
        return messages
    if messages and messages[0]["role"] == "system":
        if messages[0].get("content") == system:
            return messages
        raise RefusedRecordError("has a system message besides that of its conversation")
    return [{"role": "system", "content": system}, *messages]


# --- ShareGPT --------------------------------------------------------------------------------------------------------

_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
_CALL = "function_call"
_ARGUMENTS = ("arguments", "parameters")


def _turn(value: Any, name: str) -> dict[str, Any]:
    """Return a turn of ShareGPT as a message; its other fields stay."""
    if not isinstance(value, Mapping) or not isinstance(value.get("from"), str):
        raise refusal(f"a turn of {name}", value, "an object with from and value")
    if value.get("role") is not None:
        raise RefusedRecordError(f"a turn of {name} has from and role, wanted one of them")
    side, text = value["from"], value.get("value")
    others = {key: part for key, part in value.items() if key not in ("from", "value") and part is not None}
    if not isinstance(text, str):
        raise refusal(f"the value of a turn of {name}", text, "a text")
    if side == _CALL:
        own: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": _calls(text)}
    elif side in _ROLES:
        own = {"role": _ROLES[side], "content": text}
    else:
        raise refusal(f"from of a turn of {name}", side, f"one of {', '.join([*_ROLES, _CALL])}")
    for key in own.keys() & others.keys():
        raise RefusedRecordError(f"a turn of {name} has value and {key}, wanted one of them")
    return {**own, **others}


def _calls(text: str) -> list[dict[str, Any]]:
    """Return the calls in JSON text as OpenAI's; their other fields stay."""
    found = _parsed(text)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(each, Mapping) and isinstance(each.get("name"), str) for each in calls):
        raise refusal(f"the value of {_CALL}", text, "JSON with name and arguments")
    return [_call(each) for each in calls]


def _call(value: FormRow) -> dict[str, Any]:
    others = {key: part for key, part in value.items() if key not in ("name", *_ARGUMENTS) and part is not None}
    arguments = [key for key in _ARGUMENTS if value.get(key) is not None]
    if len(arguments) > 1:
        raise RefusedRecordError(f"a {_CALL} has {' and '.join(arguments)}, wanted one of them")
    if "function" in others:
        raise RefusedRecordError(f"a {_CALL} has name and function, wanted one of them")
    function = {"name": value["name"], "arguments": value[arguments[0]] if arguments else None}
    return {"type": "function", **others, "function": function}


def _is_sharegpt(row: FormRow) -> bool:
    names = _chat_columns(row)
    value = _parsed(row[names[0]]) if names else None
    first = value[0] if isinstance(value, Sequence) and value else None
    return isinstance(first, Mapping) and first.get("from") is not None


def _sharegpt(row: FormRow) -> dict[str, Any]:
    name, value = _chat(row)
    tools = {name: read_tools(schemas) for name, schemas in _tools(row).items()}
    return {"messages": _with_system(_messages(value, name), row), **tools}


# --- The other forms of conversations --------------------------------------------------------------------------------


def _openai(row: FormRow) -> dict[str, Any]:
    name, value = _chat(row)
    return {"messages": _with_system(_messages(value, name), row), **_tools(row)}


def _has_completion(row: FormRow) -> bool:
    return row.get("prompt") is not None and row.get("completion") is not None


def _refuse_label(row: FormRow) -> None:
    """Raise RefusedRecordError for a label as of KTO: true and false, or 1 and 0, also as text."""
    label = row.get("label")
    if (label.strip().lower() if isinstance(label, str) else label) in _LABELS:
        raise RefusedRecordError(
            "has a label of good and bad completions, and all would be trained on; leave bad rows and the column out"
        )


_LABELS = (0, 1, "true", "false", "0", "1", "0.0", "1.0")


def _prompt_completion(row: FormRow) -> dict[str, Any]:
    _refuse_label(row)
    return {"prompt": row["prompt"], "completion": row["completion"], **_tools(row)}


def _is_of_verifiers(row: FormRow) -> bool:
    has_outcome = row.get("reward") is not None and (row.get("example_id") is not None or row.get("task") is not None)
    return row.get("prompt") is not None and "completion" in row and has_outcome


def _verifiers(row: FormRow) -> dict[str, Any]:
    """Results of an evaluation by verifiers up to 0.3, `vf-eval --save-results`.

    Source: verifiers/utils/save_utils.py, state_to_output, and message_utils.py, sanitize_tool_calls, which writes
    each tool call as JSON text. Metrics are repeated as fields of their own.
    """
    if not row.get("completion"):
        raise LeftOutError("without a completion")
    metrics, error = _parsed(row.get("metrics")), row.get("error")
    found = {
        "prompt": _with_calls(row["prompt"]),
        "completion": _with_calls(row["completion"]),
        **_tools(row),
        "episode_reward": row["reward"],
        "reward_components": metrics if isinstance(metrics, Mapping) else None,
        "env_example_id": None if row.get("example_id") is None else str(row["example_id"]),
        "group_id": row.get("example_id"),
        "env_name": None if row.get("task") == "default" else row.get("task"),
        "wanted": wanted_text(row.get("answer")) or None,
        "error": None if error is None else error if isinstance(error, str) else json.dumps(error, ensure_ascii=False),
        # A single turn always ends with max_turns_reached, so this says nothing of a limit.
        "truncation_reason": "context_length" if row.get("stop_condition") == "prompt_too_long" else None,
        "finish_reason": "length" if _is_truncated(row) else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _is_truncated(row: FormRow) -> bool:
    value = row.get("is_truncated")
    for texts, meaning in ((("true", "1"), True), (("false", "0", "none", ""), False)):
        if str(value).strip().lower() in texts:
            return meaning
    raise refusal("is_truncated", value, "true or false")


def _with_calls(value: Any) -> Any:
    value = _listed(value)
    if not isinstance(value, list):
        return value
    return [
        {**each, "tool_calls": [_parsed(call) for call in each["tool_calls"]]}
        if isinstance(each, Mapping) and isinstance(each.get("tool_calls"), list)
        else each
        for each in value
    ]


def _is_alpaca(row: FormRow) -> bool:
    return row.get("instruction") is not None and "output" in row


def _alpaca(row: FormRow) -> dict[str, Any]:
    answer = {"role": "assistant", "content": _text(row, "output")}
    return {"messages": [*_instruction(row), answer], **_tools(row)}


def _instruction(row: FormRow) -> Messages:
    """Return the messages before the answer: history, and the instruction, with its input in the next line."""
    history = _parsed(row.get("history")) or []
    is_list = isinstance(history, list) and all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in history)
    texts = [each for turn in history for each in turn] if is_list else [None]
    if any(not isinstance(each, str) for each in texts):
        raise refusal("history", history, "a list of pairs of an instruction and an answer, both texts")
    parts = [_text(row, "instruction"), _text(row, "input", may_be_absent=True)]
    asked = "\n".join(part for part in parts if part)
    roles = ["user", "assistant"] * (len(texts) // 2)
    before: Messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    return _with_system([*before, {"role": "user", "content": asked}], row)


CONVERSATIONS = (
    Form(
        name="messages",
        fields="`messages` (or `conversations`, `conversation`) with `role` and `content`",
        fits=lambda row: bool(_chat_columns(row)) and not _is_sharegpt(row),
        read=_openai,
        reads=(*_CHATS, "system", *_TOOLS),
    ),
    Form(
        name="ShareGPT",
        fields="`conversations` (or `messages`, `conversation`) with `from` and `value`",
        fits=_is_sharegpt,
        read=_sharegpt,
        reads=(*_CHATS, "system", *_TOOLS),
    ),
    Form(
        name="prompt and completion",
        fields="`prompt` and `completion`, texts or messages",
        fits=lambda row: _has_completion(row) and not _is_of_verifiers(row),
        read=_prompt_completion,
        reads=("prompt", "completion", *_TOOLS),
    ),
    Form(
        name="Alpaca",
        fields="`instruction`, `output`, and perhaps `input`, `system`, `history`",
        fits=_is_alpaca,
        read=_alpaca,
        reads=("instruction", "input", "output", "system", "history", *_TOOLS),
    ),
    Form(
        name="results of verifiers",
        fields="`prompt`, `completion`, `reward`, and `example_id` or `task`",
        fits=_is_of_verifiers,
        read=_verifiers,
        reads=(
            *("prompt", "completion", "reward", "metrics", "example_id", "task", "answer", "error"),
            *("is_truncated", *_TOOLS),
        ),
        note="all are trained on, whatever their reward",
    ),
)
"""Forms of conversations."""


# --- Prompts and answers ---------------------------------------------------------------------------------------------


def _joined(prompt: Messages, answer: Messages, name: str) -> tuple[Messages, int]:
    """Return prompt and answer as one conversation, and the number of the messages of the prompt.

    answer: the answer alone, or the whole conversation with the prompt, with or without its system message. name: of
    its field, for errors.
    """
    if answer[0]["role"] not in _BEGINNING:
        return [*prompt, *answer], len(prompt)
    system, asked = _parts(prompt)
    own_system, said = _parts(answer)
    if system and own_system and _Keys.of(system).keys != _Keys.of(own_system).keys:
        raise RefusedRecordError(f"{name} begins with another system message than the prompt")
    # A prompt of one message may be the last question of several.
    wanted, found = _Keys.of(asked), _Keys.of(said)
    last = [index for index, role in enumerate(found.roles) if role == "user"][-1:]
    starts = [0, *last] if len(asked) == 1 else [0]
    num_asked = len(wanted.keys)
    start = next((start for start in starts if found.keys[start : start + num_asked] == wanted.keys), None)
    if start is None:
        raise RefusedRecordError(f"{name} is a whole conversation, in which the prompt is not found")
    head = own_system or system
    end = found.sources[start + num_asked] if start + num_asked < len(found.keys) else len(said)
    return [*head, *said], len(head) + end


def _parts(messages: Messages) -> tuple[Messages, Messages]:
    """Return the system messages at the beginning, and the rest."""
    number = next((index for index, each in enumerate(messages) if each["role"] not in ("system", "developer")), None)
    return messages[:number], [] if number is None else messages[number:]


@dataclass(frozen=True, slots=True)
class _Keys:
    """What must be equal in two messages that are the same, for each message that `read_messages` returns.

    Ids, names, the spelling of arguments, and white space around texts may differ.
    """

    keys: list[Any]
    roles: list[str]
    sources: tuple[int, ...]
    """Index of each one in the list that was read."""
    trained: tuple[bool, ...]

    @classmethod
    def of(cls, messages: Messages) -> "_Keys":
        read = read_messages(messages)
        keys = [
            (
                *(each.role, each.content.strip(), (each.reasoning or "").strip()),
                [(call.name, _sorted(call.arguments)) for call in each.tool_calls],
            )
            for each in read.messages
        ]
        return cls(keys, [each.role for each in read.messages], read.sources, read.trained)


def _sorted(arguments: str) -> str:
    """Return arguments in one spelling; what is no JSON as it is."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _marked(messages: Messages, num_prompt: int) -> Messages:
    """Return messages of which the answers after the prompt are trained on, but those that say themselves that not."""
    return [*marked(messages[:num_prompt], trained=False), *marked(messages[num_prompt:], trained=True)]


def conversation_of(record: FormRow) -> dict[str, Any]:
    """Return a record that Form.read gave with `messages` instead of `prompt` and `completion`."""
    if "messages" in record:
        return dict(record)
    prompt = _messages(record["prompt"], "prompt", "user")
    answer = _messages(record["completion"], "completion", "assistant")
    messages = _marked(*_joined(prompt, answer, "completion"))
    return {"messages": messages} | {
        name: value for name, value in record.items() if name not in ("prompt", "completion")
    }


# --- Pairs -----------------------------------------------------------------------------------------------------------


def _question(row: FormRow) -> Any:
    return next((row[name] for name in ("prompt", "question") if row.get(name) is not None), None)


def _prompt_of_pair(row: FormRow) -> dict[str, Any]:
    if row.get("prompt") is not None and row.get("question") not in (None, row["prompt"]):
        raise RefusedRecordError("has prompt and question, wanted one of them")
    prompt = _question(row)
    messages = None if prompt is None else _with_system(_messages(prompt, "prompt", "user"), row)
    return {"prompt": messages, **_tools(row)}


def _prompt_of_chat(row: FormRow) -> dict[str, Any]:
    found = _sharegpt(row)
    return {**found, "prompt": found["messages"]}


def _has_pair(row: FormRow) -> bool:
    return row.get("chosen") is not None and row.get("rejected") is not None


def _is_pair_of(row: FormRow, name: str) -> bool:
    return _has_pair(row) and _question(row) is None and row.get(name) is not None


_SCORES = tuple(
    (form.format(word, "chosen"), form.format(word, "rejected"))
    for word in ("score", "rating", "reward", "avg_rating")
    for form in ("{0}_{1}", "{1}_{0}", "{1}-{0}")
)
"""Columns with the scores of both answers."""
_OF_PAIRS = ("chosen", "rejected", "system", *_TOOLS, *(name for names in _SCORES for name in names))
PAIRS = (
    Form(
        name="preference pairs",
        fields="`chosen` and `rejected`, texts or messages, and mostly `prompt` (or `question`)",
        fits=lambda row: _has_pair(row) and not (_is_pair_of(row, "instruction") or _is_pair_of(row, "conversations")),
        read=_prompt_of_pair,
        reads=("prompt", "question", *_OF_PAIRS),
    ),
    Form(
        name="preference pairs of Alpaca",
        fields="`instruction`, `chosen`, `rejected`, and perhaps `input`, `system`, `history`",
        fits=lambda row: _is_pair_of(row, "instruction"),
        read=lambda row: {"prompt": _instruction(row), **_tools(row)},
        reads=("instruction", "input", "history", *_OF_PAIRS),
    ),
    Form(
        name="preference pairs of ShareGPT",
        fields="`conversations`, `chosen`, `rejected`",
        fits=lambda row: _is_pair_of(row, "conversations"),
        read=_prompt_of_chat,
        reads=("conversations", *_OF_PAIRS),
    ),
)
"""Forms of pairs of answers."""


def _scores(row: FormRow) -> Iterator[tuple[float, float]]:
    for names in _SCORES:
        found = [_number(row.get(name)) for name in names]
        if found[0] is not None and found[1] is not None:
            yield found[0], found[1]


def _unpaired_scores(row: FormRow) -> Iterator[str]:
    """Yield the columns of scores that are not compared: the other one is absent or no number, or they are not."""
    for names in _SCORES:
        if any(_number(row.get(name)) is None for name in names):
            yield from (name for name in names if row.get(name) is not None)


def _number(value: Any) -> float | None:
    try:
        number = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):  # a rating may be N/A
        return None
    return number if number is not None and number == number else None


def _pair(row: FormRow, prompt: Messages | None) -> tuple[Messages, Messages]:
    """Return both conversations of a pair, with marks. Raises LeftOutError, RefusedRecordError."""
    sides = [_messages(row[side], side, "assistant") for side in ("chosen", "rejected")]
    for side, messages in zip(("chosen", "rejected"), sides, strict=True):
        if messages[-1]["role"] != "assistant":
            raise RefusedRecordError(f"{side} ends with a message of {messages[-1]['role']}, wanted an answer")
    for chosen, rejected in _scores(row):
        if chosen <= rejected:
            raise LeftOutError("with equal scores" if chosen == rejected else "whose scores contradict their order")
    if prompt is not None:
        sides = [_joined(prompt, sides[0], "chosen")[0], _joined(prompt, sides[1], "rejected")[0]]
    keys = [_Keys.of(messages) for messages in sides]
    if keys[0].keys == keys[1].keys:
        raise LeftOutError("whose chosen equals rejected")
    same = 0
    while same < min(len(each.keys) for each in keys) - 1 and keys[0].keys[same] == keys[1].keys[same]:
        same += 1
    if not same:
        raise RefusedRecordError(
            "has no prompt, and chosen and rejected do not begin with the same message; texts need a column prompt"
        )
    for each in keys:
        if each.roles[same] != "assistant":
            raise RefusedRecordError(
                f"chosen and rejected differ first in message {same}, of {each.roles[same]}; wanted two answers "
                "to the same messages"
            )
    both = [_marked(messages, each.sources[same]) for messages, each in zip(sides, keys, strict=True)]
    if not all(any(message["trainable"] for message in messages) for messages in both):
        raise LeftOutError("with a side without a turn to train on")
    return both[0], both[1]


# --- Files -----------------------------------------------------------------------------------------------------------


def form_of(row: FormRow, forms: Sequence[Form] = CONVERSATIONS) -> Form:
    """Return the one form that a row fits. Raises RefusedRecordError if it fits none or two, or has what none reads."""
    for name in MEDIA:  # a text may be the image of a container
        value = row.get(name)
        if value and (not isinstance(value, str) or f"<{name}>" in str(row)):
            raise RefusedRecordError(f"has {name}, and ludic reads texts alone; leave such rows out")
    if row.get("chat_template_kwargs"):
        raise RefusedRecordError("has chat_template_kwargs, which ludic does not read; leave the column out")
    found = [form for form in forms if form.fits(row)]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{form.name} [{form.fields.replace('`', '')}]" for form in found or forms)
    has = ", ".join(name for name, value in row.items() if value is not None) or "none"
    if found:
        raise RefusedRecordError(f"has the fields of two forms, {known}; leave those of one out")
    raise RefusedRecordError(f"fits no form; its fields are {has}; the forms are {known}")


@dataclass(slots=True, kw_only=True)
class Read:
    """The records of a file."""

    noun: str
    where: str
    records: list[FormRow] = field(default_factory=list)
    """For the format jsonl. Those of one row share its number as group_id."""
    form: Form | None = None
    num_used: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    not_read: dict[str, None] = field(default_factory=dict)
    """Columns that nothing reads."""
    unpaired: Counter[str] = field(default_factory=Counter)
    """Rows in which a score is not compared, by its column."""

    @property
    def said(self) -> str:
        """What was read, in one line."""
        assert self.form is not None
        parts = [f"{self.where}: read as {self.form.name}: {plural(self.num_used, self.noun)}"]
        if self.form.note:
            parts.append(self.form.note)
        if self.left_out:
            counts = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
            parts.append(f"left out: {counts}")
        if self.not_read or self.unpaired:
            scores = (f"{name} in {plural(number, 'row')}" for name, number in self.unpaired.items())
            parts.append(f"columns that are not read: {', '.join([*self.not_read, *scores])}")
        return "; ".join(parts)


def conversations(rows: Iterable[FormRow], where: str) -> Read:
    """Return rows of supervised training as records: `messages`, with marks after a prompt of their own.

    Trained on are all answers of a conversation, or the completion alone. Raises ConfigError.
    """
    read = Read(noun="conversation", where=where)

    def use(number: int, row: FormRow, form: Form) -> None:
        found = conversation_of(form.read(row))
        if not any(read_messages(found["messages"]).trained):
            raise LeftOutError("without a turn to train on")
        read.records.append(_record(number, found["messages"], found, 1.0))

    return _read(rows, CONVERSATIONS, read, use)


def pairs(rows: Iterable[FormRow], where: str) -> Read:
    """Return rows of preferences as two records each, a group: the answer that was chosen, and that rejected.

    What both begin with is their prompt. Pairs that are equal, or whose scores do not say that the chosen answer is the
    better one, are left out and counted. Raises ConfigError.
    """
    read = Read(noun="pair", where=where)

    def use(number: int, row: FormRow, form: Form) -> None:
        found = form.read(row)
        for messages, reward in zip(_pair(row, found["prompt"]), (1.0, 0.0), strict=True):
            read.records.append(_record(number, messages, found, reward))

    return _read(rows, PAIRS, read, use)


def _read(
    rows: Iterable[FormRow], forms: Sequence[Form], read: Read, use: Callable[[int, FormRow, Form], None]
) -> Read:
    for number, row in enumerate(rows):
        try:
            form = form_of(row, forms)
            if read.form not in (None, form):
                raise RefusedRecordError(
                    f"has the form {form.name}, and the rows before it have {read.form.name}; wanted one form a file"
                )
            read.form = form
            read.not_read |= {name: None for name in row if name not in form.reads and row[name] is not None}
            if forms is PAIRS:
                read.unpaired.update(_unpaired_scores(row))
            use(number, row, form)
            read.num_used += 1
        except LeftOutError as error:
            read.left_out[str(error)] += 1
        except RefusedRecordError as error:
            raise ConfigError(f"{read.where}, row {number} {error}") from error
    if not read.records:
        raise ConfigError(f"{read.said if read.form else read.where}; wanted at least one {read.noun}")
    return read


def _record(number: int, messages: Messages, found: FormRow, reward: float) -> FormRow:
    # finish_reason says that the model did not end its last answer.
    used = {name: found[name] for name in ("tools", "finish_reason") if found.get(name) is not None}
    return {"messages": messages, "group_id": str(number), "episode_reward": reward, **used}


# --- Records of `ludic import` ---------------------------------------------------------------------------------------

"""The form of records under ludic's own names: tokens, `messages`, or `prompt` and `completion`."""
_OWN_FORMS = ("messages", "prompt and completion")


def import_form(record: FormRow) -> tuple[str, tuple[str, ...], list[FormRow]]:
    """Return the name of a record's form, the fields that it read, and its records under the names of the format jsonl.

    A pair becomes two records, a group. A prompt and a completion that are texts stay raw texts.
    """
    if record.get("prompt_tokens") is not None and record.get("response_tokens") is not None:
        return OWN_FORM, (), [record]
    is_pair = _has_pair(record)  # also beside messages, as in UltraFeedback
    form = form_of(record, PAIRS if is_pair else CONVERSATIONS)
    if form.name in _OWN_FORMS and _is_plain(record):
        _tools(record)  # refuses what can't be read
        if form.name != "messages":
            _refuse_label(record)
        return OWN_FORM, (), [record]
    name = OWN_FORM if form.name in _OWN_FORMS else form.name
    found = form.read(record)
    unpaired = {*_unpaired_scores(record)} if is_pair else set()
    reads = tuple(name for name in form.reads if name not in unpaired)
    rest = {name: value for name, value in record.items() if name not in reads}
    if is_pair:
        sides = _pair(record, found["prompt"])
        _refuse_beside_pair(rest, sides[0])
        pair = {**rest, **found, "group_id": json.dumps(record, sort_keys=True, default=str)}
        del pair["prompt"]
        both = zip(sides, (1.0, 0.0), strict=True)
        return name, reads, [{**pair, "messages": each, "episode_reward": reward} for each, reward in both]
    if not _is_two_texts(found):
        found = conversation_of(found)
    return name, reads, [{**rest, **found}]


def _refuse_beside_pair(rest: FormRow, chosen: Messages) -> None:
    """Raise RefusedRecordError for fields that a pair fills itself, and for messages unlike the chosen side."""
    for name in ("completion", "episode_reward", "group_id"):
        if rest.get(name) is not None:
            raise RefusedRecordError(f"has {name} besides chosen and rejected; leave it out, or give it another name")
    given = rest.get("messages")
    if given is not None and _Keys.of(_messages(_parsed(given), "messages")).keys != _Keys.of(chosen).keys:
        raise RefusedRecordError("has messages besides chosen and rejected, and they are not the chosen conversation")


def _is_plain(record: FormRow) -> bool:
    """Return whether the format jsonl reads a record as it is."""
    if record.get("functions") or record.get("tool_defs"):
        return False
    if record.get("messages") is None:
        return _is_two_texts(record)
    return isinstance(record["messages"], list) and not record.get("system")


def _is_two_texts(record: FormRow) -> bool:
    """Return whether prompt and completion are texts, and neither is messages as JSON text."""
    values = [_listed(record.get(name)) for name in ("prompt", "completion")]
    return all(isinstance(value, str) for value in values)
