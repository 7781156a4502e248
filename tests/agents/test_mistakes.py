"""Mistakes of a user's code fail the episode with an error that says which, and never the worker or the batch."""

import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from chat_models import hermes_call, scripted_agent
from episodes import EXAMPLE, Script, end, run_episode, without_place

from ludic.agents.delegation import SubAgent
from ludic.agents.episode import Episode
from ludic.agents.parsers import Parsed
from ludic.agents.tools.toolbox import Toolbox
from ludic.environments.environment import Example, Transition
from ludic.errors import ConfigError, ModelError, StopNowInterrupt
from ludic.records.rollout import Message, Rollout


def test_messages_may_come_from_a_generator() -> None:
    class Lazy(Script):
        def reset(self, example: Example) -> Iterator[Message]:  # type: ignore[override]
            return (message for message in example.messages)

    class View:
        async def view(self, messages: Any, ask: Any) -> Iterator[Message]:
            return (message for message in messages)

    (row,) = run_episode(scripted_agent(["a"], make_context=View), Lazy([end()]))
    assert (row.error, [message.content for message in row.messages]) == (None, ["begin", "a"])


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (ValueError("half \ud83d"), "ValueError: half ?"),
        (ValueError("one\nline"), "ValueError: one line"),
    ],
)
def test_the_text_of_an_error_can_be_stored(raised: Exception, error: str) -> None:
    (row,) = run_episode(scripted_agent(["a"]), Script([raised]))
    assert without_place(row.error) == error


def test_an_error_without_a_text_fails_the_episode() -> None:
    (row,) = run_episode(scripted_agent(["a"]), Script([UnreadableError()]))
    assert without_place(row.error) == "UnreadableError: its message could not be read, RuntimeError was raised"


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "0.5"])
def test_a_parser_whose_reward_is_no_number_fails_the_episode(reward: Any) -> None:
    class Own:
        def parse(self, text: str) -> Parsed:
            return Parsed(action=text, reward=reward)

    (row,) = run_episode(scripted_agent(["a"], parser=Own()), Script([end()]))
    assert row.error is not None
    assert row.num_turns == 1


@pytest.mark.parametrize(
    ("transition", "error"),
    [
        (end(info={1: "a"}), "TypeError: a name in info that step returned is 1, wanted a str"),
        (end(info={"\ud800": "a"}), "ValueError: a name in info that step returned holds half a surrogate pair"),
        (
            end(reward_components={1: 0.5}),
            "TypeError: a name in reward_components that step returned is 1",
        ),
        (end("0.5"), "TypeError: the reward that step returned is '0.5', wanted a number"),
    ],
)
def test_what_the_store_would_refuse_fails_the_episode(transition: Transition, error: str) -> None:
    (row,) = run_episode(scripted_agent(["a"]), Script([transition]))
    assert row.error is not None
    assert row.error.startswith(error)
    assert (row.messages[0], row.episode_reward) == (EXAMPLE.messages[0], None)


@pytest.mark.parametrize(
    "messages", [(), (Message(role="user", content=5),), (Message(role="user", content="\ud800"),)]
)  # type: ignore[arg-type]
def test_an_episode_without_usable_messages_fails_with_one_token(messages: tuple[Message, ...]) -> None:
    example = Example(example_id="bare", messages=messages)
    (row,) = run_episode(scripted_agent(["a"]), Script([end()]), example=example)
    assert row.error is not None
    assert (row.messages, row.prompt_length) == ((), 1)


def test_a_name_that_is_no_text_fails_the_episode() -> None:
    named = Message(role="user", content="a", name=5)  # type: ignore[arg-type]
    example = Example(example_id="named", messages=(named,))
    (row,) = run_episode(scripted_agent(["a"]), Script([end()]), example=example)
    assert row.error == "TypeError: the name in a message of reset is 5, wanted a str"


def test_an_error_of_a_context_fails_the_episode_even_if_it_is_one_of_ludic() -> None:
    class Refuses:
        async def view(self, messages: Any, ask: Any) -> None:
            raise ConfigError("my context says no")

    (row,) = run_episode(scripted_agent(["a"], make_context=Refuses), Script([end()]))
    assert without_place(row.error) == "ConfigError: my context says no"


def test_a_context_that_can_not_be_made_fails_the_episode() -> None:
    class NoMore:
        def __init__(self) -> None:
            raise ValueError("no more")

    (row,) = run_episode(scripted_agent(["a"], make_context=NoMore), Script([end()]))
    assert (without_place(row.error), row.messages) == ("ValueError: no more", EXAMPLE.messages)


@pytest.mark.parametrize("question", [(), ({"role": "user"},), (Message(role="user", content="\ud800"),)])
def test_a_context_that_asks_nothing_sensible_fails_the_episode(question: tuple[Any, ...]) -> None:
    class Asks:
        async def view(self, messages: Any, ask: Any) -> Any:
            await ask(question)
            return messages

    (row,) = run_episode(scripted_agent(["a", "b"], make_context=Asks), Script([end()]))
    assert row.error is not None
    assert "the context's question" in row.error


def test_an_error_of_the_engine_in_a_question_is_not_one_of_the_episode() -> None:
    class Unable:
        name, policy_version, max_length = "unable 1", 0, 1000

        async def generate(self, request: object) -> None:
            raise ModelError("half loaded")

    class Asks:
        async def view(self, messages: Any, ask: Any) -> Any:
            await ask(messages)

    agent = scripted_agent([])
    agent = type(agent)(engine=Unable(), tokenizer=agent.tokenizer, model="m", make_context=Asks)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="half loaded"):
        run_episode(agent, Script([]))


class OwnBaseError(BaseException):
    """Such as the panics of libraries that are written in Rust."""


class Raising:
    """Environment, parser, context and tool whose method `where` raises what it is given."""

    name, schema = "look", {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

    def __init__(self, where: str, error: BaseException) -> None:
        self.where, self.error = where, error

    def _may_raise(self, where: str) -> None:
        if where == self.where:
            raise self.error

    def __getattribute__(self, name: str) -> Any:
        if name in ("next_agents", "score_task") and name != object.__getattribute__(self, "where"):
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def make(self) -> "Raising":
        self._may_raise("make")
        return self

    def reset(self, example: Example) -> Any:
        self._may_raise("reset")
        return {"a": EXAMPLE.messages} if self.where == "next_agents" else EXAMPLE.messages

    def next_agents(self) -> Any:
        self._may_raise("next_agents")

    def step(self, action: str) -> Transition:
        self._may_raise("step")
        return end()

    def score_task(self, agent_id: str, task: str, answer: str) -> Any:
        self._may_raise("score_task")

    def parse(self, text: str) -> Parsed:
        self._may_raise("parse")
        return Parsed(action=text)

    async def view(self, messages: Any, ask: Any) -> Any:
        self._may_raise("view")
        return messages

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        self._may_raise("tool")
        return "seen"


def rows_of(raising: Raising) -> list[Rollout]:
    calls = {"tool": [hermes_call("look"), "a"], "score_task": [hermes_call("delegate", task="work"), "done", "a"]}
    agent = scripted_agent(
        calls.get(raising.where, ["a"]),
        parser=raising,
        make_context=lambda: raising,
        toolbox=Toolbox([raising] if raising.where == "tool" else []),
        sub_agents=(SubAgent(name="helper", description="Helps."),) if raising.where == "score_task" else (),
    )
    return run_episode(agent, raising.make)


PLACES = ("make", "reset", "next_agents", "step", "score_task", "parse", "view", "tool")


@pytest.fixture
def ctrl_c_is_handled() -> Iterator[None]:
    """As in a worker, where the first Ctrl-C asks it to stop."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_is_handled")
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), OwnBaseError("panic")], ids=repr)
def test_whatever_a_users_code_raises_fails_its_episode_only(where: str, error: BaseException) -> None:
    rows = rows_of(Raising(where, error))
    texts = [row.error or "" for row in rows]
    texts += [call.error or "" for row in rows for step in row.agent_steps for call in step.tool_calls]
    wanted = "sys.exit(3) was called" if isinstance(error, SystemExit) else f"{type(error).__name__} was raised"
    assert any(wanted in text for text in texts)


@pytest.mark.parametrize("where", PLACES)
def test_a_second_ctrl_c_ends_the_worker(where: str) -> None:
    with pytest.raises(StopNowInterrupt):
        rows_of(Raising(where, StopNowInterrupt()))


def test_an_agent_can_not_join_twice_under_one_id() -> None:
    async def twice(play: Episode) -> None:
        play.join("a", EXAMPLE.messages)
        play.join("a", EXAMPLE.messages)

    (row,) = run_episode(scripted_agent(["a"]), Script([]), protocol=twice)
    assert row.error == "ValueError: an agent 'a' has joined already; each needs an id of its own"
