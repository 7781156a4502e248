"""Call an environment so that its mistakes fail one episode and never the worker."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import SupportsFloat

from ludic.agents.failures import fails_the_episode
from ludic.environments.environment import Environment, Example, SpanReward, Transition
from ludic.printable import storable
from ludic.records import LARGEST_REWARD, Message


def reset(make_environment: Callable[[], Environment], example: Example) -> tuple[Environment, tuple[Message, ...]]:
    """Make an environment and begin an episode; returns it and its first messages. Raises EpisodeFailedError."""
    with fails_the_episode():
        environment = make_environment()
        return environment, checked_messages("reset", environment.reset(example))


def own_max_steps(environment: Environment) -> int | None:
    """Return the environment's own limit of steps, or None. Raises EpisodeFailedError for any other value."""
    with fails_the_episode():
        max_steps = getattr(environment, "max_steps", None)
        if max_steps is not None and not (isinstance(max_steps, int) and max_steps >= 1):
            raise ValueError(f"max_steps is {max_steps!r}, wanted an int of at least 1")
        return max_steps


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
        info={name: storable(str(value)) for name, value in transition.info.items()},
        extra={name: value for name, value in transition.extra.items() if value is not None},
    )


def _checked_span(span: SpanReward, action_length: int) -> SpanReward:
    if not 0 <= span.start < span.end <= action_length:
        raise ValueError(
            f"a span is {span.start} to {span.end}, wanted a part of the action's {action_length} characters"
        )
    return replace(span, reward=_finite("the reward of a span", span.reward))


def checked_messages(where: str, messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages that can be rendered and stored. Raises TypeError or ValueError, naming `where`."""
    if not messages:
        raise ValueError(f"{where} returned no message, wanted at least one")
    for message in messages:
        if not isinstance(message, Message):
            raise TypeError(f"{where} returned {message!r}, wanted a ludic.records.Message")
        check_text(f"the role of a message of {where}", message.role)
        check_text(f"a message of {where}", message.content)
    return tuple(messages)


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
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(f"{name} is {number}, wanted a finite float32")
    return number
