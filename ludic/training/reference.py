"""Logprobs under a reference model, which the KL of a loss is measured against. Collective: all ranks call it alike."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ludic.training.logprobs import CHUNK_TOKENS, token_logprobs
from ludic.training.packing import MicroBatch

Reference = Callable[[Sequence[MicroBatch]], list[Tensor]]
"""From the micro-batches of a step, as many on every rank, to (A,) float32 nats each, without a gradient."""


def model_reference(model: PreTrainedModel, device: torch.device, *, chunk_tokens: int = CHUNK_TOKENS) -> Reference:
    """The reference that runs a model. device: where it computes, which is not where an offloaded one rests."""
    return lambda batches: [reference_logprobs(model, batch.to(device), chunk_tokens=chunk_tokens) for batch in batches]


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, batch: MicroBatch, *, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """(A,) float32 logprobs of the response tokens under a model, at the rows' temperatures."""
    logprobs, _ = token_logprobs(model, batch, chunk_tokens=chunk_tokens)
    if isinstance(model, FSDPModule):
        # The root's unit, embeddings included, stays whole until a backward pass, which won't come.
        model.reshard()
    return logprobs
