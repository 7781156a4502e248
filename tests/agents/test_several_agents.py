"""Several agents in one environment: turns, moves at the same time, rewards by agent, and ends."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from chat_models import chat_tokenizer, hermes_call, scripted_agent
from episodes import EXAMPLE, end, go_on, run_episode
from gateway.scripted import Asked, ScriptedEngine, Turn

from ludic.agents.agent import Agent
from ludic.agents.delegation import SubAgent
from ludic.agents.parsers import make_parser
from ludic.engines.engine import Completion, GenerationRequest
from ludic.environments.environment import Example, MultiAgentEnvironment, Transition
from ludic.environments.limits import LimitedEnvironments
from ludic.environments.registry import make_environment
from ludic.records.rollout import Message, Rollout


@dataclass
class Game:
    """Environment whose turns and transitions are given."""

    turns: Sequence[Sequence[str]]
    transitions: Sequence[Mapping[str, Transition] | Exception]
    max_steps: int | None = None
    actions: list[Mapping[str, str]] = field(default_factory=list)

    def example(self, index: int, split: str) -> Example:
        return EXAMPLE

    def reset(self, example: Example) -> Mapping[str, tuple[Message, ...]]:
        return {name: (Message(role="user", content=f"you are {name}"),) for name in ("a", "b")}

    def next_agents(self) -> Sequence[str]:
        return self.turns[len(self.actions)]

    def step(self, actions: Mapping[str, str]) -> Mapping[str, Transition]:
        self.actions.append(actions)
        found = self.transitions[len(self.actions) - 1]
        if isinstance(found, Exception):
            raise found
        return found


def waits(reward: float = 0.0) -> Transition:
    return go_on(None, reward)


def of_agent(rows: Sequence[Rollout], agent_id: str) -> Rollout:
    (row,) = (row for row in rows if row.agent_id == agent_id)
    return row


def steps_of(row: Rollout) -> list[tuple[Any, ...]]:
    return [
        (step.observation, step.action, step.next_observation, step.reward, step.terminated)
        for step in row.environment_steps
    ]


def test_a_step_of_an_agent_lasts_until_its_next_turn() -> None:
    game = Game(
        [["a"], ["b"], ["a"]],
        [
            {"a": waits(0.5), "b": go_on("a says one", 0.0)},
            {"b": waits(0.25), "a": go_on("b says two", -0.25)},
            {"a": end(1.0), "b": end(-1.0)},
        ],
    )
    rows = run_episode(scripted_agent(["one", "two", "three"]), game)
    assert game.actions == [{"a": "one"}, {"b": "two"}, {"a": "three"}]
    first, second = of_agent(rows, "a"), of_agent(rows, "b")
    assert steps_of(first) == [
        ("you are a", "one", "b says two", 0.25, False),
        ("b says two", "three", None, 1.0, True),
    ]
    assert steps_of(second) == [("you are b\n\na says one", "two", None, -0.75, True)]
    assert (first.episode_reward, second.episode_reward) == (1.25, -0.75)
    assert first.episode_id == second.episode_id
    assert [message.content for message in second.messages] == ["you are b\n\na says one", "two"]
    # Rewards are at the last token of the action that they belong to.
    ends = [step.end - 1 for step in first.agent_steps]
    assert [first.token_rewards[end] for end in ends] == [0.25, 1.0]


def test_agents_move_at_the_same_time_and_one_may_need_several_tries() -> None:
    game = Game([["a", "b"], ["a", "b"]], [{"a": go_on("x"), "b": go_on("y")}, {"a": end(2.0), "b": end(3.0)}])
    script = ["<move>1</move>", "no move", "<move>2</move>", "<move>3</move>", "<move>4</move>"]
    agent = scripted_agent(script, parser=make_parser("tag:move"))
    rows = run_episode(agent, game)
    # Both were asked at the same time: b's first answer had no move, so b was asked again.
    assert game.actions == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    second = of_agent(rows, "b")
    assert [step.action for step in second.environment_steps] == [None, "2", "4"]
    assert (of_agent(rows, "a").episode_reward, second.episode_reward) == (2.25, 3.25)
    assert second.parse_error


def test_agents_that_wait_get_seeds_of_their_own() -> None:
    game = Game([["a", "b"]], [{"a": end(), "b": end()}])
    engine = ScriptedEngine(["one", "two"], tokenizer=chat_tokenizer())
    run_episode(Agent(engine=engine, tokenizer=chat_tokenizer(), model="scripted"), game)
    seeds = [sample.request.seed for sample in engine.log]
    assert len(set(seeds)) == 2
    assert seeds[0] == 5  # the request's


def test_a_reward_before_the_first_action_counts_for_it() -> None:
    game = Game([["a"], ["b"]], [{"a": end(), "b": go_on("hello", 0.5)}, {"b": end(1.0)}])
    second = of_agent(run_episode(scripted_agent(["one", "two"]), game), "b")
    assert steps_of(second) == [("you are b\n\nhello", "two", None, 1.5, True)]


def test_an_agent_that_is_over_is_not_asked_again() -> None:
    game = Game([["a", "b"], ["b"]], [{"a": end(-1.0), "b": go_on()}, {"b": end(1.0)}])
    rows = run_episode(scripted_agent(["one", "two", "three"]), game)
    assert (of_agent(rows, "a").episode_reward, of_agent(rows, "b").episode_reward) == (-1.0, 1.25)


@pytest.mark.parametrize(
    ("turns", "transition", "error"),
    [
        ([["c"]], {"a": end()}, "next_agents returned ('c',), wanted one or more of the agents that still play"),
        ([[]], {"a": end()}, "next_agents returned ()"),
        ([["a", "a"]], {"a": end()}, "next_agents returned ('a', 'a')"),
        ([["a"]], {"b": end()}, "step returned transitions for 'b'; wanted one for each of 'a'"),
        ([["a"]], {"a": end(), "c": end()}, "none for others than a, b"),
        ([["a"]], KeyError("no"), "KeyError: 'no'"),
        ([["a"]], {"a": end(float("nan"))}, "the reward that step returned is nan"),
    ],
)
def test_a_mistake_of_the_environment_fails_the_episode_of_all(
    turns: Sequence[Sequence[str]], transition: Any, error: str
) -> None:
    (row, *others) = run_episode(scripted_agent(["one"]), Game(turns, [transition]))
    assert error in (row.error or "")
    assert row.episode_reward is None
    assert not others  # b made no call, so it has no row


def test_max_steps_ends_the_episode_of_all() -> None:
    game = Game(
        [["a"], ["b"], ["a"]],
        [{"a": waits(), "b": go_on("x")}, {"b": waits(), "a": go_on("y")}, {}],
        max_steps=1,
    )
    rows = run_episode(scripted_agent(["one", "two"]), game)
    assert {(row.agent_id, row.truncation_reason, row.terminated) for row in rows} == {
        ("a", "max_steps", False),
        ("b", "max_steps", False),
    }
    assert all(row.environment_steps[-1].truncated for row in rows)


def test_the_time_limit_ends_the_episode_of_all_and_frees_the_engine() -> None:
    game = Game([["a", "b"]], [{}])
    engine = ScriptedEngine(["one", Turn(delay_s=100.0)], tokenizer=chat_tokenizer())
    agent = Agent(engine=engine, tokenizer=chat_tokenizer(), model="scripted")
    (row,) = run_episode(agent, game, timeout_s=0.2)
    assert (row.agent_id, row.truncation_reason) == ("a", "time_limit")
    assert (len(engine.log), engine.num_running) == (2, 0)


def test_one_agent_without_room_stops_the_others() -> None:
    game = Game([["a", "b"]], [{}])
    game.reset = lambda example: {  # type: ignore[method-assign]
        "a": (Message(role="user", content="short"),),
        "b": (Message(role="user", content="long " * 500),),
    }
    agent = scripted_agent(["one"], max_length=300, delay_s=0.05)
    (row,) = run_episode(agent, game)
    assert "exceed the model's 300" in (row.error or "")  # nobody has sampled anything


def test_time_limits_of_calls_keep_the_protocol_of_the_environment() -> None:
    for name, has_several in (("tic_tac_toe_self_play", True), ("guess_number", False), ("addition", False)):
        held = LimitedEnvironments(name, make_environment(name))()
        assert isinstance(held.environment, MultiAgentEnvironment) == has_several


def test_an_agent_of_several_may_hand_on_a_task() -> None:
    game = Game([["a"], ["b"]], [{"a": waits(), "b": go_on("your turn", 0.0)}, {"a": end(1.0), "b": end(-1.0)}])
    script = [hermes_call("delegate", task="think"), "thought", "one", "two"]
    agent = scripted_agent(script, sub_agents=(SubAgent(name="helper", description="Helps."),))
    rows = run_episode(agent, game, max_tokens=128)
    assert [(row.agent_id, row.depth, row.episode_reward) for row in rows] == [
        ("a", 0, 1.0),
        ("b", 0, -1.0),
        ("helper", 1, 1.0),  # it worked for a
    ]
    assert rows[2].parent_rollout_id == rows[0].rollout_id


def last_of(request: GenerationRequest) -> str:
    return chat_tokenizer().decode(request.prompt_tokens).split("\nuser\n")[-1]


class CountsTurns(ScriptedEngine):
    """Answers the agent a and the helper of b after some turns of the event loop each."""

    def __init__(self, num_turns: int) -> None:
        super().__init__(self._said, tokenizer=chat_tokenizer())
        self.num_turns = num_turns

    def _said(self, asked: Asked) -> str | Turn:
        last = last_of(asked.request)
        if "you are a" in last:
            return Turn(text="cut", finish_reason="length")
        return hermes_call("delegate", task="think") if "you are b" in last else "a thought"

    async def generate(self, request: GenerationRequest) -> Completion:
        last = last_of(request)
        if "you are b" not in last:
            for _ in range(self.num_turns if "think" in last else 10):
                await asyncio.sleep(0)
        return await super().generate(request)


@pytest.mark.parametrize("num_turns", range(12))
def test_what_a_helper_was_answered_when_another_agent_ends_the_episode_is_in_a_row(num_turns: int) -> None:
    # a is cut off, which is its only step, while the helper of b still samples, or was answered just then.
    game = Game([["a", "b"]], [], max_steps=1)
    engine = CountsTurns(num_turns)
    helper = SubAgent(name="helper", description="Helps.")
    agent = Agent(engine=engine, tokenizer=chat_tokenizer(), model="scripted", sub_agents=(helper,))
    rows = run_episode(agent, game, max_tokens=128)
    assert {row.truncation_reason for row in rows if row.depth == 0} == {"max_steps"}
    assert sum(row.action_length for row in rows) == sum(len(sample.tokens) for sample in engine.log)
