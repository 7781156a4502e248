"""Define the protocols of environments, which know nothing of tokens, models or training.

To add your own, write a class in a file that implements `SingleTurnEnvironment` (a question and a score),
`Environment` (several steps) or `MultiAgentEnvironment` (several agents), and name it `path/to/file.py:ClassName`.

Every method but `example` may be a coroutine (`async def`), which is awaited. The others run in the thread of the event
loop while they are quick, and in separate threads once they delay the other episodes (ludic.environments.placement). An
attribute `run_in` of the class overrides this: "loop"; "thread", where each episode has a thread in which its
environment is created and called; or "process", where an environment with a question and a score computes scores in
other processes.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Literal, Protocol, SupportsFloat, TypeVar, runtime_checkable

import numpy as np

from ludic.records import ExtraValue, Message, ToolCall
from ludic.settings import misfit_of_call

RUN_IN = ("auto", "loop", "thread", "process")
"""Values of the attribute `run_in`, which decides where blocking methods run; "auto", the default, decides by their
time."""
_MARK = "_is_tool_of_ludic"

Split = Literal["train", "heldout"]
"""Held-out examples never occur among the train examples of the same environment and seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Start of an episode: the prompt, and the data to score the answer."""

    example_id: str
    """Id of the example within its environment: the same id is the same example. Stored as env_example_id."""
    messages: tuple[Message, ...]
    """First observation: the conversation that the agent continues."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Data for scoring; never shown to the agent."""
    wanted: str | None = None
    """The wanted answer, for people to read; never shown to the agent. Each rollout stores its beginning. None if there
    is none, as in a game."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the example in its data set, such as its difficulty; never shown to the agent. Each rollout
    stores them as JSON in `example_columns`, up to max_column_characters (ludic.records.example_columns)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanReward:
    """Reward of a part of an action: of its characters from start to end, which is not included."""

    start: int
    end: int
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Score of one answer."""

    reward: float
    correct: bool | None = None
    """True if the answer is correct; None if unknown, for example for a reward without a right answer."""
    span_rewards: tuple[SpanReward, ...] = ()
    """Rewards of parts of the answer, in addition to `reward`; each is stored at the last token of its part."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward; they need not add up."""
    info: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, ExtraValue] = field(default_factory=dict)
    """Values of the run's own columns x_*, declared by extra_columns in run.json; stored with the rollout."""


NUMBERS = (int, float, SupportsFloat)
"""Types that isinstance accepts as numbers; the Protocol alone would take 25 µs for each value of a reward."""


def to_score(found: object, scorer: str) -> Score:
    """Return what a scorer returned as a Score. Raises TypeError, which names the scorer.

    found: a Score, a number, or whether the answer is correct, which is the reward 1 or 0.
    """
    if isinstance(found, Score):
        return found
    if isinstance(found, bool | np.bool_):
        return Score(reward=float(found), correct=bool(found))
    if isinstance(found, NUMBERS):
        with suppress(TypeError, ValueError):  # such as an array of several numbers
            return Score(reward=float(found))
    raise TypeError(f"{scorer} returned {shown(found)}, wanted a number or a Score")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAnswer:
    """One agent's answer in one episode, and its score so far; episodes of the same example are a group."""

    text: str
    """Its last action; empty if no completion could be read as an action."""
    reward: float
    """Sum of the rewards that the environment has given it."""
    components: Mapping[str, float]
    """Named parts of the reward."""
    messages: tuple[Message, ...]
    """The conversation of its last call, with its answer."""
    group_index: int
    """Index of the episode in its group, from 0."""
    agent_id: str
    """Id of the agent in the environment; "agent" if there is only one."""
    correct: bool | None = None
    """True if the environment reports it as correct; see Score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Result of one step of an environment."""

    observation: str | None
    """Next observation of the agent; None if the episode is over."""
    reward: float
    span_rewards: tuple[SpanReward, ...] = ()
    """Rewards of parts of the action; see Score."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    correct: bool | None = None
    """True if the answer is correct, see Score; in an episode of several steps the last value counts."""
    terminated: bool
    truncated: bool = False
    info: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, ExtraValue] = field(default_factory=dict)
    """Values of the run's own columns x_*; see Score."""
    tool_results: tuple[str | None, ...] = ()
    """Only from `run_tools`: the result of each call, in order; None if a call was not run."""


_Method = TypeVar("_Method", bound=Callable[..., Any])


def tool(method: _Method) -> _Method:
    """Mark a method of an environment as a tool, which the agents of the environment can call in its episode.

    It needs a type hint for each parameter and a line for it under `Args:` of its docstring, from which its schema is
    made.
    """
    setattr(method, _MARK, True)
    return method


def is_tool(method: object) -> bool:
    """Return whether a method is marked as a tool."""
    return getattr(method, _MARK, False) is True


@runtime_checkable
class SingleTurnEnvironment(Protocol):
    """Environment with a question and a score: stateless, so one instance serves all episodes."""

    def example(self, index: int, split: Split) -> Example:
        """Return example number `index` (any int of at least 0) of a split; the same arguments, the same example."""
        ...

    def score(self, example: Example, answer: str) -> Score | Awaitable[Score]:
        """Return the score of an answer. The answer may be any text; a useless one scores low and must not raise."""
        ...


@runtime_checkable
class Environment(Protocol):
    """Environment with several steps; an instance holds the state of one episode at a time.

    An attribute `max_steps`, an int, is the largest number of steps of an episode unless the run sets its own.
    """

    def example(self, index: int, split: Split) -> Example:
        """Return an example; see SingleTurnEnvironment."""
        ...

    def reset(self, example: Example) -> tuple[Message, ...] | Awaitable[tuple[Message, ...]]:
        """Begin an episode and return its first observation."""
        ...

    def step(self, action: str) -> Transition | Awaitable[Transition]:
        """Apply the agent's final text as an action, and return the result."""
        ...


@runtime_checkable
class MultiAgentEnvironment(Protocol):
    """Environment with several agents, who move in turn or at the same time; an instance holds one episode's state.

    An attribute `max_steps`, an int, is the largest number of steps of each agent unless the run sets its own.
    """

    def example(self, index: int, split: Split) -> Example:
        """Return an example; see SingleTurnEnvironment. Its messages are stored with an episode that fails early."""
        ...

    def reset(
        self, example: Example
    ) -> Mapping[str, tuple[Message, ...]] | Awaitable[Mapping[str, tuple[Message, ...]]]:
        """Begin an episode and return the first observation of each agent by its id, such as "x" and "o"."""
        ...

    def next_agents(self) -> Sequence[str] | Awaitable[Sequence[str]]:
        """Return the ids of the agents who move now, at least one; several move at the same time."""
        ...

    def step(self, actions: Mapping[str, str]) -> Mapping[str, Transition] | Awaitable[Mapping[str, Transition]]:
        """Apply the actions of these agents, and return the transition of each agent concerned.

        An observation of an agent that did not move is shown at its next turn, and a reward counts for its last move.
        The episode is over when it is over for all agents.
        """
        ...


@runtime_checkable
class ToolRunner(Protocol):
    """Environment with several steps that runs tool calls itself, all calls of a completion together.

    A completion with such calls is a step of the environment, which may end the episode. An environment whose tools are
    independent of each other needs only methods that are marked with `tool`.
    """

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Schemas of the tools of this episode, as ludic.agents.tools.toolbox.Tool has them; read after `reset`."""
        ...

    def run_tools(self, text: str, calls: Sequence[ToolCall]) -> Transition | Awaitable[Transition]:
        """Run the calls of a completion, and return their results in `tool_results`.

        text: of the completion, without the calls. calls: those that name a tool of this environment or an unknown one;
        their arguments are text as the model wrote it, not checked. An observation follows the results as a message of
        the user; None if there is none.
        """
        ...


@runtime_checkable
class TaskScorer(Protocol):
    """Environment that scores delegated tasks; without it they get the reward of the episode."""

    def score_task(self, agent_id: str, task: str, answer: str) -> Score | Awaitable[Score]:
        """Return the score of an answer to a task; both texts come from the model. agent_id: who answered."""
        ...


@runtime_checkable
class GroupScorer(Protocol):
    """Environment that scores all answers to an example together, such as by comparing them in pairs."""

    def score_group(
        self, example: Example, answers: Sequence[GroupAnswer]
    ) -> Sequence[Score | float] | Awaitable[Sequence[Score | float]]:
        """Return the new reward of each answer, in the order of the answers.

        Called when all episodes of the example have ended, if at least one of them did not fail; failed ones are left
        out. For it, an environment with several steps is created, and not reset. The components of a Score replace
        those of the same name.
        """
        ...


@runtime_checkable
class FolderScorer(Protocol):
    """Environment that scores what an agent with a working folder left in it (docs/gateway.md), not its final text."""

    def score_folder(self, example: Example, folder: Path) -> Score | float | Awaitable[Score | float]:
        """Return the score of the folder, which is deleted afterwards.

        The agent may have written anything: links that lead elsewhere, large files, names that are not text.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Environments of another package, named PREFIX/NAME."""

    make: Callable[..., Any]
    """Makes an environment from its NAME and options."""
    names: Callable[[], tuple[str, ...]]
    """Returns the NAMEs that a user may pick from; none if the package is missing."""
    is_known: Callable[[str], bool]
    """Returns whether there is such a NAME. Raises ConfigError if the package is missing."""
    source: Callable[[str], tuple[str | None, str | None]]
    """Returns the source file of a NAME, and its package with version; None for either if there is none."""


# --- The arguments that each method gets -----------------------------------------------------------------

_OPTIONAL = (ToolRunner, TaskScorer, GroupScorer, FolderScorer)


def methods_of(protocol: type) -> list[str]:
    """Return the names of a protocol's methods."""
    return [name for name, found in vars(protocol).items() if inspect.isfunction(found) and not name.startswith("_")]


def arguments_of(protocol: type, method: str) -> list[str]:
    """Return the names of the arguments that a method of a protocol gets, by position."""
    return [*inspect.signature(getattr(protocol, method)).parameters][1:]


def misfit_of_methods(environment: Any, protocol: type) -> str | None:
    """Return which method of an environment can't be called as a protocol does, and where it is; None if all can.

    protocol: the one that the environment is used as. Its methods of the other protocols are checked, too.
    """
    for each in (protocol, *_OPTIONAL):
        for method in methods_of(each):
            names = arguments_of(each, method)
            problem = misfit_of_call(getattr(environment, method), names) if hasattr(environment, method) else None
            if problem is not None:
                return f"its {method} {problem}; write def {method}({', '.join(['self', *names])})"
    return None
