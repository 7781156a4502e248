"""Run on each rank: every objective and normalisation on the tiny model, for test_world_sizes.py.

    objectives_on_ranks.py OUT [ROOT FROM TO [EVERY]]

OUT: safetensors of losses, the first step's gradients, and weights after two steps, by case. ROOT, FROM, TO: also
load ROOT's checkpoint of attempt FROM, step 3, and write what was loaded as attempt TO. EVERY: 3 is every third case.
"""

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import tiny_models
import torch
from conftest import random_model, step_batches
from safetensors.torch import save_file
from tiny_runs import save_checkpoint
from torch import Tensor, nn
from transformers import PreTrainedModel

from ludic.base.distributed import init_distributed, is_main, num_ranks, shut_down
from ludic.root.attempts import complete_checkpoints
from ludic.root.root import Root
from ludic.settings.kinds import OBJECTIVE
from ludic.training.checkpoint import load_checkpoint
from ludic.training.config import TrainConfig
from ludic.training.model import load_model, shard
from ludic.training.reference import model_reference
from ludic.training.step import build_optimizer, train_step

NUM_STEPS = 2
IN_FLOAT32 = ("reinforce", "dpo", "whitened returns")
"""Cases that are also trained as a trainer does; what they compute is shown in float64, for all."""
# Bounds that cut some of the ratios, which lie within exp(-0.7) and exp(0.7).
BOUNDS: dict[str, dict[str, Any]] = {
    "reinforce": {"is_ratio_cap": 1.1, "ratio_level": "sequence"},
    **{name: {"clip_low": 0.1, "clip_high": 0.2} for name in ("ppo_clip", "cispo", "gspo", "gmpo")},
    "vespo": {"mask_sequence_kl": 0.2, "log_ratio_weight": 0.1},
    **{name: {"loss_normalization": "sequences", "reference": "another seed"} for name in ("dpo", "ipo", "orpo")},
}

NORMALISATIONS: dict[str, dict[str, Any]] = {
    "sequences": {"loss_normalization": "sequences"},
    "constant": {"loss_normalization": "constant", "constant_tokens": 20},
}
SHAPED: dict[str, dict[str, Any]] = {
    "whitened returns": {
        "whiten_advantages": True,
        "reference": "another seed",
        "kl_weight": 0.1,
        "kl_placement": "return",
    }
}


def cases() -> Iterator[tuple[str, TrainConfig]]:
    """Every objective, and with one of them every normalisation, which only scales tokens, and a shaped advantage."""
    of_objectives = {name: {"objective": name} for name in OBJECTIVE.names()}
    for name, settings in (of_objectives | NORMALISATIONS | SHAPED).items():
        bounds = BOUNDS.get(str(settings.get("objective")), {})
        yield name, TrainConfig.of(**settings, **bounds, entropy_weight=0.01, max_grad_norm=None)


def train_case(config: TrainConfig, dtype: torch.dtype, num_steps: int) -> dict[str, Tensor]:
    """Losses by step, gradients of the first step, and weights at the end; whole tensors on every rank."""
    model = sharded_model(dtype)
    reference = model_reference(sharded_model(dtype, seed=1), torch.device("cpu")) if config.loss.reference else None
    optimizer = build_optimizer(model, config)
    losses, gradients = [], {}

    def note_gradients(*_: object) -> None:
        if not losses:
            gradients.update(whole(model, gradient=True))

    optimizer.register_step_pre_hook(note_gradients)
    for step in range(1, num_steps + 1):
        micro_batches, num_action_tokens = step_batches(step, in_pairs=config.loss.is_paired)
        metrics = train_step(
            model,
            optimizer,
            micro_batches,
            config=config,
            num_action_tokens=num_action_tokens,
            num_ranks=num_ranks(),
            learning_rate=1e-3,
            reference=reference,
        )
        losses.append(metrics["loss"])
    return {"losses": torch.tensor(losses, dtype=torch.float64)} | gradients | whole(model, gradient=False)


def sharded_model(dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    model = random_model(hidden_size=32, seed=seed).to(dtype)
    shard(model, init_distributed("cpu"))
    return model


def whole(model: nn.Module, *, gradient: bool) -> dict[str, Tensor]:
    kind = "gradients" if gradient else "weights"
    tensors = {name: p.grad if gradient else p.detach() for name, p in model.named_parameters()}
    return {f"{kind}/{name}": tiny_models.whole(tensor).clone() for name, tensor in tensors.items()}


def train_all(every: int) -> dict[str, Tensor]:
    """Two steps of every case in float64; and of some one in float32, as a trainer runs."""
    found = {}
    for case, config in islice(cases(), None, None, every):
        for dtype, num_steps in ((torch.float64, NUM_STEPS), (torch.float32, 1 if case in IN_FLOAT32 else 0)):
            if not num_steps:
                continue
            tensors = train_case(config, dtype, num_steps)
            name = f"{case}/{str(dtype).removeprefix('torch.')}"
            found |= {f"{name}/{kind}": tensor for kind, tensor in tensors.items()}
    return found


def copy_checkpoint(url: str, source: int, target: int) -> None:
    """Through a model and an optimizer that are sharded over the ranks there are."""
    root = Root.open(url)
    model = load_model(root.record.model)
    shard(model, init_distributed("cpu"))
    optimizer = build_optimizer(model, TrainConfig())
    (info,) = (i for i in complete_checkpoints(root) if (i.attempt_id, i.step) == (source, 3))
    load_checkpoint(root, info, model, optimizer)
    facts = {"policy_version": info.policy_version, "cursor": info.cursor, "config": info.config}
    save_checkpoint(root, model, optimizer, attempt_id=target, step=3, **facts)


def main(out: str, url: str = "", source: str = "", target: str = "", every: str = "1") -> None:
    init_distributed("cpu")
    found = train_all(int(every))
    if is_main():
        save_file(found, out)
    if url:
        copy_checkpoint(url, int(source), int(target))
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
