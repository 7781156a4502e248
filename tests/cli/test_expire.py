"""`ludic expire`: what each rule takes, what is kept for whom, and what is printed."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from strategies import make_batch
from tiny_runs import fill, train_here

from ludic.maintenance.compact import compact
from ludic.records import RolloutMetadata
from ludic.store import RolloutWriter, Root, list_files, start_attempt
from ludic.store.retention import read_tombstones

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
    assert lines[0].split() == ["version", "environment", "files", "rows", "bytes"]
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


def test_rows_are_taken_by_sql_where_they_fill_a_file(ludic, filled: Root) -> None:
    (group_id,) = json.loads(
        ludic("sql", filled.url, "select min(group_id) as g from rollouts where version = 2", "--format", "json").out
    )[0].values()
    result = ludic("expire", filled.url, "--where", f"policy_version = 1 or group_id = '{group_id}'")
    assert versions(filled) == [0, 2, 3]
    assert result.out.splitlines()[-1] == (
        "4 rows more match in files that hold other rows too; only whole files are deleted"
    )


def test_sql_sees_through_compaction(ludic, filled: Root) -> None:
    with RolloutWriter(filled, "w1-test") as writer:
        writer.append(make_batch(worker_id="w1-test", seed=10))
    compact(filled)
    result = ludic("expire", filled.url, "--where", "worker_id = 'w1-test'")
    assert result.out.splitlines() == [
        "0 files with 0 rows, 0 B, deleted",
        "8 rows more match in files that hold other rows too; only whole files are deleted",
    ]
    assert ludic("expire", filled.url, "--where", "version = 0").out.splitlines()[-1].startswith("1 file with 16 rows")
    assert versions(filled) == [1, 2, 3]


def test_age_is_that_of_the_rows(ludic, filled: Root) -> None:
    # make_batch's rows are of January 2026; these are of now.
    batch = make_batch(worker_id="w1-test", seed=10)
    fresh = RolloutMetadata(worker_id="w1-test", timestamp=datetime.now(UTC))
    with RolloutWriter(filled, "w1-test") as writer:
        writer.append(type(batch)(groups=batch.groups, metadata=fresh))
    assert ludic("expire", filled.url, "--older-than", "2h").code == 0
    assert [file.worker_id for file in list_files(filled)] == ["w1-test"]


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


def test_what_a_trainer_without_a_checkpoint_would_read_is_kept(ludic, filled: Root) -> None:
    start_attempt(filled, config={"max_off_policy_steps": None})
    assert "kept 3 files" in ludic("expire", filled.url, "--keep-versions", "1").out
    assert versions(filled) == [0, 1, 2, 3]


def test_evaluations_expire_when_asked_for(ludic, filled: Root) -> None:
    with RolloutWriter(filled, "w1-test", folder="evals") as writer:
        writer.append(make_batch(worker_id="w1-test", seed=20))
    assert ludic("expire", filled.url, "--where", "true", "--folder", "evals").code == 0
    assert (len(list_files(filled)), list_files(filled, folder="evals")) == (4, [])


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ([], "wanted one of --keep-versions N, --older-than AGE and --where SQL"),
        (
            ["--keep-versions", "1", "--where", "true"],
            "wanted one of --keep-versions N, --older-than AGE and --where SQL",
        ),
        (["--keep-versions", "0"], "keep_versions is 0, wanted at least 1"),
        (["--older-than", "a week"], "older_than is 'a week', wanted a number and s, m, h, d or w, such as 7d"),
    ],
)
def test_wrong_rules_are_wrong_usage(ludic, filled: Root, args: list[str], problem: str) -> None:
    result = ludic("expire", filled.url, *args)
    assert result.code == 2
    assert problem in " ".join(result.err.replace("│", " ").split())


def test_sql_that_can_not_run_is_one_line_and_deletes_nothing(ludic, filled: Root) -> None:
    result = ludic("expire", filled.url, "--where", "no_such_column > 3")
    assert result.code == 1
    assert "no_such_column" in result.err
    assert len(result.err.splitlines()) == 1
    assert len(list_files(filled)) == 4


def test_an_expired_run_stays_sound(ludic, root_url: str, make_trained: Callable[[str], Root], tmp_path: Path) -> None:
    root = make_trained(root_url)
    assert ludic("expire", root.url, "--keep-versions", "1", "--break-replay").code == 0
    assert versions(root) == [1]
    assert ludic("verify", root.url).out.endswith(f"{root.url} is sound\n")


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
    assert "wanted --keep-versions N" in " ".join(refused.err.replace("│", " ").split())
