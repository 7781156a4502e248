"""The advantage SQL, against numbers worked out by hand, exact arithmetic, and the record's own method."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from statistics import fmean, stdev

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from root.sql.conftest import connection
from strategies import make_group

from ludic.records.conversion import to_table
from ludic.records.rollout import RolloutBatch, RolloutGroup, RolloutMetadata
from ludic.root.sql.library import advantages

pytestmark = pytest.mark.slow

METADATA = RolloutMetadata(worker_id="worker")


def estimate(name: str, *groups: RolloutGroup, **params: float) -> list[float | None]:
    """The advantage of each rollout, in the order of the groups."""
    table = to_table(RolloutBatch(groups=groups, metadata=METADATA), run_id="run", sequence=0)
    con = connection()
    con.register("rollouts", table)
    by_id = dict(zip(*advantages(con, name, **params).to_pydict().values(), strict=True))
    return [by_id[rollout_id] for rollout_id in table["rollout_id"].to_pylist()]


def group(rewards: Sequence[float | None], seed: int = 0) -> RolloutGroup:
    return make_group(rewards=rewards, response_length=1, seed=seed)


def with_two_agents(rewards: Sequence[tuple[float, float]]) -> RolloutGroup:
    """One row for each of two agents of each episode; the rewards of both agents, by episode."""
    actors, critics = (group([pair[agent] for pair in rewards]) for agent in (0, 1))
    rows = [replace(row, agent_id="actor") for row in actors.rollouts]
    rows += [replace(row, agent_id="critic", rollout_id=f"critic-{row.rollout_id}") for row in critics.rollouts]
    rows = [replace(row, reward_components={"correct": row.episode_reward}) for row in rows]
    return replace(actors, rollouts=tuple(rows))


def test_an_episode_counts_once_for_each_agent_with_the_reward_of_that_agent():
    # rewards of a group: actors 1 and 0, critics .5 and .5; baselines: (0 + .5 + .5)/3, (1 + .5 + .5)/3, (1 + 0 + .5)/3
    two_agents = with_two_agents([(1.0, 0.5), (0.0, 0.5)])
    assert estimate("rloo", two_agents) == pytest.approx([2 / 3, -2 / 3, 0.0, 0.0])
    assert two_agents.rloo_advantages().tolist() == pytest.approx([2 / 3, -2 / 3, 0.0, 0.0])
    # mean .5, deviation sqrt((.25 + .25) / 3)
    one = 0.5 / (1 / 6) ** 0.5
    assert estimate("grpo", two_agents, epsilon=0.0) == pytest.approx([one, -one, 0.0, 0.0])


@pytest.mark.parametrize("name", ["gdpo", "length_penalty", "overlong"])
def test_each_agent_is_scored_by_its_own_reward(name: str):
    limits = {"max_length": 9, "margin": 1} if name == "overlong" else {}
    actors, critics = np.split(np.array(estimate(name, with_two_agents([(1.0, 0.5), (0.0, 0.5)]), **limits)), 2)
    assert actors[0] > critics[0] == critics[1] > actors[1]


def test_rloo_gives_equal_rewards_exactly_zero():
    # in doubles 0.1 + 0.1 + 0.1 is not 3 * 0.1
    assert estimate("rloo", group([0.1, 0.1, 0.1])) == [0.0, 0.0, 0.0]


def test_rloo_loses_no_digits_of_large_rewards():
    # baselines: 1e12 + (1 + 3)/2, 1e12 + (0 + 3)/2, 1e12 + (0 + 1)/2
    assert estimate("rloo", group([1e12, 1e12 + 1, 1e12 + 3])) == [-2.0, -0.5, 2.5]


rewards = st.lists(
    st.none() | st.floats(-1e6, 1e6) | st.sampled_from([0.0, 0.1, 1.0]) | st.integers(0, 9).map(lambda n: 1e12 + n / 8),
    min_size=1,
    max_size=64,
)


@settings(max_examples=30)
@given(rewards)
def test_rloo_is_the_exact_leave_one_out_to_nine_digits_of_the_spread(rewards: list[float | None]):
    scored = [Fraction(reward) for reward in rewards if reward is not None]
    spread = float(max(scored) - min(scored)) if scored else 0.0
    for reward, found in zip(rewards, estimate("rloo", group(rewards)), strict=True):
        if reward is None:
            assert found is None
        else:
            others = (sum(scored) - Fraction(reward)) / (len(scored) - 1) if len(scored) > 1 else Fraction(reward)
            assert abs(found - float(Fraction(reward) - others)) <= 1e-9 * spread


@settings(max_examples=30)
@given(rewards)
def test_rloo_is_what_the_record_computes(rewards: list[float | None]):
    of_rewards = group(rewards)
    found = np.array(estimate("rloo", of_rewards), dtype=np.float64)
    largest = max((abs(reward) for reward in rewards if reward is not None), default=0.0)
    np.testing.assert_allclose(found, of_rewards.rloo_advantages(), rtol=0, atol=1e-9 * largest)


def test_rloo_noise_separates_equal_rewards_and_is_the_same_every_time():
    equal = group([1.0] * 4)
    first = estimate("rloo", equal, noise_scale=1e-6, seed=7)
    assert len(set(first)) == 4
    assert max(map(abs, first)) < 1e-5
    assert estimate("rloo", equal, noise_scale=1e-6, seed=7) == first
    assert estimate("rloo", equal, noise_scale=1e-6, seed=8) != first


def test_rloo_noise_is_normal_with_the_scale_asked_for():
    noise = estimate("rloo", *(group([1.0] * 100, seed=seed) for seed in range(40)), noise_scale=2.0)
    # of 4000 draws: the mean is within 4 * 2 / sqrt(4000), the deviation within 4 * 2 / sqrt(8000)
    assert abs(fmean(noise)) < 0.13
    assert stdev(noise) == pytest.approx(2.0, abs=0.09)
    # a normal deviate is within one deviation with probability 0.683, here give or take 4 * sqrt(.683 * .317 / 4000)
    assert np.mean(np.abs(noise) < 2.0) == pytest.approx(0.683, abs=0.03)


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "reinforce"])
def test_equal_rewards_give_exactly_zero_and_a_failed_episode_nothing(name: str):
    assert estimate(name, group([0.1, 0.1, 0.1, None])) == [0.0, 0.0, 0.0, None]


def test_advantages_have_one_schema_whatever_the_sql_computes(tmp_path):
    file = tmp_path / "one.sql"
    file.write_text("select 1 as advantage, rollout_id from rollouts")
    con = connection()
    con.register("rollouts", pa.table({"rollout_id": ["a"]}))
    assert advantages(con, str(file)).schema == pa.schema([("rollout_id", pa.string()), ("advantage", pa.float64())])
