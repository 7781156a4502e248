"""Symbolic links that lead out of a root: nothing is written, deleted, moved, appended or copied through them."""

import ast
import inspect
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

import pytest
from matplotlib.figure import Figure
from strategies import make_batch

from ludic.app.demos.words import save
from ludic.app.launch.local import log_folder
from ludic.app.launch.supervisor import ChildProcess, make_log_folder
from ludic.base.row_files import open_sink
from ludic.errors import LudicError, SchemaError
from ludic.root.maintenance.verify import check_root
from ludic.root.root import Root
from ludic.root.rows.writer import RolloutWriter
from ludic.root.storage import local
from ludic.run.run_json import create_root, run_of

SECRET = "the victim's own text"
Victim = dict[str, tuple[str, int, int]]


def state_of(folder: Path) -> Victim:
    """Content, size of the folder or file, and time of the last change of everything below a folder."""
    return {
        str(path): (path.read_bytes().hex() if path.is_file() else "", path.lstat().st_mtime_ns, path.lstat().st_mode)
        for path in (folder, *sorted(folder.rglob("*")))
    }


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder beside the root, of files that have the names that the root's operations use."""
    folder = tmp_path / "victim"
    (folder / "below").mkdir(parents=True)
    for name in ("a.json", "b.json", "below/c.json"):
        (folder / name).write_text(SECRET)
    return folder


@pytest.fixture
def linked(started: Root, victim: Path) -> Root:
    """A root with a linked folder `out`, a link `in/a.json` to a file, and a linked folder for temporary files."""
    Path(started.path, "out").symlink_to(victim)
    Path(started.path, "in").mkdir()
    for name in ("a.json", "b.json"):
        Path(started.path, "in", name).symlink_to(victim / name)
    started.put("own.json", b"own")
    return started


def new_file(root: Root) -> Path:
    path = Path(root.path).with_name("new.json")
    path.write_text("new")
    return path


def new_folder(root: Root) -> Path:
    path = Path(root.path).with_name("new")
    path.mkdir(exist_ok=True)
    (path / "a.json").write_text("new")
    return path


def scratch(root: Root) -> None:
    shutil.rmtree(f"{root.path}/.tmp", ignore_errors=True)
    Path(root.path, ".tmp").symlink_to(Path(root.path, "out").resolve())
    with root.scratch_folder() as folder:
        (folder / "x").write_text("x")


TRIED: Mapping[str, Callable[[Root, str], object]] = {
    "put": lambda root, name: root.put(name, b"new"),
    "put_if_absent": lambda root, name: root.put_if_absent(name, b"new"),
    "put_file_if_absent": lambda root, name: root.put_file_if_absent(new_file(root), name),
    "prove_put_if_absent": lambda root, name: root.prove_put_if_absent(name, b"new"),
    "delete": lambda root, name: root.delete(name),
    "move_in": lambda root, name: root.move_in(new_file(root), name),
    "rename": lambda root, name: (root.rename(name, "elsewhere.json"), root.rename("own.json", name)),
    "upload": lambda root, name: root.upload(new_folder(root), name.rpartition("/")[0]),
    "scratch_folder": lambda root, name: scratch(root),
    "copy_out": lambda root, name: root.copy_out(name, Path(root.path).with_name("copy") / "a.json"),
    "copy_all": lambda root, name: root.copy_all({name: PurePosixPath("a.json")}, Path(root.path).with_name("copy")),
    "download": lambda root, name: root.download(name.rpartition("/")[0], Path(root.path).with_name("copy")),
    "folder_for_others": lambda root, name: (root.folder_for_others(name.rpartition("/")[0]) / "new").write_text("x"),
    "create": lambda root, name: create_root(f"{root.path}/{name.rpartition('/')[0]}", run_of(root)),
}
"""What changes files of a root, or copies them, with a name that leads through a link."""
READS = {"read", "read_range", "open_file", "exists", "list", "sizes", "folders", "at", "explained", "is_local"}
READS |= {
    "connect",
    "entries",
    "modified",
    "created_at",
    "open",
    "check_same_run",
    "example_ids",
    "writable",
    "pauses",
    "refuse_lost_folders",
    "strays",
    "file_for_others",
    "url",
    "fs",
    "path",
    "stop",
    "run_id",
    "run_json",
    "record",
    "extra_columns",
}


def test_each_operation_of_a_root_is_known_to_read_or_is_tried() -> None:
    public = {name for name in dir(Root) if not name.startswith("_")}
    assert public == READS | TRIED.keys()


@pytest.mark.parametrize("operation", sorted(TRIED.keys() - {"create"}))
@pytest.mark.parametrize("name", ["out/a.json", "out/new.json", "out/below/c.json", "in/a.json", "in/b.json"])
def test_no_operation_reaches_through_a_link_out_of_the_root(
    linked: Root, victim: Path, operation: str, name: str
) -> None:
    before = state_of(victim)
    copy = Path(linked.path).with_name("copy")
    copy.mkdir()
    with suppress(LudicError, FileNotFoundError, FileExistsError):
        TRIED[operation](linked, name)
    assert state_of(victim) == before
    assert not any(SECRET in path.read_text() for path in copy.rglob("*.json"))


def test_a_new_root_may_not_be_a_link_of_another_run_but_its_own_folder_may_be_one(
    started: Root, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    root = create_root(str(tmp_path / "link" / "run"), run_of(started))
    root.put("policies/LATEST", b"1")
    assert (tmp_path / "elsewhere" / "run" / "policies" / "LATEST").read_bytes() == b"1"


def test_links_that_stay_in_the_root_are_followed(started: Root) -> None:
    started.put("data/rollouts/a.json", b"a")
    Path(started.path, "rollouts").symlink_to("data/rollouts")
    Path(started.path, "data/rollouts/loop").symlink_to("..")
    started.put("rollouts/b.json", b"b")
    assert started.read("data/rollouts/b.json") == b"b"
    assert {"rollouts/a.json", "rollouts/b.json"} <= set(started.list("rollouts"))
    started.delete("rollouts/a.json")
    assert not started.exists("data/rollouts/a.json")


def test_what_is_behind_a_link_is_no_part_of_the_run(linked: Root) -> None:
    assert linked.list("") == ["own.json", "run.json"] == list(linked.sizes(""))
    assert linked.list("out") == [] == linked.folders("out")
    assert linked.folders("") == ["in"] or linked.folders("") == [".tmp", "in"]
    assert not linked.exists("out/a.json")
    for read in (linked.read, linked.open_file, lambda name: linked.read_range(name, 0, 1)):
        for name in ("out/a.json", "in/a.json"):
            with pytest.raises(SchemaError, match=r"is a symbolic link that leads out of its run, to .*victim"):
                read(name)


def test_a_link_itself_is_deleted(linked: Root, victim: Path) -> None:
    linked.delete("out")
    linked.delete("in/a.json")
    assert (victim / "a.json").read_text() == SECRET
    assert not Path(linked.path, "out").is_symlink()
    assert not Path(linked.path, "in/a.json").is_symlink()


def test_a_folder_that_becomes_a_link_in_the_middle_of_a_write_is_not_followed(started: Root, victim: Path) -> None:
    before, ended = state_of(victim), threading.Event()
    folder = Path(started.path, "race")

    def swap() -> None:
        for number in itertools.count():
            if ended.is_set():
                return
            with suppress(OSError):  # a write has made the folder
                folder.rename(folder.with_name(f"before-{number}"))
            with suppress(OSError):
                folder.symlink_to(victim)
            with suppress(OSError):
                folder.unlink()

    swapping = threading.Thread(target=swap)
    swapping.start()
    for number in range(100):
        for operation in (started.put, started.put_if_absent):
            with suppress(LudicError, FileExistsError, OSError):
                operation(f"race/{number}.json", b"new")
        with suppress(LudicError, OSError):
            started.delete("race/a.json")
    ended.set()
    swapping.join()
    assert state_of(victim) == before


# ludic.root.storage.local is what Storage calls, and what the supervisor writes logs with.
LOCAL_TRIED = {"create", "replace", "create_from", "move_in", "rename", "delete", "scratch_folder", "open_to_append"}
LOCAL_READS = {
    "check_links",
    "check_file",
    "leads_out",
    "walk",
    "strays",
    "folders",
    "read",
    "is_there",
    "opened",
    "refuse_linked_log",
}
LOCAL_OTHERS = {"follow_umask": "of a file or folder in scratch, before it gets its name"}


def test_each_function_of_the_local_disk_is_one_that_an_operation_tries() -> None:
    functions = {
        name
        for name, found in inspect.getmembers(local, inspect.isfunction)
        if found.__module__ == local.__name__ and not name.startswith("_")
    }
    assert functions - {"_warn"} == LOCAL_TRIED | LOCAL_READS | LOCAL_OTHERS.keys()


@pytest.mark.parametrize("what", ["the log", "its folder"])
def test_no_log_is_written_through_a_link(started: Root, victim: Path, what: str) -> None:
    logs = Path(started.path, "logs")
    if what == "the log":
        logs.mkdir()
        (logs / "a.json").symlink_to(victim / "a.json")
    else:
        logs.symlink_to(victim)
    before = state_of(victim)
    with pytest.raises(
        SchemaError, match="is a symbolic link, and ludic writes no logs through links; delete the link"
    ):
        ChildProcess(name="trainer", args=lambda: ["this"], log=logs / "a.json").start({})
    assert state_of(victim) == before


def test_a_log_whose_folder_is_missing_is_not_called_a_link(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        local.open_to_append(tmp_path / "missing" / "trainer.log")


def test_the_demo_draws_its_picture_through_no_link(started: Root, victim: Path) -> None:
    Path(started.path, "reward.png").symlink_to(victim / "a.json")
    before = state_of(victim)
    with pytest.raises(SchemaError, match=r"reward\.png is a symbolic link that leads out of its run"):
        save(Figure(), started)
    assert state_of(victim) == before


@pytest.mark.parametrize("target", ["victim", "nowhere"])
def test_the_folder_of_logs_that_another_program_opens_is_no_link(started: Root, tmp_path: Path, target: str) -> None:
    """Slurm opens its logs by path."""
    (tmp_path / "victim").mkdir()
    Path(started.path, "logs").symlink_to(tmp_path / target)
    with pytest.raises(SchemaError, match="logs is a symbolic link, and ludic writes no logs through links"):
        make_log_folder(log_folder(started))
    assert not (tmp_path / "nowhere").exists()


def test_a_result_is_written_through_no_link_with_the_name_of_an_unfinished_one(victim: Path, tmp_path: Path) -> None:
    (tmp_path / "out.csv.partial").symlink_to(victim / "a.json")
    before = state_of(victim)
    with open_sink(tmp_path / "out.csv") as file:
        file.write(b"1")
    assert ((tmp_path / "out.csv").read_bytes(), (tmp_path / "out.csv").is_symlink()) == (b"1", False)
    assert state_of(victim) == before


# --- Commands -----------------------------------------------------------------------------------------------


def move_out(root: Path, victim: Path, name: str) -> None:
    """Move a file or folder of a root to the victim, and leave a link."""
    target = victim / name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(root / name, target)
    (root / name).symlink_to(target)


def top_folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir() and path.name != ".tmp")


def test_a_command_that_writes_refuses_a_run_with_a_folder_elsewhere(ludic, breakable: Path, victim: Path) -> None:
    kinds = [*top_folders(breakable), "logs", "tensorboard", "evals", "scores"]
    assert len(kinds) >= 8
    for kind in kinds:
        (breakable / kind).mkdir(exist_ok=True)
        move_out(breakable, victim, kind)
        before = state_of(victim)
        result = ludic("train", breakable, "--num-steps", "2")
        assert result.code == 1
        assert f"{kind} is a symbolic link that leads out of its run" in result.err
        for command in (("compact",), ("verify", "--repair")):
            ludic(command[0], breakable, *command[1:])
        assert state_of(victim) == before, kind
        (breakable / kind).unlink()
        shutil.move(victim / kind, breakable / kind)


@pytest.mark.slow
def test_commands_leave_what_is_behind_links_below_the_folders_alone(
    ludic, breakable: Path, victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = Root.open(str(breakable))
    with RolloutWriter(root, "w1-test") as writer:
        writer.append(make_batch(worker_id="w1-test", rewards=[[1.0, 0.0, 1.0, 0.0]], seed=9, policy_version=1))
    shutil.copytree(breakable / "policies/version=1", breakable / "policies/version=2")
    moved = ["policies/version=0", "metrics/old", "batches/attempt=9", "checkpoints/attempt=9", "code/x.py"]
    moved += ["rollouts/version=0", "logs/trainer.log", "logs/evaluator.log", "reward.png"]
    moved += [f"rollouts/version=1/{folder.name}" for folder in (breakable / "rollouts/version=1").iterdir()]
    for name in moved:
        if not (breakable / name).exists():
            (breakable / name).parent.mkdir(exist_ok=True)
            (breakable / name).write_text(SECRET) if "." in name else (breakable / name).mkdir()
        move_out(breakable, victim, name)
    (breakable / "policies/version=1/notes.txt").symlink_to(victim / "a.json")
    before = state_of(victim)
    commands = [
        ("train", breakable, "--num-steps", "2", "--keep-policies", "1", "--rollout-timeout-s", "0.2"),
        ("run", breakable, "--num-steps", "2"),
        ("compact", breakable),
        ("expire", breakable, "--keep-versions", "1", "--break-resume", "--break-replay"),
        ("export", breakable, "--format", "hf", "--version", "1", "--out", "hf"),
        ("export", breakable, "--format", "delta"),
        ("export", breakable, "--out", "rows.jsonl"),
        ("cut", breakable, "1", "--out", "cut"),
        ("verify", breakable, "--repair"),
    ]
    for name, *args in commands:
        ludic(name, *args)
        assert state_of(victim) == before, name
    copies = [path for folder in ("hf", "cut") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in path.read_bytes() for path in copies)


def test_an_export_with_a_link_to_a_private_file_is_refused(ludic, breakable: Path, victim: Path) -> None:
    (breakable / "policies/version=1/notes.txt").symlink_to(victim / "a.json")
    result = ludic("export", breakable, "--format", "hf", "--version", "1", "--out", victim.with_name("hf"))
    assert result.code == 1
    assert "notes.txt is a symbolic link that leads out of its run" in result.err
    assert not victim.with_name("hf").exists()


@pytest.mark.slow
def test_verify_names_links_that_lead_out(breakable: Path, victim: Path) -> None:
    (breakable / "policies/version=1/notes.txt").symlink_to(victim / "a.json")
    (breakable / "metrics/other").symlink_to(victim)
    found = {finding.where for finding in check_root(Root.open(str(breakable))).findings if finding.check == "link"}
    assert found == {"policies/version=1/notes.txt", "metrics/other"}


def test_the_storage_layer_opens_no_file_of_a_root_by_its_path_to_write() -> None:
    """Each change is made relative to the descriptor of a folder that was walked to without links."""
    tree = ast.parse(inspect.getsource(local))
    changes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"os.open", "os.mkdir", "os.unlink", "os.link", "os.replace", "shutil.rmtree"}
    ]
    assert len(changes) > 10
    without = {ast.unparse(node) for node in changes if not any("dir_fd" in str(key.arg) for key in node.keywords)}
    # A log's folder; the folder that a descent begins with, or that the caller made; and files that are read.
    assert without == {
        "os.open(file.parent, _FOLDER | os.O_NOFOLLOW)",
        "os.open(folder, _FOLDER)",
        "os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)",
    }
    assert os.open in os.supports_dir_fd
