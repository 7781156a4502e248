"""Differences between two safetensors files with the same tensors: lossless for every dtype, small if few words change.

A difference is an Arrow IPC stream with a row for each changed segment of the file, at most 4 Mi words of one size (2
bytes for bfloat16 and float16, 4 for float32). A row holds the gaps between the changed words and the words'
differences as integers, both as byte planes compressed by zstd. At a small learning rate most changed bfloat16 weights
move by one unit in the last place, so a changed weight takes little more than a byte. A segment in which more than a
quarter of the words change holds the differences of all its words and no gaps.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

_WORD_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
}
"""Bytes of a word by safetensors dtype; other dtypes are compared byte by byte."""
_SEGMENT_WORDS = 1 << 22
"""Maximum words of a segment, so that memory stays bounded for any size of tensor."""
_DENSE_SHARE = 0.25
"""Share of changed words from which gaps cost more than the zeros between them."""
_GAP_BYTES = 4
_MOST_HEADER_BYTES = 100_000_000
"""Maximum header length in the safetensors format."""

_SCHEMA = pa.schema(
    [
        pa.field("start", pa.int64(), nullable=False),  # first byte of the segment in the file
        pa.field("word_bytes", pa.int8(), nullable=False),
        pa.field("num_words", pa.int64(), nullable=False),
        pa.field("num_changed", pa.int64(), nullable=False),
        pa.field("gaps", pa.large_binary()),  # unchanged words before each changed word; null: all words follow
        pa.field("differences", pa.large_binary(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Words of one size in a file."""

    start: int
    word_bytes: int
    num_words: int


def write_delta(old: Path, new: Path, target: Path) -> None:
    """Write to `target` the difference that turns the file `old` into `new`.

    Raises ValueError if the files do not hold the same tensors: names, dtypes, shapes and order.
    """
    with old.open("rb") as before, new.open("rb") as after:
        header = _read_header(before)
        if _read_header(after) != header:
            raise ValueError(f"{new.name} holds other tensors than before")
        with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as stream:
            for segment in _segments(header):
                row = _encode(segment, _read_words(before, segment), _read_words(after, segment))
                if row is not None:
                    stream.write_batch(pa.RecordBatch.from_pylist([row], schema=_SCHEMA))
        if before.read(1) or after.read(1):
            raise ValueError(f"{new.name} is longer than its header says")


def apply_delta(delta: Path, file: Path) -> None:
    """Turn `file`, in place, from the old version into the new one.

    Raises ValueError if the difference is damaged or does not fit the file. The result must be checked by its digest:
    a difference to other content of the same length also applies.
    """
    with file.open("r+b") as target, pa.OSFile(str(delta)) as source, pa.ipc.open_stream(source) as stream:
        if stream.schema != _SCHEMA:
            raise ValueError("its columns are not those of a difference")
        for batch in stream:
            batch.validate(full=True)
            for row in batch.to_pylist():
                _apply(row, target)


def _read_header(file: BinaryIO) -> bytes:
    """Return the header of a safetensors file with its length, and leave the file at the first tensor."""
    length = file.read(8)
    header = file.read(min(int.from_bytes(length, "little"), _MOST_HEADER_BYTES))
    return length + header


def _segments(header: bytes) -> Iterator[_Segment]:
    """Yield the segments of a file in order; together they cover all tensors. Raises ValueError for a damaged header.

    Neighbouring tensors with words of one size are joined, so a small tensor costs no row of its own.
    """
    tensors = [tensor for name, tensor in json.loads(header[8:]).items() if name != "__metadata__"]
    runs: list[list[int]] = []
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor["data_offsets"]):
        start, stop = tensor["data_offsets"]
        size = _WORD_BYTES.get(tensor["dtype"], 1)
        if start != end or (stop - start) % size:
            raise ValueError(f"a tensor takes bytes {start:,} to {stop:,}, the one before ends at byte {end:,}")
        if runs and runs[-1][0] == size:
            runs[-1][2] = stop
        else:
            runs.append([size, start, stop])
        end = stop
    for size, start, stop in runs:
        for first in range(start, stop, size * _SEGMENT_WORDS):
            yield _Segment(len(header) + first, size, (min(stop, first + size * _SEGMENT_WORDS) - first) // size)


def _read_words(file: BinaryIO, segment: _Segment) -> np.ndarray:
    """Return the words of a segment, (num_words,) unsigned. Raises ValueError if the file ends before."""
    file.seek(segment.start)
    words = np.frombuffer(file.read(segment.num_words * segment.word_bytes), f"<u{segment.word_bytes}")
    if len(words) != segment.num_words:
        raise ValueError(f"the file ends after {len(words):,} of {segment.num_words:,} words at byte {segment.start:,}")
    return words


def _encode(segment: _Segment, old: np.ndarray, new: np.ndarray) -> dict[str, Any] | None:
    """Return the row of a segment; None if nothing changed."""
    positions = np.flatnonzero(old != new)
    if not len(positions):
        return None
    is_dense = len(positions) > _DENSE_SHARE * len(new)
    differences = new - old if is_dense else new[positions] - old[positions]
    return {
        "start": segment.start,
        "word_bytes": segment.word_bytes,
        "num_words": segment.num_words,
        "num_changed": len(differences),
        "gaps": None if is_dense else _pack((np.diff(positions, prepend=-1) - 1).astype("<u4")),
        "differences": _pack(_zigzag(differences)),
    }


def _apply(row: dict[str, Any], file: BinaryIO) -> None:
    segment = _Segment(row["start"], row["word_bytes"], row["num_words"])
    num_changed = row["num_changed"]
    if segment.word_bytes not in (1, 2, 4, 8) or not 0 <= num_changed <= segment.num_words <= _SEGMENT_WORDS:
        raise ValueError(f"its segment at byte {segment.start:,} has impossible sizes")
    words = _read_words(file, segment).copy()
    differences = _unzigzag(_unpack(row["differences"], num_changed, segment.word_bytes))
    if row["gaps"] is None:
        positions = np.arange(num_changed)
    else:
        positions = np.cumsum(_unpack(row["gaps"], num_changed, _GAP_BYTES).astype(np.int64) + 1) - 1
    if num_changed and positions[-1] >= segment.num_words:
        raise ValueError(f"it changes a word behind the end of the segment at byte {segment.start:,}")
    words[positions] += differences
    file.seek(segment.start)
    file.write(words.tobytes())


def _zigzag(differences: np.ndarray) -> np.ndarray:
    """Map words that stand for 0, -1, 1, -2, ... to 0, 1, 2, 3, ..., so that small differences have zero high bytes."""
    sign_bits = 8 * differences.itemsize - 1
    signed = differences.view(f"<i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> sign_bits)).view(differences.dtype)


def _unzigzag(words: np.ndarray) -> np.ndarray:
    one = words.dtype.type(1)
    return (words >> one) ^ (~(words & one) + one)


def _pack(words: np.ndarray) -> bytes:
    """Compress words as byte planes: first the lowest byte of each word, then the next."""
    planes = np.ascontiguousarray(words).view(np.uint8).reshape(-1, words.itemsize).T
    return pa.compress(np.ascontiguousarray(planes), codec="zstd", asbytes=True)


def _unpack(data: bytes, num_words: int, word_bytes: int) -> np.ndarray:
    """Return (num_words,) unsigned words. Raises ValueError if the data are not those of so many words."""
    try:
        planes = pa.decompress(data, num_words * word_bytes, codec="zstd", asbytes=True)
    except OSError as error:  # pyarrow's error of a codec
        raise ValueError(f"its words can't be decompressed: {error}") from error
    by_word = np.frombuffer(planes, np.uint8).reshape(word_bytes, num_words).T
    return np.ascontiguousarray(by_word).reshape(-1).view(f"<u{word_bytes}")
