"""Measure the terminal viewer on a run of 100,032 rollouts: until it shows rows, and how long keys take.

    python -m benchmarks.viewer

The run has 1,563 files of workers, whose scalars an earlier connection has cached. First `ludic view` runs in a
terminal of its own: its start includes Python's, and a key is timed until the last byte that it draws. Then the viewer
runs in this process without a terminal, for its CPU time, of all threads: a key is timed until its rows are drawn, and
opening includes a connection and the first query, but not the imports, which are timed in a process of their own.
"""

import asyncio
import os
import pty
import select
import shutil
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

import ludic
from benchmarks.measure import import_seconds, milliseconds, print_table, seconds_since, wall_and_cpu, with_spread
from benchmarks.stores import make_store
from ludic.app import ViewApp
from ludic.base import CACHE_VARIABLE
from ludic.root import Root
from ludic.settings import run_script

_SIZE = (130, 40)
_ACTIONS = {
    "list all rollouts": ("A",),
    "next page, of three": ("pagedown", "pagedown", "pagedown"),
    "last page": ("end",),
    "reverse the order": ("S",),
    "open a rollout": ("enter",),
}
_BYTES = {"pagedown": b"\x1b[6~", "end": b"\x1b[F", "enter": b"\r"}
"""What a terminal sends for a key."""
_QUIET_S = 1.0
"""Seconds without output after which a screen is complete; longer than any query of the actions."""
_MOST_S = 120.0
_NUM_VERSIONS = 4

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
        print_times(make_store(str(folder / "run"), num_files, num_versions=_NUM_VERSIONS, mean_length=20), rounds)
    finally:
        shutil.rmtree(folder)


def print_times(root: Root, rounds: int) -> None:
    ((num_rollouts,),) = ludic.connect(root).sql("select count(*) from rollouts").fetchall()
    drawn = [in_terminal(root) for _ in range(rounds)]
    rows = [[name, with_spread([each[name] * 1000 for each in drawn])] for name in drawn[0]]
    print_table(f"viewer: in a terminal, a run of {num_rollouts:,} rollouts", ["", "wall, ms"], rows)
    found: list[Times] = [asyncio.run(measure(root)) for _ in range(rounds)]
    rows = [
        ["import the viewer", *milliseconds([import_seconds("ludic.app.show.terminal.app") for _ in range(rounds)])]
    ]
    rows += [[name, *milliseconds([times[name] for times in found])] for name in found[0]]
    print_table("viewer: without a terminal", ["", "wall, ms", "CPU, ms"], rows)


def in_terminal(root: Root) -> dict[str, float]:
    """Return the seconds until `ludic view` shows the versions, and of keys, in a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, _SIZE[::-1])
    command = [sys.executable, "-m", "ludic", "view", root.url]
    start, times = time.perf_counter(), {}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        times["ludic view, until it shows versions"] = _read_until(ours, f" of {_NUM_VERSIONS}") - start
        _read_until_quiet(ours)
        for name, keys in _ACTIONS.items():
            took = []
            for key in keys:
                start = time.perf_counter()
                os.write(ours, _BYTES.get(key, key.encode()))
                took.append(_read_until_quiet(ours) - start)
            times[name] = sum(took) / len(took)
        process.terminate()
    os.close(ours)
    return times


def _read_until(terminal: int, text: str) -> float:
    """Return the time at which a terminal has shown a text."""
    shown = b""
    while text.encode() not in shown:
        if not select.select([terminal], [], [], _MOST_S)[0]:
            raise TimeoutError(f"{text!r} was not shown, but {shown.decode(errors='replace')}")
        shown += os.read(terminal, 65_536)
    return time.perf_counter()


def _read_until_quiet(terminal: int) -> float:
    """Return the time of the last output before _QUIET_S without any."""
    last = time.perf_counter()
    while select.select([terminal], [], [], _QUIET_S)[0]:
        os.read(terminal, 65_536)
        last = time.perf_counter()
    return last


async def measure(root: Root) -> Times:
    """Open the viewer and press keys."""
    times: Times = {}
    start = wall_and_cpu()
    async with ViewApp(root).run_test(size=_SIZE) as pilot:
        await _settle(pilot)
        times["open the versions"] = seconds_since(start)
        for name, keys in _ACTIONS.items():
            start = wall_and_cpu()
            await pilot.press(*keys)
            await _settle(pilot)
            wall, cpu = seconds_since(start)
            times[name] = wall / len(keys), cpu / len(keys)
    return times


async def _settle(pilot: Pilot[Any]) -> None:
    await pilot.pause()
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


if __name__ == "__main__":
    run_script(main, description=__doc__)
