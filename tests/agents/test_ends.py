"""Every way in which an episode ends, and the row that it gives."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from chat_models import scripted_agent
from episodes import EXAMPLE, Script, end, go_on, run_episode, without_place
from gateway.scripted import ScriptedEngine

from ludic.agents.episode import MAX_STEPS
from ludic.agents.episode_agent import INCOMPLETE_OBSERVATION
from ludic.agents.parsers import make_parser
from ludic.agents.tools.registry import function_tool
from ludic.agents.tools.toolbox import Toolbox
from ludic.engines.engine import Completion, GenerationRequest
from ludic.environments.environment import SpanReward, Transition
from ludic.errors import ConfigError
from ludic.records.rollout import Message

CUT_OFF = ("and so on", "length")
NOT_CUT_OFF = {"incomplete_completion": False, "finish_reason": "stop"}
TERMINATED = {"terminated": True, "truncated": False, "truncation_reason": None, "error": None}


def truncated(reason: str) -> dict[str, Any]:
    return {"terminated": False, "truncated": True, "truncation_reason": reason, "error": None}


def failed(error: str) -> dict[str, Any]:
    return {
        "terminated": False,
        "truncated": False,
        "truncation_reason": None,
        "error": error,
        "episode_reward": None,
    }


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    raise KeyError(word)


CALL = '<tool_call>{"name": "look_up", "arguments": {"word": "cat"}}</tool_call>'


@dataclass
class End:
    """One way to end."""

    script: Sequence[Any]
    transitions: Sequence[Transition | Exception]
    row: dict[str, Any]
    """Columns of the row."""
    steps: Sequence[tuple[str | None, str | None, float | None, bool, bool]]
    """Action, next observation, reward, terminated and truncated of each step of the environment."""
    limits: dict[str, Any] = field(default_factory=dict)
    agent: dict[str, Any] = field(default_factory=dict)


ENDS = {
    "terminated at the first step": End(
        ["a"],
        [end(1.0)],
        {**TERMINATED, **NOT_CUT_OFF, "episode_reward": 1.0, "num_turns": 1, "parse_error": False},
        [("a", None, 1.0, True, False)],
    ),
    "terminated at a later step": End(
        ["a", "b"],
        [go_on("more", 0.25), end(1.0)],
        {**TERMINATED, **NOT_CUT_OFF, "episode_reward": 1.25, "num_turns": 2, "parse_error": False},
        [("a", "more", 0.25, False, False), ("b", None, 1.0, True, False)],
    ),
    "truncated by the environment": End(
        ["a", "b"],
        [go_on(), go_on("time is up", 0.5, truncated=True)],
        {**truncated("env"), **NOT_CUT_OFF, "episode_reward": 0.75, "num_turns": 2},
        [("a", "go on", 0.25, False, False), ("b", "time is up", 0.5, False, True)],
    ),
    "max_steps": End(
        ["a", "b"],
        [go_on(), go_on("and on")],
        {**truncated("max_steps"), **NOT_CUT_OFF, "episode_reward": 0.5, "num_turns": 2},
        [("a", "go on", 0.25, False, False), ("b", "and on", 0.25, False, True)],
        {"max_steps": 2},
    ),
    "max_steps, by a parse failure": End(
        ["a", "b"],
        [go_on()],
        {**truncated("max_steps"), "parse_error": True, "episode_reward": 0.25, "num_turns": 2},
        [("a", "go on", 0.25, False, False), (None, "FEEDBACK", 0.0, False, True)],
        {"max_steps": 2},
        {"parser": make_parser("regex:a")},
    ),
    "length": End(
        [CUT_OFF],
        [],
        {
            **truncated("max_steps"),
            "finish_reason": "length",
            "incomplete_completion": True,
            "parse_error": True,
            "episode_reward": 0.0,
        },
        [(None, INCOMPLETE_OBSERVATION, 0.0, False, True)],
        {"max_steps": 1},
    ),
    "length, then an answer": End(
        [CUT_OFF, "a"],
        [end()],
        {**TERMINATED, "finish_reason": "stop", "incomplete_completion": True, "parse_error": True, "num_turns": 2},
        [(None, INCOMPLETE_OBSERVATION, 0.0, False, False), ("a", None, 1.0, True, False)],
    ),
    "length, accepted": End(
        [CUT_OFF],
        [end()],
        {**TERMINATED, "finish_reason": "length", "incomplete_completion": True, "parse_error": False},
        [("and so on", None, 1.0, True, False)],
        {"accept_incomplete": True},
    ),
    "parse failure, then an answer": End(
        ["b", "a"],
        [end()],
        {**TERMINATED, **NOT_CUT_OFF, "parse_error": True, "episode_reward": 1.0, "num_turns": 2},
        [(None, "FEEDBACK", 0.0, False, False), ("a", None, 1.0, True, False)],
        {},
        {"parser": make_parser("regex:a")},
    ),
    "tool error, then an answer": End(
        [CALL, "a"],
        [end()],
        {**TERMINATED, **NOT_CUT_OFF, "parse_error": False, "episode_reward": 1.0, "num_turns": 2},
        [("a", None, 1.0, True, False)],
        {},
        {"toolbox": Toolbox([function_tool(look_up)])},
    ),
    "error of the environment": End(
        ["a", "b"],
        [go_on(), ZeroDivisionError("by zero")],
        {**failed("ZeroDivisionError: by zero"), **NOT_CUT_OFF, "num_turns": 2},
        [("a", "go on", 0.25, False, False), ("b", None, None, False, False)],
    ),
    "an environment that goes on without an observation": End(
        ["a"],
        [Transition(observation=None, reward=0.0, terminated=False)],
        failed("ValueError: step returned no observation, wanted one since the episode continues"),
        [("a", None, None, False, False)],
    ),
    "max_seq_len": End(
        ["a", "b"],
        [go_on("x " * 400), end()],
        {**truncated("max_seq_len"), "episode_reward": 0.25, "num_turns": 1},
        [("a", "x " * 400, 0.25, False, True)],
        {"max_seq_len": 300},
    ),
    "context_length": End(
        ["a", "b"],
        [go_on("x " * 400), end()],
        {**truncated("context_length"), "episode_reward": 0.25, "num_turns": 1},
        [("a", "x " * 400, 0.25, False, True)],
        {},
        {"max_length": 300},
    ),
    "a first prompt that leaves no room": End(
        ["a"],
        [end()],
        {**failed("a prompt of 14 tokens and max_tokens 64 exceed the model's 70"), "num_turns": 0},
        [],
        {"max_tokens": 64},
        {"max_length": 70},
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_each_end_gives_its_row(name: str) -> None:
    case = ENDS[name]
    (row,) = run_episode(scripted_agent(case.script, **case.agent), Script(case.transitions), **case.limits)
    row = replace(row, error=without_place(row.error))
    assert {column: getattr(row, column) for column in case.row} == case.row
    feedback = {step.parse_feedback for step in row.agent_steps if step.parse_feedback} or {None}
    steps = [
        (s.action, "FEEDBACK" if s.next_observation in feedback - {INCOMPLETE_OBSERVATION} and s.action is None else
         s.next_observation, s.reward, s.terminated, s.truncated)
        for s in row.environment_steps
    ]  # fmt: skip
    assert steps == list(case.steps)
    assert row.token_rewards.sum() == pytest.approx(sum(step[2] or 0.0 for step in case.steps))


def test_max_steps_and_its_reason_are_in_the_last_step() -> None:
    (row,) = run_episode(scripted_agent(["a", "b"]), Script([go_on(), go_on()]), max_steps=2)
    assert [step.info for step in row.environment_steps] == [{}, {"truncation_reason": "max_steps"}]


def test_a_truncation_by_the_environment_has_its_reason_in_the_step_too() -> None:
    end_of_time = go_on("stop", truncated=True, info={"seconds": "9"})
    (row,) = run_episode(scripted_agent(["a", "b"]), Script([go_on(), end_of_time]))
    assert row.truncation_reason == "env"
    assert [step.info for step in row.environment_steps] == [{}, {"truncation_reason": "env", "seconds": "9"}]


@pytest.mark.slow
def test_an_environment_may_say_how_many_steps_it_has() -> None:
    environment = Script([go_on()] * (MAX_STEPS + 1))
    environment.max_steps = 3  # type: ignore[attr-defined]
    (row,) = run_episode(scripted_agent(["a"] * 9), environment)
    assert (row.num_turns, row.truncation_reason) == (3, "max_steps")
    (row,) = run_episode(scripted_agent(["a"] * 9), Script([go_on()] * 9), max_steps=5)
    assert row.num_turns == 5
    (row,) = run_episode(scripted_agent(["a"] * 99), Script([go_on()] * 99))
    assert row.num_turns == MAX_STEPS


def test_a_time_limit_truncates_what_was_sampled() -> None:
    class Slow(Script):
        def step(self, action: str) -> Transition:
            time.sleep(0.2)
            return super().step(action)

    (row,) = run_episode(scripted_agent(["a", "b"], delay_s=0.01), Slow([go_on(), end()]), timeout_s=0.1)
    assert (row.truncation_reason, row.error, row.num_turns, row.episode_reward) == ("time_limit", None, 1, 0.25)
    assert row.environment_steps[-1].truncated


def test_a_time_limit_before_the_first_completion_is_an_error() -> None:
    (row,) = run_episode(scripted_agent(["a"], delay_s=5.0), Script([end()]), timeout_s=0.05)
    assert (row.error, row.response_length) == ("the episode took more than 0.05 s", 0)


def test_a_parser_that_fails_keeps_what_was_sampled() -> None:
    class Broken:
        def parse(self, text: str) -> None:
            raise RuntimeError("no grammar")

    (row,) = run_episode(scripted_agent(["a"], parser=Broken()), Script([end()]))
    assert (without_place(row.error), row.num_turns, row.environment_steps) == ("RuntimeError: no grammar", 1, ())
    assert row.agent_steps[0].action is None


def test_an_error_of_the_engine_is_not_one_of_the_episode() -> None:
    class Unable:
        name, policy_version, max_length = "unable 1", 0, 1000

        async def generate(self, request: object) -> None:
            raise ConfigError("no such token")

    agent = scripted_agent([])
    with pytest.raises(ConfigError, match="no such token"):
        run_episode(type(agent)(engine=Unable(), tokenizer=agent.tokenizer, model="m"), Script([]))


def test_an_engine_that_returns_no_sampling_mask_is_told_so() -> None:
    class Maskless(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> Completion:
            said = await super().generate(request)
            return replace(said, columns={"response_logprobs": said.logprobs})

    agent = scripted_agent([])
    agent = replace(agent, engine=Maskless(["a"], tokenizer=agent.tokenizer))
    with pytest.raises(
        ConfigError, match=r"engine scripted 1 returns no kept_tokens, which training needs.*--keep-sampling-mask False"
    ):
        run_episode(agent, Script([end()]), sampling={"top_k": 5, "return_mask": True})


def test_a_reset_that_fails_gives_the_examples_prompt() -> None:
    def make() -> Script:
        raise RuntimeError("no sandbox left")

    (row,) = run_episode(scripted_agent([]), make)
    assert (without_place(row.error), row.messages) == ("RuntimeError: no sandbox left", EXAMPLE.messages)
    assert row.prompt_length > 0


def test_rewards_of_several_steps_add_up_in_the_components() -> None:
    parts = {"format": 0.5, "progress": 0.25}
    (row,) = run_episode(
        scripted_agent(["a", "b"]),
        Script([go_on(reward_components=parts), end(reward_components={"progress": 0.5})]),
    )
    assert row.reward_components == {"format": 0.5, "progress": 0.75}


def test_the_reward_of_each_step_falls_at_the_end_of_its_completion() -> None:
    (row,) = run_episode(scripted_agent(["one", "two"]), Script([go_on(reward=0.25), end(2.0)]))
    ends = [step.end - 1 for step in row.agent_steps]
    assert {index: reward for index, reward in enumerate(row.token_rewards.tolist()) if reward} == dict(
        zip(ends, [0.25, 2.0], strict=True)
    )


def test_a_format_reward_falls_at_the_completion_that_earned_it() -> None:
    parser = make_parser("tag:do", format_reward=0.125)
    (row,) = run_episode(scripted_agent(["nothing", "<do>a</do>"], parser=parser), Script([end(1.0)]), max_steps=2)
    assert row.episode_reward == 1.125
    assert row.token_rewards[row.agent_steps[1].end - 1] == 1.125
    assert row.messages[0] == Message(role="user", content="begin")


@pytest.mark.parametrize(
    ("transition", "error"),
    [
        (go_on("half \ud83d"), "ValueError: the observation that step returned holds half a surrogate pair"),
        (go_on(5), "TypeError: the observation that step returned is 5, wanted a str"),  # type: ignore[arg-type]
    ],
)
def test_an_observation_that_can_not_be_stored_fails_its_episode_only(transition: Transition, error: str) -> None:
    (row,) = run_episode(scripted_agent(["a"]), Script([transition]))
    assert (row.error or "").startswith(error)


def test_facts_that_can_not_be_stored_are_replaced() -> None:
    (row,) = run_episode(scripted_agent(["a"]), Script([end(info={"note": "half \ud83d"})]))
    assert row.environment_steps[0].info == {"note": "half ?"}


@pytest.mark.parametrize("messages", [(), ("begin",), (Message(role="user", content="half \ud83d"),)])
def test_a_context_that_shows_nothing_sensible_fails_its_episode_only(messages: tuple) -> None:
    class Own:
        async def view(self, seen: object, ask: object) -> tuple:
            return messages

    (row,) = run_episode(scripted_agent(["a"], make_context=Own), Script([end()]))
    assert row.error is not None
    assert "the context" in row.error


@pytest.mark.parametrize("max_steps", [0, -1, "ten", 2.5])
def test_an_environment_with_an_impossible_number_of_steps_fails(max_steps: object) -> None:
    environment = Script([end()])
    environment.max_steps = max_steps  # type: ignore[attr-defined]
    (row,) = run_episode(scripted_agent(["a"]), environment)
    assert row.error == f"ValueError: max_steps is {max_steps!r}, wanted an int of at least 1"


def test_large_rewards_at_one_token_stay_finite() -> None:
    spans = (SpanReward(start=0, end=1, reward=3e38), SpanReward(start=0, end=1, reward=3e38))
    (row,) = run_episode(scripted_agent(["a"]), Script([end(3e38, span_rewards=spans)]))
    assert (row.error, row.episode_reward) == (None, pytest.approx(9e38))


def test_a_timeout_of_the_engine_is_not_the_episodes() -> None:
    class Late:
        name, policy_version, max_length = "unable 1", 0, 1000

        async def generate(self, request: object) -> None:
            raise TimeoutError("the server is away")

    agent = scripted_agent([])
    with pytest.raises(TimeoutError, match="the server is away"):
        run_episode(type(agent)(engine=Late(), tokenizer=agent.tokenizer, model="m"), Script([]), timeout_s=60)
