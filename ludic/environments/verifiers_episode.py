"""Play one episode of an Env of verifiers: its own run() goes on until it asks the agent, and then waits for the text.

The Interaction that run() talks to is verifiers' own. Below it `_Rollout` takes the place of verifiers' Rollout: it
records messages in a real Trace, checks stops and max_turns before a turn, and scores the Task at the end. It knows no
tokens, so the Trace has no model calls and no usage. Importing this module imports verifiers.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import resolve_agent
from verifiers.v1.session import call_hook
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import invoke

from ludic.environments.nested_loop import NestedTask
from ludic.records import Message


class Episode:
    """An episode that ludic steps through."""

    def __init__(self, env: Any, task: Any) -> None:
        self._line = _Line()
        self._traces: list[Any] = []
        self._task = NestedTask(_run(env, task, self._line, self._traces))

    @property
    def trace(self) -> Any:
        """The Trace of the agent."""
        return self._traces[0]

    def begin(self) -> tuple[Message, ...]:
        """Run until the agent is asked, and return what it sees. Raises RuntimeError if it is never asked."""
        messages = self._next()
        if messages is None:
            raise RuntimeError("the environment ended before it asked its agent")
        return messages

    def answer(self, text: str) -> str | None:
        """Give the agent's text; return the next observation, or None if the episode is over."""
        self._line.answer(text)
        messages = self._next()
        if messages is None:
            return None
        others = [message.role for message in messages if message.role != "user"]
        if others:
            raise ValueError(f"the environment sent a message of the role {others[0]!r}, wanted user")
        return "\n\n".join(message.content for message in messages)

    def cancel(self) -> None:
        """Leave the episode where it is."""
        self._task.cancel()

    def _next(self) -> tuple[Message, ...] | None:
        return self._line.question if self._task.run_until(self._line.is_asked) else None


def first_messages(task: Any) -> list[Any]:
    """Return a task's system prompt and prompt as messages of verifiers."""
    prompt, system = task.data.prompt, task.data.system_prompt
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
    return messages if system is None else [vf.SystemMessage(content=system), *messages]


def plain(messages: Sequence[Any]) -> tuple[Message, ...]:
    """Return messages of verifiers as ludic's. Raises TypeError if one is not text alone."""
    for message in messages:
        if not isinstance(message.content, str):
            raise TypeError(f"the environment sent {message!r}, wanted a message of text")
    return tuple(Message(role=message.role, content=message.content) for message in messages)


class _Line:
    """Between an Env, which asks, and ludic, which answers."""

    def __init__(self) -> None:
        self.question: tuple[Message, ...] = ()
        self.is_asked = asyncio.Event()
        self._reply: asyncio.Future[str] | None = None

    async def ask(self, messages: Sequence[Any]) -> str:
        self.question = plain(messages)
        self._reply = asyncio.get_running_loop().create_future()
        self.is_asked.set()
        return await self._reply

    def answer(self, text: str) -> None:
        assert self._reply is not None, "nothing was asked"
        self.is_asked.clear()
        self._reply.set_result(text)


async def _run(env: Any, task: Any, line: _Line, traces: list[Any]) -> None:
    """Run the Env's hooks as its own run_episode does, but let their errors out."""

    def make(name: str, config: Any) -> _Agent:
        return _Agent(
            name, resolve_agent(config, model="ludic", harness=env.config.agent_harnesses()[name]), line, traces
        )

    agents = vf.Agents(env.config, make)
    await env.setup(agents)
    await env.run(task, agents)
    if not traces:
        raise RuntimeError("the environment ended without a conversation with its agent")
    about = vf.EnvInfo(id=env.config.env_id)
    await env.finalize(task, vf.Episode(env=about, task=traces[0].task, traces=traces, ok=True))


class _Agent:
    """The agent that an Env talks to; it has the methods of verifiers' Agent that need no harness."""

    trainable = True

    def __init__(self, name: str, config: Any, line: _Line, traces: list[Any]) -> None:
        self.name, self.config = name, config
        self._line, self._traces = line, traces

    async def run(self, task: Any) -> Any:
        """Answer a task once, and return the Trace."""
        rollout = await self._open(task)
        await vf.Interaction(rollout).turn()
        if rollout.ok:
            rollout.trace.stop("agent_completed")
        return await rollout.close()

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[Any]:
        """Hold a conversation, which is scored when the block ends."""
        interaction = vf.Interaction(await self._open(task))
        yield interaction
        await interaction.close()

    async def _open(self, task: Any) -> "_Rollout":
        if self._traces:
            raise RuntimeError("the environment begins a second conversation; an episode of ludic has one")
        rollout = _Rollout(task, self.name, self.config, self._line)
        self._traces.append(rollout.trace)
        await invoke(task.setup, {"trace": rollout.trace, "runtime": None})
        return rollout


class _Rollout:
    """What an Interaction needs of verifiers' Rollout."""

    def __init__(self, task: Any, name: str, config: Any, line: _Line) -> None:
        self.closed = False
        self._task, self._line, self._max_turns = task, line, config.max_turns
        self.trace: Any = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(),
            agent=vf.AgentInfo(config=config, name=name),
        )

    @property
    def ok(self) -> bool:
        return self.trace.stop_condition is None

    async def step(self, messages: list[Any] | None = None, *, on_input: Any = None) -> None:
        """Ask the agent, unless the conversation is over; it sees the prompt first."""
        new = [*(first_messages(self._task) if not self.trace.nodes else ()), *(messages or ())]
        if await self._is_stopped():
            return
        for message in new:
            self._add(message)
        reply = await self._line.ask(new)
        self._add(vf.AssistantMessage(content=reply), sampled=True)

    async def close(self) -> Any:
        """Score the conversation, once."""
        if not self.closed:
            self.closed = True
            await invoke(self._task.finalize, {"trace": self.trace, "runtime": None})
            await self._task.score(self.trace)
            self.trace.is_completed = self.trace.ok = True
        return self.trace

    async def _is_stopped(self) -> bool:
        if self._max_turns is not None and self.trace.num_turns >= self._max_turns:
            self.trace.stop("max_turns")
            return True
        for function in self._task.hooks("stop"):
            if await call_hook(function, {vf.Trace: self.trace}):
                self.trace.stop(function.__name__)
                return True
        return False

    def _add(self, message: Any, sampled: bool = False) -> None:
        parent = len(self.trace.nodes) - 1 if self.trace.nodes else None
        self.trace.nodes.append(vf.MessageNode(parent=parent, message=message, sampled=sampled))
