"""Convert conversations to prompt tokens, and completions to text.

Reads a tokenizer folder and no other files. Raises ModelError if a tokenizer can't be loaded or has no usable chat
template.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
) -> np.ndarray:
    """Return (prompt_length,) int32: tokens of the conversation, by default up to the start of the assistant's turn.

    tools: schemas of tools for the chat template, such as Toolbox.schemas. Raises ModelError if the tokenizer has no
    chat template, or one that refuses the conversation or does not show tools.
    """
    encoding = _apply_template(tokenizer, messages, tools, add_generation_prompt=add_generation_prompt)
    return np.asarray(encoding["input_ids"], dtype=np.int32)


def render_text(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
) -> str:
    """Return the text whose tokens `render_prompt` returns."""
    return _apply_template(tokenizer, messages, tools, add_generation_prompt=add_generation_prompt, tokenize=False)


def _apply_template(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
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
    conversation = [_as_template_input(message) for message in messages]
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
