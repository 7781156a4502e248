"""`ludic compact`: what it prints, and what it takes for sealed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from strategies import make_batch

from ludic.root.attempts import start_attempt
from ludic.root.json_records import LatestPolicy
from ludic.root.root import Root
from ludic.root.rows.files import RolloutFile, list_files
from ludic.root.rows.writer import RolloutWriter
from ludic.root.weights.policies import point_latest


@pytest.fixture
def filled(started: Root) -> Root:
    """Three files in each of versions 0 to 2."""
    fill(started)
    return started


def fill(root: Root, num_versions: int = 3) -> None:
    with RolloutWriter(root, "w5-test") as writer:
        for index in range(3 * num_versions):
            batch = make_batch(worker_id="w5-test", num_groups=1, seed=100 + index, policy_version=index // 3)
            writer.append(batch)
            writer.flush()


def compacted_versions(root: Root) -> set[int]:
    return {file.version for file in list_files(root) if file.is_compacted}


def test_a_finished_run_is_compacted_whole(ludic, filled: Root) -> None:
    result = ludic("compact", filled.url, "--all-versions")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].split() == ["partition", "files", "then", "bytes", "then"]
    assert [line.split()[:3] for line in lines[2:5]] == [
        [f"rollouts/version={version}/env=moar_cats", "3", "1"] for version in range(3)
    ]
    assert lines[5] == "9 files of 3 partitions became 3"
    assert ludic("compact", filled.url, "--all-versions").out == "there is nothing to compact\n"


def test_only_sealed_versions_are_taken_unless_told(ludic, filled: Root) -> None:
    assert ludic("compact", filled.url).out == (
        "no version is sealed yet: name one with --before, or use --all-versions for a finished run\n"
    )
    start_attempt(filled, config={"max_off_policy_steps": 1})
    point_latest(filled, LatestPolicy(version=2, budget=1))
    assert ludic("compact", filled.url).code == 0
    assert compacted_versions(filled) == {0}
    assert ludic("compact", filled.url, "--before", "2").code == 0
    assert compacted_versions(filled) == {0, 1}


def test_a_dry_run_prints_and_leaves_all(ludic, filled: Root) -> None:
    names = filled.list("")
    assert ludic("compact", filled.url, "--all-versions", "--dry-run").out.splitlines()[-1] == (
        "9 files of 3 partitions would become 3"
    )
    assert filled.list("") == names


def test_json_says_what_was_done_and_what_was_left(ludic, filled: Root) -> None:
    torn = RolloutFile(0, "moar_cats", "torn", 0).name
    filled.put(torn, b"torn")
    printed = json.loads(ludic("compact", filled.url, "--before", "1", "--json").out)
    assert (printed["root"], printed["before"], printed["dry_run"]) == (filled.url, 1, False)
    (partition,) = printed["partitions"]
    assert (partition["num_files_before"], partition["num_files_after"]) == (4, 2)
    (skipped,) = printed["skipped"]
    assert skipped["name"] == torn


def test_what_was_left_alone_is_named(ludic, filled: Root) -> None:
    filled.put(RolloutFile(0, "moar_cats", "torn", 0).name, b"torn")
    lines = ludic("compact", filled.url, "--all-versions").out.splitlines()
    (left,) = [line for line in lines if line.startswith("left alone")]
    assert left.startswith("left alone: rollouts/version=0/env=moar_cats/torn-0.parquet: ")


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--all-versions", "--before", "3"], "all_versions and before contradict each other; give one of them"),
        (["--target-mb", "0"], "--target-mb is 0, wanted at least 1"),
    ],
)
def test_contradictions_are_wrong_usage(ludic, filled: Root, args: list[str], problem: str) -> None:
    result = ludic("compact", filled.url, *args)
    assert result.code == 2
    assert problem in " ".join(result.err.replace("│", " ").split())


def test_a_folder_without_a_run_is_one_line(ludic, tmp_path: Path) -> None:
    result = ludic("compact", tmp_path / "nothing")
    assert result.code == 1
    assert len(result.err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("root_url", ["local", "memory"], indirect=True)
def test_a_trained_run_stays_sound(ludic, root_url: str, make_trained: Callable[[str], Root]) -> None:
    root = make_trained(root_url)
    fill(root, num_versions=2)
    count = "select count(*), count(distinct rollout_id), max(episode_reward) from rollouts"
    before = ludic("sql", root.url, count).out
    assert ludic("compact", root.url, "--all-versions").code == 0
    assert compacted_versions(root) == {0, 1}
    assert ludic("sql", root.url, count).out == before
    assert ludic("verify", root.url).out.endswith(f"{root.url} is sound\n")
