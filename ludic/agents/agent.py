"""Define an agent, a model with tokenizer, parser, context and tools, and build its prompts."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from ludic.agents.contexts import Context, make_context
from ludic.agents.delegation import SubAgent
from ludic.agents.parsers import Parser, make_parser
from ludic.agents.tools.formats import DEFAULT_FORMAT, ToolFormat, make_tool_format
from ludic.agents.tools.toolbox import Toolbox
from ludic.engines import Completion, Engine
from ludic.models import is_markup, render_prompt, render_text
from ludic.records import Message
from ludic.settings import RequestLimit, in_thread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A model that continues a conversation."""

    engine: Engine
    tokenizer: Any
    """Tokenizer of transformers with a chat template."""
    model: str
    """Model name, stored with each rollout."""
    vocab_size: int | None = None
    """Tokens that the model knows, the rows of its embedding; engines must not return others. None if unknown."""
    parser: Parser = field(default_factory=partial(make_parser, "whole"))
    """Reads the action in a completion."""
    make_context: Callable[[], Context] = field(default_factory=partial(make_context, "full"))
    """Makes the context of an episode, which decides which messages of the dialogue the model sees."""
    toolbox: Toolbox = field(default_factory=partial(Toolbox, ()))
    """Tools that the agent runs itself."""
    tool_format: ToolFormat = field(default_factory=partial(make_tool_format, DEFAULT_FORMAT))
    """How the model writes tool calls."""
    sub_agents: tuple[SubAgent, ...] = ()
    """Agents to which it can delegate tasks."""
    render: "Render" = field(init=False, repr=False, compare=False)
    """Renders whole prompts; shared by all episodes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "render", make_render(self.tokenizer, self.toolbox.schemas))


# --- Prompts ---------------------------------------------------------------------------------------------
# Turn a growing conversation into prompts without tokenising sampled tokens again.
#
# While a conversation only grows, a prompt is the tokens so far plus the tokens of the added messages. The chat
# template's text between two completions does not depend on the first one's text, so it is rendered after a marker in
# its place and tokenised alone: tokens never merge across the border. If earlier messages were changed or left out, the
# whole prompt is rendered.

_LONG = 20_000
"""Characters of a dialogue from which it is tokenised in a thread: this takes 10 ms and would delay other episodes."""
_turns: "WeakKeyDictionary[asyncio.AbstractEventLoop, WeakKeyDictionary[Any, RequestLimit]]" = WeakKeyDictionary()
"""Long prompts in progress, by event loop and tokenizer."""

Render = Callable[[tuple[Message, ...]], np.ndarray]
"""Returns (length,) int32: the prompt of a dialogue, rendered as a whole. The array must not be changed."""


def make_render(tokenizer: "PreTrainedTokenizerBase", tools: Sequence[Mapping[str, Any]] = ()) -> Render:
    """Return a function that renders whole prompts; it caches recent ones, since the episodes of a group begin alike.

    tools: schemas of tools for the chat template.
    """

    @lru_cache(maxsize=64)
    def render(messages: tuple[Message, ...]) -> np.ndarray:
        prompt = render_prompt(tokenizer, messages, tools=tools)
        prompt.flags.writeable = False
        return prompt

    return render


class PromptBuilder:
    """Builds the prompts of one agent in one episode."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        tools: Sequence[Mapping[str, Any]] = (),
        render: Render | None = None,
    ) -> None:
        """tools: schemas of tools for the chat template. render: of the same tokenizer and tools; None makes one."""
        self._tokenizer, self._tools = tokenizer, tools
        self._render = render or make_render(tokenizer, tools)
        self._seen: tuple[Message, ...] = ()
        """Messages of the last call, with its completion; empty before the first."""
        self._last: tuple[np.ndarray, Completion] | None = None
        """The last call's prompt, (length,) int32, and completion."""

    def build(self, messages: Sequence[Message]) -> np.ndarray:
        """Return (length,) int32: the prompt of a call that sees these messages."""
        if self._last is not None and tuple(messages[: len(self._seen)]) == self._seen:
            prompt, completion = self._last
            added = self._render_added(messages, completion)
            if added is not None:
                return np.concatenate([prompt, completion.tokens, added], dtype=np.int32)
        return self._render(tuple(messages))

    async def build_beside(self, messages: Sequence[Message]) -> np.ndarray:
        """Return the prompt as `build` does, a long one from a thread (`beside`)."""
        num_characters = sum(len(message.content) for message in messages)
        return await beside(self._tokenizer, num_characters, partial(self.build, messages))

    def complete(
        self, messages: Sequence[Message], prompt: np.ndarray, completion: Completion, answer: Message
    ) -> None:
        """Record a call: its messages, its prompt, and its completion, also as a message."""
        self._seen, self._last = (*messages, answer), (prompt, completion)

    def _render_added(self, messages: Sequence[Message], completion: Completion) -> np.ndarray | None:
        """Return the tokens that follow the last completion; None if the template leaves out the completion."""
        *before, answer = self._seen
        after = _with_call_ids(messages[len(self._seen) :], answer)
        marker = _marker(before, after, self._tools)
        marked = [*before, Message(role=answer.role, content=marker), *after]
        _, found, added = render_text(self._tokenizer, marked, tools=self._tools).rpartition(marker)
        if not found:
            return None
        stop_token = int(completion.tokens[-1]) if completion.finish_reason == "stop" else None
        return tokens_of(self._tokenizer, text_after_stop(self._tokenizer, added, stop_token))


def text_after_stop(tokenizer: "PreTrainedTokenizerBase", added: str, stop_token: int | None) -> str:
    """Return the part of a text that follows the sampled tokens of an answer.

    added: what the chat template writes behind the answer's text. It ends an answer with the stop token, and perhaps
    with a mark of the text's end before it; both were sampled if the answer was not cut off. stop_token: the token that
    ended the answer; None if it was cut off.
    """
    stop_text = "" if stop_token is None else tokenizer.decode([stop_token])
    before_stop, stop, after_stop = added.partition(stop_text) if stop_text else (added, "", "")
    return after_stop if stop and is_markup(tokenizer, before_stop) else added


def tokens_of(tokenizer: "PreTrainedTokenizerBase", text: str) -> np.ndarray:
    """Return (length,) int32: the tokens of a rendered text, without those that the tokenizer would add to it."""
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)


async def beside(tokenizer: "PreTrainedTokenizerBase", num_characters: int, build: Callable[[], T]) -> T:
    """Return what `build` returns, which tokenises a text of this length; a long one in a thread, while the event loop
    continues.

    Each tokenizer builds one at a time, which limits memory and lets episodes of one example share it.
    """
    if num_characters < _LONG:
        return build()
    of_loop = _turns.setdefault(asyncio.get_running_loop(), WeakKeyDictionary())
    async with of_loop.setdefault(tokenizer, RequestLimit(1)).turn():
        return await in_thread(build)


def _with_call_ids(messages: Sequence[Message], answer: Message) -> list[Message]:
    """Return the messages after an answer, in which the results of its tool calls have the ids of the calls, in
    order."""
    ids = iter([call.id for call in answer.tool_calls])
    return [
        replace(each, tool_call_id=next(ids, None)) if each.role == "tool" and each.tool_call_id is None else each
        for each in messages
    ]


def _marker(*texts: object) -> str:
    """Return a marker that the texts do not contain: it holds their digest."""
    return f"LUDIC COMPLETION {blake2b(repr(texts).encode(errors='replace'), digest_size=16).hexdigest()}"
