"""Scratch folders: in the root where only this user can rename, else by a descriptor, else on this machine."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ludic.base.temporary import is_protected
from ludic.errors import SchemaError, StoreError
from ludic.root.root import Root
from ludic.root.storage import local
from ludic.root.storage.filesystem import Storage
from ludic.run.run_json import put_run

OTHER, THIRD = 54_321, 54_322
"""Ids of users that the machine need not know."""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has paths of descriptors")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to other users")


@pytest.fixture
def root(tmp_path: Path, run_config) -> Root:
    """A root that only this user may change; its folders have names of their own."""
    return put_run(str(tmp_path / "above" / "run"), run_config)


def is_in(folder: Path, root: Root) -> bool:
    return Path(root.path).resolve() in folder.parents


def is_descriptor(folder: Path) -> bool:
    return folder.parent == Path("/proc/self/fd")


def check_upload(root: Root, folder: Path) -> bool:
    """Move two files in, and return whether they are the same files rather than copies."""
    (folder / "below").mkdir()
    for name in ("a.json", "below/b.json"):
        (folder / name).write_text(name)
    before = [(folder / name).stat().st_ino for name in ("a.json", "below/b.json")]
    root.upload(folder, "uploaded", last="a.json")
    after = [Path(root.path, "uploaded", name) for name in ("a.json", "below/b.json")]
    assert [path.read_text() for path in after] == ["a.json", "below/b.json"]
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    return [path.stat().st_ino for path in after] == before


def left(root: Root) -> list[Path]:
    return [*Path(root.path, ".tmp").iterdir()]


def test_where_only_this_user_can_rename_it_is_in_the_root_and_files_are_moved(root: Root) -> None:
    with root.scratch_folder() as folder:
        assert is_in(folder, root)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert check_upload(root, folder)
    assert left(root) == []


OPENED = {
    "all may write in the root": lambda root: root.chmod(0o777),
    "a group may write in the root": lambda root: root.chmod(0o775),
    "all may rename the root": lambda root: root.parent.chmod(0o777),
    "all may write in .tmp": lambda root: (root / ".tmp").chmod(0o777),
    "another user owns the root": lambda root: os.chown(root, OTHER, -1),
    "another user owns the folder above": lambda root: os.chown(root.parent, OTHER, -1),
    "another user owns .tmp": lambda root: os.chown(root / ".tmp", OTHER, -1),
    "another user owns the root, which is as /tmp": lambda root: (root.chmod(0o1777), os.chown(root, OTHER, -1)),
}
"""Ways to let other users rename what is on the way to a scratch folder."""


@pytest.fixture(params=[pytest.param(way, marks=as_root if "another" in way else ()) for way in OPENED])
def open_root(request: pytest.FixtureRequest, root: Root) -> Root:
    OPENED[request.param](Path(root.path))
    return root


@on_linux
def test_where_others_can_rename_it_is_reached_by_its_descriptor_and_files_are_still_moved(open_root: Root) -> None:
    with open_root.scratch_folder() as folder:
        assert is_descriptor(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert check_upload(open_root, folder)
    assert left(open_root) == []


@pytest.mark.parametrize("where", [".", ".."])
def test_the_sticky_bit_protects_as_in_tmp(root: Root, where: str) -> None:
    Path(root.path, where).resolve().chmod(0o1777)
    with root.scratch_folder() as folder:
        assert is_in(folder, root)
    Path(root.path, ".tmp").chmod(0o1777)
    with root.scratch_folder() as folder:
        assert is_in(folder, root)


@pytest.fixture
def without_paths_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_DESCRIPTORS", Path("/nowhere"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's temporary folder."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.usefixtures("without_paths_of_descriptors")
def test_on_other_systems_it_is_on_this_machine_and_files_are_moved_in(open_root: Root, machine: Path) -> None:
    with open_root.scratch_folder() as folder:
        assert folder.parent == machine
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        check_upload(open_root, folder)
        (folder / "c.json").write_text("c")
        assert open_root.put_file_if_absent(folder / "c.json", "c.json")
    assert left(open_root) == [*machine.iterdir()] == []


@pytest.mark.usefixtures("without_paths_of_descriptors")
def test_where_not_even_the_machine_has_a_place_of_this_user_nothing_is_written(root: Root, machine: Path) -> None:
    Path(root.path).chmod(0o777)
    machine.chmod(0o777)
    with (
        pytest.raises(StoreError, match=r"^other users can rename folders of .*/tmp, .* set TMPDIR to a folder of"),
        root.scratch_folder(),
    ):
        raise AssertionError("a folder was given")
    assert left(root) == [*machine.iterdir()] == []


def test_a_disk_that_knows_no_modes_or_users_gets_a_folder_of_this_machine(
    root: Root, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disks of CIFS and FAT may say 777 of all, and NFS that root's files are nobody's."""
    path_for_others = local.OpenFolder.path_for_others

    def of_such_a_disk(folder: local.OpenFolder) -> Path | None:
        if folder.path.parent.name == ".tmp":
            os.fchmod(folder.descriptor, 0o777)
        return path_for_others(folder)

    monkeypatch.setattr(local.OpenFolder, "path_for_others", of_such_a_disk)
    with root.scratch_folder() as folder:
        assert folder.parent == machine
        check_upload(root, folder)


def test_a_folder_that_takes_its_place_before_it_is_opened_is_not_taken(
    root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/id_rsa").write_text("key")
    mkdir = os.mkdir

    def swap(name: str, *args: object, **options: object) -> None:
        mkdir(name, *args, **options)
        if str(name).startswith("ludic-"):
            made = Path(root.path, ".tmp", name)
            made.rename(made.with_name("moved"))
            (tmp_path / "victim").rename(made)

    monkeypatch.setattr(os, "mkdir", swap)
    with pytest.raises(SchemaError, match=r"was replaced right after its creation"), root.scratch_folder():
        raise AssertionError("a folder was given")
    assert [path.read_text() for path in Path(root.path, ".tmp").glob("*/id_rsa")] == ["key"]


def test_what_took_its_place_is_left_alone_at_the_end_and_its_own_files_are_deleted(root: Root, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/id_rsa").write_text("key")
    with root.scratch_folder() as folder:
        (folder / "large").write_text("large")
        moved = folder.rename(folder.with_name("moved"))
        folder.symlink_to(tmp_path / "victim")
    assert (tmp_path / "victim/id_rsa").read_text() == "key"
    assert [*moved.iterdir()] == []
    Path(root.path, ".tmp").rename(tmp_path / "gone")
    with root.scratch_folder():
        shutil.rmtree(root.path)


def test_a_link_in_a_scratch_folder_is_not_given_a_name_in_the_root(root: Root, tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("key")
    with root.scratch_folder() as folder:
        (folder / "link").symlink_to(tmp_path / "id_rsa")
        for put in (root.move_in, root.put_file_if_absent):
            with pytest.raises(SchemaError, match=r"link is a symbolic link, a pipe or a device, wanted a file"):
                put(folder / "link", "a.json")
    assert (root.list(""), (tmp_path / "id_rsa").read_text()) == (["run.json"], "key")


@pytest.mark.parametrize(
    ("mode", "above", "expected"),
    [(0o700, 0o755, True), (0o755, 0o1777, True), (0o1777, 0o755, False), (0o700, 0o777, False), (0o770, 0o755, False)],
)
def test_protected_is_what_nobody_else_can_write_in_or_rename(
    tmp_path: Path, mode: int, above: int, expected: bool
) -> None:
    folder = tmp_path.resolve() / "above" / "folder"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    folder.parent.chmod(above)
    assert is_protected(folder) is expected
    (tmp_path / "link").symlink_to(folder)
    assert not is_protected(tmp_path.resolve() / "link")


# --- Other users, really -------------------------------------------------------------------------------------------

SCRIPT = f"""
import os, sys
from pathlib import Path
from ludic.root.storage.filesystem import Storage
from ludic.root.root import Root

def become(user):
    os.seteuid(0)
    os.seteuid(user)

become({OTHER})
root = Root.open(sys.argv[1], writable=True)
with root.scratch_folder() as folder:
    print(folder.parent, oct(folder.stat().st_mode & 0o7777))
    (folder / "config.json").write_text("{{}}")
    (scratch,) = Path(root.path, ".tmp").glob("ludic-*")
    become({THIRD})
    for attack in (lambda: list(scratch.iterdir()), lambda: (scratch / "x").write_text("x"),
                   lambda: scratch.rename(scratch.with_name("moved"))):
        try:
            attack()
            print("done")
        except PermissionError:
            print("refused")
    if not scratch.exists():
        scratch.symlink_to(sys.argv[2])
    become({OTHER})
    (folder / "model.json").write_text("mine")
    root.upload(folder, "policies/version=0")
print(*root.list("policies"))
"""


@pytest.fixture
def for_all() -> Iterator[Path]:
    """A folder that all users reach; pytest's own is private."""
    folder = Path(tempfile.mkdtemp()).resolve()
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@on_linux
@as_root
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "rename"), [(0o777, "done"), (0o1777, "refused")])
def test_another_user_may_rename_a_scratch_folder_at_most_and_gets_nothing(
    for_all: Path, run_config, mode: int, rename: str
) -> None:
    root = put_run(str(for_all / "run"), run_config)
    for folder in (Path(root.path), Path(root.path, ".tmp")):
        folder.chmod(mode)
    victim = for_all / "victim"
    victim.mkdir()
    (victim / "config.json").write_text("the victim's own")
    os.chown(victim, OTHER, -1)
    os.chown(victim / "config.json", OTHER, -1)
    Path(root.path, "policies").mkdir()
    os.chown(Path(root.path, "policies"), OTHER, -1)
    done = subprocess.run([sys.executable, "-c", SCRIPT, root.url, str(victim)], capture_output=True, text=True)
    where = "/proc/self/fd" if rename == "done" else f"{root.path}/.tmp"
    names = [f"policies/version=0/{name}.json" for name in ("config", "model")]
    assert done.stdout.split() == [where, "0o700", "refused", "refused", rename, *names], done.stderr
    assert [path.read_text() for path in victim.iterdir()] == ["the victim's own"]
    assert root.read(names[0]) == b"{}"


def test_a_disk_that_is_read_only_is_named_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = os.open

    def refused(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(StoreError) as caught:
        Storage.connect(str(tmp_path)).put("run.json", b"{}")
    assert f"Permission denied: '{tmp_path}/.tmp'; this user may not write to the folder" in str(caught.value)


def test_a_file_in_the_place_of_a_root_is_named_and_nobody_is_told_to_delete_it(tmp_path: Path):
    (tmp_path / "afile").write_text("mine")
    with pytest.raises(SchemaError) as caught:
        Storage.connect(f"{tmp_path}/afile").read("run.json")
    said = f"{tmp_path}/afile is a file, wanted a folder; choose another folder, or move it away"
    assert str(caught.value) == said
