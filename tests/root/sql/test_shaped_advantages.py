"""Advantages of other credit than a group's plain reward, against numbers worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import sqrt
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from root.sql.conftest import connection
from strategies import changed, make_group

from ludic.errors import QueryError
from ludic.records.conversion import to_table
from ludic.records.rollout import AgentStep, EnvironmentStep, Rollout, RolloutBatch, RolloutGroup, RolloutMetadata
from ludic.root.sql.library import advantages

METADATA = RolloutMetadata(worker_id="worker")


def estimate(name: str, *groups: RolloutGroup, **params: float) -> list:
    """The advantage, or the list of them, of each rollout, in the order of the groups."""
    table = to_table(RolloutBatch(groups=groups, metadata=METADATA), run_id="run", sequence=0)
    con = connection()
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
    return changed(
        rollout,
        response_tokens=tokens,
        response_logprobs=zeros,
        token_rewards=given,
        agent_steps=(),
        environment_steps=(),
    )


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


def test_overlong_without_its_limits_says_which():
    with pytest.raises(QueryError, match=r"no value for \$margin, \$max_length"):
        estimate("overlong", group_of([1.0], [1]))


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
