"""Rows of data files: every container gives the same rows in a stream, and what can't be read is named."""

import csv
import gzip
import io
import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from containers import ENCODERS, arrow_stream, write_rows

from ludic.base import data_files
from ludic.base.data_files import SUFFIXES, ReadRow, is_data_file, is_lines, read_rows
from ludic.environments.qa_rows import QuestionSource
from ludic.environments.registry import make_environment
from ludic.errors import ConfigError

ROWS = [
    {"question": "wie viel, 2 + 2?", "answer": "4"},
    {"question": 'a "b"\nc\u2028d 🦊 北京', "answer": " 5 "},
    {"question": "x" * 3000, "answer": None},
]
TEXTS = [suffix for suffix in SUFFIXES if suffix not in (".parquet", ".arrow")]
by_suffix = pytest.mark.parametrize("suffix", SUFFIXES)


def rows_of(data: bytes, name: str, **options: Any) -> list[Any]:
    return [found.value for found in read_rows(io.BytesIO(data), name, **options)]


@by_suffix
def test_every_container_gives_the_same_rows_also_after_a_byte_order_mark(suffix: str) -> None:
    assert is_data_file(f"rows{suffix}")
    assert rows_of(ENCODERS[suffix](ROWS), f"rows{suffix}") == ROWS
    if suffix in TEXTS and not suffix.endswith(".gz"):
        assert rows_of(b"\xef\xbb\xbf" + ENCODERS[suffix](ROWS), f"rows{suffix}") == ROWS
        assert rows_of(gzip.compress(b"\xef\xbb\xbf" + ENCODERS[suffix](ROWS)), f"rows{suffix}.gz") == ROWS


@by_suffix
def test_a_file_without_rows_has_none(suffix: str) -> None:
    empty = {".json": b"[]", ".json.gz": gzip.compress(b" [ ] \n")}
    data = empty.get(suffix) or ENCODERS[suffix]([])
    assert rows_of(data, f"rows{suffix}") == []


@by_suffix
def test_questions_of_every_container_are_the_same_examples(suffix: str, tmp_path: Path) -> None:
    rows = [{"question": f"{n} + {n}?", "answer": str(n + n)} for n in range(20)]
    path = write_rows(tmp_path / f"sums{suffix}", rows)
    plain = write_rows(tmp_path / "plain.jsonl", rows)
    assert QuestionSource(name=str(path)).first_row() == rows[0]
    made, wanted = (make_environment(f"qa/{each}", {}, 0)() for each in (path, plain))
    assert [made.example(i, "train") for i in range(15)] == [wanted.example(i, "train") for i in range(15)]


def test_where_a_row_is_and_which_columns_are_read() -> None:
    lines = b'\n{"a": 1, "b": 2}\r\n\n{"a": 3}'
    assert [*read_rows(io.BytesIO(lines), "x.jsonl")] == [
        ReadRow(2, "line 2", {"a": 1, "b": 2}),
        ReadRow(4, "line 4", {"a": 3}),
    ]
    text = b'a,b\n"1\n2",\n\n3,4\n'
    assert [*read_rows(io.BytesIO(text), "x.csv")] == [
        ReadRow(2, "line 2", {"a": "1\n2", "b": None}),
        ReadRow(5, "line 5", {"a": "3", "b": "4"}),
    ]
    rows = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    for suffix in (".parquet", ".arrow"):
        found = read_rows(io.BytesIO(ENCODERS[suffix](rows)), f"x{suffix}", columns=lambda names: names[1:])
        assert [*found] == [ReadRow(1, "row 0", {"b": 2}), ReadRow(2, "row 1", {"b": 4})]
    assert rows_of(arrow_stream(rows), "x.arrow", columns=lambda names: names[:1]) == [{"a": 1}, {"a": 3}]


def test_what_python_writes_as_json_is_read() -> None:
    (row,) = rows_of(b'{"a": NaN, "b": -Infinity, "c": "\\ud83e\\udd8a"}\n', "x.jsonl")
    assert (repr(row["a"]), row["b"], row["c"]) == ("nan", float("-inf"), "🦊")
    assert rows_of(b'[{"a": 1e999}]', "x.json") == [{"a": float("inf")}]


def test_messages_in_a_cell_are_messages_and_other_texts_stay() -> None:
    messages = [{"role": "user", "content": "a, b"}]
    cells = [json.dumps(messages), json.dumps(messages[0]), "[1, 2]", '{"a": 1}', "[{'role': 'user'}]", "007", "[{x"]
    sink = io.StringIO(newline="")
    csv.writer(sink).writerows([["abcdefg"[i] for i in range(7)], cells])
    (row,) = rows_of(sink.getvalue().encode(), "x.csv")
    assert [*row.values()] == [messages, messages[0], *cells[2:]]


HALF = r"holds half a character, \ud83e; wanted both halves, or the character itself"
REASONS = [
    ("x.jsonl", b'{"a": 1}\n{"a": \xff}\n', "line 2", "is not UTF-8 text: byte 0xff at 7"),
    ("x.jsonl", b'{"a": 1}\n{"a": 1,}\n', "line 2", "is not JSON: "),
    ("x.jsonl", b'{"a": 1}\n"a"\n', "line 2", "is 'a', wanted a JSON object with the columns as keys"),
    (
        "x.jsonl",
        b'{"a": 1}\n{"a": "\\ud83e"}\n',
        "line 2",
        HALF,
    ),
    ("x.jsonl", b'{"a": 1}\n' + b"[" * 100_000, "line 2", "is not JSON: "),
    ("x.jsonl", b'{"a": 1}\n{"a": ' + b"1" * 5000 + b"}", "line 2", "is not JSON: "),
    ("x.json", b'[{"a": 1}, [3]]', "row 1", "is [3], wanted a JSON object with the columns as keys"),
    (
        "x.json",
        b'[{"a": 1}, {"a": "\\ud83e"}]',
        "row 1",
        HALF,
    ),
    ("x.csv", b"a,b\n1,2\n3\n", "line 3", "has 1 cells, wanted 2, as the first line"),
    ("x.csv", b"a,b\n1,2\n3,4,5\n", "line 3", "has 3 cells, wanted 2, as the first line"),
]


@pytest.mark.parametrize(("name", "data", "where", "reason"), REASONS, ids=range(len(REASONS)))
def test_a_row_that_cannot_be_read_is_named_and_the_next_one_is_read(
    name: str, data: bytes, where: str, reason: str
) -> None:
    after = {".jsonl": b'\n{"a": 9}', ".json": b"", ".csv": b"8,9\n"}[Path(name).suffix]
    good, found, *rest = read_rows(io.BytesIO(data + after), name)
    assert isinstance(good.value, dict)
    assert found.where == where
    assert str(found.value).startswith(reason)
    assert len(rest) == (1 if after else 0)


PACKED = gzip.compress(b'{"a": 1}\n' * 100_000)
REFUSED = [
    ("x.jsonl.gz", PACKED[:150], r"x\.jsonl\.gz is a damaged gzip file: .*, after [\d,]+ bytes of content"),
    ("x.jsonl.gz", PACKED[:100] + b"\0" + PACKED[101:], r"x\.jsonl\.gz is a damaged gzip file: "),
    ("x.jsonl.gz", PACKED[:-8] + b"\0" * 8, r"x\.jsonl\.gz is a damaged gzip file: CRC check failed"),
    ("x.parquet.gz", gzip.compress(ENCODERS[".parquet"](ROWS)), "is not a Parquet file: it begins with"),
    ("x.jsonl.gz", gzip.compress(ENCODERS[".parquet"](ROWS)), "is a table or a gzip file packed by gzip once more"),
    ("x.jsonl.gz", gzip.compress(PACKED), "is a table or a gzip file packed by gzip once more"),
    ("x.json", b'{"data": [{"a": 1}]}', r"x\.json holds one JSON object; wanted an array of rows, \[\{"),
    ("x.json", b'{\n "data": [{"a": 1}]\n}\n', r"x\.json, line 1 is not JSON: .*; wanted an array of rows, \[\{"),
    ("x.json", b'[{"a": 1}, {"a": ]', r"x\.json, row 1 is not JSON: .*; wanted an array of rows"),
    ("x.json", b'[{"a": 1}, {"a": 2}', r"x\.json, before row 2: found the end of the file, wanted ','"),
    ("x.json", b'[{"a": 1} {"a": 2}]', r"x\.json, before row 1: found '\{', wanted ','"),
    ("x.json", b'[{"a": 1}]\n[{"a": 2}]', r"x\.json continues after its array with '\['"),
    ("x.json", b'[{"a": "\xff"}]', r"x\.json, at or after row 0, is not UTF-8 text: byte 0xff"),
    ("x.json", b"[" * 100_000, r"x\.json, row 0 is not JSON: "),
    ("x.csv", b"a,b\n1,\xff\n", r"x\.csv, line 2 is not UTF-8 text: byte 0xff at 3"),
    ("x.csv", b'a,b\n1,"2\n', r"x\.csv, line 2 is not CSV: unexpected end of data"),
    ("x.csv", b"a,b\r1,2\r", r"x\.csv, line 1 is not CSV: new-line character seen in unquoted field"),
    ("x.csv", b"a,b,a\n1,2,3\n", r"x\.csv has the column 'a' twice"),
    ("x.parquet", b"version https://git-lfs.github.com/spec/v1\n", "is not a Parquet file: it begins with b'version '"),
    ("x.parquet", b"PAR1" + b"\0" * 100, "x.parquet is not a Parquet file that can be read: "),
    ("x.arrow", b"ARROW1" + b"\0" * 100, "x.arrow is not an Arrow file that can be read: "),
    ("x.arrow", b"", "x.arrow is not an Arrow file: it begins with b'', wanted b'ARROW1'"),
    ("x.jsonl", b"\x28\xb5\x2f\xfd....", "x.jsonl is packed by zstd; unpack it, or pack it by gzip"),
    ("x.csv", b"PK\x03\x04....", r"x.csv is packed by zip \(as an Excel file is\); unpack it"),
]


@pytest.mark.parametrize(("name", "data", "message"), REFUSED, ids=range(len(REFUSED)))
def test_a_file_that_cannot_be_read_is_named_in_one_line(name: str, data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        rows_of(data, name)
    assert "\n" not in str(error.value)


def test_each_cut_of_a_file_gives_rows_of_it_or_an_error_of_ours() -> None:
    for suffix in SUFFIXES:
        whole = ENCODERS[suffix](ROWS)
        for end in range(0, len(whole), max(1, len(whole) // 40)):
            found: list[Any] = []
            try:
                for row in read_rows(io.BytesIO(whole[:end]), f"x{suffix}"):
                    found.append(row.value)
            except ConfigError:
                pass
            found = [row for row in found if isinstance(row, dict)]
            # What a cut leaves of the last line of CSV is a row like any other.
            assert found[:-1] == ROWS[: max(0, len(found) - 1)]
            assert found == ROWS[: len(found)] or ".csv" in suffix


# --- Memory ----------------------------------------------------------------------------------------------------------


class Endless(io.RawIOBase):
    """A file that repeats one piece for ever, after a beginning; it can seek to its start."""

    def __init__(self, begin: bytes, piece: bytes, most: int) -> None:
        self.parts, self.begin, self.piece, self.most, self.at = b"", begin, piece, most, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.parts, self.at = b"", offset
        return offset

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        assert self.at < self.most, "it reads on and on"
        if not self.parts:
            self.parts = self.begin[self.at :] if self.at < len(self.begin) else self.piece
        data, self.parts = self.parts[: len(buffer)], self.parts[len(buffer) :]
        self.at += len(data)
        buffer[: len(data)] = data
        return len(data)


def memory_of(work: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


ENDLESS: list[tuple[str, bytes, bytes]] = [
    ("x.jsonl", b'{"a": "', b"x" * 65536),
    ("x.json", b'[{"a": "', b"x" * 65536),
    ("x.csv", b"a,b\n", b"x" * 65536),
    ("x.csv", b'a,b\n"', (b"x" * 1000 + b"\n") * 65),
]


@pytest.mark.parametrize(("name", "begin", "piece"), ENDLESS, ids=range(len(ENDLESS)))
def test_one_endless_row_is_refused_before_it_fills_the_memory(
    name: str, begin: bytes, piece: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "MOST_ROW_BYTES", 1 << 18)
    monkeypatch.setattr(data_files, "_CHUNK", 1 << 16)

    def work() -> None:
        with pytest.raises(ConfigError, match=name):
            list(read_rows(Endless(begin, piece, 8 << 20), name))

    assert memory_of(work) < 16 << 20


@pytest.mark.parametrize("suffix", TEXTS)
def test_of_four_megabytes_of_rows_few_are_in_memory(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "_CHUNK", 1 << 16)
    data = ENCODERS[suffix]([{"a": "x" * 20_000}] * 200)

    def work() -> None:
        assert sum(1 for _ in read_rows(io.BytesIO(data), f"x{suffix}")) == 200

    assert memory_of(work) < 1 << 20


@pytest.mark.parametrize("suffix", [suffix for suffix in TEXTS if suffix.endswith(".gz")])
def test_a_gzip_file_that_unpacks_to_far_more_than_its_size_is_refused(
    suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ENCODERS[suffix]([{"a": "x" * 1000}] * 3000)
    assert len(data) < 30_000
    monkeypatch.setattr(data_files, "MOST_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(ConfigError, match=rf"x{suffix} unpacks to over [\d,]+ bytes, more than 100 times its size"):
        rows_of(data, f"x{suffix}")
    monkeypatch.setattr(data_files, "MOST_TIMES_UNPACKED", 1000)
    assert len(rows_of(data, f"x{suffix}")) == 3000


def test_lines_are_counted_only_where_a_line_is_a_row() -> None:
    for suffix in SUFFIXES:
        assert is_lines(ENCODERS[suffix](ROWS)[:8], f"x{suffix}") == (suffix in (".jsonl", ".ndjson"))


def test_the_file_stays_open_for_its_owner(tmp_path: Path) -> None:
    def files() -> Iterator[BinaryIO]:
        yield io.BytesIO(ENCODERS[".json"](ROWS))
        yield io.BytesIO(ENCODERS[".jsonl.gz"](ROWS))
        yield write_rows(tmp_path / "x.csv", ROWS).open("rb")

    for file in files():
        name = getattr(file, "name", "x.json")
        assert len(list(read_rows(file, str(name)))) == 3
        assert not file.closed
        file.close()
