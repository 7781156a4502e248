import errno
import json
import os
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import PurePosixPath

import fsspec
import pytest
from filesystems import OverwritingFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.errors import ConfigError, MissingRootError, SchemaError, StoreError
from ludic.root.catalogue import RUN
from ludic.root.root import Root
from ludic.root.storage.filesystem import TAIL_BYTES, Storage
from ludic.run.config import RunConfig
from ludic.run.run_json import from_json, put_run, run_of, to_json


def test_a_created_root_opens_with_the_same_run(root_url, run_config):
    created = put_run(root_url, run_config)
    opened = Root.open(root_url)
    assert (run_of(opened), opened.run_id, opened.url) == (run_config, created.run_id, root_url)


def test_creating_again_with_the_same_settings_resumes_the_run(root_url, run_config):
    assert put_run(root_url, run_config).run_id == put_run(f"{root_url}/", run_config).run_id


def test_creating_again_with_other_settings_names_each_that_differs(root, root_url, run_config):
    other = replace(run_config, group_size=5, seed=9)
    with pytest.raises(ConfigError, match=r"group_size is 4 there, 5 was asked for, seed is 0 there, 9") as caught:
        put_run(root_url, other)
    assert "model" not in str(caught.value)
    assert run_of(Root.open(root_url)) == run_config


def test_opening_where_no_run_is_says_so(root_url):
    with pytest.raises(MissingRootError, match=r"holds no run: run\.json is missing"):
        Root.open(root_url)


def test_a_run_json_that_is_none_is_named(root, root_url):
    for text in ("", "[]", "{}", '{"run_id": "x", "schema_version": "1.0"}', "\x00"):
        root.put(RUN.template, text.encode())
        with pytest.raises(ConfigError, match=r"run\.json is not a run\.json that ludic can read"):
            Root.open(root_url)


def test_a_run_of_a_newer_ludic_is_refused_by_version(root, root_url):
    root.put(RUN.template, json.dumps({**json.loads(root.read(RUN.template)), "schema_version": "2.0"}).encode())
    with pytest.raises(ConfigError, match=r"has schema 2\.0, this ludic reads 1\."):
        Root.open(root_url)


def test_put_if_absent_creates_once(root):
    assert root.put_if_absent("a/b.bin", b"first")
    assert not root.put_if_absent("a/b.bin", b"second")
    assert root.read("a/b.bin") == b"first"


def test_put_if_absent_of_the_same_bytes_is_a_retry(root):
    assert root.put_if_absent("a/b.bin", b"first")
    assert root.put_if_absent("a/b.bin", b"first")


def test_a_put_whose_answer_was_lost_is_retried_without_harm(unreliable_root):
    unreliable_root.fs.failures_after.append(OSError("the answer was lost"))
    with pytest.raises(StoreError, match="the answer was lost"):
        unreliable_root.put_if_absent("a.bin", b"mine")
    assert unreliable_root.put_if_absent("a.bin", b"mine")
    assert not unreliable_root.put_if_absent("a.bin", b"another's")


def test_of_many_that_create_one_file_one_succeeds(root):
    start = threading.Barrier(8)

    def create(number: int) -> bool:
        start.wait()
        return root.put_if_absent("contended.bin", b"%d" % number)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert root.read("contended.bin") == b"%d" % won.index(True)


def test_a_file_is_created_once_from_a_local_one_that_stays(root, tmp_path):
    for name in ("first", "same_size", "longer"):
        (tmp_path / name).write_bytes(name.encode()[:5] * (1 + (name == "longer")))
    assert root.put_file_if_absent(tmp_path / "first", "a/b.bin")
    assert not root.put_file_if_absent(tmp_path / "same_size", "a/b.bin")
    assert not root.put_file_if_absent(tmp_path / "longer", "a/b.bin")
    assert root.put_file_if_absent(tmp_path / "first", "a/b.bin")
    assert root.read("a/b.bin") == (tmp_path / "first").read_bytes() == b"first"
    assert root.list("") == ["a/b.bin", "run.json"]


def test_of_many_that_create_one_file_from_local_ones_one_succeeds(root):
    start = threading.Barrier(8)

    def create(number: int) -> bool:
        with root.scratch_folder() as folder:
            (folder / "file").write_bytes(b"%d" % number)
            start.wait()
            return root.put_file_if_absent(folder / "file", "contended.bin")

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert root.read("contended.bin") == b"%d" % won.index(True)


def test_a_local_file_in_the_scratch_folder_is_linked_and_not_copied(tmp_path, run_config):
    root = put_run(str(tmp_path), run_config)
    with root.scratch_folder() as folder:
        (folder / "large").write_bytes(b"content")
        assert root.put_file_if_absent(folder / "large", "a.bin")
        assert (tmp_path / "a.bin").samefile(folder / "large")
    assert root.read("a.bin") == b"content"


def no_hard_links(source, target, **folders):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(target))


def test_a_disk_without_hard_links_and_exclusive_renames_is_refused(tmp_path, run_config, monkeypatch):
    monkeypatch.setattr(os, "link", no_hard_links)
    monkeypatch.setattr(sys, "platform", "plan9")
    with pytest.raises(StoreError, match=r"run\.json: .*neither hard links nor .*: choose another disk"):
        put_run(str(tmp_path), run_config)
    assert not (tmp_path / "run.json").exists()


def test_without_hard_links_an_exclusive_rename_keeps_the_promise(tmp_path, run_config, monkeypatch):
    """exFAT and many FUSE mounts answer link(2) like this."""
    monkeypatch.setattr(os, "link", no_hard_links)
    root = put_run(str(tmp_path / "run"), run_config)
    assert root.put_if_absent("a/b.bin", b"first")
    assert root.put_if_absent("a/b.bin", b"first")
    assert not root.put_if_absent("a/b.bin", b"second")
    (tmp_path / "file").write_bytes(b"third")
    assert not root.put_file_if_absent(tmp_path / "file", "a/b.bin")
    assert root.put_file_if_absent(tmp_path / "file", "c.bin")
    assert (tmp_path / "file").exists()
    assert [root.read(name) for name in ("a/b.bin", "c.bin")] == [b"first", b"third"]
    assert root.list("") == ["a/b.bin", "c.bin", "run.json"]


def test_put_replaces(root):
    root.put("policies/LATEST", b"1")
    root.put("policies/LATEST", b"22")
    assert root.read("policies/LATEST") == b"22"


def test_what_another_process_changed_is_seen_at_once(root):
    """No listing and no content is remembered between two looks."""
    other = replace(root, fs=type(root.fs)(skip_instance_cache=True))
    assert other.fs is not root.fs
    assert root.list("a") == root.folders("a") == []
    assert not root.exists("a/x.bin")
    other.put("a/x.bin", b"1")
    assert root.list("a") == ["a/x.bin"]
    assert root.exists("a/x.bin")
    assert root.read("a/x.bin") == b"1"
    other.put("a/b/y.bin", b"2")
    other.put("a/x.bin", b"longer")
    assert root.list("a") == ["a/b/y.bin", "a/x.bin"]
    assert root.folders("a") == ["a/b"]
    with root.open_file("a/x.bin") as file:
        assert file.read() == b"longer"
    other.delete("a/x.bin")
    assert not root.exists("a/x.bin")
    assert root.list("a") == ["a/b/y.bin"]


def test_sizes_are_those_of_all_files_below_a_folder(root):
    for name, data in {"a/x.bin": b"12345", "a/b/y.bin": b"", "ab.bin": b"1"}.items():
        root.put(name, data)
    assert root.sizes("a") == {"a/b/y.bin": 0, "a/x.bin": 5}
    assert root.sizes("nowhere") == {}


def test_a_folder_is_not_mistaken_for_one_whose_name_goes_on(root):
    for name in ("version=1/x.bin", "version=10/x.bin"):
        root.put(name, b"")
    assert root.list("version=1") == list(root.sizes("version=1")) == ["version=1/x.bin"]


def test_names_keep_every_sign(root):
    names = ["env=a%2Fb/x y.bin", "env=\u00fc~+[a]@:&/x.bin", "env=a%2Fb/.hidden"]
    for name in names:
        assert root.put_if_absent(name, name.encode())
    assert root.list("") == sorted([*names, "run.json"])
    assert [root.read(name).decode() for name in names] == names
    root.delete("env=a%2Fb")
    assert root.list("") == [names[1], "run.json"]


def test_a_range_is_read_without_the_rest(root):
    root.put("a.bin", b"0123456789")
    assert root.read_range("a.bin", 2, 5) == b"234"
    assert root.read_range("a.bin", 7) == b"789"
    assert root.read_range("a.bin", -2) == b"89"
    assert root.read_range("a.bin", 5, 5) == b""


@pytest.mark.parametrize("size", [0, TAIL_BYTES - 1, TAIL_BYTES, TAIL_BYTES + 1])
def test_a_file_is_read_at_random_whatever_its_size(root, size):
    data = random.Random(size).randbytes(size)
    root.put("a.bin", data)
    with root.open_file("a.bin") as file:
        assert file.read() == data
        for start in (0, size // 3, size - TAIL_BYTES - 5, size - 1, size + 10):
            start = max(0, start)
            assert file.seek(start) == start
            assert file.read(7) == data[start : start + 7]
            assert file.tell() == start + len(data[start : start + 7])
        assert file.seek(-min(3, size), 2) == size - min(3, size)
        assert file.read() == data[size - min(3, size) :]


def test_a_missing_file_is_a_file_not_found(root):
    with pytest.raises(FileNotFoundError):
        root.read("nowhere.bin")
    with pytest.raises(FileNotFoundError):
        root.read_range("nowhere.bin", 0, 1)
    with pytest.raises(FileNotFoundError):
        root.open_file("nowhere.bin")


def test_delete_takes_a_file_or_a_folder_or_nothing(root):
    for name in ("a/x.bin", "a/y.bin", "b/x.bin", "ab.bin"):
        root.put(name, b"")
    root.delete("b/x.bin")
    root.delete("a")
    root.delete("nowhere")
    assert root.list("a") == root.list("b") == []
    assert root.exists("ab.bin")


@pytest.mark.parametrize(("name", "matched"), [("lr=[1]", "lr=1"), ("l*", "lr=1"), ("lr=?", "lr=1")])
def test_a_folder_whose_name_is_a_pattern_is_itself_and_not_what_it_matches(root_url, name, matched, tmp_path):
    mine, other = (Storage.connect(f"{root_url}/{each}") for each in (name, matched))
    for storage in (mine, other):
        storage.put("x/a", b"1")
        storage.put("x/b", b"2")
        storage.put("[12]", b"3")
        storage.put("1", b"4")
    assert mine.list("") == ["1", "[12]", "x/a", "x/b"]
    mine.copy_out("x/a", tmp_path / "out")
    mine.rename("x/a", "y*")
    mine.delete("[12]")
    mine.delete("x")
    mine.delete("y?")
    assert ((tmp_path / "out").read_bytes(), mine.sizes("")) == (b"1", {"1": 1, "y*": 1})
    assert other.list("") == ["1", "[12]", "x/a", "x/b"]


def test_two_threads_may_read_one_file(root):
    root.put("a.bin", bytes(range(256)) * 4096)
    with root.open_file("a.bin") as one, root.open_file("a.bin") as other:
        one.seek(256)
        assert other.read(3) == bytes([0, 1, 2])
        assert one.read(3) == bytes([0, 1, 2])
        one.seek(1000 * 256 + 7)
        assert other.read(2) == bytes([3, 4])
        assert one.read(1) == bytes([7])


def test_a_folder_is_uploaded_and_comes_back(root, tmp_path):
    names = ["a.safetensors", "config.json", "templates/tool.jinja", "z.json"]
    with root.scratch_folder() as folder:
        (folder / "templates").mkdir()
        for name in names:
            (folder / name).write_text(f"content of {name}")
        root.upload(folder, "policies/version=0", last="config.json")
    assert root.list("policies") == [f"policies/version=0/{name}" for name in names]
    copy = tmp_path / "copy"
    root.download("policies/version=0", copy)
    assert {name: (copy / name).read_text() for name in names} == {name: f"content of {name}" for name in names}
    assert {file.name for file in copy.iterdir()} == {"a.safetensors", "config.json", "templates", "z.json"}


def test_a_name_that_leads_out_of_the_folder_is_not_copied(unreliable_root, tmp_path):
    evil = "policies/version=0/../../evil.json"
    unreliable_root.put("policies/version=0/config.json", b"{}")
    unreliable_root.fs.pipe_file(f"{unreliable_root.path}/{evil}", b"{}")
    with pytest.raises(StoreError, match=r"evil\.json leads out of the copied folder"):
        unreliable_root.copy_all({evil: PurePosixPath("../../evil.json")}, tmp_path / "a" / "copy")
    assert not list(tmp_path.iterdir())
    unreliable_root.download("policies/version=0", tmp_path / "a" / "copy")  # a listing passes over it
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["config.json"]


def test_an_upload_that_breaks_off_leaves_no_marker(unreliable_root, tmp_path, monkeypatch):
    for name in ("a.safetensors", "b.safetensors", "config.json"):
        (tmp_path / name).write_text(name)
    put = type(unreliable_root.fs).put_file

    def fail_at_b(fs, source, *args, **options):
        if source.endswith("b.safetensors"):
            raise FileNotFoundError(source)
        put(fs, source, *args, **options)

    monkeypatch.setattr(type(unreliable_root.fs), "put_file", fail_at_b)
    with pytest.raises(StoreError, match=r"policies/version=0/b\.safetensors: FileNotFoundError: "):
        unreliable_root.upload(tmp_path, "policies/version=0", last="config.json")
    assert unreliable_root.list("policies") == ["policies/version=0/a.safetensors"]


@pytest.mark.parametrize("root_url", ["memory"], indirect=True)
@pytest.mark.parametrize("kind", ["a link", "a linked folder", "a dangling link", "a pipe"])
def test_an_upload_takes_files_only_and_refuses_before_it_moves_any(root, tmp_path, kind):
    (tmp_path / "private").mkdir()
    (tmp_path / "private/id_rsa").write_text("key")
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.json").write_text("{}")
    odd = folder / "sub/odd"
    if kind == "a pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to(tmp_path / {"a link": "private/id_rsa", "a linked folder": "private"}.get(kind, "nowhere"))
    with pytest.raises(SchemaError, match=r"sub/odd is a symbolic link, a pipe or a device, wanted a file"):
        root.upload(folder, "policies/version=0")
    assert root.list("") == ["run.json"]
    assert (tmp_path / "private/id_rsa").read_text() == "key"


def test_nothing_temporary_is_left_or_seen(root):
    root.put_if_absent("a.bin", b"1")
    root.put_if_absent("a.bin", b"2")
    root.put("b.bin", b"1")
    with root.scratch_folder():
        pass
    assert root.list("") == ["a.bin", "b.bin", "run.json"]


def test_a_filesystem_that_overwrites_is_refused_when_a_run_starts(run_config):
    fsspec.register_implementation("overwriting", OverwritingFileSystem, clobber=True)
    with pytest.raises(StoreError, match="OverwritingFileSystem overwrites existing files even in create-only mode"):
        put_run("overwriting://start", run_config)


def test_a_filesystem_that_overwrites_is_refused_when_a_writer_opens(run_config):
    fsspec.register_implementation("overwriting", OverwritingFileSystem, clobber=True)
    put_run("memory://resumed", run_config)
    with pytest.raises(StoreError, match="ludic needs put-if-absent"):
        Root.open("overwriting://resumed", writable=True)
    assert run_of(Root.open("overwriting://resumed")) == run_config


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values, max_size=3).map(tuple) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=5,
)


@settings(max_examples=30)
@given(st.dictionaries(st.text(), st.dictionaries(st.text(), json_values, max_size=2), max_size=2))
def test_options_never_differ_from_themselves_after_storage(options):
    config = RunConfig(model="m", env=("e",), env_options=options)
    stored = from_json(to_json(config, "an-id"), "run.json")
    assert config.differences(stored) == ""
    assert json.loads(json.dumps(asdict(stored))) == json.loads(json.dumps(asdict(config)))


@pytest.mark.parametrize("option", [float("nan"), object(), b"bytes"])
def test_options_that_json_cannot_hold_are_refused(option):
    config = RunConfig(model="m", env=("e",), env_options={"e": {"x": option}})
    with pytest.raises(ConfigError, match=r"env_options can't be written to run\.json"):
        to_json(config, "an-id")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("group_size", 0),
        ("groups_per_batch", 0),
        ("steps_per_version", -1),
        ("num_workers", 0),
        ("max_tokens", 0),
        ("batches_ahead", -1),
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("env", ()),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(setting, value):
    with pytest.raises(ConfigError, match=setting):
        RunConfig(**{"model": "m", "env": ("e",), setting: value})


def test_groups_per_version_covers_all_its_steps():
    assert RunConfig(model="m", env=("e",), groups_per_batch=3, steps_per_version=4).groups_per_version == 12
