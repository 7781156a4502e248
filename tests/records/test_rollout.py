import numpy as np
import pytest
from strategies import make_group


def advantages(rewards: list[float | None], **options: object) -> np.ndarray:
    return make_group(group_size=len(rewards), rewards=rewards, **options).rloo_advantages()


def test_rloo_leaves_the_own_reward_out():
    # baselines: (0 + .5)/2, (1 + .5)/2, (1 + 0)/2
    assert advantages([1.0, 0.0, 0.5]) == pytest.approx([0.75, -0.75, 0.0])


def test_a_group_of_one_has_no_baseline_and_gets_zero():
    assert advantages([3.0]).tolist() == [0.0]


def test_equal_rewards_give_exactly_zero():
    assert advantages([0.1] * 7).tolist() == [0.0] * 7


def test_an_episode_that_was_not_scored_is_no_part_of_the_baseline():
    # baselines of the scored: 4, 2
    found = advantages([2.0, None, 4.0])
    assert found[[0, 2]] == pytest.approx([-2.0, 2.0])
    assert np.isnan(found[1])


def test_large_rewards_lose_no_digits():
    # above the lowest: 0, 1, 5; baselines: 3, 2.5, 0.5
    assert advantages([1e12, 1e12 + 1, 1e12 + 5]).tolist() == [-3.0, -1.5, 4.5]
