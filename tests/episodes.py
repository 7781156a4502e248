"""Run scripted episodes, and look at their rows as the store would."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ludic.agents import episode as play
from ludic.agents.agent import Agent
from ludic.agents.episode import by_environment
from ludic.agents.requests import EpisodeLimits, EpisodeRequest
from ludic.engines.engine import SamplingParams
from ludic.environments.environment import Example, Transition
from ludic.records.rollout import Message, Rollout, RolloutBatch, RolloutGroup, RolloutMetadata
from ludic.records.validation import validate

EXAMPLE = Example(example_id="start", messages=(Message(role="user", content="begin"),))


@dataclass
class Script:
    """Environment that answers each action with the next of its transitions, or raises it."""

    transitions: Sequence[Transition | Exception]
    actions: list[str] = field(default_factory=list)

    def example(self, index: int, split: str) -> Example:
        return EXAMPLE

    def reset(self, example: Example) -> tuple[Message, ...]:
        return example.messages

    def step(self, action: str) -> Transition:
        self.actions.append(action)
        transition = self.transitions[len(self.actions) - 1]
        if isinstance(transition, Exception):
            raise transition
        return transition


def without_place(error: str | None) -> str | None:
    """The error of a row without the file and the line of a test that it names at its end."""
    return error and re.sub(r" \(\w+\.py:\d+, in [\w<>]+\)$", "", error)


def go_on(observation: str = "go on", reward: float = 0.25, **options: Any) -> Transition:
    return Transition(**{"observation": observation, "reward": reward, "terminated": False} | options)


def end(reward: float = 1.0, **options: Any) -> Transition:
    return Transition(**{"observation": None, "reward": reward, "terminated": True} | options)


def run_episode(
    agent: Agent, environment: Any, protocol: play.Protocol = by_environment, **options: Any
) -> list[Rollout]:
    """The rows of one episode, which may be stored.

    Options are example, max_tokens, sampling (other sampling parameters), and those of EpisodeLimits.
    """
    request = EpisodeRequest(
        env_name="script",
        example=options.pop("example", EXAMPLE),
        params=SamplingParams(max_tokens=options.pop("max_tokens", 256), **options.pop("sampling", {})),
        seed=5,
        group_id="group",
        request_index=0,
    )
    make = (lambda: environment) if hasattr(environment, "reset") else environment
    rows = asyncio.run(play.run_episode(protocol, agent, make, request, EpisodeLimits(**options)))
    group = RolloutGroup(key="script/start", rollouts=tuple(rows))
    validate(RolloutBatch(groups=(group,), metadata=RolloutMetadata(worker_id="w0-test")))
    return rows
