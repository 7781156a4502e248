"""`ludic expire`: what it prints, and wrong usage (tests/root/maintenance/test_expiry.py has what it deletes)."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from strategies import make_batch
from tiny_runs import fill, train_here

from ludic.records.rollout import GroupEvent
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.tables import ScoreLog
from ludic.root.rows.tombstones import read_tombstones
from ludic.root.rows.writer import RolloutWriter

pytestmark = pytest.mark.slow


@pytest.fixture
def filled(started: Root) -> Root:
    """A file of two groups of four in each of versions 0 to 3, of a run that nobody has trained on."""
    with RolloutWriter(started, "w0-test") as writer:
        for version in range(4):
            writer.append(make_batch(worker_id="w0-test", seed=version, policy_version=version))
            writer.flush()
    return started


@pytest.fixture
def trained_on(started: Root) -> Root:
    """Two steps over the first two of four files of two groups each; a resumed trainer wants the other two."""
    for version in range(4):
        fill(started, num_files=1, groups_per_file=2, worker_id=f"w{version}-t", seed=version, policy_version=version)
    train_here(started, num_steps=2)
    return started


def versions(root: Root) -> list[int]:
    return [file.version for file in list_files(root)]


def test_the_newest_versions_are_kept(ludic, filled: Root) -> None:
    result = ludic("expire", filled.url, "--keep-versions", "3")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].split() == ["version", "env", "files", "rows", "size"]
    assert lines[2].split()[:4] == ["0", "moar_cats", "1", "8"]
    assert lines[3].startswith("1 file with 8 rows, ")
    assert lines[3].endswith(", deleted")
    assert versions(filled) == [1, 2, 3]
    assert [tombstone.rule for tombstone in read_tombstones(filled)] == ["--keep-versions 3"]


def test_a_dry_run_prints_and_leaves_all(ludic, filled: Root) -> None:
    names = filled.list("")
    assert (
        ludic("expire", filled.url, "--keep-versions", "1", "--dry-run")
        .out.splitlines()[-1]
        .startswith("3 files with 24 rows, ")
    )
    assert filled.list("") == names


def test_what_a_resumed_trainer_wants_is_kept_unless_told(ludic, trained_on: Root) -> None:
    result = ludic("expire", trained_on.url, "--where", "true", "--break-replay")
    assert versions(trained_on) == [2, 3]
    assert "kept 2 files, " in result.out
    assert result.out.endswith(": a trainer that resumes would still train on them; --break-resume deletes them too\n")
    ludic("expire", trained_on.url, "--where", "true", "--break-resume")
    assert versions(trained_on) == []


def test_what_steps_were_trained_on_is_kept_unless_told(ludic, trained_on: Root) -> None:
    printed = json.loads(ludic("expire", trained_on.url, "--where", "true", "--break-resume", "--json").out)
    assert versions(trained_on) == [0, 1]
    assert [name.rpartition("/")[2] for name in printed["kept_to_replay"]] == ["w0-t-0.parquet", "w1-t-0.parquet"]
    assert printed["kept_to_resume"] == []
    assert [partition["num_rows"] for partition in printed["expired"]] == [8, 8]


def test_token_stats_go_by_the_weights_that_their_steps_started_from(ludic, started: Root) -> None:
    fill(started, num_files=2, groups_per_file=2)
    train_here(started, num_steps=2, keep_token_stats=True)  # from versions 0 and 1; the newest is 2
    rule = ["--folder", "token_stats", "--keep-versions", "2"]
    first, second = started.list("token_stats")
    told = json.loads(ludic("expire", started.url, *rule, "--dry-run", "--json").out)
    assert told["deleted"] == [first]
    result = ludic("expire", started.url, *rule)
    assert (result.code, result.out.startswith("1 file, "), result.out.endswith(" deleted\n")) == (0, True, True)
    assert started.list("token_stats") == [second]
    assert ludic("verify", started.url).out == f"{started.url} is sound\n"
    refused = ludic("expire", started.url, "--folder", "token_stats", "--older-than", "7d")
    assert refused.code == 2
    assert "wanted keep_versions or before" in " ".join(refused.err.replace("│", " ").split())


def test_scores_go_by_their_age(ludic, started: Root) -> None:
    row = {"rollout_id": "a", "name": "score", "value": 1.0, "scorer_version": "aa"}
    with ScoreLog(started, "judge") as log:
        log.append(row | {"created_at": datetime.now(UTC) - timedelta(days=8)})
    (old,) = started.list("scores")
    with ScoreLog(started, "judge") as log:
        log.append(row | {"created_at": datetime.now(UTC) - timedelta(days=8)})
        log.append(row | {"created_at": datetime.now(UTC)})
    rule = ["--folder", "scores", "--older-than", "7d"]
    assert json.loads(ludic("expire", started.url, *rule, "--dry-run", "--json").out)["deleted"] == [old]
    assert ludic("expire", started.url, *rule).out.startswith("1 file, ")
    (left,) = started.list("scores")
    assert left != old
    refused = ludic("expire", started.url, "--folder", "scores", "--before", "3")
    assert "whose files only have an age" in " ".join(refused.err.replace("│", " ").split())


def test_requests_go_by_their_age(ludic, started: Root) -> None:
    def put(sequence: int, *days: int) -> None:
        events = [
            GroupEvent(
                event="started",
                group_id=f"group-{sequence}-{ago}",
                group_number=0,
                env_name="moar_cats",
                env_example_id="prompt-1",
                group_size=2,
                policy_version=0,
                created_at=datetime.now(UTC) - timedelta(days=ago),
            )
            for ago in days
        ]
        with RolloutWriter(started, f"w0-{sequence}") as writer:
            writer.append(None, events)

    put(0, 9, 8)
    put(1, 8, 0)
    rule = ["--folder", "requests", "--older-than", "7d"]
    assert json.loads(ludic("expire", started.url, *rule, "--dry-run", "--json").out)["deleted"] == [
        "requests/w0-0-0.parquet"
    ]
    assert ludic("expire", started.url, *rule).out.startswith("1 file, ")
    assert started.list("requests") == ["requests/w0-1-0.parquet"]
    assert ludic("verify", started.url).out == f"{started.url} is sound\n"
    assert "folder is requests" in " ".join(
        ludic("expire", started.url, "--folder", "requests", "--before", "3").err.replace("│", " ").split()
    )
