"""Guess a number: hints, rewards and held-out numbers."""

import pytest

from ludic.environments.environment import Environment
from ludic.environments.registry import make_environment
from ludic.environments.toys import GuessNumber
from ludic.errors import ConfigError


def begun(secret: int, **options: int) -> GuessNumber:
    game = GuessNumber(**options)
    example = next(
        example
        for split in ("train", "heldout")
        for example in (game.example(index, split) for index in range(100))  # type: ignore[arg-type]
        if example.data["secret"] == secret
    )
    (message,) = game.reset(example)
    assert message.content == f"Guess my number from 0 to {game.highest}."
    return game


@pytest.mark.parametrize(
    ("action", "observation", "reward"),
    [
        ("3", "My number is higher. Guess again.", -0.1),
        ("Perhaps 9 ?", "My number is lower. Guess again.", -0.1),
        ("not 5 but 4", "My number is higher. Guess again.", -0.1),
        ("9" * 5000, "My number is lower. Guess again.", -0.1),
        ("five", "That is no number. Guess again.", -0.2),
        ("", "That is no number. Guess again.", -0.2),
    ],
)
def test_a_wrong_guess_is_answered_by_a_hint(action: str, observation: str, reward: float) -> None:
    transition = begun(5).step(action)
    assert (transition.observation, transition.reward, transition.terminated) == (observation, reward, False)


@pytest.mark.parametrize("action", ["5", "it is 005", "I say 5."])
def test_the_right_guess_ends_the_game(action: str) -> None:
    transition = begun(5).step(action)
    assert (transition.observation, transition.reward, transition.terminated) == (None, 1.0, True)
    assert transition.reward_components == {"found": 1.0}


def test_held_out_numbers_are_never_asked_in_training() -> None:
    game = GuessNumber(highest=99)
    numbers = {split: {game.example(i, split).data["secret"] for i in range(500)} for split in ("train", "heldout")}
    assert numbers["train"].isdisjoint(numbers["heldout"])
    assert game.example(7, "train") == GuessNumber(highest=99).example(7, "train")


def test_it_is_built_in_and_says_how_many_guesses_there_are() -> None:
    make = make_environment("guess_number", {"max_steps": 3})
    assert isinstance(make(), Environment)
    assert make().max_steps == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{"highest": 0}, {"highest": 10**7}, {"max_steps": 0}])
def test_impossible_games_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"wanted"):
        GuessNumber(**options)
