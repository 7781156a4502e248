import subprocess
import sys

import pytest
import torch

from ludic.errors import ConfigError
from ludic.training.batches.config import BatchConfig
from ludic.training.config import CheckpointConfig, LossConfig, ModelConfig, OptimizerConfig, PpoClip, TrainConfig
from ludic.training.model import compute_dtype


def test_bfloat16_is_for_computing_only():
    assert compute_dtype(TrainConfig.of(dtype="bfloat16")) == torch.bfloat16
    assert compute_dtype(TrainConfig()) is None


@pytest.mark.slow
def test_settings_are_there_before_torch_is():
    code = "import sys, ludic.training.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CLIPPING = ("ppo_clip", "cispo", "gspo", "gmpo")
DPO = {"objective": "dpo", "loss_normalization": "sequences", "reference": "base"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": 0}, "num_steps is 0, wanted at least 1"),
        ({"logprob_chunk_tokens": 0}, "logprob_chunk_tokens is 0, wanted at least 1"),
        ({"epochs": 0, "offline": True}, "epochs is 0, wanted at least 1"),
        ({"epochs": 2}, "epochs is 2, which only offline training looks at; set offline"),
        ({"sources": ("runs/a",)}, "which only offline training looks at"),
        ({"offline": True, "max_uses": 2}, "max_uses is 2, which offline training does not look at; set epochs"),
        ({"offline": True, "replay_batches": "runs/a"}, "choose one of them"),
        ({"max_seq_len": 0}, "max_seq_len is 0, wanted at least 1"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0, wanted a number above 0"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm is nan"),
        ({"max_off_policy_steps": -1}, "max_off_policy_steps is -1, wanted at least 0"),
        ({"warmup_steps": 100, "num_steps": 100}, "warmup_steps is 100, wanted less than num_steps"),
        ({"betas": (0.9, 1.0)}, "betas is"),
        ({"kl_weight": 0.1}, "there is no reference"),
        ({"is_ratio_cap": 2.0, "objective": "ppo_clip"}, "set objective to reinforce"),
        ({"clip_low": 0.2}, "clip_low is 0.2, which reinforce ignores; leave it out, or set objective to ppo_clip"),
        ({"objective": "sft", "kl_placement": "reward"}, "kl_placement is reward, which sft ignores"),
        ({"objective": "sft", "ratio_level": "sequence"}, "ratio_level is sequence, which sft ignores"),
        ({"dpo_beta": 0.2}, "dpo_beta is 0.2, which reinforce ignores; leave it out, or set objective to dpo"),
        ({"kl_estimator": "k1"}, "kl_estimator is k1, but there is no kl_weight; set kl_weight, or leave it out"),
        ({"kl_placement": "reward"}, "kl_placement is reward, but there is no kl_weight"),
        *(({"objective": name}, f"objective is {name}, .* set clip_low or clip_high") for name in CLIPPING),
        ({"clip_low": 1.2, "objective": "cispo"}, "wanted at most 1"),
        ({"dual_clip": 1.0, "objective": "ppo_clip"}, "dual_clip is 1.0, wanted above 1"),
        ({"is_ratio_bounds": (1.5, 2.0)}, "is_ratio_bounds is"),
        ({"loss_normalization": "constant"}, "set constant_tokens"),
        ({"constant_tokens": 100}, "set constant_tokens with loss_normalization constant"),
        ({"is_ratio_cap": float("nan")}, "is_ratio_cap is nan"),
        ({"max_age_s": 0.0}, "max_age_s is 0.0, wanted a number above 0"),
        ({"sql_params": {"k": [1, 2]}}, r"sql_params has 'k' = \[1, 2\], wanted a number or a text"),
        ({"objective": "dpo", "loss_normalization": "sequences"}, "objective is dpo but there is no reference"),
        ({**DPO, "loss_normalization": "tokens"}, "loss_normalization is tokens, and dpo takes the mean over pairs"),
        ({**DPO, "kl_weight": 0.1, "kl_placement": "reward"}, "kl_placement is reward, which dpo ignores"),
        ({**DPO, "dpo_beta": 0.0}, "dpo_beta is 0.0"),
        ({"max_shard_size": "5"}, "max_shard_size is .5., wanted a size such as 500MB or 5GB"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig.of(**settings)


def test_what_is_off_is_none():
    TrainConfig.of(max_off_policy_steps=None, max_grad_norm=None, checkpoint_every=None, rollout_timeout_s=None)


EVERY_GROUP = {
    "num_steps": 10,
    "advantage": "grpo",
    "sql_params": {"epsilon": 0.1},
    "clip_high": 0.2,
    "objective": "ppo_clip",
    "learning_rate": 1e-4,
    "lora_rank": 8,
    "keep_policies": None,
}


def test_settings_by_flag_name_are_those_of_the_groups():
    assert TrainConfig.of(**EVERY_GROUP) == TrainConfig(
        num_steps=10,
        batch=BatchConfig(advantage="grpo", sql_params={"epsilon": 0.1}),
        loss=LossConfig(objective=PpoClip(clip_high=0.2)),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        model=ModelConfig(lora_rank=8),
        checkpoint=CheckpointConfig(keep_policies=None),
    )


def test_flat_settings_come_back_as_the_same_configuration():
    config = TrainConfig.of(**EVERY_GROUP)
    flat = config.flat()
    assert TrainConfig.of(**flat) == config
    assert flat.items() >= EVERY_GROUP.items()
    assert not any(isinstance(value, BatchConfig | LossConfig) for value in flat.values())


def test_replace_keeps_the_other_settings_of_a_group():
    config = TrainConfig.of(**EVERY_GROUP).replace(clip_high=0.3, num_steps=20)
    assert config == TrainConfig.of(**EVERY_GROUP | {"clip_high": 0.3, "num_steps": 20})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("learning_rat", "did you mean 'learning_rate'"),
        ("stall_limit_s", r"did you mean 'rollout_timeout_s'\?$"),
        ("loss", "setting 'loss' is unknown"),
        ("zzz", "docs/settings.md and `--help all` list them"),
    ],
)
def test_an_unknown_setting_is_refused_with_similar_names(name, hint):
    with pytest.raises(ConfigError, match=hint):
        TrainConfig.of(**{name: 1})
    with pytest.raises(ConfigError, match=hint):
        TrainConfig().replace(**{name: 1})
