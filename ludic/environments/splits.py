"""Which examples are held out, and how an endless index finds its example.

One rule for all environments: a text that identifies the example (its key) decides alone, by its
hash, whether it is held out. So no seed, option or process can move an example across.
Nothing here depends on hash(), on the machine or on what was asked before.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from random import Random
from typing import TypeVar

from ludic.environments.environment import Split
from ludic.errors import ConfigError

T = TypeVar("T")

HELDOUT_ONE_IN = 4
"""Every fourth key is held out, on average."""
MAX_DRAWS = 200
"""With a quarter held out, this many misses in a row have a chance of 0.75**200, or 1e-25."""


def split_of(key: str) -> Split:
    """The split that the key belongs to, always and everywhere."""
    return "heldout" if sha256(key.encode()).digest()[0] % HELDOUT_ONE_IN == 0 else "train"


def partition(items: Iterable[T], key: Callable[[T], str]) -> Mapping[Split, tuple[T, ...]]:
    """The items of each split, in their order."""
    items = tuple(items)
    return {split: tuple(item for item in items if split_of(key(item)) == split) for split in ("train", "heldout")}


def nth(items: Sequence[T], index: int, seed: int) -> T:
    """Item `index` of an endless run through `items`: each lap has every item once, in an order of its own."""
    lap, place = divmod(index, len(items))
    return items[_order(len(items), lap, seed)[place]]


@lru_cache(maxsize=64)
def _order(size: int, lap: int, seed: int) -> tuple[int, ...]:
    return tuple(Random(f"{seed}/{lap}").sample(range(size), size))


def draw(make: Callable[[Random], T], key: Callable[[T], str], index: int, split: Split, seed: int) -> T:
    """The first item that `make` gives for this index and whose key belongs to the split.

    Raises ConfigError when there is none: the environment's options leave too few different examples.
    """
    for attempt in range(MAX_DRAWS):
        item = make(Random(f"{seed}/{split}/{index}/{attempt}"))
        if split_of(key(item)) == split:
            return item
    raise ConfigError(
        f"example {index} of split {split}: none of {MAX_DRAWS} draws fell into the split, the last one was "
        f"{key(item)[:80]!r}; the environment's options leave too few different examples, widen them"
    )
