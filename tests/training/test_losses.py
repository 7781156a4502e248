import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ludic.errors import ConfigError
from ludic.training import losses
from ludic.training.config import LossConfig
from ludic.training.losses import policy_gradient_loss, token_logprobs_and_entropy
from ludic.training.packing import TrainingSequence, pack


def batch_of(ratios, advantages, mask=None, weight=1.0):
    """A micro-batch, and trainer logprobs (float64, with gradient) that stand at these ratios to the sampler's."""
    sampler = np.full(len(ratios), -1.0)
    batch = pack(
        [
            TrainingSequence(
                rollout_id="r1",
                prompt_tokens=np.zeros(1, np.int32),
                response_tokens=np.zeros(len(ratios), np.int32),
                sampler_logprobs=sampler,
                action_mask=mask,
                advantage=np.array(advantages, np.float32),
                weight=weight,
            )
        ]
    )
    return batch, torch.tensor(sampler + np.log(ratios), requires_grad=True)


def loss_and_gradient(config, ratios, advantages, **fields):
    batch, logprobs = batch_of(ratios, advantages, **fields)
    loss, sums = policy_gradient_loss(logprobs, batch, config, num_action_tokens=4)
    loss.backward()
    return loss.item(), logprobs.grad.tolist(), sums


def test_without_a_bound_the_loss_is_minus_ratio_times_advantage():
    loss, gradient, sums = loss_and_gradient(LossConfig(), [2.0, 0.5], [1.0, -3.0])
    assert loss == pytest.approx(-(2.0 * 1 + 0.5 * -3) / 4)
    # d ratio / d logprob = ratio
    assert gradient == pytest.approx([-2.0 / 4, 1.5 / 4])
    assert sums["ratio"].item() == pytest.approx(2.5)
    assert sums["ratio_max"].item() == pytest.approx(2.0)
    assert sums["clipped"].item() == 0


def test_clipping_bounds_the_gain_only():
    # bounds 0.8 and 1.28; advantage 1 at 2.0: clipped; -1 at 2.0: the loss stands; 1 at 0.5: stands; -1 at 0.5: clipped
    config = LossConfig(clip_low=0.2, clip_high=0.28)
    loss, gradient, sums = loss_and_gradient(config, [2.0, 2.0, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0])
    assert loss == pytest.approx(-(1.28 - 2.0 + 0.5 - 0.8) / 4)
    assert gradient == pytest.approx([0, 2.0 / 4, -0.5 / 4, 0])
    assert sums["clipped"].item() == 2


def test_one_bound_can_be_off():
    loss, _, sums = loss_and_gradient(LossConfig(clip_high=0.2), [2.0, 0.1], [1.0, -1.0])
    assert loss == pytest.approx(-(1.2 - 0.1) / 4)
    assert sums["clipped"].item() == 1


def test_a_truncated_ratio_weighs_the_logprob_and_has_no_gradient_of_its_own():
    loss, gradient, sums = loss_and_gradient(LossConfig(truncate_ratio=1.5), [2.0, 0.5], [1.0, 2.0])
    logprobs = [-1 + math.log(2.0), -1 + math.log(0.5)]
    assert loss == pytest.approx(-(1.5 * logprobs[0] * 1 + 0.5 * logprobs[1] * 2) / 4)
    assert gradient == pytest.approx([-1.5 / 4, -0.5 * 2 / 4])
    assert sums["clipped"].item() == 1


def test_weights_multiply_the_loss():
    whole, _, _ = loss_and_gradient(LossConfig(), [2.0], [1.0])
    half, _, _ = loss_and_gradient(LossConfig(), [2.0], [1.0], weight=0.5)
    assert half == pytest.approx(whole / 2)


def test_masked_tokens_count_nowhere_whatever_they_hold():
    mask = np.array([True, False])
    loss, gradient, sums = loss_and_gradient(LossConfig(), [2.0, math.inf], [1.0, math.nan], mask=mask)
    assert loss == pytest.approx(-2.0 / 4)
    assert gradient == pytest.approx([-2.0 / 4, 0])
    assert sums["ratio"].item() == pytest.approx(2.0)
    assert math.isfinite(sums["sampler_kl"].item())


def test_an_empty_mask_gives_a_zero_with_a_gradient():
    loss, gradient, sums = loss_and_gradient(LossConfig(), [2.0], [1.0], mask=np.array([False]))
    assert loss == 0
    assert gradient == [0]
    assert sums["ratio_max"].item() == 0


def test_sampler_kl_is_the_k3_estimate():
    # ratio - 1 - log(ratio)
    _, _, sums = loss_and_gradient(LossConfig(), [2.0, 0.5], [0.0, 0.0])
    assert sums["sampler_kl"].item() == pytest.approx((1 - math.log(2)) + (-0.5 + math.log(2)))


def test_the_reference_pulls_with_the_k3_estimate():
    batch, logprobs = batch_of([1.0], [0.0])
    reference = torch.tensor([-1 + math.log(3.0)])  # the reference is 3 times as sure
    loss, sums = policy_gradient_loss(
        logprobs, batch, LossConfig(kl_weight=0.1), num_action_tokens=1, reference_logprobs=reference
    )
    loss.backward()
    assert sums["reference_kl"].item() == pytest.approx(3 - 1 - math.log(3))
    assert loss.item() == pytest.approx(0.1 * (3 - 1 - math.log(3)))
    # d/dlogprob (exp(ref - logprob) - (ref - logprob)) = 1 - 3
    assert logprobs.grad.tolist() == pytest.approx([-0.2])


def test_a_reference_without_weight_is_only_measured():
    batch, logprobs = batch_of([1.0], [0.0])
    reference = torch.tensor([0.0])
    loss, sums = policy_gradient_loss(logprobs, batch, LossConfig(), num_action_tokens=1, reference_logprobs=reference)
    assert loss.item() == 0
    assert sums["reference_kl"].item() > 0


# truncate_ratio is not here: its weight is detached, so its gradient is not that of its value
@pytest.mark.parametrize("config", [LossConfig(), LossConfig(clip_low=0.2, clip_high=0.3), LossConfig(kl_weight=0.5)])
def test_gradients_agree_with_finite_differences(config):
    batch, logprobs = batch_of([1.1, 0.4, 2.0, 0.9], [1.0, -1.0, 0.5, 2.0], mask=np.array([1, 1, 1, 0], bool))
    batch = replace(batch, sampler_logprobs=batch.sampler_logprobs.double(), advantages=batch.advantages.double())
    reference = torch.full((4,), -0.7, dtype=torch.float64)

    def loss(x):
        return policy_gradient_loss(x, batch, config, num_action_tokens=3, reference_logprobs=reference)[0]

    assert torch.autograd.gradcheck(loss, logprobs)


def test_the_unbounded_gradient_is_unbiased_under_another_sampler():
    # All three tokens, each as often as the sampler draws it: the expectation is exact, not sampled.
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    sampler, rewards = np.array([0.2, 0.5, 0.3]), np.array([1.0, -2.0, 0.5])
    expected = torch.autograd.grad((logits.softmax(-1) * torch.tensor(rewards)).sum(), logits)[0]
    batch, _ = batch_of([1.0] * 3, rewards)
    batch = replace(
        batch, sampler_logprobs=torch.tensor(np.log(sampler)).float(), weights=torch.tensor(sampler).float()
    )
    loss, _ = policy_gradient_loss(logits.log_softmax(-1), batch, LossConfig(), num_action_tokens=1)
    assert torch.autograd.grad(-loss, logits)[0].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_logprobs_and_entropy_worked_out_by_hand():
    # probabilities 1/4 and 3/4; at temperature 2 the odds of 9 become 3
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(9)]])
    logprobs, entropy = token_logprobs_and_entropy(logits, torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
    assert logprobs.tolist() == pytest.approx([math.log(1 / 4), math.log(3 / 4)])
    assert entropy.tolist() == pytest.approx([0.25 * math.log(4) + 0.75 * math.log(4 / 3)] * 2)


def test_chunks_do_not_change_logprobs_entropy_or_gradient(monkeypatch):
    torch.manual_seed(0)
    logits = torch.randn(7, 11, dtype=torch.bfloat16, requires_grad=True)
    targets, temperatures = torch.randint(11, (7,)), torch.linspace(0.5, 2, 7)
    scaled = logits.float() / temperatures[:, None]
    expected = scaled.log_softmax(-1)[torch.arange(7), targets]
    expected_gradient = torch.autograd.grad(expected.sum(), logits)[0]
    monkeypatch.setattr(losses, "_ROWS", 3)
    logprobs, entropy = token_logprobs_and_entropy(logits, targets, temperatures)
    assert logprobs.dtype == torch.float32
    assert torch.allclose(logprobs, expected, atol=1e-6)
    assert torch.allclose(entropy, torch.distributions.Categorical(logits=scaled).entropy(), atol=1e-6)
    assert not entropy.requires_grad
    assert torch.allclose(torch.autograd.grad(logprobs.sum(), logits)[0], expected_gradient, atol=1e-2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_high": 0.0}, "clip_high is 0.0"),
        ({"clip_low": 1.5}, "clip_low is 1.5"),
        ({"truncate_ratio": math.inf}, "truncate_ratio is inf"),
        ({"truncate_ratio": 2.0, "clip_high": 0.2}, "set one of them"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        LossConfig(**settings)
