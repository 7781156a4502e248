"""Measure commits per second of concurrent writers, one group per commit: ludic, Delta Lake, Iceberg and Lance.

    python -m benchmarks.contention

Each writer is a process, and makes one untimed commit. Then all writers start together and append groups of 8 rollouts
of about 1,000 tokens to one table on the local disk until the time is up; refused commits are repeated. All start from
records, which only ludic validates, and only ludic syncs its files to the disk. At the end every row is checked. The
benchmark measures the gain of writing without a coordinator: with one committer for the files of all writers, table
formats have no contention either.
"""

import math
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import numpy as np

from benchmarks.measure import print_table, processes
from benchmarks.rollouts import make_batch, make_like
from benchmarks.tables import TABLES
from ludic.records import to_table
from ludic.settings import run_script

GROUP_SIZE = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of all writers of one run."""

    commits: int
    refused: int
    wall_s: float
    latencies_s: Sequence[float]
    lost: int
    doubled: int

    @property
    def commits_a_second(self) -> float:
        return self.commits / self.wall_s


def main(quick: bool = False) -> None:
    """Print a table.

    Args:
        quick: Use one and two writers for 0.2 s, to check that the benchmark works.
    """
    numbers, seconds, rounds = ((1, 2), 0.2, 1) if quick else ((1, 8, 32, 64), 5.0, 3)
    rows = []
    for num_writers in numbers:
        outcomes: dict[str, list[Outcome]] = {name: [] for name in TABLES}
        for _ in range(rounds):
            for name, of_table in outcomes.items():
                of_table.append(_run(name, num_writers, seconds))
        rows += [_row(num_writers, name, outcomes[name], outcomes["ludic"]) for name in TABLES]
    columns = ["writers", "", "commits/s", "ludic's of these", "p50", "p99", "refused", "lost", "doubled"]
    print_table(f"Groups of {GROUP_SIZE} rollouts committed one by one, by many processes", columns, rows)


def _row(num_writers: int, name: str, outcomes: Sequence[Outcome], ours: Sequence[Outcome]) -> list[str]:
    rates, our_rates = ([outcome.commits_a_second for outcome in each] for each in (outcomes, ours))
    latencies = np.concatenate([outcome.latencies_s for outcome in outcomes])
    counts = (sum(getattr(outcome, count) for outcome in outcomes) for count in ("refused", "lost", "doubled"))
    return [
        str(num_writers),
        name,
        f"{np.median(rates):.1f}",
        f"{np.median(np.divide(our_rates, rates)):.1f}x",
        *(f"{np.quantile(latencies, quantile) * 1e3:,.0f} ms" for quantile in (0.5, 0.99)),
        *map(str, counts),
    ]


def _run(name: str, num_writers: int, seconds: float) -> Outcome:
    table = TABLES[name]
    with tempfile.TemporaryDirectory() as folder:
        table.create(folder, to_table(make_batch(1), run_id="none", sequence=0).schema)
        context = processes()
        start = context.Barrier(num_writers)
        pipes = [context.Pipe(duplex=False) for _ in range(num_writers)]
        writers = [
            context.Process(target=_write, args=(name, folder, f"w{number}", start, seconds, says))
            for number, (_, says) in enumerate(pipes)
        ]
        for writer, (_, says) in zip(writers, pipes, strict=True):
            writer.start()
            says.close()
        reports = [hears.recv() for hears, _ in pipes]
        for writer in writers:
            writer.join()
        found = Counter(table.read(folder).to_pylist())
    acknowledged = {_group_id(f"w{index}", number) for index, report in enumerate(reports) for number in report.done}
    return Outcome(
        commits=len(acknowledged),
        refused=sum(report.refused for report in reports),
        wall_s=max(report.end for report in reports) - min(report.start for report in reports),
        latencies_s=[latency for report in reports for latency in report.done.values()],
        lost=len(acknowledged - found.keys()),
        doubled=sum(count != GROUP_SIZE for count in found.values()),
    )


@dataclass(frozen=True, slots=True)
class _Report:
    start: float
    end: float
    done: dict[int, float]
    """Seconds of each acknowledged commit, by its number."""
    refused: int


def _write(name: str, folder: str, worker_id: str, start: Barrier, seconds: float, says: Connection) -> None:
    writer = _Writer(name, folder, worker_id)
    writer.commit(math.inf)
    writer.done.clear()
    writer.refused = 0
    start.wait(timeout=600)
    begin = time.monotonic()
    while time.monotonic() < begin + seconds:
        writer.commit(begin + seconds)
    says.send(_Report(begin, time.monotonic(), writer.done, writer.refused))


class _Writer:
    """Commits groups one by one."""

    def __init__(self, name: str, folder: str, worker_id: str) -> None:
        self.done: dict[int, float] = {}
        self.refused = self._number = 0
        self._worker_id, self._like = worker_id, make_batch(1, group_size=GROUP_SIZE)
        self._append, self._refusals = TABLES[name].open(folder, worker_id), TABLES[name].refusals

    def commit(self, until: float) -> None:
        """Commit a new group; repeat refused commits until time `until`."""
        number, self._number = self._number, self._number + 1
        batch = make_like(self._like, self._worker_id, _group_id(self._worker_id, number))
        since = time.monotonic()
        while number not in self.done and time.monotonic() < until:
            try:
                self._append(batch)
                self.done[number] = time.monotonic() - since
            except self._refusals:
                self.refused += 1


def _group_id(worker_id: str, number: int) -> str:
    return f"{worker_id}-{number}"


if __name__ == "__main__":
    run_script(main, description=__doc__)
