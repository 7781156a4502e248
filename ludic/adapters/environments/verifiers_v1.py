"""Environments of verifiers 0.4: a Taskset, with an Env if it has several turns. Importing this imports verifiers.

What runs is verifiers' own: the Taskset gives the prompts, the Env decides the turns, and the Task's rewards, metrics,
judges and stops judge the Trace. ludic takes the place of the harness: it asks its own model, and runs the tools of
toolsets() in this process. The Interaction that Env.run() talks to is verifiers' own. Below it `_Rollout` takes the
place of verifiers' Rollout: it records messages in a real Trace, checks stops and max_turns before a turn, and scores
the Task at the end. It knows no tokens, so the Trace has no model calls and no usage.

Refused with the reason: containers, images, skills and artifacts, tool servers of a sandbox or behind a URL, functions
that want a runtime, intercepts, several agents, and a harness of the package's own.
"""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from verifiers.v1.configs.agent import agent_config_fields, resolve_agent
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content
from verifiers.v1.session import call_hook, hook_boundary
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import discover_decorated, invoke

from ludic.adapters.environments.verifiers_turns import TurnChannel, VerifiersOutcome, plain
from ludic.base import read_json
from ludic.environments import Example, Split, partition
from ludic.errors import ConfigError
from ludic.records import ToolCall, add_rewards

_NOT_COLUMNS = {"prompt", "system_prompt", "answer", "idx"}
"""Fields of a task that are stored as prompt, wanted answer and position; the others are columns of its example."""

# --- Loading ---------------------------------------------------------------------------------------------


PLAIN_HARNESSES = ("bash", "null")
"""The harnesses of verifiers that an environment gets without asking for one; ludic takes their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """An Env with its tasks; a `Loaded`."""

    env: Any
    tasks: Sequence[Any]
    numbers: Mapping[Split, Sequence[int]]
    max_turns: int | None
    shared: "_SharedTools"

    def example(self, number: int) -> Example:
        """Return the example of a task."""
        task = self.tasks[number]
        answer = getattr(task.data, "answer", None)
        return Example(
            example_id=task_digest(task)[:16],
            messages=plain(first_messages(task)),
            data={"number": number},
            wanted=None if answer is None else str(answer),
            columns=task.data.model_dump(mode="json", exclude=_NOT_COLUMNS, exclude_none=True),
        )

    async def play(self, number: int, line: TurnChannel) -> VerifiersOutcome:
        """Run the Env's hooks as its own run_episode does, but let their errors out."""
        env, task = self.env, self.tasks[number]
        traces: list[Any] = []

        def make(name: str, config: Any) -> _Agent:
            harness = env.config.agent_harnesses()[name]
            return _Agent(name, resolve_agent(config, model="ludic", harness=harness), line, traces, self.shared)

        agents = vf.Agents(env.config, make)
        await env.setup(agents)
        await env.run(task, agents)
        if not traces:
            raise RuntimeError("the environment ended without a conversation with its agent")
        about = vf.EnvInfo(id=env.config.env_id)
        await env.finalize(task, vf.Episode(env=about, task=traces[0].task, traces=traces, ok=True))
        return _outcome(traces[0])


def load(name: str, options: Mapping[str, Any], num_tasks: int | None) -> Tasks:
    """Load an environment and its tasks. options: the Env's configuration. Raises ConfigError and verifiers' errors."""
    config = {**options, "taskset": {**options.get("taskset", {}), "id": name}}
    env = vf.load_environment(vf.resolve_env_config(config))
    _refuse(_problems(env), name)
    if num_tasks is None and not env.taskset.bounded:
        raise ConfigError("the Taskset is infinite; the option num_tasks says how many tasks to take")
    tasks = list(islice(env.taskset, num_tasks))
    for task in tasks:
        _refuse(_task_problems(task), name)
    (agent,) = agent_config_fields(env.config).values()
    return Tasks(
        env=env,
        tasks=tasks,
        numbers=partition(range(len(tasks)), lambda number: task_digest(tasks[number])),
        max_turns=agent.max_turns,
        shared=_SharedTools(env.taskset.toolsets(env.config.taskset)),
    )


def task_digest(task: Any) -> str:
    """Return the digest of a task without its position and names, so that equal tasks are in one split."""
    data = task.data.model_dump(mode="json", exclude={"idx", "id", "name"}, exclude_none=True)
    return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def first_messages(task: Any) -> list[Any]:
    """Return a task's system prompt and prompt as messages of verifiers."""
    prompt, system = task.data.prompt, task.data.system_prompt
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
    return messages if system is None else [vf.SystemMessage(content=system), *messages]


def _outcome(trace: Any) -> VerifiersOutcome:
    weighted = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return VerifiersOutcome(
        reward=add_rewards(weighted.values()),
        components={**metrics, **weighted},
        stop_condition=str(trace.stop_condition),
        is_cut=trace.stop_condition == "max_turns",
    )


# --- What is refused -------------------------------------------------------------------------------------


def _refuse(problems: Iterator[str], name: str) -> None:
    problem = next(problems, None)
    if problem is not None:
        raise ConfigError(f"{name} {problem}; ludic runs environments of verifiers that need only text and their tools")


def _problems(env: Any) -> Iterator[str]:
    """Yield what an Env needs beyond text and tools."""
    harnesses = env.config.agent_harnesses()
    taskset, task_class, task_config = type(env.taskset), type(env.taskset).task_type(), env.config.taskset.task
    if len(harnesses) != 1:
        yield f"has several agents, {', '.join(harnesses)}"
    for harness in harnesses.values():
        if harness.id not in PLAIN_HARNESSES:
            yield f"brings the harness {harness.id!r}"
    if type(env).start is not vf.Env.start or type(env).stop is not vf.Env.stop:
        yield "starts shared resources, in start() of its Env"
    if task_class.NEEDS_CONTAINER:
        yield "needs a container"
    for toolset in (*taskset.toolsets(env.config.taskset), *task_class.toolsets(task_config)):
        if getattr(toolset.config, "url", None):
            yield (
                f"has the tool server {toolset.server_name} at {toolset.config.url}, which an agent of ludic gets by "
                f"--tools 'mcp:{toolset.config.url}'"
            )
        if (runtime := getattr(toolset.config, "runtime", None)) is not None and runtime.type != "subprocess":
            yield f"has the tool server {toolset.server_name}, which wants a sandbox ({runtime.type})"
    for plugged in (*task_config.rewards.values(), *task_config.metrics.values(), *task_config.stops.values()):
        # Consent covers the options, and so not the text of a file that they name.
        if plugged.fn and ".py" in plugged.fn:
            yield f"has the function {plugged.fn} of a file; name it as module:function"


def _task_problems(task: Any) -> Iterator[str]:
    """Yield what a Task needs beyond text and tools."""
    for name in ("image", "skills", "artifacts"):
        if getattr(task.data, name):
            yield f"has tasks with the field {name}"
    if discover_decorated(task, "intercept"):
        yield "changes requests, by @vf.intercept"
    for function in (*task.hooks("reward"), *task.hooks("metric"), *_own_hooks(task)):
        if _needs_runtime(function):
            yield f"has the function {function.__name__}, which wants a runtime"
    for judge in task.plugged_judges():
        if _needs_runtime(judge.score):
            yield f"has the judge {judge.reward_name}, which wants a runtime"
    for function in task.hooks("stop"):
        if hook_boundary(function, allow_trace=True) is not vf.Trace:
            yield f"has the stop {function.__name__}, which wants a Request or a Response"
    for message in task.data.prompt if isinstance(task.data.prompt, list) else ():
        if not isinstance(message.content, str) and any(part.type != "text" for part in message.content or ()):
            yield f"has a prompt with a message of the role {message.role} that is not plain text"


def _own_hooks(task: Any) -> list[Callable[..., Any]]:
    """Return those methods setup and finalize that a task's class has written itself."""
    hooks = (("setup", vf.Task.setup), ("finalize", vf.Task.finalize))
    return [getattr(task, name) for name, inherited in hooks if getattr(type(task), name) is not inherited]


def _needs_runtime(function: Callable[..., Any]) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


# --- Tools -----------------------------------------------------------------------------------------------
# A Toolset is a server of MCP, which verifiers starts as a process for each episode, or once for a Taskset's. Here it
# lives in this process, with the same schemas, checks and texts of the package mcp. What its process would fetch over
# HTTP, the state of the episode's Trace, it gets from `_trace`.

_trace: ContextVar[Any] = ContextVar("trace")
"""Trace of the episode whose call a Toolset runs."""


class _Tools:
    """Tools of an agent by the names that the model calls."""

    def __init__(self) -> None:
        self.schemas: list[dict[str, Any]] = []
        self._servers: dict[str, tuple[MCPServer, str]] = {}

    async def add(self, toolset: Any, server: MCPServer) -> None:
        """Add the tools of a server. Raises ConfigError for a name that is taken."""
        prefix = toolset.server_name
        for each in await server.list_tools():
            name = f"{prefix}_{each.name}" if prefix else each.name
            if name in self._servers:
                raise ConfigError(f"two toolsets have a tool {name!r}; give one of them a TOOL_PREFIX of its own")
            about = {"name": name, "description": each.description or "", "parameters": each.input_schema}
            self.schemas.append({"type": "function", "function": about})
            self._servers[name] = (server, each.name)

    async def run(self, call: ToolCall, trace: Any) -> Any:
        """Return the message that answers a call. What goes wrong is text in it, in the words of verifiers' harness."""
        try:
            arguments = read_json(call.arguments or "{}")
        except (ValueError, RecursionError) as error:
            content: Any = f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
        else:
            if not isinstance(arguments, dict):
                kind = type(arguments).__name__
                content = f"error: tool arguments must be a JSON object, got {kind}; resend as an object"
            elif call.name not in self._servers:
                content = f"error: unknown tool {call.name!r}"
            else:
                content = await self._call(*self._servers[call.name], arguments, trace)
        return vf.ToolMessage(tool_call_id=call.id, content=content, name=call.name)

    async def _call(self, server: MCPServer, name: str, arguments: dict[str, Any], trace: Any) -> Any:
        token = _trace.set(trace)
        try:
            result = await server.call_tool(name, arguments)
        except Exception as error:  # as the server of the package mcp answers a tool that raises
            return str(error)
        finally:
            _trace.reset(token)
        return mcp_content_to_chat_content(result.content)


async def _serve(toolset: Any, stack: AsyncExitStack, data: Any = None) -> MCPServer:
    """Set a Toolset up as its process would, and return its server. data: of the task, if it serves one."""

    async def pull() -> Any:
        return toolset._state_adapter.validate_json(_trace.get().state.model_dump_json())

    async def push(before: bytes) -> None:
        after = toolset._state_adapter.dump_json(toolset.state)
        if after != before:
            trace = _trace.get()
            trace.state = type(trace.state).model_validate_json(after)

    toolset._pull_state, toolset._push_state = pull, push
    await stack.enter_async_context(toolset._exit_stack)
    await toolset.setup()
    if data is not None:
        await toolset.setup_task(data)
    server = MCPServer(toolset.server_name or type(toolset).__name__, log_level="WARNING")
    toolset.register(server)
    return server


class _SharedTools:
    """The toolsets of a Taskset: one of each serves all episodes of an event loop."""

    def __init__(self, toolsets: Sequence[Any]) -> None:
        self._toolsets = toolsets
        self._served: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[list[MCPServer]]] = WeakKeyDictionary()

    async def add_to(self, tools: _Tools) -> None:
        """Add the tools; the first call of an event loop sets the toolsets up."""
        if not self._toolsets:
            return
        loop = asyncio.get_running_loop()
        if loop not in self._served:
            self._served[loop] = loop.create_task(self._serve())
        servers = await asyncio.shield(self._served[loop])
        for toolset, server in zip(self._toolsets, servers, strict=True):
            await tools.add(toolset, server)

    async def _serve(self) -> list[MCPServer]:
        stack = AsyncExitStack()  # never closed: they live as long as the process
        return [await _serve(toolset, stack) for toolset in self._toolsets]


# --- Episodes --------------------------------------------------------------------------------------------


class _Agent:
    """The agent that an Env talks to; it has the methods of verifiers' Agent that need no harness."""

    trainable = True

    def __init__(self, name: str, config: Any, line: TurnChannel, traces: list[Any], shared: _SharedTools) -> None:
        self.name, self.config = name, config
        self._line, self._traces, self._shared = line, traces, shared

    async def run(self, task: Any) -> Any:
        """Answer a task once, and return the Trace."""
        async with self._opened(task) as rollout:
            await vf.Interaction(rollout).turn()
            if rollout.ok:
                rollout.trace.stop("agent_completed")
            return await rollout.close()

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[Any]:
        """Hold a conversation, which is scored when the block ends."""
        async with self._opened(task) as rollout:
            interaction = vf.Interaction(rollout)
            yield interaction
            await interaction.close()

    @asynccontextmanager
    async def _opened(self, task: Any) -> "AsyncIterator[_Rollout]":
        if self._traces:
            raise RuntimeError("the environment begins a second conversation; an episode of ludic has one")
        async with AsyncExitStack() as stack:
            rollout = _Rollout(task, self.name, self.config, self._line)
            self._traces.append(rollout.trace)
            await invoke(task.setup, {"trace": rollout.trace, "runtime": None})
            await self._shared.add_to(rollout.tools)
            for toolset in task.toolsets(task.config):
                await rollout.tools.add(toolset, await _serve(toolset, stack, task.data))
            yield rollout


@dataclass(slots=True)
class _Rollout:
    """The part of verifiers' Rollout that an Interaction uses."""

    task: Any
    name: str
    config: Any
    line: TurnChannel
    closed: bool = False
    tools: _Tools = field(default_factory=_Tools)
    trace: Any = None

    def __post_init__(self) -> None:
        task = self.task
        self.trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(),
            agent=vf.AgentInfo(config=self.config, name=self.name),
        )

    @property
    def ok(self) -> bool:
        return self.trace.stop_condition is None

    async def step(self, messages: list[Any] | None = None, *, on_input: Any = None) -> None:
        """Ask the agent until it replies without tool calls, unless the conversation is over; it sees the prompt first.

        Tools run one after the other, as in verifiers' own harnesses.
        """
        new = [*(first_messages(self.task) if not self.trace.nodes else ()), *(messages or ())]
        while not await self._is_stopped():
            for message in new:
                self._add(message)
            reply = await self._ask(new)
            if not reply.calls:
                return
            new = [await self.tools.run(call, self.trace) for call in reply.calls]
            self.line.send(new)

    async def _ask(self, new: list[Any]) -> Any:
        self.line.send([message for message in new if not isinstance(message, vf.ToolMessage)])
        reply = await self.line.ask(self.tools.schemas)
        calls = [vf.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in reply.calls]
        self._add(vf.AssistantMessage(content=reply.text, tool_calls=calls or None), sampled=True)
        return reply

    async def close(self) -> Any:
        """Score the conversation, once."""
        if not self.closed:
            self.closed = True
            await invoke(self.task.finalize, {"trace": self.trace, "runtime": None})
            await self.task.score(self.trace)
            self.trace.is_completed = self.trace.ok = True
        return self.trace

    async def _is_stopped(self) -> bool:
        if self.config.max_turns is not None and self.trace.num_turns >= self.config.max_turns:
            self.trace.stop("max_turns")
            return True
        for function in self.task.hooks("stop"):
            if await call_hook(function, {vf.Trace: self.trace}):
                self.trace.stop(function.__name__)
                return True
        return False

    def _add(self, message: Any, sampled: bool = False) -> None:
        parent = len(self.trace.nodes) - 1 if self.trace.nodes else None
        self.trace.nodes.append(vf.MessageNode(parent=parent, message=message, sampled=sampled))
