"""Time contestants in turns, so that other load on the machine affects all of them equally, and print tables."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from statistics import median
from typing import ParamSpec, TypeVar

from rich.console import Console
from rich.table import Table

_PRELOADED = ("benchmarks", "ludic", "pyarrow", "duckdb", "transformers")
"""Packages whose modules are imported once for all processes; ludic's own import torch."""
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def take_turns(
    contestants: Mapping[str, Callable[[], object]], rounds: int, *, twice: bool = False
) -> dict[str, list[float]]:
    """Return the seconds of each call by contestant, (rounds,) each, after an untimed round that warms up.

    A single round, which only shows that the calls work, has none before it.

    twice: make an untimed call before each timed call. For calls of some milliseconds, which would otherwise pay for
    processor caches that the contestant before has filled.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    num_before = int(rounds > 1)
    for number in range(num_before + rounds):
        for name, call in contestants.items():
            if twice and num_before:
                call()
            elapsed = _seconds(call)
            if number >= num_before:
                seconds[name].append(elapsed)
    return seconds


def _seconds(call: Callable[[], object]) -> float:
    """Time one call. As in timeit, garbage collection is off, since it would scan the objects of all contestants."""
    gc.disable()
    try:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    finally:
        gc.enable()


def in_a_process(function: Callable[_Params, _Result], *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
    """Return the result of a call in a process of its own, which has imported the program, and has run nothing yet.

    It has the environment variables of now.
    """
    # The fork server has those of its start.
    environment = dict(os.environ)
    with ProcessPoolExecutor(1, processes(), initializer=_take_environment, initargs=(environment,)) as pool:
        return pool.submit(function, *args, **kwargs).result()


def _take_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def processes() -> ForkServerContext:
    """Return the context of processes that are forked from one with the imports of this one: torch takes seconds."""
    context = get_context("forkserver")
    # Without the program itself, which each process runs as its main module.
    context.set_forkserver_preload([name for name in sys.modules if name.partition(".")[0] in _PRELOADED])
    return context


def start_peak() -> int:
    """Let the kernel count this process's peak memory from now on; returns the bytes that it holds."""
    Path("/proc/self/clear_refs").write_text("5")
    return _process_bytes("VmRSS")


def peak_bytes() -> int:
    """Return the most memory that this process has held since `start_peak`."""
    return _process_bytes("VmHWM")


def _process_bytes(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Return the median over rounds of the ratio within a round."""
    return median(top / bottom for top, bottom in zip(numerators, denominators, strict=True))


def with_spread(values: Sequence[float]) -> str:
    """Return the median of rounds, with the lowest and the highest."""
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    # A file or a pipe would get 80 columns only.
    Console(width=120).print(table)


# --- Wall and CPU seconds --------------------------------------------------------------------------------------------


def wall_and_cpu() -> tuple[float, float]:
    """Return the seconds of a clock and of this process on the CPU."""
    return time.perf_counter(), time.process_time()


def seconds_since(start: tuple[float, float]) -> tuple[float, float]:
    """Return the wall and CPU seconds since `wall_and_cpu` returned `start`."""
    wall, cpu = wall_and_cpu()
    return wall - start[0], cpu - start[1]


def import_seconds(module: str) -> tuple[float, float]:
    """Return the wall and CPU seconds of a module's import, in a new process."""
    program = f"import time; a = time.perf_counter(), time.process_time(); import {module}; "
    program += "print(time.perf_counter() - a[0], time.process_time() - a[1])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    wall, cpu = map(float, done.stdout.split())
    return wall, cpu


def milliseconds(times: Sequence[tuple[float, float]]) -> list[str]:
    """Return wall and CPU seconds of several rounds as two texts in milliseconds, each with its spread."""
    return [with_spread([1000 * each for each in seconds]) for seconds in zip(*times, strict=True)]
