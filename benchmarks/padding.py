"""Padding, which other trainers use instead of packing: rows are padded to the longest of a micro-batch."""

# Shapes: B = rows, L = the longest of them, H = hidden size, A = response tokens of all.

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ludic.training import linear_logprobs
from ludic.training.batches import MicroBatch, TrainingSequence


def fill_padded(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Yield micro-batches, as indexes of rows in order; each has as many rows as fit in the budget with padding."""
    taken: list[int] = []
    longest = 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if taken and longest * (len(taken) + 1) > budget:
            yield taken
            taken, longest = [], length
        taken.append(index)
    yield taken


def pad_tokens(sequences: Sequence[TrainingSequence]) -> tuple[Tensor, Tensor]:
    """Return the padded tokens of prompt and response of each row, and their mask, both (B, L) int64."""
    input_ids = torch.zeros(len(sequences), max(sequence.num_tokens for sequence in sequences), dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, sequence in enumerate(sequences):
        tokens = np.concatenate([sequence.prompt_tokens, sequence.response_tokens])
        input_ids[row, : len(tokens)] = torch.from_numpy(tokens)
        mask[row, : len(tokens)] = 1
    return input_ids, mask


def response_states(states: Tensor, sequences: Sequence[TrainingSequence]) -> Tensor:
    """Select the states that predict response tokens, row by row: (B, L, H) to (A, H)."""
    return torch.cat(
        [
            states[row, len(sequence.prompt_tokens) - 1 : sequence.num_tokens - 1]
            for row, sequence in enumerate(sequences)
        ]
    )


def padded_logprobs(model: PreTrainedModel, sequences: Sequence[TrainingSequence], batch: MicroBatch) -> Tensor:
    """Return logprobs, (A,) float32 nats, from padded rows; logits of response tokens only, in chunks.

    batch: the same sequences, packed.
    """
    input_ids, mask = (tensor.to(model.device) for tensor in pad_tokens(sequences))
    hidden = model.get_decoder()(input_ids=input_ids, attention_mask=mask, use_cache=False).last_hidden_state
    head = model.get_output_embeddings().weight
    return linear_logprobs(response_states(hidden, sequences), head, None, batch.targets, batch.temperatures)[0]
