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
    """Single turn; reward 1 when the first whole number of the answer is the larger one, else 0.

    The component `format` is 1 when that number is one of the two that were asked about, so a guess
    has 1 in format and half the reward. Raises ConfigError for max_digits outside of 1 to 100.
    """

    max_digits: int = 3
    """Most digits of a number; each number of digits up to it is as likely."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_max_digits(self.max_digits)

    def example(self, index: int, split: Split) -> Example:
        left, right = draw(self._two_numbers, _key, index, split, self.seed)
        return Example(
            example_id=f"{left}-{right}",
            messages=(Message(role="user", content=f"Which is larger, {left} or {right}? Begin with that number."),),
            data={"larger": max(left, right), "smaller": min(left, right)},
        )

    def score(self, example: Example, answer: str) -> Score:
        number = re.search(r"-?[0-9]+", answer)
        # Compared as text: int() refuses numbers of more than 4,300 digits.
        found = number.group() if number else ""
        correct = float(found == str(example.data["larger"]))
        named = correct or float(found == str(example.data["smaller"]))
        return Score(reward=correct, components={"correct": correct, "format": named})

    def _two_numbers(self, random: Random) -> tuple[int, int]:
        left = right = random_number(random, self.max_digits)
        while left == right:
            right = random_number(random, self.max_digits)
        return left, right


def _key(numbers: tuple[int, int]) -> str:
    """The same for both orders."""
    return f"{min(numbers)}-{max(numbers)}"
