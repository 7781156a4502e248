"""Measure this checkout beside another one, in turns: what ludic itself takes in the benchmarks of both.

For example, with a checkout that has an environment of its own in .venv:

    git worktree add ../before 68798f9 && make -C ../before .venv/installed
    python -m benchmarks.beside --other ../before

Each checkout runs the functions of its own benchmarks/ in one process that stays, so that imports are not measured.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

_WARM = 1
Measurements = dict[str, Callable[[], dict[str, float]]]
"""By benchmark: a function that measures one round, and gives seconds, or bytes, by what was measured."""


def main(other: Path, rounds: int = 9, only: tuple[str, ...] = (), quick: bool = False) -> None:
    """Print the ratios of this checkout's times to the other's.

    Args:
        other: Folder of the other checkout.
        rounds: How often both measure each benchmark, after a round that warms up.
        only: Benchmarks to measure; all if empty.
        quick: Measure small cases, to check that the benchmark works.
    """
    from benchmarks.measure import print_table

    here = Path(__file__).parents[1]
    sides = [_start(folder, quick) for folder in (here, other.resolve())]
    names = [name for name in json.loads(_read(sides[0])) if not only or name in only]
    _read(sides[1])
    for name in names:
        pairs: dict[str, list[tuple[float, float]]] = {}
        for number in range(rounds + _WARM):
            # Who goes first changes, as the machine may get slower or faster within a round.
            turns = random.sample((0, 1), 2)
            taken = dict(sorted((turn, _ask(sides[turn], name)) for turn in turns))
            if number >= _WARM:
                for what in taken[0]:
                    pairs.setdefault(what, []).append((taken[0][what], taken[1][what]))
        rows = [[f"{name}, {what}", *_row(of_rounds)] for what, of_rounds in pairs.items()]
        print_table(name, ["", "here", "there", "here of there", "interval", "lowest to highest"], rows)
    for side in sides:
        side.communicate()


def _row(pairs: list[tuple[float, float]]) -> list[str]:
    """Return medians, the median of the ratios, the interval that has the true one with about 95%, and the extremes."""
    ratios = sorted(here / there for here, there in pairs)
    # As many of n signs as fewer than 2.5% of fair coins would give: Conover, Practical Nonparametric Statistics, 3.1.
    cut = max(0, round((len(ratios) - 1.96 * len(ratios) ** 0.5) / 2) - 1)
    return [
        *(f"{median(values):.4g}" for values in zip(*pairs, strict=True)),
        f"{median(ratios):.3f}x",
        f"{ratios[cut]:.3f} to {ratios[-1 - cut]:.3f}",
        f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
    ]


def _start(folder: Path, quick: bool) -> "subprocess.Popen[str]":
    command = [str(folder / ".venv/bin/python"), __file__, "--measure", *(["--quick"] if quick else [])]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ask(side: "subprocess.Popen[str]", name: str) -> dict[str, float]:
    assert side.stdin is not None
    print(name, file=side.stdin, flush=True)
    return json.loads(_read(side))


def _read(side: "subprocess.Popen[str]") -> str:
    assert side.stdout is not None
    line = side.stdout.readline()
    assert line, f"a checkout ended with {side.wait()}"
    return line


def answer(quick: bool) -> None:
    """Measure what each line of stdin names, and print the figures as a line of JSON."""
    # What the benchmarks print goes to stderr.
    out, sys.stdout = sys.stdout, sys.stderr
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        started: Measurements = {}
        print(json.dumps(list(STARTS)), file=out, flush=True)
        for line in sys.stdin:
            name = line.strip()
            if name not in started:
                (place := Path(folder) / name).mkdir()
                started[name] = STARTS[name](import_module(f"benchmarks.{name}"), place, quick)
            print(json.dumps(started[name]()), file=out, flush=True)


def _timed(call: Callable[[], object], calls: int) -> float:
    from benchmarks.measure import take_turns

    return median(take_turns({"": call}, calls, twice=True)[""])


def store_size(module: Any, folder: Path, quick: bool) -> Callable[[], dict[str, float]]:
    num_groups, mean_length = (2, 50) if quick else (32, 1000)
    size = len(module.parquet(module.make_batch(num_groups, mean_length=mean_length)).write())

    def measure() -> dict[str, float]:
        encoding = module.measure_speed(module.ENCODING, num_groups, mean_length)["write"]
        return {"bytes": size, "encoding": encoding} | module.measure_speed("Parquet (ludic)", num_groups, mean_length)

    return measure


def contention(module: Any, folder: Path, quick: bool) -> Callable[[], dict[str, float]]:
    def measure() -> dict[str, float]:
        return {
            f"a commit of {num} writers": 1 / module._run("ludic", num, 0.2 if quick else 3.0).commits_a_second
            for num in ((1,) if quick else (1, 8))
        }

    return measure


def tail(module: Any, folder: Path, quick: bool) -> Callable[[], dict[str, float]]:
    followed = module.start_ludic(str(folder), 100 if quick else 10_000)

    def measure() -> dict[str, float]:
        delivered = module._deliver({"": followed}, 20)[""]
        return {"a poll without news": _timed(followed.poll, 20), "a commit to its rows": median(delivered)}

    return measure


def sql(module: Any, folder: Path, quick: bool) -> Callable[[], dict[str, float]]:
    small = module.make_store(str(folder / "small"), 70 if quick else 3000, num_versions=20, mean_length=20)
    compacted = module.compact_copy(small, str(folder / "compacted"))
    con = module.connect(compacted)
    return lambda: {
        "advantages": _timed(lambda: module.by_sql(con), 3),
        "small files, with connecting": _timed(lambda: module.by_sql(module.connect(small)), 1),
    }


def planner(module: Any, folder: Path, quick: bool) -> Callable[[], dict[str, float]]:
    sizes = (16,) if quick else (64, 1024)
    return lambda: {f"{size} groups wait": median(module._measure(size, 9)["sql"]) for size in sizes}


def stream(module: Any, folder: Path, quick: bool) -> Callable[[], dict[str, float]]:
    load = module.by_ludic(folder, 50 if quick else 1000)
    return lambda: {"from files to tensors": _timed(load, 5)}


def loop(module: Any, folder: Path, quick: bool) -> Callable[[], dict[str, float]]:
    model, steps_a_round = str(folder / "model"), 1 if quick else 3
    module.make_tiny_model(model, module.WORDS, hidden_size=64)
    run = module.RunConfig(model=model, env=("moar_cats",), max_tokens=32, accept_incomplete=True)
    config = module.TrainConfig.of(num_steps=1000, learning_rate=1e-3)
    start = getattr(module, "put_run", None) or module.Root.create  # of a checkout older than ludic.run.run_json
    steps: Iterator[Any] = module.minimal.learn(start(f"{folder}/run", run), config, folder)
    return lambda: {f"{steps_a_round} steps": _timed_once(lambda: list(islice(steps, steps_a_round)))}


def episodes(module: Any, folder: Path, quick: bool) -> Callable[[], dict[str, float]]:
    num_episodes = 4 if quick else 32

    def measure() -> dict[str, float]:
        engine, cpu_began = module.SlowEngine(), time.process_time()
        seconds = _timed_once(lambda: asyncio.run(module._run(engine, num_episodes)))
        return {"the clock": seconds, "the CPU": time.process_time() - cpu_began}

    return measure


def _timed_once(call: Callable[[], object]) -> float:
    from benchmarks.measure import _seconds

    return _seconds(call)


STARTS = {start.__name__: start for start in (store_size, contention, tail, sql, planner, stream, loop, episodes)}

if __name__ == "__main__":
    if "--measure" in sys.argv:
        answer(quick="--quick" in sys.argv)
    else:
        from ludic.settings import run_script

        run_script(main, description=__doc__)
