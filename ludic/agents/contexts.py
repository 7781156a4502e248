"""Choose the messages of a dialogue that the next model call sees: full, window, summary, or a user's class.

A context is named by a setting:

    full                    the whole dialogue
    no_thinking             the dialogue without the thinking of assistant turns before the last user message
    window:N                system messages, the first user message, and the last N of the others, from an assistant
                            turn on: it is longer if the N begin with another message
    summary:N               the dialogue with a summary by the model instead of older messages, whenever more than N
                            messages are not in a summary
    path/to/file.py:CLASS   a class of your own, built without arguments for each episode

A view that begins with the last view extends the episode's row of tokens; any other view starts a new row. Settings
that name no context raise ConfigError.

Turns of user and assistant alternate in each view if they do in the dialogue: many chat templates, such as those of
Mistral and Gemma, refuse others.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ludic.errors import ConfigError
from ludic.records import Message
from ludic.settings import CONTEXT, NO_FILES, Files, build_own, find, python_file_of

DEFAULT = "full"

Ask = Callable[[Sequence[Message]], Awaitable[str]]
"""One more model call of the same agent, which returns the raw completion; it is recorded and trained on."""


class Context(Protocol):
    """View of one episode's dialogue; each episode has an instance of its own, which may keep state."""

    async def view(self, messages: Sequence[Message], ask: Ask) -> Sequence[Message]:
        """Return the messages that the next model call sees.

        messages: the whole dialogue so far, with completions as the model wrote them; each call's begin with those
        of the call before. An error fails the episode.
        """
        ...


def make_context(spec: str, *, files: Files = NO_FILES) -> Callable[[], Context]:
    """Return a function that makes the context of one episode; runs a user's file, and creates its class once as a
    check.

    files: files to run instead of those on disk, by path as in the setting. Raises ConfigError.
    """
    make: Callable[[], Context] = find(CONTEXT, spec, files)
    if python_file_of(spec) is None:
        make()  # refuses a wrong argument
    else:
        build_own(CONTEXT, spec, make, "view")
    return make


@dataclass(slots=True)
class Full:
    async def view(self, messages: Sequence[Message], ask: Ask) -> Sequence[Message]:
        return messages


@dataclass(slots=True)
class NoThinking:
    """Thinking is removed as Qwen3's chat template does it; a turn cut off inside its thinking stays whole."""

    async def view(self, messages: Sequence[Message], ask: Ask) -> Sequence[Message]:
        last_user = max((i for i, message in enumerate(messages) if _is_user(message)), default=0)
        return [*map(_without_thinking, messages[:last_user]), *messages[last_user:]]


def window(count: str) -> "_Window":
    return _Window(_number("window", count))


def summary(count: str) -> "_Summary":
    return _Summary(_number("summary", count))


def _number(name: str, count: str) -> int:
    if not (count.isascii() and count.isdigit() and int(count) > 0):
        raise ConfigError(f"context '{name}:{count}' counts {count!r} messages; wanted a number from 1, as in {name}:8")
    return int(count)


@dataclass(slots=True)
class _Window:
    size: int

    async def view(self, messages: Sequence[Message], ask: Ask) -> Sequence[Message]:
        pinned = _pinned(messages)
        others = [i for i in range(len(messages)) if i not in pinned]
        start = max(len(others) - self.size, 0)
        # Results of tools are shown with their call, and no user message follows the first.
        while start > 0 and messages[others[start]].role != "assistant":
            start -= 1
        return [messages[i] for i in sorted({*pinned, *others[start:]})]


SUMMARY_REQUEST = (
    "Summarise this dialogue for yourself. Older messages will be replaced with your summary, so include what you need "
    "to go on: what was done, what was found, what was decided, and what remains to do. Write only the summary."
)
"""Instruction to the model to write a summary."""
SUMMARY_HEADING = "Summary of the dialogue so far:\n"
"""Text before a summary in the first user message."""


@dataclass(slots=True)
class _Summary:
    """The last assistant turn, and what followed it, are never replaced, so that an observation is seen in full.

    The request for a summary is appended to the present view, so that it extends the row. An empty summary counts.
    """

    size: int
    summary: str | None = None
    first_kept: int = 0
    """Index in the dialogue of the first message that is not in the summary."""

    async def view(self, messages: Sequence[Message], ask: Ask) -> Sequence[Message]:
        pinned = _pinned(messages)
        num_kept = sum(i not in pinned for i in range(self.first_kept, len(messages)))
        last_turn = max((i for i, message in enumerate(messages) if message.role == "assistant"), default=0)
        if num_kept > self.size and last_turn > self.first_kept:
            answer = await ask(_with_user_text(self._view(messages, pinned), SUMMARY_REQUEST))
            self.summary = text_without_thinking(answer)
            self.first_kept = last_turn
        return self._view(messages, pinned)

    def _view(self, messages: Sequence[Message], pinned: set[int]) -> Sequence[Message]:
        if self.summary is None:
            return messages
        before = [messages[i] for i in sorted(pinned) if i < self.first_kept]
        return [*_with_user_text(before, SUMMARY_HEADING + self.summary), *messages[self.first_kept :]]


def _with_user_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Add a text of the user: to the last message if it is the user's, so that turns alternate."""
    if messages and messages[-1].role == "user":
        return [*messages[:-1], replace(messages[-1], content=f"{messages[-1].content}\n\n{text}")]
    return [*messages, Message(role="user", content=text)]


def _is_tool_result(message: Message) -> bool:
    """Return whether a message is a tool's; chat templates of Qwen's family write it as a user's."""
    text = message.content
    in_markup = text.startswith("<tool_response>") and text.endswith("</tool_response>")
    return message.role == "tool" or (message.role == "user" and in_markup)


def _is_user(message: Message) -> bool:
    return message.role == "user" and not _is_tool_result(message)


def _pinned(messages: Sequence[Message]) -> set[int]:
    """Return the indexes of system messages and of the first user message."""
    first_user = [i for i, message in enumerate(messages) if _is_user(message)][:1]
    return {*(i for i, message in enumerate(messages) if message.role in ("system", "developer")), *first_user}


def _without_thinking(message: Message) -> Message:
    if message.role != "assistant":
        return message
    return replace(message, content=text_without_thinking(message.content), reasoning=None)


def text_without_thinking(text: str) -> str:
    """Return the text after the last </think> of a completion; the whole text if it has none.

    Qwen3's chat template also uses the last one, so that a view and its rendered text agree.
    """
    _, closing, answer = text.rpartition("</think>")
    return answer.lstrip("\n") if closing else text


def text_after_thinking(text: str, *, is_thinking: bool) -> str:
    """Return the text of a completion after its thinking; empty if the thinking does not end.

    Unlike text_without_thinking it ends the thinking at the first </think>: later ones may be part of a tool's
    arguments.
    is_thinking: whether the prompt has begun the thinking. Else a text that does not begin with <think> has none.
    """
    return split_thinking(text, is_thinking=is_thinking)[1]


def split_thinking(text: str, *, is_thinking: bool) -> tuple[str | None, str]:
    """Return the thinking of a completion without its marks, None if it has none, and the text after it.

    is_thinking: as for `text_after_thinking`.
    """
    begun = text.lstrip()
    if not (is_thinking or begun.startswith("<think>")):
        return None, text
    thinking, _, after = begun.removeprefix("<think>").partition("</think>")
    return thinking, after


def begins_thinking(prompt: str) -> bool:
    """Return whether a prompt, or its end, has begun the thinking of the answer."""
    return prompt.rstrip().endswith("<think>")
