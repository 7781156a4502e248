"""Which beginnings of prompts a server has in its prefix cache, as far as a worker knows. Pure.

vLLM keeps the keys and values of whole blocks of tokens. It names a block by a hash over its tokens, the hash of the
block before it, and, in the first block, the salt of the request. A worker does the same with what it sends to each
server, so the next turn of an episode and the other rollouts of a group find the server that has computed their
beginning. A wrong guess costs time only: vLLM itself decides what it takes from its cache.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

_BLOCK = 16
"""Tokens of a block; vLLM's own size on GPUs."""
_MOST_BLOCKS = 1 << 16
"""Blocks of a server that are remembered: a million tokens, in some 10 MB. A large GPU holds about as many."""


class Prefixes:
    """The blocks that were sent to one server or came from it, at most _MOST_BLOCKS; those used last are kept."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, blocks: Sequence[int]) -> None:
        """Remember blocks, from `hash_blocks`."""
        for block in reversed(blocks):  # so that a sequence loses its last block first
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > _MOST_BLOCKS:
            self._blocks.popitem(last=False)

    def count(self, blocks: Sequence[int]) -> int:
        """Return how many of the blocks, from the first one on, the server has."""
        return next((index for index, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def clear(self) -> None:
        """Forget all, as a server does that was started again."""
        self._blocks.clear()


def hash_blocks(tokens: np.ndarray, salt: str) -> list[int]:
    """Return a hash of each whole block of tokens, which depends on all tokens up to its end.

    tokens: (length,) int32. salt: names the weights, so that no block is found again under others.
    """
    data, hashes, last = np.ascontiguousarray(tokens, dtype=np.int32).tobytes(), [], xxh3_64_intdigest(salt.encode())
    size = _BLOCK * np.dtype(np.int32).itemsize
    for end in range(size, len(data) + 1, size):
        last = xxh3_64_intdigest(data[end - size : end], seed=last)
        hashes.append(last)
    return hashes
