import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import whole

from ludic.errors import TrainingError
from ludic.records.columns import with_columns
from ludic.settings.table import convert
from ludic.training.batches.packing import assign, pack
from ludic.training.config import LossConfig, TrainConfig
from ludic.training.losses import rl_loss
from ludic.training.model import shard
from ludic.training.reference import model_reference, reference_logprobs
from ludic.training.step import train_step


@pytest.fixture
def step(mesh, tiny_model):
    """One gradient step on a fresh model; metrics, gradients as the optimizer saw them, weights after."""

    def run(micro_batches, *, num_action_tokens, reference=None, **settings):
        model, seen = tiny_model(), {}
        shard(model, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(
            lambda *_: seen.update({n: whole(p.grad).clone() for n, p in model.named_parameters()})
        )
        metrics = train_step(
            model,
            optimizer,
            micro_batches,
            config=TrainConfig.of(**{"max_grad_norm": None, "reference": "base" if reference else None} | settings),
            num_action_tokens=num_action_tokens,
            num_ranks=1,
            learning_rate=0.1,
            reference=reference,
        )
        return metrics, seen, {n: whole(p) for n, p in model.named_parameters()}

    return run


def num_action_tokens(sequences):
    return sum(s.num_action_tokens for s in sequences)


def assert_close(found, expected):
    for name in expected:
        scale = expected[name].abs().max().item()
        assert torch.allclose(found[name], expected[name], rtol=0, atol=1e-5 * scale + 1e-8), name


def padded_loss_and_gradients(model, sequences):
    """The same loss the usual way: one padded row a sequence, an attention mask, logits everywhere."""
    lengths = [s.num_tokens for s in sequences]
    ids, mask = torch.zeros(len(sequences), max(lengths), dtype=torch.int64), torch.zeros(len(sequences), max(lengths))
    for row, s in enumerate(sequences):
        ids[row, : lengths[row]] = torch.from_numpy(np.concatenate([s.prompt_tokens, s.response_tokens]))
        mask[row, : lengths[row]] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    loss = torch.zeros(())
    for row, s in enumerate(sequences):
        start = len(s.prompt_tokens)
        response = logits[row, start - 1 : lengths[row] - 1] / s.temperature
        logprobs = response.log_softmax(-1)[torch.arange(len(s.response_tokens)), s.response_tokens]
        ratio = (logprobs - torch.from_numpy(s.columns["response_logprobs"])).exp()
        advantages = torch.from_numpy(np.broadcast_to(s.advantage, s.response_tokens.shape).copy())
        token_loss = -s.weight * ratio.detach() * logprobs * advantages
        mask = s.columns.get("action_mask")
        loss = loss + (token_loss if mask is None else token_loss[torch.from_numpy(mask)]).sum()
    loss = loss / num_action_tokens(sequences)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def test_packed_loss_and_gradients_are_those_of_padded_rows(step, tiny_model, sequences):
    some = sequences(7, 1)
    expected_loss, expected = padded_loss_and_gradients(tiny_model(), some)
    metrics, gradients, _ = step([pack(some)], num_action_tokens=num_action_tokens(some))
    assert metrics["loss"] == pytest.approx(expected_loss, rel=1e-5)
    assert_close(gradients, expected)


def test_how_a_batch_is_split_into_micro_batches_does_not_matter(step, sequences):
    some = sequences(7, 1)
    plan = assign(np.array([s.num_tokens for s in some]), 1, 50)[0]
    assert len(plan) > 2
    whole, expected, _ = step([pack(some)], num_action_tokens=num_action_tokens(some))
    parts = [pack([some[i] for i in indexes]) for indexes in plan]
    split, gradients, _ = step([*parts, pack([])], num_action_tokens=num_action_tokens(some))
    assert split == pytest.approx(whole, rel=1e-5)
    assert_close(gradients, expected)


def test_how_a_batch_is_split_does_not_matter_to_whitened_returns(step, tiny_model, sequences):
    some = sequences(6, 1)
    of_base = model_reference(tiny_model(seed=1), torch.device("cpu"))
    settings = {"whiten_advantages": True, "kl_weight": 0.5, "kl_placement": "return", "reference": of_base}
    settings["num_action_tokens"] = num_action_tokens(some)
    whole, expected, _ = step([pack(some)], **settings)
    split, gradients, _ = step([pack(some[:2]), pack(some[2:]), pack([])], **settings)
    assert split == pytest.approx(whole, rel=1e-5)
    assert_close(gradients, expected)
    unshaped, _, _ = step([pack(some)], **settings | {"whiten_advantages": False, "kl_placement": "loss"})
    assert whole["loss"] != pytest.approx(unshaped["loss"], rel=1e-2)


def mean_of(tiny_model, sequences, **settings):
    """The mean over sequences, or pairs, taken one by one."""
    losses = []
    for together in sequences:
        batch = pack(together)
        logprobs = reference_logprobs(tiny_model(), batch)
        of_reference = reference_logprobs(tiny_model(seed=1), batch)
        counts = {"num_action_tokens": 1, "num_sequences": 1}
        config = convert(LossConfig, {"loss_normalization": "sequences", "reference": "seed 1", **settings})
        losses.append(rl_loss(logprobs, batch, config, **counts, reference_logprobs=of_reference)[0].item())
    return np.mean(losses)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_mean_over_sequences_counts_those_of_all_micro_batches(step, tiny_model, sequences, num_micro_batches):
    some = sequences(6, 1)
    parts = [pack(part) for part in (some[:4], some[4:])] if num_micro_batches == 2 else [pack(some)]
    parts.append(pack([]))  # as on a rank without a sequence
    settings = {
        "loss_normalization": "sequences",
        "reference": model_reference(tiny_model(seed=1), torch.device("cpu")),
    }
    metrics, _, _ = step(parts, num_action_tokens=num_action_tokens(some), **settings)
    assert metrics["loss"] == pytest.approx(mean_of(tiny_model, [[s] for s in some]), rel=1e-5)


def test_a_mean_over_pairs_counts_pairs(step, tiny_model, sequences):
    sides = [replace(s, pair_id=f"{i % 3}", advantage=1.0 if i < 3 else -1.0) for i, s in enumerate(sequences(6, 1))]
    pairs = [sides[index::3] for index in range(3)]
    of_base = model_reference(tiny_model(seed=1), torch.device("cpu"))
    settings = {"objective": "dpo", "loss_normalization": "sequences", "reference": of_base}
    metrics, _, _ = step(
        [pack(pairs[0] + pairs[1]), pack(pairs[2])], num_action_tokens=num_action_tokens(sides), **settings
    )
    assert metrics["loss"] == pytest.approx(mean_of(tiny_model, pairs, objective="dpo"), rel=1e-5)


def test_metrics_have_the_names_of_the_metrics_table(step, tiny_model, sequences):
    some = sequences(4, 1)
    metrics, _, _ = step(
        [pack(some)],
        num_action_tokens=num_action_tokens(some),
        reference=model_reference(tiny_model(), torch.device("cpu")),
    )
    schema = json.loads((Path(__file__).parents[2] / "schemas" / "metrics.v1.json").read_text())
    assert metrics.keys() <= {column["name"] for column in schema["columns"]}
    assert metrics.keys() >= {"loss", "entropy", "sampler_kl", "reference_kl", "ratio_mean", "ratio_max"}
    assert metrics.keys() >= {"clip_fraction", "grad_norm", "learning_rate"}


def test_a_rollout_of_the_trainers_own_weights_has_ratio_one(step, tiny_model, sequences):
    model, some = tiny_model(), sequences(4, 1)
    own = []
    for s in some:
        logprobs = reference_logprobs(model, pack([s])).numpy()
        own.append(replace(with_columns(s, response_logprobs=logprobs), advantage=1.0))
    metrics, _, _ = step(
        [pack(own)],
        num_action_tokens=num_action_tokens(own),
        reference=model_reference(model, torch.device("cpu")),
        objective="ppo_clip",
        clip_high=0.2,
    )
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["sampler_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["reference_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["clip_fraction"] == 0
    # a random model is nearly uniform over 256 tokens; at temperature 0.7 a little less so
    assert metrics["entropy"] == pytest.approx(np.log(256), abs=0.1)


def test_means_are_over_action_tokens_of_all_micro_batches(step, tiny_model, sequences):
    some, model = sequences(4, 1), tiny_model()
    sums = []
    for s in some:
        batch = pack([s])
        logprobs = reference_logprobs(model, batch)
        sums.append(rl_loss(logprobs, batch, LossConfig(), num_action_tokens=1, num_sequences=1)[1])
    metrics, _, _ = step([pack([s]) for s in some], num_action_tokens=num_action_tokens(some))
    assert metrics["ratio_mean"] == pytest.approx(sum(s["ratio"].item() for s in sums) / num_action_tokens(some))
    assert metrics["ratio_max"] == pytest.approx(max(s["ratio_max"].item() for s in sums))


def test_gradients_are_scaled_down_to_the_norm_and_reported_before(step, sequences):
    some = sequences(4, 1)
    free, expected, _ = step([pack(some)], num_action_tokens=num_action_tokens(some))
    norm = torch.stack([g.norm() for g in expected.values()]).norm().item()
    assert free["grad_norm"] == pytest.approx(norm, rel=1e-5)
    clipped, gradients, _ = step([pack(some)], num_action_tokens=num_action_tokens(some), max_grad_norm=norm / 4)
    assert clipped["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert_close({n: g * 4 for n, g in gradients.items()}, expected)


def test_weights_move_against_the_gradient_at_the_given_learning_rate(step, tiny_model, sequences):
    some = sequences(4, 1)
    before = {name: p.detach() for name, p in tiny_model().named_parameters()}
    metrics, gradients, after = step([pack(some)], num_action_tokens=num_action_tokens(some))
    assert metrics["learning_rate"] == 0.1
    for name in before:
        assert torch.allclose(after[name], before[name] - 0.1 * gradients[name], atol=1e-7)


def test_a_step_makes_rewarded_tokens_more_likely(mesh, tiny_model, sequences):
    model, some = tiny_model(), [replace(s, advantage=1.0) for s in sequences(4, 1)]
    batch = pack(some)
    shard(model, mesh)
    before = reference_logprobs(model, batch)
    optimizer = torch.optim.AdamW(model.parameters())
    settings = {"config": TrainConfig(), "num_action_tokens": num_action_tokens(some), "num_ranks": 1}
    for _ in range(5):
        train_step(model, optimizer, [batch], learning_rate=1e-2, **settings)
    gain = (reference_logprobs(model, batch) - before)[batch.action_mask]
    assert gain.mean() > 1


@pytest.mark.parametrize("advantage", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_an_error_and_leaves_the_weights(mesh, tiny_model, sequences, advantage):
    model = tiny_model()
    shard(model, mesh)
    before = {name: whole(p).clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(TrainingError, match="loss and grad_norm not finite"):
        train_step(
            model,
            optimizer,
            [pack([replace(s, advantage=advantage) for s in sequences(2, 1)])],
            config=TrainConfig(),
            num_action_tokens=1,
            num_ranks=1,
            learning_rate=0.1,
        )
    assert all(torch.equal(whole(p), before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"max_grad_norm": 1.0}, "with a learning_rate below 1e-06 or is_ratio_cap or is_ratio_bounds$"),
        ({"is_ratio_cap": 2.0}, "with a learning_rate below 1e-06 or max_grad_norm 1$"),
        ({"objective": "ppo_clip", "clip_high": 0.2}, "or dual_clip or max_grad_norm 1$"),
        (
            {"objective": "sft", "dtype": "bfloat16"},
            "with a learning_rate below 1e-06 or max_grad_norm 1 or dtype float32",
        ),
    ],
)
def test_a_loss_that_is_not_finite_names_only_what_is_not_in_use(step, sequences, settings, wanted):
    some = [replace(s, weight=np.nan) for s in sequences(2, 1)]
    with pytest.raises(TrainingError, match=wanted):
        step([pack(some)], num_action_tokens=num_action_tokens(some), **settings)
