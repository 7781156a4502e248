"""Run on two ranks: models that are loaded in shards, with adapters and as references, for test_sharded_ranks.py.

    sharded_on_ranks.py OUT ROOT LARGE_MODEL

OUT/rank=R.json; a checkpoint of attempt 2 in ROOT.
"""

import json
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from conftest import random_sequences, train
from torch import Tensor

from ludic.base.distributed import init_distributed, rank, shut_down
from ludic.models.lora import add_adapters
from ludic.root.root import Root
from ludic.training.batches.packing import MicroBatch, pack
from ludic.training.model import load_model, load_sharded
from ludic.training.reference import CachedReference, fingerprint, model_reference

CPU = torch.device("cpu")
FAMILIES = ("qwen2", "gemma2", "gemma3")
"""Two tie their embeddings, two have buffers besides those of rotations; OUT holds a model of each."""


def memory_of_loading(folder: str) -> dict[str, float]:
    """MB: what the process's peak rose by, this rank's shards, and the whole model."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = load_sharded(folder, init_distributed("cpu"))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parameters = list(model.parameters())
    return {
        "peak": (after - before) / 1024,
        "shards": sum(p.to_local().nbytes for p in parameters) / 2**20,
        "whole": sum(p.numel() * p.element_size() for p in parameters) / 2**20,
    }


def differences(folder: str) -> dict[str, float]:
    """Of a sharded reference's logprobs from those of the whole model on this rank's own."""
    batches = my_batches(seed=3 + rank())
    expected = model_reference(load_model(folder), CPU)(batches)
    found = {}
    for name, options in {"sharded": {}, "offloaded": {"offload": True}}.items():
        model = load_sharded(folder, init_distributed("cpu"), **options)
        for time in ("first", "second"):
            found[f"{name} {time}"] = largest_difference(model_reference(model, CPU)(batches), expected)
    return found


def my_batches(*, seed: int) -> list[MicroBatch]:
    sequences = random_sequences(5, seed=seed)
    return [pack(sequences[:2]), pack(sequences[2:])]


def largest_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))


def cached(root: Root) -> dict[str, Any]:
    """Micro-batches computed for the same sequences: at first, then dealt to the other rank, and by a new cache."""
    model = load_sharded(root.record.model, init_distributed("cpu"))
    num_computed: list[int] = []

    def counting(batches: list[MicroBatch]) -> list[Tensor]:
        num_computed.append(len(batches))
        return model_reference(model, CPU)(batches)

    name = fingerprint(model, torch.float32)
    cache = CachedReference(counting, root, name, CPU)
    # Rank 1 has a micro-batch of nothing, as in a real step.
    mine = my_batches(seed=3) if rank() == 0 else [*my_batches(seed=4)[:1], pack([])]
    others = [*my_batches(seed=4)[:1], pack([])] if rank() == 0 else my_batches(seed=3)
    expected = model_reference(model, CPU)(others)
    first, second = cache(mine), cache(others)
    again = CachedReference(counting, root, name, CPU)(others)
    of_nothing = 1 - rank()  # its zeros count nowhere
    return {
        "num_computed": num_computed,
        "files": root.list("reference"),
        "first": largest_difference(first, model_reference(model, CPU)(mine)),
        "second": max(
            largest_difference(found[: 2 - of_nothing], expected[: 2 - of_nothing]) for found in (second, again)
        ),
    }


def main(out: str, root_url: str, large_model: str) -> None:
    init_distributed("cpu")
    root = Root.open(root_url)
    adapt = partial(add_adapters, source=root.record.model, rank=2, alpha=8)
    seen = {
        "memory": memory_of_loading(large_model),
        "adapters": train(root_url, attempt_id=2, steps=range(1, 4), prepare=adapt),
        "differences": {family: differences(f"{out}/{family}") for family in FAMILIES},
        "cached": cached(root),
    }
    (Path(out) / f"rank={rank()}.json").write_text(json.dumps(seen))
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
