"""Measure the share of a trainer's time spent waiting for data, when rollouts come from S3 and a step takes a second.

    python -m benchmarks.train_wait

The server is moto, with 20 ms added to each response. Each step finds the files of a new version (8 files of 32
rollouts with about 1,000 response tokens), plans 256 rollouts by SQL, writes them to the ledger, reads and packs them,
with the real source and stream of a trainer with one rank. With prefetch, the trainer starts this before a step, as
`ludic train` does; without prefetch, when it needs the batch. The step is a second of sleep, as if a GPU computed, or a
second of matrix products on one core, which compete with the trainer's threads.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from benchmarks.measure import print_table
from benchmarks.rollouts import make_batch, with_own_requests
from benchmarks.s3_server import BUCKET, s3_server
from ludic.base import init_distributed, shut_down
from ludic.records import RolloutBatch, RolloutGroup, new_id, to_table
from ludic.root import Root, start_attempt
from ludic.root.rows import RolloutFile, encode
from ludic.run import RunConfig, put_run
from ludic.settings import run_script
from ludic.training import Publisher, TrainConfig
from ludic.training.batches import OnlineSource, PlannedStream

S3_LATENCY_S = 0.02
NUM_WORKERS, GROUPS_A_FILE, GROUP_SIZE = 8, 4, 8


def main(quick: bool = False) -> None:
    """Print a table.

    Args:
        quick: Use short rollouts and steps, to check that the benchmark works.
    """
    mean_length, num_steps, step_s = (50, 2, 0.1) if quick else (1000, 20, 1.0)
    torch.set_num_threads(1)
    rows = []
    with s3_server(S3_LATENCY_S):
        root = _fill(mean_length, num_steps)
        init_distributed("cpu")
        for label, spend in {"sleeps": time.sleep, "computes on a core": _compute}.items():
            for is_ahead in (True, False):
                waits = _train(root, num_steps, partial(spend, step_s), is_ahead=is_ahead)
                waiting = sum(waits) / (sum(waits) + step_s * len(waits))
                times = [f"{seconds * 1e3:.1f} ms" for seconds in (median(waits), max(waits))]
                rows.append([label, "yes" if is_ahead else "no", *times, f"{waiting:.2%}"])
        shut_down()
    title = f"train_wait: 256 rollouts a step from S3 at {S3_LATENCY_S * 1e3:.0f} ms an answer, steps of {step_s:g} s"
    print_table(title, ["a step", "prefetch", "wait (median)", "longest", "of the time spent waiting"], rows)


def _fill(mean_length: int, num_steps: int) -> Root:
    """Return a root with one batch of rollouts for each version that a step trains with, and for the next version."""
    groups_per_batch = NUM_WORKERS * GROUPS_A_FILE
    run = RunConfig(model="none", env=("moar_cats",), group_size=GROUP_SIZE, groups_per_batch=groups_per_batch)
    root = put_run(f"s3://{BUCKET}/train_wait", run)
    batches = [make_batch(GROUPS_A_FILE, mean_length=mean_length, seed=number) for number in range(NUM_WORKERS)]
    for version in range(num_steps + 1):
        for worker, batch in enumerate(batches):
            file = RolloutFile(version, "moar_cats", f"w{worker}-benchmark", version)
            table = to_table(_at_version(batch, version, file.worker_id), run_id=root.run_id, sequence=version)
            table = with_own_requests(table, version * NUM_WORKERS + worker)
            root.put_if_absent(file.name, encode(table))
    return root


def _at_version(batch: RolloutBatch, version: int, worker_id: str) -> RolloutBatch:
    """Copy a batch under new ids, as if the weights of another version had sampled it."""

    def renew(group: RolloutGroup) -> RolloutGroup:
        group_id = new_id()
        rollouts = (
            replace(
                rollout,
                rollout_id=(rollout_id := new_id()),
                trajectory_id=rollout_id,
                group_id=group_id,
                episode_id=new_id(),
                policy_version=version,
                policy_version_last=version,
            )
            for rollout in group.rollouts
        )
        return replace(group, rollouts=tuple(rollouts))

    metadata = replace(batch.metadata, worker_id=worker_id)
    return replace(batch, groups=tuple(map(renew, batch.groups)), metadata=metadata)


def _train(root: Root, num_steps: int, train: Callable[[], object], *, is_ahead: bool) -> list[float]:
    """Return the seconds that each step waited for its batch, without the first, which has no step to overlap with."""
    waits = []
    with _open_stream(root, num_steps) as stream:
        stream.start_plan(1, 0)
        for step in range(1, num_steps + 1):
            start = time.perf_counter()
            if step > 1 and not is_ahead:
                stream.start_plan(step, step - 1)
            batch = stream.next_batch()
            assert batch is not None
            waits.append(time.perf_counter() - start)
            if step < num_steps and is_ahead:
                stream.start_plan(step + 1, step)
            train()
    return waits[1:]


@contextmanager
def _open_stream(root: Root, num_steps: int) -> Iterator[PlannedStream]:
    """Open the stream as a trainer does; the new attempt counts no rollout as used."""
    config, attempt = TrainConfig.of(num_steps=num_steps), start_attempt(root)
    publisher = Publisher(root, attempt, keep=None)
    publisher.publish(lambda folder: None, step=0)
    stop = threading.Event()
    source = OnlineSource(root, config.batch, stop)
    source.resume(None, publisher)
    stream = PlannedStream(root, config.batch, source, attempt, stop)
    try:
        yield stream
    finally:
        stream.close()


def _compute(seconds: float) -> None:
    end, matrix = time.perf_counter() + seconds, torch.eye(256)
    while time.perf_counter() < end:
        matrix = matrix @ matrix


if __name__ == "__main__":
    run_script(main, description=__doc__)
