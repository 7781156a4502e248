"""What users' code raises, or returns wrongly, is in the row: one line that names the place, and the traceback."""

from pathlib import Path
from typing import Any

import pytest
from chat_models import hermes_call, scripted_agent
from episodes import EXAMPLE, Script, end, go_on, run_episode

from ludic.agents.episode import make_protocol
from ludic.agents.tools.registry import make_tools
from ludic.agents.tools.toolbox import Toolbox
from ludic.environments.environment import Example, Score, Transition
from ludic.environments.limits import LimitedEnvironments, TimeLimit
from ludic.environments.registry import make_environment
from ludic.records.rollout import Message, Rollout, ToolCall
from ludic.rollouts.sampler import make_context, make_parser
from ludic.settings.user_files import Files, UserFile

OWN = '''\
from ludic.environments.environment import Example
from ludic.records.rollout import Message


class Question:
    def example(self, index, split):
        return Example(example_id=f"{index}", messages=(Message(role="user", content="?"),))

    def score(self, example, answer):
        return answer.split()[7]


class Endless(Question):
    def score(self, example, answer):
        while True:
            pass


class Waits(Question):
    async def score(self, example, answer):
        return answer.split()[7]


class InThread(Question):
    run_in = "thread"


class Steps(Question):
    def reset(self, example):
        return example.messages

    def step(self, action):
        raise KeyError(action)


class Parser:
    def parse(self, text):
        return {}[text]


class Context:
    async def view(self, messages, ask):
        raise OSError("no memory")


def look(word: str) -> str:
    """Look at something.

    Args:
        word: The word.
    """
    return {}[word]


async def play(play):
    await play.reset()
    play.oh_no()
'''
FILES: Files = {"own.py": UserFile(path=Path("/nowhere/own.py"), source=OWN.encode())}


def of_class(name: str) -> Rollout:
    environments = LimitedEnvironments("own", make_environment(f"own.py:{name}", files=FILES), TimeLimit(timeout_s=1))
    (row,) = run_episode(scripted_agent(["a"]), environments)
    return row


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("Question", "IndexError: list index out of range (own.py:10, in score)"),
        ("Waits", "IndexError: list index out of range (own.py:21, in score)"),
        ("InThread", "IndexError: list index out of range (own.py:10, in score)"),
        ("Steps", "KeyError: 'a' (own.py:33, in step)"),
    ],
)
def test_an_environment_that_raises_is_found_by_file_and_line(name: str, error: str) -> None:
    row = of_class(name)
    assert row.error == error
    lines = (row.traceback or "").splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith('  File "/nowhere/own.py", line ')  # and no frame of ludic before it
    assert lines[-1] == error.partition(" (")[0]


def test_a_call_that_takes_too_long_is_found_where_it_was_interrupted() -> None:
    row = of_class("Endless")
    assert (row.error or "").startswith("TimeLimitError: environment own: score on example 'start' did not return")
    assert "(own.py:1" in (row.error or "")
    assert "in score" in (row.traceback or "")


def test_parser_context_and_protocol_that_raise_are_found_by_file_and_line() -> None:
    parser, context = make_parser("own.py:Parser", files=FILES), make_context("own.py:Context", files=FILES)
    (parsed,) = run_episode(scripted_agent(["a"], parser=parser), Script([end()]))
    (viewed,) = run_episode(scripted_agent(["a"], make_context=context), Script([end()]))
    (played,) = run_episode(scripted_agent(["a"]), Script([]), protocol=make_protocol("own.py:play", FILES))
    assert [row.error for row in (parsed, viewed, played)] == [
        "KeyError: 'a' (own.py:38, in parse)",
        "OSError: no memory (own.py:43, in view)",
        "AttributeError: 'Episode' object has no attribute 'oh_no' (own.py:57, in play)",
    ]
    assert all('  File "/nowhere/own.py", line ' in (row.traceback or "") for row in (parsed, viewed, played))


def test_a_tool_that_raises_tells_the_model_the_error_and_the_row_the_traceback() -> None:
    toolbox = Toolbox(make_tools(["own.py:look"], FILES))
    script = [hermes_call("look", word="cat"), "a", "b"]
    (row,) = run_episode(scripted_agent(script, toolbox=toolbox), Script([go_on(), end()]))
    (call,) = (call for step in row.agent_steps for call in step.tool_calls)
    assert isinstance(call, ToolCall)
    assert (row.error, row.episode_reward, call.error) == (None, 1.25, "KeyError: 'cat'")
    assert (row.traceback or "").startswith('Traceback (most recent call last):\n  File "/nowhere/own.py", line 52')


def test_a_tool_that_works_leaves_no_traceback() -> None:
    (row,) = run_episode(scripted_agent(["a"]), Script([end()]))
    assert (row.error, row.traceback) == (None, None)


# --- Wrong values ----------------------------------------------------------------------------------------


class Returns:
    """A question whose score is what it is given."""

    def __init__(self, score: Any) -> None:
        self._score = score

    def example(self, index: int, split: str) -> Example:
        return EXAMPLE

    def score(self, example: Example, answer: str) -> Any:
        return self._score


def scored(score: Any) -> Rollout:
    from ludic.environments.single_turn import SingleTurn

    (row,) = run_episode(scripted_agent(["a"]), lambda: SingleTurn(Returns(score)))
    return row


@pytest.mark.parametrize(("score", "reward"), [(1.5, 1.5), (1, 1.0), (True, 1.0), (Score(reward=0.5), 0.5)])
def test_a_class_may_return_a_number_for_a_score(score: Any, reward: float) -> None:
    row = scored(score)
    assert (row.error, row.episode_reward) == (None, reward)


@pytest.mark.parametrize(
    ("score", "error"),
    [
        (None, "TypeError: score returned None, wanted a number or a Score"),
        ("1.0", "TypeError: score returned '1.0', wanted a number or a Score"),
        ({"reward": 1}, "TypeError: score returned {'reward': 1}, wanted a number or a Score"),
        (float("nan"), "ValueError: the reward that score returned is nan, wanted a finite float32"),
        (Score(reward=float("inf")), "ValueError: the reward that score returned is inf, wanted a finite float32"),
        (Score(reward="much"), "TypeError: the reward that score returned is 'much', wanted a number"),  # type: ignore[arg-type]
        (
            Score(reward=1.0, components={"format": float("nan")}),
            "ValueError: component 'format' that score returned is nan, wanted a finite float32",
        ),
        (
            Score(reward=1.0, components={"format": None}),  # type: ignore[dict-item]
            "TypeError: component 'format' that score returned is None, wanted a number",
        ),
    ],
)
def test_a_wrong_score_names_the_method_and_what_it_returned(score: Any, error: str) -> None:
    row = scored(score)
    assert (row.error, row.episode_reward) == (error, None)


class Answers(Script):
    """Environment of steps whose methods return what they are given."""

    def __init__(self, first: Any = EXAMPLE.messages, transition: Any = None) -> None:
        super().__init__([])
        self._first, self._transition = first, transition

    def reset(self, example: Example) -> Any:
        return self._first

    def step(self, action: str) -> Any:
        return self._transition


DICT = {"content": "hi", "role": "user"}  # as reprlib orders it
WANTED = "wanted a ludic.records.Message, such as Message(role='user', content='...')"


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        (Answers((DICT,)), f"TypeError: reset returned the message {DICT!r}, {WANTED}"),
        (Answers("hi"), "TypeError: reset returned 'hi', wanted a tuple of ludic.records.Message"),
        (Answers(5), "TypeError: reset returned 5, wanted a tuple of ludic.records.Message"),
        (Answers(), "TypeError: step returned None, wanted a ludic.environments.environment.Transition"),
        (
            Answers(transition=Transition(observation=None, reward=float("nan"), terminated=True)),
            "ValueError: the reward that step returned is nan, wanted a finite float32",
        ),
        (
            Answers(transition=Transition(observation=DICT, reward=1.0, terminated=False)),  # type: ignore[arg-type]
            f"TypeError: the observation that step returned is {DICT!r}, wanted a str",
        ),
    ],
)
def test_a_wrong_observation_names_the_method_and_what_it_returned(environment: Any, error: str) -> None:
    (row,) = run_episode(scripted_agent(["a"]), environment)
    assert row.error == error


def test_a_parser_that_returns_no_parsed_is_named() -> None:
    class Parser:
        def parse(self, text: str) -> Any:
            return text

    (row,) = run_episode(scripted_agent(["a"], parser=Parser()), Script([end()]))
    assert row.error == "TypeError: parse returned 'a', wanted a ludic.agents.parsers.Parsed"


@pytest.mark.parametrize(
    ("members", "error"),
    [
        ({"first": "hi"}, "TypeError: reset returned 'hi', wanted messages by agent id"),
        ({"next": None}, "TypeError: next_agents returned None, wanted the ids of the agents who move"),
        ({"step": 1.0}, "TypeError: step returned 1.0, wanted a Transition by agent id"),
        (
            {"step": {"x": 1.0}},
            "TypeError: step returned 1.0 for agent 'x', wanted a ludic.environments.environment.Transition",
        ),
    ],
)
def test_a_game_that_returns_something_else_is_named(members: dict[str, Any], error: str) -> None:
    class Game:
        def example(self, index: int, split: str) -> Example:
            return EXAMPLE

        def reset(self, example: Example) -> Any:
            return members.get("first", {"x": (Message(role="user", content="hi"),)})

        def next_agents(self) -> Any:
            return members.get("next", ("x",))

        def step(self, actions: Any) -> Any:
            return members["step"]

    (row,) = run_episode(scripted_agent(["a"]), Game())
    assert row.error == error
