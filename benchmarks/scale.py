"""Measure what a run of up to 1,000 workers costs at its store: time of the trainer's parts, requests and dollars.

    python -m benchmarks.scale

benchmarks/simulation.py runs the real store, planner and ledger with fake sampling: each worker samples 10 rollouts a
second on a clock of its own, in calls of 64, which are a file each; a batch is a call of every worker. Rollouts have 32
tokens of prompt and about 32 of response. The S3 server is moto, with 20 ms added to each response to the trainer; it
counts the requests. All sizes take about half an hour, most of it moto's. Seconds, requests and the times on the clock
are measured; dollars, and what is given per million rollouts, are computed from them. Not in the counts: renewals of
the lease, checkpoints, and uploads in parts.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from time import perf_counter

import torch

from benchmarks.measure import print_table
from benchmarks.s3_server import BUCKET, Request, S3Server, s3_server
from benchmarks.simulation import GROUP_SIZE, GROUPS_PER_CALL, ROLLOUTS_A_SECOND, Outcome, simulate
from ludic.base import init_distributed, shut_down
from ludic.root import Root
from ludic.root.rows import MetricsTail
from ludic.run import RunConfig, put_run
from ludic.settings import run_script

DOLLARS = {"PUT": 5e-6, "POST": 5e-6, "LIST": 5e-6, "GET": 4e-7, "HEAD": 4e-7, "DELETE": 0.0}
"""List prices of a request, S3 Standard in us-east-1, 2026-11."""
S3_LATENCY_S = 0.02
CALL_S = GROUPS_PER_CALL * GROUP_SIZE / ROLLOUTS_A_SECOND
"""Seconds of a worker's call, and of a step when the trainer waits for workers."""
TRAIN_S = {"trainer": CALL_S / 2, "workers": CALL_S * 2}
"""Seconds of a training step by who waits for the other."""
PARTS = {"poll": ("poll",), "plan": ("add", "plan", "shortage", "consume"), "ledger": ("ledger",), "read": ("read",)}
NUM_STEPS = 16
"""Steps on the local disk, of 64 rollouts a worker: 1,024,000 for 1,000 workers."""
STEPS_ON_S3 = {10: 16, 100: 4, 1000: 2}
"""Steps on S3 by number of workers: moto takes some 10 ms for a request."""


@dataclass(frozen=True, slots=True)
class OnS3:
    """A simulated run on S3."""

    outcome: Outcome
    requests: Counter[Request]
    """Requests of the run, without its creation."""
    look_s: float
    """Seconds of the second look of `ludic watch` at the metrics, which asks for new files by name."""
    look_requests: int

    def of_million(self, number: float) -> float:
        return number * 1e6 / self.outcome.num_rollouts

    def count(self, *kinds: str) -> int:
        return sum(count for request, count in self.requests.items() if request.kind in kinds)


def main(quick: bool = False, workers: tuple[int, ...] = (10, 100, 1000)) -> None:
    """Print tables: times, requests, and requests by folder.

    Args:
        quick: Simulate one worker and few steps, to check that the benchmark works.
        workers: Numbers of workers.
    """
    torch.set_num_threads(1)
    init_distributed("cpu")
    workers, num_steps = ((1,), 2) if quick else (workers, NUM_STEPS)
    outcomes = {("local disk", number): _run_locally(number, num_steps) for number in workers}
    runs = {}
    with s3_server({"workers": 0.0, "trainer": S3_LATENCY_S}) as server:
        for number, who in product(workers, TRAIN_S):
            runs[who, number] = _run_on_s3(server, f"{who}-{number}", number, STEPS_ON_S3.get(number, 2), TRAIN_S[who])
    shut_down()
    outcomes |= {("S3", number): run.outcome for (who, number), run in runs.items() if who == "trainer"}
    _print_times(outcomes)
    _print_requests(runs)
    _print_folders(runs["trainer", max(workers)])


def _config(num_workers: int) -> RunConfig:
    groups_per_batch = num_workers * GROUPS_PER_CALL
    return RunConfig(
        model="none",
        env=("moar_cats",),
        group_size=GROUP_SIZE,
        groups_per_batch=groups_per_batch,
        batches_ahead=1,
        num_workers=num_workers,
    )


def _run_locally(num_workers: int, num_steps: int) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        root = put_run(f"{folder}/run", _config(num_workers))
        return simulate(root, root, num_steps=num_steps, train_s=TRAIN_S["trainer"])


def _run_on_s3(server: S3Server, name: str, num_workers: int, num_steps: int, train_s: float) -> OnS3:
    for_workers, for_trainer = (_connected(server, client, name, num_workers) for client in ("workers", "trainer"))
    before = server.counts()
    outcome = simulate(for_workers, for_trainer, num_steps=num_steps, train_s=train_s)
    after = server.counts()
    tail = MetricsTail(for_trainer, newest_files=3)
    tail.poll()
    between = server.counts()
    return OnS3(outcome, after - before, _seconds(tail.poll), (server.counts() - between).total())


def _connected(server: S3Server, client: str, name: str, num_workers: int) -> Root:
    """Return the root through a client's port."""
    server.serve(client)
    root = put_run(f"s3://{BUCKET}/{name}", _config(num_workers))
    root.fs.size(root.at("run.json"))  # s3fs connects at its first request, and obstore has done so
    return root


def _seconds(call: Callable[[], object]) -> float:
    since = perf_counter()
    call()
    return perf_counter() - since


def _print_times(outcomes: dict[tuple[str, int], Outcome]) -> None:
    rows = [[where, f"{number:,}", *_times(outcome)] for (where, number), outcome in outcomes.items()]
    columns = ["", "workers", "rollouts", "polls/ step", "files listed", "a listing"]
    columns += [f"{part}, µs/ rollout" for part in PARTS]
    title = f"scale: time of the trainer's parts, of a step of {CALL_S} s, and of the last steps over the first"
    print_table(title, [*columns, "of a step", "last of first"], rows)


def _times(outcome: Outcome) -> list[str]:
    times, num_steps = outcome.times, outcome.num_steps
    a_step = {part: [sum(step[name] for name in names) for step in times.steps] for part, names in PARTS.items()}
    return [
        f"{outcome.num_rollouts:,}",
        f"{len(times.seconds['poll']) / num_steps:.0f}",
        f"{max(times.num_listed):,}",
        f"{median(times.seconds['listing']) * 1e3:.1f} ms",
        *(f"{sum(seconds) / outcome.num_rollouts * 1e6:.0f}" for seconds in a_step.values()),
        f"{sum(map(sum, a_step.values())) / num_steps / CALL_S:.0%}",
        f"{_growth(a_step['poll'], a_step['plan']):.2f}x",
    ]


def _growth(*parts: Sequence[float]) -> float:
    """Return the seconds of the last quarter of the steps over those of the first, without the first step."""
    steps = [sum(step) for step in zip(*parts, strict=True)][1:]
    quarter = max(1, len(steps) // 4)
    return median(steps[-quarter:]) / median(steps[:quarter])


def _print_requests(runs: dict[tuple[str, int], OnS3]) -> None:
    rows = [[f"{number:,}", f"the {who}", *_costs(run)] for (who, number), run in runs.items()]
    columns = ["workers", "who waits", "PUT/ million", "LIST/ million", "GET/ million", "/s", "LATEST/s, most"]
    columns += ["$/ million", "$/ day", "costs most", "a look", "its requests"]
    print_table("scale: requests to S3, and their list price (Standard, us-east-1, 2026-11)", columns, rows)


def _costs(run: OnS3) -> list[str]:
    clock_s, num_rollouts = run.outcome.clock_s, run.outcome.num_rollouts
    of = {request: DOLLARS[request.kind] * run.of_million(count) for request, count in run.requests.items()}
    most = max(of, key=of.__getitem__)
    return [
        *(f"{run.of_million(run.count(*kinds)):,.0f}" for kinds in (("PUT", "POST"), ("LIST",), ("GET", "HEAD"))),
        f"{run.requests.total() / clock_s:,.0f}",
        f"{max(run.outcome.times.asks.values()):,}",
        f"{sum(of.values()):.2f}",
        f"{sum(of.values()) * num_rollouts / 1e6 / clock_s * 86400:.2f}",
        f"{most.kind} {most.folder} {of[most] / sum(of.values()):.0%}",
        f"{run.look_s:.2f} s",
        f"{run.look_requests:,}",
    ]


def _print_folders(run: OnS3) -> None:
    rows = [
        [
            f"{request.client} {request.kind} {request.folder}",
            f"{count:,}",
            f"{count / run.outcome.clock_s:,.1f}",
            f"{run.of_million(count):,.0f}",
            f"${run.of_million(count) * DOLLARS[request.kind]:.4f}",
        ]
        for request, count in run.requests.items()
    ]
    rows.sort(key=lambda row: row[-1], reverse=True)
    title = (
        f"scale: requests of {run.outcome.num_workers:,} workers and a trainer, {run.outcome.num_rollouts:,} rollouts"
    )
    print_table(title, ["", "counted", "a second of the clock", "a million rollouts", "$ a million"], rows[:12])


if __name__ == "__main__":
    run_script(main, description=__doc__)
