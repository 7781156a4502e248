"""Load an environment of the package verifiers, and play one episode of it. Importing this module imports verifiers.

An environment that needs more than text is refused. The Env's own run() goes on until it asks the agent, and then waits
for the text. The Interaction that run() talks to is verifiers' own. Below it `_Rollout` takes the place of verifiers'
Rollout: it records messages in a real Trace, checks stops and max_turns before a turn, and scores the Task at the end.
It knows no tokens, so the Trace has no model calls and no usage.
"""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields, resolve_agent
from verifiers.v1.session import call_hook, hook_boundary
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import discover_decorated, invoke

from ludic.code.run import describe, only_exceptions
from ludic.environments.environment import Split
from ludic.environments.event_loops import NestedTask
from ludic.environments.splits import partition
from ludic.errors import ConfigError
from ludic.records import Message

# --- Loading ---------------------------------------------------------------------------------------------


PLAIN_HARNESSES = ("bash", "null")
"""The harnesses of verifiers that an environment gets without asking for one; ludic takes their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """An Env with its tasks."""

    env: Any
    tasks: Sequence[Any]
    numbers: Mapping[Split, Sequence[int]]
    """Numbers of the tasks of each split."""
    max_turns: int | None
    """Maximum turns of the agent, by its configuration."""


@lru_cache(maxsize=16)
def load(config_json: str, num_tasks: int | None) -> Loaded:
    """Load an environment and its tasks, once in a process.

    config_json: the Env's configuration. num_tasks: number of tasks to take; None takes all. Raises ConfigError.
    """
    config = json.loads(config_json)
    name = config["taskset"]["id"]
    try:
        with only_exceptions():
            env = vf.load_environment(vf.resolve_env_config(config))
            _refuse(_problems(env), name)
            if num_tasks is None and not env.taskset.bounded:
                raise ConfigError("the Taskset is infinite; the option num_tasks says how many tasks to take")
            tasks = list(islice(env.taskset, num_tasks))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the package verifiers can't load it: {describe(error)}") from error
    for task in tasks:
        _refuse(_task_problems(task), name)
    (agent,) = agent_config_fields(env.config).values()
    numbers = partition(range(len(tasks)), lambda number: task_digest(tasks[number]))
    return Loaded(env=env, tasks=tasks, numbers=numbers, max_turns=agent.max_turns)


def task_digest(task: Any) -> str:
    """Return the digest of a task without its position and names, so that equal tasks are in one split."""
    data = task.data.model_dump(mode="json", exclude={"idx", "id", "name"}, exclude_none=True)
    return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _refuse(problems: Iterator[str], name: str) -> None:
    problem = next(problems, None)
    if problem is not None:
        raise ConfigError(f"{name} {problem}; ludic runs environments of verifiers that need only text")


def _problems(env: Any) -> Iterator[str]:
    """Yield what an Env needs beyond text."""
    harnesses = env.config.agent_harnesses()
    taskset, task_class = type(env.taskset), type(env.taskset).task_type()
    if len(harnesses) != 1:
        yield f"has several agents, {', '.join(harnesses)}"
    for harness in harnesses.values():
        if harness.id not in PLAIN_HARNESSES:
            yield f"brings the harness {harness.id!r}"
    if type(env).start is not vf.Env.start or type(env).stop is not vf.Env.stop:
        yield "starts shared resources, in start() of its Env"
    if taskset.toolsets(env.config.taskset) or task_class.toolsets(env.config.taskset.task):
        yield "has tools of its own, in toolsets()"
    if task_class.NEEDS_CONTAINER:
        yield "needs a container"
    if env.config.taskset.task.judges:
        yield "has judges, which ask another model"
    task_config = env.config.taskset.task
    for plugged in (*task_config.rewards.values(), *task_config.metrics.values(), *task_config.stops.values()):
        # Consent covers the options, and so not the text of a file that they name.
        if plugged.fn and ".py" in plugged.fn:
            yield f"has the function {plugged.fn} of a file; name it as module:function"


def _task_problems(task: Any) -> Iterator[str]:
    """Yield what a Task needs beyond text."""
    for field in ("image", "skills", "artifacts"):
        if getattr(task.data, field):
            yield f"has tasks with the field {field}"
    if discover_decorated(task, "intercept"):
        yield "changes requests, by @vf.intercept"
    for function in (*task.hooks("reward"), *task.hooks("metric"), *_own_hooks(task)):
        if _needs_runtime(function):
            yield f"has the function {function.__name__}, which wants a runtime"
    for function in task.hooks("stop"):
        if hook_boundary(function, allow_trace=True) is not vf.Trace:
            yield f"has the stop {function.__name__}, which wants a Request or a Response"
    for message in task.data.prompt if isinstance(task.data.prompt, list) else ():
        if not isinstance(message.content, str) or message.role not in ("system", "user", "assistant"):
            yield f"has a prompt with a message of the role {message.role} that is not plain text"


def _own_hooks(task: Any) -> list[Callable[..., Any]]:
    """Return those methods setup and finalize that a task's class has written itself."""
    hooks = (("setup", vf.Task.setup), ("finalize", vf.Task.finalize))
    return [getattr(task, name) for name, inherited in hooks if getattr(type(task), name) is not inherited]


def _needs_runtime(function: Callable[..., Any]) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


# --- Episodes --------------------------------------------------------------------------------------------


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
