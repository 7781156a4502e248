"""NumberComparison: which of two random numbers is larger."""

import re
from dataclasses import dataclass
from random import Random

from ludic.environments.environment import Example, Score, Split
from ludic.environments.numbers import check_max_digits, random_number
from ludic.environments.splits import draw
from ludic.records import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberComparison:
    """Single-turn environment; reward 1 if the first whole number of the answer is the larger one, else 0.

    The component `format` is 1 if that number is one of the two in the question, so a random guess of one of them gets
    format 1 and half the reward. Raises ConfigError if max_digits is not from 1 to 100.
    """

    max_digits: int = 3
    """Maximum digits of a number; each number of digits up to it is equally likely."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_max_digits(self.max_digits)

    def example(self, index: int, split: Split) -> Example:
        # The key is the same for both orders.
        left, right = draw(self._two_numbers, lambda pair: f"{min(pair)}-{max(pair)}", index, split, self.seed)
        return Example(
            example_id=f"{left}-{right}",
            messages=(Message(role="user", content=f"Which is larger, {left} or {right}? Begin with that number."),),
            data={"larger": max(left, right), "smaller": min(left, right)},
        )

    def score(self, example: Example, answer: str) -> Score:
        number = re.search(r"-?[0-9]+", answer)
        # Compare as text: int() refuses numbers of more than 4,300 digits.
        found = number.group() if number else ""
        correct = float(found == str(example.data["larger"]))
        named = correct or float(found == str(example.data["smaller"]))
        return Score(reward=correct, components={"correct": correct, "format": named})

    def _two_numbers(self, random: Random) -> tuple[int, int]:
        left = right = random_number(random, self.max_digits)
        while left == right:
            right = random_number(random, self.max_digits)
        return left, right
