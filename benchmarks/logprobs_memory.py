"""Measure peak memory of logprobs at a vocabulary of 150,000: in chunks of tokens, and from all logits at once.

Each figure comes from a separate process. The peak is Linux's VmHWM minus the memory that the process held after
loading model and batch. There are two cases: `reference`, a forward pass without gradients, and `training`, a forward
and a backward pass after a first one has allocated the gradients. `all logits` is the usual computation: the model's
own forward pass, log_softmax in float32, gather.
"""

from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.measure import in_a_process, peak_bytes, print_table, start_peak
from benchmarks.models import make_model
from ludic.settings import run_script
from ludic.training import packed_arguments, token_logprobs
from ludic.training.batches import MicroBatch, TrainingSequence, pack

ALL_LOGITS = 0
"""Chunk size that means no chunks."""


def main(quick: bool = False) -> None:
    """Print a table for the reference and one for training.

    Args:
        quick: Use tiny sizes, to check that the benchmark works; the figures mean nothing.
    """
    vocab_size = 1_500 if quick else 150_000
    batches = (64,) if quick else (1_024, 2_048, 4_096, 8_192)
    chunks = (16, ALL_LOGITS) if quick else (256, 512, 1_024, ALL_LOGITS)
    for case in ("reference", "training"):
        rows = []
        for chunk_tokens in chunks:
            peaks = [in_a_process(measure, case, vocab_size, num_tokens, chunk_tokens) for num_tokens in batches]
            name = f"chunks of {chunk_tokens:,}" if chunk_tokens else "all logits"
            rows.append([name, *(f"{peak / 1e6:,.0f} MB" for peak in peaks), f"{peaks[-1] / peaks[0]:.2f}x"])
        title = f"Peak memory of {case} logprobs, a vocabulary of {vocab_size:,}, by tokens of the micro-batch"
        print_table(title, ["", *(f"{num_tokens:,}" for num_tokens in batches), "last of first"], rows)


def measure(case: str, vocab_size: int, num_tokens: int, chunk_tokens: int) -> int:
    """Return the peak memory of a pass minus the memory before it, in bytes."""
    model, training = _model(vocab_size), case == "training"
    first, batch = even_batch(8, vocab_size), even_batch(num_tokens, vocab_size)
    _run(model, first, chunk_tokens, training)
    before = start_peak()
    _run(model, batch, chunk_tokens, training)
    return max(peak_bytes() - before, 1)  # a tiny pass may fit into memory that the first pass left


def _run(model: PreTrainedModel, batch: MicroBatch, chunk_tokens: int, training: bool) -> None:
    with nullcontext() if training else torch.no_grad():
        if chunk_tokens == ALL_LOGITS:
            logprobs = by_all_logits(model, batch)
        else:
            logprobs = token_logprobs(model, batch, chunk_tokens=chunk_tokens)[0]
    if training:
        logprobs.sum().backward()


def by_all_logits(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return logprobs, (A,) float32 nats, from all logits at once."""
    output = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        use_cache=False,
        **packed_arguments(batch.sequence_lengths, batch.input_ids.device),
        logits_to_keep=batch.logit_positions,
    )
    scaled = output.logits[0].float() / batch.temperatures[:, None]
    return scaled.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]


def _model(vocab_size: int) -> PreTrainedModel:
    """Return a model with one thin layer, so that the head dominates."""
    return make_model(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
    )


def even_batch(num_tokens: int, vocab_size: int) -> MicroBatch:
    """Return sequences of at most 512 response tokens after a prompt of one token."""
    rng = np.random.default_rng(0)
    lengths = [512] * (num_tokens // 512) or [num_tokens]
    return pack(
        [
            TrainingSequence(
                rollout_id=str(index),
                prompt_tokens=rng.integers(0, vocab_size, 1, dtype=np.int32),
                response_tokens=rng.integers(0, vocab_size, length, dtype=np.int32),
                columns={"response_logprobs": np.zeros(length, np.float32)},
                advantage=1.0,
            )
            for index, length in enumerate(lengths)
        ]
    )


if __name__ == "__main__":
    run_script(main, description=__doc__)
