"""Rewards are added by `add_rewards`, which rounds once, and compared by `comparable_reward`."""

import ast
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_models import scripted_agent
from episodes import Script, end, go_on, run_episode
from strategies import make_group

import ludic
from ludic.agents.episode_agent import merge
from ludic.environments.environment import Example, GroupAnswer
from ludic.environments.rewards import Rubric
from ludic.records.rollout import RolloutBatch, RolloutMetadata, add_components, add_rewards, comparable_reward
from ludic.rollouts.metrics import stream_metrics

EXAMPLE = Example(example_id="e", messages=(), data={"columns": {}})
PACKAGE = Path(ludic.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
REWARD = re.compile(r"(?<!num_)(reward|weighted\.values|components\.values)")
NUMBERS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
ALLOWED = {
    "sum(rewards)": "records/rollout.py",  # add_rewards itself, of a sum that is not finite
    "sum((rollout.episode_reward is None for rollout in rollouts))": "adapters/imports/importing.py",  # a count
    "sum(map(_has_equal_rewards, groups))": "rollouts/metrics.py",  # a count
}


def is_reward(node: ast.expr) -> bool:
    """A variable, an attribute or a key that is one reward, or a sum or an extreme of several."""
    text = "" if isinstance(node, ast.Constant) else ast.unparse(node)
    return (
        re.fullmatch(r"(max|min|sum|float)?\(?[\w.\[\]'\"]*(?<!num_)(?<!token_)(reward|rewards)['\"\])]*", text)
        is not None
    )


def by_hand(text: str) -> Iterator[str]:
    """Sums and comparisons of rewards in a module that do not use the functions for it."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Name(id="sum")) if REWARD.search(ast.unparse(node)):
                yield ast.unparse(node)
            case ast.AugAssign(op=ast.Add()) if is_reward(node.target) or is_reward(node.value):
                yield ast.unparse(node)
            case ast.BinOp(op=ast.Add()) if is_reward(node.left) or is_reward(node.right):
                yield ast.unparse(node)
            case ast.Compare() if any(isinstance(each, NUMBERS) for each in node.ops):
                if any(map(is_reward, [node.left, *node.comparators])):
                    yield ast.unparse(node)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_module_adds_or_compares_rewards_by_hand(file: Path) -> None:
    name = file.relative_to(PACKAGE).as_posix()
    assert [each for each in by_hand(file.read_text()) if ALLOWED.get(each) != name] == []


@pytest.mark.parametrize("code", ["total += step.reward", "x = row['reward'] == 1", "sum(r.reward for r in rows)"])
def test_rewards_that_are_added_or_compared_by_hand_are_found(code: str) -> None:
    assert list(by_hand(code))


@pytest.mark.parametrize("parts", [[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1] * 10])
def test_parts_of_a_whole_add_up_to_it_wherever_rewards_are_added(parts: list[float]) -> None:
    assert sum(parts) != 1.0
    assert add_rewards(parts) == comparable_reward(sum(parts)) == 1.0
    assert add_components({"right": part} for part in parts) == {"right": 1.0}
    names = [f"part{number}" for number in range(len(parts))]
    rubric = Rubric({name: (lambda completion: 1.0, weight) for name, weight in zip(names, parts, strict=True)})
    assert rubric.score(EXAMPLE, "x").reward == 1.0
    groups = {
        name: (lambda completions: [1.0] * len(completions), weight) for name, weight in zip(names, parts, strict=True)
    }
    answer = GroupAnswer(text="x", reward=0.0, components={}, messages=(), group_index=0, agent_id="agent")
    assert [score.reward for score in Rubric(groups).score_group(EXAMPLE, [answer, answer])] == [1.0, 1.0]
    transitions = [go_on(reward=part, reward_components={"right": part}) for part in parts]
    merged = merge(transitions)
    assert merged is not None
    assert (merged.reward, merged.reward_components) == (1.0, {"right": 1.0})


@pytest.mark.parametrize("parts", [[0.7, 0.2, 0.1], [0.1] * 10])
def test_the_steps_of_an_episode_add_up(parts: list[float]) -> None:
    *first, last = parts
    script = [go_on(reward=part, reward_components={"right": part}) for part in first]
    agent = scripted_agent(["x"] * len(parts))
    rows = run_episode(agent, Script([*script, end(last, reward_components={"right": last})]))
    assert {row.episode_reward for row in rows} == {1.0}
    assert rows[-1].reward_components == {"right": 1.0}


def test_groups_of_equal_sums_have_equal_rewards() -> None:
    group = make_group(rewards=[0.7 + 0.2 + 0.1, 1.0])
    batch = RolloutBatch(groups=(group,), metadata=RolloutMetadata(worker_id="w"))
    (row,) = stream_metrics(batch, wait_s=0.0, step_s=1.0, policy_version=0)
    assert row["num_zero_variance_groups"] == 1


def test_a_sum_that_is_not_finite_is_no_error() -> None:
    assert add_rewards([1e308, 1e308]) == math.inf
    assert math.isnan(add_rewards([math.inf, -math.inf]))
