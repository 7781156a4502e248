"""What every environment promises. Environments know nothing of tools, tokens, models or training.

Anyone can add one in a file of their own: implement `SingleTurnEnvironment` (a question and a
score) or `Environment` (several steps), and name it `path/to/file.py:ClassName`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from ludic.records import ExtraValue, Message

Split = Literal["train", "heldout"]
"""Held-out examples never occur among the train examples of the same environment and seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Where an episode begins."""

    example_id: str
    """Names the example within its environment: same id, same example. Stored as env_example_id."""
    messages: tuple[Message, ...]
    """The first observation: the conversation that the agent is asked to continue."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What scoring needs; never shown to the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one answer was worth."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts, for the reader; they need not add up."""
    info: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, ExtraValue] = field(default_factory=dict)
    """Values of the run's own columns x_*, which extra_columns in run.json declares; stored with the rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """What one step of an environment answered."""

    observation: str | None
    """What the agent sees next; None when the episode is over."""
    reward: float
    reward_components: Mapping[str, float] = field(default_factory=dict)
    terminated: bool
    truncated: bool = False
    info: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, ExtraValue] = field(default_factory=dict)
    """As in Score."""


@runtime_checkable
class SingleTurnEnvironment(Protocol):
    """A question and a score: stateless, so one instance serves all episodes."""

    def example(self, index: int, split: Split) -> Example:
        """Example number `index` (any int of at least 0) of a split; the same arguments give the same example."""
        ...

    def score(self, example: Example, answer: str) -> Score:
        """What the answer is worth. Any text may come; a useless one scores low, it never raises."""
        ...


@runtime_checkable
class Environment(Protocol):
    """Several steps; one instance holds the state of one episode at a time."""

    def example(self, index: int, split: Split) -> Example:
        """As in SingleTurnEnvironment."""
        ...

    def reset(self, example: Example) -> tuple[Message, ...]:
        """Begin an episode and return its first observation."""
        ...

    def step(self, action: str) -> Transition:
        """Do what the agent's final text says."""
        ...
