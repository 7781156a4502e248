"""Temporary folders: those of killed processes go away, those of others stay, and private ones are private."""

import ast
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ludic
from ludic.app.launch.local import log_folder
from ludic.app.launch.supervisor import make_log_folder
from ludic.base import temporary
from ludic.base.temporary import folder_of_object, make_folder, private_folder, temporary_folder
from ludic.errors import StoreError
from ludic.root.root import Root
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root, run_of

PUBLISHER = """
import sys
from pathlib import Path
from ludic.root.root import Root
from ludic.root.weights.policies import claim_policy
from ludic.root.weights.policies import PolicyWriter

def save(folder: Path) -> None:
    (folder / "config.json").write_text("{}")

root = Root.open(sys.argv[1], writable=True)
version = claim_policy(root, step=0, attempt_id=1, parent_version=None)
writer = PolicyWriter(root, full_every=5)
writer.write(version, save)
print(version, flush=True)
sys.stdin.read()
writer.close()
"""
"""Publishes a version as a trainer with differences of weights does, and then waits."""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's temporary folder."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    temporary._sweep_once.cache_clear()
    return folder


@contextmanager
def publishing(root: Root) -> Iterator[subprocess.Popen]:
    command = [sys.executable, "-c", PUBLISHER, root.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdigit()
        yield process


@pytest.fixture
def started(tmp_path: Path, run_config: RunConfig) -> Root:
    return create_root(str(tmp_path / "run"), run_config)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_the_copy_of_a_killed_trainer_is_deleted_by_the_next_and_that_of_a_living_one_is_kept(
    machine: Path, started: Root
) -> None:
    with publishing(started) as living:
        (of_the_living,) = names(machine)
        with publishing(started) as killed:
            (of_the_killed,) = set(names(machine)) - {of_the_living}
            assert of_the_killed.startswith(f"ludic-published-{killed.pid}-")
            assert list((machine / of_the_killed).rglob("config.json"))
            killed.send_signal(signal.SIGKILL)
        assert names(machine) == sorted([of_the_living, of_the_killed])
        with publishing(started) as third:
            assert of_the_living in names(machine)
            assert of_the_killed not in names(machine)
            assert third.stdin is not None
            third.stdin.close()
        assert names(machine) == [of_the_living], "a process that ends deletes its own"
        assert living.stdin is not None
        living.stdin.close()
    assert names(machine) == []


def dead_name() -> str:
    """The name of a folder whose owner is dead: a living process with another start has its id now."""
    return f"ludic-weights-{os.getpid()}-1-{temporary._place()}-abc"


def test_only_folders_of_dead_owners_that_can_be_seen_from_here_are_deleted(machine: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").touch()
    place = temporary._place()
    kept = [
        f"ludic-weights-{os.getpid()}-{temporary._start_of(os.getpid())}-{place}-abc",
        f"ludic-weights-{os.getppid()}-{temporary._start_of(os.getppid())}-{place}-abc",
        dead_name().replace(place, "0" * 12),
        "ludic-weights-abc",
        "ludic-logs-0-abc",
        "other",
    ]
    for name in [*kept, dead_name(), "." + dead_name()]:
        (machine / name).mkdir()
    (machine / dead_name().replace("abc", "link")).symlink_to(tmp_path / "victim")
    (machine / dead_name().replace("abc", "file")).touch()
    with temporary_folder("weights") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        left = set(names(machine)) - {folder.name}
    assert left == {*kept, dead_name().replace("abc", "link"), dead_name().replace("abc", "file")}
    assert (tmp_path / "victim" / "file").exists()


def test_a_folder_of_another_user_is_kept(machine: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    (machine / dead_name()).mkdir()
    os.chown(machine / dead_name(), 65534, 65534)
    with temporary_folder("weights"):
        assert dead_name() in names(machine)


def test_a_folder_beside_another_is_hidden_and_goes_with_its_dead_owner(tmp_path: Path, machine: Path) -> None:
    (tmp_path / f".{dead_name()}").mkdir()
    with temporary_folder("cut", beside=tmp_path) as folder:
        assert names(tmp_path) == sorted([folder.name, "tmp"])
        assert folder.name.startswith(".ludic-cut-")


def test_a_folder_ends_with_its_object(machine: Path) -> None:
    class Owner:
        pass

    owner = Owner()
    folder = folder_of_object("scalars", owner)
    assert folder.is_dir()
    del owner
    assert not folder.exists()


def test_logs_of_a_remote_run_are_in_a_private_folder(machine: Path, started: Root) -> None:
    remote = create_root("memory://private-logs", run_of(started))
    folder = log_folder(remote)
    assert folder == machine / f"ludic-logs-{os.geteuid()}-{remote.run_id}"
    assert folder.stat().st_mode & 0o7777 == 0o700
    assert log_folder(remote) == folder
    folder.rmdir()
    make_log_folder(folder)  # as each start of a process does
    assert folder.stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize("made", ["a link", "readable by others", "another user's", "a file"])
def test_a_folder_that_another_user_may_have_made_is_refused(machine: Path, tmp_path: Path, made: str) -> None:
    path = machine / "ludic-logs"
    if made == "a link":
        path.symlink_to(tmp_path)
    elif made == "a file":
        path.touch()
    else:
        path.mkdir(mode=0o755 if made == "readable by others" else 0o700)
    if made == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(path, 65534, 65534)
    for make in (lambda: private_folder("ludic-logs"), lambda: make_log_folder(path)):
        with pytest.raises(StoreError, match=r"ludic-logs is .*; wanted a folder of user \d+ with mode 700, .*TMPDIR"):
            make()


WITHIN = {
    "settings/consent.py": "a file that is renamed, in the user's configuration folder",
    "app/launch/guard.py": "a file without a name, where the system has none in memory",
    "models/families.py": "a file that is renamed, in the user's cache folder",
    "root/weights/policies.py": "within a folder of copies that temporary_folder made",
    "rollouts/program_episodes.py": "within an episode's folder, which make_folder made",
    "base/temporary.py": "makes all others",
}


def test_every_temporary_folder_of_ludic_has_the_name_of_its_owner() -> None:
    package = Path(ludic.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "tempfile" in text else ():
            is_import = isinstance(node, ast.Import) and any(alias.name == "tempfile" for alias in node.names)
            if is_import or (isinstance(node, ast.ImportFrom) and node.module == "tempfile"):
                found.add(path.relative_to(package).as_posix())
    assert found == WITHIN.keys()
    assert make_folder.__module__ == "ludic.base.temporary"
