"""Advantages of other credit than a group's plain reward, against numbers worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import sqrt
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import make_group

from ludic.errors import QueryError
from ludic.records import AgentStep, EnvironmentStep, Rollout, RolloutBatch, RolloutGroup, RolloutMetadata
from ludic.schema import to_table
from ludic.sql import advantages
from ludic.sql.connect import open_duckdb

METADATA = RolloutMetadata(worker_id="worker")


def estimate(name: str, *groups: RolloutGroup, **params: float) -> list:
    """The advantage, or the list of them, of each rollout, in the order of the groups."""
    table = to_table(RolloutBatch(groups=groups, metadata=METADATA), run_id="run", sequence=0)
    con = open_duckdb()
    con.register("rollouts", table)
    by_id = dict(zip(*advantages(con, name, **params).to_pydict().values(), strict=True))
    return [by_id[rollout_id] for rollout_id in table["rollout_id"].to_pylist()]


def group_of(rewards: Sequence[float | None], lengths: Sequence[int], seed: int = 0) -> RolloutGroup:
    group = make_group(rewards=rewards, response_length=1, seed=seed)
    pairs = zip(group.rollouts, lengths, strict=True)
    return replace(group, rollouts=tuple(with_length(rollout, length) for rollout, length in pairs))


def with_length(rollout: Rollout, length: int, token_rewards: Sequence[float] | None = None) -> Rollout:
    tokens, zeros = np.ones(length, np.int32), np.zeros(length, np.float32)
    given = zeros if token_rewards is None else np.array(token_rewards, np.float32)
    return replace(
        rollout,
        response_tokens=tokens,
        response_logprobs=zeros,
        token_rewards=given,
        agent_steps=(),
        environment_steps=(),
    )


def test_reinforce_pp_scales_by_the_whole_batch():
    # rewards 0, 1, 2, 5 of two groups: mean 2, sample standard deviation sqrt((4 + 1 + 0 + 9) / 3)
    found = estimate("reinforce_pp", group_of([0.0, 1.0], [1, 1]), group_of([2.0, 5.0], [1, 1], seed=1))
    assert found == pytest.approx([x / sqrt(14 / 3) for x in (-2, -1, 0, 3)], rel=1e-5)


def test_opo_weighs_the_rewards_of_its_baseline_by_length():
    # (1 x 30 + 0 x 10 + 0.5 x 20) / 60 = 2/3; the failed one of 100 tokens does not count
    found = estimate("opo", group_of([1.0, 0.0, 0.5, None], [30, 10, 20, 100]))
    assert found == pytest.approx([1 / 3, -2 / 3, -1 / 6, None])


def test_opo_of_equal_lengths_is_dr_grpo_and_of_empty_responses_nothing():
    group = group_of([1.0, 0.0, 0.5], [7, 7, 7])
    assert estimate("opo", group) == pytest.approx(estimate("dr_grpo", group))
    assert estimate("opo", group_of([0.1, 0.1], [0, 0])) == [0.0, 0.0]


def test_lite_ppo_takes_the_mean_of_the_group_and_the_deviation_of_the_batch():
    # means 0.5 and 3.5; the deviation of 0, 1, 2, 5 is sqrt((4 + 1 + 0 + 9) / 3)
    *found, failed = estimate("lite_ppo", group_of([0.0, 1.0], [1, 1]), group_of([2.0, 5.0, None], [1, 1, 1], seed=1))
    assert found == pytest.approx([x / sqrt(14 / 3) for x in (-0.5, 0.5, -1.5, 1.5)], rel=1e-5)
    assert failed is None


def with_components(rewards: Sequence[float | None], *components: dict[str, float], seed: int = 0) -> RolloutGroup:
    group = group_of(rewards, [1] * len(rewards), seed)
    pairs = zip(group.rollouts, components, strict=True)
    return replace(group, rollouts=tuple(replace(rollout, reward_components=parts) for rollout, parts in pairs))


def test_gdpo_normalises_each_component_in_its_group_and_their_sum_over_the_batch():
    # correct: 0 and 1 are -s and s, with s = 0.5 / sqrt(0.5); length: 300 and 100 are s and -s: sums 0, 0
    # of the second group both components say the same: 2 s, -2 s; the deviation of 0, 0, 2 s, -2 s is s sqrt(8 / 3)
    first = with_components([300.0, 101.0], {"correct": 0, "length": 300}, {"correct": 1, "length": 100})
    second = with_components(
        [301.0, 100.0, None], {"correct": 1, "length": 300}, {"correct": 0, "length": 100}, {"correct": 9}, seed=1
    )
    *found, failed = estimate("gdpo", first, second, epsilon=0.0)
    assert found == pytest.approx([0, 0, 2 / sqrt(8 / 3), -2 / sqrt(8 / 3)], abs=1e-12)
    assert failed is None


def test_gdpo_weighs_its_components():
    # correct twice: -2 s + s = -s, and s; over the deviation of -s and s, sqrt(2) s
    group = with_components([300.0, 101.0], {"correct": 0, "length": 300}, {"correct": 1, "length": 100})
    found = estimate("gdpo", group, epsilon=0.0, component_weights="correct=2, format=7")
    assert found == pytest.approx([-1 / sqrt(2), 1 / sqrt(2)])


def test_gdpo_of_equal_components_or_of_none_gives_exactly_nothing():
    assert estimate("gdpo", with_components([1.0, 1.0], {"a": 0.1, "b": 0.2}, {"a": 0.1, "b": 0.2})) == [0.0, 0.0]
    assert estimate("gdpo", with_components([1.0, 0.0], {}, {})) == [0.0, 0.0]


def test_zero_looks_at_no_reward():
    assert estimate("zero", group_of([5.0, None], [1, 1])) == [0.0, 0.0]


def pass_at_k(succeeded: Sequence[bool], k: int) -> list[float]:
    """By enumeration: the mean, over the draws that hold an episode, of the draw's normalised worth."""
    draws = list(combinations(range(len(succeeded)), k))
    worth = [float(any(succeeded[i] for i in draw)) for draw in draws]
    mean = fmean(worth)
    std = sqrt(mean * (1 - mean))
    return [
        fmean((w - mean) / std for draw, w in zip(draws, worth, strict=True) if i in draw) if std else 0.0
        for i in range(len(succeeded))
    ]


@pytest.mark.parametrize(
    ("num_successes", "n", "k"), [(1, 4, 2), (2, 6, 3), (0, 4, 2), (4, 4, 2), (1, 8, 8), (3, 8, 1)]
)
def test_pass_at_k_is_the_mean_over_all_draws_of_k(num_successes, n, k):
    succeeded = [i < num_successes for i in range(n)]
    found = estimate("pass_at_k", group_of([float(s) for s in succeeded], [1] * n), k=k)
    assert found == pytest.approx(pass_at_k(succeeded, k))


def test_pass_at_k_gives_a_group_of_fewer_than_k_nothing():
    assert estimate("pass_at_k", group_of([1.0, 0.0], [1, 1]), k=4) == [0.0, 0.0]


def test_overlong_takes_up_to_one_reward_over_the_margin():
    # 100 tokens with a margin of 20: 80 lose nothing, 90 a half, 100 and 120 all
    rewards = [1.0, 1 - 0.5, 0 - 1.0, 1 - 1.0]
    found = estimate("overlong", group_of([1.0, 1.0, 0.0, 1.0], [80, 90, 100, 120]), max_length=100, margin=20)
    assert found == pytest.approx([(r - fmean(rewards)) / stdev(rewards) for r in rewards], rel=1e-4)


def test_overlong_without_its_limits_says_which():
    with pytest.raises(QueryError, match=r"no value for \$margin, \$max_length"):
        estimate("overlong", group_of([1.0], [1]))


def test_length_penalty_prefers_the_shorter_of_the_successes():
    # lengths 10 to 30: L is 0.5, 0, -0.5; a short failure gets min(0, 0.5) = 0, a long one -0.5
    shaped = [1.5, 1.0, 0.0, -0.5]
    found = estimate("length_penalty", group_of([1.0, 1.0, 0.0, 0.0], [10, 20, 10, 30]))
    assert found == pytest.approx([(4 * r - sum(shaped)) / 3 for r in shaped])


def test_length_penalty_of_equal_lengths_is_rloo():
    group = group_of([1.0, 0.0, 0.5], [7, 7, 7])
    assert estimate("length_penalty", group) == pytest.approx(estimate("rloo", group))


def test_token_returns_are_what_is_still_to_come():
    # discount 1/2: [1 + 0 + 4/4, 4/2, 4], [8]; their mean is (2 + 2 + 4 + 8) / 4 = 4
    group = make_group(rewards=[5.0, 8.0], response_length=1, seed=0)
    first, second = group.rollouts
    group = replace(group, rollouts=(with_length(first, 3, [1, 0, 4]), with_length(second, 1, [8])))
    assert estimate("token_returns", group, discount=0.5) == [[-2.0, -2.0, 0.0], [4.0]]


def test_token_returns_of_an_empty_response_are_empty():
    group = make_group(rewards=[5.0, 8.0], response_length=1, seed=0)
    first, second = group.rollouts
    group = replace(group, rollouts=(with_length(first, 0), with_length(second, 1, [8])))
    assert estimate("token_returns", group) == [[], [0.0]]


def test_token_returns_keep_failed_episodes_out_of_the_baseline():
    # the mean of 1 and 0, and nothing of the 7 that the failed one left behind
    group = make_group(rewards=[1.0, None, 0.0], response_length=1, seed=0)
    rollouts = [with_length(rollout, 1, [reward]) for rollout, reward in zip(group.rollouts, [1, 7, 0], strict=True)]
    assert estimate("token_returns", replace(group, rollouts=tuple(rollouts))) == [[0.5], None, [-0.5]]


@pytest.mark.parametrize("length", [8_000, 100_000])
def test_token_returns_are_finite_and_right_however_long_the_response(length):
    # 1 at the first and at the last token: 0.9^(length - 1) of the last reaches the first, which is nothing
    rewards = [1.0, *[0.0] * (length - 2), 1.0]
    group = make_group(rewards=[1.0], response_length=1, seed=0)
    group = replace(group, rollouts=(with_length(group.rollouts[0], length, rewards),))
    (found,) = estimate("token_returns", group, discount=0.9)
    wanted = 0.9 ** np.arange(length - 1, -1, -1.0)
    wanted[0] += 1
    np.testing.assert_allclose(found, wanted - wanted.mean(), rtol=0, atol=1e-7)


@pytest.mark.slow
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_token_returns_are_the_backward_recursion(rewards: list[int], discount: float):
    returns = [0.0]
    for reward in reversed(rewards):
        returns.insert(0, reward + discount * returns[0])
    group = make_group(rewards=[1.0], response_length=1, seed=0)
    group = replace(group, rollouts=(with_length(group.rollouts[0], len(rewards), rewards),))
    (found,) = estimate("token_returns", group, discount=discount)
    assert found == pytest.approx(np.array(returns[:-1]) - fmean(returns[:-1]), abs=1e-5)


def with_turns(rollout: Rollout, rewards: Sequence[float]) -> Rollout:
    """Two tokens a turn, the second with the reward, and a third between turns that the environment said."""
    rollout = with_length(rollout, 3 * len(rewards), [each for reward in rewards for each in (0, reward, 0)])
    agent_steps = [AgentStep(turn=i, action_target="env", start=3 * i, end=3 * i + 2) for i in range(len(rewards))]
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
    return replace(rollout, agent_steps=tuple(agent_steps), environment_steps=tuple(environment_steps))


def test_turn_returns_credit_a_turn_with_what_comes_after_it():
    # discount 1/2: returns [1 + 2/2, 2] and [3]; the means of turns 0 and 1 are (2 + 3) / 2 and 2
    group = make_group(rewards=[3.0, 3.0], response_length=1, seed=0)
    first, second = group.rollouts
    group = replace(group, rollouts=(with_turns(first, [1, 2]), with_turns(second, [3])))
    assert estimate("turn_returns", group, discount=0.5) == [[-0.5, -0.5, 0, 0, 0, 0], [0.5, 0.5, 0]]


def test_turn_returns_without_a_future_are_each_steps_own_reward():
    # rewards [1, 2] and [3]; the means of turns 0 and 1 are (1 + 3) / 2 and 2
    group = make_group(rewards=[3.0, 3.0], response_length=1, seed=0)
    first, second = group.rollouts
    group = replace(group, rollouts=(with_turns(first, [1, 2]), with_turns(second, [3])))
    assert estimate("turn_returns", group, discount=0.0) == [[-1.0, -1.0, 0, 0, 0, 0], [1.0, 1.0, 0]]


def test_turn_returns_keep_failed_episodes_out_of_the_baseline():
    # the mean of 1 and 0, and nothing of the 0 that the failed one stopped at
    group = make_group(rewards=[1.0, None, 0.0], response_length=1, seed=0)
    rollouts = [with_turns(rollout, [rollout.episode_reward or 0]) for rollout in group.rollouts]
    found = estimate("turn_returns", replace(group, rollouts=tuple(rollouts)))
    assert found == [[0.5, 0.5, 0], None, [-0.5, -0.5, 0]]


def test_token_returns_without_a_future_are_each_tokens_own_reward():
    # the mean of 1, 0, 4 and 8 is 13/4
    group = make_group(rewards=[5.0, 8.0], response_length=1, seed=0)
    first, second = group.rollouts
    group = replace(group, rollouts=(with_length(first, 3, [1, 0, 4]), with_length(second, 1, [8])))
    assert estimate("token_returns", group, discount=0) == [[-2.25, -3.25, 0.75], [4.75]]


def pairs(*groups: RolloutGroup) -> dict[str, tuple[str, float]]:
    """pair_id and advantage of each rollout that is in a pair."""
    con = open_duckdb()
    con.register("rollouts", to_table(RolloutBatch(groups=groups, metadata=METADATA), run_id="run", sequence=0))
    found = advantages(con, "best_worst")
    assert found.column_names == ["rollout_id", "advantage", "pair_id"]
    return {row["rollout_id"]: (row["pair_id"], row["advantage"]) for row in found.to_pylist()}


def test_best_worst_chooses_the_best_of_a_group_over_the_worst():
    group, equal = group_of([0.5, 1.0, None, 0.0], [1] * 4), group_of([1.0, 1.0], [1, 1], seed=1)
    ids = [rollout.rollout_id for rollout in group.rollouts]
    group_id = group.rollouts[0].group_id
    assert pairs(group, equal) == {ids[1]: (group_id, 1.0), ids[3]: (group_id, -1.0)}


def test_best_worst_takes_the_lowest_id_of_equal_rewards_and_the_first_row_of_an_episode():
    group = group_of([1.0, 0.0, 0.0, 1.0], [1] * 4)
    ids = sorted(rollout.rollout_id for rollout in group.rollouts if rollout.episode_reward == 0)
    best = sorted(rollout.rollout_id for rollout in group.rollouts if rollout.episode_reward == 1)
    later = replace(group.rollouts[0], rollout_id="0-later-context", segment_index=1)
    assert list(pairs(replace(group, rollouts=(*group.rollouts, later)))) == [best[0], ids[0]]
