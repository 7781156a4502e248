"""Publishing by the owner of a root, in the background, and by one that no longer owns it."""

import threading

import pyarrow as pa
import pytest
from tiny_runs import fill, train_config

from ludic.errors import FencedError, StoreError
from ludic.root.attempts import complete_checkpoints, start_attempt
from ludic.root.catalogue import LATEST
from ludic.root.json_records import LatestPolicy
from ludic.root.weights.policies import PolicyWriter, latest_policy, point_latest, policy_versions, stored_versions
from ludic.training.publisher import Publisher
from ludic.training.trainer import train


@pytest.fixture
def publisher(new_root):
    """Of a run of which 2 batches of 2 groups may be open; version 0 is published."""
    root = new_root()
    publisher = Publisher(root, start_attempt(root), keep=None)
    publisher.publish(lambda folder: None, step=0)
    return root, publisher


def test_what_a_zombie_points_at_is_pointed_back(publisher):
    root, publisher = publisher
    publisher.publish(lambda folder: None, step=1)
    expected = latest_policy(root)
    assert expected.version == 1
    point_latest(root, LatestPolicy(version=0, budget=99))
    publisher.repair_latest()
    assert latest_policy(root) == expected


def test_a_latest_that_is_broken_is_mended(publisher):
    root, publisher = publisher
    root.put(LATEST.template, b"{")
    publisher.repair_latest()
    assert latest_policy(root) == LatestPolicy(version=0, budget=4, attempt_id=1)


def test_a_latest_that_is_right_is_not_written_again(publisher):
    root, publisher = publisher
    before = root.fs.info(root.at(LATEST.template))
    publisher.repair_latest()
    assert root.fs.info(root.at(LATEST.template)) == before


def test_nothing_is_mended_before_the_first_publication(new_root):
    root = new_root()
    Publisher(root, start_attempt(root), keep=None).repair_latest()
    assert latest_policy(root) is None


def test_a_trainer_that_is_fenced_while_it_writes_weights_leaves_latest_alone(publisher):
    root, publisher = publisher
    with pytest.raises(FencedError, match="attempt 1 was replaced by attempt 2"):
        publisher.publish(lambda folder: start_attempt(root), step=1)
    assert latest_policy(root).version == 0
    assert policy_versions(root) == [0, 1]
    # The next one passes over the version that was claimed and never named.
    successor = Publisher(root, start_attempt(root), keep=None)
    assert successor.publish(lambda folder: None, step=0) == 2
    assert latest_policy(root).version == 2


@pytest.fixture
def slow_save():
    """A function that saves a file once `may_end` is set."""
    may_end = threading.Event()

    def save(folder):
        assert may_end.wait(60)
        (folder / "config.json").write_text("{}")

    yield save, may_end
    may_end.set()


def test_nothing_is_seen_of_a_version_until_its_files_are_complete(publisher, slow_save):
    root, publisher = publisher
    save, may_end = slow_save
    assert publisher.start(save, step=1) == 1
    publisher.finish(wait=False)
    publisher.repair_latest()
    publisher.note_wait(0, 2, 1e9, version=1)
    assert (latest_policy(root).version, publisher.version, stored_versions(root)) == (0, 0, [])
    may_end.set()
    publisher.finish()
    assert (latest_policy(root).version, publisher.version, stored_versions(root)) == (1, 1, [1])


def test_a_version_waits_for_the_one_before(publisher, slow_save):
    root, publisher = publisher
    save, may_end = slow_save
    publisher.start(save, step=1)
    threading.Timer(0.2, may_end.set).start()
    assert publisher.start(save, step=2) == 2
    assert latest_policy(root).version >= 1
    publisher.finish()
    assert latest_policy(root).version == 2


def test_groups_that_arrive_while_a_version_is_written_count_as_read(publisher, slow_save):
    root, publisher = publisher
    save, may_end = slow_save
    publisher.start(save, step=1)
    for number in range(3):
        row = {"worker_id": "w0-test", "sequence": number, "group_id": f"g{number}"}
        publisher.note_arrivals(pa.Table.from_pylist([row]), number + 1)
    may_end.set()
    publisher.finish()
    latest = latest_policy(root)
    assert (latest.num_ready, latest.seen) == (3, {"w0-test": 2})


def test_the_error_of_a_version_is_raised_wherever_it_is_waited_for(publisher):
    root, publisher = publisher

    def save(folder):
        raise StoreError("the disk is full")

    publisher.start(save, step=1)
    publisher.close()
    for wait in (
        publisher.finish,
        lambda: publisher.finish(wait=False),
        lambda: publisher.note_wait(0, 1, 0.0, version=1),
        lambda: publisher.start(save, step=2),
    ):
        with pytest.raises(StoreError, match="the disk is full"):
            wait()
    assert (latest_policy(root).version, policy_versions(root)) == (0, [0, 1])


@pytest.mark.parametrize("num_files", [0, 1])
def test_a_trainer_ends_with_the_error_of_its_version_also_while_it_waits_for_groups(new_root, monkeypatch, num_files):
    root, write = new_root(steps_per_version=1), PolicyWriter.write
    fill(root, num_files=1, groups_per_file=2)  # one batch
    fill(root, num_files=num_files, worker_id="w1-test", seed=7)

    def fail(writer, version, save):
        if version > 0:
            raise StoreError("the disk is full")
        return write(writer, version, save)

    monkeypatch.setattr(PolicyWriter, "write", fail)
    with pytest.raises(StoreError, match="the disk is full"):
        train(root, train_config(num_steps=8, rollout_timeout_s=None, checkpoint_every=1), threading.Event())
    assert latest_policy(root).version == 0
    assert complete_checkpoints(root) == []  # one would name version 1


@pytest.mark.slow
def test_training_goes_on_while_a_version_is_written_and_its_checkpoint_waits(new_root, monkeypatch):
    root, write = new_root(steps_per_version=2), PolicyWriter.write
    fill(root, num_files=2)
    may_end, seen = threading.Event(), []

    def write_later(writer, version, save):
        assert version == 0 or may_end.wait(60)
        return write(writer, version, save)

    def report(step, row):
        seen.append((step, latest_policy(root).version, len(complete_checkpoints(root))))
        if step == 3:
            may_end.set()

    monkeypatch.setattr(PolicyWriter, "write", write_later)
    assert train(root, train_config(num_steps=4, checkpoint_every=2), threading.Event(), report) == 4
    assert seen[:3] == [(1, 0, 0), (2, 0, 0), (3, 0, 0)]
    assert (latest_policy(root).version, stored_versions(root)) == (2, [0, 1, 2])
    assert [info.policy_version for info in complete_checkpoints(root)] == [1, 2]
