"""Adapt a SingleTurnEnvironment to the Environment protocol; episodes end at their first step."""

import inspect
from collections.abc import Awaitable
from typing import Any

from ludic.environments.environment import Example, Score, SingleTurnEnvironment, Split, Transition, to_score
from ludic.environments.scorer_processes import ScorerProcesses
from ludic.records import Message


class SingleTurn:
    """Environment that holds one episode of a stateless environment, which many episodes may share."""

    max_steps = 1

    def __init__(self, environment: SingleTurnEnvironment, processes: ScorerProcesses | None = None) -> None:
        """processes: in which the answers are scored; None scores them here."""
        self.environment = environment
        self._scorer: SingleTurnEnvironment | ScorerProcesses = environment if processes is None else processes
        self._example: Example | None = None

    def __getattr__(self, name: str) -> Any:
        """What else the environment has, such as score_task and tools; private names are the adapter's own."""
        if name.startswith("_") or name == "environment":
            raise AttributeError(name)
        found = getattr(self.environment, name)
        return getattr(self._scorer, name) if name == "score_group" else found

    def example(self, index: int, split: Split) -> Example:
        return self.environment.example(index, split)

    def reset(self, example: Example) -> tuple[Message, ...]:
        self._example = example
        return example.messages

    def step(self, action: str) -> Transition | Awaitable[Transition]:
        """Score the answer and end the episode; to be awaited if `score` is a coroutine.

        Raises RuntimeError if no episode is open: before reset, or at a second step.
        """
        if self._example is None:
            raise RuntimeError(
                f"{type(self.environment).__name__}: step() without an open episode; "
                "call reset(example) first, a single-turn episode ends at its first step"
            )
        score = self._scorer.score(self._example, action)
        self._example = None
        return _awaited(score) if inspect.isawaitable(score) else transition_of(score)


async def _awaited(score: Awaitable[Score]) -> Transition:
    return transition_of(await score)


def transition_of(found: Score | float) -> Transition:
    """Return a score, or a number, as the transition that ends an episode. Raises TypeError for anything else."""
    score = to_score(found, "score")
    return Transition(
        observation=None,
        reward=score.reward,
        span_rewards=score.span_rewards,
        reward_components=score.components,
        terminated=True,
        info=score.info,
        extra=score.extra,
    )
