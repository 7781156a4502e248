"""Tic-tac-toe: results, moves that are not possible, and the opponents."""

from random import Random

import pytest

from ludic.environments.environment import Environment, MultiAgentEnvironment, Transition
from ludic.environments.registry import make_environment
from ludic.environments.toys import TicTacToe, TicTacToeSelfPlay
from ludic.errors import ConfigError


def board_of(text: str) -> str:
    return "".join(text.split()[-9:])


def play(game: TicTacToe, index: int, chooser: Random) -> Transition:
    """Play a game to its end, with random moves."""
    example = game.example(index, "train")
    (message,) = game.reset(example)
    shown = board_of(message.content)
    while True:
        transition = game.step(chooser.choice([square for square in shown if square.isdigit()]))
        if transition.observation is None:
            return transition
        shown = board_of(transition.observation)


def test_the_perfect_opponent_never_loses_and_the_random_one_does() -> None:
    chooser = Random(0)
    rewards = {
        opponent: [play(TicTacToe(opponent=opponent), i, chooser).reward for i in range(100)]
        for opponent in ("random", "perfect")
    }
    assert set(rewards["perfect"]) == {-1.0, 0.0}
    assert set(rewards["random"]) == {-1.0, 0.0, 1.0}


def begun(x_begins: bool) -> TicTacToe:
    game = TicTacToe(opponent="perfect")
    example = next(e for e in (game.example(i, "train") for i in range(100)) if e.data["number"] % 2 == x_begins)
    game.reset(example)
    return game


def test_the_opponent_answers_on_the_board() -> None:
    first = begun(True).step("I take 5.")
    assert first.observation == "O 2 3\n4 X 6\n7 8 9"
    assert (first.reward, first.terminated) == (0.0, False)


def test_the_perfect_opponent_wins_where_it_can() -> None:
    game = begun(True)
    assert board_of(game.step("2").observation or "") == "OX3456789"
    assert board_of(game.step("6").observation or "") == "OX345XO89"  # two ways to win: 4 and 5
    last = game.step("3")
    assert (last.reward, last.terminated, last.reward_components) == (-1.0, True, {"won": 0.0})


@pytest.mark.parametrize("action", ["", "no", "0", "5, or rather 1"])
def test_a_move_that_is_not_possible_loses(action: str) -> None:
    game = begun(True)
    game.step("5")  # answered at 1
    last = game.step(action)
    assert (last.reward, last.terminated, last.reward_components) == (-1.0, True, {"illegal": 1.0})


def test_the_same_example_is_the_same_game() -> None:
    def moves(game: TicTacToe) -> list[str | None]:
        game.reset(game.example(3, "train"))
        return [game.step(move).observation for move in ("5", "9")]

    assert moves(TicTacToe(seed=1)) == moves(TicTacToe(seed=1))
    ids = {split: {TicTacToe().example(i, split).example_id for i in range(50)} for split in ("train", "heldout")}
    assert len(ids["train"]) == 50
    assert ids["train"].isdisjoint(ids["heldout"])


def self_play() -> TicTacToeSelfPlay:
    game = TicTacToeSelfPlay()
    game.reset(game.example(0, "train"))
    game._board = " " * 9
    return game


def test_two_agents_move_in_turn_until_one_wins() -> None:
    game = self_play()
    for mover, move in (("x", "1"), ("o", "4"), ("x", "2"), ("o", "5")):
        assert game.next_agents() == (mover,)
        transitions = game.step({mover: move})
        other = "o" if mover == "x" else "x"
        assert transitions[mover].observation is None
        assert not transitions[other].terminated
    assert transitions["x"].observation == "X X 3\nO O 6\n7 8 9"
    last = game.step({"x": "3"})
    assert {agent: (each.reward, each.terminated) for agent, each in last.items()} == {
        "x": (1.0, True),
        "o": (-1.0, True),
    }


def test_a_full_board_is_a_draw() -> None:
    game = self_play()
    for move in "123547698"[:-1]:
        game.step({game.next_agents()[0]: move})
    last = game.step({"x": "8"})
    assert {each.reward for each in last.values()} == {0.0}


def test_a_wrong_move_of_one_gives_the_other_nothing() -> None:
    last = self_play().step({"x": "none"})
    assert (last["x"].reward, last["o"].reward) == (-1.0, 0.0)
    assert last["x"].terminated
    assert last["o"].terminated


def test_games_begin_with_a_move_of_each() -> None:
    game = TicTacToeSelfPlay()
    boards = {game.reset(game.example(i, "train"))["x"][0].content for i in range(30)}
    assert len(boards) > 10
    assert {(board_of(board).count("X"), board_of(board).count("O")) for board in boards} == {(1, 1)}


def test_both_are_built_in() -> None:
    assert isinstance(make_environment("tic_tac_toe", {"opponent": "perfect"})(), Environment)
    assert isinstance(make_environment("tic_tac_toe_self_play")(), MultiAgentEnvironment)
    with pytest.raises(ConfigError, match="opponent is 'weak', wanted random or perfect"):
        make_environment("tic_tac_toe", {"opponent": "weak"})
