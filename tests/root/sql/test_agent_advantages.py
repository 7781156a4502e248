"""Advantages of episodes with several rows and children, against numbers worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from chat_models import scripted_agent
from episodes import Script, end, go_on, run_episode
from hypothesis import given, settings
from hypothesis import strategies as st
from root.sql.conftest import connection
from strategies import changed, make_group

from ludic.agents.contexts import make_context
from ludic.agents.parsers import make_parser
from ludic.agents.tools.registry import function_tool
from ludic.agents.tools.toolbox import Toolbox
from ludic.environments.environment import Example
from ludic.records.conversion import to_table
from ludic.records.rollout import (
    AgentStep,
    EnvironmentStep,
    Message,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
    ToolCall,
)
from ludic.root.sql.library import advantages
from ludic.root.sql.planner import BatchRules, Planner

HALF = sqrt(0.5)
"""Of two values, each is this many sample standard deviations from their mean."""
TINY = 1e-12
"""An epsilon that keeps a group of one from dividing by 0."""
_TEMPLATE = make_group(rewards=[0.0], response_length=1, seed=0).rollouts[0]


def row(rollout_id: str, episode_id: str, reward: float | None, **fields: Any) -> Rollout:
    """A row without turns, of one token: by default of the root agent `main`."""
    return changed(
        _TEMPLATE,
        rollout_id=rollout_id,
        episode_id=episode_id,
        episode_reward=reward,
        **{"agent_id": "main", "agent_steps": (), "environment_steps": (), **fields},
    )


def child(rollout_id: str, parent: Rollout, reward: float | None, agent_id: str = "solver", **fields: Any) -> Rollout:
    delegated = {"agent_id": agent_id, "parent_rollout_id": parent.rollout_id, "depth": parent.depth + 1}
    return row(rollout_id, parent.episode_id, reward, **delegated, **fields)


def with_turns(
    rollout: Rollout, rewards: Sequence[float], *, tools: Sequence[Sequence[ToolCall]] = (), parse_error: bool = False
) -> Rollout:
    """Two sampled tokens a turn, the second with the reward, and a third between turns from the environment."""
    length, calls = 3 * len(rewards), tools or [()] * len(rewards)
    token_rewards = np.zeros(length, np.float32)
    token_rewards[1::3] = rewards
    agent_steps = [
        AgentStep(
            turn=i, action_target="env", start=3 * i, end=3 * i + 2, tool_calls=tuple(calls[i]), parse_error=parse_error
        )
        for i in range(len(rewards))
    ]
    environment_steps = [
        EnvironmentStep(
            turn=i,
            agent_steps=(i,),
            observation=None,
            action=None,
            next_observation=None,
            reward=reward,
            terminated=False,
            truncated=False,
        )
        for i, reward in enumerate(rewards)
    ]
    return changed(
        rollout,
        response_tokens=np.ones(length, np.int32),
        response_logprobs=np.zeros(length, np.float32),
        token_rewards=token_rewards,
        action_mask=None,
        agent_steps=tuple(agent_steps),
        environment_steps=tuple(environment_steps),
    )


def with_hashes(table: pa.Table, hashes: dict[str, Sequence[str | None]]) -> pa.Table:
    """The table with observation_hash in each environment step; null for rollouts that are not named."""
    steps, field = table["environment_steps"], table.schema.field("environment_steps")
    fields = [each for each in field.type.value_type if each.name != "observation_hash"]
    type_ = pa.list_(pa.struct([*fields, pa.field("observation_hash", pa.string())]))
    rows = [
        [
            {**dict(step), "observation_hash": hashes.get(rollout_id, [None] * len(of_row))[i]}
            for i, step in enumerate(of_row)
        ]
        for rollout_id, of_row in zip(table["rollout_id"].to_pylist(), steps.to_pylist(), strict=True)
    ]
    return table.set_column(table.column_names.index("environment_steps"), "environment_steps", pa.array(rows, type_))


def estimate(
    name: str, *groups: Sequence[Rollout], hashes: dict[str, Sequence[str | None]] | None = None, **params: Any
) -> dict[str, Any]:
    """The advantage, or the list of them, by rollout_id. hashes: of the observations of each row's steps."""
    batch = [
        RolloutGroup(key=f"g{i}", rollouts=tuple(replace(r, group_id=f"g{i}") for r in g)) for i, g in enumerate(groups)
    ]
    table = to_table(
        RolloutBatch(groups=tuple(batch), metadata=RolloutMetadata(worker_id="worker")), run_id="run", sequence=0
    )
    con = connection()
    con.register("rollouts", table if hashes is None else with_hashes(table, hashes))
    found = advantages(con, name, **params)
    return dict(zip(*(found[column].to_pylist() for column in found.column_names), strict=True))


def test_turn_returns_go_on_over_the_rows_of_an_episode():
    # discount 1/2: episode a returns 1 + 2/2 and 2, b returns 3; means of turns 0 and 1 are (2 + 3)/2 and 2
    rows = [
        with_turns(row("a", "A", 3.0), [1]),
        with_turns(row("a-later", "A", 3.0, segment_index=1), [2]),
        with_turns(row("b", "B", 3.0), [3]),
        with_turns(child("b-child", row("b", "B", 3.0), 9.0), [9]),
    ]
    found = estimate("turn_returns", rows, discount=0.5)
    assert found == {"a": [-0.5, -0.5, 0], "a-later": [0, 0, 0], "b": [0.5, 0.5, 0], "b-child": [0, 0, 0]}


def test_turn_returns_keep_siblings_apart_and_join_the_rows_of_an_only_child():
    a, b = row("a", "A", 1.0), row("b", "B", 1.0)
    rows = [
        a,
        with_turns(child("a-child", a, 4.0), [4]),
        with_turns(child("a-sibling", a, 2.0), [2]),
        b,
        with_turns(child("b-child", b, 6.0), [1]),
        with_turns(child("b-child-later", b, 6.0, segment_index=1), [5]),
    ]
    # first turns return 4, 2 and 1 + 5, of mean 4; the second returns 5, alone
    found = estimate("turn_returns", rows)
    assert [found[name][0] for name in ("a-child", "a-sibling", "b-child", "b-child-later")] == [0, -2, 2, 0]


def test_mt_grpo_adds_the_advantage_of_a_turn_to_that_of_the_outcome():
    # outcomes 2 and 0, turns before the last 1 and 0: each is half a root of deviations from its mean
    rows = [
        with_turns(row("a", "A", 3.0), [1]),
        with_turns(row("a-later", "A", 3.0, segment_index=1), [2]),
        with_turns(row("b", "B", 0.0), [0, 0]),
        with_turns(child("b-child", row("b", "B", 0.0), 9.0), [7, 9]),
        row("c", "C", None),
    ]
    found = estimate("mt_grpo", rows, turn_weight=2.0, epsilon=TINY)
    assert found.pop("c") is None
    both = 3 * HALF
    wanted = {
        "a": [both, both, HALF],
        "a-later": [HALF] * 3,
        "b": [-both, -both, -HALF, -HALF, -HALF, -HALF],
        "b-child": [0] * 6,
    }
    assert {name: pytest.approx(values, abs=1e-6) for name, values in wanted.items()} == found


def test_mt_grpo_of_episodes_of_one_turn_is_grpo():
    rows = [with_turns(row(name, name, reward), [reward]) for name, reward in [("a", 1.0), ("b", 0.0), ("c", 0.5)]]
    found = estimate("mt_grpo", [*rows, row("d", "d", 0.5)], epsilon=TINY)
    # mean .5, deviation sqrt(.5 / 3); an episode without environment steps has its reward as outcome
    one = 0.5 / sqrt(0.5 / 3)
    assert [found[name][0] for name in "abcd"] == pytest.approx([one, -one, 0, 0])


HASHES = {"a": ["s"], "a-later": ["t"], "b": ["s", "u"], "b-child": ["s"]}


def gigpo_rows() -> list[Rollout]:
    b = with_turns(row("b", "B", 0.0), [0, 0])
    later = with_turns(row("a-later", "A", 1.0, segment_index=1), [1])
    return [with_turns(row("a", "A", 1.0), [0]), later, b, with_turns(child("b-child", b, 1.0), [1])]


def test_gigpo_adds_the_advantage_among_steps_from_one_observation():
    # state s of agent main: returns 0 + 1/2 and 0; t and u are seen once; the child is another agent
    found = estimate("gigpo", gigpo_rows(), hashes=HASHES, discount=0.5, step_weight=2.0, epsilon=TINY)
    both = 3 * HALF
    wanted = {
        "a": [both, both, HALF],
        "a-later": [HALF] * 3,
        "b": [-both, -both, -HALF, -HALF, -HALF, -HALF],
        "b-child": [0, 0, 0],
    }
    assert {name: pytest.approx(values, abs=1e-6) for name, values in wanted.items()} == found


def test_gigpo_without_deviations_subtracts_means_alone():
    # episodes: 1/2 and -1/2; steps at s: 1/4 and -1/4
    found = estimate("gigpo", gigpo_rows(), hashes=HASHES, discount=0.5, divide_by_std=False)
    assert found["a"] == [0.75, 0.75, 0.5]
    assert found["a-later"] == [0.5] * 3
    assert found["b"] == [-0.75, -0.75, -0.5, -0.5, -0.5, -0.5]


def test_gigpo_without_hashes_is_the_advantage_of_the_episode():
    found = estimate("gigpo", gigpo_rows(), hashes={}, epsilon=TINY)
    assert found["a"] == pytest.approx([HALF] * 3)
    assert found["b"] == pytest.approx([-HALF] * 6)


def test_gigpo_compares_every_visit_of_a_state_also_of_one_episode():
    # returns 3, 2 and 1 at the same state, of mean 2
    found = estimate("gigpo", [with_turns(row("a", "A", 3.0), [1, 1, 1])], hashes={"a": ["s"] * 3}, discount=1.0)
    assert found["a"] == pytest.approx([1, 1, 0, 0, 0, 0, -1, -1, 0], abs=1e-4)


def plan_one(planner: Planner, step: int) -> list[float]:
    ledger = planner.plan(step=step, attempt_id=1, trainer_version=0)
    assert ledger is not None
    return ledger["advantage"].to_pylist()


def test_rae_goes_on_over_the_batches_of_a_planner(arrive):
    # decay 1/2: averages before 0, 1/2 and 3/4; an episode of a later request does not count yet
    planner = Planner(BatchRules(advantage="rae", groups_per_batch=1, params={"decay": 0.5}))
    for arrival, request_index in enumerate([5, 6, 7, 4]):
        planner.add(arrive([[1.0]], arrival=arrival, request_index=[request_index]))
    assert [plan_one(planner, step) for step in (1, 2, 3, 4)] == [[1.0], [0.5], [0.25], [1.0]]


def test_an_advantage_sees_as_many_rows_of_earlier_batches_as_its_history_says(arrive, tmp_path):
    sql = tmp_path / "counts.sql"
    sql.write_text("-- history: 2\nselect rollout_id, (select count(*) from rollouts) as advantage from rollouts")
    planner = Planner(BatchRules(advantage=str(sql), groups_per_batch=1))
    for arrival in range(4):
        planner.add(arrive([[1.0]], arrival=arrival))
    assert [plan_one(planner, step) for step in (1, 2, 3, 4)] == [[1.0], [2.0], [3.0], [3.0]]


def test_rae_does_not_count_a_group_that_is_used_again_twice(arrive):
    planner = Planner(BatchRules(advantage="rae", groups_per_batch=1, max_uses=2, params={"decay": 0.5}))
    planner.add(arrive([[1.0]]))
    assert [plan_one(planner, step) for step in (1, 2)] == [[1.0], [1.0]]


@pytest.mark.slow
@settings(max_examples=20)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=50), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_rae_is_the_recursion(rewards: list[float], decay: float):
    rows = [replace(row(f"r{i}", f"e{i}", reward), request_index=i) for i, reward in enumerate(rewards)]
    wanted, average = {}, 0.0
    for i, reward in enumerate(rewards):
        wanted[f"r{i}"] = reward - average
        average = decay * average + (1 - decay) * reward
    assert estimate("rae", rows, decay=decay) == pytest.approx(wanted, abs=1e-12)


def with_first_completion(rollout: Rollout, token: int) -> Rollout:
    """Two turns of which the first samples this token twice, and the second the reward."""
    rollout = with_turns(rollout, [0, 0])
    return changed(rollout, response_tokens=np.array([token, token, 0, 9, token, 0], np.int32))


def test_tree_grpo_adds_the_advantage_in_the_tree_to_that_in_the_group():
    # trees: 1 and 0; 1 and 1 and 0; group: 1, 0, 1, 1, 0 of mean .6 and deviation sqrt(1.2 / 4)
    rewards = {"a": (7, 1.0), "b": (7, 0.0), "c": (8, 1.0), "d": (8, 1.0), "e": (8, 0.0)}
    rows = [with_first_completion(row(name, name, reward), token) for name, (token, reward) in rewards.items()]
    later = with_turns(row("a-later", "a", 1.0, segment_index=1), [1])
    alone = with_first_completion(child("a-child", rows[0], 5.0), 7)
    found = estimate("tree_grpo", [*rows, later, alone], epsilon=TINY)
    deviation, third = sqrt(0.3), sqrt(1 / 3)
    high, low = 0.4 / deviation, -0.6 / deviation
    assert found == pytest.approx(
        {
            "a": HALF + high,
            "a-later": HALF + high,
            "b": -HALF + low,
            "c": third + high,
            "d": third + high,
            "e": -2 * third + low,
            "a-child": 0,
        }
    )


def test_tree_grpo_tells_completions_apart_that_differ_by_a_zero_at_their_start():
    # token 0 is "!" in many vocabularies; [0, 5] and [5] are trees of one trajectory each, which add nothing
    def first(name: str, reward: float, tokens: list[int]) -> Rollout:
        found = with_turns(row(name, name, reward), [0, 0])
        steps = (replace(found.agent_steps[0], start=0, end=len(tokens)), *found.agent_steps[1:])
        return changed(found, response_tokens=np.array([*tokens, 9, 9, 9, 9, 9, 9][:6], np.int32), agent_steps=steps)

    found = estimate("tree_grpo", [first("a", 1.0, [0, 5]), first("b", 0.0, [5])], epsilon=TINY)
    assert found == pytest.approx({"a": HALF, "b": -HALF})


def test_fold_grpo_takes_penalties_from_the_reward_by_turn():
    # prompts of 8 tokens: 8 + 6 are more than half of 20, so that root a should have delegated in its second turn
    delegate, failed = ToolCall(id="1", name="delegate", arguments="{}"), ToolCall(id="2", name="x", arguments="")
    a, b = row("a", "A", 1.0), row("b", "B", 0.0)
    rows = [
        with_turns(a, [0, 0], tools=[(delegate,), ()]),
        with_turns(row("a-later", "A", 1.0, segment_index=1), [0], tools=[(replace(failed, error="no such tool"),)]),
        with_turns(child("a-child", a, None, reward_components={"scope": -0.2}), [0]),
        with_turns(child("a-sibling", a, 0.0), [0]),
        with_turns(b, [0, 0]),
    ]
    # rewards 1 and 0: mean .5, deviation HALF
    found = estimate("fold_grpo", rows, context_limit=20, epsilon=TINY)
    wanted = {
        "a": [HALF, HALF, HALF, -HALF, -HALF, HALF],
        "a-later": [-HALF, -HALF, HALF],
        "a-child": [0.3 / HALF, 0.3 / HALF, HALF],
        "a-sibling": [HALF] * 3,
        "b": [-HALF] * 6,
    }
    assert {name: pytest.approx(values, abs=1e-6) for name, values in wanted.items()} == found


def test_fold_grpo_spares_a_short_root_and_punishes_a_turn_that_was_not_parsed():
    rows = [
        with_turns(row("a", "A", 1.0), [0], parse_error=True),
        with_turns(row("b", "B", 0.0), [0]),
        row("c", "C", None),
    ]
    found = estimate("fold_grpo", rows, context_limit=1000, epsilon=TINY)
    assert found["a"] == pytest.approx([-HALF, -HALF, HALF], abs=1e-6)
    assert found["c"] is None


def test_fold_grpo_gives_a_group_of_equal_rewards_its_penalties_alone():
    # no deviation to divide by: 1 + Q is 0, 0.8 or 1, and the mean is 1
    a = row("a", "A", 1.0)
    rows = [
        with_turns(a, [0]),
        with_turns(row("b", "B", 1.0), [0], parse_error=True),
        with_turns(child("a-child", a, 0.0, reward_components={"scope": -0.2}), [0]),
    ]
    found = estimate("fold_grpo", rows, context_limit=1000)
    assert found["a"] == [0, 0, 0]
    assert found["b"] == [-1, -1, 0]
    assert found["a-child"] == pytest.approx([-0.2, -0.2, 0])


@pytest.mark.parametrize("reward", [1.1, -1.0, 1e38])
def test_fold_grpo_clips_the_rewards_of_the_baseline_too(reward: float):
    rows = [with_turns(row("a", "A", reward), [0]), with_turns(row("b", "B", reward), [0])]
    assert estimate("fold_grpo", rows, context_limit=1000) == {"a": [0, 0, 0], "b": [0, 0, 0]}
    # clipped to 0.5 and 0, or to 0.5 and 1
    rows = [rows[0], with_turns(row("c", "C", 0.5), [0])]
    side = HALF if reward > 0.5 else -HALF
    found = estimate("fold_grpo", rows, context_limit=1000, epsilon=TINY)
    assert found["a"] == pytest.approx([side] * 3)


def test_fold_grpo_divides_rewards_that_differ_by_less_than_epsilon_by_1():
    rows = [with_turns(row("a", "A", 1.0), [0], parse_error=True), with_turns(row("b", "B", 1.0 - 1e-7), [0])]
    assert estimate("fold_grpo", rows, context_limit=1000)["a"] == pytest.approx([-1, -1, 0], abs=1e-6)


BY_AGENT = {
    "grpo_by_agent": HALF,
    "child_credit": 1,
    "tree_grpo": 2 * HALF,
    "fold_grpo": HALF,
    "gigpo": HALF,
    "mt_grpo": HALF,
}
"""Advantages that compare an agent with itself, and their value for a reward of 1 against one of 0."""


def estimate_one(name: str, rows: Sequence[Rollout]) -> dict[str, float]:
    """The advantage by rollout_id, of the first token if the advantage is by token."""
    params = {"context_limit": 1000} if name == "fold_grpo" else {}
    params |= {} if name == "child_credit" else {"epsilon": TINY}
    found = estimate(name, rows, **params)
    return {key: value[0] if isinstance(value, list) else value for key, value in found.items()}


@pytest.mark.parametrize("name", BY_AGENT)
def test_a_trajectory_whose_first_row_was_dropped_is_in_its_own_baseline(name: str):
    rows = [row("a1", "A", 1.0, segment_index=1), row("a2", "A", 1.0, segment_index=2), row("b", "B", 0.0)]
    one = BY_AGENT[name]
    assert estimate_one(name, rows) == pytest.approx({"a1": one, "a2": one, "b": -one})


@pytest.mark.parametrize("name", sorted(BY_AGENT.keys() - {"fold_grpo", "child_credit"}))
def test_a_sibling_whose_first_row_was_dropped_is_in_its_own_baseline(name: str):
    a, one = row("a", "A", 1.0), BY_AGENT[name]
    later = [child(f"{key}1", a, reward, segment_index=1) for key, reward in [("k", 1.0), ("m", 0.0)]]
    found = estimate_one(name, [a, child("m0", a, 0.0), *later])
    assert found == pytest.approx({"a": 0, "m0": -one, "k1": one, "m1": -one})


@pytest.mark.parametrize("name", BY_AGENT)
def test_a_batch_whose_filter_dropped_a_first_row_is_planned(arrive, name: str):
    params = {"context_limit": 1000} if name == "fold_grpo" else {}
    rules = BatchRules(
        advantage=name, groups_per_batch=1, params=params, filters=("drop_parse_errors",), baseline_over="kept"
    )
    planner = Planner(rules)
    columns = {"episode_id": ["A", "A", "B"], "segment_index": [0, 1, 0], "parse_error": [True, False, False]}
    planner.add(arrive([[1.0, 1.0, 0.0]], **columns))
    ledger = planner.plan(step=1, attempt_id=1, trainer_version=0)
    assert ledger is not None
    high, low = ledger.filter(ledger["used"])["advantage"].to_pylist()
    # the rows have unlike first completions, so that each is a tree of its own
    one = HALF if name == "tree_grpo" else BY_AGENT[name]
    assert (high, low) == pytest.approx((one, -one), abs=1e-3)


@pytest.mark.parametrize("name", ["child_credit", "fold_grpo"])
def test_a_child_without_a_scored_root_has_its_own_advantage(name: str):
    # children: 1 and 0; p failed, and the row of m's parent is not there
    p, q, r = row("p", "P", None, error="the environment failed"), row("q", "Q", 1.0), row("r", "R", 0.0)
    rows = [p, child("k", p, 1.0), child("m", row("gone", "M", 0.5), 0.0), q, r]
    one = BY_AGENT[name]
    assert estimate_one(name, rows) == pytest.approx({"p": None, "k": one, "m": -one, "q": one, "r": -one})


@pytest.mark.parametrize("name", ["child_credit", "fold_grpo"])
def test_a_batch_with_a_child_of_a_failed_root_is_planned(arrive, name: str):
    params = {"context_limit": 1000} if name == "fold_grpo" else {}
    planner = Planner(BatchRules(advantage=name, groups_per_batch=1, params=params))
    columns = {"error": ["failed", None], "agent_id": ["main", "solver"], "rollout_id": ["p", "k"]}
    planner.add(arrive([[None, 1.0]], parent_rollout_id=[None, "p"], depth=[0, 1], **columns))
    ledger = planner.plan(step=1, attempt_id=1, trainer_version=0)
    assert ledger is not None
    assert [(line["rollout_id"], line["used"]) for line in ledger.to_pylist()] == [("k", True), ("p", False)]


@pytest.mark.parametrize(
    "name", ["gigpo", "grpo_by_agent", "child_credit", "turn_returns", "mt_grpo", "rae", "tree_grpo", "fold_grpo"]
)
def test_a_batch_is_planned_with_each_advantage(arrive, name: str):
    params = {"context_limit": 1000} if name == "fold_grpo" else {}
    planner = Planner(BatchRules(advantage=name, groups_per_batch=1, params=params))
    planner.add(arrive([[1.0, 0.0]], num_turns=2))
    ledger = planner.plan(step=1, attempt_id=1, trainer_version=0)
    assert ledger is not None
    assert ledger["used"].to_pylist() == [True, True]


def test_a_turn_with_a_tool_call_has_the_advantage_of_the_step_that_it_leads_to():
    # both turns of a lead to its one environment step of reward 3, against 1 of b; c has no tokens and no turns
    a, b = with_turns(row("a", "A", 3.0), [0, 3]), with_turns(row("b", "B", 1.0), [1])
    step = replace(a.environment_steps[1], turn=0, agent_steps=(0, 1))
    empty = changed(
        row("c", "C", 2.0),
        response_tokens=np.zeros(0, np.int32),
        response_logprobs=np.zeros(0, np.float32),
        token_rewards=np.zeros(0, np.float32),
        action_mask=None,
    )
    rows = [replace(a, environment_steps=(step,)), b, empty]
    assert estimate("turn_returns", rows) == {"a": [1, 1, 0, 1, 1, 0], "b": [-1, -1, 0], "c": []}
    # outcomes 3, 1 and, without environment steps, the reward 2: mean 2, deviation 1
    found = estimate("mt_grpo", rows, epsilon=TINY)
    assert found == {"a": [1] * 6, "b": [-1] * 3, "c": []}


def played(episode_id: str, script: Script, outputs: Sequence[str], **parts: Any) -> list[Rollout]:
    """The rows of an episode that an agent with these outputs and parts plays, named by segment_index: A0, A1 ..."""
    rows = run_episode(scripted_agent(list(outputs), **parts), script)
    return [replace(row, rollout_id=f"{episode_id}{row.segment_index}", episode_id=episode_id) for row in rows]


def by_completion(name: str, rows: Sequence[Rollout], **params: Any) -> dict[str, list[float]]:
    """The advantage at the first token of each completion, by rollout_id."""
    found = estimate(name, rows, **params)
    return {row.rollout_id: [found[row.rollout_id][step.start] for step in row.agent_steps] for row in rows}


def test_a_summary_has_the_return_of_the_step_after_it():
    # the third completion is the summary, which ends the first row; the last step's reward is 4 or 0, of mean 2
    rows = [
        row
        for episode_id, reward in [("A", 4.0), ("B", 0.0)]
        for row in played(
            episode_id,
            Script([go_on("1", 1.0), go_on("2", 2.0), end(reward)]),
            ["a", "b", "summary", "c"],
            make_context=make_context("summary:2"),
        )
    ]
    found = by_completion("turn_returns", rows, discount=0.0)
    assert found == {"A0": [0, 0, 2], "A1": [2], "B0": [0, 0, -2], "B1": [-2]}


async def look() -> str:
    """Look."""
    return "nothing"


def test_a_tool_call_has_the_advantage_of_the_step_that_it_led_to_also_if_the_context_was_rewritten_since():
    # two calls lead to the second step, of reward 1 or 0; the window moves at the second call and at the answer
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    rows = [
        row
        for episode_id, reward in [("A", 1.0), ("B", 0.0)]
        for row in played(
            episode_id,
            Script([go_on("1", 0.0), go_on("2", reward), end(0.0)]),
            ["a", call, call, "b", "c"],
            make_context=make_context("window:2"),
            toolbox=Toolbox([function_tool(look)]),
        )
    ]
    # the first completion, the two calls and the answer, the last completion
    found = by_completion("turn_returns", rows, discount=0.0)
    assert flat(found) == {"A": [0, 0.5, 0.5, 0.5, 0], "B": [0, -0.5, -0.5, -0.5, 0]}
    found = by_completion("mt_grpo", rows, epsilon=TINY)
    side = [0, HALF, HALF, HALF, 0]
    assert flat(found) == {"A": pytest.approx(side), "B": pytest.approx([-each for each in side])}
    # the episode's advantage, and that of the step at each of the three observations
    found = flat(by_completion("gigpo", rows, epsilon=TINY))
    assert found["A"] == pytest.approx([2 * HALF] * 4 + [HALF])
    assert found["B"] == pytest.approx([-2 * HALF] * 4 + [-HALF])


def flat(found: dict[str, list[float]]) -> dict[str, list[float]]:
    """The completions of all rows of an episode, by episode_id."""
    ids = sorted(found)
    return {key[0]: [each for other in ids if other[0] == key[0] for each in found[other]] for key in ids}


def test_rewards_for_the_format_are_part_of_a_steps_reward():
    # the environment gives 1 to both, the parser 1 to the first
    parser = make_parser("tag:a", format_reward=1.0)
    rows = [
        *played("A", Script([end(1.0)]), ["<a>x</a>"], parser=parser),
        *played("B", Script([end(1.0)]), ["<a>y</a>"], parser=make_parser("tag:a")),
    ]
    assert [row.episode_reward for row in rows] == [2.0, 1.0]
    assert by_completion("turn_returns", rows) == {"A0": [0.5], "B0": [-0.5]}
    assert flat(by_completion("mt_grpo", rows, epsilon=TINY)) == {
        "A": [pytest.approx(HALF)],
        "B": [pytest.approx(-HALF)],
    }
    found = flat(by_completion("gigpo", rows, epsilon=TINY))
    assert found == {"A": [pytest.approx(2 * HALF)], "B": [pytest.approx(-2 * HALF)]}


class At(Script):
    """A script that begins with an observation of its own."""

    def __init__(self, state: str, *args: Any) -> None:
        super().__init__(*args)
        self._state = state

    def reset(self, example: Example) -> tuple[Message, ...]:
        return (Message(role="user", content=self._state),)


@pytest.mark.parametrize("context", ["full", "window:1"])
def test_gigpo_takes_feedback_on_a_parse_failure_for_the_observation_before(context: str):
    # both fail twice, each in a state of its own, whose steps all have the same return
    rows = [
        row
        for episode_id, reward in [("A", 1.0), ("B", 0.0)]
        for row in played(
            episode_id,
            At(f"You are at {episode_id}.", [end(reward)]),
            ["what", "what", "<a>x</a>"],
            parser=make_parser("tag:a"),
            make_context=make_context(context),
        )
    ]
    found = flat(by_completion("gigpo", rows, discount=1.0, epsilon=TINY))
    assert found == {"A": pytest.approx([HALF] * 3), "B": pytest.approx([-HALF] * 3)}
