"""Let agents delegate tasks to other agents, with the tool `delegate`.

The other agent is the same model with its own dialogue: it sees only the task's text, and its answer is the result of
the tool. Its rows belong to the same episode, with parent_rollout_id and depth.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ludic.agents.contexts import make_context
from ludic.agents.environment_calls import score_task
from ludic.agents.parsers import Parser, make_parser
from ludic.agents.tools.registry import as_tool, built_in_tool
from ludic.agents.tools.toolbox import Tool, Toolbox, make_validator
from ludic.environments import HeldEnvironment, TaskScorer, Transition
from ludic.errors import ConfigError
from ludic.records import Message
from ludic.settings import CONTEXT, MCP, NO_FILES, PARSER, SUB_AGENT, TOOL, Files, Kind, build_own, find, python_file_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

AnAgent = TypeVar("AnAgent", bound="DataclassInstance")
"""An Agent, whose module imports this one."""
DELEGATE = "delegate"
"""Name of the tool."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SubAgent:
    """An agent to which others can delegate tasks. Raises ConfigError if a part of it can't be made."""

    name: str
    """Name by which the model calls it; agent_id of its rows."""
    description: str
    """Description of its abilities, for the model."""
    instructions: str | None = None
    """System message."""
    parser: Parser | str | None = None
    """Name of a built-in parser, or a parser; None is the run's."""
    context: str = "full"
    """Name of a built-in context."""
    tools: Sequence[str | Callable[..., Any] | Tool] | None = None
    """Names of built-in tools, functions and tools; None is the run's tools."""
    max_steps: int = 4
    """Maximum completions that it may answer with until one can be parsed."""

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and self.name):
            raise ConfigError(f"sub-agent: its name is {self.name!r}, wanted a text that is not empty")
        self._parts  # noqa: B018  (made now, so that a mistake is found before a run)

    @cached_property
    def _parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"make_context": make_context(_built_in(CONTEXT, self.context))}
        if self.parser is not None:
            is_name = isinstance(self.parser, str)
            parts["parser"] = make_parser(_built_in(PARSER, str(self.parser))) if is_name else self.parser
        if self.tools is not None:
            parts["toolbox"] = Toolbox(map(_make_tool, self.tools))
            if DELEGATE in parts["toolbox"]:
                raise ConfigError(f"sub-agent {self.name}: a tool of its own is named {DELEGATE!r}; rename it")
        return parts

    def equip(self, agent: AnAgent) -> AnAgent:
        """Return this agent with the model of another."""
        return replace(agent, **self._parts)

    def messages(self, task: str) -> list[Message]:
        """Return the agent's first messages."""
        task_message = Message(role="user", content=task)
        if self.instructions is None:
            return [task_message]
        return [Message(role="system", content=self.instructions), task_message]


def _built_in(kind: Kind, name: str) -> str:
    if python_file_of(name.removeprefix("json:")) is not None:
        raise ConfigError(f"a sub-agent's {kind.role} is {name!r}, wanted the name of a built-in one")
    return name


def _make_tool(tool: str | Callable[..., Any] | Tool) -> Tool:
    if not isinstance(tool, str):
        return as_tool(tool)
    names = [name for name in TOOL.names() if not name.startswith(MCP)]
    if tool not in names:
        raise ConfigError(f"a sub-agent's tool is {tool!r}, wanted {' or '.join(names)}, a function or a Tool")
    return built_in_tool(tool)


def helper() -> SubAgent:
    """Return an agent like the one that delegates the task."""
    return SubAgent(name="helper", description="Works on one task, which it sees without what was said before.")


def make_sub_agents(names: Sequence[str], files: Files = NO_FILES) -> tuple[SubAgent, ...]:
    """Return the sub-agents of all names; runs users' files. files: files to run instead of those on disk, by path.

    Raises ConfigError.
    """
    made = tuple(_make(name, files) for name in names)
    called = [sub_agent.name for sub_agent in made]
    for name in called:
        if called.count(name) > 1:
            raise ConfigError(f"two sub-agents are named {name!r}; rename one, since the model calls them by name")
    return made


def _make(name: str, files: Files) -> SubAgent:
    made = build_own(SUB_AGENT, name, find(SUB_AGENT, name, files), "equip")
    if not isinstance(made, SubAgent):
        raise ConfigError(
            f"sub-agent {name}: it returned {type(made).__name__}, wanted ludic.agents.delegation.SubAgent"
        )
    return made


class Delegate:
    """The tool `delegate` of one agent in one episode."""

    name = DELEGATE

    def __init__(self, sub_agents: tuple[SubAgent, ...], run: Callable[[str, SubAgent], Awaitable[str]]) -> None:
        """run: lets a sub-agent work on a task and returns its answer."""
        self.schema = delegate_schema(sub_agents)
        self._sub_agents = {sub_agent.name: sub_agent for sub_agent in sub_agents}
        self._run = run

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        name = arguments.get("agent", next(iter(self._sub_agents)))
        return await self._run(arguments["task"], self._sub_agents[name])


@cache
def delegate_validators(sub_agents: tuple[SubAgent, ...]) -> Mapping[str, Any]:
    """Return the validator of the tool's arguments by its name. Every agent of an episode has a toolbox with it."""
    return {DELEGATE: make_validator(delegate_schema(sub_agents))}


@cache
def delegate_schema(sub_agents: tuple[SubAgent, ...]) -> Mapping[str, Any]:
    """Return the schema of the tool, as chat templates take it."""
    agents = "; ".join(f"{sub_agent.name}: {sub_agent.description}" for sub_agent in sub_agents)
    agent = {"type": "string", "enum": [each.name for each in sub_agents], "description": agents}
    task = {"type": "string", "minLength": 1, "description": "All that the agent needs to know."}
    return {
        "type": "function",
        "function": {
            "name": DELEGATE,
            "description": "Hand a task to another agent, and get its answer. Several calls at once run side by side.",
            "parameters": {
                "type": "object",
                "properties": {"task": task, "agent": agent},
                "required": ["task"],
            },
        },
    }


class SubTask:
    """A delegated task, as the environment of the agent that works on it: one answer ends it."""

    def __init__(self, held: HeldEnvironment, agent_id: str, task: str) -> None:
        """held: the environment of the episode. It may score the task, see TaskScorer."""
        self._held, self._agent_id, self._task = held, agent_id, task
        self.has_score = isinstance(held.environment, TaskScorer)
        self.answer: str | None = None

    async def step(self, action: str) -> Transition:
        """Record the answer, and score it if the environment does."""
        self.answer = action
        if not self.has_score:
            return Transition(observation=None, reward=0.0, terminated=True)
        return await score_task(self._held, self._agent_id, self._task, action)
