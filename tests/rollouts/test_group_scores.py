"""Answers to one example are scored together when all have ended, and rows say their final reward."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_models import hermes_call, scripted_agent
from episodes import without_place
from tiny_models import committed_rows, publish

from ludic.agents.agent import Agent
from ludic.agents.delegation import helper
from ludic.environments.environment import Example, GroupAnswer, Score, SpanReward, Transition
from ludic.environments.limits import LimitedEnvironments, TimeLimit
from ludic.environments.single_turn import SingleTurn
from ludic.records.rollout import Message, Rollout
from ludic.rollouts.sampler import GroupSampler, episodes_of_run
from ludic.rollouts.scheduler import Scheduler
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root

EXAMPLE = Example(example_id="e", messages=(Message(role="user", content="?"),))


class Question:
    """Rewards the length of an answer; one that says bad is an error."""

    def example(self, index: int, split: str) -> Example:
        return EXAMPLE

    def score(self, example: Example, answer: str) -> Score:
        if answer == "bad":
            raise KeyError("own")
        return Score(reward=float(len(answer)), components={"length": float(len(answer)), "kept": 1.0})


def sampler_of(make: Any, agent: Agent, timeout_s: float | None = None, **run: Any) -> GroupSampler:
    config = RunConfig(model="m", env=("own",), **({"group_size": 3, "max_tokens": 128} | run))
    limited = LimitedEnvironments("own", make, TimeLimit(timeout_s=timeout_s))
    return GroupSampler(run=config, run_episode=episodes_of_run(config, agent), environments={"own": limited})


def sample(make: Any, script: Sequence[Any], **options: Any) -> list[Rollout]:
    """Rows of one group."""
    sampler = sampler_of(make, scripted_agent(script), **options)
    return list(sampler.sample([0], "worker").groups[0].rollouts)


def scored_by(score_group: Any, run_in: str = "loop") -> Callable[[], Any]:
    """Factory of the question with a score_group."""
    question = type("Own", (Question,), {"score_group": score_group, "run_in": run_in})()
    return lambda: SingleTurn(question)


def rewards(rows: Sequence[Rollout]) -> list[float | None]:
    return [row.episode_reward for row in rows]


def ranks(answers: Sequence[GroupAnswer]) -> list[float]:
    """How many of the others are shorter."""
    return [float(sum(len(other.text) < len(each.text) for other in answers)) for each in answers]


def sync_ranks(self: Any, example: Example, answers: Sequence[GroupAnswer]) -> list[Score]:
    assert example is EXAMPLE
    return [Score(reward=rank, components={"length": -1.0, "rank": rank}) for rank in ranks(answers)]


async def async_ranks(self: Any, example: Example, answers: Sequence[GroupAnswer]) -> list[Score]:
    await asyncio.sleep(0.01)
    return sync_ranks(self, example, answers)


@pytest.mark.parametrize(
    ("score_group", "run_in"), [(sync_ranks, "loop"), (sync_ranks, "thread"), (async_ranks, "loop")]
)
def test_the_scores_of_all_answers_replace_those_of_each(score_group: Any, run_in: str) -> None:
    rows = sample(scored_by(score_group, run_in), ["aaa", "a", "aaaaaa"])
    by_text = {row.messages[-1].content: row for row in rows}
    assert {text: row.episode_reward for text, row in by_text.items()} == {"a": 0.0, "aaa": 1.0, "aaaaaa": 2.0}
    assert by_text["aaa"].reward_components == {"length": -1.0, "kept": 1.0, "rank": 1.0}
    for row in rows:
        (step,) = row.environment_steps
        assert step.reward == row.token_rewards.sum() == row.token_rewards[-1] == row.episode_reward
        assert (row.terminated, row.error) == (True, None)


def test_answers_say_what_was_said_and_scored() -> None:
    seen: list[GroupAnswer] = []

    def score_group(self: Any, example: Example, answers: Sequence[GroupAnswer]) -> list[float]:
        seen.extend(answers)
        return [answer.reward for answer in answers]

    rows = sample(scored_by(score_group), ["ab", "abc"], group_size=2)
    assert [(each.text, each.reward, each.group_index, each.agent_id) for each in seen] == [
        ("ab", 2.0, 0, "agent"),
        ("abc", 3.0, 1, "agent"),
    ]
    assert seen[0].messages == (EXAMPLE.messages[0], Message(role="assistant", content="ab"))
    assert seen[0].components == {"length": 2.0, "kept": 1.0}
    assert rewards(rows) == [2.0, 3.0]


def test_failed_episodes_are_left_out_and_stay_failed() -> None:
    rows = sample(scored_by(sync_ranks), ["bad", "a", "aa"])
    assert rewards(rows) == [None, 0.0, 1.0]
    assert without_place(rows[0].error) == "KeyError: 'own'"


def test_a_group_without_an_answer_is_not_scored() -> None:
    def score_group(self: Any, example: Example, answers: Sequence[GroupAnswer]) -> list[float]:
        raise AssertionError

    rows = sample(scored_by(score_group), ["bad", "bad", "bad"])
    assert {without_place(row.error) for row in rows} == {"KeyError: 'own'"}


def test_an_answer_that_was_refused_is_an_empty_text() -> None:
    rows = sample(scored_by(sync_ranks), [("cut", "length"), "a", "aa"])
    assert rewards(rows) == [0.0, 1.0, 2.0]
    assert (rows[0].truncation_reason, rows[0].incomplete_completion) == ("max_steps", True)


def test_the_reward_of_the_format_stays() -> None:
    rows = sample(scored_by(sync_ranks), ["a", "aa", "aaa"], format_reward=0.5)
    assert rewards(rows) == [0.5, 1.5, 2.5]
    assert [float(row.token_rewards.sum()) for row in rows] == [0.5, 1.5, 2.5]
    assert [row.environment_steps[0].reward for row in rows] == [0.0, 1.0, 2.0]


def raises(self: Any, example: Example, answers: Any) -> Any:
    raise KeyError("lost")


async def waits_for_ever(self: Any, example: Example, answers: Any) -> Any:
    await asyncio.Event().wait()


def loops(self: Any, example: Example, answers: Any) -> Any:
    while True:
        pass


def with_spans(self: Any, example: Example, answers: Sequence[GroupAnswer]) -> Any:
    return [Score(reward=1.0, span_rewards=(SpanReward(start=0, end=1, reward=1.0),)) for _ in answers]


@pytest.mark.parametrize(
    ("score_group", "run_in", "says"),
    [
        (raises, "loop", "KeyError: 'lost'"),
        (waits_for_ever, "loop", "score_group on example 'e' did not return within 0.3 s; --env-timeout-s sets"),
        (loops, "loop", "score_group on example 'e' did not return within 0.3 s"),
        (loops, "thread", "score_group on example 'e' did not return within 0.3 s"),
        (lambda self, example, answers: [1.0], "loop", "returned 1 scores, wanted one for each of 2 answers"),
        (lambda self, example, answers: ["1"] * 2, "loop", "score_group returned '1', wanted a number or a Score"),
        (
            lambda self, example, answers: [float("nan")] * 2,
            "loop",
            "the reward that score_group returned is nan, wanted a finite float32",
        ),
        (lambda self, example, answers: None, "loop", "TypeError"),
        (with_spans, "loop", "score_group returned span_rewards, which only score and step can give"),
    ],
)
def test_an_error_fails_the_episodes_of_the_group_and_names_the_environment(
    score_group: Any, run_in: str, says: str
) -> None:
    rows = sample(scored_by(score_group, run_in), ["a", "bad", "aa"], timeout_s=0.3)
    for row in (rows[0], rows[2]):
        assert str(row.error).startswith("score_group of environment own failed: ")
        assert says in str(row.error)
        assert (row.episode_reward, row.reward_components["kept"], row.terminated) == (None, 1.0, False)
        assert row.messages
    assert without_place(rows[1].error) == "KeyError: 'own'"


def test_values_that_the_schema_does_not_know_fail_the_episode() -> None:
    def score_group(self: Any, example: Example, answers: Sequence[GroupAnswer]) -> list[Score]:
        return [Score(reward=1.0, extra={"x_rank": each.group_index if each.group_index else "a"}) for each in answers]

    rows = sample(scored_by(score_group), ["a", "a", "a"], extra_columns={"x_rank": "int64"})
    assert rewards(rows) == [None, 1.0, 1.0]
    assert "x_rank" in str(rows[0].error)
    assert rows[1].extra == {"x_rank": 1}


# --- Several steps, several rows, several agents --------------------------------------------------------------------


class Steps:
    """Three steps, the first of which gives 1; each instance is one episode's."""

    run_in = "loop"  # else the first episode begins alone
    num_made = 0

    def __init__(self) -> None:
        Steps.num_made += 1
        self.num_steps = 0

    def example(self, index: int, split: str) -> Example:
        return EXAMPLE

    def reset(self, example: Example) -> tuple[Message, ...]:
        return example.messages

    def step(self, action: str) -> Transition:
        self.num_steps += 1
        return Transition(observation="more", reward=float(self.num_steps == 1), terminated=self.num_steps == 3)

    def score_group(self, example: Example, answers: Sequence[GroupAnswer]) -> list[float]:
        assert self.num_steps == 0
        return [each.reward + 10 * int(each.text) for each in answers]


@pytest.mark.parametrize("context", ["full", "window:1"])
def test_the_difference_is_added_to_the_last_step_and_to_its_last_token(context: str) -> None:
    rows = sample(Steps, ["5", "6", "5", "6", "7", "8"], group_size=2, context=context)
    assert len(rows) == (2 if context == "full" else 4)
    episodes = [[row for row in rows if row.group_index == index] for index in range(2)]
    # The engine serves both episodes in turn: 5, 5, 7 and 6, 6, 8.
    for of_episode, reward in zip(episodes, (71.0, 81.0), strict=True):
        assert rewards(of_episode) == [reward] * len(of_episode)
        steps = [step for row in of_episode for step in row.environment_steps]
        assert [step.reward for step in steps] == [1.0, 0.0, reward - 1.0]
        given = [float(reward) for row in of_episode for reward in row.token_rewards if reward]
        assert given == [1.0, reward - 1.0]
        last = of_episode[-1]
        assert last.token_rewards[last.agent_steps[-1].end - 1] == reward - 1.0


def test_agents_of_one_environment_are_answers_of_their_own() -> None:
    class Two:
        def example(self, index: int, split: str) -> Example:
            return EXAMPLE

        def reset(self, example: Example) -> dict[str, tuple[Message, ...]]:
            return {"left": example.messages, "right": example.messages}

        def next_agents(self) -> tuple[str, ...]:
            return ("left", "right")

        def step(self, actions: Any) -> dict[str, Transition]:
            return {name: Transition(observation=None, reward=0.0, terminated=True) for name in actions}

        def score_group(self, example: Example, answers: Sequence[GroupAnswer]) -> list[float]:
            assert [(each.group_index, each.agent_id) for each in answers] == [
                (index, agent_id) for index in range(2) for agent_id in ("left", "right")
            ]
            return ranks(answers)

    rows = sample(Two, ["a", "aa", "aaa", "aaaa"], group_size=2)
    assert rewards(rows) == [0.0, 1.0, 2.0, 3.0]


def test_a_sub_agent_has_the_final_reward_of_the_episode() -> None:
    script = [hermes_call("delegate", task="help"), "helped", "aaa"]
    agent = scripted_agent(script, sub_agents=(helper(),))
    config = RunConfig(model="m", env=("own",), group_size=1, max_tokens=128, sub_agents=("helper",))
    limited = LimitedEnvironments("own", scored_by(lambda self, example, answers: [7.0]))
    sampler = GroupSampler(run=config, run_episode=episodes_of_run(config, agent), environments={"own": limited})
    rows = sampler.sample([0], "worker").groups[0].rollouts
    assert [(row.depth, row.episode_reward) for row in rows] == [(0, 7.0), (1, 7.0)]


# --- In the stream ----------------------------------------------------------------------------------------------------


def test_other_groups_go_on_while_one_is_scored() -> None:
    async def main() -> None:
        may_end = {"0": asyncio.Event(), "1": asyncio.Event()}
        scored: list[str] = []

        class Waits(Question):
            def example(self, index: int, split: str) -> Example:
                return Example(example_id=str(index), messages=EXAMPLE.messages)

            async def score_group(self, example: Example, answers: Sequence[GroupAnswer]) -> list[float]:
                await may_end[example.example_id].wait()
                scored.append(example.example_id)
                return [1.0 for _ in answers]

        waits = Waits()
        sampler = sampler_of(lambda: SingleTurn(waits), scripted_agent(["a"] * 4), group_size=2)
        scheduler = Scheduler(sampler.run_episode, sampler.environments, {}, in_flight=2)
        for number in range(2):
            scheduler.start(number, sampler.episodes(number))
        may_end["1"].set()
        finished = []
        while not finished:
            finished = await scheduler.wait()
        assert [each.begun.number for each in finished] == [1]
        assert (scored, scheduler.num_open, scheduler.num_running) == (["1"], 1, 0)
        may_end["0"].set()
        finished = []
        while not finished:
            finished = await scheduler.wait()
        assert ([each.begun.number for each in finished], scheduler.num_open) == ([0], 0)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_pump_that_is_closed_gives_up_what_is_being_scored() -> None:
    async def main() -> None:
        cancelled = asyncio.Event()

        async def score_group(self: Any, example: Example, answers: Any) -> Any:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        sampler = sampler_of(scored_by(score_group), scripted_agent(["a"]), group_size=1)
        scheduler = Scheduler(sampler.run_episode, sampler.environments, {})
        scheduler.start(0, sampler.episodes(0))
        while scheduler.num_running or not scheduler.num_open:
            await scheduler.wait(0.01)
        await scheduler.close()
        await asyncio.wait_for(cancelled.wait(), 5)

    asyncio.run(asyncio.wait_for(main(), 20))


OWN = """\
import asyncio
from ludic.environments.environment import Example, Score
from ludic.records.rollout import Message


class Own:
    def example(self, index, split):
        return Example(example_id=f"{split}-{index}", messages=(Message(role="user", content="?"),))

    def score(self, example, answer):
        return Score(reward=0.0)

    async def score_group(self, example, answers):
        await asyncio.sleep(0.001)
        return [Score(reward=10.0 + a.group_index, components={"place": float(len(answers))}) for a in answers]
"""


def test_a_worker_stores_the_final_rewards(
    tmp_path: Path, run_config: Callable[..., RunConfig], work: Callable[..., int], folder: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    root = create_root(str(tmp_path / "run"), run_config(env=(f"{file}:Own",), accept_incomplete=True))
    publish(root, folder, budget=10**6)
    work(root, num_groups=3)
    rows = committed_rows(root, "group_index", "episode_reward", "reward_components", "token_rewards", "error")
    assert sorted((row["group_index"], row["episode_reward"]) for row in rows) == [(0, 10.0)] * 3 + [(1, 11.0)] * 3
    assert all(dict(row["reward_components"]) == {"place": 2.0} for row in rows)
    assert all(sum(row["token_rewards"]) == row["episode_reward"] for row in rows)
