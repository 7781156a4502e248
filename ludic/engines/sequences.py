"""Sequences that a model extends token by token, in one batch with a key-value cache.

Sequences may leave the batch and others join it. Pure tensor code; the caller draws the tokens.
"""

# Shapes: B = sequences of the batch, L = tokens of the longest, V = vocabulary, H = heads, D = size of a head.

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ludic.models.families import Sampled, probe_sequences


class Sequences:
    """A batch of left-padded sequences in a model's key-value cache."""

    logits: Tensor
    """(B, V), of the next tokens, in the model's dtype."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[np.ndarray], max_length: int) -> None:
        """Run the prompts, each int32; equal prompts, as in a group of rollouts, are run once.

        max_length: maximum tokens of a sequence.
        """
        self._model = model
        self._last_position = max_length - 1
        unique = {prompt.tobytes(): prompt for prompt in prompts}
        tokens, mask = (array.to(model.device) for array in _pad_left(list(unique.values())))
        self._mask = mask
        """(B, L) int64, 0 for padding."""
        self._cache = DynamicCache(config=model.config)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        self._position = positions[:, -1:]
        """(B, 1) int64, of the last token."""
        self._forward(tokens, positions)
        if len(unique) < len(prompts):
            index_of = {key: index for index, key in enumerate(unique)}
            self._index(torch.tensor([index_of[prompt.tobytes()] for prompt in prompts], device=model.device))

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self._mask)

    @property
    def can_join(self) -> bool:
        """Whether `join` supports all layers of the cache; it does not support linear attention, for example."""
        return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in self._cache.layers)

    def select(self, indexes: Tensor) -> None:
        """Keep the sequences at `indexes`, (n,) int64, and drop padding that none of them needs."""
        self._index(indexes)
        padding = int(self._mask.any(dim=0).int().argmax())
        if padding > 0 and self.can_join:
            self._mask = self._mask[:, padding:]
            for layer in self._cache.layers:
                _drop_left(layer, padding)

    def extend(self, tokens: Tensor) -> None:
        """Append one token, (B,) int64, to each sequence."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        # A finished sequence may wait in the batch; the positions of its padding must stay in the model's range.
        self._position = (self._position + 1).clamp(max=self._last_position)
        self._forward(tokens[:, None], self._position)

    def join(self, others: "Sequences") -> None:
        """Append other sequences of the same model to the batch; `others` must not be used afterwards."""
        length = max(self._mask.shape[1], others._mask.shape[1])
        self._mask = _stack_right_aligned(self._mask[..., None], others._mask[..., None], length)[..., 0]
        self._position = torch.cat([self._position, others._position])
        self.logits = torch.cat([self.logits, others.logits])
        for layer, other in zip(self._cache.layers, others._cache.layers, strict=True):
            _join_layers(layer, other)

    def _index(self, indexes: Tensor) -> None:
        self.logits, self._mask, self._position = self.logits[indexes], self._mask[indexes], self._position[indexes]
        self._cache.reorder_cache(indexes)

    def _forward(self, tokens: Tensor, positions: Tensor) -> None:
        output = self._model(
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self.logits = output.logits[:, -1]


def _pad_left(prompts: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return tokens and attention mask, each (B, L) int64; padding is token 0 with mask 0."""
    tokens = torch.zeros(len(prompts), max(len(prompt) for prompt in prompts), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, -len(prompt) :] = torch.from_numpy(np.array(prompt, dtype=np.int64))
        mask[row, -len(prompt) :] = 1
    return tokens, mask


def _drop_left(layer: DynamicLayer, padding: int) -> None:
    """Drop the first columns of the batch from a layer of the cache."""
    if isinstance(layer, DynamicSlidingWindowLayer):  # holds the last sliding_window - 1 columns only
        layer.cumulative_length -= padding
        padding = max(0, layer.keys.shape[-2] - layer.cumulative_length)
    layer.keys, layer.values = layer.keys[:, :, padding:], layer.values[:, :, padding:]


def _join_layers(layer: DynamicLayer, other: DynamicLayer) -> None:
    """Append the other layer's rows; in both, the last column is the last token."""
    length = max(layer.keys.shape[-2], other.keys.shape[-2])
    layer.keys = _stack_right_aligned(layer.keys, other.keys, length)
    layer.values = _stack_right_aligned(layer.values, other.values, length)
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = max(layer.cumulative_length, other.cumulative_length)


def _stack_right_aligned(top: Tensor, bottom: Tensor, length: int) -> Tensor:
    """Concatenate tensors, (B, ..., L, D), along B; their L may differ and is filled up with zeros on the left."""
    stacked = top.new_zeros(len(top) + len(bottom), *top.shape[1:-2], length, top.shape[-1])
    stacked[: len(top), ..., length - top.shape[-2] :, :] = top
    stacked[len(top) :, ..., length - bottom.shape[-2] :, :] = bottom
    return stacked


def probe_batches(model: PreTrainedModel) -> Sampled:
    """Return the logprobs that a batch gives to the sequences of a probe, which join and leave it on the way.

    The first half of each is its prompt; their tokens are given, not drawn.
    """
    tokens = probe_sequences()
    half, longest = len(tokens) // 2, max(map(len, tokens))
    first, second = [list(range(half)), list(range(half, len(tokens)))]
    logprobs: list[list[float]] = [[] for _ in tokens]

    def begin(rows: list[int]) -> Sequences:
        return Sequences(model, [tokens[row][: len(tokens[row]) // 2] for row in rows], longest)

    def next_token(row: int) -> int:
        return int(tokens[row][len(tokens[row]) // 2 + len(logprobs[row])])

    def is_live(row: int) -> bool:
        return len(logprobs[row]) < len(tokens[row]) - len(tokens[row]) // 2

    def run(rows: list[int], joining: list[int]) -> None:
        batch = begin(rows)
        while True:
            given = [next_token(row) for row in rows]
            found = batch.logits.double().log_softmax(-1)
            for index, row in enumerate(rows):
                logprobs[row].append(found[index, given[index]].item())
            live = [index for index, row in enumerate(rows) if is_live(row)]
            if not live:
                return
            batch.select(torch.tensor(live, device=model.device))
            rows = [rows[index] for index in live]
            batch.extend(torch.tensor([given[index] for index in live], device=model.device))
            if joining and len(logprobs[rows[0]]) == 2:
                batch.join(begin(joining))
                rows, joining = rows + joining, []

    if begin(first).can_join:
        run(first, second)
    else:
        run(first, [])
        run(second, [])
    return list(zip(tokens, logprobs, strict=True))
