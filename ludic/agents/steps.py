"""A step of one agent: its action, and what comes of it until the agent acts again."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ludic.environments.environment import Transition


@dataclass(slots=True)
class Step:
    """A step that is not recorded yet, since more may come of it."""

    observation: str | None
    action: str | None
    start: int | None
    """Index of the action in the completion's text; None if it is not known."""
    token_rewards: list[tuple[int, float]] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)


def merge(transitions: Sequence[Transition]) -> Transition | None:
    """Return what came of an action in all; None if nothing has. Rewards of spans are at their tokens by then."""
    if len(transitions) <= 1:
        return transitions[0] if transitions else None
    observations = [each.observation for each in transitions if each.observation is not None]
    components: dict[str, float] = {}
    for each in transitions:
        for name, value in each.reward_components.items():
            components[name] = components.get(name, 0.0) + value
    return Transition(
        observation="\n\n".join(observations) if observations else None,
        reward=sum(each.reward for each in transitions),
        reward_components=components,
        terminated=any(each.terminated for each in transitions),
        truncated=any(each.truncated for each in transitions),
        info={name: value for each in transitions for name, value in each.info.items()},
        extra={name: value for each in transitions for name, value in each.extra.items()},
    )
