"""Processes to be killed: a worker, a trainer as the store sees one, a compactor, and all three in turn.

A module of its own beside the tests, so that the processes that test_kills.py starts can import it without pytest.
What a trainer leaves is trainer.json, its checkpoint: cursor and history, replaced as one.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import recorded
from strategies import make_batch

import ludic
from ludic.records.rollout import RolloutBatch
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.ledger import read_rollouts
from ludic.root.rows.reader import Cursor, RolloutReader
from ludic.root.rows.tombstones import expire, stored_files
from ludic.root.rows.writer import RolloutWriter

GROUP_SIZE = 3
SEEDS_OF_ONE_LIFE = (0, 2, 3)
"""One file of version 0, and two of version 1."""
CHECKPOINT = "trainer.json"
# What Python reports before it makes a system call that a store on a local disk depends on.
STORAGE_CALLS = {"open", "os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.scandir", "os.listdir"}
# Where the arguments of a call name the folder that its path is relative to, as a descriptor.
_FOLDER_ARGUMENTS = {"os.link": (2, 3), "os.rename": (2, 3), "os.remove": (1,), "os.mkdir": (2,), "os.rmdir": (1,)}


def live(function: Callable[..., None], environment: Mapping[str, str], says: Connection, *args: object) -> None:
    """What a new process does. In each round it says which group_ids were flushed: of them none may be lost."""
    os.environ.update(environment)  # that of the fork server is older than the test's
    function(says, *args)


def batch_of(worker_id: str, seed: int) -> RolloutBatch:
    """One or two groups, of version 0 or 1; the same for the same seed."""
    return make_batch(
        worker_id=worker_id,
        num_groups=1 + seed % 2,
        group_size=GROUP_SIZE,
        response_length=300,
        policy_version=seed // 2 % 2,
        seed=seed,
    )


def group_ids(batch: RolloutBatch) -> list[str]:
    return [group.rollouts[0].group_id for group in batch.groups]


def work(says: Connection, url: str, worker_id: str, first_seed: int) -> None:
    """Append until killed."""
    writer = RolloutWriter(Root.open(url, writable=True), worker_id, flush_groups=2, flush_age_s=0.001)
    for seed in itertools.count(first_seed, 3):
        batches = [batch_of(worker_id, seed + index) for index in range(3)]
        for batch in batches:
            writer.append(batch)
        writer.flush()
        says.send([group_id for batch in batches for group_id in group_ids(batch)])
        time.sleep(0.02)


def train(says: Connection, url: str) -> None:
    """Use groups, some at a time, until killed."""
    trainer = Trainer(Root.open(url))
    while True:
        says.send([])
        trainer.poll()
        trainer.use(random.uniform(0.2, 1))
        time.sleep(0.02)


def tidy(says: Connection, url: str) -> None:
    """Compact until killed."""
    root = Root.open(url)
    while True:
        says.send([])
        compact(root, target_bytes=100_000)
        time.sleep(0.02)


class Trainer:
    """Goes on from the checkpoint that is there."""

    def __init__(self, root: Root) -> None:
        state: dict[str, Any] = {"cursor": Cursor().to_dict(), "history": []}
        if root.exists(CHECKPOINT):
            state = json.loads(root.read(CHECKPOINT))
        self.root, self.history = root, state["history"]
        self.reader = RolloutReader(root, ["rollout_id"], Cursor.from_dict(state["cursor"]))
        self.pending: list[pa.Table] = []

    def poll(self) -> None:
        rows = self.reader.poll(None)
        if rows is not None:
            self.pending += [
                rows.filter(pc.equal(rows["group_id"], group_id)) for group_id in rows["group_id"].unique()
            ]

    def use(self, share: float) -> None:
        """A part of what waits, and a checkpoint."""
        random.shuffle(self.pending)
        num_used = round(share * len(self.pending))
        if num_used:
            rows, self.pending = pa.concat_tables(self.pending[:num_used]), self.pending[num_used:]
            read_rollouts(self.root, rows, ["response_tokens", "response_logprobs"])
            self.reader.consume(rows)
            self.history += rows["group_id"].unique().to_pylist()
        state = {"cursor": self.reader.cursor.to_dict(), "history": self.history}
        self.root.put(CHECKPOINT, json.dumps(state).encode())


def live_once(says: Connection, url: str, calls: int) -> None:
    """Write, train, compact, expire version 0, and train again, on a local disk; die before call number `calls`."""
    root = Root.open(url, writable=True)
    die_at_call(root.path, calls)
    with RolloutWriter(root, "w0", flush_age_s=3600) as writer:
        for seed in SEEDS_OF_ONE_LIFE:
            writer.append(batch_of("w0", seed))
            writer.flush()
            says.send(group_ids(batch_of("w0", seed)))
    trainer = Trainer(root)
    trainer.poll()
    trainer.use(0.5)
    compact(root)
    trainer.use(1)
    expire(root, [stored for stored in stored_files(root) if stored.file.version == 0], rule="version 0")


def paths_of(event: str, args: tuple[Any, ...]) -> list[str]:
    """Return the paths of a call, those relative to a folder with the folder in front."""
    folders = [args[index] for index in _FOLDER_ARGUMENTS.get(event, ())]
    paths = [os.fspath(arg) for arg in args if isinstance(arg, str | os.PathLike)]
    return [
        path if folder < 0 or path.startswith("/") else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)  # noqa: PTH115, PTH118
        for path, folder in itertools.zip_longest(paths, folders, fillvalue=-1)
    ]


def _is_below(folder: str, event: str, args: tuple[Any, ...]) -> bool:
    # Python does not say what folder a file is opened in by its descriptor; the store alone opens files so.
    path = paths_of(event, args[:1] if event == "open" else args)[:1]
    return bool(path) and (path[0].startswith(folder) or (event == "open" and not path[0].startswith("/")))


def die_at_call(folder: str, number: int) -> None:
    """SIGKILL this process before it makes so many more storage calls below a folder."""
    calls = itertools.count()

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in STORAGE_CALLS and _is_below(folder, event, args) and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def record(says: Connection, url: str, first_step: int) -> None:
    """Record steps as another program's trainer until killed; says each step, and its rollouts, once it is stored."""
    recorder = ludic.record(url, model=recorded.MODEL)
    for step in itertools.count(first_step):
        ids = recorder.append([recorded.group(step), recorded.group(step, length=3)])
        recorder.step(step, advantages=range(8), metrics={"loss": step})
        says.send((step, ids))


def sample(says: Connection, url: str, first_seed: int) -> None:
    """Append groups as a sampler of another program until killed; says their rollouts once they are stored."""
    recorder = ludic.record(url, model=recorded.MODEL)
    for seed in itertools.count(first_seed):
        ids = recorder.append([recorded.group(seed)])
        recorder.append([recorded.group(seed, length=3)])
        if recorder.flush():
            says.send(ids)
