"""Measure a gradient step of a full-size model on a CUDA device: ludic's packed step, padded rows, and a plain loop.

    python -m benchmarks.train_step --size 1.7B

The model is a Qwen3 with random weights; 64 rollouts have log-normal lengths (sigma 1, about 1,000 tokens), at most
16,384 tokens per micro-batch. `packed` is the step of `ludic train`, with FSDP2 and bfloat16 over float32 weights.
`padded` is the same over rows that are padded to the longest of a micro-batch. The plain loop uses transformers alone:
autocast, padded rows, and logits of all tokens. Model FLOPs do not include padding and recomputation. Each contestant
has a separate process; the first step warms up and is not counted.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from types import MethodType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.optim import Optimizer
from transformers import PreTrainedModel

from benchmarks.measure import in_a_process, print_table
from benchmarks.models import make_model
from benchmarks.packing import skewed_sequences
from benchmarks.padding import fill_padded, pad_tokens, padded_logprobs, response_states
from ludic.base import init_distributed, shut_down
from ludic.settings import run_script
from ludic.training import (
    PACKED_ATTENTION,
    TrainConfig,
    build_optimizer,
    compute_dtype,
    device_peak_flops,
    model_cost,
    rl_loss,
    shard,
    step_flops,
    train_step,
)
from ludic.training.batches import MICRO_BATCH_TOKENS, MicroBatch, TrainingSequence, assign, pack

Size = Literal["0.6B", "1.7B", "tiny"]
SIZES: dict[Size, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151_936},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151_936},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 1024},
}
_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 32_768}
_STEPS = 4
"""Number of steps: one warms up, and the median of the others counts."""

Logprobs = Callable[[PreTrainedModel, Sequence[TrainingSequence], MicroBatch], Tensor]


def main(quick: bool = False, size: Size = "0.6B") -> None:
    """Print the table.

    Args:
        quick: Use tiny sizes, also on a CPU, to check that the benchmark works; the figures mean nothing.
        size: Number of parameters of the model, with tied embeddings.
    """
    if not quick and not torch.cuda.is_available():
        print("train_step: there is no CUDA device here, so it is left out; --quick shows that it runs")
        return
    size, rollouts = ("tiny", (8, 16, 256)) if quick else (size, (64, 1000, MICRO_BATCH_TOKENS))
    found = {name: in_a_process(measure, name, size, *rollouts) for name in CONTESTANTS}
    rows = [[name, *_cells(result, found["packed (ludic)"])] for name, result in found.items()]
    columns = ["", "tokens/s", "packed is faster", "MFU", "peak memory", "of packed's", "padding"]
    print_table(f"train_step: {size}, {rollouts[0]} rollouts, {found['packed (ludic)']['device']}", columns, rows)


def _cells(found: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    if "seconds" not in found:
        return ["out of memory", *[""] * 5]
    return [
        f"{found['num_tokens'] / found['seconds']:,.0f}",
        f"{found['seconds'] / ours['seconds']:.2f}x",
        "" if found["mfu"] is None else f"{found['mfu']:.1%}",
        f"{found['peak_mb']:,.0f} MB",
        f"{found['peak_mb'] / ours['peak_mb']:.2f}x" if ours["peak_mb"] else "",
        f"{found['padding']:.0%}",
    ]


def measure(name: str, size: Size, num_rollouts: int, mean_length: int, budget: int) -> dict[str, Any]:
    """Return the seconds of a step, its tokens without padding, MFU, and the device's peak memory."""
    mesh = init_distributed()
    device = torch.device(mesh.device_type)
    config = TrainConfig.of(max_tokens_per_micro_batch=budget, dtype="bfloat16")
    attention = PACKED_ATTENTION if name == "packed (ludic)" else "sdpa"
    model = make_model(attention=attention, head_dim=128, tie_word_embeddings=True, **_HEADS, **SIZES[size]).to(device)
    sequences = skewed_sequences(num_rollouts, mean_length, budget, vocab_size=SIZES[size]["vocab_size"])
    cost, lengths = model_cost(model), np.array([sequence.num_tokens for sequence in sequences])
    prompts = np.array([len(sequence.prompt_tokens) for sequence in sequences])
    flops = step_flops(cost, prompts, lengths - prompts) if cost else 0.0
    if name != PLAIN:
        shard(model, mesh, compute_dtype=compute_dtype(config))
    optimizer = build_optimizer(model, config)
    peak = device_peak_flops(device, torch.bfloat16)
    found = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "num_tokens": lengths.sum()}
    step = partial(CONTESTANTS[name], model, optimizer, sequences, config)
    try:
        seconds = [_seconds(device, step) for _ in range(_STEPS)]
    except torch.OutOfMemoryError:
        return found
    finally:
        shut_down()
    return found | {
        "seconds": median(seconds[1:]),
        "mfu": flops / median(seconds[1:]) / peak if peak else None,
        "peak_mb": torch.cuda.max_memory_allocated() / 1e6 if device.type == "cuda" else 0.0,
        "padding": 0.0 if name == "packed (ludic)" else _padding(lengths.tolist(), budget),
    }


def _seconds(device: torch.device, step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _padding(lengths: list[int], budget: int) -> float:
    num_tokens = sum(len(rows) * max(lengths[i] for i in rows) for rows in fill_padded(lengths, budget))
    return 1 - sum(lengths) / num_tokens


def _budget(config: TrainConfig) -> int:
    return config.batch.max_tokens_per_micro_batch or MICRO_BATCH_TOKENS


def by_ludic(
    model: PreTrainedModel, optimizer: Optimizer, sequences: Sequence[TrainingSequence], config: TrainConfig
) -> None:
    """Step as the trainer's main loop does, starting from sequences."""
    lengths = np.array([sequence.num_tokens for sequence in sequences])
    batches = [pack([sequences[i] for i in plan]) for plan in assign(lengths, 1, _budget(config))[0]]
    num_action_tokens = sum(sequence.num_action_tokens for sequence in sequences)
    train_step(
        model,
        optimizer,
        batches,
        config=config,
        num_action_tokens=num_action_tokens,
        num_ranks=1,
        learning_rate=config.optimizer.learning_rate,
    )


def by_padded_rows(
    model: PreTrainedModel, optimizer: Optimizer, sequences: Sequence[TrainingSequence], config: TrainConfig
) -> None:
    """Step with ludic's sharded model over padded rows; logits of response tokens only, in chunks."""
    if not hasattr(model, "padded_logprobs"):
        model.padded_logprobs = MethodType(padded_logprobs, model)
        register_fsdp_forward_method(model, "padded_logprobs")
    _step(model, optimizer, sequences, config, lambda model, *rows: model.padded_logprobs(*rows))


def by_plain_loop(
    model: PreTrainedModel, optimizer: Optimizer, sequences: Sequence[TrainingSequence], config: TrainConfig
) -> None:
    """Step with transformers alone."""
    _step(model, optimizer, sequences, config, _plain_logprobs)


def _step(
    model: PreTrainedModel,
    optimizer: Optimizer,
    sequences: Sequence[TrainingSequence],
    config: TrainConfig,
    logprobs_of: Logprobs,
) -> None:
    num_action_tokens = sum(sequence.num_action_tokens for sequence in sequences)
    for rows in fill_padded([sequence.num_tokens for sequence in sequences], _budget(config)):
        some = [sequences[i] for i in rows]
        batch = pack(some).to(model.device)
        logprobs = logprobs_of(model, some, batch)
        loss, _ = rl_loss(
            logprobs, batch, config.loss, num_action_tokens=num_action_tokens, num_sequences=len(sequences)
        )
        loss.backward()
    assert config.optimizer.max_grad_norm is not None
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()


def _plain_logprobs(model: PreTrainedModel, sequences: Sequence[TrainingSequence], batch: MicroBatch) -> Tensor:
    input_ids, mask = (tensor.to(model.device) for tensor in pad_tokens(sequences))
    with torch.autocast(model.device.type, torch.bfloat16):
        logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
    logprobs = response_states(logits, sequences).float().log_softmax(-1)
    return logprobs.gather(1, batch.targets[:, None])[:, 0]


PLAIN = "plain transformers loop"
CONTESTANTS = {"packed (ludic)": by_ludic, "padded": by_padded_rows, PLAIN: by_plain_loop}


if __name__ == "__main__":
    run_script(main, description=__doc__)
