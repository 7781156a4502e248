"""Versions that are differences to earlier ones: every reader gets the published bytes, or an error and none."""

import json
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ludic.errors import SchemaError
from ludic.root.json_records import LatestPolicy
from ludic.root.weights.policies import (
    PolicyWriter,
    claim_policy,
    copy_policy,
    fetch_policy,
    point_latest,
    policy_folder,
    prune_policies,
    stored_versions,
)

WEIGHTS = "model.safetensors"

locally = pytest.mark.parametrize("root_url", ["local"], indirect=True)
"""For what does not depend on how files are stored."""


class Versions:
    """Publishes random updates of two tensors of 16-bit words, and remembers the bytes of every version."""

    def __init__(self, root, *, full_every: int, size: int = 3000, seed: int = 0) -> None:
        self.root, self.writer = root, PolicyWriter(root, full_every)
        self.bytes: dict[int, bytes] = {}
        self._random = np.random.default_rng(seed)
        self._tensors = {name: self._random.integers(0, 2**16, size, dtype=np.uint16) for name in ("a", "b")}

    def update(self) -> None:
        for words in self._tensors.values():
            places = self._random.random(len(words)) < self._random.choice([0, 0.001, 0.01, 0.5])
            words += (places * self._random.choice([1, -1, 12345], len(words))).astype(np.uint16)

    def save(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer.json").write_text('{"model": "the same in every version"}')
        save_file(self._tensors, folder / WEIGHTS, metadata={"format": "pt"})

    def publish(self) -> int:
        version = claim_policy(self.root, step=0, attempt_id=1, parent_version=None)
        self.num_bytes = self.writer.write(version, self.save)
        self.bytes[version] = save_bytes(self)
        point_latest(self.root, LatestPolicy(version=version, budget=1))
        self.update()
        return version

    def check(self, version: int, cache: Path) -> None:
        """A worker with this cache gets the whole version, bit for bit."""
        folder = Path(fetch_policy(self.root, version, cache))
        assert (folder / WEIGHTS).read_bytes() == self.bytes[version]
        assert (folder / "config.json").read_text() == "{}"
        assert "the same" in (folder / "tokenizer.json").read_text()
        assert set(json.loads((folder / "digests.json").read_text())["files"]) == {
            *("config.json", "tokenizer.json", WEIGHTS)
        }


def save_bytes(versions: Versions) -> bytes:
    from safetensors.numpy import save

    return save(versions._tensors, metadata={"format": "pt"})


@pytest.fixture
def new_versions(root):
    made = []

    def make(**options) -> Versions:
        made.append(Versions(root, **options))
        return made[-1]

    yield make
    for versions in made:
        versions.writer.close()


def kinds(root, num_versions: int) -> str:
    """F for a full version, d for differences, - for one without weights."""
    found = [{name.rpartition("/")[2] for name in root.list(policy_folder(version))} for version in range(num_versions)]
    return "".join("F" if "config.json" in names else "d" if "delta.json" in names else "-" for names in found)


@locally
def test_every_kth_version_is_full_and_the_others_are_differences(new_versions, root):
    versions = new_versions(full_every=4)
    for _ in range(9):
        versions.publish()
    assert kinds(root, 9) == "FdddFdddF"
    assert stored_versions(root) == list(range(9))
    assert sorted(name.rpartition("/")[2] for name in root.list("policies/version=5")) == [
        *("delta.json", "digests.json", "model.safetensors.delta", "policy.json")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("root_url", "num_updates"), [("local", 58), ("memory", 30), ("s3", 16)], indirect=["root_url"]
)
def test_many_updates_are_read_bit_for_bit_by_a_worker_that_follows_and_by_late_ones(
    new_versions, root, tmp_path, num_updates
):
    versions = new_versions(full_every=7)
    for _ in range(num_updates):
        version = versions.publish()
        prune_policies(root, keep=2, latest_version=version)
        versions.check(version, tmp_path / "follows")
        if version % 9 == 0:
            versions.check(version, tmp_path / "sometimes")
        if version % 11 == 0:
            versions.check(version, tmp_path / f"late-{version}")
            versions.check(max(version - 1, 0), tmp_path / f"late-before-{version}")
    # The last two are kept; the first of them is full, as a multiple of 7, and nothing older is needed.
    last = num_updates - 1
    assert stored_versions(root) == [last - 1, last]
    assert sorted(path.name for path in (tmp_path / "follows").iterdir()) == (
        [f"version={last}"] if root.is_local else [f"version={last - 1}", f"version={last}"]
    )


@locally
def test_pruning_keeps_what_a_kept_version_needs_and_deletes_a_chain_at_once_when_it_ends(new_versions, root, tmp_path):
    versions = new_versions(full_every=12)
    for _ in range(13):
        versions.publish()
        prune_policies(root, keep=1, latest_version=max(versions.bytes))
        versions.check(max(versions.bytes), tmp_path / f"late-{max(versions.bytes)}")
    # Until version 11, its chain goes down to version 0; version 12 is full.
    assert kinds(root, 13) == "-" * 12 + "F"


@locally
def test_pruning_deletes_nothing_if_it_cant_see_what_is_needed(new_versions, root):
    versions = new_versions(full_every=4)
    for _ in range(4):
        versions.publish()
    root.put("policies/version=3/delta.json", b"{")
    prune_policies(root, keep=1, latest_version=3)
    assert kinds(root, 4) == "Fddd"


@locally
def test_a_damaged_difference_that_nobody_needs_is_deleted(new_versions, root):
    versions = new_versions(full_every=3)
    for _ in range(4):
        versions.publish()
    root.put("policies/version=1/delta.json", b"{")
    prune_policies(root, keep=1, latest_version=3)
    assert kinds(root, 4) == "---F"


def test_a_version_that_a_killed_trainer_left_half_written_is_skipped_and_the_next_trainer_begins_in_full(
    new_versions, root, tmp_path
):
    first = new_versions(full_every=4)
    first.publish()
    first.publish()

    def die(folder: Path) -> None:
        first.save(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.writer.write(claim_policy(root, step=0, attempt_id=1, parent_version=None), die)
    second = new_versions(full_every=4, seed=1)
    assert [second.publish(), second.publish()] == [3, 4]
    assert kinds(root, 5) == "Fd-Fd"
    first.check(1, tmp_path)
    second.check(4, tmp_path)
    with pytest.raises(FileNotFoundError, match="version=2 holds no weights"):
        fetch_policy(root, 2, tmp_path)


@locally
def test_a_version_after_a_write_that_failed_is_full(new_versions, root, tmp_path):
    versions = new_versions(full_every=4)
    versions.publish()

    def fail(folder: Path) -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        versions.writer.write(claim_policy(root, step=0, attempt_id=1, parent_version=None), fail)
    versions.check(versions.publish(), tmp_path)


def test_a_damaged_difference_is_refused_and_the_next_full_version_is_read(new_versions, root, tmp_path):
    versions = new_versions(full_every=3)
    for _ in range(4):
        versions.publish()
    name = "policies/version=1/model.safetensors.delta"
    sound = root.read(name)
    root.put(name, sound[:-20] + bytes(20))
    for version in (1, 2):
        with pytest.raises(SchemaError, match=r"version=1/model\.safetensors\.delta does not match its digest"):
            fetch_policy(root, version, tmp_path)
    assert list(tmp_path.glob("version=*")) == []
    versions.check(3, tmp_path)
    root.put(name, sound)
    versions.check(2, tmp_path / "other")


@locally
def test_differences_to_another_base_are_refused_by_the_digest_of_the_result(new_versions, root, tmp_path):
    versions = new_versions(full_every=3)
    for _ in range(2):
        versions.publish()
    # Another version 0, sound by itself.
    other = new_versions(full_every=3, seed=1)
    other.writer.write(0, other.save)
    with pytest.raises(SchemaError, match=r"version=1: the differences of model\.safetensors do not fit version 0"):
        fetch_policy(root, 1, tmp_path)
    assert list(tmp_path.glob("version=*")) == []


@locally
def test_a_missing_base_is_named(new_versions, root, tmp_path):
    versions = new_versions(full_every=3)
    for _ in range(3):
        versions.publish()
    root.delete("policies/version=0/config.json")
    with pytest.raises(FileNotFoundError, match="version=0 holds no weights; version 2 is a difference to it"):
        fetch_policy(root, 2, tmp_path)


@locally
def test_a_delta_json_of_another_version_is_refused(new_versions, root, tmp_path):
    versions = new_versions(full_every=3)
    for _ in range(3):
        versions.publish()
    root.put("policies/version=1/delta.json", root.read("policies/version=2/delta.json"))
    with pytest.raises(SchemaError, match="is of version 2 with base 1, wanted version 1 with an earlier base"):
        fetch_policy(root, 1, tmp_path)


@locally
def test_a_copy_of_the_base_that_was_damaged_in_the_cache_is_fetched_again(new_versions, root, tmp_path):
    versions = new_versions(full_every=9)
    for _ in range(2):
        versions.publish()
    versions.check(1, tmp_path)
    versions.publish()
    (tmp_path / "version=1" / WEIGHTS).write_bytes(b"damaged")
    versions.check(2, tmp_path)


@locally
def test_workers_that_share_a_cache_all_get_the_version(new_versions, root, tmp_path):
    versions = new_versions(full_every=9)
    for _ in range(3):
        versions.publish()
    start = threading.Barrier(4)

    def fetch(_: int) -> None:
        start.wait()
        versions.check(2, tmp_path)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fetch, range(4)))
    assert [path.name for path in tmp_path.glob("version=*")] == ["version=2"]


@pytest.mark.parametrize("root_url", ["local", "memory"], indirect=True)
def test_other_tensors_or_other_files_make_a_full_version(new_versions, root, tmp_path):
    versions = new_versions(full_every=9)
    versions.publish()
    versions._tensors["c"] = np.zeros(3, np.uint16)
    versions.publish()
    plain = versions.save

    def with_other_config(folder: Path) -> None:
        plain(folder)
        (folder / "generation_config.json").write_text("{}")

    versions.save = with_other_config
    versions.publish()
    assert kinds(root, 3) == "FFF"


@locally
def test_a_version_after_the_temporary_folder_was_cleaned_is_full(new_versions, root, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    versions = new_versions(full_every=9)
    versions.publish()
    (kept,) = tmp_path.glob("ludic-published-*/*")
    shutil.rmtree(kept)
    versions.check(versions.publish(), tmp_path / "cache")
    assert kinds(root, 2) == "FF"


@pytest.mark.parametrize("root_url", ["local", "memory"], indirect=True)
def test_nothing_is_left_on_the_local_disk_and_equal_versions_are_tiny(new_versions, root, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    versions = new_versions(full_every=9)
    versions.update = lambda: None
    for _ in range(3):
        versions.publish()
    assert versions.num_bytes < 1000
    versions.check(2, tmp_path / "cache")
    if root.is_local:
        assert list(Path(root.at(".tmp")).iterdir()) == []
    versions.writer.close()
    assert list(tmp_path.glob("ludic-*")) == []


@pytest.mark.parametrize("root_url", ["local", "memory"], indirect=True)
def test_a_copy_of_a_version_is_whole(new_versions, root, tmp_path):
    versions = new_versions(full_every=9)
    for _ in range(3):
        versions.publish()
    copy_policy(root, 2, tmp_path / "copy")
    assert (tmp_path / "copy" / WEIGHTS).read_bytes() == versions.bytes[2]
    shutil.rmtree(tmp_path / "copy")
