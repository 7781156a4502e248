"""Sample the next token of every row of a batch, each row with its own parameters and random numbers.

Pure tensor code. A row's token depends only on its own logits, parameters and uniforms, so a request gives the same
tokens whatever else is in its batch. Batches of another shape round logits differently (about 1e-6); that changes a
token only if its uniform is this close to a boundary.
"""

# Shapes: B = rows, V = vocabulary.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ludic.engines.engine import SamplingParams

OFF = torch.iinfo(torch.int64).max
"""top_k of a row that keeps all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Parameters as tensors, one entry per row. A tensor is None if no row uses it, which skips the work."""

    temperature: Tensor
    """(B, 1) float32; 1 for greedy rows."""
    greedy: Tensor | None
    """(B,) bool: rows that take the most likely token."""
    top_k: Tensor | None
    """(B, 1) int64; OFF disables it for a row."""
    top_p: Tensor | None
    """(B, 1) float32; infinity disables it for a row, since a sum of probabilities may round to 1 too early."""
    wants_kept: Tensor | None
    """(B, 1) bool: rows whose kept tokens are asked for."""


class Drawn(NamedTuple):
    """Next tokens."""

    tokens: Tensor
    """(B,) int64."""
    logprobs: Tensor
    """(B,) float32, nats."""
    kept: Tensor | None
    """(B, V) bool: tokens that top_k and top_p kept, all False in rows that do not ask; None if no row asks."""


def make_rows(params: Sequence[SamplingParams], device: torch.device) -> Rows:
    """Build rows from the parameters of at least one request."""

    def column(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    greedy = [p.temperature == 0 for p in params]
    top_k = [p.top_k or OFF for p in params]
    top_p = [p.top_p if p.top_p < 1 else float("inf") for p in params]
    wants_kept = [p.wants_kept_tokens for p in params]
    return Rows(
        temperature=column([[p.temperature or 1.0] for p in params], torch.float32),
        greedy=column(greedy, torch.bool) if any(greedy) else None,
        top_k=column(top_k, torch.int64)[:, None] if min(top_k) < OFF else None,
        top_p=column(top_p, torch.float32)[:, None] if min(top_p) < 1 else None,
        wants_kept=column(wants_kept, torch.bool)[:, None] if any(wants_kept) else None,
    )


def random_numbers(seed: int) -> np.random.Generator:
    """Return a request's random numbers: its n-th token takes the n-th call of `random`, a float64 in [0, 1)."""
    # Philox is designed for streams that differ only by their key (Salmon et al. 2011).
    return np.random.Generator(np.random.Philox(key=seed % 2**64))


def sample(logits: Tensor, rows: Rows, uniforms: Tensor) -> Drawn:
    """Sample next tokens.

    logits: (B, V). uniforms: (B,) float64 in [0, 1), for inverting the cumulative distribution. The distribution is
    the softmax of logits / temperature, cut to top_k, then to top_p, and renormalised; logprobs are under this
    distribution. A row with NaN among its logits gets an arbitrary token and the logprob NaN.
    """
    scaled = logits.float() / rows.temperature
    if rows.top_k is not None or rows.top_p is not None:
        scaled = _cut(scaled, rows.top_k, rows.top_p)
    logprobs = torch.log_softmax(scaled, dim=-1)
    # float64: the error of a float32 sum over 150,000 tokens exceeds the probability of most of them.
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    tokens = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
    tokens = tokens.clamp(max=logits.shape[-1] - 1)  # only NaN goes past the end
    taken = logprobs.gather(-1, tokens)
    tokens, taken = tokens[:, 0], taken[:, 0]
    if rows.greedy is not None:
        tokens = torch.where(rows.greedy, logits.argmax(dim=-1), tokens)
        taken = torch.where(rows.greedy, taken - taken, taken)  # 0, or NaN if it was NaN
    return Drawn(tokens, taken, None if rows.wants_kept is None else scaled.isfinite() & rows.wants_kept)


def kept_ids(kept: Tensor) -> list[np.ndarray]:
    """Return the ids of each row's kept tokens, each (kept,) int32 ascending, on the CPU. kept: (B, V) bool."""
    ids = kept.nonzero()[:, 1].int().cpu().numpy()
    return np.split(ids, kept.sum(dim=1).cumsum(dim=0)[:-1].cpu().numpy())


def _cut(scaled: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Return (B, V) logits with -inf outside top_k and top_p; of equally likely tokens, the lower id comes first."""
    ordered, tokens = scaled.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        rank = torch.arange(scaled.shape[-1], device=scaled.device)
        ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    if top_p is not None:
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        ordered = ordered.masked_fill(before >= top_p, -torch.inf)
    return torch.empty_like(scaled).scatter(-1, tokens, ordered)
