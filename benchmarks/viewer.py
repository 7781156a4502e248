"""Measure the terminal viewer on a run of 100,032 rollouts: until it shows rows, and how long keys take.

    python -m benchmarks.viewer

The viewer runs in this process without a terminal; a key is timed until its rows are drawn. The run has 1,563 files of
workers, whose scalars an earlier connection has cached. Opening includes a connection and the first query, but not the
imports of Python, which are timed in a process of their own. CPU time is of all threads; it says what an idle machine
would take.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import tyro
from textual.pilot import Pilot

import ludic
from benchmarks.measure import print_table, with_spread
from benchmarks.stores import make_store
from ludic.sql.snapshot import CACHE_VARIABLE
from ludic.store import Root
from ludic.viewer.terminal.app import ViewApp

_SIZE = (130, 40)
_ACTIONS = {
    "list all rollouts": ("A",),
    "next page, of three": ("pagedown", "pagedown", "pagedown"),
    "last page": ("end",),
    "reverse the order": ("S",),
    "open a rollout": ("enter",),
}

Times = dict[str, tuple[float, float]]
"""Wall and CPU seconds by action."""


def main(quick: bool = False) -> None:
    """Print a table.

    Args:
        quick: Use a small run and one round, to check that the benchmark works.
    """
    num_files, rounds = (4, 1) if quick else (1_563, 3)
    folder = Path(tempfile.mkdtemp())
    os.environ[CACHE_VARIABLE] = str(folder / "cache")
    try:
        print_times(make_store(str(folder / "run"), num_files, num_versions=20, mean_length=20), rounds)
    finally:
        shutil.rmtree(folder)


def print_times(root: Root, rounds: int) -> None:
    ((num_rollouts,),) = ludic.connect(root).sql("select count(*) from rollouts").fetchall()
    found: list[Times] = [asyncio.run(measure(root)) for _ in range(rounds)]
    rows = [["import the viewer", *_figures([import_seconds() for _ in range(rounds)])]]
    rows += [[name, *_figures([times[name] for times in found])] for name in found[0]]
    print_table(f"viewer: a run of {num_rollouts:,} rollouts", ["", "wall, ms", "CPU, ms"], rows)


async def measure(root: Root) -> Times:
    """Open the viewer and press keys."""
    times: Times = {}
    start = _now()
    async with ViewApp(root).run_test(size=_SIZE) as pilot:
        await _settle(pilot)
        times["open the versions"] = _since(start)
        for name, keys in _ACTIONS.items():
            start = _now()
            await pilot.press(*keys)
            await _settle(pilot)
            wall, cpu = _since(start)
            times[name] = wall / len(keys), cpu / len(keys)
    return times


def import_seconds() -> tuple[float, float]:
    """Return the wall and CPU seconds of the viewer's imports, in a new process."""
    program = "import time; a = time.perf_counter(), time.process_time(); import ludic.viewer.terminal.app; "
    program += "print(time.perf_counter() - a[0], time.process_time() - a[1])"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    wall, cpu = map(float, done.stdout.split())
    return wall, cpu


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(start: tuple[float, float]) -> tuple[float, float]:
    wall, cpu = _now()
    return wall - start[0], cpu - start[1]


async def _settle(pilot: Pilot[Any]) -> None:
    await pilot.pause()
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


def _figures(times: list[tuple[float, float]]) -> list[str]:
    return [with_spread([each * 1000 for each in part]) for part in zip(*times, strict=True)]


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
