"""What the trainer asks of workers: always enough in the end, and not much more than enough.

A small simulation in ticks of half a second, the longest pause between two looks of a trainer. Workers take
a while for each call, and honour groups_per_worker as ludic.rollouts.worker does.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.batches.quota import PATIENCE_S, QuotaController
from ludic.store import RunConfig

TICK_S = 0.5


def run_of(**options: Any) -> RunConfig:
    return RunConfig(**{"model": "tiny", "env": ("addition",)} | options)


def arrivals(version: int, worker_id: str, num_groups: int, start: int = 0) -> pa.Table:
    """Two rows a group."""
    groups = [f"{worker_id}/{version}/{start + index // 2}" for index in range(2 * num_groups)]
    rows = len(groups)
    columns = {"policy_version": version, "worker_id": worker_id, "sequence": start}
    return pa.table({name: [value] * rows for name, value in columns.items()} | {"group_id": groups})


# --- Single answers, worked out by hand ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "num_ready", "expected"),
    [
        # (2 steps + 1 ahead) * 8 groups = 24
        (1, 0, 24),
        (4, 0, 6),
        (5, 0, 5),
        (4, 10, 4),
        (4, 24, 0),
        (4, 99, 0),
    ],
)
def test_a_version_asks_for_its_steps_and_what_may_be_ahead_less_what_is_ready(
    num_workers: int, num_ready: int, expected: int
) -> None:
    run = run_of(groups_per_batch=8, steps_per_version=2, batches_ahead=1, num_workers=num_workers)
    assert QuotaController(run).on_publish(0, num_ready) == expected


def test_what_the_version_before_still_owes_is_not_asked_for_again() -> None:
    demand = QuotaController(run_of(groups_per_batch=8, batches_ahead=1, num_workers=2))
    assert demand.on_publish(0, 0) == 8
    demand.note_arrivals(arrivals(0, "w0-host-1-a", 8))
    demand.note_arrivals(arrivals(0, "w1-host-2-a", 3))
    # Of the 16 asked for, 5 are still to come; 16 wanted - 3 ready - 5 owed = 8, for two workers.
    assert demand.on_publish(1, 3) == 4


def test_when_all_is_here_and_too_much_was_dropped_it_asks_for_more_each_time() -> None:
    demand = QuotaController(run_of(groups_per_batch=8, batches_ahead=0, num_workers=2))
    assert demand.on_publish(0, 0) == 4
    assert demand.on_shortage(8, idle_s=0.0) is None
    demand.note_arrivals(arrivals(0, "w0-host-1-a", 8))
    # 6 of 8 dropped: 6 more, by two workers; then 4 are missing, and twice as many are asked for.
    assert demand.on_shortage(6, idle_s=0.0) == 4 + 3
    assert demand.on_shortage(6, idle_s=0.0) is None
    demand.note_arrivals(arrivals(0, "w0-host-1-a", 6, start=8))
    assert demand.on_shortage(4, idle_s=0.0) == 7 + 4


def test_after_some_patience_each_worker_is_asked_for_all_that_is_missing() -> None:
    demand = QuotaController(run_of(groups_per_batch=8, batches_ahead=0, num_workers=4))
    assert demand.on_publish(0, 0) == 2
    demand.note_arrivals(arrivals(0, "w0-host-1-a", 2))
    assert demand.on_shortage(6, idle_s=PATIENCE_S - 0.1) is None
    assert demand.on_shortage(6, idle_s=PATIENCE_S) == 2 + 6


def test_workers_that_are_only_slow_are_asked_again_a_few_times_and_not_at_every_look() -> None:
    demand = QuotaController(run_of(groups_per_batch=8, batches_ahead=0))
    demand.on_publish(0, 0)
    looks = [tick * TICK_S for tick in range(int(100 * PATIENCE_S / TICK_S))]
    raised_at = [idle_s for idle_s in looks if demand.on_shortage(8, idle_s) is not None]
    assert raised_at == [PATIENCE_S * 2**k for k in range(7)]


def test_an_arrival_brings_the_patience_back_to_thrice_the_slowest_answer() -> None:
    demand = QuotaController(run_of(groups_per_batch=8, batches_ahead=0))
    demand.on_publish(0, 0)
    assert demand.on_shortage(8, idle_s=PATIENCE_S) == 16
    assert demand.on_shortage(8, idle_s=1.5 * PATIENCE_S) is None
    # Half of PATIENCE_S after it was asked, a worker answers.
    demand.note_arrivals(arrivals(0, "w0-host-1-a", 1))
    assert demand.on_shortage(7, idle_s=1.4 * PATIENCE_S) is None
    assert demand.on_shortage(7, idle_s=1.5 * PATIENCE_S) == 16 + 7


def test_no_more_is_taken_to_be_in_flight_than_one_call_of_each_worker() -> None:
    demand = QuotaController(run_of(groups_per_batch=32, batches_ahead=0, num_workers=2))
    assert demand.on_publish(0, 0) == 16
    demand.note_arrivals(arrivals(0, "w0-host-1-a", 4))
    # 28 are owed; at the new version the two workers finish a call of 4 each and drop the rest: 32 - 8, by two.
    assert demand.on_publish(1, 0) == 12


def test_lives_of_one_slot_are_one_worker_and_those_that_deliver_are_counted_after_three_versions() -> None:
    demand = QuotaController(run_of(groups_per_batch=8, num_workers=8))
    for version in range(4):
        demand.on_publish(version, 0)
        assert demand.num_workers == (8 if version < 3 else 2)
        for worker_id in ("w3-host-1-a", "w3-host-9-b", "w70-other-5-a"):
            demand.note_arrivals(arrivals(version, worker_id, 1))


# --- The simulation --------------------------------------------------------------------------------------


@dataclass
class Worker:
    """Samples up to groups_per_call groups at once, for call_ticks."""

    slot: int
    groups_per_call: int
    call_ticks: int
    joins: int = 0
    dies: float = math.inf
    made: Counter[int] = field(default_factory=Counter)
    busy_until: int | None = None
    sampling: tuple[int, int] = (0, 0)

    def tick(self, now: int, version: int, quota: int) -> tuple[int, int]:
        """Version and number of groups that it delivers now."""
        if not self.joins <= now < self.dies:
            return version, 0
        delivered = (version, 0)
        if self.busy_until is not None and now >= self.busy_until:
            delivered, self.busy_until = self.sampling, None
        num_groups = min(quota - self.made[version], self.groups_per_call)
        if self.busy_until is None and num_groups > 0:
            self.made[version] += num_groups
            self.busy_until, self.sampling = now + self.call_ticks, (version, num_groups)
        return delivered


@dataclass
class Simulation:
    """A trainer whose filters drop each group with probability drop_rate."""

    run: RunConfig
    workers: list[Worker]
    drop_rate: float = 0.0
    step_ticks: int = 1
    seed: int = 0
    most_ahead: int = 0
    """Most groups that were sampled, or being sampled, and not yet trained on."""

    def train(self, num_steps: int, max_ticks_a_step: int) -> None:
        """Raises AssertionError for a step that gets no batch in so many ticks."""
        chance, demand = random.Random(self.seed), QuotaController(self.run)
        version, ready, step, step_ends, heard, began = 0, 0, 0, 0, 0, 0
        quota = demand.on_publish(0, 0)
        now = 0
        while step < num_steps:
            now += 1
            assert now - began < max_ticks_a_step, f"step {step + 1} has {ready} groups and asks {quota} of each worker"
            for worker in self.workers:
                of_version, num_groups = worker.tick(now, version, quota)
                if num_groups:
                    heard = now
                    demand.note_arrivals(arrivals(of_version, f"w{worker.slot}-host-1-a", num_groups, start=now))
                    ready += sum(chance.random() >= self.drop_rate for _ in range(num_groups))
            busy = sum(worker.sampling[1] for worker in self.workers if worker.busy_until is not None)
            self.most_ahead = max(self.most_ahead, ready + busy)
            if now < step_ends:
                continue
            if step_ends:
                step, step_ends, began, heard = step + 1, 0, now, now
                if step % self.run.steps_per_version == 0:
                    version += 1
                    quota = demand.on_publish(version, ready)
            if ready >= self.run.groups_per_batch:
                ready -= self.run.groups_per_batch
                step_ends = now + self.step_ticks
            else:
                missing = self.run.groups_per_batch - ready
                quota = demand.on_shortage(missing, (now - heard) * TICK_S) or quota


runs = st.builds(
    run_of,
    num_workers=st.integers(1, 9),
    groups_per_batch=st.integers(1, 20),
    steps_per_version=st.integers(1, 4),
    batches_ahead=st.integers(0, 3),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    run=runs,
    num_dead=st.integers(0, 9),
    num_joining=st.integers(0, 4),
    drop_rate=st.sampled_from([0.0, 0.3, 0.8]),
    groups_per_call=st.integers(1, 16),
    call_ticks=st.integers(1, 60),
    dies=st.integers(0, 60),
    seed=st.integers(0, 2**32),
)
def test_nothing_deadlocks_while_one_worker_lives(
    run: RunConfig,
    num_dead: int,
    num_joining: int,
    drop_rate: float,
    groups_per_call: int,
    call_ticks: int,
    dies: int,
    seed: int,
) -> None:
    of_run = [Worker(slot, groups_per_call, call_ticks) for slot in range(run.num_workers)]
    for worker in of_run[1 : 1 + num_dead]:
        worker.dies = dies
    joining = [Worker(1000 + i, groups_per_call, call_ticks, joins=20 * i) for i in range(num_joining)]
    simulation = Simulation(run, of_run + joining, drop_rate=drop_rate, seed=seed)
    # The worst: one of nine lives, and delivers one group a call after 20 ticks of patience; at most some 20
    # groups are missing, and one in five is kept.
    simulation.train(num_steps=8, max_ticks_a_step=20 * 5 * (20 + 60) * 2)


def test_the_workers_of_the_run_may_all_be_gone_when_others_join() -> None:
    run = run_of(num_workers=4, groups_per_batch=8)
    gone = [Worker(slot, 8, 2, dies=10) for slot in range(4)]
    simulation = Simulation(run, [*gone, Worker(1000, 8, 2, joins=200)])
    simulation.train(num_steps=20, max_ticks_a_step=400)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    run=runs,
    groups_per_call=st.integers(1, 16),
    call_ticks=st.integers(1, 19) | st.integers(20, 400),
    step_ticks=st.integers(1, 100),
)
def test_workers_do_not_run_ahead_when_nothing_is_dropped(
    run: RunConfig, groups_per_call: int, call_ticks: int, step_ticks: int
) -> None:
    workers = [Worker(slot, groups_per_call, call_ticks) for slot in range(run.num_workers)]
    simulation = Simulation(run, workers, step_ticks=step_ticks)
    # Twenty groups, one a call of 400 ticks, and a step of 100.
    simulation.train(num_steps=12, max_ticks_a_step=10_000)
    # A version asks for this, with a share rounded up for each worker; and each may be in a call of the version before.
    wanted = (run.steps_per_version + run.batches_ahead) * run.groups_per_batch
    calls = run.num_workers * groups_per_call
    # Calls longer than the patience look like deaths: each worker is asked for the batch once, then at each doubling.
    patience_ticks = PATIENCE_S / TICK_S
    num_raises = 1 + math.log2(call_ticks / patience_ticks) if call_ticks >= patience_ticks else 0
    raised = num_raises * run.num_workers * run.groups_per_batch
    assert simulation.most_ahead <= wanted + run.num_workers + calls + raised
