"""Convert conversations to prompt tokens, and completions to text.

Reads a tokenizer folder and no other files. Raises ModelError if a tokenizer can't be loaded or has no usable chat
template.

Only the chat template writes special tokens. In a message they are texts of others, such as "<|im_end|>" in the result
of a tool, which would end the turn and could forge the next one; a space is put behind their first character. If the
name of a special token holds a space itself, it is another character, which no name holds.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from jinja2 import TemplateError

from ludic.code.run import describe
from ludic.errors import ModelError, one_line
from ludic.models.folder_check import check_model_folder, without_files
from ludic.records import Message, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a Hugging Face folder or id; no code in the folder runs, and no file outside is read."""
    from transformers import AutoTokenizer  # takes two seconds, not needed for rendering

    no_files: dict[str, None] = {}
    if Path(folder).is_dir():
        check_model_folder(folder)
        no_files = without_files(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **no_files)
    # tokenizers raises plain Exception for a tokenizer.json that it can't parse.
    except Exception as error:
        raise ModelError(
            f"{folder}: the tokenizer could not be loaded ({one_line(error)}); "
            "wanted a Hugging Face folder with tokenizer.json and tokenizer_config.json"
        ) from error


def load_template(folder: str) -> "PreTrainedTokenizerBase":
    """Load a tokenizer to look at its chat template: without torch, which takes seconds, where that can be.

    The class of the model's family may tokenise a text otherwise; the template and the special tokens are the same.
    """
    if not Path(folder, "tokenizer.json").is_file():
        return load_tokenizer(folder)
    from transformers import PreTrainedTokenizerFast

    check_model_folder(folder)
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder, **without_files(folder))
    except Exception:  # as above; load_tokenizer says what is wrong
        return load_tokenizer(folder)


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
    refuses the conversation, fails, or does not show tools.
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
    renderer = ChatRenderer(tokenizer, messages, tools=tools, keep_special_of=keep_special_of)
    return renderer.apply(len(messages), **options)


class ChatRenderer:
    """Renders the beginnings of one conversation, each of whose messages is prepared for the template once."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        keep_special_of: Sequence[str] = (),
    ) -> None:
        """For tools and keep_special_of see `render_prompt`."""
        self._tokenizer, self._messages, self._keep_special_of = tokenizer, messages, keep_special_of
        self._schemas = [dict(tool) for tool in tools] or None
        self._unprepared = _as_template_inputs(messages)
        self._prepared: list[dict[str, Any]] = []

    def text(self, end: int, *, add_generation_prompt: bool) -> str:
        """Return the text of the first `end` messages. Raises ModelError as `render_prompt` does."""
        text: str = self.apply(end, add_generation_prompt=add_generation_prompt, tokenize=False)
        return text

    def apply(self, end: int, **options: bool) -> Any:
        """Return what apply_chat_template of the tokenizer returns for the first `end` messages."""
        tokenizer = self._tokenizer
        if not tokenizer.chat_template:
            raise ModelError(
                f"{tokenizer.name_or_path}: the tokenizer has no chat template; take the instruct version of the "
                "model, or put a chat_template.jinja beside its tokenizer.json"
            )
        # A template may be a dict of templates, one of them for tools.
        if self._schemas and "tools" not in str(tokenizer.chat_template):
            raise ModelError(
                f"{tokenizer.name_or_path}: the chat template does not show tools, so the model would never see them; "
                "take a model whose template shows them, or leave out the tools"
            )
        try:
            self._prepare(end)
            conversation = self._prepared[:end]
            return tokenizer.apply_chat_template(conversation, tools=self._schemas, return_dict=True, **options)
        # A template is a program: its expressions raise what Python's do, such as TypeError for a sum of text and
        # number.
        except Exception as error:
            roles = ", ".join(message.role for message in self._messages[:end])
            refusal = isinstance(error, TemplateError)
            why = one_line(error) if refusal else describe(error)
            raise ModelError(
                f"{tokenizer.name_or_path}: the chat template {'refuses' if refusal else 'fails for'} a conversation "
                f"of {roles}: {why}"
            ) from error

    def _prepare(self, end: int) -> None:
        if end <= len(self._prepared):
            return
        special = _special_tokens(self._tokenizer)
        for each in islice(self._unprepared, end - len(self._prepared)):
            self._prepared.append(each if each["role"] in self._keep_special_of else _broken_up(each, special))


def decode(tokenizer: "PreTrainedTokenizerBase", tokens: np.ndarray) -> str:
    """Return the text of (length,) token ids, without special tokens."""
    return tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=True)


class Names:
    """Names of added tokens, found in a text in a time that does not depend on how many they are."""

    def __init__(self, names: Iterable[str], *, shortest: int = 2) -> None:
        """Shorter names than `shortest` are left out, since a name of a single character can't be broken up."""
        self._tree: dict[str, Any] = {}
        """Characters that may follow, by character; the key "" marks the end of a name."""
        known = {name for name in names if len(name) >= shortest}
        for name in known:
            branch = self._tree
            for character in name:
                branch = branch.setdefault(character, {})
            branch[""] = {}
        characters = set("".join(known))
        self._first = re.compile(f"[{re.escape(''.join(sorted(self._tree)))}]" if known else "(?!)")
        # No name holds it, so that each name which is broken up leaves fewer in the text, and the search for more ends.
        self._apart = next(each for each in chain(" ", map(chr, count(ord("\u00b7")))) if each not in characters)

    def broken_up(self, text: str) -> str:
        """Return the text without names: behind the first character of each comes a space or what is used for it."""
        while starts := list(self.starts(text)):  # again, since a name may hold another
            borders = [0, *(start + 1 for start in starts), len(text)]
            text = self._apart.join(text[start:end] for start, end in pairwise(borders))
        return text

    def starts(self, text: str) -> Iterator[int]:
        """Yield where names begin; behind each, of several the longest, the search goes on."""
        at = 0
        while match := self._first.search(text, at):
            branch, end = self._tree, 0
            start = at = match.start()
            while at < len(text) and (branch := branch.get(text[at], {})):
                at += 1
                end = at if "" in branch else end
            if end:
                yield start
            at = end or start + 1


_special_names: WeakKeyDictionary[Any, Names] = WeakKeyDictionary()
"""Special tokens of each tokenizer; to list them takes longer than to search a message for them."""


def _special_tokens(tokenizer: "PreTrainedTokenizerBase") -> Names:
    if tokenizer not in _special_names:
        added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        _special_names[tokenizer] = Names(added | set(tokenizer.all_special_tokens))
    return _special_names[tokenizer]


def _broken_up(value: Any, special: Names) -> Any:
    """Return a message for a template in which no text holds the name of a special token."""
    if isinstance(value, dict):
        return {_broken_up(key, special): _broken_up(each, special) for key, each in value.items()}
    if isinstance(value, list):
        return [_broken_up(each, special) for each in value]
    return special.broken_up(value) if isinstance(value, str) else value


def _as_template_inputs(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Yield messages for a template. Results of tools have ids, since some templates want them.

    It is the call's id if the calls are apart from the text; else results are counted. Mistral's templates want nine
    letters and digits.
    """
    call_ids: Iterator[str] = iter(())
    for message in messages:
        if message.role == "assistant":
            call_ids = chain([call.id for call in message.tool_calls], map("call{:05d}".format, count()))
        of_call = {"tool_call_id": next(call_ids, "call00000")} if message.role == "tool" else {}
        yield _as_template_input(message) | of_call


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
    except (ValueError, RecursionError):
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
