"""Two lives of one slot that stop and wake at any moment, over a store in memory: each request is used once, none lost.

A life is a generator that does what `run_worker` does, by the functions that it uses, and stops between any two
steps; its groups are made by hand. A trainer polls, uses some of what came, and starts again from its checkpoint. A
seed makes a schedule; compaction and listings in any order are part of it.
"""

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from strategies import make_batch

from ludic.errors import SlotTakenError
from ludic.records.conversion import to_table
from ludic.records.rollout import RolloutBatch, RolloutMetadata
from ludic.rollouts.group_schedule import Schedule, read_earlier_lives
from ludic.root.claims import check_holds_slot, claim_slot
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.files import RolloutFile
from ludic.root.rows.parquet import encode
from ludic.root.rows.reader import Cursor, RolloutReader
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root, run_of

pytestmark = pytest.mark.slow

NUM_SCHEDULES = 30
NUM_GROUPS, MOST_LIVES, NUM_BURSTS = 8, 3, 25
GROUP_SIZE = 1
_BATCH = make_batch(num_groups=1, group_size=GROUP_SIZE, response_length=1)


class Shuffled(MemoryFileSystem):
    """Lists files in any order."""

    rng = random.Random(0)

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options):
        found = super().find(path, maxdepth, withdirs, **options)
        if isinstance(found, dict):
            return dict(self.rng.sample(list(found.items()), len(found)))
        return self.rng.sample(found, len(found))


@dataclass(frozen=True)
class Rules:
    """The protocol; each rule can be left out, to see that the model notices."""

    drops_duplicates: bool = True
    keeps_requests_in_the_cursor: bool = True
    checks_claims: bool = True


@dataclass
class Run:
    """What is stored, and what the trainer that counts has used."""

    root: Root
    rng: random.Random
    rules: Rules
    clock: Iterator[int] = field(default_factory=itertools.count)
    num_sampled: int = 0
    num_stored: int = 0


def life(run: Run, number: int) -> Iterator[None]:
    """A worker, up to the end of its schedule; ends at a newer claim."""
    worker_id = f"w0-{number}"
    claim = claim_slot(run.root, 0, worker_id)
    yield
    lives = read_earlier_lives(run.root, 0)
    yield
    missing = Schedule.of_slot(run_of(run.root), 0).missing(lives.positions)
    for sequence, group in enumerate(itertools.takewhile(lambda group: group < NUM_GROUPS, missing)):
        for act in ("sample", "append"):
            if run.rules.checks_claims:
                try:
                    check_holds_slot(run.root, claim)
                except SlotTakenError:
                    return
            yield
            run.num_sampled += act == "sample"
        commit(run, worker_id, sequence, group)
        yield


def commit(run: Run, worker_id: str, sequence: int, group: int) -> None:
    """A file of one group with ids of its own."""
    now = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=next(run.clock) + run.rng.randrange(-3, 4))
    batch = RolloutBatch(groups=_BATCH.groups, metadata=RolloutMetadata(worker_id=worker_id, timestamp=now))
    table = to_table(batch, run_id=run.root.run_id, sequence=sequence)
    ids = {"group_id": f"g-{worker_id}-{group}", "rollout_id": f"r-{worker_id}-{group}", "request_index": group}
    for name, value in ids.items():
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(index), pa.array([value], table.schema.field(index).type))
    file = RolloutFile(0, "moar_cats", worker_id, sequence)
    assert run.root.put_if_absent(file.name, encode(table))
    run.num_stored += 1


@dataclass
class Trainer:
    """What its checkpoint holds is all that outlives a life."""

    run: Run
    history: list[int] = field(default_factory=list)
    """Numbers of the groups that it trained on, in order."""
    checkpoint: tuple[str, list[int]] = (json.dumps(Cursor().to_dict()), [])

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """From the checkpoint, as after a crash."""
        state, history = json.loads(self.checkpoint[0]), self.checkpoint[1]
        if not self.run.rules.keeps_requests_in_the_cursor:
            state |= {"requests": [], "in_use": []}
        self.reader = RolloutReader(self.run.root, [], Cursor.from_dict(state))
        self.history, self.pending = list(history), []

    def poll(self) -> None:
        rows = self.reader.poll(None)
        if rows is not None:
            self.pending += [rows.slice(index, 1) for index in range(rows.num_rows)]

    def train(self, num_groups: int) -> None:
        """On some groups, and perhaps a checkpoint."""
        self.run.rng.shuffle(self.pending)
        used, self.pending = self.pending[:num_groups], self.pending[num_groups:]
        for rows in used:
            if not (self.run.rules.drops_duplicates and rows["refusal"][0].is_valid):
                self.history.append(rows["request_index"][0].as_py())
            self.reader.use(rows)
            self.reader.consume(rows)
        if self.run.rng.random() < 0.6:
            self.checkpoint = json.dumps(self.reader.cursor.to_dict()), list(self.history)


def run_schedule(seed: int, rules: Rules = Rules()) -> Run:
    """Lives come while others sleep; then all wake and end, a last one makes what is missing, and all is used."""
    rng = random.Random(seed)
    storage = Shuffled(global_store=False, skip_instance_cache=True)
    storage.store, storage.pseudo_dirs, storage.rng = {}, [""], rng
    config = RunConfig(model="m", env=("moar_cats",), group_size=GROUP_SIZE, num_workers=1)
    run = Run(create_root(f"memory://{seed}", config, fs=storage), rng, rules)
    lives: list[Iterator[None]] = []
    trainer = Trainer(run)
    for _ in range(NUM_BURSTS):
        if len(lives) < MOST_LIVES and (not lives or rng.random() < 0.3):
            lives.append(life(run, len(lives)))
        awake = rng.choice(lives)
        for _ in range(rng.choice((1, 2, 3, 8))):
            next(awake, None)
        act_between(trainer, rng)
    for asleep in rng.sample([*lives, life(run, len(lives))], len(lives) + 1):
        for _ in asleep:
            act_between(trainer, rng)
    for _ in life(run, 99):
        pass
    trainer.start()
    trainer.poll()
    trainer.train(len(trainer.pending))
    uses = Counter(trainer.history)
    assert max(uses.values()) == 1, f"schedule {seed}: trained twice on a request: {uses}"
    assert sorted(uses) == list(range(NUM_GROUPS)), f"schedule {seed}: lost a request: {uses}"
    return run


def run_schedules(rules: Rules) -> list[Run]:
    return [run_schedule(seed, rules) for seed in range(NUM_SCHEDULES)]


def act_between(trainer: Trainer, rng: random.Random) -> None:
    chance = rng.random()
    if chance < 0.4:
        trainer.poll()
        trainer.train(rng.randint(0, 3))
    elif chance < 0.5:
        trainer.start()
    elif chance < 0.53:
        compact(trainer.run.root)


def test_each_request_is_used_once_whatever_two_lives_of_a_slot_do():
    runs = run_schedules(Rules())
    num_doubles = sum(run.num_stored - NUM_GROUPS for run in runs)
    assert num_doubles > NUM_SCHEDULES // 4  # or nothing was tried


@pytest.mark.parametrize("broken", [Rules(drops_duplicates=False), Rules(keeps_requests_in_the_cursor=False)])
def test_a_protocol_without_one_of_its_rules_is_caught(broken):
    with pytest.raises(AssertionError, match="trained twice on a request"):
        run_schedules(broken)


def test_claims_save_samples():
    with_claims, without = (
        sum(run_schedule(seed, Rules(checks_claims=checks)).num_sampled for seed in range(4))
        for checks in (True, False)
    )
    assert with_claims < without
