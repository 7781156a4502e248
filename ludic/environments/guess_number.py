"""Guess a number: a game of several turns, in which each wrong guess is answered by higher or lower."""

import re
from dataclasses import dataclass, field
from random import Random

from ludic.environments.environment import Example, Split, Transition
from ludic.environments.splits import draw
from ludic.errors import ConfigError
from ludic.records import Message

_NUMBER = re.compile(r"\d+")
NO_NUMBER_REWARD, WRONG_REWARD, RIGHT_REWARD = -0.2, -0.1, 1.0


@dataclass(slots=True, kw_only=True)
class GuessNumber:
    """Environment of several turns: guess a number from 0 to `highest`; each action's last number is the guess.

    Rewards: 1 for the right guess, -0.1 for a wrong one, -0.2 for an action without a number. The best strategy halves
    the range at each turn. Raises ConfigError if highest is not from 1 to a million, or max_steps is less than 1.
    """

    highest: int = 9
    max_steps: int = 6
    """Maximum guesses of an episode."""
    seed: int = 0
    _secret: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.highest <= 10**6:
            raise ConfigError(f"highest is {self.highest}, wanted a number from 1 to 1,000,000")
        if self.max_steps < 1:
            raise ConfigError(f"max_steps is {self.max_steps}, wanted at least 1")

    def example(self, index: int, split: Split) -> Example:
        secret = draw(self._draw_secret, str, index, split, self.seed)
        question = f"Guess my number from 0 to {self.highest}."
        return Example(
            example_id=str(secret), messages=(Message(role="user", content=question),), data={"secret": secret}
        )

    def reset(self, example: Example) -> tuple[Message, ...]:
        self._secret = example.data["secret"]
        return example.messages

    def step(self, action: str) -> Transition:
        numbers = _NUMBER.findall(action)
        if not numbers:
            return Transition(observation="That is no number. Guess again.", reward=NO_NUMBER_REWARD, terminated=False)
        # Compare as text first: int() refuses numbers of more than 4,300 digits.
        digits = numbers[-1].lstrip("0") or "0"
        guess = int(digits) if len(digits) <= len(str(self.highest)) else self.highest + 1
        if guess == self._secret:
            return Transition(observation=None, reward=RIGHT_REWARD, terminated=True, reward_components={"found": 1.0})
        hint = "higher" if guess < self._secret else "lower"
        return Transition(observation=f"My number is {hint}. Guess again.", reward=WRONG_REWARD, terminated=False)

    def _draw_secret(self, random: Random) -> int:
        return random.randint(0, self.highest)
