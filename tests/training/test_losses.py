"""Promises of every objective, and what turns objectives into a loss: means, KL and entropy."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from losses_by_hand import PAIRED, WIDE, batch_of, loss_and_gradient, with_bound

from ludic.records.columns import Ragged, with_columns
from ludic.settings.kinds import OBJECTIVE
from ludic.settings.table import convert
from ludic.training.batches.packing import MicroBatch, Sequences, TrainingSequence, pack, pack_each
from ludic.training.config import LossConfig
from ludic.training.logprobs import linear_logprobs
from ludic.training.losses import make_terms, rl_loss


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        # sequences of one and of three tokens
        ({}, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ({"loss_normalization": "sequences"}, [1 / 2, 1 / 6, 1 / 6, 1 / 6]),
        ({"loss_normalization": "episodes"}, [1 / 2, 1 / 6, 1 / 6, 1 / 6]),  # the rest is in the plan's weights
        ({"loss_normalization": "constant", "constant_tokens": 10}, [1 / 20, 1 / 20, 1 / 20, 1 / 20]),
    ],
)
def test_what_a_token_weighs_depends_on_what_is_averaged_over(settings, shares):
    counts = {"num_action_tokens": 4, "num_sequences": 2}
    _, gradient, _ = loss_and_gradient(([1.0], [1.0]), ([1.0] * 3, [1.0] * 3), **counts, **settings)
    assert gradient == pytest.approx([-share for share in shares])


def test_masked_tokens_do_not_lengthen_their_sequence():
    # two of three tokens are sampled
    mask = np.array([True, False, True])
    _, gradient, _ = loss_and_gradient(([1.0] * 3, [1.0] * 3), mask=mask, loss_normalization="sequences")
    assert gradient == pytest.approx([-1 / 2, 0, -1 / 2])


def test_weights_multiply_the_loss():
    whole, _, _ = loss_and_gradient(([2.0], [1.0]))
    half, _, _ = loss_and_gradient(([2.0], [1.0]), weight=0.5)
    assert half == pytest.approx(whole / 2)


@pytest.mark.parametrize("objective", OBJECTIVE.names())
def test_masked_tokens_count_nowhere_whatever_they_hold(objective):
    settings = {"objective": objective, "mask": np.array([True, False])}
    loss, gradient, sums = loss_and_gradient(([2.0, math.inf], [1.0, math.nan]), **settings)
    alone, gradient_alone, _ = loss_and_gradient(([2.0], [1.0]), objective=objective)
    assert loss == pytest.approx(alone)
    assert gradient == pytest.approx([*gradient_alone, 0])
    assert sums["ratio"] == pytest.approx(2.0)
    assert math.isfinite(sums["sampler_kl"])


@pytest.mark.parametrize("objective", OBJECTIVE.names())
def test_an_empty_mask_gives_a_zero_with_a_gradient(objective):
    loss, gradient, sums = loss_and_gradient(([2.0], [1.0]), mask=np.array([False]), objective=objective)
    assert loss == 0
    assert gradient == [0]
    assert sums["ratio_max"] == 0


@pytest.mark.parametrize("objective", OBJECTIVE.names())
@pytest.mark.parametrize("loss_normalization", ["tokens", "sequences"])
def test_a_batch_in_two_micro_batches_has_the_gradient_of_one(objective, loss_normalization):
    first, second = ([1.5, 0.7], [1.0, 1.0]), ([0.4, 1.1, 2.0], [-1.0, -1.0, -1.0])
    settings = {
        "objective": objective,
        "loss_normalization": loss_normalization,
        "num_action_tokens": 5,
        "num_sequences": 2,
    }
    _, whole, _ = loss_and_gradient(first, second, **settings)
    _, left, _ = loss_and_gradient(first, **settings)
    _, right, _ = loss_and_gradient(second, **settings)
    assert whole == pytest.approx(left + right)


@pytest.mark.parametrize("objective", sorted({*OBJECTIVE.names()} - {"orpo"}))  # whose gradient is worked out below
def test_each_objective_makes_good_tokens_likelier(objective):
    """On-policy all are the policy gradient, but for sft, which looks at no advantage, and pairs, at its sign only."""
    _, gradient, _ = loss_and_gradient(([1.0, 1.0], [2.0, 2.0]), ([1.0], [-1.0]), objective=objective)
    # dpo: beta 0.1 times sigmoid(0)
    # ipo: 2 times the gain of 0 less 1 / 0.2
    of_its_own = {"sft": [-1, -1, -1], "dpo": [-0.05, -0.05, 0.05], "ipo": [-10, -10, 10]}
    assert gradient == pytest.approx(of_its_own.get(objective, [-2, -2, 1]))


@pytest.mark.parametrize("log_ratio", [89.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss_normalization", ["tokens", "sequences"])
@pytest.mark.parametrize("objective", OBJECTIVE.names())
def test_a_ratio_that_float32_can_not_hold_gives_a_finite_loss_and_gradient(
    objective, loss_normalization, advantage, log_ratio
):
    # exp(89) is infinite in float32; the sequence's second token is as likely as it was
    settings = with_bound({"objective": objective, "clip_high": 0.2} if objective in WIDE else {"objective": objective})
    settings |= {"kl_weight": 0.1, "kl_estimator": "k3", "reference": "base", "loss_normalization": loss_normalization}
    batch, _ = batch_of(([1.0, 1.0], [advantage, advantage]))
    logprobs = torch.tensor([-1 + log_ratio, -1.0], dtype=torch.float32, requires_grad=True)
    if objective in PAIRED:
        settings["loss_normalization"] = "sequences"
    counts = {"num_action_tokens": 2, "num_sequences": 1, "reference_logprobs": torch.tensor([-1.0, -1.0])}
    loss, sums = rl_loss(logprobs, batch, convert(LossConfig, settings), **counts)
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in sums.values())


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_no_ratio_is_above_exp_20(level):
    # e^15 twice in a sequence is e^30; e^15 stands
    sequences = ([math.exp(15)] * 2, [1.0, 1.0])
    _, gradient, _ = loss_and_gradient(sequences, ratio_level=level)
    assert gradient == pytest.approx([-math.exp(15 if level == "token" else 20)] * 2, rel=1e-6)
    _, gradient, sums = loss_and_gradient(([math.exp(25)], [1.0]), ratio_level=level)
    assert gradient == pytest.approx([-math.exp(20)], rel=1e-6)
    assert sums["ratio_max"] == pytest.approx(math.exp(20), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "by_hand"),
    [
        # entropies 1 and 3, 5, 7 of two sequences
        ({}, (1 + 3 + 5 + 7) / 4),
        ({"loss_normalization": "sequences"}, (1 + (3 + 5 + 7) / 3) / 2),
        ({"loss_normalization": "constant", "constant_tokens": 10}, (1 + 3 + 5 + 7) / (10 * 2)),
    ],
)
def test_the_mean_of_the_entropy_is_over_what_that_of_the_objective_is(settings, by_hand):
    batch, logprobs = batch_of(([1.0], [0.0]), ([1.0] * 3, [0.0] * 3))
    entropies = torch.tensor([1.0, 3.0, 5.0, 7.0])
    config = convert(LossConfig, {"entropy_weight": 0.5, **settings})
    loss, _ = rl_loss(logprobs, batch, config, num_action_tokens=4, num_sequences=2, entropies=entropies)
    assert loss.item() == pytest.approx(-0.5 * by_hand)


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
    settings = {"kl_weight": 0.1, "kl_estimator": "k1", "kl_placement": "reward", "reference": [-1 + math.log(3.0)]}
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
    config = LossConfig(entropy_weight=0.5)
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
        {"objective": "ppo_clip", **WIDE["ppo_clip"]},
        {"objective": "ppo_clip", "clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.5},
        {"objective": "gmpo", "clip_low": 0.2, "clip_high": 0.3},
        {"objective": "gmpo", "loss_normalization": "sequences", **WIDE["gmpo"]},
        {"objective": "sapo"},
        {"objective": "sft", "loss_normalization": "constant", "constant_tokens": 7},
        {"objective": "sft", "reference": "base", "kl_weight": 0.5, "kl_estimator": "k2"},
        {"objective": "sft", "reference": "base", "kl_weight": 0.5},
        {"objective": "dpo", "loss_normalization": "sequences", "reference": "base", "dpo_beta": 0.7},
        {"objective": "ipo", "loss_normalization": "sequences", "reference": "base", "dpo_beta": 0.7},
        {"objective": "orpo", "loss_normalization": "sequences", "orpo_weight": 0.5},
        {"objective": "dppo", "log_ratio_weight": 0.3},
    ],
)
def test_gradients_agree_with_finite_differences(settings):
    sequences = ([1.1, 0.4], [1.0, -1.0]), ([2.0, 0.9], [0.5, 2.0])
    batch, logprobs = batch_of(*sequences, mask=np.array([True, True]))
    batch = with_columns(batch, response_logprobs=batch.sampler_logprobs.double())
    batch = replace(batch, advantages=batch.advantages.double())
    reference = torch.full((4,), -0.7, dtype=torch.float64)

    def loss(x):
        counts = {"num_action_tokens": 3, "num_sequences": 2}
        return rl_loss(x, batch, convert(LossConfig, settings), **counts, reference_logprobs=reference)[0]

    assert torch.autograd.gradcheck(loss, logprobs)


def test_what_a_sampler_says_of_masked_tokens_reaches_nothing():
    batch, logprobs = batch_of(([2.0, 1.0], [1.0, 1.0]), mask=np.array([True, False]))
    batch = with_columns(batch, response_logprobs=torch.tensor([-1.0, math.nan]))
    loss, sums = rl_loss(logprobs, batch, LossConfig(), num_action_tokens=1, num_sequences=1)
    assert loss.item() == pytest.approx(-2 * (-1 + math.log(2)))
    assert sums["sampler_kl"].item() == pytest.approx(1 - math.log(2))


def test_what_a_reference_says_of_masked_tokens_reaches_nothing():
    settings = {"mask": np.array([True, False]), "reference": [-1 + math.log(3.0), math.inf], "kl_weight": 0.1}
    loss, gradient, sums = loss_and_gradient(([1.0, 1.0], [0.0, 0.0]), **settings)
    assert sums["reference_kl"] == pytest.approx(3 - 1 - math.log(3))
    assert loss == pytest.approx(0.1 * (3 - 1 - math.log(3)))
    assert gradient == pytest.approx([0.1 * (1 - 3), 0])


def row(rollout_id: str, mask: list[bool], **columns: np.ndarray | Ragged | float) -> TrainingSequence:
    """A prompt of two tokens, and a response of one token for each of the mask."""
    always = {"response_logprobs": np.zeros(len(mask), np.float32), "action_mask": np.array(mask)}
    return TrainingSequence(
        rollout_id=rollout_id,
        prompt_tokens=np.zeros(2, np.int32),
        response_tokens=np.zeros(len(mask), np.int32),
        advantage=1.0,
        columns={**always, **columns},
    )


def columns_of(batch: MicroBatch) -> Mapping[str, Any]:
    return make_terms(torch.zeros(len(batch.targets)), batch, None, LossConfig()).columns


def test_an_objective_reads_every_array_that_a_row_has():
    experts = np.arange(3 * 2, dtype=np.int16).reshape(3, 1, 2)
    kept = Ragged.of([[4, 7], []], np.int32)
    rewards = np.array([0.5, 2.0], np.float32)  # any array of the catalogue
    one = row("one", [True, False], experts=experts, kept_tokens=kept, token_rewards=rewards)
    columns = columns_of(pack([one, row("other", [True], token_rewards=rewards[:1])]))
    # 0 at a token that was not sampled.
    assert columns["token_rewards"].tolist() == [0.5, 0, 0.5]
    assert columns["action_mask"].tolist() == [True, False, True]
    # As they are, beside the tokens read, of which the prompts are a part.
    assert columns["experts"][:, 0].tolist() == [[0, 1], [2, 3], [4, 5], [-1, -1], [-1, -1]]
    of_tokens = columns["kept_tokens"]
    assert [of_tokens.values[a:b].tolist() for a, b in pairwise(of_tokens.bounds)] == [[4, 7], [], []]
    assert set(columns) == {"response_logprobs", "action_mask", "experts", "kept_tokens", "token_rewards"}


def test_the_names_that_an_objective_reads_are_those_of_the_batch_in_every_micro_batch():
    """An objective that took another way on one rank, or raised there alone, would hang the others."""
    experts = np.arange(4 * 3 * 2, dtype=np.int16).reshape(4, 3, 2)
    one = row("one", [True, False, True], experts=experts)
    plain = row("plain", [True], experts=None)  # asked for, and absent
    kept = ["response_logprobs", "action_mask", "kept_tokens"]
    for sequences, plans, names in (
        (Sequences.of([one, plain]), [[0], [1], []], [*kept, "experts"]),
        (with_columns(Sequences.of([]), experts=[]), [[]], [*kept, "experts"]),
        (Sequences.of([plain]), [[0], []], [*kept, "experts"]),
        (Sequences.of([row("other", [True, False])]), [[0], []], kept),
        (Sequences.of([]), [[]], kept),
    ):
        for batch in pack_each(sequences, plans):
            columns = columns_of(batch)
            assert list(columns) == names
            assert len(columns) == len(names)
            assert [columns.get(name) is not None for name in names] == [True] * len(names)
            assert columns["kept_tokens"].has_any.tolist() == [False] * len(batch.targets)
            if "experts" in columns:
                beyond = (3, 2) if one.rollout_id in sequences.rollout_id else (1, 1)
                assert columns["experts"].shape == (batch.input_ids.shape[1], *beyond)
                assert bool((columns["experts"] == -1).all()) == (one.rollout_id not in batch.rollout_ids)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("token_reward", "is not an array of a row, wanted one of prompt_tokens, "),
        ("token_rewards", "is not in the batch: training does not read it; give its row in the catalogue"),
        ("experts", "is not in the batch: training reads it on request; start the trainer so that it asks for it"),
        ("prompt_tokens", "is not a column of a batch: its tokens are in input_ids and targets"),
        ("response_tokens", "is not a column of a batch: its tokens are in input_ids and targets"),
    ],
)
def test_an_array_that_is_never_in_a_batch_is_refused_to_an_objective_by_name(name, reason):
    for batch in (pack([]), pack([row("one", [True, False, True])])):
        columns = columns_of(batch)
        with pytest.raises(KeyError, match=f"{name} {reason}"):
            columns[name]
        assert name not in columns
        assert name not in list(columns)
        assert columns.get(name, "nothing") == "nothing"
