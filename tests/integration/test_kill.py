"""SIGKILL in the middle of everything, and SIGSTOP until others have taken over: at the end every group was used at
most once, and none was skipped."""

import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from subprocess import TimeoutExpired

import pytest
from forks import Forked
from tiny_runs import create_root, cursor_of_ledger, fill, groups_left, make_model, query, train_config

import ludic
from ludic.app.launch.train import train_args
from ludic.environments.moar_cats import WORDS
from ludic.models.tiny import make_tiny_model
from ludic.root.attempts import checkpoint_ids, complete_checkpoints, newest_attempt_id
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.ledger import ledger_steps
from ludic.root.rows.reader import Cursor
from ludic.root.sql.library import run_checks
from ludic.root.weights.policies import latest_policy
from ludic.run.run_json import run_of
from ludic.training.config import TrainConfig

NUM_WORKERS = 2
NUM_TRAINER_KILLS, NUM_WORKER_KILLS = 7, 3
# A life plans at most 4 steps and some before it dies, so 7 of them never reach the end.
NUM_STEPS = 42
CONFIG = TrainConfig.of(
    num_steps=NUM_STEPS,
    learning_rate=1e-3,
    checkpoint_every=2,
    keep_checkpoints=2,
    full_version_every=3,
    rollout_timeout_s=120.0,
    device="cpu",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Processes:
    """What runs on the root; each logs to a file of its own name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, Forked] = {}

    def start(self, name: str, args: Sequence[str]) -> Forked:
        self._running[name] = Forked(args, self._folder / f"{name}.log")
        return self._running[name]

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        assert process.poll() is None, f"{name} ended by itself: {self.log(name)}"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL

    def freeze(self, name: str) -> None:
        assert self._running[name].poll() is None, f"{name} ended by itself: {self.log(name)}"
        self._running[name].send_signal(signal.SIGSTOP)

    def wake(self, name: str) -> int:
        """Let a frozen process go on, to its end; its exit code."""
        self._running[name].send_signal(signal.SIGCONT)
        return self._running.pop(name).wait(60)

    def stop_all(self) -> None:
        """As a supervisor does: SIGTERM, so that what was sampled is flushed."""
        for process in self._running.values():
            process.terminate()
        for name, process in self._running.items():
            assert process.wait(60) == 0, self.log(name)
        self._running.clear()

    def kill_all(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()[-3000:]


@contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    running = Processes(folder)
    try:
        yield running
    finally:
        running.kill_all()


def wait_until(is_so: Callable[[], bool], trainer: Forked) -> None:
    """Poll often: what is worth interrupting takes milliseconds."""
    while not is_so():
        assert trainer.poll() is None, "the trainer ended by itself"
        time.sleep(0.002)


def has_checkpoint(root: Root, life: int) -> bool:
    return any(attempt_id == life for attempt_id, _ in checkpoint_ids(root))


def start_worker(running: Processes, root: Root, slot: int) -> None:
    running.start(f"worker-{slot}", ["ludic", "worker", root.url, "--slot", str(slot)])


def run_with_kills(root: Root, running: Processes, rng: random.Random) -> None:
    """Kill the trainer at random moments, and some workers; start each again; let the last trainer finish."""
    for slot in range(NUM_WORKERS):
        start_worker(running, root, slot)
    worker_kills = set(rng.sample(range(NUM_TRAINER_KILLS), NUM_WORKER_KILLS))
    # Others may die before their first: steps are planned ahead of training.
    lives_with_checkpoint = range(1, NUM_TRAINER_KILLS, 2)
    for life in range(1, NUM_TRAINER_KILLS + 1):
        trainer = running.start("trainer", train_args(root.url, CONFIG, ranks=1))
        wait_until(lambda life=life: newest_attempt_id(root) == life, trainer)
        if life in lives_with_checkpoint:
            wait_until(partial(has_checkpoint, root, life), trainer)
        # From the first publication to the middle of the fifth step.
        num_planned = rng.randrange(5)
        wait_until(lambda life=life, n=num_planned: len(ledger_steps(root, life)) >= n, trainer)
        time.sleep(rng.uniform(0, 0.1))
        running.kill("trainer")
        if life - 1 in worker_kills:
            slot = rng.randrange(NUM_WORKERS)
            running.kill(f"worker-{slot}")
            start_worker(running, root, slot)
    trainer = running.start("trainer", train_args(root.url, CONFIG, ranks=1))
    with suppress(TimeoutExpired):
        trainer.wait(240)  # some thirty steps, on a busy machine
    assert trainer.poll() == 0, "\n".join(map(running.log, ("trainer", "worker-0", "worker-1")))
    running.stop_all()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """A run whose trainer was killed seven times, and its workers three times."""
    folder = tmp_path_factory.mktemp("kill")
    make_tiny_model(str(folder / "model"), WORDS)
    root = create_root(str(folder / "run"), str(folder / "model"), num_workers=NUM_WORKERS, max_tokens=16)
    with processes(folder) as running:
        run_with_kills(root, running, random.Random(2026))
    return root


@pytest.fixture
def num_steps() -> int:
    return NUM_STEPS


def test_there_was_something_to_recover_from(root):
    parents = query(root, "select attempt_id, parent_step from attempts order by attempt_id")
    assert len(parents) == NUM_TRAINER_KILLS + 1
    assert query(root, "select count(*) > 0 from all_batches where superseded") == [(True,)]
    assert len({step for _, step in parents}) > 3  # none, and one more for each life with a checkpoint
    assert len({file.worker_id for file in list_files(root)}) > NUM_WORKERS


def test_steps_are_without_gaps_and_train_on_whole_batches(root, num_steps):
    steps = query(root, "select step, count(distinct group_id) from batches where used group by step order by step")
    assert steps == [(step, run_of(root).groups_per_batch) for step in range(1, num_steps + 1)]


def test_no_group_is_used_or_dropped_twice(root):
    assert query(root, "from batches select group_id group by group_id having count(distinct step) > 1") == []
    assert query(root, "from batches select rollout_id group by rollout_id having count(*) > 1") == []


def test_every_group_is_in_the_ledger_or_still_to_come(root):
    newest = latest_policy(root).version
    window = range(max(0, newest - CONFIG.batch.max_off_policy_steps), newest + 1)
    committed = {g for (g,) in ludic.connect(root).execute(IN_WINDOW, [window.start]).fetchall()}
    in_ledger = {g for (g,) in query(root, "select distinct group_id from batches")}
    to_come = groups_left(root, complete_checkpoints(root)[-1].cursor, window)
    assert to_come == committed - in_ledger


IN_WINDOW = "select distinct group_id from rollouts where policy_version >= ?"


def test_nothing_was_dropped_but_for_its_age(root):
    dropped = query(root, "select distinct reason, off_policy_steps > 32 from batches where not used")
    assert set(dropped) <= {("max_off_policy_steps", True)}
    assert query(root, "select max(off_policy_steps) <= 32 from batches where used") == [(True,)]


def test_the_cursor_of_the_last_checkpoint_is_the_ledger(root, num_steps):
    last = complete_checkpoints(root)[-1]
    assert last.step == num_steps
    expected = cursor_of_ledger(root, first_version=last.cursor["first_version"])
    assert consumed(Cursor.from_dict(dict(last.cursor)).to_dict()) == consumed(expected) != {}


def consumed(cursor):
    """Sources and groups by version, without versions of which nothing is left."""
    return {version: of for version, of in cursor["versions"].items() if any(of.values())}


def test_no_file_is_broken_and_no_request_was_committed_twice(root):
    # The checks read every column of every file; among them are duplicate_rollouts and sequence_gaps.
    assert {name for name, rows in run_checks(ludic.connect(root)).items() if rows.num_rows} == set()
    assert query(root, "from rollouts select request_index group by request_index having count(*) > 1") == []
    assert query(root, "select max(num_unreadable_files) from metrics") == [(0,)]


def test_each_worker_made_first_what_its_killed_life_owed(root):
    # Group numbers of a slot count up by two. Nothing is missing but what was being sampled at the very end.
    numbers = query(root, "select distinct request_index // group_size from rollouts order by 1")
    for slot in range(NUM_WORKERS):
        indexes = [number // NUM_WORKERS for (number,) in numbers if number % NUM_WORKERS == slot]
        assert indexes == list(range(len(indexes)))


def test_no_version_was_published_twice(root):
    published = query(root, "select version from policies order by version")
    assert published == [(version,) for version in range(len(published))]
    assert latest_policy(root).version == published[-1][0]


NUM_ZOMBIES = 3


def test_zombies_stop_at_their_next_write_and_change_nothing(tmp_path):
    rng = random.Random(2026)
    root = create_root(str(tmp_path / "run"), make_model(tmp_path / "model"))
    fill(root, num_files=16)
    config = train_config(num_steps=32, checkpoint_every=1, keep_checkpoints=1, keep_policies=None, lease_s=2.0)
    with processes(tmp_path) as running:
        for life in range(1, NUM_ZOMBIES + 1):
            args = train_args(root.url, config, ranks=1)
            # The first is replaced when it has shown no life for a lease, the others at once.
            trainer = running.start(f"trainer-{life}", [*args, "--take-over"] if life > 2 else args)
            wait_until(lambda life=life: len(ledger_steps(root, life)) >= 3, trainer)
            wait_until(partial(has_checkpoint, root, life), trainer)  # from which the next life goes on
            time.sleep(rng.uniform(0, 0.1))
            running.freeze(f"trainer-{life}")
        last = running.start("last", [*args, "--take-over"])
        wait_until(lambda: len(ledger_steps(root, NUM_ZOMBIES + 1)) >= 3, last)
        for life in range(1, NUM_ZOMBIES + 1):
            assert running.wake(f"trainer-{life}") == 1
            replaced = rf"attempt {life} was replaced by attempt {life + 1} of .*; this trainer stops"
            assert re.search(replaced, running.log(f"trainer-{life}"))
        assert last.wait(120) == 0, running.log("last")
    assert "attempt 1 of" in running.log("trainer-2")
    assert "has not released its lease; watching" in running.log("trainer-2")

    steps = query(root, "select step, count(distinct group_id) from batches where used group by step order by step")
    assert steps == [(step, run_of(root).groups_per_batch) for step in range(1, 33)]
    assert query(root, "from batches select group_id group by group_id having count(distinct step) > 1") == []
    assert query(root, "select count(distinct attempt_id) from batches") == [(NUM_ZOMBIES + 1,)]
    (checkpoint,) = complete_checkpoints(root)
    assert checkpoint.cursor["groups"] == cursor_of_ledger(root)["groups"]
    assert {name for name, rows in run_checks(ludic.connect(root)).items() if rows.num_rows} == set()
    newest, attempt_id = query(root, "select version, attempt_id from policies order by version desc limit 1")[0]
    assert attempt_id == NUM_ZOMBIES + 1
    assert latest_policy(root).version == newest
