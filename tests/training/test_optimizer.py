import pytest
import torch

from ludic.training.config import TrainConfig
from ludic.training.step import build_optimizer, learning_rate


def rates(**settings):
    config = TrainConfig.of(learning_rate=1.0, **settings)
    return [learning_rate(step, config) for step in range(1, config.num_steps + 1)]


def test_a_constant_rate_warms_up_linearly():
    assert rates(num_steps=6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_a_linear_rate_falls_towards_zero_after_the_last_step():
    assert rates(num_steps=6, warmup_steps=2, schedule="linear") == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])


def test_a_cosine_rate_is_half_way_at_the_half():
    # 0.5 (1 + cos(pi / 4)) = 0.854
    assert rates(num_steps=4, schedule="cosine") == pytest.approx([1, 0.8536, 0.5, 0.1464], abs=1e-4)


def test_norms_and_biases_do_not_decay(tiny_model):
    model = tiny_model()
    optimizer = build_optimizer(model, TrainConfig.of(weight_decay=0.5, learning_rate=0.1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # without a gradient only the decay moves a weight: by learning_rate * weight_decay of itself
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if parameter.ndim == 2 else 1.0
        assert torch.allclose(parameter, before[name] * factor), name


def test_fused_adamw_updates_as_the_other_one_does(tiny_model):
    weights = []
    for fused in (False, True):
        model = tiny_model()
        optimizer = build_optimizer(model, TrainConfig.of(fused_adamw=fused, learning_rate=0.01, weight_decay=0.1))
        for step in range(3):
            for number, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, 0.1 * (number % 3 - 1) + 0.01 * step)
            optimizer.step()
        assert optimizer.defaults["fused"] == (fused or None)
        weights.append(list(model.parameters()))
    for one, other in zip(*weights, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)


def test_frozen_parameters_are_left_out(tiny_model):
    model = tiny_model()
    model.model.embed_tokens.weight.requires_grad = False
    optimizer = build_optimizer(model, TrainConfig())
    taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert taken == {id(p) for p in model.parameters() if p.requires_grad}
