"""One episode of the package verifiers, of either API, which ludic plays in turns. Imports nothing of verifiers.

verifiers plays an episode in one coroutine, which asks a model whenever it wants. Here this coroutine is a task, and
`TurnChannel.ask` answers for the model: it waits until ludic's agent has replied. `VerifiersEpisode` is ludic's end of
the channel.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from ludic.environments import Example, Split
from ludic.errors import ConfigError
from ludic.records import ROLES, Message, ToolCall
from ludic.settings import only_exceptions


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiersOutcome:
    """How an episode ended, and its scores."""

    reward: float
    components: Mapping[str, float]
    stop_condition: str
    """Why it ended, in the words of verifiers."""
    is_cut: bool
    """Whether a limit of the package ended it."""


class Loaded(Protocol):
    """An environment with its examples, loaded once in a process."""

    @property
    def numbers(self) -> Mapping[Split, Sequence[int]]:
        """Numbers of the examples of each split."""
        ...

    @property
    def max_turns(self) -> int | None:
        """Maximum turns of the agent, by the package."""
        ...

    def example(self, number: int) -> Example:
        """Return the example of a number. Raises ConfigError for one that needs more than text."""
        ...

    async def play(self, number: int, line: "TurnChannel") -> VerifiersOutcome:
        """Play the example of a number, and score it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReply:
    """A completion of ludic's agent."""

    text: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTurn:
    """The environment's answer to a reply."""

    observation: str | None
    """Text of the user; None if there is none."""
    results: tuple[str | None, ...]
    """Result of each tool call of the reply; None if it was not run."""
    outcome: VerifiersOutcome | None
    """None if the episode goes on."""


class TurnChannel:
    """Between the coroutine of verifiers, which asks, and ludic, which replies."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.tools: tuple[dict[str, Any], ...] | None = None
        """Schemas of the tools; None before the first question."""
        self._sent: list[Any] = []
        self._reply: asyncio.Future[AgentReply] | None = None

    def send(self, messages: Sequence[Any]) -> None:
        """Note messages of verifiers that the agent has not seen yet."""
        self._sent += messages

    async def ask(self, tools: Sequence[dict[str, Any]] = ()) -> AgentReply:
        """Ask the agent to reply to what it was told. Raises RuntimeError if the tools are not those of before."""
        if self.tools not in (None, tuple(tools)):
            raise RuntimeError(
                "the environment changed its tools within an episode; ludic view --texts them once, at its start"
            )
        self.tools = tuple(tools)
        self._reply = asyncio.get_running_loop().create_future()
        self.is_asked.set()
        return await self._reply

    def reply(self, reply: AgentReply) -> None:
        """Give the agent's reply."""
        assert self._reply is not None, "nothing was asked"
        self.is_asked.clear()
        self._reply.set_result(reply)

    def received(self) -> list[Any]:
        """Return what the agent was told since the last call."""
        sent, self._sent = self._sent, []
        return sent


class VerifiersEpisode:
    """An episode that ludic plays in turns. Made within an event loop, which all of its methods need."""

    def __init__(self, play: Callable[[TurnChannel], Coroutine[Any, Any, VerifiersOutcome]]) -> None:
        self._line = TurnChannel()
        self._task = asyncio.create_task(_guarded(play(self._line)))
        self._task.add_done_callback(_retrieve)

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """Schemas of the tools; known after `begin`."""
        return self._line.tools or ()

    async def begin(self) -> tuple[Message, ...]:
        """Run until the agent is asked, and return what it sees. Raises RuntimeError if it is never asked."""
        if await self._next() is not None:
            raise RuntimeError("the environment ended before it asked its agent")
        return plain(self._line.received())

    async def answer(self, text: str, calls: Sequence[ToolCall] = ()) -> EnvironmentTurn:
        """Give the agent's completion, and run until the next one is wanted or the episode is over."""
        self._line.reply(AgentReply(text=text, calls=tuple(calls)))
        outcome = await self._next()
        received = self._line.received()
        results = {each.tool_call_id: text_of(each) for each in received if each.role == "tool"}
        said = [text_of(each) for each in received if each.role == "user"]
        others = [each.role for each in received if each.role not in ("user", "tool")]
        if others:
            raise ValueError(f"the environment sent a message of the role {others[0]!r}, wanted user")
        if outcome is None and not said and any(call.id not in results for call in calls):
            raise ValueError("the environment sent no result of a tool call, and no message of the user instead")
        return EnvironmentTurn(
            observation="\n\n".join(said) if said else None,
            results=tuple(results.get(call.id) for call in calls),
            outcome=outcome,
        )

    def cancel(self) -> None:
        """Leave the episode where it is."""
        with suppress(RuntimeError):  # the event loop is closed, and with it the episode is over
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    async def _next(self) -> VerifiersOutcome | None:
        """Run until the agent is asked, and return None; or until the end. Raises what the episode raised."""
        is_asked = asyncio.ensure_future(self._line.is_asked.wait())
        try:
            await asyncio.wait({is_asked, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_asked.cancel()
        return self._task.result() if self._task.done() else None


async def _guarded(episode: Coroutine[Any, Any, VerifiersOutcome]) -> VerifiersOutcome:
    # In a task, SystemExit and KeyboardInterrupt would end the whole event loop.
    with only_exceptions(in_coroutine=True):
        return await episode


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Read the error of a task, which asyncio would log if the episode was left before it failed."""
    if not task.cancelled():
        task.exception()


# --- Messages of both APIs as ludic's --------------------------------------------------------------------


def plain(messages: Sequence[Any]) -> tuple[Message, ...]:
    """Return messages of verifiers as ludic's. Raises ConfigError if one holds more than text."""
    return tuple(map(_plain, messages))


def _plain(message: Any) -> Message:
    if message.role not in ROLES:
        raise ConfigError(f"a prompt has a message of the role {message.role!r}, wanted one of {', '.join(ROLES)}")
    calls = getattr(message, "tool_calls", None) or ()
    return Message(
        role=message.role,
        content=text_of(message),
        name=getattr(message, "name", None),
        tool_calls=tuple(ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in calls),
        reasoning=getattr(message, "reasoning_content", None),
        tool_call_id=getattr(message, "tool_call_id", None),
    )


def text_of(message: Any) -> str:
    """Return the text of a message, also of one in parts. Raises ConfigError for a part that is no text."""
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_text_of_part(part) for part in content)


def _text_of_part(part: Any) -> str:
    part = _Part.of(part)
    if part.text is None:
        raise ConfigError(f"a message has a part of the type {part.type}; ludic runs environments of verifiers of text")
    return part.text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part of a message: an object in one version of verifiers, a dict in another."""

    type: str
    text: str | None = field(default=None)

    @classmethod
    def of(cls, part: Any) -> "_Part":
        values = part if isinstance(part, Mapping) else vars(part)
        kind = str(values.get("type", "unknown"))
        return cls(type=kind, text=values.get("text") if kind == "text" else None)
