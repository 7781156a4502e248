"""Workers, trainers and compactors that are really killed: nothing is lost, doubled, or unreadable."""

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import lives
import pytest
from preloaded import fork_server
from strategies import as_plain

from ludic.records.conversion import from_table
from ludic.records.rollout import RolloutGroup
from ludic.records.tables import arrow_schema
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.parquet import read_columns
from ludic.run.run_json import put_run, run_of

processes = fork_server("hypothesis.strategies", "ludic.root.maintenance.compaction", "s3fs")


@dataclass
class Life:
    """A process, and what it says: in each round, the group_ids whose flush has returned."""

    process: BaseProcess
    said: Connection

    def end(self) -> set[str]:
        """Wait for the end; all that it said, but for a last message that a kill has cut."""
        self.process.join()
        found: set[str] = set()
        with self.said, suppress(EOFError):
            while True:
                found.update(self.said.recv())
        return found


def start(function: Callable[..., None], *args: object) -> Life:
    said, says = processes.Pipe(duplex=False)
    with says:
        process = processes.Process(target=lives.live, args=(function, dict(os.environ), says, *args), daemon=True)
        process.start()
    return Life(process, said)


def findings(root: Root, flushed: Set[str], may_be_gone: Set[str] = frozenset()) -> Counter[str]:
    """What is wrong once all is compacted, and the trainer has used all that is left."""
    compact(root)
    batches = [
        batch
        for file in list_files(root)
        for batch in from_table(read_columns(root, file.name, arrow_schema("rollouts").names))
    ]
    groups = [(batch.metadata.worker_id, group) for batch in batches for group in batch.groups]
    stored = Counter(group.rollouts[0].group_id for _, group in groups)
    trainer = lives.Trainer(root)
    trainer.poll()
    trainer.use(1)
    used = Counter(trainer.history)
    return Counter(
        groups=len(stored),
        lost=len(flushed - may_be_gone - stored.keys()) + len(stored.keys() - used.keys()),
        doubled=sum(count > 1 for count in (*stored.values(), *used.values())),
        unreadable=sum(as_plain(group) != as_plain(written(worker_id, group)) for worker_id, group in groups),
    )


def written(worker_id: str, group: RolloutGroup) -> RolloutGroup:
    """The group as its worker made it, found by its example."""
    seed, index = divmod(int(group.rollouts[0].env_example_id.removeprefix("example-")), 10_000)
    return lives.batch_of(worker_id, seed).groups[index]


@pytest.mark.slow
@pytest.mark.parametrize(("root_url", "num_kills"), [("local", 32), ("s3", 32)], indirect=["root_url"])
def test_nothing_is_lost_or_doubled_by_kills_at_any_moment(root, num_kills, capsys):
    numbers = itertools.count()

    def start_worker() -> Life:
        number = next(numbers)
        return start(lives.work, root.url, f"w{number}", number * 100_000)

    roles = [start_worker, start_worker, partial(start, lives.train, root.url), partial(start, lives.tidy, root.url)]
    running = [role() for role in roles]
    flushed: set[str] = set()
    for kill in range(num_kills):
        index = kill % len(roles)
        assert running[index].said.poll(60), "it never did anything"
        time.sleep(random.uniform(0, 0.2))
        assert running[index].process.exitcode is None, "it ended by itself"
        running[index].process.kill()
        flushed |= running[index].end()
        running[index] = roles[index]()
    for life in running:
        life.process.kill()
        flushed |= life.end()

    found = findings(root, flushed)
    with capsys.disabled():
        print(f"\n{num_kills + len(running)} kills on {root.url.split('://')[0]}: {dict(found)}")
    assert found == Counter(groups=found["groups"])


@pytest.mark.slow
@pytest.mark.parametrize("root_url", ["local"], indirect=True)
def test_nothing_is_lost_or_doubled_by_a_kill_between_any_two_calls(root, tmp_path, capsys):
    """Each time in a root of its own, one call later, until the process lives to its end."""
    version_0 = set(lives.group_ids(lives.batch_of("w0", 0)))
    for num_calls in itertools.count():
        one = put_run(str(tmp_path / f"run-{num_calls}"), run_of(root))
        life = start(lives.live_once, one.url, num_calls)
        flushed = life.end()
        assert life.process.exitcode in (0, -signal.SIGKILL)
        found = findings(one, flushed, may_be_gone=version_0)
        assert found == Counter(groups=found["groups"]), f"killed before call {num_calls}"
        if life.process.exitcode == 0:
            break
    with capsys.disabled():
        print(f"\n{num_calls} kills, each between two storage calls: 0 lost, doubled or unreadable")
    assert num_calls > 50
