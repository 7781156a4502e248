"""Objectives of policy gradients, distillation and sft, against numbers worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from losses_by_hand import batch_of, loss_and_gradient

from ludic.records.columns import with_columns
from ludic.training.config import LossConfig, TrainConfig
from ludic.training.losses import rl_loss
from ludic.training.presets import load_algorithm


def test_reinforce_weighs_the_logprob_by_the_ratio_without_a_gradient_through_it():
    loss, gradient, sums = loss_and_gradient(([2.0, 0.5], [1.0, -3.0]), num_action_tokens=4)
    assert loss == pytest.approx(-(2.0 * (-1 + math.log(2)) * 1 + 0.5 * (-1 - math.log(2)) * -3) / 4)
    assert gradient == pytest.approx([-2.0 / 4, 1.5 / 4])
    assert sums["ratio"] == pytest.approx(2.5)
    assert sums["ratio_max"] == pytest.approx(2.0)
    assert sums["clipped"] == 0


def test_reinforce_truncates_its_weights():
    _, gradient, sums = loss_and_gradient(([2.0, 0.5], [1.0, 2.0]), is_ratio_cap=1.5)
    assert gradient == pytest.approx([-1.5, -0.5 * 2])
    assert sums["clipped"] == 1


def test_reinforce_masks_weights_on_both_sides():
    _, gradient, sums = loss_and_gradient(([3.0, 1.5, 0.4], [1.0, 1.0, 1.0]), is_ratio_bounds=(0.5, 2.0))
    assert gradient == pytest.approx([0, -1.5, 0])
    assert sums["clipped"] == 2


def test_reinforce_weighs_a_whole_sequence_by_the_product_of_its_ratios():
    # 2 x 3 = 6, capped at 5; 0.5 x 0.5 = 0.25
    settings = {"ratio_level": "sequence", "is_ratio_cap": 5.0}
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
    settings = {"objective": "gspo", "clip_high": 0.5, "loss_normalization": "sequences"}
    loss, gradient, sums = loss_and_gradient(
        ([4.0, 1.0], [1.0, 1.0]), ([1.0, 1.21], [2.0, 2.0]), num_sequences=2, **settings
    )
    assert loss == pytest.approx(-(1.5 * 1 + 1.1 * 2) / 2)
    # d s / d logprob = s / length
    assert gradient == pytest.approx([0, 0, -1.1 * 2 / 2 / 2, -1.1 * 2 / 2 / 2])
    assert sums["clipped"] == 2


def test_gmpo_clips_token_by_token_within_the_geometric_mean():
    # ratios 4 and 1 at advantage 1, bound 2: sqrt(2 x 1); ratios 0.25 and 1 at -1, bound 0.5: sqrt(0.5 x 1)
    settings = {"objective": "gmpo", "clip_low": 0.5, "clip_high": 1.0, "loss_normalization": "sequences"}
    loss, gradient, sums = loss_and_gradient(
        ([4.0, 1.0], [1.0, 1.0]), ([0.25, 1.0], [-1.0, -1.0]), num_sequences=2, **settings
    )
    assert loss == pytest.approx(-(math.sqrt(2) - math.sqrt(0.5)) / 2)
    # the clipped tokens have none; the others half of their sequence's term
    assert gradient == pytest.approx([0, -math.sqrt(2) / 2 / 2, 0, math.sqrt(0.5) / 2 / 2])
    assert sums["clipped"] == 2


def test_gmpo_clips_the_gain_only():
    # ratio 0.25 at advantage 1, below the bound of 0.5, and 4 at -1, above 2: both losses stand
    settings = {"objective": "gmpo", "clip_low": 0.5, "clip_high": 1.0, "loss_normalization": "sequences"}
    loss, gradient, sums = loss_and_gradient(([0.25], [1.0]), ([4.0], [-1.0]), **settings)
    assert loss == pytest.approx(-(0.25 - 4.0))
    assert gradient == pytest.approx([-0.25, 4.0])
    assert sums["clipped"] == 0


def test_sapo_gates_softly_with_a_temperature_for_each_sign():
    # f(r) = sigmoid(tau (r - 1)) 4 / tau; at r = 1 it is 2 / tau, with slope 1
    settings = {"objective": "sapo", "sapo_tau": (1.0, 2.0)}
    loss, gradient, _ = loss_and_gradient(([1.0, 1.0, 2.0], [1.0, -1.0, 1.0]), **settings)
    sigmoid = 1 / (1 + math.exp(-1))
    assert loss == pytest.approx(-(2 - 1 + 4 * sigmoid))
    assert gradient == pytest.approx([-1, 1, -4 * sigmoid * (1 - sigmoid) * 2])


def test_dppo_drops_what_moved_its_probability_too_far_the_way_of_its_advantage():
    # the sampler's probability is e^-1 = 0.368: at 1.5 it rose by 0.184, at 0.5 it fell by 0.184, at 1.2 rose by 0.074
    settings = {"objective": "dppo", "dppo_bounds": (0.1, 0.1)}
    ratios, advantages = [1.5, 1.5, 0.5, 0.5, 1.2], [1.0, -1.0, -2.0, 2.0, 3.0]
    loss, gradient, sums = loss_and_gradient((ratios, advantages), **settings)
    assert gradient == pytest.approx([0, 1.5, 0, -0.5 * 2, -1.2 * 3])
    assert loss == pytest.approx(-(-1.5 + 0.5 * 2 + 1.2 * 3))
    assert sums["clipped"] == 2


def test_vespo_weighs_a_sequence_by_a_gamma_of_the_product_of_its_ratios():
    # W = 2 x 0.75 = 1.5: gains W^2 e^(3 (1 - W)) = 2.25 e^-1.5; losses W^3 e^(2 (1 - W)) = 3.375 e^-1
    settings = {"objective": "vespo"}
    _, gradient, _ = loss_and_gradient(([2.0, 0.75], [1.0, 1.0]), ([2.0, 0.75], [-1.0, -1.0]), **settings)
    gain, cost = 2.25 * math.exp(-1.5), 3.375 * math.exp(-1)
    assert gradient == pytest.approx([-gain, -gain, cost, cost])
    assert loss_and_gradient(([1.0], [1.0]), **settings)[1] == pytest.approx([-1])


def test_a_sequence_of_a_bad_answer_that_became_unlikely_is_left_out():
    # mean log(sampler / trainer) is log 2 of both; only that of the negative advantage is dropped
    settings = {"objective": "ppo_clip", "clip_high": 0.2, "mask_sequence_kl": 0.5}
    sequences = ([0.25, 1.0], [-1.0, -1.0]), ([0.25, 1.0], [1.0, 1.0]), ([0.9, 1.0], [-1.0, -1.0])
    _, gradient, sums = loss_and_gradient(*sequences, **settings)
    assert gradient == pytest.approx([0, 0, -0.25, -1, 0.9, 1])
    assert sums["clipped"] == 2


def test_a_sequence_whose_geometric_mean_of_ratios_is_out_of_bounds_is_left_out():
    # sqrt(4 x 1) = 2 and sqrt(4 x 0.25) = 1
    _, gradient, sums = loss_and_gradient(
        ([4.0, 1.0], [1.0, 1.0]), ([4.0, 0.25], [1.0, 1.0]), is_sequence_ratio_bounds=(0.5, 1.5)
    )
    assert gradient == pytest.approx([0, 0, -4, -0.25])
    assert sums["clipped"] == 2


def test_a_token_mask_goes_with_every_objective_of_ratios():
    # as IcePop has it on a clipped objective: 3 is left out, 1.5 is clipped at 1.2
    settings = {"objective": "ppo_clip", "clip_high": 0.2, "is_ratio_bounds": (0.5, 2.0)}
    loss, gradient, sums = loss_and_gradient(([3.0, 1.5, 1.0], [-1.0, 1.0, 1.0]), **settings)
    assert loss == pytest.approx(-(1.2 + 1))
    assert gradient == pytest.approx([0, 0, -1])
    assert sums["clipped"] == 2


def test_the_squared_log_ratio_holds_the_policy_to_the_sampler():
    # 0.5 (log 2)^2, and 2 x 0.5 log 2 by the logprob
    loss, gradient, _ = loss_and_gradient(([2.0], [0.0]), log_ratio_weight=0.5)
    assert loss == pytest.approx(0.5 * math.log(2) ** 2)
    assert gradient == pytest.approx([math.log(2)])


def test_truncated_reinforce_is_decoupled_ppo_whose_proximal_policy_is_the_trainer_s_at_the_step():
    # Hilton et al. 2021: proximal / behaviour, truncated, times the clipped objective of policy / proximal
    ratios, advantages = [3.0, 0.5, 1.0], [1.0, -1.0, 2.0]
    _, gradient, _ = loss_and_gradient((ratios, advantages), is_ratio_cap=2.0)
    logprobs = torch.tensor(-1 + np.log(ratios), requires_grad=True)
    weight = torch.tensor(ratios).clamp(max=2.0)
    ratio, a = (logprobs - logprobs.detach()).exp(), torch.tensor(advantages)
    (-weight * torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)).sum().backward()
    assert gradient == pytest.approx(logprobs.grad.tolist())


def test_distillation_is_the_gradient_of_the_reverse_kl_to_the_teacher():
    # a token's advantage is log(teacher / trainer): log 3 where the teacher is surer, -log 2 where it is not
    settings = {"kl_weight": 1.0, "kl_estimator": "k1", "kl_placement": "reward"}
    reference = [-1 + math.log(3.0), -1 - math.log(2.0)]
    _, gradient, _ = loss_and_gradient(([1.0, 1.0], [0.0, 0.0]), reference=reference, **settings)
    assert gradient == pytest.approx([-math.log(3), math.log(2)])


def test_sft_is_the_likelihood_whatever_the_advantage():
    loss, gradient, _ = loss_and_gradient(([2.0, 1.0], [-5.0, 0.0]), objective="sft", num_action_tokens=2)
    assert loss == pytest.approx(-(-1 + math.log(2) - 1) / 2)
    assert gradient == pytest.approx([-0.5, -0.5])


def test_weights_may_be_truncated_and_masked():
    # 5 is masked, 1.8 truncated to 1.5, 0.9 stands
    settings = {"is_ratio_cap": 1.5, "is_ratio_bounds": (0.5, 2.0)}
    _, gradient, sums = loss_and_gradient(([5.0, 1.8, 0.9], [1.0] * 3), **settings)
    assert gradient == pytest.approx([0, -1.5, -0.9])
    assert sums["clipped"] == 2


@pytest.mark.parametrize("ratios", [[1.1, 0.7, 1.6], [0.9, 1.0, 1.2]])
def test_the_gradient_of_gspo_is_that_of_the_sequences_geometric_mean(ratios):
    """The paper's sequence form, by automatic differentiation: its token form gives the same gradient."""
    _, gradient, _ = loss_and_gradient((ratios, [1.5] * 3), objective="gspo", loss_normalization="sequences")
    log_ratios = torch.tensor(np.log(ratios), requires_grad=True)
    (-1.5 * log_ratios.mean().exp()).backward()
    assert gradient == pytest.approx(log_ratios.grad.tolist())


def test_the_unbounded_gradient_is_unbiased_under_another_sampler():
    # All three tokens, each as often as the sampler draws it: the expectation is exact, not sampled.
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    sampler, rewards = np.array([0.2, 0.5, 0.3]), np.array([1.0, -2.0, 0.5])
    expected = torch.autograd.grad((logits.softmax(-1) * torch.tensor(rewards)).sum(), logits)[0]
    batch, _ = batch_of(([1.0] * 3, rewards))
    batch = with_columns(batch, response_logprobs=torch.tensor(np.log(sampler)).float())
    batch = replace(batch, weights=torch.tensor(sampler).float())
    loss, _ = rl_loss(logits.log_softmax(-1), batch, LossConfig(), num_action_tokens=1, num_sequences=1)
    assert torch.autograd.grad(-loss, logits)[0].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_distillation_descends_the_reverse_kl_to_its_teacher():
    # all three tokens, each as often as the trainer itself draws it
    logits, teacher = torch.tensor([0.3, -0.2, 0.5], requires_grad=True), torch.tensor([0.1, 0.2, 0.7])
    config = TrainConfig.of(**load_algorithm("distillation"), reference="teacher").loss
    batch, _ = batch_of(([1.0] * 3, [0.0] * 3))
    for _ in range(100):
        logprobs = logits.log_softmax(-1)
        kl = (logprobs.exp() * (logprobs - teacher.log())).sum()
        expected = torch.autograd.grad(kl, logits, retain_graph=True)[0]
        drawn = with_columns(batch, response_logprobs=logprobs.detach())
        drawn = replace(drawn, weights=logprobs.detach().exp())
        counts = {"num_action_tokens": 1, "num_sequences": 1}
        loss, _ = rl_loss(logprobs, drawn, config, **counts, reference_logprobs=teacher.log())
        gradient = torch.autograd.grad(loss, logits)[0]
        assert gradient.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
        logits.data -= gradient
    assert logits.softmax(-1).tolist() == pytest.approx(teacher.tolist(), abs=1e-4)


def test_masked_tokens_of_a_sequence_whose_ratio_is_bounded_are_not_counted_as_clipped():
    # the sampled tokens' 2 x 3 = 6 is above 5; the token between them was not sampled
    settings = {"ratio_level": "sequence", "is_ratio_cap": 5.0, "mask": np.array([True, False, True])}
    _, gradient, sums = loss_and_gradient(([2.0, 9.0, 3.0], [1.0] * 3), **settings)
    assert gradient == pytest.approx([-5, 0, -5])
    assert sums["clipped"] == 2
