"""Losses of a few tokens at given ratios and advantages, for tests that work numbers out by hand."""

import numpy as np
import torch

from ludic.settings.table import convert
from ludic.training.batches.packing import TrainingSequence, pack
from ludic.training.config import LossConfig
from ludic.training.losses import rl_loss

PAIRED = ("dpo", "ipo", "orpo")

# Sampler logprobs are -1 throughout, so that a trainer logprob is -1 + log(ratio).

# Objectives that want a bound, with one that no ratio here reaches.
WIDE = {name: {"clip_low": 1.0, "clip_high": 1e6} for name in ("ppo_clip", "cispo", "gspo", "gmpo")}


def with_bound(settings):
    """The settings, with a wide bound where the objective wants one and none is given."""
    is_bounded = {"clip_low", "clip_high", "dual_clip"} & settings.keys()
    return settings if is_bounded else WIDE.get(settings.get("objective"), {}) | settings


def batch_of(*sequences, mask=None, weight=1.0, pair_ids=None):
    """A micro-batch of (ratios, advantages) pairs, and trainer logprobs (float64, with gradient) at these ratios."""
    pair_ids = pair_ids or [None] * len(sequences)
    packed = pack(
        [
            TrainingSequence(
                rollout_id=f"r{index}",
                prompt_tokens=np.zeros(1, np.int32),
                response_tokens=np.zeros(len(ratios), np.int32),
                columns={"response_logprobs": np.full(len(ratios), -1.0), "action_mask": mask},
                advantage=np.array(advantages, np.float32),
                weight=weight,
                pair_id=pair_ids[index],
            )
            for index, (ratios, advantages) in enumerate(sequences)
        ]
    )
    ratios = np.concatenate([ratios for ratios, _ in sequences])
    return packed, torch.tensor(-1.0 + np.log(ratios), requires_grad=True)


def loss_and_gradient(
    *sequences, mask=None, weight=1.0, pair_ids=None, num_action_tokens=1, num_sequences=1, reference=None, **settings
):
    """The loss, its gradient by trainer logprob, and the sums that go with it. The reference of dpo is the sampler."""
    batch, logprobs = batch_of(*sequences, mask=mask, weight=weight, pair_ids=pair_ids)
    settings = with_bound(settings)
    if settings.get("objective") in PAIRED:
        settings |= {"loss_normalization": "sequences"}
        reference = [-1.0] * len(logprobs) if reference is None else reference
    settings |= {} if reference is None else {"reference": "base"}
    loss, sums = rl_loss(
        logprobs,
        batch,
        convert(LossConfig, settings),
        num_action_tokens=num_action_tokens,
        num_sequences=num_sequences,
        reference_logprobs=None if reference is None else torch.tensor(reference, dtype=torch.float64),
    )
    assert not any(value.requires_grad for value in sums.values())
    loss.backward()
    return loss.item(), logprobs.grad.tolist(), {name: value.item() for name, value in sums.items()}
