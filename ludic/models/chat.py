"""Convert conversations to prompt tokens, and completions to text.

Reads a tokenizer folder and no other files. Raises ModelError if a tokenizer can't be loaded or has no usable chat
template.

Only the chat template may write special tokens. The name of one within a message, such as "<|im_end|>" in the result of
a tool, would end the turn and could forge the next one; so a space is inserted after its first character, or another
character that no name contains if names contain spaces. In recorded answers, which are trained on unchanged, the mark
QUOTE is inserted instead, and ludic.models.encoding removes it again.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, count, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from jinja2 import TemplateError

from ludic.base import TRAIN, check_model_folder, read_json, require, without_files
from ludic.errors import ModelError, one_line
from ludic.models.chat_template import render
from ludic.models.tokenizer import NeedsTransformersError, Tokenizer, read_folder
from ludic.records import REASONING, Message, ToolCall
from ludic.settings.user_code import describe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a Hugging Face folder or id; no code in the folder runs, and no file outside is read."""
    from transformers import AutoTokenizer  # takes two seconds

    no_files: dict[str, None] = {}
    if Path(folder).is_dir():
        check_model_folder(folder)
        no_files = without_files(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **no_files)
    except Exception as error:  # as in read_tokenizer
        raise _unloadable(folder, error) from error


def read_tokenizer(folder: str) -> Tokenizer:
    """Load the tokenizer of a local folder, without transformers where that gives the same tokens.

    Raises ConfigError, which says how to install transformers, where it is needed and is not installed.
    """
    check_model_folder(folder)
    try:
        return read_folder(folder)
    except NeedsTransformersError as error:
        require("transformers", TRAIN, f"{folder}: the tokenizer is one that only transformers reads, since {error}")
    except Exception as error:  # tokenizers raises plain Exception for a tokenizer.json that it can't parse
        raise _unloadable(folder, error) from error
    return load_tokenizer(folder)


def _unloadable(folder: str, error: Exception) -> ModelError:
    return ModelError(
        f"{folder}: the tokenizer could not be loaded ({one_line(error)}); "
        "wanted a Hugging Face folder with tokenizer.json and tokenizer_config.json"
    )


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
) -> np.ndarray:
    """Return (prompt_length,) int32: tokens of the conversation, by default up to the start of the assistant's turn.

    tools: schemas of tools for the chat template, such as Toolbox.schemas. Raises ModelError if the tokenizer has no
    chat template, or one that refuses the conversation, fails, or does not show tools.
    """
    renderer = ChatRenderer(tokenizer, messages, tools=tools)
    text = renderer.text(len(messages), add_generation_prompt=add_generation_prompt)
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


def render_text(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
) -> str:
    """Return the text whose tokens `render_prompt` returns."""
    renderer = ChatRenderer(tokenizer, messages, tools=tools)
    return renderer.text(len(messages), add_generation_prompt=add_generation_prompt)


QUOTE = "\ufdd0"
"""Mark after the first character of a special token's name that is plain text; not a Unicode character."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_READS_REASONING = {name: re.compile(rf"[.'\"]{name}\b") for name in REASONING}
"""Patterns that show under which name a chat template reads the thinking of a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Template:
    """Features of a chat template, found in its text."""

    has_marks: bool
    has_developer: bool
    """`developer` is a newer name of `system`; templates that do not know it would omit the message."""
    reasoning: Sequence[str]
    """Names under which the template reads thinking."""


@lru_cache(maxsize=8)
def _read_template(template: str) -> _Template:
    return _Template(
        has_marks=_GENERATION.search(template) is not None,
        has_developer="developer" in template,
        reasoning=[name for name, read in _READS_REASONING.items() if read.search(template)],
    )


@dataclass(frozen=True, slots=True)
class Recorded:
    """Preparation of answers recorded elsewhere for a template."""

    quoted: "Names"
    """Special tokens whose names are plain text in answers; names of others, such as marks of tool calls, are encoded
    as these tokens."""
    ends: tuple[str, ...]
    """Names of stop tokens; one at the end of an answer is its end, which the template adds itself."""

    def prepared(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return an answer without its end token, with a QUOTE in the names that are text."""
        content = message["content"][: self._end_of(message["content"])]
        return {name: _broken_up(value, self.quoted, QUOTE) for name, value in {**message, "content": content}.items()}

    def _end_of(self, content: str) -> int:
        """Return the end of a text without trailing end tokens and the blanks around them."""
        end = stop = len(content)
        while stop:
            if content[stop - 1].isspace():
                stop -= 1
            elif (name := next((each for each in self.ends if content.endswith(each, 0, stop)), None)) is not None:
                end = stop = stop - len(name)
            else:
                break
        return end


class ChatRenderer:
    """Renders the beginnings of one conversation, each of whose messages is prepared for the template once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        recorded: Recorded | None = None,
    ) -> None:
        """tools: see `render_prompt`. recorded: how answers are prepared; None prepares them as the other messages."""
        self._tokenizer, self._recorded = tokenizer, recorded
        self._schemas = [dict(tool) for tool in tools] or None
        self._unprepared = _as_template_inputs(messages)
        self._prepared: list[dict[str, Any]] = []
        template = _read_template(str(tokenizer.chat_template))
        self._has_developer, self._reasoning = template.has_developer, template.reasoning
        self.reads_reasoning = bool(template.reasoning)
        """True if the template reads the thinking of a message apart from its content."""
        self.has_marks = template.has_marks
        """True if the template marks parts with {% generation %}."""

    def text(self, end: int, *, add_generation_prompt: bool) -> str:
        """Return the text of the first `end` messages. Raises ModelError as `render_prompt` does."""
        return self.text_of(self.prepared(end), add_generation_prompt=add_generation_prompt)

    def text_of(self, prepared: Sequence[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        """Return the text of prepared messages."""
        return self._render(prepared, add_generation_prompt=add_generation_prompt)[0]

    def marked_text(self, end: int) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of the first `end` messages, with start and end of the parts in {% generation %}."""
        return self._render(self.prepared(end))

    def prepared(self, end: int) -> list[dict[str, Any]]:
        """Return the first `end` messages as the template gets them."""
        if end > len(self._prepared):
            self._prepared += map(self.prepare, islice(self._unprepared, end - len(self._prepared)))
        return self._prepared[:end]

    def prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return one message as the template gets it, from one of `as_template_input`. Raises ModelError."""
        if message["role"] == "developer" and not self._has_developer:
            message = {**message, "role": "system"}
        if (reasoning := message.get("reasoning_content")) is not None:
            message = {**message, **dict.fromkeys(self._reasoning, reasoning)}
        try:
            if self._recorded is not None and message["role"] == "assistant":
                return self._recorded.prepared(message)
            prepared: dict[str, Any] = _broken_up(message, _special_tokens(self._tokenizer))
        except RecursionError as error:
            raise ModelError(f"the arguments of a tool call are nested too deeply: {describe(error)}") from error
        return prepared

    def _render(
        self, prepared: Sequence[dict[str, Any]], *, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of prepared messages, and its marked parts. Raises ModelError."""
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
            if not prepared:
                raise ValueError("there is no message")
            return render(
                tokenizer.get_chat_template(tools=self._schemas),
                prepared,
                tools=self._schemas,
                add_generation_prompt=add_generation_prompt,
                special_tokens=tokenizer.special_tokens_map,
            )
        # A template is a program: its expressions may raise any Python error, such as TypeError for a sum of text and
        # number.
        except Exception as error:
            roles = ", ".join(message["role"] for message in prepared)
            refusal = isinstance(error, TemplateError)
            why = one_line(error) if refusal else describe(error)
            raise ModelError(
                f"{tokenizer.name_or_path}: the chat template {'refuses' if refusal else 'fails for'} a conversation "
                f"of {roles}: {why}"
            ) from error


_FEW = 64


class Names:
    """Finds the names of added tokens in a text, in a time independent of their number."""

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
        by_length = sorted(known, key=len, reverse=True)
        few = 0 < len(known) <= _FEW
        self._any = re.compile("|".join(map(re.escape, by_length))) if few else None
        """Pattern for a small number of names, several times as fast as the tree."""
        characters = set("".join(known))
        self._first = re.compile(f"[{re.escape(''.join(sorted(self._tree)))}]" if known else "(?!)")
        # No name contains it, so breaking up a name creates no new one, and the search ends.
        self._apart = next(each for each in chain(" ", map(chr, count(ord("\u00b7")))) if each not in characters)

    def broken_up(self, text: str, apart: str | None = None) -> str:
        """Return the text with `apart` inserted after the first character of each name.

        None, or an `apart` that the text contains, is replaced by a space or its substitute.
        """
        apart = self._apart if apart is None or apart in text else apart
        while spans := list(self.spans(text)):  # repeat, since a name may contain another
            borders = [0, *(start + 1 for start, _ in spans), len(text)]
            text = apart.join(text[start:end] for start, end in pairwise(borders))
        return text

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of the names, the longest at each place; the search continues after each."""
        if self._any is not None:
            yield from (match.span() for match in self._any.finditer(text))
            return
        at = 0
        while match := self._first.search(text, at):
            branch, end = self._tree, 0
            start = at = match.start()
            while at < len(text) and (branch := branch.get(text[at], {})):
                at += 1
                end = at if "" in branch else end
            if end:
                yield start, end
            at = end or start + 1


_special_names: WeakKeyDictionary[Any, Names] = WeakKeyDictionary()
"""Special tokens of each tokenizer; listing them takes longer than searching a message for them."""


def _special_tokens(tokenizer: Tokenizer) -> Names:
    if tokenizer not in _special_names:
        added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        _special_names[tokenizer] = Names(added | set(tokenizer.all_special_tokens))
    return _special_names[tokenizer]


def is_markup(tokenizer: Tokenizer, text: str) -> bool:
    """Return whether a text consists of names of special tokens and blanks only."""
    return not without_markup(tokenizer, text).strip()


def without_markup(tokenizer: Tokenizer, text: str) -> str:
    """Return a text without the names of special tokens."""
    spans = _special_tokens(tokenizer).spans(text)
    rest = [0, *chain.from_iterable(spans), len(text)]
    return "".join(text[start:end] for start, end in zip(rest[::2], rest[1::2], strict=True))


def _broken_up(value: Any, special: Names, apart: str | None = None) -> Any:
    """Return a message for a template, with the names of special tokens in its texts broken up."""
    if isinstance(value, dict):
        return {_broken_up(key, special, apart): _broken_up(each, special, apart) for key, each in value.items()}
    if isinstance(value, list):
        return [_broken_up(each, special, apart) for each in value]
    return special.broken_up(value, apart) if isinstance(value, str) else value


def _as_template_inputs(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Yield messages for a template. Tool calls and their results get ids, which some templates require.

    A result gets the id that it names, else that of the call at its position. Calls without ids, and results of calls
    that are part of the text, are numbered; Mistral's templates require nine letters and digits.
    """
    call_ids: Iterator[str] = iter(())
    for message in messages:
        rendered = as_template_input(message)
        if message.role == "assistant":
            ids = [call["id"] for call in rendered.get("tool_calls", ())]
            call_ids = chain(ids, map("call{:05d}".format, count()))
        if message.role == "tool":
            in_place = next(call_ids, "call00000")
            rendered["tool_call_id"] = message.tool_call_id or in_place
        yield rendered


def as_template_input(message: Message) -> dict[str, Any]:
    rendered: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        rendered["name"] = message.name
    if message.reasoning is not None:
        rendered["reasoning_content"] = message.reasoning
    if message.tool_calls:
        rendered["tool_calls"] = [_as_function_call(*each) for each in enumerate(message.tool_calls)]
    return rendered


def _as_function_call(number: int, call: ToolCall) -> dict[str, Any]:
    """Return a tool call for a template. Arguments are parsed as JSON, which templates print; other text stays text.

    number: of the call in its message; used as id of a call without one.
    """
    try:
        arguments = read_json(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments
    id_ = call.id or f"call{number:05d}"
    return {"id": id_, "type": "function", "function": {"name": call.name, "arguments": arguments}}
