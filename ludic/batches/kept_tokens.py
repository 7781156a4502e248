"""Tokens that top_k and top_p kept at each response token: from Arrow to the tensors of a micro-batch. Pure.

The sampler drew each token from the softmax over these alone, so the trainer's logprob is over them too. Lists of
different lengths are kept flat, with bounds.
"""

# Shapes: n = response tokens of a sequence, K = kept tokens of a sequence or a micro-batch, A = response tokens of a
# micro-batch, C = rows of a chunk of them, V = vocabulary.

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ludic.schema import ragged_arrays

LEFT_OUT = -1e30
"""Logit of a token that was left out: its probability is 0, and, unlike -inf, 0 times it is 0."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """Kept tokens of one sequence. A token without any was drawn from the whole vocabulary, or was not sampled."""

    ids: np.ndarray
    """(K,) int32."""
    bounds: np.ndarray
    """(n + 1,) int: where each response token's ids begin, and where the last one's end."""

    @property
    def shape(self) -> tuple[int]:
        """Number of response tokens, as of an array with a value for each."""
        return (len(self.bounds) - 1,)

    def __getitem__(self, part: slice) -> "KeptTokens":
        start, stop, _ = part.indices(*self.shape)
        bounds = self.bounds[start : max(start, stop) + 1]
        return KeptTokens(self.ids[bounds[0] : bounds[-1]], bounds - bounds[0])


def kept_tokens_of(column: pa.ChunkedArray) -> list[KeptTokens | None]:
    """Return each row of a column kept_tokens; None for a null."""
    rows = [row for chunk in column.chunks for row in ragged_arrays(chunk)]
    return [None if row is None else KeptTokens(*row) for row in rows]


@dataclass(frozen=True, slots=True, eq=False)
class PackedKeptTokens:
    """Kept tokens of a micro-batch."""

    ids: Tensor
    """(K,) int64."""
    rows: Tensor
    """(K,) int64: index of the response token that an id belongs to."""
    is_cut: Tensor
    """(A,) bool: response tokens that have kept tokens."""
    bounds: np.ndarray
    """(A + 1,) int64: where each token's ids begin. Not a tensor, so that reading it never waits for a device."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Self:
        """Return a copy on another device."""
        ids, rows, is_cut = (each.to(device, non_blocking=non_blocking) for each in (self.ids, self.rows, self.is_cut))
        return replace(self, ids=ids, rows=rows, is_cut=is_cut)

    def leave_out(self, logits: Tensor, start: int) -> Tensor:
        """Set the logits of tokens that were not kept to LEFT_OUT, in place. logits: (C, V), of rows from `start`."""
        stop = start + len(logits)
        part = slice(int(self.bounds[start]), int(self.bounds[stop]))
        is_out = self.is_cut[start:stop, None].repeat(1, logits.shape[1])
        is_out[self.rows[part] - start, self.ids[part]] = False
        return logits.masked_fill_(is_out, LEFT_OUT)


def pack_kept_tokens(kept: Sequence[KeptTokens | None], lengths: Sequence[int]) -> PackedKeptTokens | None:
    """Lay the kept tokens of sequences end to end; None if there are none. lengths: response tokens of each."""
    if all(each is None for each in kept):
        return None
    pairs = list(zip(kept, lengths, strict=True))
    counts = np.concatenate([np.zeros(n, np.int64) if each is None else np.diff(each.bounds) for each, n in pairs])
    ids = np.concatenate([each.ids for each in kept if each is not None])
    return PackedKeptTokens(
        ids=torch.from_numpy(ids.astype(np.int64)),
        rows=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
        is_cut=torch.from_numpy(counts > 0),
        bounds=np.append(0, np.cumsum(counts)),
    )
