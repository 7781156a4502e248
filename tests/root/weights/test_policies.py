import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ludic.errors import SchemaError, StoreError
from ludic.root.json_records import LatestPolicy
from ludic.root.root import Root
from ludic.root.weights.policies import (
    fetch_policy,
    latest_policy,
    point_latest,
    policy_folder,
    policy_versions,
    prune_policies,
    publish_policy,
)

on_one_filesystem = pytest.mark.parametrize("root_url", ["memory"], indirect=True)


class TrainerKilledError(Exception):
    pass


def save_weights(text: str):
    """A `save` that writes a folder as save_pretrained does, config.json first."""

    def save(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text(text)

    return save


def publish(root, text="weights", *, save=None, attempt_id=1, step=0, budget=12) -> int:
    return publish_policy(
        root,
        save or save_weights(text),
        step=step,
        attempt_id=attempt_id,
        parent_version=None,
        budget=budget,
    )


def publish_and_die(root) -> None:
    """Killed after config.json, before the weights."""

    def save(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise TrainerKilledError

    with pytest.raises(TrainerKilledError):
        publish(root, save=save)


def weights_of(root, version: int, cache: Path) -> str:
    return (Path(fetch_policy(root, version, cache)) / "model.safetensors").read_text()


def test_there_is_no_policy_before_the_first(root):
    assert latest_policy(root) is None
    assert policy_versions(root) == []


def test_versions_count_up_and_latest_names_the_newest(root, tmp_path):
    assert [publish(root, text) for text in ("a", "b", "c")] == [0, 1, 2]
    assert latest_policy(root) == LatestPolicy(version=2, budget=12)
    assert policy_versions(root) == [0, 1, 2]
    assert [weights_of(root, version, tmp_path / f"cache-{version}") for version in (0, 1, 2)] == ["a", "b", "c"]


@on_one_filesystem
def test_policy_json_says_where_the_weights_came_from(root):
    publish(root)
    publish_policy(root, save_weights("b"), step=7, attempt_id=3, parent_version=0, budget=1)
    policy = json.loads(root.read("policies/version=1/policy.json"))
    assert {name: policy[name] for name in ("version", "step", "attempt_id", "parent_version")} == {
        "version": 1,
        "step": 7,
        "attempt_id": 3,
        "parent_version": 0,
    }


def test_latest_is_replaced_only_when_all_weights_are_there(root, tmp_path):
    publish(root, "old")
    seen = []

    def save(folder: Path) -> None:
        save_weights("new")(folder)
        seen.append((latest_policy(root).version, root.list("policies/version=1")))

    publish(root, save=save)
    assert seen == [(0, ["policies/version=1/policy.json"])]
    assert weights_of(root, 1, tmp_path) == "new"


@on_one_filesystem
def test_a_claim_of_a_trainer_that_died_is_never_used_again_nor_seen(root, tmp_path):
    publish(root, "a")
    publish_and_die(root)
    assert latest_policy(root).version == 0
    with pytest.raises(FileNotFoundError, match="policies/version=1 holds no weights"):
        fetch_policy(root, 1, tmp_path)
    assert publish(root, "c") == 2
    assert weights_of(root, 2, tmp_path) == "c"


def test_weights_that_were_published_in_part_are_no_policy(unreliable_root, tmp_path, monkeypatch):
    move_in = Root._move_in

    def fail(self, folder, file: str, name: str) -> None:
        if file == "model.safetensors":
            raise StoreError(f"{name}: the disk is full")
        move_in(self, folder, file, name)

    with monkeypatch.context() as full:
        full.setattr(Root, "_move_in", fail)
        with pytest.raises(StoreError, match=r"model\.safetensors: the disk is full"):
            publish(unreliable_root)
    assert unreliable_root.list("policies")
    assert latest_policy(unreliable_root) is None
    with pytest.raises(FileNotFoundError, match="policies/version=0 holds no weights"):
        fetch_policy(unreliable_root, 0, tmp_path)


@on_one_filesystem
def test_a_version_is_not_used_again_when_latest_is_lost(root):
    publish(root)
    publish(root)
    root.delete("policies/LATEST")
    assert publish(root) == 2


def test_trainers_that_publish_at_once_get_versions_of_their_own(root):
    with ThreadPoolExecutor(4) as pool:
        versions = list(pool.map(lambda attempt_id: publish(root, attempt_id=attempt_id), range(4)))
    assert sorted(versions) == [0, 1, 2, 3]


@on_one_filesystem
def test_the_quota_is_raised_without_a_new_version(root):
    publish(root)
    point_latest(root, LatestPolicy(version=0, budget=99))
    assert latest_policy(root) == LatestPolicy(version=0, budget=99)


@on_one_filesystem
def test_weights_that_changed_since_they_were_published_are_refused(root, tmp_path):
    publish(root, "a")
    root.put("policies/version=0/model.safetensors", b"b")
    with pytest.raises(
        SchemaError, match=f"^{root.url}/policies/version=0/model.safetensors does not match its digest"
    ):
        fetch_policy(root, 0, tmp_path)
    root.put("policies/version=0/model.safetensors", b"a")
    assert weights_of(root, 0, tmp_path) == "a"


@on_one_filesystem
def test_weights_that_were_lost_since_they_were_published_are_missed(root, tmp_path):
    publish(root, "a")
    root.delete("policies/version=0/model.safetensors")
    with pytest.raises(SchemaError, match=r"version=0/model\.safetensors is missing, though digests\.json lists it"):
        fetch_policy(root, 0, tmp_path)


def test_pruning_keeps_the_newest_and_every_policy_json(root, tmp_path):
    for text in "abcde":
        publish(root, text)
    prune_policies(root, keep=2, latest_version=4)
    assert [len(root.list(policy_folder(version))) for version in range(5)] == [1, 1, 1, 4, 4]
    assert weights_of(root, 3, tmp_path) == "d"
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        fetch_policy(root, 2, tmp_path)
    assert publish(root) == 5


@on_one_filesystem
def test_pruning_takes_what_a_killed_trainer_left(root):
    publish(root)
    root.put("policies/version=1/policy.json", b"{}")
    root.put("policies/version=1/model.safetensors", b"half")
    for _ in range(3):
        publish(root)
    prune_policies(root, keep=1, latest_version=4)
    assert root.list("policies/version=1") == ["policies/version=1/policy.json"]


def test_weights_of_a_far_root_are_copied_once_and_only_two_versions_kept(root, tmp_path):
    for text in "abc":
        publish(root, text)
    for version in range(3):
        assert weights_of(root, version, tmp_path) == "abc"[version]
    copies = sorted(path.name for path in tmp_path.glob("version=*"))
    assert copies == ([] if root.is_local else ["version=1", "version=2"])
    root.delete("policies/version=2/model.safetensors")
    if not root.is_local:
        assert weights_of(root, 2, tmp_path) == "c"


@pytest.mark.parametrize("root_url", ["memory", "s3"], indirect=True)
def test_a_copy_that_breaks_off_is_made_anew(root, tmp_path):
    publish(root, "weights")
    data = root.read("policies/version=0/model.safetensors")
    shutil.rmtree(tmp_path)
    tmp_path.write_text("a file where the cache should be")
    with pytest.raises(OSError, match="exists"):
        fetch_policy(root, 0, tmp_path)
    tmp_path.unlink()
    assert weights_of(root, 0, tmp_path) == data.decode()
    assert [path.name for path in tmp_path.iterdir()] == ["version=0"]


def test_workers_that_share_a_cache_all_get_the_weights(root, tmp_path):
    publish(root, "weights")
    start = threading.Barrier(4)

    def fetch(_: int) -> str:
        start.wait()
        return weights_of(root, 0, tmp_path)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(fetch, range(4))) == ["weights"] * 4
