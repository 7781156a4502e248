"""textarena/NAME, with the real package; none of its games of words, whose lists must be downloaded."""

import random

import pytest
from chat_models import scripted_agent
from episodes import run_episode

from ludic.environments.environment import Environment
from ludic.environments.registry import environment_names, make_environment, source_of
from ludic.errors import ConfigError

pytest.importorskip("textarena", reason="textarena is in the extra textarena")

GAMES = (
    "GuessTheNumber-v0",
    "FrozenLake-v0",
    "2048-v0",
    "Blackjack-v0",
    "Sudoku-v0",
    "TowerOfHanoi-v0",
    "Secretary-v0",
)


def play(environment: Environment, actions: list[str], index: int = 0) -> list[tuple[str | None, float, bool]]:
    environment.reset(environment.example(index, "train"))
    steps = [environment.step(action) for action in actions]
    return [(step.observation, step.reward, step.terminated) for step in steps]


def test_a_game_is_played_to_its_end():
    environment = make_environment("textarena/GuessTheNumber-v0")()
    (prompt,) = environment.reset(environment.example(0, "train"))
    assert prompt.role == "user"
    assert "between 1 and 20" in prompt.content
    low, high, steps = 1, 20, []
    while not steps or not steps[-1].terminated:  # a binary search needs at most five guesses
        middle = (low + high) // 2
        steps.append(environment.step(f"I try [{middle}]"))
        low, high = (middle + 1, high) if "higher" in (steps[-1].observation or "") else (low, middle - 1)
    assert len(steps) <= 5
    assert [step.reward for step in steps] == [*(0.0 for _ in steps[1:]), 1.0]
    assert steps[-1].observation is None
    assert steps[-1].info["reason"] == "Congratulations! You guessed the correct number."
    assert steps[-1].reward_components == {"invalid_move": 0}


def test_an_agent_plays_and_its_row_holds_the_game():
    make = make_environment("textarena/GuessTheNumber-v0")
    (row,) = run_episode(scripted_agent(["0", "[0]"]), make, example=make().example(0, "train"))
    assert (row.terminated, row.truncated, row.error) == (True, False, None)
    assert [step.terminated for step in row.environment_steps] == [False, True]
    assert row.reward_components == {"invalid_move": 1}


def test_an_observation_holds_only_what_is_new():
    environment = make_environment("textarena/GuessTheNumber-v0", {"max_number": 1000})()
    ((first, _, _), (second, _, _)) = play(environment, ["[1]", "[2]"])
    assert first == second == "The target number is higher."


def test_invalid_moves_are_answered_and_then_end_the_game():
    environment = make_environment("textarena/GuessTheNumber-v0")()
    environment.reset(environment.example(0, "train"))
    first, second = environment.step("hello"), environment.step("hello")
    assert "You attempted an invalid move" in first.observation
    assert not first.terminated
    assert second.terminated
    assert second.reward_components == {"invalid_move": 1}


def test_agents_play_a_game_of_two():
    make = make_environment("textarena/TicTacToe-v0")
    moves = ["[4]", "[0]", "[1]", "[2]", "[7]"]  # player 0 takes the middle column
    rows = run_episode(scripted_agent(moves), make, example=make().example(0, "train"))
    assert [(row.agent_id, row.episode_reward, row.terminated) for row in rows] == [
        ("player_0", 1.0, True),
        ("player_1", -1.0, True),
    ]
    first, second = rows
    assert [step.action for step in first.environment_steps] == ["[4]", "[1]", "[7]"]
    assert "You are Player 0" in first.messages[0].content
    assert "Player 1 placed their symbol (X) in cell 0" in first.environment_steps[0].next_observation
    assert "You are Player 1" in second.messages[0].content
    assert "[Player 0] [4]" in second.messages[0].content
    assert "[4]" not in first.messages[2].content.splitlines()[0]  # not told of its own move


def test_a_wrong_number_of_players_is_refused():
    with pytest.raises(ConfigError, match="TicTacToe-v0 can't be played by 5 players"):
        make_environment("textarena/TicTacToe-v0", {"num_players": 5})
    with pytest.raises(ConfigError, match="is a game of one player, and num_players is 2"):
        make_environment("textarena/GuessTheNumber-v0", {"num_players": 2})


@pytest.mark.parametrize("game", GAMES)
def test_the_same_example_is_the_same_game(game):
    one, other = (make_environment(f"textarena/{game}", seed=7)() for _ in range(2))
    assert [one.example(i, "heldout") for i in range(3)] == [other.example(i, "heldout") for i in (0, 1, 2)]
    actions = ["[1]", "[right]", "[hit]", "[continue]"]
    random.seed(1)
    first = play(one, actions, index=2)
    random.seed(2)
    assert play(other, actions, index=2) == first


def test_games_at_the_same_time_do_not_share_random_numbers():
    make = make_environment("textarena/2048-v0", seed=1)
    alone = play(make(), ["[up]", "[left]", "[down]"])
    one, other = make(), make()
    one.reset(one.example(0, "train"))
    other.reset(other.example(5, "train"))
    steps = []
    for action in ("[up]", "[left]", "[down]"):
        steps.append(one.step(action))
        other.step(action)
    assert [(step.observation, step.reward, step.terminated) for step in steps] == alone


def test_the_random_numbers_of_the_process_are_left_alone():
    random.seed(5)
    wanted = random.random()
    random.seed(5)
    play(make_environment("textarena/2048-v0")(), ["[up]"])
    assert random.random() == wanted


def test_splits_have_other_seeds():
    environment = make_environment("textarena/2048-v0")()
    train, heldout = ({environment.example(i, split).example_id for i in range(50)} for split in ("train", "heldout"))
    assert len(train) == len(heldout) == 50
    assert not train & heldout


def test_the_limit_of_steps_leaves_room_for_moves_that_are_refused():
    environment = make_environment("textarena/GuessTheNumber-v0", {"max_turns": 4})()
    assert environment.max_steps == 8


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("textarena/Chss", {}, "did you mean 'textarena/Chess-v0"),
        ("textarena/Qqqqqq", {}, "there are textarena/2048-v0, .* textarena/Sudoku-v0"),
        ("textarena/GuesTheNumber-v0", {}, "did you mean 'textarena/GuessTheNumber-v0"),
        ("GuessTheNumber", {}, "did you mean 'textarena/GuessTheNumber-v0"),
        ("textarena/GuessTheNumber-v0", {"highest": 9}, "unexpected keyword argument 'highest'"),
        ("textarena/Klondike-v0", {}, "could not be built: SyntaxError"),
    ],
)
def test_what_cannot_be_played_is_explained(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_environment(name, options)


def test_games_are_listed_and_their_source_is_recorded():
    names = environment_names()
    assert "textarena/Sudoku-v0" in names
    assert "textarena/TicTacToe-v0" in names
    assert "textarena/Sudoku-v0-train" not in names
    assert make_environment("textarena/Sudoku-v0-train")().max_steps
    digest, package, _ = source_of("textarena/Sudoku-v0", {})
    assert len(digest) == 64
    assert package.startswith("textarena 0.")
