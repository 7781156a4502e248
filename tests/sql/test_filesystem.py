"""DuckDB's threads read one file through the adapter as if each had it for itself."""

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from ludic.sql.filesystem import RangedFileSystem


@pytest.fixture
def file():
    fs = fsspec.filesystem("memory")
    path = f"/{uuid.uuid4()}/digits"
    fs.pipe_file(path, b"0123456789")
    yield RangedFileSystem(fs).open(f"ludic://{path}")
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


def test_a_listing_names_files_as_they_are_opened():
    fs = fsspec.filesystem("memory")
    folder = f"/{uuid.uuid4()}"
    fs.pipe({f"{folder}/b": b"12", f"{folder}/a": b"1"})
    ranged = RangedFileSystem(fs)
    names = ranged.glob(f"ludic://{folder}/*")
    assert names == [f"{folder}/a", f"{folder}/b"]
    assert [ranged.size(ranged.unstrip_protocol(name)) for name in names] == [1, 2]
    fs.rm(folder, recursive=True)
