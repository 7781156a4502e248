"""Compute logprobs under a reference model, for the KL in the loss. Collective.

With a cache, reads and writes reference/ under the root, see ludic.root.rows.tables; files that can't be read are
computed again. Raises StoreError on every rank if the filesystem fails.
"""

# Shapes: A = response tokens of a micro-batch.

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ludic.base import Longrope, broadcast_bytes, bytes_from_main, num_ranks, run_on_all, run_on_main
from ludic.models import adapters_off, base_weights, original_length
from ludic.records import arrow_schema, table_from_bytes, table_to_bytes
from ludic.root import Root
from ludic.root.rows import ReferenceIndex, read_reference_index, write_reference
from ludic.training.batches.packing import MicroBatch
from ludic.training.logprobs import token_logprobs
from ludic.training.model import full_state_dict

logger = logging.getLogger(__name__)

Reference = Callable[[Sequence[MicroBatch]], list[Tensor]]
"""Function from a step's micro-batches, the same number on every rank, to (A,) float32 nats each, without gradient."""

_CONCURRENT_READS = 16
# Entries that transformers adds to a configuration and that are not settings of the model.
_NO_SETTINGS = ("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype")


def model_reference(model: PreTrainedModel, device: torch.device, *, chunk_tokens: int | None = None) -> Reference:
    """Return a Reference that runs a model. device: device to compute on; the weights may be offloaded to the CPU."""
    return lambda batches: [reference_logprobs(model, batch.to(device), chunk_tokens=chunk_tokens) for batch in batches]


def base_reference(model: PreTrainedModel, device: torch.device, *, chunk_tokens: int | None = None) -> Reference:
    """Return a Reference that runs the trained model with its adapters off, so it needs no extra memory."""
    run = model_reference(model, device, chunk_tokens=chunk_tokens)

    def run_base(batches: Sequence[MicroBatch]) -> list[Tensor]:
        with adapters_off(model):
            return run(batches)

    return run_base


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, batch: MicroBatch, *, chunk_tokens: int | None = None) -> Tensor:
    """Return (A,) float32 logprobs of the response tokens under a model, at the rows' temperatures."""
    logprobs, _ = token_logprobs(model, batch, chunk_tokens=chunk_tokens)
    if isinstance(model, FSDPModule):
        # FSDP2 keeps the root unit with the embeddings unsharded until a backward pass, and none follows.
        model.reshard()
    return logprobs


def fingerprint(
    model: PreTrainedModel, dtype: torch.dtype, *, float32_head: bool = False, longrope: Longrope | None = None
) -> str:
    """Return 32 hexadecimal digits that identify a model: weights, settings, and the dtypes of weights and logits.

    Adapters are ignored. Every rank must call it; all get the same result.
    """
    weights = {name: tensor.to(dtype) for name, tensor in base_weights(full_state_dict(model)).items()}
    settings = {name: value for name, value in model.config.to_dict().items() if name not in _NO_SETTINGS}
    facts: dict[str, object] = {"settings": settings, "dtype": str(dtype)}
    if float32_head and dtype != torch.float32:
        facts["head"] = str(torch.float32)
    if original_length(model.config) is not None:
        facts["longrope"] = longrope or "short"
    return run_on_main(lambda: _digest(weights, facts))


def _digest(weights: Mapping[str, Tensor], facts: Mapping[str, object]) -> str:
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Packed:
    """One sequence of a micro-batch."""

    rollout_id: str
    response_length: int
    temperature: float
    is_cut: bool
    """True if its logprobs are over the sampler's kept tokens. Such logprobs are not stored: an objective without a
    ratio needs them over all tokens."""


class CachedReference:
    """A Reference that reads stored logprobs of the root and its sources, and stores new ones in the root."""

    def __init__(
        self, reference: Reference, root: Root, model: str, device: torch.device, sources: Sequence[Root] = ()
    ) -> None:
        """Read the index of stored logprobs; collective. model: the fingerprint. device: of the results."""
        self._reference, self._root, self._model, self._device = reference, root, model, device
        self.index = ReferenceIndex()
        """Index of the stored logprobs of all ranks."""
        for holder in {holder.url: holder for holder in (*sources, root)}.values():
            index = bytes_from_main(partial(_index_bytes, holder, model))
            self.index.note(holder, table_from_bytes(index))

    def __call__(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        packed = [list(_sequences(batch)) for batch in micro_batches]
        stored = run_on_all(lambda: self._read(chain.from_iterable(packed)))
        is_missing = _on_any_rank([any(s.rollout_id not in stored for s in sequences) for sequences in packed])
        # A forward pass needs every rank: a micro-batch is computed if any rank lacks logprobs of its part.
        missing = [batch for batch, is_ in zip(micro_batches, is_missing, strict=True) if is_]
        computed = iter(self._reference(missing) if missing else [])
        results = [
            next(computed) if is_ else _to_tensor([stored[s.rollout_id] for s in sequences], batch).to(self._device)
            for batch, sequences, is_ in zip(micro_batches, packed, is_missing, strict=True)
        ]
        if missing:
            pairs = _split(results, packed)
            new = [pair for pair in pairs if pair[0].rollout_id not in stored and not pair[0].is_cut]
            self._keep(_to_table(self._model, new))
        return results

    def _read(self, sequences: Iterable[_Packed]) -> dict[str, np.ndarray]:
        """Return the stored logprobs by rollout_id, each (response_length,) float32."""
        fitting = {s.rollout_id: s.response_length for s in sequences if self._has(s)}
        return self.index.read(fitting, _warn_of_broken)

    def _has(self, sequence: _Packed) -> bool:
        if sequence.is_cut:
            return False
        return self.index.has(sequence.rollout_id, sequence.temperature, sequence.response_length)

    def _keep(self, rows: pa.Table) -> None:
        """Write the logprobs of all ranks as one file, on rank 0, and add it to every rank's index."""
        of_ranks = [table_from_bytes(broadcast_bytes(table_to_bytes(rows), source)) for source in range(num_ranks())]
        table = pa.concat_tables(of_ranks)
        index = bytes_from_main(lambda: table_to_bytes(write_reference(self._root, self._model, table)))
        self.index.note(self._root, table_from_bytes(index))


def _warn_of_broken(error: Exception, where: str) -> None:
    logger.warning("%s can't be read any more, so it is computed again: %s", where, error)


def _sequences(batch: MicroBatch) -> Iterator[_Packed]:
    """Yield the sequences of a micro-batch in their order; nothing for a rank's empty micro-batch."""
    lengths = batch.sequence_ids.bincount(minlength=len(batch.rollout_ids))
    start = 0
    for rollout_id, length in zip(batch.rollout_ids, lengths.tolist(), strict=False):
        if length:
            is_cut = batch.kept_tokens is not None and batch.kept_tokens.has_any[start : start + length].any().item()
            yield _Packed(rollout_id, length, batch.temperatures[start].item(), bool(is_cut))
        start += length


def _on_any_rank(flags: Sequence[bool]) -> list[bool]:
    found = torch.tensor(flags, dtype=torch.int64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.bool().tolist()


def _split(results: Sequence[Tensor], packed: Sequence[Sequence[_Packed]]) -> Iterator[tuple[_Packed, np.ndarray]]:
    """Yield each sequence with its logprobs."""
    for result, sequences in zip(results, packed, strict=True):
        if sequences:
            parts = result.cpu().split([sequence.response_length for sequence in sequences])
            yield from zip(sequences, (part.numpy() for part in parts), strict=True)


def _to_tensor(parts: Sequence[np.ndarray], batch: MicroBatch) -> Tensor:
    """Return (A,) float32; zeros for a rank's empty micro-batch, whose tokens are masked."""
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(len(batch.targets))


def _to_table(model: str, rows: Sequence[tuple[_Packed, np.ndarray]]) -> pa.Table:
    columns = {
        "model": [model] * len(rows),
        "rollout_id": [sequence.rollout_id for sequence, _ in rows],
        "temperature": [sequence.temperature for sequence, _ in rows],
        "response_length": [sequence.response_length for sequence, _ in rows],
        "reference_logprobs": [logprobs for _, logprobs in rows],
    }
    schema = arrow_schema("reference")
    return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def _index_bytes(root: Root, model: str) -> bytes:
    return table_to_bytes(read_reference_index(root, model))
