"""Call an environment and check its results, so that its errors fail one episode and never the worker."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from reprlib import repr as shown
from typing import Any, SupportsFloat

import numpy as np

from ludic.agents.requests import fails_the_episode
from ludic.base import storable
from ludic.environments import (
    Example,
    GroupAnswer,
    HeldEnvironment,
    LimitedEnvironments,
    SpanReward,
    Split,
    Transition,
    to_score,
    transition_of,
)
from ludic.records import LARGEST_REWARD, ROLES, Message, ToolCall


async def make(make_environment: LimitedEnvironments | Callable[[], Any]) -> HeldEnvironment:
    """Make the environment of an episode. Raises EpisodeFailedError."""
    if not isinstance(make_environment, LimitedEnvironments):
        make_environment = LimitedEnvironments("", make_environment)
    with fails_the_episode():
        return await make_environment.open()


def example(environments: LimitedEnvironments, index: int, split: Split) -> Example:
    """Make an environment in this thread and return an example. Raises EpisodeFailedError."""
    with fails_the_episode():
        found = environments().example(index, split)
        if not isinstance(found, Example):
            raise TypeError(f"example returned {shown(found)}, wanted a ludic.environments.environment.Example")
        check_text("the example_id of an example", found.example_id)
        if found.wanted is not None:
            check_text("the wanted answer of an example", found.wanted)
        if not isinstance(found.columns, Mapping) or not all(isinstance(name, str) for name in found.columns):
            raise TypeError(
                f"the columns of an example are {shown(found.columns)}, wanted a mapping of names to values"
            )
        if not isinstance(found.messages, tuple | list):
            raise TypeError(f"the messages of an example are {shown(found.messages)}, wanted a tuple")
        if found.messages:  # otherwise `reset` returns the first messages
            checked_messages("example", found.messages)
        return found


async def reset(held: HeldEnvironment, example: Example) -> tuple[Message, ...]:
    """Begin an episode and return its first messages. Raises EpisodeFailedError."""
    with fails_the_episode():
        return checked_messages("reset", await held.call("reset", _own(example)))


def own_max_steps(environment: Any) -> int | None:
    """Return the environment's own limit of steps, or None. Raises EpisodeFailedError for any other value."""
    with fails_the_episode():
        max_steps = getattr(environment, "max_steps", None)
        if max_steps is not None and not (isinstance(max_steps, int) and max_steps >= 1):
            raise ValueError(f"max_steps is {max_steps!r}, wanted an int of at least 1")
        return max_steps


async def step(held: HeldEnvironment, action: str) -> Transition:
    """Apply an action and return the transition, its numbers as plain floats. Raises EpisodeFailedError."""
    with fails_the_episode():
        transition = await held.call("step", action)
        _check_transition("step returned {}", transition)
        transition = checked(transition, len(action), held.named("step"))
        if transition.observation is None and not (transition.terminated or transition.truncated):
            raise ValueError("step returned no observation, wanted one since the episode continues")
        if transition.tool_results:
            raise ValueError("step returned tool_results, which only run_tools can give")
        return transition


def tools_of(held: HeldEnvironment) -> list[dict[str, Any]]:
    """Return the schemas of the tools of a ToolRunner. Raises EpisodeFailedError for anything but a schema."""
    with fails_the_episode():
        found = held.environment.tools
        for schema in found:
            if not isinstance(schema, Mapping) or not isinstance(schema.get("function", {}).get("name"), str):
                raise TypeError(
                    f"tools of the environment has {shown(schema)}, wanted a schema such as "
                    "{'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': ...}}"
                )
        return [dict(schema) for schema in found]


async def run_tools(held: HeldEnvironment, text: str, calls: Sequence[ToolCall]) -> Transition:
    """Let a ToolRunner run tool calls, and return the transition. Raises EpisodeFailedError."""
    with fails_the_episode():
        transition = await held.call("run_tools", text, calls)
        _check_transition("run_tools returned {}", transition)
        transition = checked(transition, len(text), "run_tools")
        if len(transition.tool_results) != len(calls):
            raise ValueError(
                f"run_tools returned {len(transition.tool_results)} tool_results, wanted one for each of {len(calls)} "
                "calls"
            )
        _check_texts("a result that run_tools returned", filter(None, transition.tool_results))
        return transition


async def reset_agents(held: HeldEnvironment, example: Example) -> dict[str, tuple[Message, ...]]:
    """Begin an episode and return the first messages of each agent. Raises EpisodeFailedError."""
    with fails_the_episode():
        first = await held.call("reset", _own(example))
        if not isinstance(first, Mapping):
            raise TypeError(f"reset returned {shown(first)}, wanted messages by agent id")
        if not first:
            raise ValueError("reset returned no agent, wanted at least one")
        _check_texts("the id of an agent", first)
        return {
            agent_id: checked_messages(f"reset for agent {agent_id!r}", messages)
            for agent_id, messages in first.items()
        }


async def next_agents(held: HeldEnvironment, playing: Collection[str]) -> tuple[str, ...]:
    """Return the agents that move now. playing: agents for which the episode is not over. Raises EpisodeFailedError."""
    with fails_the_episode():
        found = await held.call("next_agents")
        if isinstance(found, str) or not isinstance(found, Iterable):
            raise TypeError(f"next_agents returned {shown(found)}, wanted the ids of the agents who move")
        ids = tuple(found)
        if not ids or len(set(ids)) < len(ids) or not set(ids) <= set(playing):
            wanted = f"one or more of the agents that still play, {', '.join(map(repr, playing))}"
            raise ValueError(f"next_agents returned {ids!r}, wanted {wanted}")
        return ids


async def step_agents(
    held: HeldEnvironment, actions: Mapping[str, str], agent_ids: Collection[str]
) -> dict[str, Transition]:
    """Apply actions and return the transitions, their numbers as plain floats. agent_ids: all agents.

    Raises EpisodeFailedError.
    """
    with fails_the_episode():
        transitions = await held.call("step", actions)
        if not isinstance(transitions, Mapping):
            raise TypeError(f"step returned {shown(transitions)}, wanted a Transition by agent id")
        if not set(actions) <= set(transitions) <= set(agent_ids):
            wanted = f"one for each of {', '.join(map(repr, actions))}, and none for others than {', '.join(agent_ids)}"
            raise ValueError(f"step returned transitions for {', '.join(map(repr, transitions))}; wanted {wanted}")
        for agent_id, transition in transitions.items():
            _check_transition(f"step returned {{}} for agent {agent_id!r}", transition)
        return {
            agent_id: checked(transition, len(actions.get(agent_id, "")), "step")
            for agent_id, transition in transitions.items()
        }


async def score_task(held: HeldEnvironment, agent_id: str, task: str, answer: str) -> Transition:
    """Return the score of a task as the transition that ends it. Raises EpisodeFailedError."""
    with fails_the_episode():
        score = to_score(await held.call("score_task", agent_id, task, answer), "score_task")
        return checked(transition_of(score), len(answer), "score_task")


async def score_folder(held: HeldEnvironment, example: Example, folder: Path) -> Transition:
    """Return the score of an agent's working folder as the transition that ends the episode. Raises
    EpisodeFailedError."""
    with fails_the_episode():
        score = to_score(await held.call("score_folder", _own(example), folder), "score_folder")
        return checked(transition_of(score), 0, "score_folder")


async def score_group(held: HeldEnvironment, example: Example, answers: Sequence[GroupAnswer]) -> list[Transition]:
    """Return the score of each answer as a transition without span rewards. Raises EpisodeFailedError."""
    with fails_the_episode():
        given = await held.call("score_group", example, answers)
        if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
            raise TypeError(f"score_group returned {shown(given)}, wanted a number or a Score for each answer")
        scores = [to_score(score, "score_group") for score in given]
        if len(scores) != len(answers):
            raise ValueError(
                f"score_group returned {len(scores)} scores, wanted one for each of {len(answers)} answers"
            )
        if any(score.span_rewards for score in scores):
            raise ValueError("score_group returned span_rewards, which only score and step can give")
        return [checked(transition_of(score), 0, "score_group") for score in scores]


def _own(example: Example) -> Example:
    """Return a copy of an example for one episode: those of a group share it, and one may change it."""
    return replace(example, data=dict(example.data) if isinstance(example.data, dict) else example.data)


def _check_transition(text: str, found: object) -> None:
    """Raise TypeError unless it is a Transition. text: message with {} in the place of the value."""
    if not isinstance(found, Transition):
        raise TypeError(f"{text.format(shown(found))}, wanted a ludic.environments.environment.Transition")


def checked(transition: Transition, action_length: int, method: str) -> Transition:
    """Convert bools and NumPy numbers to plain types. Raises TypeError or ValueError, which name the method.

    So an environment's error fails one rollout; the store would refuse the whole batch. method: name of the method that
    returned it.
    """
    if transition.observation is not None:
        check_text(f"the observation that {method} returned", transition.observation)
    _check_texts(f"a name in reward_components that {method} returned", transition.reward_components)
    _check_texts(f"a name in info that {method} returned", transition.info)
    return replace(
        transition,
        reward=finite(f"the reward that {method} returned", transition.reward),
        span_rewards=tuple(_checked_span(span, action_length, method) for span in transition.span_rewards),
        reward_components={
            name: finite(f"component {name!r} that {method} returned", value)
            for name, value in transition.reward_components.items()
        },
        correct=_checked_correct(transition.correct, method),
        terminated=bool(transition.terminated),
        truncated=bool(transition.truncated),
        info={name: storable(str(value)) for name, value in transition.info.items()},
        extra={name: value for name, value in transition.extra.items() if value is not None},
    )


def _checked_correct(value: object, method: str) -> bool | None:
    if value is not None and not isinstance(value, bool | np.bool_):
        raise TypeError(f"correct that {method} returned is {shown(value)}, wanted True, False or None")
    return None if value is None else bool(value)


def _checked_span(span: SpanReward, action_length: int, method: str) -> SpanReward:
    if not 0 <= span.start < span.end <= action_length:
        raise ValueError(
            f"a span that {method} returned is {span.start} to {span.end}, wanted a part of the action's "
            f"{action_length} characters"
        )
    return replace(span, reward=finite(f"the reward of a span that {method} returned", span.reward))


def checked_messages(where: str, messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return messages that can be rendered and stored. Raises TypeError or ValueError, naming `where`."""
    if isinstance(messages, str | Mapping) or not isinstance(messages or (), Iterable):
        raise TypeError(f"{where} returned {shown(messages)}, wanted a tuple of ludic.records.Message")
    messages = tuple(messages or ())
    if not messages:
        raise ValueError(f"{where} returned no message, wanted at least one")
    for message in messages:
        if not isinstance(message, Message):
            raise TypeError(
                f"{where} returned the message {shown(message)}, wanted a ludic.records.Message, such as "
                "Message(role='user', content='...')"
            )
        check_text(f"the role of a message of {where}", message.role)
        if message.role not in ROLES:
            raise ValueError(f"a message of {where} has the role {message.role!r}, wanted one of {', '.join(ROLES)}")
        check_text(f"a message of {where}", message.content)
        check_text(f"the name in a message of {where}", message.name or "")
        check_text(f"the reasoning in a message of {where}", message.reasoning or "")
    return messages


def check_text(name: str, text: object) -> None:
    """Raise TypeError or ValueError unless it is text that UTF-8 can encode; the store would refuse the whole batch."""
    if not isinstance(text, str):
        raise TypeError(f"{name} is {shown(text)}, wanted a str")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds half a surrogate pair, wanted text that UTF-8 can hold") from None


def _check_texts(name: str, texts: Iterable[object]) -> None:
    for text in texts:
        check_text(name, text)


def finite(name: str, value: SupportsFloat) -> float:
    """Return a number as a float. Raises TypeError or ValueError unless it is a finite float32."""
    try:
        number = float("no number" if isinstance(value, str) else value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {shown(value)}, wanted a number") from None
    # NaN fails this comparison.
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(f"{name} is {number}, wanted a finite float32")
    return number
