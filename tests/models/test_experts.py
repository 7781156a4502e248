"""Routers: their experts are recorded, and tokens are sent to given ones, for every family that ludic knows how."""

import pytest
import torch
from model_families import VOCAB_SIZE, small_model_of
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from ludic.errors import ModelError
from ludic.models.experts import Routers, routing_of
from ludic.records.validation import UNKNOWN_EXPERT

FAMILIES = (
    *("qwen3_moe", "qwen3_5_moe_text", "gpt_oss", "deepseek_v3", "glm4_moe", "mixtral", "olmoe", "nemotron_h"),
    *("kimi_linear", "granitemoe", "llama4_text", "minimax_m2", "ernie4_5_moe"),
)
IDS = torch.arange(5, 25)[None]


def logits_of(model: PreTrainedModel) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_with_its_own_experts_is_the_same_to_the_bit_and_one_with_others_is_not(family):
    model = small_model_of(family)
    with torch.no_grad():
        plain = logits_of(model)
        routers = Routers(model, family)
        with routers.record() as recorded:
            assert torch.equal(logits_of(model), plain)
        experts = recorded()
        num_layers, chosen = routers.shape
        assert (experts.shape, experts.dtype) == ((20, num_layers, chosen), torch.int16)
        assert (experts.diff(dim=2) > 0).all()
        assert 0 <= experts.min() <= experts.max() < routers.num_experts
        with routers.replay(experts) as differs:
            assert torch.equal(logits_of(model), plain)
        assert differs().tolist() == [0.0] * 20
        others = ((experts + 1) % routers.num_experts).sort(-1).values
        with routers.replay(others) as differs:
            changed = logits_of(model)
        assert differs().min() > 0
        assert ((changed - plain).abs().amax(1) > 1e-3).all()
        assert torch.equal(logits_of(model), plain)  # after the block, the routers choose
    routing = routing_of(model.config, family)
    assert (len(routing.layers), routing.chosen, routing.num_experts) == (num_layers, chosen, routers.num_experts)


def test_the_recorded_experts_are_those_with_the_largest_scores():
    model = small_model_of("qwen3_moe")
    scores: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _module, inputs, _output: scores.append(inputs[0].view(20, -1)))
    with torch.no_grad(), Routers(model, "it").record() as recorded:
        logits_of(model)
    for number, (layer, hidden) in enumerate(zip(model.model.layers, scores, strict=True)):
        best = (hidden @ layer.mlp.gate.weight.T).argsort(descending=True)[:, :2].sort().values
        assert recorded()[:, number].tolist() == best.tolist()


def test_tokens_whose_experts_are_unknown_are_left_to_the_routers():
    model = small_model_of("qwen3_moe")
    routers = Routers(model, "it")
    with torch.no_grad():
        plain = logits_of(model)
        with routers.record() as recorded:
            logits_of(model)
        others = ((recorded() + 1) % 4).sort(-1).values
        others[:10] = UNKNOWN_EXPERT
        with routers.replay(others) as differs:
            found = logits_of(model)
    assert differs()[:10].tolist() == [0.0] * 10
    assert torch.equal(found[:10], plain[:10])  # nothing looks ahead
    assert (found[10:] != plain[10:]).any(dim=1).all()


def test_gradients_go_through_the_trainers_own_weights_of_the_given_experts():
    """Finite differences confirm it."""
    model = small_model_of("qwen3_moe")
    routers = Routers(model, "it")
    experts = torch.tensor([0, 3], dtype=torch.int16).expand(20, 2, 2)
    weight = model.model.layers[0].mlp.gate.weight

    def total() -> Tensor:
        with routers.replay(experts):
            return logits_of(model)[:, 7].sum()

    total().backward()
    for expert in range(4):
        gradient, step = weight.grad[expert, 5].item(), 1e-3
        with torch.no_grad():
            weight[expert, 5] += step
            above = total()
            weight[expert, 5] -= 2 * step
            below = total()
            weight[expert, 5] += step
        assert gradient == pytest.approx((above - below).item() / (2 * step), rel=1e-3, abs=1e-3)  # scores are float32
    assert weight.grad[0, 5] != 0


@pytest.mark.parametrize("family", ["jetmoe", "phimoe", "deepseek_v4"])
def test_a_family_whose_routers_choose_in_another_way_is_refused(family):
    model = small_model_of(family)
    with pytest.raises(ModelError, match="ludic does not know"), torch.no_grad(), Routers(model, "it").record():
        logits_of(model)


def test_a_dense_model_and_experts_of_another_model_are_refused():
    with pytest.raises(ModelError, match="it: a qwen3 model of this configuration has no experts to keep or replay"):
        Routers(small_model_of("qwen3"), "it")
    with pytest.raises(ModelError, match="has no experts to keep or replay"):
        routing_of(AutoConfig.for_model("qwen3", vocab_size=VOCAB_SIZE), "it")
    routers = Routers(small_model_of("qwen3_moe"), "it")
    three = torch.zeros(20, 3, 2, dtype=torch.int16)
    with pytest.raises(ModelError, match="experts of 3 layers, the model has them in 2 layers"), routers.replay(three):
        pass


def test_decoder_layers_with_experts_are_known_without_weights():
    # The first of 3 layers is dense in DeepSeek V3, with first_k_dense_replace 1.
    config = small_model_of("deepseek_v3").config
    config.num_hidden_layers, config.first_k_dense_replace = 3, 1
    config.mlp_layer_types = ["dense", "sparse", "sparse"]
    assert routing_of(config, "it").layers == (1, 2)
