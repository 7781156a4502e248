"""gymnasium/NAME, with the real package and environments that are registered here."""

import sys
from pathlib import Path

import pytest

from ludic.environments.environment import Environment
from ludic.environments.registry import environment_names, make_environment, source_of
from ludic.errors import ConfigError

gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is in the extra gymnasium")

ROOMS = '''
import gymnasium
from gymnasium.spaces import Box, Discrete, Text

LETTERS = "abcdefghijklmnopqrstuvwxyz .:0123456789"


class Rooms(gymnasium.Env):
    """Walk to the exit; a wrong door costs nothing, and the third wall ends the episode."""

    observation_space = Text(80, min_length=0, charset=LETTERS)
    action_space = Text(5, charset="lrw")

    def __init__(self, length=9):
        self.length, self.closed = length, False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.walls = int(self.np_random.integers(2, self.length)), 0
        return f"the exit is {self.left} rooms to the right.", {}

    def step(self, action):
        self.left += action.count("l") - action.count("r")
        self.walls += action.count("w")
        ended, stuck = self.left <= 0, self.walls >= 3
        return f"{max(self.left, 0)} rooms", float(ended), ended, stuck, {"walls": self.walls, "map": [1, 2]}

    def close(self):
        self.closed = True


class Doors(Rooms):
    action_space = Discrete(3, start=1)

    def step(self, action):
        return super().step("lrw"[action - 1])


class Pixels(Rooms):
    observation_space = Box(0, 1)


for name, limit in (("Rooms", None), ("Doors", 6), ("Pixels", None)):
    gymnasium.register(f"{name}-v0", entry_point=f"rooms_for_tests:{name}", max_episode_steps=limit)
'''


@pytest.fixture(autouse=True)
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "rooms_for_tests.py").write_text(ROOMS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("rooms_for_tests", None)
    for name in ("Rooms-v0", "Doors-v0", "Pixels-v0"):
        gymnasium.registry.pop(name, None)


def start(name: str = "Rooms-v0", index: int = 0, **options: object) -> Environment:
    environment = make_environment(f"gymnasium/rooms_for_tests:{name}", options, seed=3)()
    environment.reset(environment.example(index, "train"))
    return environment


def test_an_environment_is_played_to_its_end():
    environment = start(length=3)  # the exit is always two rooms away
    first, last = environment.step("r"), environment.step("r")
    assert (first.observation, first.reward, first.terminated, first.truncated) == ("1 rooms", 0, False, False)
    assert (last.observation, last.reward, last.terminated, last.truncated) == ("0 rooms", 1, True, False)
    assert last.info == {"walls": "0"}


def test_the_prompt_is_the_system_prompt_and_the_first_observation():
    environment = start()
    environment = make_environment("gymnasium/rooms_for_tests:Rooms-v0", {"system_prompt": "Type l, r or w."})()
    messages = environment.reset(environment.example(0, "train"))
    assert [message.role for message in messages] == ["system", "user"]
    assert messages[1].content.startswith("the exit is ")
    assert messages == environment.example(0, "train").messages


def test_truncated_and_terminated_are_kept_apart():
    step = start().step("www")
    assert (step.terminated, step.truncated) == (False, True)


def test_the_registered_limit_truncates():
    environment = start("Doors-v0")
    steps = [environment.step("1") for _ in range(6)]
    assert [step.truncated for step in steps] == [False] * 5 + [True]
    assert environment.max_steps == 6
    assert start().max_steps is None


def test_the_seed_of_the_example_decides_the_start():
    one, other = start(length=10**6), start(length=10**6)
    assert [one.example(i, "heldout") for i in range(9)] == [other.example(i, "heldout") for i in range(9)]
    assert len({one.example(i, "heldout").messages for i in range(9)}) == 9
    assert not {one.example(i, "heldout").example_id for i in range(99)} & {
        one.example(i, "train").example_id for i in range(99)
    }


def test_an_example_does_not_disturb_the_episode():
    environment = start(length=3)
    environment.step("r")
    environment.example(5, "train")
    assert environment.step("r").terminated


@pytest.mark.parametrize("action", ["", "x", "lllllll", "r\n r", "\ud83d"])
def test_what_is_no_action_is_answered_and_not_played(action):
    step = start().step(action)
    assert step.observation == "This is no action: wanted 1 to 5 characters of lrw."
    assert (step.reward, step.terminated, step.truncated) == (0, False, False)


@pytest.mark.parametrize("action", ["0", "4", "two", "1.0", "", "9" * 30])
def test_what_is_no_number_of_an_action_is_answered_and_not_played(action):
    step = start("Doors-v0").step(action)
    assert step.observation == "This is no action: wanted an integer from 1 to 3."


def test_a_discrete_action_is_an_integer():
    environment = start("Doors-v0", length=3)
    assert [environment.step(text).observation for text in ("2", " 2\n")] == ["1 rooms", "0 rooms"]


def test_blanks_around_an_action_are_removed_if_the_space_lacks_them():
    assert start(length=3).step(" rr\n").terminated


def test_an_environment_is_closed_with_its_owner():
    environment = start()
    inner = environment._env.unwrapped
    assert not inner.closed
    del environment
    assert inner.closed


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "rooms_for_tests:Pixels-v0",
            {},
            r"observation_space of .*Pixels-v0 is Box.*, wanted Text of gymnasium",
        ),
        ("CartPole-v1", {}, r"observation_space of gymnasium/CartPole-v1 is Box"),
        ("rooms_for_tests:Room-v0", {}, "does not register 'Room-v0'; registered are Doors-v0, Pixels-v0, Rooms-v0"),
        ("Rooms-v1", {}, "'gymnasium/Rooms-v1' is unknown; your own is"),
        ("no_such_module:Rooms-v0", {}, "module 'no_such_module' can't be imported: ModuleNotFoundError"),
        ("rooms_for_tests:Rooms-v0", {"width": 3}, "unexpected keyword argument 'width'"),
    ],
)
def test_what_cannot_be_played_is_explained(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_environment(f"gymnasium/{name}", options)


def test_registered_environments_are_listed_and_their_source_is_recorded(tmp_path):
    assert not [name for name in environment_names() if name.startswith("gymnasium/")]
    start()
    assert "gymnasium/Rooms-v0" in environment_names()
    digest, package, _ = source_of("gymnasium/rooms_for_tests:Rooms-v0", {})
    assert len(digest) == 64
    assert package is None
