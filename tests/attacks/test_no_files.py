"""Names of a root at which no file can be read: they hold no command, end none, and `ludic verify` names them.

The cases follow from the rows of the catalogue, times what can stand at a name in place of a file.
"""

import itertools
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import boto3
import pytest
from every_kind import KINDS, a_file, make_full_root, names_of

from ludic.app.show.stats import collect_stats
from ludic.app.show.watch import Watcher
from ludic.errors import LudicError, SchemaError
from ludic.root.catalogue import FILE_KINDS, FileKind, Records
from ludic.root.maintenance.verify import check_root
from ludic.root.maintenance.verify.other_files import folders_for_files
from ludic.root.maintenance.verify.tables import NOT_OURS
from ludic.root.root import Root
from ludic.root.sql.connection import connect
from ludic.root.sql.root_views import _VIEWS
from ludic.root.storage.local import SCRATCH
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

# --- What can stand at a name -------------------------------------------------------------------------------


def loop(path: Path) -> None:
    path.symlink_to(f"{path.name}.other")
    path.with_name(f"{path.name}.other").symlink_to(path.name)


def link_to_pipe(path: Path) -> None:
    os.mkfifo(path.with_name(f"{path.name}.pipe"))
    path.symlink_to(f"{path.name}.pipe")


NO_FILES: Mapping[str, Callable[[Path], object]] = {
    "a named pipe": os.mkfifo,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "two links to each other": loop,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to a pipe": link_to_pipe,
    "a folder": Path.mkdir,
}


def may_be(kind: str, row: FileKind[Any]) -> bool:
    """Whether this is no file for the row; names of some rows may hold further folders."""
    return kind != "a folder" or not row.ends_with_path


def place(root: Root, name: str, kind: str) -> None:
    path = Path(root.path, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    NO_FILES[kind](path)


def new_name(row: FileKind[Any], number: int) -> str:
    """The name of a file of the row that the full root lacks; another one for each number up to 9."""
    values = {}
    for field, hint in get_type_hints(row.fields, include_extras=True).items():
        letter = "0123456789"[number]
        candidates = (
            *(letter * size for size in (64, 32, 16)),
            f"0192929{letter}-0000-7000-8000-0000000000ff",
            *(f"w7{number}-pipe", "train", "py", "requests"),
        )
        fits = (each for each in candidates if re.fullmatch(hint.__metadata__[0].pattern, each))
        values[field] = 70 + number if hint.__origin__ is int else next(fits)
    return row.name(row.fields(**values))


@contextmanager
def never_opened(folder: str) -> Iterator[None]:
    """Fail if a named pipe below a folder is opened in the block, and let whoever waits for it go on."""
    pipes = [path for path in Path(folder).rglob("*") if path.is_fifo() and not path.is_symlink()]
    opened, ended = set[Path](), threading.Event()

    def write() -> None:
        while not ended.wait(0.05):
            for pipe in pipes:
                with suppress(OSError):  # nobody reads it
                    os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
                    opened.add(pipe)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()
    assert opened == set()


def read_views(root: Root) -> dict[str, int]:
    """The number of rows of each view."""
    with connect(root) as con:
        found = {view: con.execute(f"select count(*) from (from {view})").fetchone() for view in _VIEWS}  # noqa: S608
    return {view: row[0] for view, row in found.items() if row is not None}


def named(root: Root) -> set[str]:
    return {finding.where for finding in check_root(root).findings}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Root:
    return make_full_root(tmp_path_factory.mktemp("full"))


@pytest.fixture
def copy(full: Root, tmp_path: Path) -> Root:
    return Root.open(str(shutil.copytree(full.path, tmp_path / "copy")))


# --- Commands -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_is_no_file_beside_the_files_changes_no_command_and_is_named(
    full: Root, copy: Root, caplog: pytest.LogCaptureFixture
) -> None:
    many = {
        new_name(row, number): kind
        for row in KINDS
        for number, kind in enumerate(NO_FILES)
        if may_be(kind, row) and row.fields._fields
    }
    assert len(many) > 150
    for name, kind in many.items():
        place(copy, name, kind)
    with never_opened(copy.path):
        facts, wanted = collect_stats(copy).facts, collect_stats(full).facts
        assert {**facts, "root": ""} == {**wanted, "root": ""}
        assert read_views(copy) == read_views(full)
        seen, status = Watcher(copy.url).poll(), Watcher(full.url).poll()
        assert (seen.policy, seen.checkpoint, seen.steps) == (status.policy, status.checkpoint, status.steps)
        caplog.clear()
        found = named(copy)
    assert many.keys() <= found
    warnings = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(warnings) == len(set(warnings))


def replace_files(root: Root, turn: int) -> dict[str, FileKind[Any]]:
    """Put something else in place of a file of each row, another kind at each turn; returns the rows by name."""
    kinds, placed = list(NO_FILES), {}
    for number, row in enumerate(KINDS):
        kind = kinds[(number + turn) % len(kinds)]
        if row.kind != "run" and may_be(kind, row):
            placed[name := names_of(root, row)[-1]] = row
            Path(root.path, name).unlink()
            place(root, name, kind)
    return placed


@pytest.mark.slow
def test_what_is_no_file_in_place_of_a_file_ends_no_command_and_is_named(copy: Root) -> None:
    placed = replace_files(copy, 0)
    with never_opened(copy.path):
        collect_stats(copy)
        read_views(copy)
        Watcher(copy.url).poll()
        assert placed.keys() <= named(copy)


@pytest.mark.parametrize("turn", range(0, len(NO_FILES), 3))
def test_no_read_of_any_row_opens_what_is_no_file(copy: Root, turn: int) -> None:
    placed = replace_files(copy, turn)
    with never_opened(copy.path):
        assert placed.keys() <= copy.strays().keys() | set(folders_for_files(copy))
        assert placed.keys().isdisjoint(copy.list(""))
        for name, row in placed.items():
            if isinstance(row, Records):
                with pytest.raises(SchemaError, match=re.escape(f"{copy.url}/{name}")):
                    row.read(copy, *row.parse(name))
            for use in (
                copy.read,
                copy.open_file,
                lambda name: copy.read_range(name, -8),
                lambda name: copy.put_if_absent(name, b"new"),
                lambda name: copy.copy_out(name, Path(copy.path).with_name("copied")),
            ):
                with pytest.raises(SchemaError, match=re.escape(f"{copy.url}/{name} is a ")):
                    use(name)


@pytest.mark.parametrize("kind", NO_FILES)
def test_a_run_json_that_is_no_file_is_named(tmp_path: Path, run_config: RunConfig, kind: str) -> None:
    root = put_run(str(tmp_path), run_config)
    root.delete("run.json")
    place(root, "run.json", kind)
    with never_opened(root.path), pytest.raises(LudicError, match=r"run\.json is a .*, wanted a file"):
        Root.open(root.url)


FOLDERS = sorted({row.folder for row in FILE_KINDS if row.folder})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a file", *sorted(NO_FILES.keys() - {"a folder"})])
def test_what_stands_in_the_place_of_a_folder_is_named_and_no_trainer_begins_without_it(
    tmp_path: Path, run_config: RunConfig, kind: str
) -> None:
    root = put_run(str(tmp_path), run_config)
    shutil.rmtree(Path(root.path, SCRATCH))
    for folder in FOLDERS:
        Path(root.path, folder).write_text("no folder") if kind == "a file" else place(root, folder, kind)
    with never_opened(root.path):
        for folder in FOLDERS:
            assert root.list(folder) == root.folders(folder) == [] == list(root.sizes(folder))
            assert root.list(f"{folder}/version=1") == root.folders(f"{folder}/version=1") == []
            assert not root.exists(f"{folder}/version=1")
        if kind in ("a file", "a named pipe"):
            collect_stats(root)
            Watcher(root.url).poll()
            assert set(FOLDERS) <= named(root)
        with pytest.raises(SchemaError, match="is not a folder, wanted one"):
            root.writable()


def test_a_folder_for_other_programs_holds_files_only(tmp_path: Path, run_config: RunConfig) -> None:
    root = put_run(str(tmp_path), run_config)
    for number, kind in enumerate(NO_FILES.keys() - {"a folder"}):
        name = f"policies/version={number}/model.safetensors"
        place(root, name, kind)
        for use in (root.folder_for_others, lambda name: root.download(name, tmp_path / "copied")):
            with pytest.raises(SchemaError, match=re.escape(f"{root.url}/{name} is a ")):
                use(f"policies/version={number}")


# --- Damaged records ----------------------------------------------------------------------------------------

RECORDS = [row for row in KINDS if isinstance(row, Records) and row.kind != "run"]


@pytest.mark.slow
def test_a_damaged_record_is_named_and_the_rest_is_shown(full: Root, copy: Root) -> None:
    damages = itertools.cycle([b"{", b'{"a": 1}', b"[" * 10_000])
    shown = {row.view: names_of(copy, row) for row in RECORDS if row.view}
    wanted = read_views(full)
    for row in RECORDS:
        name = names_of(copy, row)[-1]
        Path(copy.path, name).unlink()
        Path(copy.path, name).write_bytes(next(damages))
    found = read_views(copy)
    of_lists = {"compactions", "quarantine"}  # views with a row for each entry of a record
    for view in shown:
        assert found[view] == wanted[view] - 1 or (view in of_lists and found[view] < wanted[view]), view
    facts = collect_stats(copy).facts
    assert {names[-1] for names in shown.values()} <= {each["name"] for each in facts["unreadable"]}
    assert facts["rollouts"] == collect_stats(full).facts["rollouts"]
    status = Watcher(copy.url).poll()
    assert status.steps == Watcher(full.url).poll().steps
    for kind in ("attempts", "leases", "latest"):
        (name,) = (names_of(copy, row)[-1] for row in RECORDS if row.kind == kind)
        assert any(name in problem for problem in status.unreadable), name
    assert str(replace(status, calls=[], newest_calls=[])).count("unreadable") == len(status.unreadable)


@pytest.mark.slow
def test_a_record_with_a_time_or_a_number_that_sql_does_not_hold_is_left_out(
    full: Root, copy: Root, caplog: pytest.LogCaptureFixture
) -> None:
    row = next(row for row in RECORDS if row.kind == "workers")
    for number, (field, value) in enumerate({"created_at": "noon", "slot": 2**70}.items()):
        name = new_name(row, number)
        text = a_file(copy, row, name).decode().rpartition('"digest"')[0].rstrip().removesuffix(",") + "\n}"
        text = re.sub(rf'"{field}": [^,\n]*', f'"{field}": {value if field == "slot" else repr(value)}', text)
        copy.put(name, text.replace("'", '"').encode())
    assert read_views(copy)["workers"] == read_views(full)["workers"]
    assert "created_at is 'noon', wanted timestamp[us, tz=UTC]" in caplog.text
    assert f"slot is {2**70}, wanted int64" in caplog.text


# --- Keys of object stores ----------------------------------------------------------------------------------

WEIRD = ("{}//x.parquet", "{}/./x.json", "{}/../x.json", "{}/a/../../x", "{}/version=1//x", "/{}/x")


@pytest.mark.slow
def test_keys_that_are_no_paths_end_no_listing(s3_server: str, s3_bucket: str, run_config: RunConfig, caplog) -> None:
    root = put_run(f"{s3_bucket}/weird", run_config)
    client = boto3.client("s3", endpoint_url=s3_server)
    for folder in FOLDERS:
        root.put(f"{folder}/version=1/own", b"own")
    turns = itertools.cycle(WEIRD)
    weird = {next(turns).format(folder) for folder in FOLDERS for _ in range(3)}
    for key in weird:
        client.put_object(Bucket="ludic-tests", Key=f"weird/{key}", Body=b"not ours")
    own = [f"{folder}/version=1/own" for folder in FOLDERS]
    assert root.list("") == sorted([*own, "run.json"]) == list(root.sizes(""))
    assert {folder for folder in FOLDERS if "/" not in folder} == set(root.folders(""))
    for folder, name in zip(FOLDERS, own, strict=True):
        assert root.list(folder) == [name] == list(root.sizes(folder))
        assert set(root.folders(folder)) - {f"{folder}/a"} == {f"{folder}/version=1"}
        assert root.exists(folder)
    assert root.strays().keys() == weird
    assert len([record for record in caplog.records if "skipped" in record.getMessage()]) == len(weird)
    assert {key for key in weird if not key.startswith(NOT_OURS)} <= named(root)
    root.delete(f"{FOLDERS[0]}/version=1")
    assert root.list(FOLDERS[0]) == []
