"""Progress of what takes time: told by whoever works, shown by whoever has a terminal."""

from collections.abc import Callable, Iterable
from typing import Any

Track = Callable[[Iterable[Any], int, str], Iterable[Any]]
"""Passes on the items of an iterable of known length, showing how many went by under a description."""


def untracked(items: Iterable[Any], total: int, description: str) -> Iterable[Any]:
    """A Track that shows nothing."""
    return items
