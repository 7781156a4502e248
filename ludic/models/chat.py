"""Convert conversations to prompt tokens, and completions to text.

Reads a tokenizer folder and no other files. Raises ModelError if a tokenizer can't be loaded or has no usable chat
template.

Only the chat template writes special tokens. In a message they are texts of others, such as "<|im_end|>" in the result
of a tool, which would end the turn and could forge the next one; a space is put behind their first character.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from jinja2 import TemplateError

from ludic.errors import ModelError, one_line
from ludic.records import Message, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a Hugging Face folder or id; code in the folder is never run."""
    from transformers import AutoTokenizer  # takes two seconds, not needed for rendering

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # tokenizers raises plain Exception for a tokenizer.json that it can't parse.
    except Exception as error:
        raise ModelError(
            f"{folder}: the tokenizer could not be loaded ({one_line(error)}); "
            "wanted a Hugging Face folder with tokenizer.json and tokenizer_config.json"
        ) from error


def render_prompt(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    keep_special_of: Sequence[str] = (),
) -> np.ndarray:
    """Return (prompt_length,) int32: tokens of the conversation, by default up to the start of the assistant's turn.

    tools: schemas of tools for the chat template, such as Toolbox.schemas. keep_special_of: roles in whose messages
    the names of special tokens stand for these. Raises ModelError if the tokenizer has no chat template, or one that
    refuses the conversation or does not show tools.
    """
    options = {"add_generation_prompt": add_generation_prompt}
    encoding = _apply_template(tokenizer, messages, tools, keep_special_of, **options)
    return np.asarray(encoding["input_ids"], dtype=np.int32)


def render_text(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    keep_special_of: Sequence[str] = (),
) -> str:
    """Return the text whose tokens `render_prompt` returns."""
    options = {"add_generation_prompt": add_generation_prompt, "tokenize": False}
    return _apply_template(tokenizer, messages, tools, keep_special_of, **options)


def _apply_template(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    keep_special_of: Sequence[str],
    **options: bool,
) -> Any:
    if not tokenizer.chat_template:
        raise ModelError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template; take the instruct version of the "
            "model, or put a chat_template.jinja beside its tokenizer.json"
        )
    # A template may be a dict of templates, one of them for tools.
    if tools and "tools" not in str(tokenizer.chat_template):
        raise ModelError(
            f"{tokenizer.name_or_path}: the chat template does not show tools, so the model would never see them; take "
            "a model whose template shows them, or leave out the tools"
        )
    special = _special_tokens(tokenizer)
    rendered = _as_template_inputs(messages)
    conversation = [each if each["role"] in keep_special_of else _broken_up(each, special) for each in rendered]
    schemas = [dict(tool) for tool in tools] or None
    try:
        return tokenizer.apply_chat_template(conversation, tools=schemas, return_dict=True, **options)
    except TemplateError as error:
        roles = ", ".join(message.role for message in messages)
        raise ModelError(
            f"{tokenizer.name_or_path}: the chat template refuses a conversation of {roles}: {error}"
        ) from error


def decode(tokenizer: "PreTrainedTokenizerBase", tokens: np.ndarray) -> str:
    """Return the text of (length,) token ids, without special tokens."""
    return tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True)


_patterns: WeakKeyDictionary[Any, re.Pattern[str]] = WeakKeyDictionary()
"""Special tokens of each tokenizer; to list them takes longer than to search a message for them."""


def _special_tokens(tokenizer: "PreTrainedTokenizerBase") -> re.Pattern[str]:
    if tokenizer not in _patterns:
        added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        # One of a single character can't be broken up, nor one that begins with a space.
        names = (name for name in added | set(tokenizer.all_special_tokens) if len(name) > 1 and name[0] != " ")
        listed = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        _patterns[tokenizer] = re.compile(listed or "(?!)")
    return _patterns[tokenizer]


def _broken_up(value: Any, special: re.Pattern[str]) -> Any:
    """Return a message for a template in which no text holds the name of a special token."""
    if isinstance(value, dict):
        return {_broken_up(key, special): _broken_up(each, special) for key, each in value.items()}
    if isinstance(value, list):
        return [_broken_up(each, special) for each in value]
    while isinstance(value, str) and special.search(value):  # again, since a name may hold another
        value = special.sub(lambda match: f"{match[0][0]} {match[0][1:]}", value)
    return value


def _as_template_inputs(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for a template. Results of tools have ids, since some templates want them.

    It is the call's id if the calls are apart from the text; else results are counted. Mistral's templates want nine
    letters and digits.
    """
    rendered: list[dict[str, Any]] = []
    call_ids: Iterator[str] = iter(())
    for message in messages:
        if message.role == "assistant":
            call_ids = chain([call.id for call in message.tool_calls], map("call{:05d}".format, count()))
        of_call = {"tool_call_id": next(call_ids, "call00000")} if message.role == "tool" else {}
        rendered.append(_as_template_input(message) | of_call)
    return rendered


def _as_template_input(message: Message) -> dict[str, Any]:
    rendered: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        rendered["name"] = message.name
    if message.tool_calls:
        rendered["tool_calls"] = [_as_function_call(call) for call in message.tool_calls]
    return rendered


def _as_function_call(call: ToolCall) -> dict[str, Any]:
    """Return a tool call for a template. Arguments are parsed, since templates print JSON; other text stays text."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
