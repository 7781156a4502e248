"""Scratch folders in a place where others may rename: a link in their place leads nobody out of the root."""

import ast
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import create_root, fill, make_model, train_here

import ludic
from ludic.app.demos.words import open_demo
from ludic.app.launch.branch import start_branch
from ludic.eval.what_if.cut import cut
from ludic.root.attempts import begin_from_cut
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.storage import local
from ludic.root.storage.filesystem import Storage
from ludic.root.weights.policies import publish_policy
from ludic.run.run_json import create_root as start_root
from ludic.run.run_json import run_of

SECRET = b"the victim's own text"
PACKAGE = Path(ludic.__file__).parent
NAMES = ["config.json", "model.safetensors", "optimizer.safetensors", "random.safetensors", "digests.json"]
NAMES += ["tokenizer.json", "tokenizer_config.json", "compacted.parquet", "rows.parquet", "delta.json", "id_rsa"]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has paths of descriptors")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder in which every user may rename what is another's."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def state_of(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (folder, *sorted(folder.rglob("*")))
    return {str(path): (path.read_bytes() if path.is_file() else b"", path.lstat().st_mtime_ns) for path in files}


class Attacker:
    """Puts a link to the victim's folder in the place of each scratch folder, and notes whose it is."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim
        self.users: set[tuple[str, str]] = set()
        victim.mkdir()
        for name in NAMES:
            (victim / name).write_bytes(SECRET)
        self.before = state_of(victim)

    def swap(self, root: str) -> None:
        """Swap the scratch folders themselves."""
        for path in Path(root, local.SCRATCH).glob("ludic-*"):
            if not path.is_symlink():
                path.rename(path.with_name(f"moved-{path.name}"))
                path.symlink_to(self.victim)

    def swap_above(self, root: str) -> None:
        """Swap the folder above them; later temporary files go into that of the attacker."""
        folder = Path(root, local.SCRATCH)
        old = folder.rename(folder.with_name(f".moved-{os.urandom(4).hex()}"))
        folder.mkdir()
        for name in [path.name.removeprefix("moved-") for path in old.glob("*ludic-*") if not path.is_symlink()]:
            (folder / name).symlink_to(self.victim)

    def guide(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Swap as soon as a scratch folder is there, and again right before something is taken out of it."""
        inner = Storage.scratch_folder

        def scratch_folder(storage: Storage) -> AbstractContextManager[Path]:
            caller = sys._getframe(1).f_code
            self.users.add((Path(caller.co_filename).relative_to(PACKAGE).as_posix(), caller.co_name))

            @contextmanager
            def swapped() -> Iterator[Path]:
                with inner(storage) as folder:
                    self.swap(storage.path)
                    yield folder
                    assert stat.S_IMODE(folder.stat().st_mode) == 0o700

            return swapped()

        monkeypatch.setattr(Storage, "scratch_folder", scratch_folder)
        for name in ("move_in", "create_from"):
            monkeypatch.setattr(local, name, partial(self._then, getattr(local, name)))

    def _then(self, call: Callable[..., None], *args: Any) -> None:
        self.swap_above(args[-2])
        call(*args)

    def has_won(self, shared: Path) -> str:
        """What went through a link, or came out of it into the root."""
        if state_of(self.victim) != self.before:
            return "the victim's folder was changed"
        below = (path for path in shared.rglob("*") if path.is_file() and not path.is_symlink())
        return next((str(path) for path in below if SECRET in path.read_bytes()), "")


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def use_all(shared: Path) -> None:
    """Use each scratch folder of the package."""
    root = create_root(str(shared / "run"), make_model(shared / "model"))
    fill(root, num_files=3)
    settings: dict[str, Any] = {"checkpoint_every": 1, "keep_checkpoints": None, "full_version_every": 2}
    train_here(root, num_steps=2, **settings)
    train_here(root, num_steps=3, **settings)
    for step in (1, 3):
        cut(root, step, str(shared / f"cut-{step}"))
    begin_from_cut(start_root(str(shared / "replay"), run_of(root), like=root), Root.open(str(shared / "cut-3")))
    start_branch(str(shared / "branch"), root, 1)
    compact(root, before_version=1)
    publish_policy(root, write_config, step=4, attempt_id=2, parent_version=3)
    open_demo(str(shared / "demo"))


def users_in_the_code() -> set[tuple[str, str]]:
    """Files and functions that ask for a scratch folder."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        tree = ast.parse(text if "scratch_folder" in text else "")
        for function in ast.walk(tree):  # outer ones first, so that the innermost one stays
            if isinstance(function, ast.FunctionDef):
                inner = [n for n in ast.walk(function) if isinstance(n, ast.FunctionDef) and n is not function]
                own = set(ast.walk(function)) - {node for each in inner for node in ast.walk(each)}
                calls = [node.func for node in own if isinstance(node, ast.Call)]
                if any(isinstance(call, ast.Attribute) and call.attr == "scratch_folder" for call in calls):
                    found.add((path.relative_to(PACKAGE).as_posix(), function.name))
    return found - {("root/storage/filesystem.py", "_scratch_folder")}


@on_linux
@pytest.mark.slow
def test_a_link_in_the_place_of_a_scratch_folder_leads_no_user_of_one_out_of_the_root(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacker = Attacker(tmp_path / "victim")
    attacker.guide(monkeypatch)
    use_all(shared)
    assert attacker.has_won(shared) == ""
    assert len(users_in_the_code()) >= 14
    assert attacker.users == users_in_the_code()
