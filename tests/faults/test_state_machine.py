"""Whatever goes wrong at whatever call: every committed group is delivered exactly once, and reads back bit for bit.

Workers, trainers as the store sees them, and people who compact and expire act in any order that hypothesis
thinks of, each over a connection of its own to one storage, each dying and starting again at any storage call. What
must be there is kept in dictionaries. All workers are lives of one slot that know nothing of each other, so that
they sample the same requests: each is trained on once. `make soak` runs it for an hour.
"""

import itertools
import json
import operator
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from filesystems import CRASHES, Fault, FaultyFileSystem, ProcessDied, SharedStorage
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from strategies import as_plain, make_batch

from ludic.errors import StoreError
from ludic.records.conversion import from_table
from ludic.records.rollout import RolloutGroup
from ludic.records.tables import arrow_schema
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.ledger import read_rollouts
from ludic.root.rows.reader import Cursor, RolloutReader
from ludic.root.rows.tombstones import expire, quarantine, stored_files
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

GROUP_SIZE = 2
NUM_TRAINERS = 2
Trouble = list[Fault | None]
"""What happens at the next storage calls of a process, an entry each."""


def draw_trouble(rng: random.Random, num_calls: int) -> Trouble:
    """For something that takes so many calls; now and then, none."""
    if rng.random() < 0.1:
        return []
    num_calm = int(num_calls ** rng.random()) - 1  # early ones more often: much ends after some calls
    return [None] * num_calm + rng.choices([*Fault, *CRASHES, *CRASHES], k=rng.randint(1, 6))


results: Counter[str] = Counter()
"""Of all machines together."""


Action = Callable[["StoreUnderFaults", random.Random], None]


@dataclass
class Worker:
    """One life of one process that writes."""

    root: Root
    writer: RolloutWriter


@dataclass
class Trainer:
    """A life of a trainer. What its checkpoint holds is all that outlives it."""

    root: Root
    reader: RolloutReader
    history: list[str]
    """Groups considered, in order: what the ledger would hold."""
    used: set[int]
    """Requests trained on, by group number."""
    pending: dict[str, pa.Table] = field(default_factory=dict)
    """Groups delivered and not yet used."""
    checkpoint: tuple[str, list[str], set[int]] = ("", [], set())
    """Cursor, history and used at some step."""

    def take_checkpoint(self) -> None:
        self.checkpoint = json.dumps(self.reader.cursor.to_dict()), list(self.history), set(self.used)


@contextmanager
def bad_luck(root: Root, diagnostic: Trouble) -> Iterator[None]:
    """Faults at the next calls. The block ends at an error, or at a death: then root.fs.is_dead."""
    root.fs.faults.extend(diagnostic)
    try:
        with suppress(StoreError, ProcessDied):
            yield
    finally:
        root.fs.faults.clear()


class StoreUnderFaults(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.storage = SharedStorage(MemoryFileSystem(global_store=False, skip_instance_cache=True))
        run = RunConfig(model="m", env=("moar_cats",), group_size=GROUP_SIZE)
        self.root = put_run("memory://run", run, fs=FaultyFileSystem(self.storage))
        """For what the test itself looks at; nothing goes wrong here."""
        self.numbers = itertools.count()
        self.written: dict[str, RolloutGroup] = {}
        """By group_id, all that workers were ever given."""
        self.acknowledged: set[str] = set()
        """Groups whose flush returned."""
        self.expired: set[str] = set()
        """Groups that somebody set out to delete."""
        self.workers = [self.start_worker()]
        self.trainers = [self.start_trainer(Cursor(), [], set()) for _ in range(NUM_TRAINERS)]
        self.others = self.start_worker(), self.start_trainer(Cursor(), [], set())
        """They act while a call of somebody else is under way, from beginning to end."""
        self.storage.meanwhile = self.act_meanwhile

    def connect(self) -> Root:
        return replace(self.root, fs=FaultyFileSystem(self.storage))

    def start_worker(self) -> Worker:
        root = self.connect()
        return Worker(root, RolloutWriter(root, f"w0-{next(self.numbers)}", flush_age_s=3600))

    def start_trainer(self, cursor: Cursor, history: Sequence[str], used: set[int]) -> Trainer:
        root = self.connect()
        trainer = Trainer(root, RolloutReader(root, ["rollout_id"], cursor), list(history), set(used))
        trainer.take_checkpoint()
        return trainer

    def write(self, rng: random.Random) -> None:
        """By a new worker, or by any that there was: perhaps one that was long taken for dead."""
        if rng.random() < 0.3:
            self.workers.append(self.start_worker())
        index = rng.randrange(len(self.workers))
        worker = self.workers[index]
        with bad_luck(worker.root, draw_trouble(rng, 4)):
            for _ in range(3):
                self.append_and_flush(worker, version=rng.randrange(3), num_groups=rng.randint(1, 3))
        if worker.root.fs.is_dead:
            with suppress(ProcessDied):
                worker.writer.close()  # only to end its thread: no call of a dead process arrives
            self.workers[index] = self.start_worker()

    def append_and_flush(self, worker: Worker, version: int, num_groups: int) -> None:
        batch = make_batch(
            worker_id=worker.writer.worker_id,
            num_groups=num_groups,
            group_size=GROUP_SIZE,
            response_length=1,
            policy_version=version,
            seed=self.storage.random.randrange(30),
            seed_of_ids=next(self.numbers),
        )
        groups = {group.rollouts[0].group_id: group for group in batch.groups}
        self.written |= groups
        worker.writer.append(batch)
        while not self.acknowledged.issuperset(groups):
            with suppress(StoreError):
                worker.writer.flush()
                self.acknowledged.update(groups)

    def train(self, rng: random.Random) -> None:
        """A poll, some steps on groups that wait, perhaps on part of a file, and perhaps a checkpoint."""
        index = rng.randrange(NUM_TRAINERS)
        trainer = self.trainers[index]
        with bad_luck(trainer.root, draw_trouble(rng, 64)):
            self.deliver(trainer, rng.choice([None, range(1), range(1, 3)]))
            waiting = sorted(trainer.pending)
            self.train_on(trainer, rng.sample(waiting, rng.randint(0, len(waiting))))
            if rng.random() < 0.5:
                trainer.take_checkpoint()
        if trainer.root.fs.is_dead:
            cursor, history, used = trainer.checkpoint
            self.trainers[index] = self.start_trainer(Cursor.from_dict(json.loads(cursor)), history, used)

    def deliver(self, trainer: Trainer, versions: range | None) -> None:
        rows = trainer.reader.poll(versions)
        for group_id in [] if rows is None else rows.column("group_id").unique().to_pylist():
            assert group_id not in trainer.pending, "delivered twice in one life"
            assert group_id not in trainer.history, "delivered after it was used"
            trainer.pending[group_id] = rows.filter(pc.equal(rows.column("group_id"), group_id))
            assert trainer.pending[group_id].num_rows == GROUP_SIZE, "a group in pieces"
        assert {trainer.root.at(name) for name in trainer.reader.broken_files} <= self.storage.torn

    def train_on(self, trainer: Trainer, group_ids: Sequence[str]) -> None:
        if not group_ids:
            return
        rows = pa.concat_tables([trainer.pending[group_id] for group_id in group_ids])
        read = from_table(read_rollouts(trainer.root, rows, arrow_schema("rollouts").names))
        found = [rollout for batch in read for group in batch.groups for rollout in group.rollouts]
        wanted = [rollout for group_id in group_ids for rollout in self.written[group_id].rollouts]
        by_id = operator.attrgetter("rollout_id")
        assert as_plain(sorted(found, key=by_id)) == as_plain(sorted(wanted, key=by_id)), "not bit for bit"
        trainer.reader.use(rows)
        trainer.reader.consume(rows)
        trainer.history += group_ids
        refusals = dict(zip(rows["group_id"].to_pylist(), rows["refusal"].to_pylist(), strict=True))
        for number in [self.number_of(group_id) for group_id in group_ids if refusals[group_id] is None]:
            assert number not in trainer.used, "trained twice on a request"
            trainer.used.add(number)
        for group_id in group_ids:
            del trainer.pending[group_id]

    def number_of(self, group_id: str) -> int:
        return self.written[group_id].rollouts[0].request_index // GROUP_SIZE

    def compact(self, rng: random.Random) -> None:
        """Some files or all; workers write on into versions that it took for sealed."""
        root = self.connect()
        with bad_luck(root, draw_trouble(rng, 128)):
            compact(root, before_version=rng.choice([None, 1, 2]), target_bytes=rng.choice([30_000, 1 << 20]))

    def expire(self, rng: random.Random) -> None:
        root = self.connect()
        with bad_luck(root, draw_trouble(rng, 32)):
            self.expire_version_0(root)

    def expire_version_0(self, root: Root) -> None:
        """Of the others, no group may ever be gone."""
        self.expired |= {key for key, group in self.written.items() if group.rollouts[0].policy_version == 0}
        expire(root, [stored for stored in stored_files(root) if stored.file.version == 0], rule="version 0")

    def quarantine(self, rng: random.Random) -> None:
        """As `ludic verify --repair` does with broken files."""
        root = self.connect()
        with bad_luck(root, draw_trouble(rng, 8)):
            for name in self.torn_names():
                quarantine(root, name, "half of it is missing")

    def settle(self, rng: random.Random) -> None:
        """What was under way for long arrives."""
        self.storage.settle()

    def act_meanwhile(self) -> None:
        worker, trainer = self.others
        rng = self.storage.random
        actions = [
            lambda: self.append_and_flush(worker, version=rng.randrange(3), num_groups=1),
            lambda: self.deliver(trainer, None),
            lambda: self.train_on(trainer, list(trainer.pending)),
            lambda: compact(self.connect()),
            lambda: self.expire_version_0(self.connect()),
        ]
        with suppress(StoreError):  # the trainer's, where a group that waited is expired
            rng.choice(actions)()

    def read_without_ludic(self, rng: random.Random) -> None:
        num_rows = self.count_raw()
        assert all(num_rows[group_id] >= GROUP_SIZE for group_id in self.acknowledged - self.expired), "lost"

    ACTIONS = (
        write,
        write,
        write,
        train,
        train,
        train,
        compact,
        compact,
        expire,
        quarantine,
        settle,
        read_without_ludic,
    )

    @rule(action=st.sampled_from(ACTIONS), seed=st.integers(0, 2**20))
    def act(self, action: Action, seed: int) -> None:
        """One rule for all: of several, hypothesis leaves out some each time, and little would happen."""
        action(self, random.Random(seed))

    def teardown(self) -> None:
        """A quiet end: what was late arrives, all is compacted, and trainers use what is left."""
        for worker in [*self.workers, self.others[0]]:
            worker.writer.close()
        self.storage.settle()
        compact(self.root)
        assert compact(self.root).partitions == [], "compacted twice"
        num_rows = self.count_raw()
        lost = self.acknowledged - self.expired - num_rows.keys()
        doubled = [group_id for group_id, count in num_rows.items() if count != GROUP_SIZE]
        may_be_lost = {self.number_of(group_id) for group_id in self.expired}
        requests = {self.number_of(group_id) for group_id in num_rows} - may_be_lost
        for trainer in [*self.trainers, self.others[1]]:
            last = self.finish(trainer)
            lost |= num_rows.keys() - set(last.history)
            assert requests <= last.used, "a request that nobody trained on"
        results.update(groups=len(num_rows), lost=len(lost), doubled=len(doubled), **self.injected())
        results.update({"requests of several groups": len(num_rows) - len(set(map(self.number_of, num_rows)))})
        assert not lost
        assert not doubled
        assert num_rows.keys() <= self.written.keys(), "groups that nobody wrote"

    def injected(self) -> dict[str, int]:
        crashes = sum(self.storage.injected[fault] for fault in CRASHES)
        return {"crashes": crashes, "other faults": self.storage.injected.total() - crashes}

    def torn_names(self) -> set[str]:
        torn = (file.name for file in list_files(self.root) if self.root.at(file.name) in self.storage.torn)
        return {name for name in torn if not self.root.read(name).endswith(b"PAR1")}

    def count_raw(self) -> Counter[str]:
        """Rows of each group, as somebody counts them who has never heard of ludic."""
        names = {file.name for file in list_files(self.root)} - self.torn_names()
        tables = (pq.read_table(self.root.open_file(name), columns=["group_id"]) for name in names)
        return Counter(group_id for table in tables for group_id in table["group_id"].to_pylist())

    def finish(self, trainer: Trainer) -> Trainer:
        """The trainer starts once more, from where it is, and uses all that is left."""
        last = self.start_trainer(trainer.reader.cursor, trainer.history, trainer.used)
        self.deliver(last, None)
        self.train_on(last, list(last.pending))
        assert last.reader.poll(None) is None
        return last


@pytest.mark.slow
@pytest.mark.timeout(900)  # some minutes on a busy machine
def test_nothing_is_lost_or_doubled_by_hundreds_of_crashes(capsys, monkeypatch):
    monkeypatch.setenv("LUDIC_RETRY_S", "0")  # callers see every fault
    is_soak = "LUDIC_SOAK" in os.environ
    results.clear()
    run_state_machine_as_test(
        StoreUnderFaults,
        settings=settings(
            max_examples=5_000 if is_soak else 40,
            stateful_step_count=100 if is_soak else 50,
            derandomize=not is_soak,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    with capsys.disabled():
        print("\n" + ", ".join(f"{count:,} {name}" for name, count in results.items()))
    assert results["crashes"] >= 400
