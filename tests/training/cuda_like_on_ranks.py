"""Run by torchrun: a step with the settings of a GPU and a plain one, on CPU ranks, for test_cuda_like.py.

    python -m torch.distributed.run --standalone --nproc-per-node 2 cuda_like_on_ranks.py OUT

OUT/rank=R.json: metrics of both steps, and for each weight the relative L2 difference of its gradients.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from conftest import random_model, random_sequences
from torch.optim import SGD

from ludic.base.distributed import init_distributed, num_ranks, rank, shut_down
from ludic.training.batches.packing import assign, costs_of, pack
from ludic.training.config import TrainConfig
from ludic.training.model import full_state_dict, shard
from ludic.training.step import train_step


def stepped(**options: object) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics of a step over 12 sequences, and the change of each weight: with SGD at rate 1, its gradient."""
    model, sequences = random_model(), random_sequences(12, seed=0)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    lengths = np.array([sequence.num_tokens for sequence in sequences])
    is_plain = not options
    plan = assign(lengths, num_ranks(), 64, costs=None if is_plain else costs_of(lengths, 100))
    shard(model, init_distributed("cpu"), **options)
    metrics = train_step(
        model,
        SGD(model.parameters()),
        [pack([sequences[i] for i in indexes]) for indexes in plan[rank()]],
        config=TrainConfig.of(objective="sft", max_grad_norm=None),
        num_action_tokens=sum(sequence.num_action_tokens for sequence in sequences),
        num_ranks=num_ranks(),
        learning_rate=1.0,
    )
    return metrics, {name: before[name] - weight for name, weight in full_state_dict(model).items()}


def main(out: str) -> None:
    init_distributed("cpu")
    plain, gradients = stepped()
    metrics, others = stepped(compute_dtype=torch.bfloat16, activation_checkpointing=True, compile_layers=True)
    apart = {name: float((others[name] - wanted).norm() / wanted.norm()) for name, wanted in gradients.items()}
    seen = {"plain": plain, "cuda_like": metrics, "gradients": apart}
    (Path(out) / f"rank={rank()}.json").write_text(json.dumps(seen))
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
