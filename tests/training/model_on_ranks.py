"""Run on each rank: what sharded models compute, against one whole model with all logits, for test_model_ranks.py.

    model_on_ranks.py OUT

OUT/rank=R.json: for each case the largest difference of a logprob and of a gradient, in float64.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import random_sequences
from model_families import FAMILIES, random_model_of, small_model_of
from torch import Tensor
from transformers import PreTrainedModel

from ludic.batches.packing import MicroBatch, pack
from ludic.distributed import init_distributed, num_ranks, rank, shut_down
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
    gradients = zip(sharded.parameters(), whole.parameters(), strict=True)
    return {
        "logprobs": (found - torch.cat([expected[i] for i in mine])).abs().max().item(),
        "gradients": max((p.grad.full_tensor() - q.grad).abs().max().item() for p, q in gradients),
    }


def main(out: str) -> None:
    init_distributed("cpu")
    seen = {family: differences(family) for family in ("qwen2", "qwen3", "gemma2", "qwen3_5_text", "granite_swa")}
    dist.barrier()
    (Path(out) / f"rank={rank()}.json").write_text(json.dumps(seen))
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
