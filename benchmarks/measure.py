"""Time contestants in turns, so that a neighbour's load hits all alike, and print tables."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from rich.console import Console
from rich.table import Table


def take_turns(
    contestants: Mapping[str, Callable[[], object]], rounds: int, *, twice: bool = False
) -> dict[str, list[float]]:
    """Seconds of each call by contestant, (rounds,) each; a first round warms up and does not count.

    twice: each calls once more, off the clock, before a call that counts. For calls of some milliseconds, which
    would else pay for what the one before put into the processor's caches.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, call in contestants.items():
            if twice:
                call()
            elapsed = _seconds(call)
            if number > 0:
                seconds[name].append(elapsed)
    return seconds


def _seconds(call: Callable[[], object]) -> float:
    """Of one call; as in timeit, no collection of garbage, which would look through everybody's objects."""
    gc.disable()
    try:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    finally:
        gc.enable()


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median over rounds of the ratio within a round."""
    return median(top / bottom for top, bottom in zip(numerators, denominators, strict=True))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right")
    for row in rows:
        table.add_row(*row)
    # Wider than the 80 columns that a file or a pipe would get.
    Console(width=120).print(table)
