"""Tic-tac-toe: against an opponent of the environment, or between two agents."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Literal, get_args

from ludic.environments.environment import Example, Split, Transition
from ludic.environments.splits import draw
from ludic.errors import ConfigError
from ludic.records import Message

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
