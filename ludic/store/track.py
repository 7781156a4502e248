"""Progress of slow work: reported by the functions that do it, shown by the caller that has a terminal."""

from collections.abc import Callable, Iterable
from typing import Any

Track = Callable[[Iterable[Any], int, str], Iterable[Any]]
"""Passes on the items of an iterable of known length, and shows their count with a description."""


def untracked(items: Iterable[Any], total: int, description: str) -> Iterable[Any]:
    """A Track that shows nothing."""
    return items
