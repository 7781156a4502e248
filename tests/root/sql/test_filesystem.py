"""DuckDB's threads read one file through the adapter as if each had it for itself."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import fsspec
import pytest

import ludic
from ludic.root.rows.tables import MetricsLog
from ludic.root.sql.root_views import RangedFileSystem
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run


@pytest.fixture
def file():
    fs = fsspec.filesystem("memory")
    path = f"/{uuid.uuid4()}/digits"
    fs.pipe_file(path, b"0123456789")
    yield RangedFileSystem(fs, "ludic", "").open(f"ludic://{path}")
    fs.rm(path)


def test_reads_go_on_where_the_last_one_ended(file):
    assert [file.read(4), file.read(4), file.read(4), file.read(4)] == [b"0123", b"4567", b"89", b""]
    file.seek(8)
    assert (file.tell(), file.read(1), file.tell()) == (8, b"8", 9)


def test_a_seek_of_another_thread_does_not_move_this_ones_position(file):
    both_are_placed = threading.Barrier(2)

    def read_at(position: int) -> bytes:
        file.seek(position)
        both_are_placed.wait()
        return file.read(3)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(read_at, [1, 6])) == [b"123", b"678"]


@pytest.mark.parametrize("name", ["run", "lr=[1]*?"])
def test_a_listing_names_files_as_they_are_opened(name):
    fs = fsspec.filesystem("memory")
    parent = f"/{uuid.uuid4()}"
    fs.pipe({f"{parent}/{folder}/{file}": b"12"[: len(file)] for folder in (name, "lr=1xx") for file in ("bb", "a")})
    ranged = RangedFileSystem(fs, "ludic", f"{parent}/{name}")
    names = ranged.glob(f"{ranged.url}/*")
    assert [each.rpartition("/")[2] for each in names] == ["a", "bb"]
    assert [(ranged.size(each), ranged.open(each).read(9)) for each in names] == [(1, b"1"), (2, b"12")]
    assert ranged.glob(f"{ranged.url}/missing/*") == []
    for outside in (f"ludic://{parent}/lr=1xx/a", f"{ranged.url}2/a"):
        with pytest.raises(FileNotFoundError, match="is not below"):
            ranged.open(outside)
    fs.rm(parent, recursive=True)


@pytest.mark.slow
def test_a_view_of_a_bucket_costs_no_request_for_each_file(monkeypatch: pytest.MonkeyPatch):
    root = put_run(f"memory://{uuid.uuid4()}", RunConfig(model="tiny", env=("moar_cats",)))

    def num_requests(num_files: int) -> int:
        for number in range(num_files):
            with closing(MetricsLog(root, "worker", f"w{number}-{num_files}")) as log:
                log.write(env_name="moar_cats", policy_version=0)
        con = ludic.connect(root.url)
        with monkeypatch.context() as patches:
            for name in ("info", "exists", "glob"):
                method = getattr(type(root.fs), name)
                patches.setattr(
                    type(root.fs), name, lambda *args, _call=method, **how: calls.append(1) or _call(*args, **how)
                )
            calls = []
            assert con.execute("select count(*) from metrics").fetchall()[0][0] >= num_files
        return len(calls)

    assert num_requests(20) == num_requests(5) < 20
