"""Adapt a SingleTurnEnvironment to the Environment protocol; episodes end at their first step."""

from ludic.environments.environment import Example, Score, SingleTurnEnvironment, Split, Transition
from ludic.records import Message


class SingleTurn:
    """Environment that holds one episode of a stateless environment, which many episodes may share."""

    max_steps = 1

    def __init__(self, environment: SingleTurnEnvironment) -> None:
        self.environment = environment
        self._example: Example | None = None
        if hasattr(environment, "score_task"):
            self.score_task = environment.score_task

    def example(self, index: int, split: Split) -> Example:
        return self.environment.example(index, split)

    def reset(self, example: Example) -> tuple[Message, ...]:
        self._example = example
        return example.messages

    def step(self, action: str) -> Transition:
        """Score the answer and end the episode.

        Raises RuntimeError if no episode is open: before reset, or at a second step.
        """
        if self._example is None:
            raise RuntimeError(
                f"{type(self.environment).__name__}: step() without an open episode; "
                "call reset(example) first, a single-turn episode ends at its first step"
            )
        score = self.environment.score(self._example, action)
        self._example = None
        return transition_of(score)


def transition_of(score: Score) -> Transition:
    """Return a score as the transition that ends an episode."""
    return Transition(
        observation=None,
        reward=score.reward,
        span_rewards=score.span_rewards,
        reward_components=score.components,
        terminated=True,
        info=score.info,
        extra=score.extra,
    )
