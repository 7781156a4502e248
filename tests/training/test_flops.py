import numpy as np
import pytest
import torch
from model_families import small_model_of
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ludic.models.lora import add_adapters
from ludic.training.flops import ModelCost, device_peak_flops, model_cost, peak_flops, step_flops
from ludic.training.model import shard


def small_model(*, tied: bool = False) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=10,
        hidden_size=4,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
    )
    return Qwen2ForCausalLM(config)


# Weights that multiply a token: queries 4x4, keys and values 4x2 each, output 4x4, and three of 4x8: 144. Head: 4x10.
# A pair of tokens: 12 x 1 layer x 2 heads x 2 a head.
COST = ModelCost(token=6 * 144, logit=6 * 40, pair=12 * 1 * 2 * 2)


@pytest.mark.parametrize("tied", [True, False])
def test_a_models_cost_is_that_of_its_matrices_and_a_table_that_is_looked_up_is_free(tied):
    assert model_cost(small_model(tied=tied)) == COST


def test_sharding_changes_no_cost(mesh):
    model = small_model(tied=True)
    shard(model, mesh)
    assert model_cost(model) == COST


def test_a_step_costs_what_its_sequences_cost():
    # Prompt 3 and response 2: 4 tokens go in, 2 get logits. Prompt 1 and response 1: one and one. No response: nothing.
    flops = step_flops(COST, np.array([3, 1, 7]), np.array([2, 1, 0]))
    assert flops == 864 * (4 + 1) + 240 * (2 + 1) + 48 * (4**2 + 1**2)


def test_the_forward_pass_is_a_third_as_pytorch_counts_it():
    model = small_model()
    model.set_attn_implementation("eager")  # whose products it sees
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(4)[None], use_cache=False)
    assert counter.get_total_flops() == step_flops(COST, np.array([1]), np.array([4])) / 3


def test_frozen_weights_have_no_gradient_to_pay_for():
    model = small_model()
    model.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(True)
    # 96 of the 144 weights are the MLP's; the others pay 4 instead of 6.
    assert model_cost(model) == ModelCost(token=6 * 96 + 4 * 48, logit=4 * 40, pair=48)


def test_adapters_cost_what_they_multiply_and_their_base_has_no_gradient():
    model = small_model()
    add_adapters(model, source="small", rank=1, alpha=1, targets=["q_proj"])
    # Besides the 144 frozen weights: 1x4 and 4x1 that train.
    assert model_cost(model) == ModelCost(token=4 * 144 + 6 * 8, logit=4 * 40, pair=48)


def test_of_a_mixture_of_experts_those_count_that_a_token_uses():
    config = Qwen3MoeConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_experts=4, head_dim=4)
    config.moe_intermediate_size = config.intermediate_size = 8
    config.num_attention_heads = config.num_key_value_heads = config.num_experts_per_tok = 2
    # Four of attention, 8x8 each; the router, 8x4; of four experts with three of 8x8, two.
    cost = ModelCost(token=6 * (4 * 64 + 32 + 2 * 3 * 64), logit=6 * 80, pair=12 * 1 * 2 * 4)
    assert model_cost(Qwen3MoeForCausalLM(config)) == cost


@pytest.mark.parametrize(("family", "num_layers"), [("qwen3_5_text", 2), ("nemotron_h", 1), ("gpt_oss", 4)])
def test_only_attention_layers_compare_pairs_of_tokens(family, num_layers):
    model = small_model_of(family)
    config = model.config
    assert model_cost(model).pair == 12 * num_layers * config.num_attention_heads * config.head_dim


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text", "gpt_oss", "deepseek_v3", "glm4_moe"])
def test_every_weight_of_an_expert_layer_is_counted_once(family):
    """Against a count of the same weights by name."""
    model = small_model_of(family)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name and p.ndim == 3)
    others = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.ndim == 2 and not any(part in name for part in ("embed", "lm_head", ".experts.", "conv"))
    )
    assert model_cost(model).token == 6 * (others + experts * 2 // 4)


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA H200", torch.float32, 67e12),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5e12),
        ("NVIDIA A10", torch.bfloat16, 125e12),
        ("NVIDIA A10G", torch.bfloat16, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, None),
        ("Some GPU of tomorrow", torch.bfloat16, None),
    ],
)
def test_the_peak_is_the_devices_own_or_not_known(name, dtype, peak):
    assert peak_flops(name, dtype) == peak


def test_the_peak_of_a_device_goes_by_its_name_and_dtype(monkeypatch):
    names = {"cuda:1": "NVIDIA H100 PCIe"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[str(device)])
    assert device_peak_flops(torch.device("cuda:1"), torch.bfloat16) == 756e12
    assert device_peak_flops(torch.device("cpu"), torch.bfloat16) is None
