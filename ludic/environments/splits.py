"""Split examples into train and held-out, and map an unlimited index to an example.

One rule for all environments: only the hash of a text that identifies the example (its key) decides whether it is
held out. So no seed, option or process can move an example to the other split. Nothing here depends on hash(), on the
machine or on earlier calls.
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
"""One key in four is held out, on average."""
MAX_DRAWS = 200
"""Maximum draws for an example: with a quarter held out, 200 misses in a row have a probability of 0.75**200, 1e-25."""


def split_of(key: str) -> Split:
    """Return the split of a key; the same on every machine and in every run."""
    return "heldout" if sha256(key.encode()).digest()[0] % HELDOUT_ONE_IN == 0 else "train"


def is_heldout(key: str, share: float | None = None) -> bool:
    """Return whether a key is held out. share: of all keys, from 0 to 1; None is the rule of `split_of`, a quarter."""
    if share is None:
        return split_of(key) == "heldout"
    return int.from_bytes(sha256(key.encode()).digest()[:8]) < share * 2**64


def partition(items: Iterable[T], key: Callable[[T], str]) -> Mapping[Split, tuple[T, ...]]:
    """Return the items of each split, in their order."""
    items = tuple(items)
    return {split: tuple(item for item in items if split_of(key(item)) == split) for split in ("train", "heldout")}


def nth(items: Sequence[T], index: int, seed: int) -> T:
    """Return item `index` of endless laps over `items`: each lap has every item once, in its own order."""
    lap, position = divmod(index, len(items))
    return items[_order(len(items), lap, seed)[position]]


@lru_cache(maxsize=64)
def _order(size: int, lap: int, seed: int) -> tuple[int, ...]:
    return tuple(Random(f"{seed}/{lap}").sample(range(size), size))


def draw(make: Callable[[Random], T], key: Callable[[T], str], index: int, split: Split, seed: int) -> T:
    """Return the first item that `make` draws for this index and whose key belongs to the split.

    Raises ConfigError if MAX_DRAWS draws find none: the environment's options leave too few different examples.
    """
    for attempt in range(MAX_DRAWS):
        item = make(Random(f"{seed}/{split}/{index}/{attempt}"))
        if split_of(key(item)) == split:
            return item
    raise ConfigError(
        f"example {index} of split {split}: none of {MAX_DRAWS} draws fell into the split, the last one was "
        f"{key(item)[:80]!r}; the environment's options leave too few different examples, widen them"
    )
