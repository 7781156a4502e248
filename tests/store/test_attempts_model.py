"""The protocol of attempts as a model: trainers that start, crash, sleep and wake at any storage operation.

A trainer is two generators, its main thread and the one that renews its lease, which stop between any two
operations on a root of dictionaries. A seed makes a schedule. Which checkpoint is resumed, what the run stands on
and what is pruned is decided by the functions that the trainer itself uses.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from ludic.store.attempts import CheckpointId, chain, newest_checkpoint, outdated

NUM_SCHEDULES = 100_000
NUM_STEPS, MOST_TRAINERS, NUM_BURSTS = 4, 4, 12


@dataclass(frozen=True)
class Rules:
    """The protocol; each rule can be left out, to see that the model notices."""

    checks_fence: bool = True
    checks_before_prune: bool = True
    claims_before_choosing: bool = True
    resumes_on_chain: bool = True
    checks_before_latest: bool = True
    mends_latest: bool = True


@dataclass
class Root:
    """The files of a run. A policy version and a group are numbers; what is learned is which groups were trained on."""

    leases: dict[int, int] = field(default_factory=dict)
    """Renewals by claimed attempt; -1: released."""
    parents: dict[int, CheckpointId | None] = field(default_factory=dict)
    ledger: dict[CheckpointId, int] = field(default_factory=dict)
    """The group that a step of an attempt trains on."""
    checkpoints: dict[CheckpointId, tuple[int, ...]] = field(default_factory=dict)
    """The groups of steps 1, 2, ... that are in the weights."""
    claimed_versions: set[int] = field(default_factory=set)
    latest: int = -1
    final: tuple[int, ...] = ()
    """What the newest checkpoint holds that was completed while its trainer owned the root: never to be undone."""


class ViolationError(AssertionError):
    """The model broke a promise of the protocol."""


class FencedError(Exception):
    """Ends a trainer of the model."""


def demand(holds: bool, promise: str) -> None:
    if not holds:
        raise ViolationError(promise)


class Trainer:
    """One process. `main` and `heart` yield before each operation on the root that others could come before."""

    def __init__(self, root: Root, rng: random.Random, rules: Rules, *, take_over: bool) -> None:
        self.root, self.rng, self.rules, self.take_over = root, rng, rules, take_over
        self.attempt_id, self.version = 0, -1
        self.is_locked = False  # of the publisher: LATEST is pointed by one thread at a time
        self.main = self._main()
        self.heart = self._heart()
        self.is_over = False

    @property
    def is_fenced(self) -> bool:
        return self.attempt_id + 1 in self.root.leases

    def advance(self, thread: Iterator[None]) -> None:
        """Up to the next operation; the end of the main thread is that of the process."""
        try:
            next(thread)
        except FencedError:
            self.is_over = True
        except StopIteration:
            self.is_over |= thread is self.main

    def _check(self, applies: bool = True) -> None:
        if applies and self.rules.checks_fence and self.is_fenced:
            raise FencedError

    def _choose(self, before: int) -> CheckpointId | None:
        root = self.root
        if not self.rules.resumes_on_chain:
            return max(root.checkpoints, key=lambda place: place[1], default=None)
        previous = max((attempt_id for attempt_id in root.parents if attempt_id < before), default=None)
        return None if previous is None else newest_checkpoint(chain(previous, root.parents.get), root.checkpoints)

    def _main(self) -> Iterator[None]:
        root = self.root
        newest = max(root.leases, default=0)
        if newest and not self.take_over and root.leases[newest] != -1:
            seen = root.leases[newest]
            yield
            if root.leases[newest] not in (seen, -1):
                return  # refused
        parent = self._choose(before=newest + 1)
        yield
        if newest + 1 in root.leases:
            return  # refused: another trainer was faster
        self.attempt_id = newest + 1
        root.leases[self.attempt_id] = 0
        yield
        if self.rules.claims_before_choosing:
            parent = self._choose(before=self.attempt_id)
            yield
        root.parents[self.attempt_id] = parent
        check_ledger(root)
        yield
        self._check()
        demand(parent is None or parent in root.checkpoints, "a resumed trainer finds its checkpoint")
        groups = root.checkpoints[parent] if parent else ()
        root.final = groups
        yield from self._train(list(groups))
        root.leases[self.attempt_id] = -1

    def _train(self, groups: list[int]) -> Iterator[None]:
        first = len(groups) + 1
        yield from self._publish()
        for step in range(first, NUM_STEPS + 1):
            if len(groups) < step:
                yield from self._plan(groups)
            if step < NUM_STEPS and self.rng.random() < 0.5:
                yield from self._plan(groups)  # one step ahead
            yield from self._publish()
            yield from self._checkpoint(tuple(groups[:step]))

    def _plan(self, groups: list[int]) -> Iterator[None]:
        """Rollouts arrive in any order: of the groups that are left, the first or the second."""
        left = (group for group in range(2 * NUM_STEPS) if group not in groups)
        group = next(left) if self.rng.random() < 0.5 else (next(left), next(left))[1]
        self._check()
        yield
        groups.append(group)
        demand((self.attempt_id, len(groups)) not in self.root.ledger, "no step is planned twice in an attempt")
        self.root.ledger[self.attempt_id, len(groups)] = group
        yield

    def _publish(self) -> Iterator[None]:
        root = self.root
        self._check()
        while self.is_locked:
            yield
        self.is_locked = True
        version = root.latest + 1
        yield
        while version in root.claimed_versions:
            version += 1
        root.claimed_versions.add(version)
        yield
        self._check(self.rules.checks_before_latest)
        self.version = version
        yield
        root.latest = version
        self.is_locked = False
        yield

    def _checkpoint(self, groups: tuple[int, ...]) -> Iterator[None]:
        root = self.root
        self._check()
        yield
        root.checkpoints[self.attempt_id, len(groups)] = groups
        if not self.is_fenced:
            root.final = groups
        yield
        old = outdated(root.checkpoints, keep=1)
        yield
        self._check(self.rules.checks_before_prune)
        for place in old:
            yield
            root.checkpoints.pop(place, None)
        yield

    def _heart(self) -> Iterator[None]:
        while True:
            if self.attempt_id:
                if self.rules.checks_fence and self.is_fenced:
                    return
                yield
                self.root.leases[self.attempt_id] += 1
                yield
                if self.rules.mends_latest and not self.is_locked and self.version >= 0:
                    self.is_locked = True
                    must_mend = self.root.latest != self.version
                    yield
                    if must_mend:
                        demand(self.is_fenced or self.version > self.root.latest, "an owner never points LATEST back")
                        self.root.latest = self.version
                    self.is_locked = False
            yield


def check_ledger(root: Root) -> None:
    """What the run stands on has each step once, each group once, and is what its checkpoints hold."""
    newest = max(root.parents)
    groups: dict[int, int] = {}
    links = list(chain(newest, root.parents.get))
    for link in links:
        parent = root.parents[link.attempt_id]
        step = parent[1] + 1 if parent else 1
        while (link.attempt_id, step) in root.ledger and (link.last_step is None or step <= link.last_step):
            demand(step not in groups, "the ledger has no step twice")
            groups[step] = root.ledger[link.attempt_id, step]
            step += 1
    ledger = tuple(groups[step] for step in sorted(groups))
    demand(sorted(groups) == list(range(1, len(groups) + 1)), "the ledger has no gaps")
    demand(len(set(ledger)) == len(ledger), "no group is used twice")
    demand(ledger[: len(root.final)] == root.final, "what an owner has checkpointed is never undone")
    for link in links:
        for (attempt_id, step), held in root.checkpoints.items():
            if attempt_id == link.attempt_id and (link.last_step is None or step <= link.last_step):
                demand(held == ledger[:step], "a checkpoint holds what the ledger says, each group once")


def finish(trainer: Trainer) -> None:
    while not trainer.is_over:
        trainer.advance(trainer.heart)
        trainer.advance(trainer.main)


def run_schedule(seed: int, rules: Rules = Rules()) -> None:
    """Trainers come, sleep for long, crash and take over; then all wake, and a last one finishes the run."""
    rng = random.Random(seed)
    root, trainers = Root(), []
    for _ in range(NUM_BURSTS):
        if len(trainers) < MOST_TRAINERS and (not trainers or rng.random() < 0.4):
            trainers.append(Trainer(root, rng, rules, take_over=rng.random() < 0.3))
        trainer = rng.choice(trainers)
        for _ in range(rng.choice((1, 2, 3, 5, 8, 40))):
            if not trainer.is_over:
                trainer.advance(trainer.heart if rng.random() < 0.2 else trainer.main)
        trainer.is_over |= rng.random() < 0.1
    wake_all(root, rng, trainers)
    last = Trainer(root, rng, rules, take_over=True)
    finish(last)
    check_ledger(root)
    demand(len(root.final) == NUM_STEPS, "a run that has a trainer comes to its end")
    demand(root.latest == last.version, "LATEST names the newest version")


def wake_all(root: Root, rng: random.Random, trainers: list[Trainer]) -> None:
    """First those that were fenced; the one that owns the root then has time to renew its lease."""
    rng.shuffle(trainers)
    owner = next((trainer for trainer in trainers if trainer.attempt_id == max(root.leases, default=0)), None)
    for trainer in trainers:
        if trainer is not owner:
            finish(trainer)
    if owner is None or owner.is_over or owner.is_fenced:
        return
    while owner.is_locked and not owner.is_over:
        owner.advance(owner.heart)
        owner.advance(owner.main)
    for _ in range(8):
        owner.advance(owner.heart)
    if not owner.is_over and owner.version >= 0:
        demand(root.latest == owner.version, "LATEST names what its owner published last")
    finish(owner)


@pytest.mark.slow
def test_no_schedule_breaks_a_promise():
    for seed in range(NUM_SCHEDULES):
        try:
            run_schedule(seed)
        except ViolationError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (Rules(checks_fence=False), "what an owner has checkpointed is never undone"),
        (Rules(checks_before_prune=False), "a resumed trainer finds its checkpoint"),
        (Rules(claims_before_choosing=False), "what an owner has checkpointed is never undone"),
        (Rules(resumes_on_chain=False), "what an owner has checkpointed is never undone"),
        (Rules(checks_before_latest=False), "an owner never points LATEST back"),
        (Rules(mends_latest=False), "LATEST names what its owner published last"),
    ],
)
def test_a_protocol_without_one_of_its_rules_is_caught(broken, promise):
    found = set()
    for seed in range(NUM_SCHEDULES // 5):
        try:
            run_schedule(seed, broken)
        except ViolationError as error:
            found.add(str(error))
        if promise in found:
            return
    raise AssertionError(f"broke only {found or 'nothing'}")
