"""Call an environment so that its mistakes fail one episode and never the worker."""

from collections.abc import Callable
from dataclasses import replace
from typing import SupportsFloat

import numpy as np

from ludic.agents.failures import fails_the_episode
from ludic.environments.environment import Environment, Example, SpanReward, Transition
from ludic.records import Message

_LARGEST_REWARD = float(np.finfo(np.float32).max)


def reset(make_environment: Callable[[], Environment], example: Example) -> tuple[Environment, tuple[Message, ...]]:
    """Make an environment and begin an episode; returns it and its first messages. Raises EpisodeFailedError."""
    with fails_the_episode():
        environment = make_environment()
        messages = environment.reset(example)
        if not messages:
            raise ValueError("reset returned no message, wanted at least one")
        for message in messages:
            check_text("a message of reset", message.content)
        return environment, tuple(messages)


def step(environment: Environment, action: str) -> Transition:
    """Apply an action and return the transition in plain types. Raises EpisodeFailedError."""
    with fails_the_episode():
        return _checked(environment.step(action), len(action))


def _checked(transition: Transition, action_length: int) -> Transition:
    """Convert bools and NumPy numbers to plain types. Raises ValueError if a number is not finite.

    So an environment's mistake fails one rollout; the store would refuse the whole batch.
    """
    is_over = bool(transition.terminated) or bool(transition.truncated)
    if transition.observation is None and not is_over:
        raise ValueError("step returned no observation, wanted one since the episode goes on")
    if transition.observation is not None:
        check_text("observation", transition.observation)
    return replace(
        transition,
        reward=_finite("reward", transition.reward),
        span_rewards=tuple(_checked_span(span, action_length) for span in transition.span_rewards),
        reward_components={name: _finite(name, value) for name, value in transition.reward_components.items()},
        terminated=bool(transition.terminated),
        truncated=bool(transition.truncated),
        info={name: _text(value) for name, value in transition.info.items()},
        extra={name: value for name, value in transition.extra.items() if value is not None},
    )


def _checked_span(span: SpanReward, action_length: int) -> SpanReward:
    if not 0 <= span.start < span.end <= action_length:
        raise ValueError(
            f"a span is {span.start} to {span.end}, wanted a part of the action's {action_length} characters"
        )
    return replace(span, reward=_finite("the reward of a span", span.reward))


def _text(value: object) -> str:
    return str(value).encode(errors="replace").decode()


def check_text(name: str, text: object) -> None:
    """Raise TypeError or ValueError unless it is text that UTF-8 can hold; the store would refuse the whole batch."""
    if not isinstance(text, str):
        raise TypeError(f"{name} is {text!r}, wanted a str")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} holds half a surrogate pair, wanted text that UTF-8 can hold") from None


def _finite(name: str, value: SupportsFloat) -> float:
    number = float(value)
    # NaN fails this comparison.
    if not abs(number) <= _LARGEST_REWARD:
        raise ValueError(f"{name} is {number}, wanted a finite float32")
    return number
