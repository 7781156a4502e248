"""More of everything than anybody expects: environments, groups, writers; and clocks that jump."""

import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from strategies import make_batch, make_group

import ludic as package
from ludic.errors import ConfigError
from ludic.records.rollout import RolloutBatch, RolloutMetadata
from ludic.root.root import Root
from ludic.root.rows.files import check_worker_id
from ludic.root.rows.reader import RolloutReader
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run


def new_root(tmp_path: Path) -> Root:
    return put_run(str(tmp_path / "run"), RunConfig(model="m", env=("moar_cats",), group_size=2))


def count(root: Root) -> int:
    return package.connect(root.url).sql("select count(distinct group_id) from rollouts").fetchall()[0][0]


def num_delivered(root: Root) -> int:
    rows = RolloutReader(root, ["rollout_id"]).poll(None)
    return rows.num_rows if rows else 0


def one_group(number: int, **metadata: datetime) -> RolloutBatch:
    """Of its own part of the schedule, as a worker makes it."""
    group = make_group(rewards=[1.0, 0.0], seed=number, response_length=1, first_request=2 * number)
    return RolloutBatch(groups=(group,), metadata=RolloutMetadata(worker_id=f"w{number}-test", **metadata))


@pytest.mark.slow
def test_a_batch_of_a_hundred_environments_is_stored_and_asked(tmp_path: Path) -> None:
    root = new_root(tmp_path)
    groups = []
    for number in range(100):
        group = make_group(rewards=[1.0, 0.0], seed=number, prompt_length=1, response_length=1)
        groups.append(replace(group, rollouts=tuple(replace(r, env_name=f"env/{number} ä") for r in group.rollouts)))
    with RolloutWriter(root, "w0-test") as writer:
        writer.append(RolloutBatch(groups=tuple(groups), metadata=RolloutMetadata(worker_id="w0-test")))
    assert count(root) == 100
    names = package.connect(root.url).sql("select count(distinct env_name) from rollouts").fetchall()
    assert names == [(100,)]


@pytest.mark.slow
def test_three_thousand_groups_go_in_one_append(tmp_path: Path) -> None:
    root = new_root(tmp_path)
    batch = make_batch(worker_id="w0-test", num_groups=3_000, group_size=2, prompt_length=1, response_length=1)
    with RolloutWriter(root, "w0-test") as writer:
        writer.append(batch)
    assert count(root) == 3_000
    assert num_delivered(root) == 6_000


@pytest.mark.slow
def test_a_hundred_writers_lose_and_double_nothing(tmp_path: Path) -> None:
    root = new_root(tmp_path)
    barrier = threading.Barrier(100)

    def write(number: int) -> None:
        batch = one_group(number)
        barrier.wait()
        with RolloutWriter(root, batch.metadata.worker_id) as writer:
            writer.append(batch)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(root) == 100


@pytest.mark.parametrize("years", [-60, 60])
def test_a_clock_that_jumps_loses_no_rollout(tmp_path: Path, years: int) -> None:
    root = new_root(tmp_path)
    jumped = datetime.now(UTC) + timedelta(days=365 * years)
    for number, timestamp in enumerate((datetime.now(UTC), jumped, datetime.now(UTC))):
        with RolloutWriter(root, f"w{number}-test") as writer:
            writer.append(one_group(number, timestamp=timestamp))
    assert count(root) == 3
    assert num_delivered(root) == 6


@pytest.mark.parametrize("worker_id", ["", ".", "..", "../x", "a/b", "_x", "compacted.x", "a\x00", "a" * 201, "ä"])
def test_a_worker_id_that_is_no_file_name_is_refused(worker_id: str) -> None:
    with pytest.raises(ConfigError, match="is not a file name"):
        check_worker_id(worker_id)
