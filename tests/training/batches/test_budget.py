"""What the trainer lets workers start: always enough in the end, and not much more than enough.

A small simulation in ticks of half a second, the longest pause between two looks of a trainer. Workers take a while for
each group, and honour LATEST as ludic.rollouts.worker does.
"""

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.root.json_records import LatestPolicy
from ludic.run.config import RunConfig
from ludic.training.batches.budget import PATIENCE_S, Budget

TICK_S = 0.5


def run_of(**options: Any) -> RunConfig:
    return RunConfig(**{"model": "tiny", "env": ("addition",)} | options)


def budget_of(max_off_policy_steps: int | None = 32, **options: Any) -> Budget:
    return Budget(run_of(**options), max_off_policy_steps)


def arrivals(worker_id: str, num_groups: int, sequence: int = 0) -> pa.Table:
    """Two rows a group."""
    groups = [f"{worker_id}/{sequence}/{index // 2}" for index in range(2 * num_groups)]
    columns = {"worker_id": worker_id, "sequence": sequence}
    return pa.table({name: [value] * len(groups) for name, value in columns.items()} | {"group_id": groups})


# --- Single answers, worked out by hand ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "num_ready", "num_unread", "expected"),
    [
        # (2 steps + 1 ahead) * 8 groups = 24
        (1, 0, 0, 24),
        (1, 0, 10, 14),
        (1, 10, 10, 4),
        (1, 24, 0, 0),
        (1, 99, 99, 0),
        (4, 0, 0, 6),
        # 20 of 24 are left for 5: each may have 4
        (5, 4, 3, 1),
        # a fraction of a group is a group
        (5, 0, 4, 1),
        (5, 0, 5, 0),
    ],
)
def test_a_worker_may_start_its_share_of_what_is_not_open(
    num_workers: int, num_ready: int, num_unread: int, expected: int
) -> None:
    budget = budget_of(groups_per_batch=8, steps_per_version=2, batches_ahead=1, num_workers=num_workers)
    budget.begin(num_ready)
    budget.on_publish(0, 0)
    assert budget.make_latest().num_allowed(num_unread) == expected


@pytest.mark.parametrize(
    ("options", "max_off_policy_steps", "expected"),
    [
        ({}, 32, (16, 96)),
        ({"batches_ahead": 0}, 32, (8, 8)),
        ({"batches_ahead": 3}, None, (32, 32)),
        ({"steps_per_version": 4}, 8, (40, 96)),
        ({}, 2, (16, 16)),
        ({}, None, (16, 10**6)),
    ],
)
def test_the_budget_follows_from_what_may_be_ahead_or_else_from_the_age_that_is_allowed(
    options: dict[str, int], max_off_policy_steps: int | None, expected: tuple[int, int]
) -> None:
    assert run_of(groups_per_batch=8, **options).budget_bounds(max_off_policy_steps) == expected


def test_groups_are_open_until_the_weights_that_they_trained_are_out() -> None:
    budget = budget_of(groups_per_batch=8, batches_ahead=1)
    budget.on_publish(0, 0)
    budget.note_arrivals(arrivals("w0-host-1-a", 8), 8)
    budget.on_plan(1, 0)
    assert budget.make_latest().num_ready == 8
    budget.note_arrivals(arrivals("w0-host-1-a", 3, sequence=1), 3)
    assert budget.make_latest().num_ready == 11
    budget.on_publish(1, 1)
    latest = budget.make_latest()
    assert (latest.num_ready, latest.seen, latest.planned_step) == (3, {"w0-host-1-a": 1}, 1)


def test_it_grows_while_the_trainer_waits_and_shrinks_while_groups_wait_for_it() -> None:
    budget, sizes = budget_of(groups_per_batch=8), []
    budget.on_publish(0, 0)
    for step in range(1, 6):  # a step is published while groups of the next one are missing
        budget.on_plan(step, 0)
        budget.on_wait(2, 6, idle_s=0.0)
        budget.on_publish(step, step)
        sizes.append(budget.make_latest().budget)
    assert sizes == [32, 64, 96, 96, 96]
    budget.on_plan(6, 0)
    for step in range(6, 18):  # the next one is planned, and enough groups are left for the one after it
        budget.on_plan(step + 1, 8)
        budget.on_publish(step, step)
    assert budget.make_latest().budget == 16


def test_it_shrinks_if_only_the_reader_is_late() -> None:
    # As in a run of short steps: each step is published before the reader plans the next one, whose groups are there.
    budget, sizes = budget_of(groups_per_batch=8), []
    budget.on_publish(0, 0)
    for step in range(1, 4):
        budget.on_plan(step, 0)
        budget.on_wait(2, 6, idle_s=0.0)
        budget.on_publish(step, step)
    for step in range(4, 9):
        budget.on_plan(step, 10)
        budget.note_arrivals(arrivals("w0-host-1-a", 8, sequence=step), 18)
        budget.on_publish(step, step)
        sizes.append(budget.make_latest().budget)
    assert sizes == [88, 80, 72, 64, 56]


def test_it_stays_while_nobody_has_found_groups_missing() -> None:
    # As after a long poll or plan: a step is published before anybody has looked for the groups of the next one.
    budget = budget_of(groups_per_batch=8)
    budget.on_publish(0, 0)
    for step in range(1, 6):
        budget.on_wait(2, 6, idle_s=0.0)  # of the step that is planned next
        budget.on_plan(step, 0)
        budget.on_publish(step, step)
    assert budget.make_latest().budget == 16


def test_workers_are_told_at_once_of_groups_that_filters_drop() -> None:
    budget = budget_of(groups_per_batch=8, batches_ahead=0)
    budget.on_publish(0, 0)
    assert budget.make_latest().num_allowed(0) == 8
    budget.note_arrivals(arrivals("w0-host-1-a", 8), 8)
    budget.on_wait(2, 6, idle_s=0.0)
    assert budget.has_room
    assert budget.make_latest().num_allowed(0) == 6
    budget.note_arrivals(arrivals("w0-host-1-a", 4, sequence=1), 12)
    budget.on_wait(6, 2, idle_s=0.0)
    assert not budget.has_room


def test_after_some_patience_each_worker_may_start_all_that_is_missing() -> None:
    budget = budget_of(groups_per_batch=8, batches_ahead=0, num_workers=4)
    budget.on_publish(0, 0)
    budget.make_latest()
    budget.on_wait(2, 6, idle_s=PATIENCE_S - 0.1)
    before = budget.make_latest().num_allowed(2)
    budget.on_wait(2, 6, idle_s=PATIENCE_S)
    assert budget.has_room
    assert budget.make_latest().num_allowed(2) == before + 6
    budget.on_plan(1, 0)
    budget.on_publish(1, 1)
    assert budget.make_latest().budget == 8


def raised(budget: Budget, num_missing: int, idle_s: float) -> bool:
    budget.on_wait(8 - num_missing, num_missing, idle_s)
    before = budget.latest.budget
    return budget.make_latest().budget > before


def test_workers_that_are_only_slow_get_more_a_few_times_and_not_at_every_look() -> None:
    budget = budget_of(groups_per_batch=8, batches_ahead=0)
    budget.on_publish(0, 0)
    budget.make_latest()
    looks = [tick * TICK_S for tick in range(int(100 * PATIENCE_S / TICK_S))]
    assert [idle_s for idle_s in looks if raised(budget, 8, idle_s)] == [PATIENCE_S * 2**k for k in range(7)]


def test_an_arrival_brings_the_patience_back_to_thrice_the_slowest_answer() -> None:
    budget = budget_of(groups_per_batch=8, batches_ahead=0)
    budget.on_publish(0, 0)
    budget.make_latest()
    assert raised(budget, 8, PATIENCE_S)
    assert not raised(budget, 8, 1.5 * PATIENCE_S)
    # Half of PATIENCE_S after that, a worker answers.
    budget.note_arrivals(arrivals("w0-host-1-a", 1), 1)
    assert not raised(budget, 7, 1.4 * PATIENCE_S)
    assert raised(budget, 7, 1.5 * PATIENCE_S)


def test_lives_of_one_slot_are_one_worker_and_those_that_deliver_are_counted_after_three_versions() -> None:
    budget = budget_of(groups_per_batch=8, num_workers=8)
    for version in range(4):
        budget.on_publish(version, version)
        assert budget.make_latest().num_workers == (8 if version < 3 else 2)
        for worker_id in ("w3-host-1-a", "w3-host-9-b", "w70-other-5-a"):
            budget.note_arrivals(arrivals(worker_id, 1, version), 0)
    assert set(budget.make_latest().seen) == {"w3-host-9-b", "w70-other-5-a"}


def test_workers_of_which_few_deliver_in_each_version_share_the_budget() -> None:
    # A group is open for 16 / 8 = 2 versions on average, so each worker that delivers within 4 is alive.
    budget = budget_of(groups_per_batch=8, num_workers=8)
    for version in range(8):
        budget.note_arrivals(arrivals(f"w{version % 4}-host-1-a", 1, version), 8)
        budget.on_plan(version + 1, 8)
        budget.on_publish(version, version)
    latest = budget.make_latest()
    assert (latest.budget, latest.num_workers) == (16, 4)


def test_a_worker_that_is_silent_for_long_is_left_out_of_latest() -> None:
    budget = budget_of()
    budget.on_publish(0, 0)
    budget.note_arrivals(arrivals("w3-host-1-a", 1), 0)
    for version in range(1, 64):
        budget.on_publish(version, version)
    assert budget.make_latest().seen
    budget.on_publish(64, 64)
    assert budget.make_latest().seen == {}


# --- The simulation --------------------------------------------------------------------------------------


@dataclass
class Worker:
    """Samples up to `slots` groups at a time; each takes from one to four times `ticks`."""

    slot: int
    slots: int
    ticks: int
    joins: int = 0
    dies: float = math.inf
    ends: list[int] = field(default_factory=list)
    """When the groups that it samples are complete."""
    unread: list[tuple[int, int]] = field(default_factory=list)
    """Sequence and groups of each file that was not seen when it looked last."""
    sequence: int = 0

    def tick(self, now: int, latest: LatestPolicy, chance: random.Random) -> int:
        """Number of groups that it delivers now."""
        if not self.joins <= now < self.dies:
            return 0
        num_groups = sum(end <= now for end in self.ends)
        self.ends = [end for end in self.ends if end > now]
        if num_groups:
            self.sequence += 1
            self.unread.append((self.sequence, num_groups))
        seen = latest.seen.get(self.worker_id, -1)
        self.unread = [(sequence, count) for sequence, count in self.unread if sequence > seen]
        while len(self.ends) < self.slots and latest.num_allowed(self.num_open) > 0:
            self.ends.append(now + self.ticks * chance.choice((1, 1, 2, 4)))
        return num_groups

    @property
    def num_open(self) -> int:
        return len(self.ends) + sum(count for _, count in self.unread)

    @property
    def worker_id(self) -> str:
        return f"w{self.slot}-host-1-a"


@dataclass
class Simulation:
    """A trainer whose filters drop each group with probability drop_rate."""

    run: RunConfig
    workers: list[Worker]
    drop_rate: float = 0.0
    step_ticks: int = 1
    seed: int = 0
    most_open: int = 0
    """Most groups that were sampled, or being sampled, and not yet trained on."""

    def train(self, num_steps: int, max_ticks_a_step: int) -> None:
        """Raises AssertionError for a step that gets no batch in so many ticks."""
        chance, budget = random.Random(self.seed), Budget(self.run, 32)
        ready = step = planned = step_ends = now = heard = began = 0
        budget.on_publish(0, 0)
        latest = budget.make_latest()
        while step < num_steps:
            now += 1
            assert now - began < max_ticks_a_step, f"step {step + 1} has {ready} groups, and workers know {latest}"
            for worker in self.workers:
                if num_groups := worker.tick(now, latest, chance):
                    heard = now
                    ready += sum(chance.random() >= self.drop_rate for _ in range(num_groups))
                    budget.note_arrivals(arrivals(worker.worker_id, num_groups, worker.sequence), ready)
            is_open = ready + (planned - step) * self.run.groups_per_batch
            self.most_open = max(self.most_open, is_open + sum(len(worker.ends) for worker in self.workers))
            if step_ends and now >= step_ends:
                step, step_ends, began, heard = step + 1, 0, now, now
                if step % self.run.steps_per_version == 0:
                    budget.on_publish(step // self.run.steps_per_version, step)
                    latest = budget.make_latest()
            if planned <= step:
                if ready >= self.run.groups_per_batch:
                    ready -= self.run.groups_per_batch
                    planned += 1
                    budget.on_plan(planned, ready)
                    heard = now
                else:
                    budget.on_wait(ready, self.run.groups_per_batch - ready, (now - heard) * TICK_S)
                    latest = budget.make_latest() if budget.has_room else latest
            if planned > step and not step_ends:
                step_ends = now + self.step_ticks


runs = st.builds(
    run_of,
    num_workers=st.integers(1, 9),
    groups_per_batch=st.integers(1, 20),
    steps_per_version=st.integers(1, 4),
    batches_ahead=st.integers(0, 3) | st.none(),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    run=runs,
    num_dead=st.integers(0, 9),
    num_joining=st.integers(0, 4),
    drop_rate=st.sampled_from([0.0, 0.3, 0.8]),
    slots=st.integers(1, 16),
    ticks=st.integers(1, 60),
    dies=st.integers(0, 60),
    seed=st.integers(0, 2**32),
)
def test_nothing_deadlocks_while_one_worker_lives(
    run: RunConfig, num_dead: int, num_joining: int, drop_rate: float, slots: int, ticks: int, dies: int, seed: int
) -> None:
    of_run = [Worker(slot, slots, ticks) for slot in range(run.num_workers)]
    for worker in of_run[1 : 1 + num_dead]:
        worker.dies = dies
    joining = [Worker(1000 + i, slots, ticks, joins=20 * i) for i in range(num_joining)]
    simulation = Simulation(run, of_run + joining, drop_rate=drop_rate, seed=seed)
    # The worst: one of nine lives, has one slot, and a group takes 240 ticks after 20 of patience; one in five is kept.
    simulation.train(num_steps=8, max_ticks_a_step=20 * 5 * (20 + 240) * 2)


def test_the_workers_of_the_run_may_all_be_gone_when_others_join() -> None:
    run = run_of(num_workers=4, groups_per_batch=8)
    gone = [Worker(slot, 8, 2, dies=10) for slot in range(4)]
    simulation = Simulation(run, [*gone, Worker(1000, 8, 2, joins=200)])
    simulation.train(num_steps=20, max_ticks_a_step=400)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    run=runs,
    slots=st.integers(1, 16),
    ticks=st.integers(1, 4) | st.integers(5, 100),
    step_ticks=st.integers(1, 100),
)
def test_no_more_groups_are_open_than_the_budget_when_nothing_is_dropped(
    run: RunConfig, slots: int, ticks: int, step_ticks: int
) -> None:
    workers = [Worker(slot, slots, ticks) for slot in range(run.num_workers)]
    simulation = Simulation(run, workers, step_ticks=step_ticks)
    # Twenty groups, one at a time, of at most 400 ticks each, and a step of 100.
    simulation.train(num_steps=12, max_ticks_a_step=20_000)
    _, most = run.budget_bounds(32)
    # Answers longer than the patience look like deaths: what is missing is let in once, then at each doubling.
    longest, patience_ticks = 4 * ticks, PATIENCE_S / TICK_S
    num_raises = 1 + math.log2(longest / patience_ticks) if longest >= patience_ticks else 0
    # Shares are rounded up, a worker may have one group open whatever the budget is, and it learns of what became ready
    # only at the next version: all that adds up to less than two groups a worker, and two versions.
    slack = 2 * (run.num_workers + run.groups_per_version)
    allowed = most + num_raises * run.num_workers * run.groups_per_batch + slack
    assert simulation.most_open <= allowed
