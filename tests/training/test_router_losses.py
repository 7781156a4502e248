import json
import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from forks import run_ranks
from mixtures import micro_batches, mixture_of, sequence, step_of
from tiny_runs import create_root, fill, query, train_here
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from ludic.errors import ModelError
from ludic.training.batches.packing import pack
from ludic.training.config import LossConfig
from ludic.training.logprobs import token_logprobs
from ludic.training.model import shard
from ludic.training.packed import PACKED_ATTENTION
from ludic.training.router_losses import (
    _sums,
    balance_loss,
    count_tokens,
    expert_imbalance,
    expert_tokens,
    keep_router_logits,
    router_losses,
)

SCRIPT = Path(__file__).with_name("router_losses_on_ranks.py")
FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_5_moe", "granitemoe", "jamba")
BOTH = LossConfig(router_balance_weight=0.5, router_z_weight=0.25)


def losses_of(model, batch, config=BOTH, **options):
    token_logprobs(model, batch)
    return router_losses(model, batch, config, **{"num_tokens": sum(batch.sequence_lengths)} | options)


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-4 * scale + 1e-9)


# --- The formulas ------------------------------------------------------------------------------------------------


def test_both_losses_of_two_layers_worked_out_by_hand():
    # softmax of (log 3, 0) is (3/4, 1/4); its normalizer is 4. Each layer has 2 tokens that choose one of 2 experts.
    to_first, to_second = torch.tensor([[math.log(3), 0.0]] * 2), torch.tensor([[0.0, math.log(3)]] * 2)
    tokens = torch.stack([expert_tokens(logits, 1) for logits in (to_first, to_second)])
    assert tokens.tolist() == [[2, 0], [0, 2]]
    probabilities, squares = zip(*map(_sums, (to_first, to_second)), strict=True)
    assert [layer.tolist() for layer in probabilities] == [pytest.approx([1.5, 0.5]), pytest.approx([0.5, 1.5])]
    assert [square.item() for square in squares] == pytest.approx([2 * math.log(4) ** 2] * 2)
    # each layer: 2 (1 * 3/4 + 0 * 1/4), although both together choose the experts alike
    assert balance_loss(tokens, torch.stack(probabilities), 2).item() == pytest.approx(1.5)
    # within a layer, one expert has 2 tokens, and the mean is 1
    assert expert_imbalance(tokens) == 2.0


def test_tokens_that_choose_several_experts_count_for_each():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 0.0, 2.0, 1.0]])
    assert expert_tokens(logits, 2).tolist() == [2, 1, 1, 0]
    assert expert_imbalance(expert_tokens(logits, 2)[None]) == 2.0  # 2 tokens over a mean of 1
    alike = torch.full((1, 4), 10)
    # all experts alike: the loss is the number that a token uses, 4 (4 * 1/2 * 1/4)
    assert balance_loss(alike, torch.full((1, 4), 5.0), 20).item() == pytest.approx(2.0)
    assert expert_imbalance(alike) == 1.0
    assert math.isnan(expert_imbalance(torch.zeros(1, 4, dtype=torch.int64)))


# --- Of models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_balancing_loss_and_its_gradient_are_those_of_transformers_for_each_layer(mesh, family):
    model, batch = mixture_of(family), pack([sequence(19)])
    keep_router_logits(model, "here")
    model.set_attn_implementation("eager")
    plain = model(input_ids=batch.input_ids, use_cache=False, output_router_logits=True)
    model.set_attn_implementation(PACKED_ATTENTION)
    of_transformers = sys.modules[type(model).__module__].load_balancing_loss_func
    layers = [of_transformers((logits,), num_experts=4, top_k=2) for logits in plain.router_logits]
    wanted = sum(layers) / len(layers)
    expected = gradients_of(model, wanted)
    found = losses_of(model, batch, LossConfig(router_balance_weight=1.0))
    assert found.balance.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert_close(gradients_of(model, found.loss), expected)
    squares = torch.cat([logits.flatten(0, -2) for logits in plain.router_logits]).logsumexp(-1).square()
    assert found.z.item() == pytest.approx(squares.mean().item(), rel=1e-5)
    num_layers, num_experts = found.expert_tokens.shape
    assert (num_layers, num_experts) == (len(plain.router_logits), 4)
    assert found.expert_tokens.sum(1).tolist() == [19 * 2] * num_layers


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_5_moe"])
def test_activation_checkpointing_changes_no_gradient_and_keeps_no_logits(mesh, family):
    seen = []
    for is_checkpointed in (False, True):
        model, batch = mixture_of(family), pack([sequence(19), sequence(7, seed=1)])
        keep_router_logits(model, "here")
        shard(model, mesh, activation_checkpointing=is_checkpointed)
        logprobs, _ = token_logprobs(model, batch)
        found = router_losses(model, batch, BOTH, num_tokens=26)
        seen.append((found.loss.item(), gradients_of(model, found.loss + logprobs.sum())))
        assert found.expert_tokens.sum(1).unique().tolist() == [26 * 2]  # nothing twice
        # what a layer that is computed again had kept would keep its activations
        assert not [module for module in model.modules() if "ludic_router_logits" in module.__dict__]
    assert seen[1][0] == seen[0][0]
    assert_close(seen[1][1], seen[0][1])


def test_micro_batches_count_by_their_tokens_and_the_z_loss_does_not_depend_on_them(mesh):
    model, one, two = mixture_of("qwen3_moe"), sequence(19), sequence(7, seed=1)
    keep_router_logits(model, "here")
    whole = losses_of(model, pack([one, two]))
    parts = [losses_of(model, pack([each]), num_tokens=26) for each in (one, two)]
    alone = [losses_of(model, pack([each])) for each in (one, two)]
    assert sum(part.z for part in parts).item() == pytest.approx(whole.z.item(), rel=1e-5)
    weighted = (19 * alone[0].balance + 7 * alone[1].balance).item() / 26
    assert sum(part.balance for part in parts).item() == pytest.approx(weighted, rel=1e-5)
    assert torch.equal(parts[0].expert_tokens + parts[1].expert_tokens, whole.expert_tokens)
    assert whole.loss.item() == pytest.approx(0.5 * whole.balance.item() + 0.25 * whole.z.item())


def test_the_dummy_of_a_rank_without_sequences_counts_nothing(mesh):
    model, dummy = mixture_of("qwen3_moe"), pack([])
    keep_router_logits(model, "here")
    found = losses_of(model, dummy, num_tokens=5)
    assert (found.loss.item(), found.balance.item(), found.z.item(), found.expert_tokens.sum().item()) == (0, 0, 0, 0)
    device = torch.device("cpu")
    assert count_tokens([pack([sequence(4)]), dummy], device) == 4
    assert count_tokens([dummy], device) == 1


def test_two_ranks_with_recomputed_activations_have_the_gradients_of_one(tmp_path, mesh):
    run_ranks(2, [SCRIPT, tmp_path], tmp_path)
    metrics, gradients = step_of(micro_batches())
    of_ranks = [json.loads((tmp_path / f"rank={rank}.json").read_text()) for rank in (0, 1)]
    assert of_ranks[0]["metrics"] == of_ranks[1]["metrics"]
    assert of_ranks[0]["metrics"] == pytest.approx(metrics, rel=1e-5)
    assert_close({name: torch.tensor(values) for name, values in of_ranks[0]["gradients"].items()}, gradients)
    assert 1 < metrics["expert_imbalance"] <= 2
    # the loss that is minimised has both
    assert metrics["loss"] > 0.5 * metrics["router_balance_loss"] + 0.25 * metrics["router_z_loss"] > 0


@pytest.mark.slow
def test_steps_against_the_balancing_loss_even_out_the_experts_of_each_layer(mesh):
    model, batch = mixture_of("qwen3_moe"), pack([sequence(60)])
    keep_router_logits(model, "here")
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    imbalances = []
    for _ in range(25):
        found = losses_of(model, batch, LossConfig(router_balance_weight=1.0))
        imbalances.append(expert_imbalance(found.expert_tokens))
        optimizer.zero_grad()
        found.loss.backward()
        optimizer.step()
    # over all layers as one, it stays above 1.5
    assert imbalances[0] > 1.7
    assert max(imbalances[-5:]) < 1.25


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # of torch
def test_compiled_layers_have_the_gradients_of_plain_ones(mesh, monkeypatch):
    metrics, gradients = step_of(micro_batches()[:1])
    # Traced as always; the graphs run without code of their own, which takes a minute to make.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    counters.clear()
    compiled, others = step_of(micro_batches()[:1], compile_layers=True, activation_checkpointing=True)
    assert all("packed_attention" in reason for reason in counters["graph_break"])  # the routers are within a graph
    assert compiled == pytest.approx(metrics, rel=1e-5)
    assert_close(others, gradients)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "ernie4_5_moe", "llama4_text", "qwen3"])
def test_a_family_without_such_routers_is_refused(family):
    with pytest.raises(
        ModelError, match=f"choose by softmax alone, .* and mixtral; {family} is not one, or is balanced"
    ):
        keep_router_logits(mixture_of(family), "somewhere")


def test_a_mixture_whose_layers_are_all_dense_is_refused():
    model = mixture_of("qwen3_moe", mlp_only_layers=[0, 1, 2])
    with pytest.raises(ModelError, match="somewhere: found no routers in this qwen3_moe model that could be balanced"):
        keep_router_logits(model, "somewhere")


# --- Of runs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def mixture_folder(tmp_path, tiny_folder):
    """A mixture of experts with the tokenizer of the tiny model."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mixture")
    tokenizer.save_pretrained(tmp_path / "mixture")
    return str(tmp_path / "mixture")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"lora_rank": 4, "lora_targets": ("q_proj",)}], ids=["whole", "lora"])
def test_a_run_records_both_losses_and_the_balance(tmp_path, mixture_folder, settings):
    root = create_root(str(tmp_path / "run"), mixture_folder)
    fill(root, num_files=2)
    train_here(root, num_steps=2, router_balance_weight=0.0, router_z_weight=0.01, **settings)
    rows = query(root, "select router_balance_loss, router_z_loss, expert_imbalance from metrics where kind = 'train'")
    assert len(rows) == 2
    for balance, z, imbalance in rows:
        assert 1.9 < balance < 3  # 2 where experts are chosen alike
        assert z == pytest.approx(math.log(4) ** 2, rel=0.2)  # logits of small weights are about 0
        assert 1 <= imbalance <= 2


def test_a_run_of_a_dense_model_with_router_losses_is_refused_at_its_start(new_root):
    root = new_root()
    fill(root, num_files=1)
    with pytest.raises(ModelError, match=f"{root.record.model}: router_balance_weight and router_z_weight are for"):
        train_here(root, num_steps=1, router_balance_weight=0.01)
