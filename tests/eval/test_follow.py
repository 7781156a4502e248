"""Which versions of a run are evaluated while it trains: each K-th, as it is published, and the last one."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ludic.errors import StoreError
from ludic.eval.plan import describe_versions, due_versions, missed_versions
from ludic.root.json_records import LatestPolicy
from ludic.root.weights.policies import point_latest
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run


class Training:
    """A run of which only the newest version is known, and whether it is over."""

    def __init__(self, url: str) -> None:
        self.root = put_run(url, RunConfig(model="m", env=("addition",)))
        self.is_over, self.stop = False, threading.Event()

    def publish(self, version: int) -> None:
        point_latest(self.root, LatestPolicy(version=version, budget=0))

    def follow(self, every: int) -> Iterator[int]:
        return due_versions(self.root, every, lambda: self.is_over, self.stop)


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    monkeypatch.setattr("ludic.eval.plan._POLL_S", 0.01)
    monkeypatch.setattr("ludic.eval.plan._RETRY_S", 0.01)
    return Training(str(tmp_path / "run"))


def test_every_third_version_is_due_and_the_last_one(training: Training) -> None:
    due, taken = training.follow(3), []
    for version in range(8):
        training.publish(version)
        if version % 3 == 0:
            taken.append(next(due))
    training.is_over = True
    assert taken == [0, 3, 6]
    assert list(due) == [7]


def test_a_last_version_that_is_a_multiple_is_evaluated_once(training: Training) -> None:
    due = training.follow(3)
    training.publish(0)
    next(due)
    training.publish(3)
    training.is_over = True
    assert list(due) == [3]


def test_versions_between_are_passed_over_with_a_message_if_it_falls_behind(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    due = training.follow(10)
    training.publish(0)
    assert next(due) == 0
    training.publish(34)
    assert next(due) == 30
    training.publish(125)
    assert next(due) == 120
    training.publish(149)
    training.is_over = True
    assert list(due) == [149]
    assert [record.message for record in caplog.records] == [
        "skipped versions 10 and 20, since version 30 is newer",
        "skipped 8 versions from 40 to 110, since version 120 is newer",
        "skipped versions 130 and 140, since version 149 is newer",
    ]


def test_nothing_is_due_before_the_first_version_and_stop_ends_the_wait(training: Training) -> None:
    timer = threading.Timer(0.05, training.stop.set)
    timer.start()
    assert list(training.follow(1)) == []
    timer.join()


def test_a_new_process_first_finishes_what_was_begun(training: Training) -> None:
    training.publish(58)
    for version in (0, 20, 40, 47):  # 47 was evaluated by hand
        training.root.put(f"evals/version={version}/env=addition/eval-x.parquet", b"any")
    due = training.follow(20)
    assert [next(due) for _ in range(3)] == [0, 20, 40]
    training.is_over = True
    assert list(due) == [58]


def test_a_storage_that_fails_is_asked_again(
    training: Training, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training.publish(0)
    failures = [StoreError("the bucket is away")]

    def is_over() -> bool:
        if failures:
            raise failures.pop()
        return True

    with caplog.at_level(logging.WARNING):
        assert list(due_versions(training.root, 5, is_over, training.stop)) == [0]
    assert [record.message for record in caplog.records] == ["checking again for new versions: the bucket is away"]


def test_what_was_missed_is_told_by_what_is_stored(training: Training) -> None:
    assert missed_versions(training.root, 10) == []
    training.publish(52)
    for version in (0, 30, 52):
        training.root.put(f"evals/version={version}/env=addition/eval-x.parquet", b"any")
    assert missed_versions(training.root, 10) == [10, 20, 40, 50]
    assert describe_versions([10]) == "version 10"
    assert describe_versions([10, 20, 40, 50]) == "versions 10, 20, 40 and 50"
    assert describe_versions([10, 20, 40, 50, 60]) == "5 versions from 10 to 60"
