"""Expiry: what each rule takes, and what is kept for whom."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from strategies import make_batch
from tiny_runs import fill, train_here

import ludic
from ludic.records.rollout import RolloutMetadata
from ludic.root.attempts import start_attempt
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.writer import RolloutWriter

pytestmark = pytest.mark.slow


@pytest.fixture
def filled(started: Root) -> ludic.Run:
    """A file of two groups of four in each of versions 0 to 3, of a run that nobody has trained on."""
    with RolloutWriter(started, "w0-test") as writer:
        for version in range(4):
            writer.append(make_batch(worker_id="w0-test", seed=version, policy_version=version))
            writer.flush()
    return ludic.open(started.url)


@pytest.fixture
def trained_on(started: Root) -> ludic.Run:
    """Two steps over the first two of four files of two groups each; a resumed trainer wants the other two."""
    for version in range(4):
        fill(started, num_files=1, groups_per_file=2, worker_id=f"w{version}-t", seed=version, policy_version=version)
    train_here(started, num_steps=2)
    return ludic.open(started.url)


def versions(run: ludic.Run) -> list[int]:
    return [file.version for file in list_files(run.root)]


def test_versions_are_counted_from_the_newest_or_named(filled: ludic.Run) -> None:
    assert [part.version for part in filled.expire(keep_versions=3, dry_run=True).expired] == [0]
    assert [part.version for part in filled.expire(before=2, dry_run=True).expired] == [0, 1]
    assert versions(filled) == [0, 1, 2, 3]
    filled.expire(before=2)
    assert versions(filled) == [2, 3]


def test_rows_are_taken_by_sql_where_they_fill_a_file(filled: ludic.Run) -> None:
    group_id = filled.sql("select min(group_id) as g from rollouts where version = 2").item()
    report = filled.expire(where=f"policy_version = 1 or group_id = '{group_id}' -- and no more")
    assert versions(filled) == [0, 2, 3]
    assert report.num_matching_rows_left == 4


def test_sql_sees_through_compaction(filled: ludic.Run) -> None:
    with RolloutWriter(filled.root, "w1-test") as writer:
        writer.append(make_batch(worker_id="w1-test", seed=10))
    compact(filled.root)
    report = filled.expire(where="worker_id = 'w1-test'")
    assert (report.expired, report.num_matching_rows_left) == ([], 8)
    assert [part.num_rows for part in filled.expire(where="version = 0").expired] == [16]
    assert versions(filled) == [1, 2, 3]


def test_age_is_that_of_the_rows(filled: ludic.Run) -> None:
    # make_batch's rows are of January 2026; these are of now.
    batch = make_batch(worker_id="w1-test", seed=10)
    fresh = RolloutMetadata(worker_id="w1-test", timestamp=datetime.now(UTC))
    with RolloutWriter(filled.root, "w1-test") as writer:
        writer.append(type(batch)(groups=batch.groups, metadata=fresh))
    filled.expire(older_than="2h")
    assert [file.worker_id for file in list_files(filled.root)] == ["w1-test"]


def test_what_a_resumed_trainer_wants_is_kept_unless_told(trained_on: ludic.Run) -> None:
    report = trained_on.expire(where="true", break_replay=True)
    assert [stored.file.version for stored in report.kept_to_resume] == versions(trained_on) == [2, 3]
    trained_on.expire(where="true", break_resume=True)
    assert versions(trained_on) == []


def test_what_steps_were_trained_on_is_kept_unless_told(trained_on: ludic.Run) -> None:
    report = trained_on.expire(where="true", break_resume=True)
    assert [stored.file.version for stored in report.kept_to_replay] == versions(trained_on) == [0, 1]
    trained_on.expire(where="true", break_replay=True)
    assert versions(trained_on) == []


def test_what_a_trainer_without_a_checkpoint_would_read_is_kept(filled: ludic.Run) -> None:
    start_attempt(filled.root, config={"max_off_policy_steps": None})
    assert len(filled.expire(keep_versions=1).kept_to_resume) == 3
    assert versions(filled) == [0, 1, 2, 3]


def test_evaluations_expire_when_asked_for(filled: ludic.Run) -> None:
    with RolloutWriter(filled.root, "w1-test", folder="evals") as writer:
        writer.append(make_batch(worker_id="w1-test", seed=20))
    filled.expire(where="true", folder="evals")
    assert (len(versions(filled)), list_files(filled.root, folder="evals")) == (4, [])


@pytest.mark.parametrize("root_url", ["local", "s3"], indirect=True)
def test_an_expired_run_stays_sound(root_url: str, make_trained: Callable[[str], Root]) -> None:
    run = ludic.open(make_trained(root_url).url)
    run.expire(keep_versions=1, break_replay=True)
    assert versions(run) == [1]
    assert run.verify().findings == []
