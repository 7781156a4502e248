"""Advantages of a whole batch, against numbers worked out by hand and the formulas of REINFORCE++ in NumPy."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ludic.settings.table import convert
from ludic.training.batches.packing import TrainingSequence, pack
from ludic.training.config import LossConfig, Reinforce
from ludic.training.step import shape_advantages

pytestmark = pytest.mark.usefixtures("mesh")
KL = {"reference": "base", "kl_weight": 0.5, "kl_estimator": "k1", "kl_placement": "return"}


def sequence(sampler, advantage, mask=None):
    return TrainingSequence(
        rollout_id="r",
        prompt_tokens=np.zeros(1, np.int32),
        response_tokens=np.zeros(len(sampler), np.int32),
        columns={
            "response_logprobs": np.array(sampler, np.float32),
            "action_mask": None if mask is None else np.array(mask),
        },
        advantage=np.array(advantage, np.float32) if np.ndim(advantage) else float(advantage),
    )


def shaped(*micro_batches, references=None, **settings):
    """Advantages of each micro-batch."""
    batches = [pack(sequences) for sequences in micro_batches]
    of_reference = [None] * len(batches) if references is None else [torch.tensor(each) for each in references]
    found = shape_advantages(batches, of_reference, convert(LossConfig, settings), torch.device("cpu"))
    return [batch.advantages.tolist() for batch in found]


def test_each_token_pays_for_the_kl_from_it_on():
    # log(sampler / reference) is 1, 2, 3 of the first, -1, 4 of the second sequence; half of what is to come
    sequences = [sequence([-1, -1, -1], 10), sequence([-2, -2], 20)]
    (found,) = shaped(sequences, references=[[-2.0, -3.0, -4.0, -1.0, -6.0]], **KL)
    assert found == pytest.approx([10 - 3, 10 - 2.5, 10 - 1.5, 20 - 1.5, 20 - 2])


def test_what_was_not_sampled_costs_no_kl_whatever_it_holds():
    sequences = [sequence([-1, np.nan, -1], 10, mask=[True, False, True])]
    (found,) = shaped(sequences, references=[[-2.0, 7.0, -4.0]], **KL)
    assert [found[0], found[2]] == pytest.approx([10 - 2, 10 - 1.5])


def test_whitening_counts_a_sequence_as_often_as_it_has_sampled_tokens():
    # 3, 3, 0 and 6: mean 3; (0 + 0 + 9 + 9) / (4 - 1) = 6. The token that was not sampled does not count
    sequences = [sequence([-1, -1, -1], [3, 99, 3], mask=[True, False, True]), sequence([-1], 0)]
    found = shaped(sequences, [sequence([-1], 6)], [], whiten_advantages=True)
    assert [found[0][0], found[0][2], found[0][3], *found[1]] == pytest.approx([0, 0, -3 / 6**0.5, 3 / 6**0.5])


def test_equal_advantages_are_whitened_to_nothing():
    (found,) = shaped([sequence([-1, -1], 0.1), sequence([-1], 0.1)], whiten_advantages=True)
    assert found == [0, 0, 0]


def test_one_sampled_token_is_whitened_to_nothing():
    assert shaped([sequence([-1], 7)], whiten_advantages=True) == [[0]]


def test_a_batch_without_sampled_tokens_stays_as_it_is():
    assert shaped([], whiten_advantages=True) == [[0]]


def test_a_large_reward_loses_no_digits():
    (found,) = shaped([sequence([-1], 2.0**20), sequence([-1], 2.0**20 + 1)], whiten_advantages=True)
    assert found == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_nothing_changes_unasked():
    batch = pack([sequence([-1, -1], 3)])
    config = LossConfig(reference="base", kl_weight=0.5)
    assert shape_advantages([batch], [torch.zeros(2)], config, torch.device("cpu")) == [batch]


def reinforce_pp(rewards, sampler, reference, beta):
    """As the paper says it: token rewards 1[last] R - beta KL, their returns, normalised over all tokens."""
    returns = []
    for reward, of_sampler, of_reference in zip(rewards, sampler, reference, strict=True):
        token_rewards = -beta * (np.array(of_sampler) - np.array(of_reference))
        token_rewards[-1] += reward
        returns.append(token_rewards[::-1].cumsum()[::-1])
    flat = np.concatenate(returns)
    return (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_reinforce_pp_is_the_paper_s_formula(num_micro_batches):
    """The advantage is the reward less the batch's mean, which whitening makes no difference of."""
    rng = np.random.default_rng(0)
    lengths, rewards = [3, 1, 7, 4, 2, 6], rng.normal(size=6)
    sampler, reference = ([rng.normal(-2, 1, n).astype(np.float32) for n in lengths] for _ in range(2))
    sequences = [sequence(s, r - rewards.mean()) for s, r in zip(sampler, rewards, strict=True)]
    parts = np.array_split(np.arange(6), num_micro_batches)
    found = shaped(
        *([sequences[i] for i in part] for part in parts),
        references=[np.concatenate([reference[i] for i in part]) for part in parts],
        whiten_advantages=True,
        **KL | {"kl_weight": 0.3},
    )
    by_paper = reinforce_pp(rewards, sampler, reference, 0.3)
    np.testing.assert_allclose(np.concatenate(found), by_paper, atol=1e-5)


def test_the_micro_batches_that_were_given_stay_as_they_were():
    batch = pack([sequence([-1, -1], [1, 3])])
    before = replace(batch, advantages=batch.advantages.clone())
    shape_advantages([batch], [None], LossConfig(objective=Reinforce(whiten_advantages=True)), torch.device("cpu"))
    assert torch.equal(batch.advantages, before.advantages)
