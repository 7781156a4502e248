"""Small environments: questions with a score first, then games of several turns.

Each is a class in the form that docs/environments.md describes. The smallest one, MoarCats, has a file of its own. The
code that a run or an evaluation records for any of them is this whole file, so a change of one counts for all.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, product
from random import Random
from typing import Literal, get_args

from ludic.environments.environment import Example, Score, Split, Transition
from ludic.environments.splits import draw, nth, partition
from ludic.errors import ConfigError
from ludic.records import Message

# --- Sums and other questions about numbers --------------------------------------------------------------

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
            wanted=str(left + right),
        )

    def score(self, example: Example, answer: str) -> Score:
        numbers = NUMBER.findall(answer)
        # Compare as text: int() refuses numbers of more than 4,300 digits.
        is_right = bool(numbers) and numbers[-1].replace(",", "") == str(example.data["sum"])
        return _right_or_wrong(is_right, format=float(bool(numbers)))

    def _operands(self, random: Random) -> tuple[int, int]:
        return random_number(random, self.max_digits), random_number(random, self.max_digits)


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
            wanted=str(max(left, right)),
        )

    def score(self, example: Example, answer: str) -> Score:
        number = re.search(r"-?[0-9]+", answer)
        # Compare as text: int() refuses numbers of more than 4,300 digits.
        found = number.group() if number else ""
        is_right = found == str(example.data["larger"])
        is_named = is_right or found == str(example.data["smaller"])
        return _right_or_wrong(is_right, format=float(is_named))

    def _two_numbers(self, random: Random) -> tuple[int, int]:
        left = right = random_number(random, self.max_digits)
        while left == right:
            right = random_number(random, self.max_digits)
        return left, right


def _right_or_wrong(is_right: bool, **components: float) -> Score:
    reward = float(is_right)
    return Score(reward=reward, components={"correct": reward, **components}, correct=is_right)


def check_max_digits(max_digits: int) -> None:
    """Raise ConfigError unless max_digits is a whole number from 1 to 100."""
    if not isinstance(max_digits, int) or not 1 <= max_digits <= 100:
        raise ConfigError(f"max_digits is {max_digits!r}, wanted a whole number from 1 to 100")


def random_number(random: Random, max_digits: int) -> int:
    """Return a number of at least 0; each number of digits up to max_digits is equally likely."""
    digits = random.randint(1, max_digits)
    return random.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


# --- Word problems ---------------------------------------------------------------------------------------
# Short stories that ask for a whole number, too large to compute in one's head.

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
            wanted=str(problem.result),
        )

    def score(self, example: Example, answer: str) -> Score:
        is_number = NUMBER.fullmatch(answer.strip()) is not None
        # Compare as text: int() refuses numbers of more than 4,300 digits.
        is_right = is_number and answer.strip().replace(",", "") == str(example.data["result"])
        return _right_or_wrong(is_right, format=float(is_number))

    def _problem(self, random: Random) -> _Problem:
        story, expression = random.choice(STORIES)
        words = {"name": random.choice(NAMES), "items": random.choice(ITEMS)}
        least = min(2, self.max_digits)
        b, a = sorted(_number_of(random, random.randint(least, self.max_digits)) for _ in range(2))
        a += a == b
        return _Problem(story=story.format(a=a, b=b, **words), expression=expression.format(a=a, b=b))


def _number_of(random: Random, num_digits: int) -> int:
    return random.randrange(10 ** (num_digits - 1), 10**num_digits)


# --- Opposites -------------------------------------------------------------------------------------------

PAIRS = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("left", "right"), ("day", "night"),
    ("black", "white"), ("fast", "slow"), ("old", "new"), ("open", "closed"), ("full", "empty"),
    ("rich", "poor"), ("strong", "weak"), ("happy", "sad"), ("early", "late"), ("near", "far"),
    ("wet", "dry"), ("clean", "dirty"), ("loud", "quiet"), ("thick", "thin"), ("wide", "narrow"),
    ("deep", "shallow"), ("high", "low"), ("inside", "outside"), ("above", "below"), ("before", "after"),
    ("first", "last"), ("begin", "end"), ("push", "pull"), ("give", "take"), ("buy", "sell"),
    ("win", "lose"), ("love", "hate"), ("laugh", "cry"), ("sink", "float"), ("arrive", "leave"),
    ("remember", "forget"), ("ask", "answer"), ("accept", "refuse"), ("build", "destroy"), ("increase", "decrease"),
    ("always", "never"), ("everything", "nothing"), ("yes", "no"), ("true", "false"), ("good", "bad"),
    ("heavy", "light"), ("hard", "soft"), ("easy", "difficult"), ("sharp", "blunt"), ("smooth", "rough"),
    ("sweet", "sour"), ("tall", "short"), ("young", "aged"), ("alive", "dead"), ("asleep", "awake"),
    ("brave", "cowardly"), ("cheap", "expensive"), ("safe", "dangerous"), ("war", "peace"), ("friend", "enemy"),
    ("north", "south"), ("east", "west"), ("summer", "winter"), ("sunrise", "sunset"),
)  # fmt: skip
"""Pairs of opposites. Every word is in only one pair, so each question has one answer."""

QUESTIONS = tuple(question for one, other in PAIRS for question in ((one, other), (other, one)))
_OPPOSITES_BY_SPLIT = partition(QUESTIONS, key=lambda question: "/".join(sorted(question)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Opposites:
    """Single-turn environment; reward 1 if the last word of the answer is the antonym, else 0. Case is ignored.

    The component `format` is 1 if the answer is one word. Both questions of a pair are in the same split.
    """

    seed: int = 0

    def example(self, index: int, split: Split) -> Example:
        word, opposite = nth(_OPPOSITES_BY_SPLIT[split], index, self.seed)
        return Example(
            example_id=word,
            messages=(Message(role="user", content=f"What is the opposite of {word}? Answer with one word."),),
            data={"opposite": opposite},
            wanted=opposite,
        )

    def score(self, example: Example, answer: str) -> Score:
        words = re.findall(r"\w+", answer.lower())
        return _right_or_wrong(words[-1:] == [example.data["opposite"]], format=float(len(words) == 1))


# --- Sequential digits -----------------------------------------------------------------------------------
# The reward is dense: each correct digit in order counts the same, so learning shows early.

_COUNT_TEMPLATES = (
    "count from {first} to {last}",
    "write the digits from {first} to {last}",
    "start at {first} and count up to {last}",
    "list every digit from {first} to {last} in order",
)
# Only the pair is the key, so that a held-out sequence does not occur in training in other words.
_DIGITS_BY_SPLIT = partition(
    product(combinations(range(10), 2), range(len(_COUNT_TEMPLATES))), key=lambda task: f"{task[0][0]}-{task[0][1]}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialDigits:
    """Single-turn environment; reward = share of the sequence that the answer's digits begin with, from 0 to 1.

    All digits 0 to 9 in the answer are read one by one ("3 4 5", "345" and "3, 4 and 5" are equal). The first wrong
    digit ends the count, and digits after the full sequence are ignored.
    """

    seed: int = 0

    def example(self, index: int, split: Split) -> Example:
        (first, last), template = nth(_DIGITS_BY_SPLIT[split], index, self.seed)
        sequence = "".join(map(str, range(first, last + 1)))
        return Example(
            example_id=f"{first}-{last}/{template}",
            messages=(Message(role="user", content=_COUNT_TEMPLATES[template].format(first=first, last=last)),),
            data={"sequence": sequence},
            wanted=sequence,
        )

    def score(self, example: Example, answer: str) -> Score:
        sequence = example.data["sequence"]
        written = [character for character in answer if character in "0123456789"]
        correct = _common_prefix_length(written, sequence)
        return Score(
            reward=correct / len(sequence),
            correct=correct == len(sequence),
            components={"correct_digits": correct, "written_digits": len(written), "sequence_length": len(sequence)},
        )


def _common_prefix_length(written: list[str], wanted: str) -> int:
    for index, (left, right) in enumerate(zip(written, wanted, strict=False)):
        if left != right:
            return index
    return min(len(written), len(wanted))


# --- Guess a number --------------------------------------------------------------------------------------
# Each wrong guess is answered by higher or lower.

_GUESS = re.compile(r"\d+")
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
            example_id=str(secret),
            messages=(Message(role="user", content=question),),
            data={"secret": secret},
            wanted=str(secret),
        )

    def reset(self, example: Example) -> tuple[Message, ...]:
        self._secret = example.data["secret"]
        return example.messages

    def step(self, action: str) -> Transition:
        numbers = _GUESS.findall(action)
        if not numbers:
            return _wrong("That is no number. Guess again.", NO_NUMBER_REWARD)
        # Compare as text first: int() refuses numbers of more than 4,300 digits.
        digits = numbers[-1].lstrip("0") or "0"
        guess = int(digits) if len(digits) <= len(str(self.highest)) else self.highest + 1
        if guess == self._secret:
            found = {"found": 1.0}
            return Transition(
                observation=None, reward=RIGHT_REWARD, terminated=True, reward_components=found, correct=True
            )
        hint = "higher" if guess < self._secret else "lower"
        return _wrong(f"My number is {hint}. Guess again.", WRONG_REWARD)

    def _draw_secret(self, random: Random) -> int:
        return random.randint(0, self.highest)


def _wrong(observation: str, reward: float) -> Transition:
    return Transition(observation=observation, reward=reward, terminated=False, correct=False)


# --- Tic-tac-toe -----------------------------------------------------------------------------------------
# Against an opponent of the environment, or between two agents.

Opponent = Literal["random", "perfect"]

WIN, DRAW, LOSS, ILLEGAL = 1.0, 0.0, -1.0, -1.0
_EMPTY = " " * 9
_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_DIGITS = re.compile(r"[1-9]")


@dataclass(slots=True, kw_only=True)
class TicTacToe:
    """Environment of several turns: the agent plays X, in one half of the games after its opponent.

    An action's last digit is the number of a square. Rewards: 1 for a win, 0 for a draw, -1 for a loss. A move that is
    not possible loses the game. opponent: random, or perfect, which never loses. Raises ConfigError for another one.
    """

    opponent: Opponent = "random"
    seed: int = 0
    max_steps: int = 5
    _board: str = field(default=_EMPTY, init=False, repr=False)
    _random: Random = field(default_factory=Random, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.opponent not in get_args(Opponent):
            raise ConfigError(f"opponent is {self.opponent!r}, wanted {' or '.join(get_args(Opponent))}")

    def example(self, index: int, split: Split) -> Example:
        number = draw(_draw_number, str, index, split, self.seed)
        board = _EMPTY if number % 2 else self._answer(_EMPTY, Random(number))
        return _example(number, "X", board)

    def reset(self, example: Example) -> tuple[Message, ...]:
        self._random = Random(example.data["number"])
        self._board = _EMPTY if example.data["number"] % 2 else self._answer(_EMPTY, self._random)
        return example.messages

    def step(self, action: str) -> Transition:
        square = _square(action, self._board)
        if square is None:
            return _end(ILLEGAL, illegal=1.0)
        board = _place(self._board, square, "X")
        if not _is_over(board):
            board = self._answer(board, self._random)
        self._board = board
        if not _is_over(board):
            return Transition(observation=_drawn(board), reward=0.0, terminated=False)
        return _end(_result(board, "X"), won=float(_winner(board) == "X"))

    def _answer(self, board: str, random: Random) -> str:
        square = random.choice(_free(board)) if self.opponent == "random" else _best_square(board, "O")
        return _place(board, square, "O")


@dataclass(slots=True, kw_only=True)
class TicTacToeSelfPlay:
    """Environment of two agents, x and o, who move in turn; x begins.

    Actions and rewards are those of TicTacToe; a move that is not possible loses, and gives the other agent nothing.
    """

    seed: int = 0
    max_steps: int = 5
    _board: str = field(default=_EMPTY, init=False, repr=False)

    def example(self, index: int, split: Split) -> Example:
        return _example(draw(_draw_number, str, index, split, self.seed), "X", _EMPTY)

    def reset(self, example: Example) -> Mapping[str, tuple[Message, ...]]:
        # One move of each at random, so that games differ.
        random = Random(example.data["number"])
        first, second = random.sample(range(9), 2)
        self._board = _place(_place(_EMPTY, first, "X"), second, "O")
        return {"x": (_question("X", self._board),), "o": (_question("O"),)}

    def next_agents(self) -> Sequence[str]:
        return (_to_move(self._board),)

    def step(self, actions: Mapping[str, str]) -> Mapping[str, Transition]:
        ((mover, action),) = actions.items()
        other = "o" if mover == "x" else "x"
        square = _square(action, self._board)
        if square is None:
            return {mover: _end(ILLEGAL, illegal=1.0), other: _end(DRAW)}
        self._board = _place(self._board, square, mover.upper())
        if _is_over(self._board):
            return {agent: _end(_result(self._board, agent.upper())) for agent in ("x", "o")}
        shown = Transition(observation=_drawn(self._board), reward=0.0, terminated=False)
        return {mover: Transition(observation=None, reward=0.0, terminated=False), other: shown}


def _draw_number(random: Random) -> int:
    return random.getrandbits(32)


def _example(number: int, mark: str, board: str) -> Example:
    return Example(example_id=str(number), messages=(_question(mark, board),), data={"number": number})


def _question(mark: str, board: str | None = None) -> Message:
    text = f"Play tic-tac-toe as {mark}. Answer with the number of a free square."
    return Message(role="user", content=text if board is None else f"{text}\n\n{_drawn(board)}")


def _drawn(board: str) -> str:
    """Return the board as three lines; free squares are shown as their numbers."""
    squares = [str(i + 1) if mark == " " else mark for i, mark in enumerate(board)]
    return "\n".join(" ".join(squares[row : row + 3]) for row in (0, 3, 6))


def _square(action: str, board: str) -> int | None:
    """Return the index of the free square that an action names last; None if it names none."""
    digits = _DIGITS.findall(action)
    square = int(digits[-1]) - 1 if digits else None
    return square if square is not None and board[square] == " " else None


def _free(board: str) -> list[int]:
    return [square for square, mark in enumerate(board) if mark == " "]


def _place(board: str, square: int, mark: str) -> str:
    return board[:square] + mark + board[square + 1 :]


def _to_move(board: str) -> str:
    return "x" if board.count("X") == board.count("O") else "o"


def _winner(board: str) -> str | None:
    return next((board[a] for a, b, c in _LINES if board[a] != " " and board[a] == board[b] == board[c]), None)


def _is_over(board: str) -> bool:
    return _winner(board) is not None or " " not in board


def _result(board: str, mark: str) -> float:
    winner = _winner(board)
    return DRAW if winner is None else WIN if winner == mark else LOSS


def _end(reward: float, **components: float) -> Transition:
    return Transition(observation=None, reward=reward, terminated=True, reward_components=components)


def _best_square(board: str, mark: str) -> int:
    """Return the first of the best squares."""
    return max(_free(board), key=lambda square: _value(_place(board, square, mark), mark))


@cache
def _value(board: str, mark: str) -> float:
    """Return the result for `mark`, who has moved last, if both go on as well as they can."""
    if _is_over(board):
        return _result(board, mark)
    other = "O" if mark == "X" else "X"
    return -max(_value(_place(board, square, other), other) for square in _free(board))


# --- Errands ---------------------------------------------------------------------------------------------
# Several small sums, of which each agent can do one; handing on the others is the better policy.

_SUM = re.compile(r"(\d{1,4}) ?\+ ?(\d{1,4})(?!\d)")
_RESULT = re.compile(r"(?<!\d)\d{1,5}(?!\d)")


@dataclass(slots=True, kw_only=True)
class Errands:
    """Environment of one step that scores tasks which its agent hands to others; see TaskScorer.

    The reward is the share of the errands that were done, by the agent or by others. An answer's last number counts for
    one errand that has this result. A task counts if it names a sum of the list that nobody has done; the component
    `by_others` is the share of such errands. Another agent gets 1 for a right result, else 0. Raises ConfigError if
    num_errands is not from 1 to 20, or highest not from 1 to 1000.
    """

    num_errands: int = 3
    highest: int = 9
    """Largest summand."""
    seed: int = 0
    max_steps: int = 1
    _open: list[tuple[int, int]] = field(default_factory=list, init=False, repr=False)
    _num_by_others: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.num_errands <= 20:
            raise ConfigError(f"num_errands is {self.num_errands}, wanted a number from 1 to 20")
        if not 1 <= self.highest <= 1000:
            raise ConfigError(f"highest is {self.highest}, wanted a number from 1 to 1000")

    def example(self, index: int, split: Split) -> Example:
        sums = draw(self._draw_sums, str, index, split, self.seed)
        listed = "; ".join(f"{a} + {b}" for a, b in sums)
        question = f"Compute {listed}. Your answer counts for one of them only, so hand on the others."
        return Example(example_id=listed, messages=(Message(role="user", content=question),), data={"sums": sums})

    def reset(self, example: Example) -> tuple[Message, ...]:
        self._open, self._num_by_others = list(example.data["sums"]), 0
        return example.messages

    def step(self, action: str) -> Transition:
        numbers = _RESULT.findall(action)
        done = next((each for each in self._open if numbers and sum(each) == int(numbers[-1])), None)
        num_done = self._num_by_others + (done is not None)
        return Transition(
            observation=None,
            reward=num_done / self.num_errands,
            reward_components={"by_others": self._num_by_others / self.num_errands},
            terminated=True,
        )

    def score_task(self, agent_id: str, task: str, answer: str) -> Score:
        asked = [(int(a), int(b)) for a, b in _SUM.findall(task)]
        found = next((each for each in self._open if each in asked), None)
        numbers = _RESULT.findall(answer)
        if found is None or not numbers or int(numbers[-1]) != sum(found):
            return Score(reward=0.0)
        self._open.remove(found)
        self._num_by_others += 1
        return Score(reward=1.0)

    def _draw_sums(self, random: Random) -> list[tuple[int, int]]:
        return [(random.randint(0, self.highest), random.randint(0, self.highest)) for _ in range(self.num_errands)]
