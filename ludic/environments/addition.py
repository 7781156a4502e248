"""Addition: the sum of two random numbers."""

import re
from dataclasses import dataclass
from random import Random

from ludic.environments.environment import Example, Score, Split
from ludic.environments.numbers import check_max_digits, random_number
from ludic.environments.splits import draw
from ludic.records import Message

NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """Single-turn environment; reward 1 if the last whole number of the answer is the sum, else 0.

    Commas may separate thousands. The component `format` is 1 if the answer has a number.
    Raises ConfigError if max_digits is not from 1 to 100.
    """

    max_digits: int = 3
    """Maximum digits of an operand; each number of digits up to it is equally likely."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_max_digits(self.max_digits)

    def example(self, index: int, split: Split) -> Example:
        # The key is the same for both orders, so 3 + 4 and 4 + 3 are in the same split.
        left, right = draw(self._operands, lambda pair: f"{min(pair)}+{max(pair)}", index, split, self.seed)
        return Example(
            example_id=f"{left}+{right}",
            messages=(Message(role="user", content=f"What is {left} + {right}? End with the sum."),),
            data={"sum": left + right},
        )

    def score(self, example: Example, answer: str) -> Score:
        numbers = NUMBER.findall(answer)
        # Compare as text: int() refuses numbers of more than 4,300 digits.
        correct = float(bool(numbers) and numbers[-1].replace(",", "") == str(example.data["sum"]))
        return Score(reward=correct, components={"correct": correct, "format": float(bool(numbers))})

    def _operands(self, random: Random) -> tuple[int, int]:
        return random_number(random, self.max_digits), random_number(random, self.max_digits)
