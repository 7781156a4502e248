"""`ludic run --launcher ray` on a cluster of three nodes: as it should go, and while nodes are killed.

The killed run is held to what tests/integration/test_kill.py asks of one whose processes are killed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from clusters.conftest import Nodes, wait_until
from hostile_folders import hostile_folder, imported_from
from integration import test_kill
from integration.test_kill import NUM_WORKERS
from tiny_runs import create_root, query

from ludic.app.launch.supervisor import ProcessDiedError
from ludic.environments.moar_cats import WORDS
from ludic.errors import StalledError
from ludic.models.tiny import make_tiny_model
from ludic.root.attempts import newest_attempt, newest_attempt_id
from ludic.root.claims import claim, is_over, newest_claim, newest_slot_claim, read_lease
from ludic.root.root import Root
from ludic.root.rows.ledger import ledger_steps
from ludic.settings.table import to_flags
from ludic.training.config import TrainConfig

NUM_STEPS = 20
CONFIG = test_kill.CONFIG.replace(num_steps=NUM_STEPS)
CHECKS = [
    partial(test_kill.test_steps_are_without_gaps_and_train_on_whole_batches, num_steps=NUM_STEPS),
    test_kill.test_no_group_is_used_or_dropped_twice,
    test_kill.test_every_group_is_in_the_ledger_or_still_to_come,
    test_kill.test_nothing_was_dropped_but_for_its_age,
    partial(test_kill.test_the_cursor_of_the_last_checkpoint_is_the_ledger, num_steps=NUM_STEPS),
    test_kill.test_no_file_is_broken_and_no_request_was_committed_twice,
    test_kill.test_each_worker_made_first_what_its_killed_life_owed,
    test_kill.test_no_version_was_published_twice,
]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def start_root(folder: Path, num_workers: int = NUM_WORKERS) -> Root:
    make_tiny_model(str(folder / "model"), WORDS)
    return create_root(str(folder / "run"), str(folder / "model"), num_workers=num_workers, max_tokens=16)


@contextmanager
def running(
    root: Root, nodes: Nodes, config: TrainConfig, *flags: str, cwd: Path | None = None
) -> Iterator[subprocess.Popen]:
    """A `ludic run` on the cluster, with the settings of the root; its output is in the file log."""
    log = Path(root.path).parent / "log"
    settings = to_flags({**config.flat(), "launcher": "ray"})
    with log.open("wb") as out:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("ludic"), "run", root.url, *settings, *flags],
            cwd=cwd,
            stdout=out,
            stderr=out,
            env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": nodes.address},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def finish(root: Root, process: subprocess.Popen) -> None:
    assert process.wait(400) == 0, (Path(root.path).parent / "log").read_text()[-3000:]


def num_planned(root: Root) -> int:
    """The newest step that a trainer has planned."""
    return max(ledger_steps(root, newest_attempt_id(root)), default=0)


def pid_of_trainer(root: Root) -> int:
    lease = read_lease(root, newest_claim(root))
    assert lease is not None
    return int(lease.owner.rpartition("-")[2])


def life_of_worker(root: Root, slot: int) -> int:
    claim = newest_slot_claim(root, slot)
    return claim.life if claim else 0


def pid_of_worker(root: Root, slot: int) -> int:
    claim = newest_slot_claim(root, slot)
    assert claim is not None
    return int(claim.owner.rpartition("-")[2])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, nodes: Nodes) -> Root:
    """A run that lost a node with a worker, and then the node with the trainer."""
    root = start_root(tmp_path_factory.mktemp("ray"))
    with running(root, nodes, CONFIG) as process:

        def wait(is_so):
            wait_until(is_so, lambda: process.poll() is None)

        wait(lambda: num_planned(root) >= 5)
        home = nodes.node_of(pid_of_trainer(root))
        (other,) = (node for node in nodes.nodes if node is not home)
        lost = [slot for slot in range(NUM_WORKERS) if nodes.node_of(pid_of_worker(root, slot)) is other]
        assert lost, "the node without the trainer has a worker, since a node has room for two processes"
        # The other worker alone would finish so short a run before the lost one is back.
        left = [pid_of_worker(root, slot) for slot in range(NUM_WORKERS) if slot not in lost]
        for pid in left:
            os.kill(pid, signal.SIGSTOP)
        nodes.kill(other)
        wait(lambda: all(life_of_worker(root, slot) == 2 for slot in lost))
        for pid in left:
            os.kill(pid, signal.SIGCONT)
        before = num_planned(root)
        wait(lambda: num_planned(root) >= before + 3)
        nodes.kill(home)
        wait(lambda: newest_attempt_id(root) == 2)
        finish(root, process)
    return root


def test_there_was_something_to_recover_from(root: Root) -> None:
    # On a busy machine Ray may start the trainer once more by itself.
    first, *later = query(root, "select parent_step from attempts order by attempt_id")
    assert first == (None,)
    assert later
    assert all(0 < step < NUM_STEPS for (step,) in later)
    assert sum(life_of_worker(root, slot) for slot in range(NUM_WORKERS)) > NUM_WORKERS


@pytest.mark.parametrize(
    "check", CHECKS, ids=lambda check: getattr(check, "func", check).__name__.removeprefix("test_")
)
def test_the_guarantees_of_killed_processes_hold_for_killed_nodes(check: Callable[[Root], None], root: Root) -> None:
    check(root)


def test_two_ranks_survive_a_kill_import_nothing_from_their_folder_and_end_when_another_trainer_took_over(
    tmp_path: Path, nodes: Nodes
) -> None:
    """Workers come and go meanwhile; a trainer that was replaced is not started again."""
    import ludic

    root = start_root(tmp_path, num_workers=1)
    hostile = hostile_folder(tmp_path / "hostile")
    with running(root, nodes, CONFIG.replace(num_steps=100_000), "--ranks", "2", cwd=hostile) as process:

        def wait(is_so):
            wait_until(is_so, lambda: process.poll() is None)

        wait(lambda: newest_claim(root) == 1)
        os.kill(pid_of_trainer(root), signal.SIGKILL)
        wait(lambda: newest_attempt_id(root) == 2 and num_planned(root) >= 2)
        assert life_of_worker(root, 1) == 0
        ludic.open(root.url).scale(2, ray_address=nodes.address)
        wait(lambda: life_of_worker(root, 1) == 1)
        ludic.open(root.url).scale(1, ray_address=nodes.address)
        wait(lambda: is_over(newest_slot_claim(root, 1)))
        assert newest_attempt(root).numerics["num_ranks"] == 2
        last = newest_claim(root)
        claim(root, last, released=True)
        assert process.wait(400) == 1
    log = (tmp_path / "log").read_text()
    assert f"attempt {last} was replaced by attempt {last + 1}" in log
    assert newest_claim(root) == last + 1
    # On a busy machine Ray may hear first of the other rank, which has lost its peer.
    assert log.count("starting again from the root") == last - 1
    steps = [step for (step,) in query(root, "select distinct step from batches where used order by 1")]
    assert steps == list(range(1, len(steps) + 1))
    assert imported_from(hostile) == []


def test_failures_without_a_new_checkpoint_end_the_run() -> None:
    pytest.importorskip("ray.train", reason="ray is in the extra ray")
    from ray.exceptions import RayActorError

    from ludic.adapters.ray.processes import Deaths

    checkpoint = 0
    deaths = Deaths(progress=lambda: checkpoint)
    failed = [StalledError("no rollouts")]
    for _ in range(4):
        deaths.count([RayActorError()])  # a lost process, of which there may be any number
    deaths.count(failed)
    deaths.count(failed)
    checkpoint = 2  # progress: the count begins again
    deaths.count(failed)
    deaths.count(failed)
    with pytest.raises(ProcessDiedError, match="the trainer failed 3 times without a new checkpoint: no rollouts"):
        deaths.count(failed)
