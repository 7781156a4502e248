"""Word problems: short stories that ask for a whole number, too large to compute in one's head."""

from dataclasses import dataclass
from random import Random

from ludic.environments.addition import NUMBER
from ludic.environments.environment import Example, Score, Split
from ludic.environments.numbers import check_max_digits
from ludic.environments.splits import draw
from ludic.records import Message

NAMES = (
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gita",
    "Hugo",
    "Ines",
    "Jon",
    "Kira",
    "Leo",
    "Mia",
    "Noah",
    "Olga",
)
ITEMS = ("apples", "books", "cards", "coins", "eggs", "nails", "pears", "pens", "plums", "seeds", "shells", "stamps")

# Story, expression. The numbers are positive, and a is larger than b.
STORIES = (
    ("{name} has {a} {items} and buys {b} more. How many {items} does {name} have?", "{a} + {b}"),
    ("{name} finds {a} {items} on one day and {b} on the next. How many {items} are that?", "{a} + {b}"),
    ("There are {a} {items} in one box and {b} in another. How many {items} are in both?", "{a} + {b}"),
    ("{name} has {a} {items} and loses {b}. How many {items} are left?", "{a} - {b}"),
    ("{name} had {a} {items} and sold {b} of them. How many {items} does {name} keep?", "{a} - {b}"),
    ("A shop has {a} {items}. {name} takes {b}. How many {items} remain?", "{a} - {b}"),
    ("{name} packs {a} boxes with {b} {items} each. How many {items} are that?", "{a} * {b}"),
    ("{a} children have {b} {items} each. How many {items} do they have?", "{a} * {b}"),
    ("{name} buys {a} bags of {b} {items}. How many {items} does {name} buy?", "{a} * {b}"),
)
ASK = r"Answer with \boxed{...}."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    story: str
    expression: str

    @property
    def result(self) -> int:
        left, operator, right = self.expression.split()
        a, b = int(left), int(right)
        return {"+": a + b, "-": a - b, "*": a * b}[operator]


@dataclass(frozen=True, slots=True, kw_only=True)
class WordProblems:
    """Single-turn environment; reward 1 if the answer is exactly the right whole number, else 0.

    Commas may separate thousands; any other text beside the number is wrong, so the run's parser must find the number:
    `boxed`, as the question asks, or another one together with `ask`. The component `format` is 1 if the answer is a
    whole number. Data: `expression`, such as "734 - 258", and `result`. Raises ConfigError if max_digits is not from 1
    to 100.
    """

    max_digits: int = 3
    """Maximum digits of a number; each length from 2 is equally likely, and 1 asks for single digits."""
    ask: str = ASK
    """How to answer: ends each question."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_max_digits(self.max_digits)

    def example(self, index: int, split: Split) -> Example:
        problem = draw(self._problem, lambda problem: problem.story, index, split, self.seed)
        return Example(
            example_id=problem.story,
            messages=(Message(role="user", content=f"{problem.story} {self.ask}".strip()),),
            data={"expression": problem.expression, "result": problem.result},
        )

    def score(self, example: Example, answer: str) -> Score:
        is_number = NUMBER.fullmatch(answer.strip()) is not None
        # Compare as text: int() refuses numbers of more than 4,300 digits.
        correct = float(is_number and answer.strip().replace(",", "") == str(example.data["result"]))
        return Score(reward=correct, components={"correct": correct, "format": float(is_number)})

    def _problem(self, random: Random) -> _Problem:
        story, expression = random.choice(STORIES)
        words = {"name": random.choice(NAMES), "items": random.choice(ITEMS)}
        least = min(2, self.max_digits)
        b, a = sorted(_number(random, random.randint(least, self.max_digits)) for _ in range(2))
        a += a == b
        return _Problem(story=story.format(a=a, b=b, **words), expression=expression.format(a=a, b=b))


def _number(random: Random, num_digits: int) -> int:
    return random.randrange(10 ** (num_digits - 1), 10**num_digits)
