"""docs/agents.md: its environment plays, and its questions in SQL are answered by a store of such episodes."""

import re
from pathlib import Path

import pytest
from chat_models import hermes_call, scripted_agent
from episodes import Script, end, go_on, run_episode
from guide_examples import GUIDE, example, judge_of_safes

import ludic
from ludic.agents.delegation import make_sub_agents
from ludic.agents.episode import make_protocol
from ludic.agents.parsers import make_parser
from ludic.agents.tools.registry import make_tools
from ludic.agents.tools.toolbox import Toolbox
from ludic.environments.registry import make_environment
from ludic.records.rollout import RolloutBatch, RolloutGroup, RolloutMetadata
from ludic.rollouts.sampler import GroupSampler
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root

QUESTIONS = dict(re.findall(r"\n([^\n]+):\n\n```sql\n(.*?)```", GUIDE, re.DOTALL))

ADD = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
DIVIDE = '<tool_call>{"name": "calculator", "arguments": {"expression": "1//0"}}</tool_call>'


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A root with one episode that terminates, after tools and a parse failure, and one that max_steps truncates."""
    toolbox = Toolbox(make_tools(("calculator",)))
    parser = make_parser("regex:[0-9]+")
    first = run_episode(
        scripted_agent([ADD, DIVIDE, "two", "2"], toolbox=toolbox, parser=parser), Script([end()]), max_tokens=128
    )
    second = run_episode(
        scripted_agent(["1", "2"]), Script([go_on("go on now"), go_on()]), max_steps=2, max_observation_characters=5
    )
    url = str(tmp_path_factory.mktemp("runs") / "mine")
    root = create_root(url, RunConfig(model="m", env=("script",)))
    groups = tuple(RolloutGroup(key="script", rollouts=tuple(rows)) for rows in (first, second))
    with RolloutWriter(root, "w0-test") as writer:
        for group in groups:
            writer.append(RolloutBatch(groups=(group,), metadata=RolloutMetadata(worker_id="w0-test")))
            writer.flush()
    return url


def answer(url: str, question: str) -> list[tuple]:
    return (
        ludic.connect(url).sql(next(sql for title, sql in QUESTIONS.items() if title.startswith(question))).fetchall()
    )


def test_how_episodes_end(url: str) -> None:
    assert sorted(answer(url, "How episodes end"), key=str) == [
        ("script", "max_steps", False, 1),
        ("script", None, False, 1),
    ]


def test_parse_failures_by_turn(url: str) -> None:
    assert answer(url, "Parse failures") == [(0, 0.0, 2), (1, 0.0, 2), (2, 1.0, 1), (3, 0.0, 1)]


def test_observations_that_were_cut(url: str) -> None:
    assert answer(url, "Observations that were cut") == [("script", 1, 4)]


def test_tool_errors_by_tool(url: str) -> None:
    assert answer(url, "Tool errors") == [("calculator", 2, 1)]


def test_reward_by_depth(url: str) -> None:
    assert answer(url, "Reward by depth") == [(0, 0.75, 2)]


def test_tokens_and_cost_by_agent(url: str) -> None:
    ((agent_id, tokens, sampled, dollars),) = answer(url, "Tokens by agent")
    assert (agent_id, dollars) == ("agent", sampled * 2e-6)
    assert 0 < sampled < tokens


def test_every_question_is_answered_here() -> None:
    assert len(QUESTIONS) == GUIDE.count("```sql") == 6


def test_the_guides_environment_plays(tmp_path: Path) -> None:
    make = make_environment(example(tmp_path, "Echo"))
    (row,) = run_episode(scripted_agent(["meow", "woof", " meow"]), make)
    assert (row.num_turns, row.episode_reward, row.truncation_reason) == (3, 2.0, "max_steps")


def test_the_guides_game_of_two_plays(tmp_path: Path) -> None:
    make = make_environment(example(tmp_path, "RockPaperScissors"))
    rows = run_episode(scripted_agent(["rock", "paper"]), make)
    assert {row.agent_id: row.episode_reward for row in rows} == {"left": -1.0, "right": 1.0}


def test_the_guides_sub_agent_solves(tmp_path: Path) -> None:
    sub_agents = make_sub_agents([example(tmp_path, "solver")])
    script = [hermes_call("delegate", task="1 + 1"), ADD, r"\boxed{2}", "it is 2"]
    parent, child = run_episode(scripted_agent(script, sub_agents=sub_agents), Script([end()]), max_tokens=128)
    assert parent.agent_steps[0].tool_calls[0].result == "2"
    assert [step.action_target for step in child.agent_steps] == ["internal", "env"]


def test_the_guides_environment_with_tools_and_a_judge_plays(tmp_path: Path) -> None:
    name = example(tmp_path, "Safe")
    with judge_of_safes() as url:
        make = make_environment(name, {"judge_url": url})
        script = [hermes_call("turn", to=1), hermes_call("read"), hermes_call("turn", to=3), "cats"]
        (row,) = run_episode(scripted_agent(script), make, example=make().example(3, "train"), max_tokens=128)
    results = [call.result for step in row.agent_steps for call in step.tool_calls]
    assert results == ["It stays shut.", "The number is 3.", "It holds cats."]
    assert (row.error, row.episode_reward) == (None, 1.0)


def test_the_guides_protocol_revises(tmp_path: Path) -> None:
    protocol = make_protocol(example(tmp_path, "revise"))
    environment = Script([end()])
    (row,) = run_episode(scripted_agent(["draft", "better"]), environment, protocol)
    assert (environment.actions, row.num_turns) == (["better"], 2)
    make = make_environment("word_problems")
    problem = make().example(0, "train")
    (row,) = run_episode(scripted_agent(["draft", str(problem.data["result"])]), make, protocol, example=problem)
    assert (row.episode_reward, row.terminated) == (1.0, True)


def test_the_rhymes_of_the_page_are_scored_together(tmp_path: Path) -> None:
    run = RunConfig(model="m", env=(example(tmp_path, "Rhymes"),), group_size=4, max_tokens=64)
    sampler = GroupSampler.of_run(run, scripted_agent(["bat", "hat", "bat", "dog"]))
    rows = sampler.sample([0], "worker").groups[0].rollouts
    assert [row.episode_reward for row in rows] == [0.5, 1.0, 0.5, 0.0]
    assert rows[0].reward_components == {"novelty": 0.5}
