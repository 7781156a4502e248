import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ludic.training.config import TrainConfig
from ludic.training.logprobs import linear_logprobs
from ludic.training.losses import OBJECTIVES, rl_loss
from ludic.training.packing import TrainingSequence, pack

# Sampler logprobs are -1 throughout, so that a trainer logprob is -1 + log(ratio).


def batch_of(*sequences, mask=None, weight=1.0, pair_ids=None):
    """A micro-batch of (ratios, advantages) pairs, and trainer logprobs (float64, with gradient) at these ratios."""
    pair_ids = pair_ids or [None] * len(sequences)
    packed = pack(
        [
            TrainingSequence(
                rollout_id=f"r{place}",
                prompt_tokens=np.zeros(1, np.int32),
                response_tokens=np.zeros(len(ratios), np.int32),
                sampler_logprobs=np.full(len(ratios), -1.0),
                action_mask=mask,
                advantage=np.array(advantages, np.float32),
                weight=weight,
                pair_id=pair_ids[place],
            )
            for place, (ratios, advantages) in enumerate(sequences)
        ]
    )
    ratios = np.concatenate([ratios for ratios, _ in sequences])
    return packed, torch.tensor(-1.0 + np.log(ratios), requires_grad=True)


def loss_and_gradient(
    *sequences, mask=None, weight=1.0, pair_ids=None, num_action_tokens=1, num_sequences=1, reference=None, **settings
):
    """The loss, its gradient by trainer logprob, and the sums that go with it. The reference of dpo is the sampler."""
    batch, logprobs = batch_of(*sequences, mask=mask, weight=weight, pair_ids=pair_ids)
    if settings.get("objective") == "dpo":
        settings |= {"normalize_over": "sequences"}
        reference = [-1.0] * len(logprobs) if reference is None else reference
    settings |= {} if reference is None else {"reference": "base"}
    loss, sums = rl_loss(
        logprobs,
        batch,
        TrainConfig(**settings),
        num_action_tokens=num_action_tokens,
        num_sequences=num_sequences,
        reference_logprobs=None if reference is None else torch.tensor(reference, dtype=torch.float64),
    )
    assert not any(value.requires_grad for value in sums.values())
    loss.backward()
    return loss.item(), logprobs.grad.tolist(), {name: value.item() for name, value in sums.items()}


def test_reinforce_weighs_the_logprob_by_the_ratio_without_a_gradient_through_it():
    loss, gradient, sums = loss_and_gradient(([2.0, 0.5], [1.0, -3.0]), num_action_tokens=4)
    assert loss == pytest.approx(-(2.0 * (-1 + math.log(2)) * 1 + 0.5 * (-1 - math.log(2)) * -3) / 4)
    assert gradient == pytest.approx([-2.0 / 4, 1.5 / 4])
    assert sums["ratio"] == pytest.approx(2.5)
    assert sums["ratio_max"] == pytest.approx(2.0)
    assert sums["clipped"] == 0


def test_reinforce_truncates_its_weights():
    _, gradient, sums = loss_and_gradient(([2.0, 0.5], [1.0, 2.0]), truncate_ratio=1.5)
    assert gradient == pytest.approx([-1.5, -0.5 * 2])
    assert sums["clipped"] == 1


def test_reinforce_masks_weights_on_both_sides():
    _, gradient, sums = loss_and_gradient(([3.0, 1.5, 0.4], [1.0, 1.0, 1.0]), mask_ratio=(0.5, 2.0))
    assert gradient == pytest.approx([0, -1.5, 0])
    assert sums["clipped"] == 2


def test_reinforce_weighs_a_whole_sequence_by_the_product_of_its_ratios():
    # 2 x 3 = 6, capped at 5; 0.5 x 0.5 = 0.25
    settings = {"ratio_level": "sequence", "truncate_ratio": 5.0}
    _, gradient, sums = loss_and_gradient(([2.0, 3.0], [1.0, 1.0]), ([0.5, 0.5], [1.0, 1.0]), **settings)
    assert gradient == pytest.approx([-5, -5, -0.25, -0.25])
    assert sums["clipped"] == 2


def test_ppo_clips_the_gain_only():
    # bounds 0.8 and 1.28; advantage 1 at 2.0: clipped; -1 at 2.0: the loss stands; 1 at 0.5: stands; -1 at 0.5: clipped
    settings = {"objective": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}
    loss, gradient, sums = loss_and_gradient(([2.0, 2.0, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0]), **settings)
    assert loss == pytest.approx(-(1.28 - 2.0 + 0.5 - 0.8))
    assert gradient == pytest.approx([0, 2.0, -0.5, 0])
    assert sums["clipped"] == 2


def test_one_bound_of_ppo_can_be_off():
    settings = {"objective": "ppo_clip", "clip_high": 0.2}
    loss, _, sums = loss_and_gradient(([2.0, 0.1, 1.0], [1.0, -1.0, 1.0]), **settings)
    assert loss == pytest.approx(-(1.2 - 0.1 + 1.0))
    assert sums["clipped"] == 1


def test_dual_clip_bounds_what_a_bad_token_may_cost():
    # ratio 5 at advantage -2: 10 without, 3 x 2 with; ratio 2: 4 stands
    settings = {"objective": "ppo_clip", "clip_high": 0.2, "dual_clip": 3.0}
    loss, gradient, sums = loss_and_gradient(([5.0, 2.0], [-2.0, -2.0]), **settings)
    assert loss == pytest.approx(6 + 4)
    assert gradient == pytest.approx([0, 4])
    assert sums["clipped"] == 1


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    # weights 1.2, 1.0 and 0.7
    settings = {"objective": "cispo", "clip_low": 0.3, "clip_high": 0.2}
    loss, gradient, sums = loss_and_gradient(([2.0, 1.0, 0.5], [1.0, -1.0, 1.0]), **settings)
    assert gradient == pytest.approx([-1.2, 1.0, -0.7])
    assert loss == pytest.approx(-(1.2 * (-1 + math.log(2)) - 1.0 * -1 + 0.7 * (-1 - math.log(2))))
    assert sums["clipped"] == 2


def test_gspo_clips_the_geometric_mean_of_a_sequence():
    # sqrt(4 x 1) = 2 against a bound of 1.5: both tokens clipped; sqrt(1 x 1.21) = 1.1 stands for both
    settings = {"objective": "gspo", "clip_high": 0.5, "normalize_over": "sequences"}
    loss, gradient, sums = loss_and_gradient(
        ([4.0, 1.0], [1.0, 1.0]), ([1.0, 1.21], [2.0, 2.0]), num_sequences=2, **settings
    )
    assert loss == pytest.approx(-(1.5 * 1 + 1.1 * 2) / 2)
    # d s / d logprob = s / length
    assert gradient == pytest.approx([0, 0, -1.1 * 2 / 2 / 2, -1.1 * 2 / 2 / 2])
    assert sums["clipped"] == 2


def test_gmpo_clips_token_by_token_within_the_geometric_mean():
    # ratios 4 and 1 at advantage 1, bound 2: sqrt(2 x 1); ratios 0.25 and 1 at -1, bound 0.5: sqrt(0.5 x 1)
    settings = {"objective": "gmpo", "clip_low": 0.5, "clip_high": 1.0, "normalize_over": "sequences"}
    loss, gradient, sums = loss_and_gradient(
        ([4.0, 1.0], [1.0, 1.0]), ([0.25, 1.0], [-1.0, -1.0]), num_sequences=2, **settings
    )
    assert loss == pytest.approx(-(math.sqrt(2) - math.sqrt(0.5)) / 2)
    # the clipped tokens have none; the others half of their sequence's term
    assert gradient == pytest.approx([0, -math.sqrt(2) / 2 / 2, 0, math.sqrt(0.5) / 2 / 2])
    assert sums["clipped"] == 2


def test_gmpo_clips_the_gain_only():
    # ratio 0.25 at advantage 1, below the bound of 0.5, and 4 at -1, above 2: both losses stand
    settings = {"objective": "gmpo", "clip_low": 0.5, "clip_high": 1.0, "normalize_over": "sequences"}
    loss, gradient, sums = loss_and_gradient(([0.25], [1.0]), ([4.0], [-1.0]), **settings)
    assert loss == pytest.approx(-(0.25 - 4.0))
    assert gradient == pytest.approx([-0.25, 4.0])
    assert sums["clipped"] == 0


def test_sapo_gates_softly_with_a_temperature_for_each_sign():
    # f(r) = sigmoid(tau (r - 1)) 4 / tau; at r = 1 it is 2 / tau, with slope 1
    settings = {"objective": "sapo", "sapo_tau_positive": 1.0, "sapo_tau_negative": 2.0}
    loss, gradient, _ = loss_and_gradient(([1.0, 1.0, 2.0], [1.0, -1.0, 1.0]), **settings)
    sigmoid = 1 / (1 + math.exp(-1))
    assert loss == pytest.approx(-(2 - 1 + 4 * sigmoid))
    assert gradient == pytest.approx([-1, 1, -4 * sigmoid * (1 - sigmoid) * 2])


def test_sft_is_the_likelihood_whatever_the_advantage():
    loss, gradient, _ = loss_and_gradient(([2.0, 1.0], [-5.0, 0.0]), objective="sft", num_action_tokens=2)
    assert loss == pytest.approx(-(-1 + math.log(2) - 1) / 2)
    assert gradient == pytest.approx([-0.5, -0.5])


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


def test_only_dpo_measures_preferences():
    _, _, sums = loss_and_gradient(([1.0], [1.0]), reference=[-1.0])
    assert not [name for name in sums if name.startswith("preference")]


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        # sequences of one and of three tokens
        ({}, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ({"normalize_over": "sequences"}, [1 / 2, 1 / 6, 1 / 6, 1 / 6]),
        ({"normalize_over": "constant", "constant_tokens": 10}, [1 / 20, 1 / 20, 1 / 20, 1 / 20]),
    ],
)
def test_what_a_token_weighs_depends_on_what_is_averaged_over(settings, shares):
    counts = {"num_action_tokens": 4, "num_sequences": 2}
    _, gradient, _ = loss_and_gradient(([1.0], [1.0]), ([1.0] * 3, [1.0] * 3), **counts, **settings)
    assert gradient == pytest.approx([-share for share in shares])


def test_masked_tokens_do_not_lengthen_their_sequence():
    # two of three tokens are sampled
    mask = np.array([True, False, True])
    _, gradient, _ = loss_and_gradient(([1.0] * 3, [1.0] * 3), mask=mask, normalize_over="sequences")
    assert gradient == pytest.approx([-1 / 2, 0, -1 / 2])


def test_weights_multiply_the_loss():
    whole, _, _ = loss_and_gradient(([2.0], [1.0]))
    half, _, _ = loss_and_gradient(([2.0], [1.0]), weight=0.5)
    assert half == pytest.approx(whole / 2)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_masked_tokens_count_nowhere_whatever_they_hold(objective):
    settings = {"objective": objective, "mask": np.array([True, False])}
    loss, gradient, sums = loss_and_gradient(([2.0, math.inf], [1.0, math.nan]), **settings)
    alone, gradient_alone, _ = loss_and_gradient(([2.0], [1.0]), objective=objective)
    assert loss == pytest.approx(alone)
    assert gradient == pytest.approx([*gradient_alone, 0])
    assert sums["ratio"] == pytest.approx(2.0)
    assert math.isfinite(sums["sampler_kl"])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_empty_mask_gives_a_zero_with_a_gradient(objective):
    loss, gradient, sums = loss_and_gradient(([2.0], [1.0]), mask=np.array([False]), objective=objective)
    assert loss == 0
    assert gradient == [0]
    assert sums["ratio_max"] == 0


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("normalize_over", ["tokens", "sequences"])
def test_a_batch_in_two_micro_batches_has_the_gradient_of_one(objective, normalize_over):
    first, second = ([1.5, 0.7], [1.0, 1.0]), ([0.4, 1.1, 2.0], [-1.0, -1.0, -1.0])
    settings = {"objective": objective, "normalize_over": normalize_over, "num_action_tokens": 5, "num_sequences": 2}
    _, whole, _ = loss_and_gradient(first, second, **settings)
    _, left, _ = loss_and_gradient(first, **settings)
    _, right, _ = loss_and_gradient(second, **settings)
    assert whole == pytest.approx(left + right)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_each_objective_makes_good_tokens_likelier(objective):
    """On-policy all are the policy gradient, but for sft, which looks at no advantage, and dpo, at its sign only."""
    _, gradient, _ = loss_and_gradient(([1.0, 1.0], [2.0, 2.0]), ([1.0], [-1.0]), objective=objective)
    # dpo: beta 0.1 times sigmoid(0)
    of_its_own = {"sft": [-1, -1, -1], "dpo": [-0.05, -0.05, 0.05]}
    assert gradient == pytest.approx(of_its_own.get(objective, [-2, -2, 1]))


def test_sampler_kl_is_the_k3_estimate():
    # ratio - 1 - log(ratio)
    _, _, sums = loss_and_gradient(([2.0, 4.0], [0.0, 0.0]))
    assert sums["sampler_kl"] == pytest.approx((1 - math.log(2)) + (3 - math.log(4)))


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        # the reference is 3 times as sure; x = log 3, and d x / d logprob = -1
        ("k1", -math.log(3), 1),
        ("k2", math.log(3) ** 2 / 2, -math.log(3)),
        ("k3", 3 - 1 - math.log(3), 1 - 3),
    ],
)
def test_the_reference_pulls_with_each_estimator(estimator, value, slope):
    reference = [-1 + math.log(3.0)]
    settings = {"kl_weight": 0.1, "kl_estimator": estimator, "reference": reference}
    loss, gradient, sums = loss_and_gradient(([1.0], [0.0]), **settings)
    assert sums["reference_kl"] == pytest.approx(3 - 1 - math.log(3))
    assert loss == pytest.approx(0.1 * value)
    assert gradient == pytest.approx([0.1 * slope])


def test_a_kl_in_the_reward_lowers_the_advantage_and_has_no_gradient_of_its_own():
    # k1 is log(trainer / reference) = -log 3, so the advantage rises from 1 to 1 + 0.1 log 3
    settings = {"kl_weight": 0.1, "kl_estimator": "k1", "kl_in": "reward", "reference": [-1 + math.log(3.0)]}
    _, gradient, _ = loss_and_gradient(([1.0], [1.0]), **settings)
    assert gradient == pytest.approx([-(1 + 0.1 * math.log(3))])


def test_a_reference_without_weight_is_only_measured():
    loss, _, sums = loss_and_gradient(([1.0], [0.0]), reference=[0.0])
    assert loss == 0
    assert sums["reference_kl"] > 0


def test_entropy_is_rewarded_through_its_gradient():
    # odds 1:3; dH/dlogit_i = -p_i (log p_i + H)
    batch, _ = batch_of(([1.0], [0.0]))
    logits = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
    targets, temperatures = torch.tensor([0]), torch.ones(1)
    logprobs, entropies = linear_logprobs(logits, torch.eye(2), None, targets, temperatures, entropy_gradient=True)
    config = TrainConfig(entropy_weight=0.5)
    loss, _ = rl_loss(logprobs, batch, config, num_action_tokens=1, num_sequences=1, entropies=entropies)
    loss.backward()
    entropy = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    assert loss.item() == pytest.approx(-0.5 * entropy)
    by_hand = [0.5 * p * (math.log(p) + entropy) for p in (0.25, 0.75)]
    assert logits.grad[0].tolist() == pytest.approx(by_hand)


# reinforce and cispo are not here: their weights are detached, so their gradients are not those of their values
@pytest.mark.parametrize(
    "settings",
    [
        {"objective": "ppo_clip"},
        {"objective": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.5},
        {"objective": "gmpo", "clip_low": 0.2, "clip_high": 0.3},
        {"objective": "gmpo", "normalize_over": "sequences"},
        {"objective": "sapo"},
        {"objective": "sft", "normalize_over": "constant", "constant_tokens": 7},
        {"objective": "sft", "reference": "base", "kl_weight": 0.5, "kl_estimator": "k2"},
        {"objective": "sft", "reference": "base", "kl_weight": 0.5},
        {"objective": "dpo", "normalize_over": "sequences", "reference": "base", "dpo_beta": 0.7},
    ],
)
def test_gradients_agree_with_finite_differences(settings):
    sequences = ([1.1, 0.4], [1.0, -1.0]), ([2.0, 0.9], [0.5, 2.0])
    batch, logprobs = batch_of(*sequences, mask=np.array([True, True]))
    batch = replace(batch, sampler_logprobs=batch.sampler_logprobs.double(), advantages=batch.advantages.double())
    reference = torch.full((4,), -0.7, dtype=torch.float64)

    def loss(x):
        counts = {"num_action_tokens": 3, "num_sequences": 2}
        return rl_loss(x, batch, TrainConfig(**settings), **counts, reference_logprobs=reference)[0]

    assert torch.autograd.gradcheck(loss, logprobs)


@pytest.mark.parametrize("ratios", [[1.1, 0.7, 1.6], [0.9, 1.0, 1.2]])
def test_the_gradient_of_gspo_is_that_of_the_sequences_geometric_mean(ratios):
    """The paper's sequence form, by automatic differentiation: its token form gives the same gradient."""
    _, gradient, _ = loss_and_gradient((ratios, [1.5] * 3), objective="gspo", normalize_over="sequences")
    log_ratios = torch.tensor(np.log(ratios), requires_grad=True)
    (-1.5 * log_ratios.mean().exp()).backward()
    assert gradient == pytest.approx(log_ratios.grad.tolist())


def test_the_unbounded_gradient_is_unbiased_under_another_sampler():
    # All three tokens, each as often as the sampler draws it: the expectation is exact, not sampled.
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    sampler, rewards = np.array([0.2, 0.5, 0.3]), np.array([1.0, -2.0, 0.5])
    expected = torch.autograd.grad((logits.softmax(-1) * torch.tensor(rewards)).sum(), logits)[0]
    batch, _ = batch_of(([1.0] * 3, rewards))
    batch = replace(
        batch, sampler_logprobs=torch.tensor(np.log(sampler)).float(), weights=torch.tensor(sampler).float()
    )
    loss, _ = rl_loss(logits.log_softmax(-1), batch, TrainConfig(), num_action_tokens=1, num_sequences=1)
    assert torch.autograd.grad(-loss, logits)[0].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_masked_tokens_of_a_sequence_whose_ratio_is_bounded_are_not_counted_as_clipped():
    # the sampled tokens' 2 x 3 = 6 is above 5; the token between them was not sampled
    settings = {"ratio_level": "sequence", "truncate_ratio": 5.0, "mask": np.array([True, False, True])}
    _, gradient, sums = loss_and_gradient(([2.0, 9.0, 3.0], [1.0] * 3), **settings)
    assert gradient == pytest.approx([-5, 0, -5])
    assert sums["clipped"] == 2


def test_only_dpo_looks_at_pairs():
    settings = {"ratio_level": "sequence", "pair_ids": ["p", "p"]}
    _, gradient, _ = loss_and_gradient(([2.0], [1.0]), ([3.0], [1.0]), **settings)
    assert gradient == pytest.approx([-2, -3])


def test_what_a_sampler_says_of_masked_tokens_reaches_nothing():
    batch, logprobs = batch_of(([2.0, 1.0], [1.0, 1.0]), mask=np.array([True, False]))
    batch = replace(batch, sampler_logprobs=torch.tensor([-1.0, math.nan]))
    loss, sums = rl_loss(logprobs, batch, TrainConfig(), num_action_tokens=1, num_sequences=1)
    assert loss.item() == pytest.approx(-2 * (-1 + math.log(2)))
    assert sums["sampler_kl"].item() == pytest.approx(1 - math.log(2))


def test_what_a_reference_says_of_masked_tokens_reaches_nothing():
    settings = {"mask": np.array([True, False]), "reference": [-1 + math.log(3.0), math.inf], "kl_weight": 0.1}
    loss, gradient, sums = loss_and_gradient(([1.0, 1.0], [0.0, 0.0]), **settings)
    assert sums["reference_kl"] == pytest.approx(3 - 1 - math.log(3))
    assert loss == pytest.approx(0.1 * (3 - 1 - math.log(3)))
    assert gradient == pytest.approx([0.1 * (1 - 3), 0])


def test_dpo_in_pairs_agrees_with_finite_differences():
    sides = ([1.1, 0.4], [1.0, 1.0]), ([2.0, 0.9, 0.3], [-1.0] * 3)
    batch, logprobs = batch_of(*sides, pair_ids=["p", "p"])
    reference = torch.linspace(-2, -0.5, 5, dtype=torch.float64)
    config = TrainConfig(objective="dpo", normalize_over="sequences", reference="base")
    counts = {"num_action_tokens": 5, "num_sequences": 1}
    assert torch.autograd.gradcheck(
        lambda x: rl_loss(x, batch, config, **counts, reference_logprobs=reference)[0], logprobs
    )
