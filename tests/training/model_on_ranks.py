"""Run on each rank: what sharded models compute, against one whole model with all logits, for test_model_ranks.py.

    model_on_ranks.py OUT

OUT/rank=R.json: for each case the largest difference of a logprob and of a gradient, in float64.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import random_sequences
from model_families import FAMILIES, random_model_of, small_model_of
from torch import Tensor
from transformers import PreTrainedModel

from ludic.base.distributed import init_distributed, num_ranks, rank, shut_down
from ludic.models.experts import Routers
from ludic.records.columns import with_columns
from ludic.training.batches.packing import MicroBatch, pack
from ludic.training.logprobs import token_logprobs
from ludic.training.model import shard
from ludic.training.packed import packed_arguments


def whole_logprobs(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
    """(A,) by transformers' own forward pass and all logits."""
    output = model(
        input_ids=batch.input_ids,
        use_cache=False,
        **packed_arguments(batch.sequence_lengths, batch.input_ids.device),
        logits_to_keep=batch.logit_positions,
    )
    logprobs = (output.logits[0] / batch.temperatures[:, None]).log_softmax(-1)
    return logprobs[torch.arange(len(batch.targets)), batch.targets]


def model_of(family: str) -> PreTrainedModel:
    return random_model_of(family).double() if family in FAMILIES else small_model_of(family)


def replayed(family: str) -> dict[str, float]:
    """As `differences`, with tokens sent to given experts, which one sequence lacks, and layers that are run again."""
    numbers = torch.Generator().manual_seed(0)
    whole, sharded = small_model_of(family), small_model_of(family)
    shard(sharded, init_distributed("cpu"), activation_checkpointing=True)
    of_whole, of_sharded = Routers(whole, family), Routers(sharded, family)
    (num_layers, chosen), num_experts = of_whole.shape, of_whole.num_experts
    sequences = []
    for index, sequence in enumerate(random_sequences(5, seed=1)):
        scores = torch.rand(sequence.num_tokens - 1, num_layers, num_experts, generator=numbers)
        experts = scores.topk(chosen).indices.sort().values.short().numpy()
        sequences.append(with_columns(sequence, experts=None if index == 2 else experts))
    expected = []
    for batch in (pack([sequence]) for sequence in sequences):
        with nullcontext() if batch.experts is None else of_whole.replay(batch.experts):
            expected.append(whole_logprobs(whole, batch))
    torch.cat(expected).sum().backward()

    mine = range(rank(), len(sequences), num_ranks())
    batch = pack([sequences[i] for i in mine])
    assert batch.experts is not None
    with of_sharded.replay(batch.experts):
        found = token_logprobs(sharded, batch, chunk_tokens=7)[0]
        (found.sum() * num_ranks()).backward()
    return _off(sharded, whole, found, torch.cat([expected[i] for i in mine]))


def _off(sharded: PreTrainedModel, whole: PreTrainedModel, found: Tensor, expected: Tensor) -> dict[str, float]:
    gradients = zip(sharded.parameters(), whole.parameters(), strict=True)
    return {
        "logprobs": (found - expected).abs().max().item(),
        "gradients": max((p.grad.full_tensor() - q.grad).abs().max().item() for p, q in gradients),
    }


def differences(family: str) -> dict[str, float]:
    """Of the logprobs and of the gradients of their sum; this rank has every second sequence."""
    sequences = random_sequences(5, seed=1)
    whole = model_of(family)
    expected = [whole_logprobs(whole, pack([sequence])) for sequence in sequences]
    torch.cat(expected).sum().backward()

    sharded = model_of(family)
    shard(sharded, init_distributed("cpu"))
    mine = range(rank(), len(sequences), num_ranks())
    found = token_logprobs(sharded, pack([sequences[i] for i in mine]), chunk_tokens=7)[0]
    (found.sum() * num_ranks()).backward()
    return _off(sharded, whole, found, torch.cat([expected[i] for i in mine]))


def main(out: str) -> None:
    init_distributed("cpu")
    seen = {family: differences(family) for family in ("qwen2", "qwen3", "gemma2", "qwen3_5_text", "granite_swa")}
    seen["qwen3_moe, replayed"] = replayed("qwen3_moe")
    dist.barrier()
    (Path(out) / f"rank={rank()}.json").write_text(json.dumps(seen))
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
