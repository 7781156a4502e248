"""Objectives of pairs, against numbers worked out by hand."""

import math

import pytest
import torch
from losses_by_hand import batch_of, loss_and_gradient

from ludic.training.config import Dpo, LossConfig
from ludic.training.losses import rl_loss

QUARTER_AS_LIKELY, TWICE_AS_LIKELY = -1 - math.log(4), -1 + math.log(2)


def test_dpo_compares_the_gains_over_the_reference_of_the_two_sides():
    # chosen: log 4 above the reference; rejected: log 2 below at both tokens; 0.5 (log 4 + 2 log 2) = log 4
    reference = [QUARTER_AS_LIKELY, TWICE_AS_LIKELY, TWICE_AS_LIKELY]
    settings = {"objective": "dpo", "dpo_beta": 0.5, "reference": reference, "pair_ids": ["p", "p"]}
    loss, gradient, sums = loss_and_gradient(([1.0], [1.0]), ([1.0, 1.0], [-1.0, -1.0]), **settings)
    assert loss == pytest.approx(-math.log(4 / 5))  # sigmoid(log 4) = 4 / 5
    assert gradient == pytest.approx([-0.5 / 5, 0.5 / 5, 0.5 / 5])
    assert sums["clipped"] == 0


def test_dpo_takes_the_mean_over_pairs_whatever_their_lengths_and_their_order():
    # of the first pair all is at the reference: log 2; of the second the chosen side is log 4 above: 0.5 log 4 = log 2
    sides = ([1.0], [1.0]), ([1.0] * 3, [-7.0] * 3), ([1.0], [-1.0]), ([1.0], [1.0])
    settings = {"objective": "dpo", "dpo_beta": 0.5, "pair_ids": ["b", "a", "b", "a"], "num_sequences": 2}
    reference = [QUARTER_AS_LIKELY, *[-1.0] * 5]
    loss, gradient, _ = loss_and_gradient(*sides, reference=reference, **settings)
    assert loss == pytest.approx((math.log(2) - math.log(2 / 3)) / 2)  # sigmoid(log 2) = 2 / 3
    assert gradient == pytest.approx([-0.5 / 3 / 2, *[0.5 / 2 / 2] * 3, 0.5 / 3 / 2, -0.5 / 2 / 2])


def test_dpo_measures_margins_and_accuracy_over_pairs_whatever_their_lengths():
    # as above, of 6 tokens: margins log 2 and 0; a margin of 0 is no preference
    sides = ([1.0], [1.0]), ([1.0] * 3, [-7.0] * 3), ([1.0], [-1.0]), ([1.0], [1.0])
    settings = {"objective": "dpo", "dpo_beta": 0.5, "pair_ids": ["b", "a", "b", "a"], "num_sequences": 2}
    _, _, sums = loss_and_gradient(*sides, reference=[QUARTER_AS_LIKELY, *[-1.0] * 5], num_action_tokens=6, **settings)
    assert sums["preference_margin"] / 6 == pytest.approx(math.log(2) / 2)
    assert sums["preference_accuracy"] / 6 == pytest.approx(1 / 2)


def test_ipo_pulls_the_gain_of_a_pair_to_half_of_one_over_beta():
    # gains log 4 of the chosen, -2 log 2 of the rejected side: 2 log 4, against 1 / (2 x 0.5) = 1
    reference = [QUARTER_AS_LIKELY, TWICE_AS_LIKELY, TWICE_AS_LIKELY]
    settings = {"objective": "ipo", "dpo_beta": 0.5, "reference": reference, "pair_ids": ["p", "p"]}
    loss, gradient, sums = loss_and_gradient(([1.0], [1.0]), ([1.0, 1.0], [-1.0, -1.0]), **settings)
    gap = 2 * math.log(4) - 1
    assert loss == pytest.approx(gap**2)
    assert gradient == pytest.approx([2 * gap, -2 * gap, -2 * gap])
    assert sums["preference_margin"] == pytest.approx(0.5 * 2 * math.log(4))


def test_orpo_adds_the_odds_ratio_to_the_likelihood_of_the_chosen_side():
    # geometric means of probabilities sqrt(4 / e x 1 / e) = 2 / e and 1 / (2 e); odds p / (1 - p)
    ratios = ([4.0, 1.0], [1.0, 1.0]), ([0.5], [-1.0])
    settings = {"objective": "orpo", "orpo_weight": 0.5, "pair_ids": ["p", "p"]}
    loss, gradient, sums = loss_and_gradient(*ratios, **settings)
    chosen, rejected = 2 / math.e, 1 / (2 * math.e)
    log_odds_ratio = math.log(chosen / (1 - chosen)) - math.log(rejected / (1 - rejected))
    likelier = 1 / (1 + math.exp(-log_odds_ratio))
    assert loss == pytest.approx(-math.log(chosen) - 0.5 * math.log(likelier))
    # d log odds / d log p = 1 / (1 - p), and each of the chosen side's two tokens is half of its mean
    pull = 0.5 * (1 - likelier)
    of_chosen = -(1 + pull / (1 - chosen)) / 2
    assert gradient == pytest.approx([of_chosen, of_chosen, pull / (1 - rejected)])
    assert sums["preference_margin"] == pytest.approx(log_odds_ratio)


def test_only_pairs_measure_preferences():
    _, _, sums = loss_and_gradient(([1.0], [1.0]), reference=[-1.0])
    assert not [name for name in sums if name.startswith("preference")]


def test_only_dpo_looks_at_pairs():
    settings = {"ratio_level": "sequence", "pair_ids": ["p", "p"]}
    _, gradient, _ = loss_and_gradient(([2.0], [1.0]), ([3.0], [1.0]), **settings)
    assert gradient == pytest.approx([-2, -3])


def test_dpo_in_pairs_agrees_with_finite_differences():
    sides = ([1.1, 0.4], [1.0, 1.0]), ([2.0, 0.9, 0.3], [-1.0] * 3)
    batch, logprobs = batch_of(*sides, pair_ids=["p", "p"])
    reference = torch.linspace(-2, -0.5, 5, dtype=torch.float64)
    config = LossConfig(objective=Dpo(), loss_normalization="sequences", reference="base")
    counts = {"num_action_tokens": 5, "num_sequences": 1}
    assert torch.autograd.gradcheck(
        lambda x: rl_loss(x, batch, config, **counts, reference_logprobs=reference)[0], logprobs
    )
