"""Compare packed with padded training steps: tokens/s and peak memory, on sequences of skewed lengths.

A step trains on 8 groups of 8 rollouts, with log-normal lengths (sigma 1, about 1,000 tokens) and ludic's default token
budget. `packed` is ludic's step. `packed, dense mask` is the same with the mask that transformers makes from positions.
`padded` pads rows to the longest of a micro-batch, with the same number of tokens including padding. `padded, sorted`
first puts rows of similar length together, as a careful user would. Each contestant runs in a separate process, in
turns.
"""

import resource
import time
from statistics import median

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.measure import in_a_process, median_ratio, print_table
from benchmarks.models import make_model
from benchmarks.padding import fill_padded, padded_logprobs
from ludic.settings import run_script
from ludic.training import PACKED_ATTENTION, TrainConfig, rl_loss, token_logprobs
from ludic.training.batches import MICRO_BATCH_TOKENS, MicroBatch, TrainingSequence, assign, pack

CONTESTANTS = ("packed", "packed, dense mask", "padded, sorted", "padded")


def main(quick: bool = False) -> None:
    """Print the table.

    Args:
        quick: Use tiny sizes, to check that the benchmark works; the figures mean nothing.
    """
    sizes = (8, 16, 256) if quick else (64, 1000, MICRO_BATCH_TOKENS)
    rounds = 1 if quick else 3
    found = [{name: in_a_process(measure, name, *sizes) for name in CONTESTANTS} for _ in range(rounds)]
    ours = [results["packed"] for results in found]
    rows = []
    for name in CONTESTANTS:
        theirs = [results[name] for results in found]
        speed = median_ratio([r["tokens_per_s"] for r in ours], [r["tokens_per_s"] for r in theirs])
        memory = median_ratio([r["peak_mb"] for r in theirs], [r["peak_mb"] for r in ours])
        rows.append(
            [
                name,
                f"{median(r['tokens_per_s'] for r in theirs):,.0f}",
                f"{speed:.2f}x",
                f"{median(r['peak_mb'] for r in theirs):,.0f} MB",
                f"{memory:.2f}x",
                f"{theirs[0]['padding']:.0%}",
            ]
        )
    title = f"packing: {sizes[0]} sequences, log-normal lengths (sigma 1), at most {sizes[2]:,} tokens at once"
    columns = ["", "tokens/s", "packed is faster", "peak memory of the step", "of packed's", "padding"]
    print_table(title, columns, rows)


def measure(name: str, num_sequences: int, mean_length: int, budget: int) -> dict[str, float]:
    """Return tokens/s, without padding, of one gradient step, its peak memory above the model's, and its padding."""
    sequences, model = skewed_sequences(num_sequences, mean_length, budget), _model(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    lengths = np.array([sequence.num_tokens for sequence in sequences])
    before, started = _peak_mb(), time.perf_counter()
    if name.startswith("packed"):
        num_slots = sum(_step_packed(model, sequences, plan) for plan in assign(lengths, 1, budget)[0])
    else:
        if name == "padded, sorted":
            sequences = sorted(sequences, key=lambda sequence: sequence.num_tokens)
        micro_batches = fill_padded([sequence.num_tokens for sequence in sequences], budget)
        num_slots = sum(_step_padded(model, [sequences[i] for i in rows]) for rows in micro_batches)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    seconds = time.perf_counter() - started
    return {
        "tokens_per_s": lengths.sum() / seconds,
        "peak_mb": max(_peak_mb() - before, 1.0),  # a tiny step may stay below the peak of the imports
        "padding": max(0.0, 1 - lengths.sum() / num_slots),  # the last token is no input
    }


def skewed_sequences(
    num_sequences: int, mean_length: int, budget: int, *, vocab_size: int = 1024
) -> list[TrainingSequence]:
    """Return sequences with 16 prompt tokens and a log-normal response length, at most `budget` tokens in all."""
    rng = np.random.default_rng(0)
    # The mean of a log-normal is exp(sigma^2 / 2) times its median.
    lengths = rng.lognormal(mean=np.log(mean_length) - 0.5, sigma=1.0, size=num_sequences).clip(4, budget - 16)
    return [
        TrainingSequence(
            rollout_id=str(i),
            prompt_tokens=rng.integers(0, vocab_size, 16, dtype=np.int32),
            response_tokens=rng.integers(0, vocab_size, int(length), dtype=np.int32),
            columns={"response_logprobs": np.full(int(length), -7.0, np.float32)},
            advantage=1.0,
        )
        for i, length in enumerate(lengths)
    ]


def _model(name: str) -> PreTrainedModel:
    return make_model(
        attention=PACKED_ATTENTION if name == "packed" else "sdpa",
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=16384,
    )


def _step_packed(model: PreTrainedModel, sequences: list[TrainingSequence], plan: list[int]) -> int:
    batch = pack([sequences[i] for i in plan])
    _backward(token_logprobs(model, batch)[0], batch)
    return batch.input_ids.numel()


def _step_padded(model: PreTrainedModel, sequences: list[TrainingSequence]) -> int:
    """Step over padded rows with a mask; logits only for the response tokens, as in the packed step."""
    batch = pack(sequences)
    _backward(padded_logprobs(model, sequences, batch), batch)
    return len(sequences) * max(sequence.num_tokens for sequence in sequences)


def _backward(logprobs: Tensor, batch: MicroBatch) -> None:
    loss, _ = rl_loss(logprobs, batch, TrainConfig().loss, num_action_tokens=len(batch.targets), num_sequences=1)
    loss.backward()


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    run_script(main, description=__doc__)
