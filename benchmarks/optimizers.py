"""Compare AdamW with moments in 8 bits with AdamW: losses, and bytes of the moments.

    PYTHONPATH=.venv/8bit python -m benchmarks.optimizers      # after `make .venv/8bit/installed`

A model of random weights learns random sequences by heart, by the trainer's own step, in float32 on the CPU. Both
optimizers start from the same weights and see the same batches in the same order.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from transformers import PreTrainedModel

from benchmarks.measure import print_table
from benchmarks.models import make_model
from benchmarks.packing import skewed_sequences
from ludic.base import init_distributed, shut_down
from ludic.settings import run_script
from ludic.training import TrainConfig, build_optimizer, shard, train_step
from ludic.training.batches import pack

_VOCABULARY = 1024
_LEARNING_RATE = 1e-3


def main(quick: bool = False) -> None:
    """Print the losses of both optimizers at some steps.

    Args:
        quick: Take a few steps of a tiny model, to check that the benchmark works; the figures mean nothing.
    """
    mesh = init_distributed("cpu")
    steps = (1, 2, 4) if quick else (1, 10, 25, 50, 75, 100)
    width, num_layers = (64, 1) if quick else (128, 2)
    found = {name: _train(mesh, name, width, num_layers, steps[-1]) for name in ("adamw", "adamw_8bit")}
    shut_down()
    rows = []
    for step in steps:
        one, other = (losses[step - 1] for losses, _ in found.values())
        rows.append([f"{step}", f"{one:.4f}", f"{other:.4f}", f"{other - one:+.4f}"])
    pairs = list(zip(found["adamw"][0], found["adamw_8bit"][0], strict=True))
    rows.append(["largest difference at any step", "", "", f"{max(abs(one - other) for one, other in pairs):.4f}"])
    rows.append(["bytes of moments a weight", *(f"{size:.2f}" for _, size in found.values()), ""])
    print_table("optimizers: loss in nats a token, by step", ["step", "adamw", "adamw_8bit", "difference"], rows)


def _train(mesh: DeviceMesh, optimizer: str, width: int, num_layers: int, num_steps: int) -> tuple[list[float], float]:
    """Return the loss of each step, and the bytes of moments a weight."""
    model = make_model(
        tie_word_embeddings=True,
        vocab_size=_VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=width // 64,
        num_key_value_heads=1,
        head_dim=64,
    )
    shard(model, mesh)
    settings = {"objective": "sft", "optimizer": optimizer, "learning_rate": _LEARNING_RATE}
    config = TrainConfig.of(**settings)
    adam, sequences = build_optimizer(model, config), skewed_sequences(32, 16, 64, vocab_size=_VOCABULARY)
    batches = [sequences[start : start + 16] for start in range(0, 32, 16)]
    losses = []
    for step in range(num_steps):
        batch = batches[step % len(batches)]
        metrics = train_step(
            model,
            adam,
            [pack(batch)],
            config=config,
            num_action_tokens=sum(sequence.num_action_tokens for sequence in batch),
            num_ranks=1,
            learning_rate=_LEARNING_RATE,
        )
        losses.append(metrics["loss"])
    return losses, _moment_bytes(adam) / _num_weights(model)


def _num_weights(model: PreTrainedModel) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _moment_bytes(optimizer: Optimizer) -> int:
    return sum(part.nbytes for state in optimizer.state.values() for name in state for part in _parts(state[name]))


def _parts(moment: Any) -> Iterator[Tensor]:
    if not hasattr(moment, "codes"):
        yield moment
        return
    yield moment.codes
    yield moment.scale


if __name__ == "__main__":
    torch.manual_seed(0)
    run_script(main, description=__doc__)
