"""Collect per-token values of a gradient step for the table token_stats. Touches no files."""

# Shapes: A = response tokens of a micro-batch.

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa
from torch import Tensor

from ludic.batches.packing import MicroBatch
from ludic.store.tables import to_token_stats


@dataclass(slots=True)
class _Seen:
    """Values of one micro-batch; tensors are (A,), on the model's device."""

    rollout_ids: tuple[str, ...]
    sequence_ids: Tensor
    trainer_logprobs: Tensor
    entropy: Tensor
    clipped: Tensor
    weight: Tensor | None = None
    """Gradient weight of each token; None before the backward pass."""


@dataclass(slots=True)
class TokenStats:
    """Token statistics of one rank and step: call `see` for each micro-batch between its forward and backward pass."""

    weight_scale: float
    """Factor from a gradient of the backward pass to the table's unit: sampled tokens of the batch / ranks."""
    _seen: list[_Seen] = field(default_factory=list)

    def see(self, batch: MicroBatch, logprobs: Tensor, entropies: Tensor, clipped: Tensor) -> None:
        """Record a micro-batch. logprobs: (A,), before the backward pass; entropies: (A,); clipped: (A,) bool."""
        seen = _Seen(
            rollout_ids=batch.rollout_ids,
            sequence_ids=batch.sequence_ids,
            trainer_logprobs=logprobs.detach(),
            entropy=entropies.detach(),
            clipped=clipped,
        )
        logprobs.register_hook(partial(self._keep_weight, seen))
        self._seen.append(seen)

    def _keep_weight(self, seen: _Seen, gradient: Tensor) -> None:
        seen.weight = -gradient.detach() * self.weight_scale

    def to_table(self, attempt_id: int, step: int) -> pa.Table:
        """Return rows of the token_stats table; a rollout whose response max_seq_len cuts to 0 tokens has no row."""
        full = [seen for seen in self._seen if seen.rollout_ids]
        lengths = [seen.sequence_ids.bincount(minlength=len(seen.rollout_ids)).numpy() for seen in full]
        return to_token_stats(
            attempt_id=attempt_id,
            step=step,
            rollout_ids=[rollout_id for seen in full for rollout_id in seen.rollout_ids],
            lengths=np.concatenate([np.zeros(0, np.int64), *lengths]),
            trainer_logprobs=_join([seen.trainer_logprobs for seen in full], np.float32),
            entropy=_join([seen.entropy for seen in full], np.float32),
            clipped=_join([seen.clipped for seen in full], np.bool_),
            weight=_join([seen.weight for seen in full if seen.weight is not None], np.float32),
        )

    def to_cpu(self) -> None:
        """Copy all tensors to CPU memory; call it after the step."""
        for seen in self._seen:
            assert seen.weight is not None, "a micro-batch without a backward pass"
            for name in ("sequence_ids", "trainer_logprobs", "entropy", "clipped", "weight"):
                setattr(seen, name, getattr(seen, name).cpu())


def _join(tensors: list[Tensor], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(tensor.numpy().astype(dtype, copy=False) for tensor in tensors)])
