"""Read the rows of a data file in JSON Lines, JSON, CSV, Parquet or Arrow.

The text formats may be compressed with gzip. The content determines the format; the suffix only distinguishes CSV from
JSON. Rows are read in a stream, and a file that unpacks to far more than its size is refused. All users' data files are
read here. Raises ConfigError, which names the file, its line or row, the value found and the value wanted.

Arrow gives all structs of a column the same fields, and a missing field is null. So null in a struct of a table counts
as absent. JSON, as text or in a column of Arrow's JSON type, keeps its nulls, and so do lists and maps.
"""

import codecs
import csv
import gzip
import io
import json
import re
import reprlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from ludic.errors import ConfigError, one_line

_TEXTS = (".jsonl", ".ndjson", ".json", ".csv")
SUFFIXES = (*_TEXTS, *(f"{suffix}.gz" for suffix in _TEXTS), ".parquet", ".arrow")
"""Suffixes of data files."""
LISTED = "*.jsonl, *.ndjson, *.json, *.csv (or *.gz of these), *.parquet or *.arrow"
"""The suffixes, for messages."""

_PARQUET, _ARROW, _GZIP = b"PAR1", b"ARROW1", b"\x1f\x8b"
_ARROW_STREAM = b"\xff\xff\xff\xff"
"""The first bytes of an Arrow stream, as the package datasets stores it in files *.arrow."""
_BOM = b"\xef\xbb\xbf"
_OTHERS = {b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip (as an Excel file is)"}
"""First bytes of compressed files that are not supported."""

MOST_ROW_BYTES = 256 << 20
"""Maximum bytes of a line, an item of an array, or a CSV cell: a file without line ends would fill the memory."""
MOST_UNPACKED_BYTES = 256 << 20
MOST_TIMES_UNPACKED = 100
"""A gzip file may unpack to MOST_UNPACKED_BYTES, or else to this multiple of its size; texts shrink to a tenth, and
repetitive ones to a thirtieth."""
_ROWS_AT_ONCE = 1000
_CHUNK = 1 << 20


def table_rows(
    table: pa.Table | pa.RecordBatch, *, maps_as_pydicts: Literal["lossy", "strict"] | None = None
) -> list[dict[str, Any]]:
    """Return each row with all columns, null or not, and structs without the fields that are null.

    maps_as_pydicts: as in pyarrow's to_pylist. Raises ConfigError if two columns have the same name.
    """
    names = table.schema.names
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"the table has two columns {twice!r}; give each column a name of its own")
    nested = [field for field in table.schema if pa.types.is_nested(field.type) or _is_json(field.type)]
    rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts=maps_as_pydicts)
    for row in rows if nested else ():
        for field in nested:
            row[field.name] = _cleaned(row[field.name], field.type)
    return rows


def _cleaned(value: Any, type_: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(type_):
        return {field.name: _cleaned(value[field.name], field.type) for field in type_ if value[field.name] is not None}
    if pa.types.is_map(type_):
        pairs = value.items() if isinstance(value, dict) else value
        return type(value)((key, _cleaned(each, type_.item_type)) for key, each in pairs)
    if pa.types.is_nested(type_) and isinstance(value, list):
        return [_cleaned(each, type_.value_type) for each in value]
    return json.loads(value) if _is_json(type_) else value


def _is_json(type_: pa.DataType) -> bool:
    return isinstance(type_, pa.JsonType)


ChooseColumns = Callable[[Sequence[str]], Sequence[str]]
"""Returns those of a table's columns that are read."""
ToRows = Callable[[pa.RecordBatch], list[dict[str, Any]]]


class ReadRow(NamedTuple):
    """A row, or the reason why it can't be read."""

    number: int
    """Number of the line, or of the row of a table, from 1."""
    where: str
    """Position for messages: line 3; in an array or a table row 3, counted from 0."""
    value: dict[str, Any] | str
    """The row; or a text with the reason why there is none, such as: is not JSON."""


def is_data_file(name: str) -> bool:
    """Return whether a name has the suffix of a data file."""
    return name.lower().endswith(SUFFIXES)


def is_lines(beginning: bytes, name: str) -> bool:
    """Return whether a file of these first bytes has one row in each line. beginning: at least 8 bytes, if it has them.

    False for a packed file, whose lines can't be counted without unpacking it.
    """
    return (
        not beginning.startswith((_PARQUET, _ARROW, _ARROW_STREAM, _GZIP))
        and _suffix(name) != ".csv"
        and (beginning.removeprefix(_BOM).lstrip()[:1] != b"[")
    )


def read_rows(
    file: BinaryIO, name: str, columns: ChooseColumns | None = None, to_rows: ToRows = table_rows
) -> Iterator[ReadRow]:
    """Yield the rows of an open file, which can seek.

    name: path or URL, for messages and its suffix. columns: those that are read of Parquet and Arrow; None reads all.
    to_rows: makes rows of a table. An unreadable row is yielded with its reason; reading continues after it.
    """
    beginning = file.read(8)
    file.seek(0)
    _check_known(beginning, name)
    if beginning.startswith(_PARQUET):
        yield from _table_rows(_parquet_batches(file, columns), "Parquet", name, to_rows)
    elif beginning.startswith((_ARROW, _ARROW_STREAM)):
        is_stream = beginning.startswith(_ARROW_STREAM)
        yield from _table_rows(_arrow_batches(file, columns, is_stream=is_stream), "Arrow", name, to_rows)
    elif beginning.startswith(_GZIP):
        with io.BufferedReader(_Unpacked(file, name), _CHUNK) as unpacked:
            if unpacked.peek(8).startswith((_PARQUET, _ARROW, _GZIP)):
                raise ConfigError(f"{name} is a table or a gzip file packed by gzip once more; unpack it")
            yield from _text_rows(unpacked, name)  # type: ignore[arg-type]
    elif isinstance(file, io.BufferedReader):
        yield from _text_rows(file, name)
    else:
        buffered = io.BufferedReader(file, _CHUNK)  # type: ignore[type-var]
        try:
            yield from _text_rows(buffered, name)  # type: ignore[arg-type]
        finally:
            buffered.detach()  # otherwise it would close the caller's file


def _check_known(beginning: bytes, name: str) -> None:
    packed = next((packer for magic, packer in _OTHERS.items() if beginning.startswith(magic)), None)
    if packed is not None:
        raise ConfigError(f"{name} is packed by {packed}; unpack it, or pack it by gzip")
    kinds = {".parquet": ("a Parquet", (_PARQUET,)), ".arrow": ("an Arrow", (_ARROW, _ARROW_STREAM))}
    kind, magics = kinds.get(_suffix(name), ("", (b"",)))
    if not beginning.startswith(magics):
        raise ConfigError(f"{name} is not {kind} file: it begins with {beginning!r}, wanted {magics[0]!r}")


def _suffix(name: str) -> str:
    """Return the suffix, without that of gzip."""
    return PurePosixPath(name.lower().removesuffix(".gz")).suffix


# --- Gzip ------------------------------------------------------------------------------------------------------------


class _Unpacked(io.RawIOBase):
    """The content of a gzip file, in a stream."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._packed, self._file, self._name, self._num_bytes = file, gzip.GzipFile(fileobj=file), name, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read1(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(
                f"{self._name} is a damaged gzip file: {one_line(error)}, after {self._num_bytes:,} bytes of content"
            ) from error
        self._num_bytes += len(data)
        if self._num_bytes > max(MOST_UNPACKED_BYTES, MOST_TIMES_UNPACKED * self._packed.tell()):
            raise ConfigError(
                f"{self._name} unpacks to over {self._num_bytes:,} bytes, more than {MOST_TIMES_UNPACKED} times its "
                "size; unpack it yourself if that is right"
            )
        buffer[: len(data)] = data
        return len(data)


# --- Texts -----------------------------------------------------------------------------------------------------------


def _text_rows(file: io.BufferedReader, name: str) -> Iterator[ReadRow]:
    if file.peek(len(_BOM)).startswith(_BOM):
        file.read(len(_BOM))
    if _suffix(name) == ".csv":
        yield from _csv_rows(file, name)
    elif _first_character(file) == b"[":
        yield from _array_rows(file, name)
    else:
        yield from _line_rows(file, name)


def _first_character(file: io.BufferedReader) -> bytes:
    """Return the first byte that is not white space, within the first megabyte; consumes nothing."""
    return file.peek(_CHUNK).lstrip()[:1]


def _lines(file: io.BufferedReader, name: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(MOST_ROW_BYTES + 1):
        number += 1
        if len(line) > MOST_ROW_BYTES:
            raise ConfigError(f"{name}, line {number} has over {MOST_ROW_BYTES:,} bytes, wanted one row in each line")
        yield number, line


def _line_rows(file: io.BufferedReader, name: str) -> Iterator[ReadRow]:
    rows = (ReadRow(number, f"line {number}", _row(line)) for number, line in _lines(file, name) if line.strip())
    if _suffix(name) == ".json":  # may be one object, whose lines are not rows
        wanted = "wanted an array of rows, [{...}, {...}], or lines with a row each"
        if first := next(rows, None):
            if isinstance(first.value, str):
                raise ConfigError(f"{name}, {first.where} {first.value}; {wanted}")
            second = next(rows, None)
            if second is None:
                raise ConfigError(f"{name} holds one JSON object; {wanted}")
            yield from (first, second)
    yield from rows


def _row(line: bytes) -> dict[str, Any] | str:
    """Return the object in a line, or the reason why there is none."""
    try:
        value = msgspec.json.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # msgspec is stricter than json, which also accepts NaN
        try:
            text = line.decode()
            value = json.loads(text)
        except UnicodeDecodeError as error:
            return f"is not UTF-8 text: byte {line[error.start]:#04x} at {error.start + 1}"
        except json.JSONDecodeError as error:
            return f"is not JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}"
        except (ValueError, RecursionError) as error:  # a number with too many digits, deeply nested brackets
            return f"is not JSON: {one_line(error)}"
        return _object(value, text)
    return _object(value, "")


_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""A half of a surrogate pair in JSON."""


def _object(value: Any, text: str) -> dict[str, Any] | str:
    """Return a value, or the reason why it can't be a row. text: its JSON; empty if it has no half of a surrogate
    pair."""
    if not isinstance(value, dict):
        return f"is {reprlib.repr(value)}, wanted a JSON object with the columns as keys"
    if _HALF.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:  # no tokenizer accepts it
            half = error.object[error.start].encode("unicode_escape").decode()
            return f"holds half a character, {half}; wanted both halves, or the character itself"
    return value


def _array_rows(file: io.BufferedReader, name: str) -> Iterator[ReadRow]:
    """Yield the items of a JSON array, of which one is in memory at a time."""
    text, decoder, number = _Text(file, name), json.JSONDecoder(), 0
    text.skip("[", "row 0")
    while text.next_character(where := f"row {number}") != "]":
        if number:
            text.skip(",", where)
        yield ReadRow(number + 1, where, _item(text, decoder, where))
        number += 1
    text.skip("]", where)
    if rest := text.next_character(where):
        raise ConfigError(f"{name} continues after its array with {rest!r}, wanted one array of rows")


def _item(text: "_Text", decoder: json.JSONDecoder, where: str) -> dict[str, Any] | str:
    text.next_character(where)
    while True:
        try:
            value, end = decoder.raw_decode(text.buffer, text.at)
        except (ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError) and text.more(where):
                continue
            raise ConfigError(f"{text.name}, {where} is not JSON: {_brief(error)}; wanted an array of rows") from error
        if end == len(text.buffer) and text.more(where):  # a number may continue
            continue
        item, text.at = text.buffer[text.at : end], end
        return _object(value, item)


def _brief(error: Exception) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else one_line(error)


_BLANKS = re.compile(r"[ \t\r\n]*")


class _Text:
    """The text of a file, of which the part from `at` on is in `buffer`."""

    def __init__(self, file: io.BufferedReader, name: str) -> None:
        self.name, self.buffer, self.at = name, "", 0
        self._file, self._decoder = file, codecs.getincrementaldecoder("utf-8")()

    def more(self, where: str) -> bool:
        """Read more, at least as much as the buffer holds, so that a long item takes linear time; False at the end."""
        rest = len(self.buffer) - self.at
        if rest > MOST_ROW_BYTES:
            raise ConfigError(f"{self.name}, {where} has over {MOST_ROW_BYTES:,} characters, or is damaged")
        try:
            data = self._file.read(max(_CHUNK, rest))
            added = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{self.name}, at or after {where}, is not UTF-8 text: byte {error.object[error.start]:#04x}"
            ) from error
        self.buffer, self.at = self.buffer[self.at :] + added, 0
        return bool(data)

    def next_character(self, where: str) -> str:
        """Return the next character that is not white space, without consuming it; empty at the end."""
        while True:
            self.at = _BLANKS.match(self.buffer, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.buffer) or not self.more(where):
                return self.buffer[self.at : self.at + 1]

    def skip(self, wanted: str, where: str) -> None:
        found = self.next_character(where)
        if found != wanted:
            shown = repr(found) if found else "the end of the file"
            raise ConfigError(f"{self.name}, before {where}: found {shown}, wanted {wanted!r}")
        self.at += 1


# --- CSV -------------------------------------------------------------------------------------------------------------


def _csv_rows(file: io.BufferedReader, name: str) -> Iterator[ReadRow]:
    """Yield the rows of a CSV file, whose first line names the columns; all values are texts, an empty one is None.

    A cell that is JSON of a message, or of a list of messages, is these messages: CSV has no lists.
    """
    csv.field_size_limit(MOST_ROW_BYTES)
    reader = csv.reader(_decoded_lines(file, name), strict=True)
    names: list[str] | None = None
    line = 1
    try:
        for cells in reader:
            number, line = line, reader.line_num + 1
            if names is None:
                names = cells
                if repeated := {each for each in names if names.count(each) > 1}:
                    raise ConfigError(f"{name} has the column {min(repeated)!r} twice")
            elif len(cells) == len(names):
                yield ReadRow(number, f"line {number}", dict(zip(names, map(_cell, cells), strict=True)))
            elif cells:
                yield ReadRow(
                    number, f"line {number}", f"has {len(cells)} cells, wanted {len(names)}, as the first line"
                )
    except csv.Error as error:
        raise ConfigError(f"{name}, line {line} is not CSV: {one_line(error)}") from error


def _decoded_lines(file: io.BufferedReader, name: str) -> Iterator[str]:
    for number, line in _lines(file, name):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{name}, line {number} is not UTF-8 text: byte {line[error.start]:#04x} at {error.start + 1}"
            ) from error


_MESSAGES = re.compile(r"\s*(?:\[\s*)?\{")


def _cell(text: str) -> Any:
    if _MESSAGES.match(text):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        listed = value if isinstance(value, list) else [value]
        if all(isinstance(each, dict) and ("role" in each or "from" in each) for each in listed):
            return value
    return text or None


# --- Tables ----------------------------------------------------------------------------------------------------------


def _table_rows(batches: Iterator[pa.RecordBatch], kind: str, name: str, to_rows: ToRows) -> Iterator[ReadRow]:
    number = 0
    try:
        for batch in batches:
            for start in range(0, len(batch), _ROWS_AT_ONCE):
                for row in to_rows(batch.slice(start, _ROWS_AT_ONCE)):
                    number += 1
                    yield ReadRow(number, f"row {number - 1}", row)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{name} is not {_ARTICLES[kind]} file that can be read: {one_line(error)}") from error


_ARTICLES = {"Parquet": "a Parquet", "Arrow": "an Arrow"}


def _parquet_batches(file: BinaryIO, columns: ChooseColumns | None) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(file) as table:
        wanted = None if columns is None else columns(table.schema_arrow.names)
        yield from table.iter_batches(_ROWS_AT_ONCE, columns=wanted)


def _arrow_batches(file: BinaryIO, columns: ChooseColumns | None, *, is_stream: bool) -> Iterator[pa.RecordBatch]:
    if is_stream:
        with pa.ipc.open_stream(file) as stream:
            wanted = None if columns is None else columns(stream.schema.names)
            for batch in stream:
                yield batch if wanted is None else batch.select(wanted)
    else:
        with pa.ipc.open_file(file) as table:
            wanted = None if columns is None else columns(table.schema.names)
            for index in range(table.num_record_batches):
                batch = table.get_batch(index)
                yield batch if wanted is None else batch.select(wanted)
