"""Each pair of an objective and a setting of the loss: the setting changes the loss, or it is refused."""

import json
from typing import get_args

import numpy as np
import pytest
import torch
from losses_by_hand import PAIRED

from ludic.errors import ConfigError
from ludic.settings.kinds import OBJECTIVE
from ludic.settings.table import convert, given, in_use, settings_of
from ludic.training.batches.packing import TrainingSequence, pack
from ludic.training.config import LossConfig, Objective, TrainConfig
from ludic.training.losses import rl_loss
from ludic.training.step import shape_advantages

# What each setting is changed to; it would matter to the ratios and advantages below.
PROBES = {
    "clip_low": 0.3,
    "clip_high": 0.4,
    "dual_clip": 1.5,
    "is_ratio_cap": 1.1,
    "is_ratio_bounds": (0.9, 1.1),
    "ratio_level": "sequence",
    "is_sequence_ratio_bounds": (0.5, 1.5),
    "mask_sequence_kl": 0.1,
    "log_ratio_weight": 0.5,
    "whiten_advantages": True,
    "dppo_bounds": (0.01, 0.01),
    "vespo_k": (1.0, 1.0),
    "vespo_lambda": (1.0, 1.0),
    "orpo_weight": 0.9,
    "sapo_tau": (2.0, 3.0),
    "dpo_beta": 0.7,
    "loss_normalization": "sequences",
    "constant_tokens": 7,
    "entropy_weight": 0.3,
    "kl_weight": 0.4,
    "kl_estimator": "k2",
    "kl_placement": "reward",
}
NOT_OF_THE_LOSS = {"objective", "reference", "reference_offload", "reference_cache"}
NOT_OF_THE_LOSS |= {"router_balance_weight", "router_z_weight"}  # of mixtures of experts: test_router_losses.py
# What a probe needs besides, wherever it is read.
WITH = {
    "constant_tokens": {"loss_normalization": "constant"},
    "kl_estimator": {"kl_weight": 0.2},
    "kl_placement": {"kl_weight": 0.2},
}
BASE = {
    **{name: {"clip_low": 0.1, "clip_high": 0.2} for name in ("ppo_clip", "cispo", "gspo", "gmpo")},
    **{name: {"loss_normalization": "sequences"} for name in PAIRED},
}
# What the objectives read, from their papers; settings that are not listed are read by all.
CLIPPING = ("ppo_clip", "cispo", "gspo", "gmpo")
OFF_POLICY = ("reinforce", *CLIPPING, "sapo", "dppo", "vespo")
READ_BY = {
    **dict.fromkeys(("clip_low", "clip_high"), CLIPPING),
    "dual_clip": ("ppo_clip", "gspo"),
    **dict.fromkeys(("is_ratio_cap", "ratio_level"), ("reinforce",)),
    **dict.fromkeys(("is_ratio_bounds", "is_sequence_ratio_bounds", "mask_sequence_kl"), OFF_POLICY),
    **dict.fromkeys(("log_ratio_weight", "whiten_advantages", "kl_placement"), OFF_POLICY),
    "sapo_tau": ("sapo",),
    "dppo_bounds": ("dppo",),
    **dict.fromkeys(("vespo_k", "vespo_lambda"), ("vespo",)),
    "dpo_beta": ("dpo", "ipo"),
    "orpo_weight": ("orpo",),
}
# Pairs take the mean over pairs.
REFUSED_BESIDES = {(name, "constant_tokens") for name in PAIRED}


def loss_of(config: LossConfig) -> float:
    # two pairs; with ratios whose geometric means, 1.65, 0.39, 0.94 and 1.90, lie beyond every bound as well
    ratios, advantages = [[3.0, 0.6, 2.5], [0.5, 0.3], [0.8, 1.1], [3.0, 1.2]], [1.0, -1.0, 1.0, -1.0]
    sequences = [
        TrainingSequence(
            rollout_id=f"r{index}",
            prompt_tokens=np.zeros(1, np.int32),
            response_tokens=np.zeros(len(of_sequence), np.int32),
            columns={"response_logprobs": np.full(len(of_sequence), -1.0, np.float32)},
            advantage=advantage,
            pair_id=f"p{index // 2}",
        )
        for index, (of_sequence, advantage) in enumerate(zip(ratios, advantages, strict=True))
    ]
    logprobs = torch.tensor(np.log(np.concatenate(ratios)) - 1)
    reference = torch.linspace(-2, -0.5, 9, dtype=torch.float64)
    (batch,) = shape_advantages([pack(sequences)], [reference], config, torch.device("cpu"))
    loss, _ = rl_loss(
        logprobs,
        batch,
        config,
        num_action_tokens=9,
        num_sequences=2 if config.is_paired else 4,
        entropies=torch.linspace(1, 2, 9),
        reference_logprobs=reference,
    )
    return loss.item()


def test_there_is_a_probe_for_each_setting_of_the_loss():
    assert {each.name for each in settings_of(LossConfig)} - NOT_OF_THE_LOSS == set(PROBES)


def test_there_is_a_function_for_each_objective():
    assert [each.name for each in get_args(Objective)] == OBJECTIVE.names()


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("setting", PROBES)
@pytest.mark.parametrize("objective", OBJECTIVE.names())
def test_a_setting_changes_the_loss_of_an_objective_or_is_refused(objective, setting):
    base = {"objective": objective, "reference": "base", **BASE.get(objective, {}), **WITH.get(setting, {})}
    probed = {**base, setting: PROBES[setting]}
    if objective not in READ_BY.get(setting, OBJECTIVE.names()) or (objective, setting) in REFUSED_BESIDES:
        with pytest.raises(ConfigError, match=objective):
            convert(LossConfig, probed)
    elif setting != "loss_normalization" or objective not in PAIRED:  # which is over sequences always
        without = convert(LossConfig, {**base, **({setting: 1} if setting == "constant_tokens" else {})})
        assert loss_of(convert(LossConfig, probed)) != pytest.approx(loss_of(without), rel=1e-3)


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("objective", ["sft", *PAIRED])
def test_logprobs_that_nobody_kept_reach_neither_loss_nor_gradient_nor_measures(objective):
    """A row without them beside one with them, each with a token that was not sampled; entropy and KL in the loss."""
    weights = {"reference": "base", "entropy_weight": 0.3, "kl_weight": 0.2}
    config = convert(LossConfig, {"objective": objective, **weights, **BASE.get(objective, {})})

    def run(unknown: float) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        sequences = [
            TrainingSequence(
                rollout_id=f"r{index}",
                prompt_tokens=np.zeros(1, np.int32),
                response_tokens=np.zeros(3, np.int32),
                columns={
                    "response_logprobs": np.full(3, value, np.float32),
                    "action_mask": np.array([True, False, True]),
                },
                advantage=advantage,
                pair_id="p",
            )
            for index, (value, advantage) in enumerate(((-1.0, 1.0), (unknown, -1.0)))
        ]
        logprobs = torch.linspace(-2, -1, 6).requires_grad_()
        numbers = {"num_action_tokens": 4, "num_sequences": 1 if config.is_paired else 2}
        given = {"entropies": torch.linspace(1, 2, 6), "reference_logprobs": torch.linspace(-1, -2, 6)}
        loss, measures = rl_loss(logprobs, pack(sequences), config, **numbers, **given)
        loss.backward()
        return loss.detach(), logprobs.grad, measures

    (loss, gradient, measures), (wanted_loss, wanted_gradient, others) = run(float("nan")), run(-0.5)
    assert loss == wanted_loss
    assert torch.equal(gradient, wanted_gradient)
    assert gradient.abs().sum() > 0
    known = torch.tensor([-2.0, -1.6]) + 1  # the first row's sampled tokens
    assert measures["ratio"] == pytest.approx(known.exp().sum().item())
    assert measures["sampler_kl_k1"] == pytest.approx(-known.sum().item())
    assert all(measures[name] == others[name] for name in measures if name.startswith(("preference", "reference")))


def test_an_earlier_trainer_s_settings_are_taken_over_without_those_that_were_ignored():
    # as versions before this check stored them, for every objective
    earlier = {
        "objective": "ppo_clip",
        "clip_high": 0.2,
        "ratio_level": "sequence",
        "sapo_tau": (2.0, 1.05),
        "dpo_beta": 0.5,
        "kl_weight": None,
        "kl_estimator": "k1",
        "kl_placement": "reward",
        "learning_rate": 0.5,
    }
    assert TrainConfig.of(**given(earlier, "an earlier trainer", "stored")) == TrainConfig.of(
        objective="ppo_clip", clip_high=0.2, learning_rate=0.5
    )


@pytest.mark.parametrize("config", [TrainConfig(), TrainConfig.of(objective="vespo", vespo_k=(1.0, 2.0))])
def test_settings_come_back_from_json(config):
    again = TrainConfig.of(**json.loads(json.dumps(config.flat())))
    assert json.dumps(again.flat()) == json.dumps(config.flat())


@pytest.mark.parametrize("name", ["vespo_k", "vespo_lambda"])
@pytest.mark.parametrize("numbers", [(), (2.0,), (2.0, 3.0, 4.0), (2.0, 0.0)])
def test_vespo_wants_two_numbers(name, numbers):
    with pytest.raises(ConfigError, match=rf"^{name} is \(.*\), wanted (2 values, each a number|a number above 0)$"):
        TrainConfig.of(objective="vespo", **{name: numbers})


@pytest.mark.parametrize("name", ["is_ratio_bounds", "is_sequence_ratio_bounds"])
@pytest.mark.parametrize("bounds", [(), (0.5,), (0.5, 2.0, 3.0)])
def test_a_mask_wants_two_bounds(name, bounds):
    with pytest.raises(ConfigError, match=rf"^{name} is \(.*\), wanted 2 values, each a number or None$"):
        TrainConfig.of(**{name: bounds})


def test_settings_without_an_objective_are_those_of_the_default_one():
    settings = {"dpo_beta": 0.5, "is_ratio_cap": 2.0, "setting_of_a_newer_version": 1}
    assert in_use(TrainConfig, settings) == {"is_ratio_cap": 2.0, "setting_of_a_newer_version": 1}


def test_troubles_know_which_objectives_use_no_ratio() -> None:
    """`ludic.run.diagnostics` is below the trainer, and so names them."""
    from ludic.run import diagnostics

    assert {*diagnostics._WITHOUT_RATIO} == {each.name for each in get_args(Objective) if not each.needs_logprobs}
