"""Tasks that an agent hands to other agents: rows, rewards, limits, and children that fail."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from chat_models import chat_tokenizer, hermes_call, scripted_agent
from episodes import EXAMPLE, Script, end, go_on, run_episode, without_place
from gateway.scripted import Asked, ScriptedEngine, Turn

from ludic.agents.agent import Agent
from ludic.agents.contexts import make_context
from ludic.agents.delegation import SubAgent, make_sub_agents
from ludic.agents.parsers import make_parser
from ludic.engines.engine import Completion, GenerationRequest
from ludic.environments.environment import Example, Score, Transition
from ludic.errors import ConfigError, ModelError
from ludic.models.decoding import decode
from ludic.records.rollout import Message, Rollout

HELPER = SubAgent(name="helper", description="Helps.")
OTHER = SubAgent(name="other", description="Helps otherwise.", instructions="Be brief.")


class Answers(ScriptedEngine):
    """Answers each prompt by the first of its rules whose text is in the prompt's last message."""

    def __init__(self, rules: dict[str, str], delays_s: dict[str, float] | None = None) -> None:
        """delays_s: seconds for an answer, by its rule."""
        super().__init__(self._said, tokenizer=chat_tokenizer())
        self.rules, self.delays_s = rules, delays_s or {}

    def _said(self, asked: Asked) -> Turn:
        prompt = decode(chat_tokenizer(), asked.request.prompt_tokens)
        last = prompt.split("\nuser\n")[-1]
        rule = next(rule for rule in self.rules if rule in last)
        return Turn(text=self.rules[rule], delay_s=self.delays_s.get(rule, 0.01))


def delegate(task: str, **arguments: str) -> str:
    return hermes_call("delegate", task=task, **arguments)


def agent_of(engine: ScriptedEngine, *sub_agents: SubAgent, **options: Any) -> Agent:
    chosen = sub_agents or (HELPER,)
    return Agent(engine=engine, tokenizer=chat_tokenizer(), model="scripted", sub_agents=chosen, **options)


def by_agent(rows: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    found: dict[str, list[Rollout]] = {}
    for row in rows:
        found.setdefault(row.agent_id, []).append(row)
    return found


RULES = {"begin": delegate("add 1 and 2"), "add 1 and 2": "3", "3": "it is 3"}


def test_a_task_is_answered_by_an_agent_that_sees_nothing_else() -> None:
    engine = Answers(RULES)
    rows = run_episode(agent_of(engine), Script([end(1.0)]))
    (parent,), (child,) = by_agent(rows)["agent"], by_agent(rows)["helper"]
    assert [message.content for message in child.messages] == ["add 1 and 2", "3"]
    assert [message.role for message in parent.messages] == ["user", "assistant", "tool", "assistant"]
    assert (child.episode_id, child.parent_rollout_id, child.depth) == (parent.episode_id, parent.rollout_id, 1)
    assert (parent.parent_rollout_id, parent.depth) == (None, 0)
    first, last = parent.agent_steps
    assert (first.action_target, last.action_target, first.action, last.action) == ("external", "env", None, "it is 3")
    assert [(call.name, call.result, call.error) for call in first.tool_calls] == [("delegate", "3", None)]
    (step,) = child.environment_steps
    assert (step.observation, step.action, step.terminated) == ("add 1 and 2", "3", True)
    # Without a score of its own, the child has the reward of the episode.
    assert (parent.episode_reward, child.episode_reward) == (1.0, 1.0)
    assert len({sample.request.seed for sample in engine.log}) == 3


def test_several_tasks_of_one_completion_run_side_by_side() -> None:
    tasks = ["first task", "second task", "third task"]
    rules = {"begin": "\n".join(map(delegate, tasks)), **dict.fromkeys(tasks, "done"), "done": "all done"}
    engine = Answers(rules, dict.fromkeys(tasks, 0.1))
    rows = by_agent(run_episode(agent_of(engine), Script([end()])))
    assert engine.most_running == 3
    assert [row.messages[0].content for row in rows["helper"]] == tasks
    assert {row.parent_rollout_id for row in rows["helper"]} == {rows["agent"][0].rollout_id}


def test_siblings_are_trajectories_of_their_own() -> None:
    rules = {"begin": delegate("add") + delegate("take"), "add": "3", "take": "4", "": "it is 7"}
    rows = run_episode(agent_of(Answers(rules)), Script([end(1.0)]))
    assert len(by_agent(rows)["helper"]) == 2
    assert [row.trajectory_id for row in rows] == [row.rollout_id for row in rows]


def test_all_rows_of_an_agent_are_one_trajectory() -> None:
    agent = scripted_agent(["a", "b", "summary", "c"], make_context=make_context("summary:2"))
    rows = run_episode(agent, Script([go_on("1", 1.0), go_on("2", 2.0), end(0.0)]))
    assert len(rows) == 2
    assert [row.trajectory_id for row in rows] == [rows[0].rollout_id] * 2


def test_the_model_chooses_among_sub_agents() -> None:
    rules = {"begin": delegate("work", agent="other"), "work": "yes", "yes": "end"}
    rows = by_agent(run_episode(agent_of(Answers(rules), HELPER, OTHER), Script([end()])))
    assert set(rows) == {"agent", "other"}
    assert rows["other"][0].messages[0] == Message(role="system", content="Be brief.")
    prompt = decode(chat_tokenizer(), rows["agent"][0].prompt_tokens)
    assert "helper: Helps.; other: Helps otherwise." in prompt


@dataclass
class Scores:
    """Environment that scores delegated tasks."""

    seen: list[tuple[str, str, str]] = field(default_factory=list)

    def example(self, index: int, split: str) -> Example:
        return EXAMPLE

    def reset(self, example: Example) -> tuple[Message, ...]:
        return example.messages

    def step(self, action: str) -> Transition:
        return end(1.0)

    def score_task(self, agent_id: str, task: str, answer: str) -> Score:
        self.seen.append((agent_id, task, answer))
        return Score(reward=0.25, components={"right": 1.0})


def test_an_environment_may_score_tasks() -> None:
    environment = Scores()
    rows = by_agent(run_episode(agent_of(Answers(RULES)), environment))
    assert environment.seen == [("helper", "add 1 and 2", "3")]
    (child,) = rows["helper"]
    assert (child.episode_reward, child.reward_components) == (0.25, {"right": 1.0})
    assert child.token_rewards[-1] == 0.25
    assert rows["agent"][0].episode_reward == 1.0


def test_a_sub_agent_has_its_own_parser_and_tools() -> None:
    def double(number: int) -> int:
        """Double a number.

        Args:
            number: The number.
        """
        return 2 * number

    call = hermes_call("double", number=21)
    sub_agent = SubAgent(name="helper", description="Doubles.", parser="tag:answer", tools=[double])
    rules = {"begin": delegate("double 21"), "double 21": call, "42": "<answer>42</answer>"}
    rows = by_agent(run_episode(agent_of(Answers(rules), sub_agent), Script([end()])))
    (child,) = rows["helper"]
    assert [step.action_target for step in child.agent_steps] == ["internal", "env"]
    assert child.agent_steps[1].action == "42"
    (parent,) = rows["agent"]
    assert parent.agent_steps[0].tool_calls[0].result == "42"
    assert parent.agent_steps[1].action == "<answer>42</answer>"  # the run's parser is another


def test_a_child_may_hand_on_tasks_down_to_max_depth() -> None:
    rules = {"begin": delegate("outer"), "outer": delegate("inner"), "inner": "deep", "deep": "deep and done"}
    rows = run_episode(agent_of(Answers(rules)), Script([end(0.5)]), max_depth=2)
    assert [row.depth for row in rows] == [0, 1, 2]
    assert [row.parent_rollout_id for row in rows] == [None, rows[0].rollout_id, rows[1].rollout_id]
    assert [row.episode_reward for row in rows] == [0.5, 0.5, 0.5]
    # At the largest depth an agent has no such tool, so its text is its answer.
    rows = run_episode(agent_of(Answers({**rules, "tool_call": "end"})), Script([end(0.5)]), max_depth=1)
    assert [row.depth for row in rows] == [0, 1]


def failing_calls(rows: Sequence[Rollout]) -> list[str]:
    return [call.error or "" for step in rows[0].agent_steps for call in step.tool_calls if call.error]


def test_limits_are_told_to_the_parent() -> None:
    rules = {"begin": "\n".join([delegate("work")] * 3), "work": "done", "Error": "end", "done": "end"}
    rows = run_episode(agent_of(Answers(rules)), Script([end()]), max_children=2)
    assert failing_calls(rows) == ["no more tasks can be handed on: 2 were, which is the limit"]
    assert len(rows) == 3

    rows = run_episode(agent_of(Answers(rules)), Script([end()]), max_child_tokens=5)
    errors = failing_calls(rows)
    assert errors
    assert all("are used up or reserved" in error for error in errors)
    assert sum(row.action_length for row in rows[1:]) <= 5
    assert "budget" not in {row.truncation_reason for row in rows[:1]}


def test_a_child_that_runs_out_of_tokens_is_truncated() -> None:
    sub_agent = SubAgent(name="helper", description="Helps.", parser="tag:answer", max_steps=9)
    rules = {"begin": delegate("work"), "work": "no tag", "answer": "no tag", "Error": "end"}
    rows = run_episode(agent_of(Answers(rules), sub_agent), Script([end()]), max_child_tokens=10)
    child = rows[1]
    assert (child.truncation_reason, child.terminated) == ("budget", False)
    assert failing_calls(rows) == [
        "the agent gave no answer: the tokens for tasks that are handed on are used up or reserved"
    ]


def test_a_child_without_an_answer_is_truncated_at_its_max_steps() -> None:
    sub_agent = SubAgent(name="helper", description="Helps.", parser="tag:answer", max_steps=2)
    rules = {"begin": delegate("work"), "work": "no tag", "answer": "no tag", "Error": "end"}
    rows = run_episode(agent_of(Answers(rules), sub_agent), Script([end(1.0)]))
    assert (rows[1].truncation_reason, rows[1].num_turns, rows[1].episode_reward) == ("max_steps", 2, 1.0)
    assert failing_calls(rows) == ["the agent gave no answer: the agent has made 2 steps"]


def test_a_failed_child_is_reported_and_its_row_is_kept() -> None:
    class Raises:
        def parse(self, text: str) -> Any:
            raise KeyError(text)

    sub_agent = SubAgent(name="helper", description="Helps.", parser=Raises())
    rules = {"begin": delegate("work"), "work": "text", "Error": "end"}
    rows = run_episode(agent_of(Answers(rules), sub_agent), Script([end(1.0)]))
    assert failing_calls(rows) == ["the agent failed: KeyError: 'text'"]
    assert (rows[0].error, rows[0].episode_reward) == (None, 1.0)
    assert (without_place(rows[1].error), rows[1].episode_reward) == ("KeyError: 'text'", None)


def test_an_error_of_the_engine_is_no_answer() -> None:
    """The engine fails in the child's second call."""

    class Fails(Answers):
        async def generate(self, request: GenerationRequest) -> Completion:
            if len(self.log) == 2:
                raise ModelError("the weights are gone")
            return await super().generate(request)

    sub_agent = SubAgent(name="helper", description="Helps.", parser="tag:answer")
    rules = {"begin": delegate("work"), "work": "no tag", "Error": "end"}
    with pytest.raises(ModelError, match="the weights are gone"):
        run_episode(agent_of(Fails(rules), sub_agent), Script([end(1.0)]))


def test_an_unknown_tool_is_answered_with_delegate_too() -> None:
    rules = {"begin": hermes_call("delegat", task="work"), "Error": "end"}
    rows = run_episode(agent_of(Answers(rules)), Script([end()]))
    assert failing_calls(rows) == ["tool 'delegat' is unknown; did you mean 'delegate'? There are delegate"]


def test_the_rows_of_a_failed_episode_have_no_reward() -> None:
    rows = run_episode(agent_of(Answers(RULES)), Script([ValueError("no")]))
    assert [without_place(row.error) for row in rows] == ["ValueError: no", "the episode failed: ValueError: no"]
    assert [row.episode_reward for row in rows] == [None, None]


def test_the_time_limit_ends_parent_and_children() -> None:
    engine = Answers({"begin": delegate("work"), "work": "no tag", "answer": "late"}, {"answer": 100})
    sub_agent = SubAgent(name="helper", description="Helps.", parser="tag:answer")
    rows = run_episode(agent_of(engine, sub_agent), Script([go_on()]), timeout_s=0.5)
    assert [(row.agent_id, row.truncation_reason) for row in rows] == [
        ("agent", "time_limit"),
        ("helper", "time_limit"),
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"task": "work", "agent": "nobody"}, "'nobody' is not one of ['helper']"),
        ({}, "'task' is a required property"),
        ({"task": ""}, "should be non-empty"),
    ],
)
def test_a_wrong_call_is_answered(arguments: dict[str, str], error: str) -> None:
    rows = run_episode(
        agent_of(Answers({"begin": hermes_call("delegate", **arguments), "Error": "end"})), Script([end()])
    )
    assert len(rows) == 1
    assert error in failing_calls(rows)[0]


OWN = """\
from ludic.agents.delegation import SubAgent


def solver():
    return SubAgent(name="solver", description="Solves.", parser="boxed", tools=["calculator"])


def wrong():
    return 3


def unknown_tool():
    return SubAgent(name="solver", description="Solves.", tools=["calculater"])


def own_parser():
    return SubAgent(name="solver", description="Solves.", parser="own.py:Parser")


def delegate() -> str:
    'Hand on.'


def own_delegate():
    return SubAgent(name="solver", description="Solves.", tools=[delegate])
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_sub_agents_are_found_by_name(own: str) -> None:
    first, second = make_sub_agents(["helper", f"{own}:solver"])
    assert (first.name, second.name) == ("helper", "solver")
    equipped = second.equip(agent_of(Answers({}), parser=make_parser("whole")))
    assert equipped.parser.parse(r"\boxed{3}").action == "3"
    assert "calculator" in equipped.toolbox


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["helpr"], "did you mean 'helper'"),
        (["helper", "helper"], "two sub-agents are named 'helper'"),
        (["{own}:nobody"], "has no class or function 'nobody'"),
        (["{own}:wrong"], "int has no method 'equip'"),
        (["{own}:unknown_tool"], "wanted calculator or python, a function or a Tool"),
        (["{own}:own_parser"], "a sub-agent's parser is 'own.py:Parser', wanted the name of a built-in one"),
        (["{own}:own_delegate"], "a tool of its own is named 'delegate'; rename it"),
        (["none.py:solver"], "there is no file"),
    ],
)
def test_a_wrong_name_is_answered_with_what_there_is(own: str, names: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_sub_agents([name.format(own=own) for name in names])
    assert message in str(refused.value)
