"""Digests of all bytes of a Parquet file, stored inside the file, so that a read can check the bytes it takes.

    PAR1, column chunks | a digest of each page of 64 KiB before | trailer | footer, its length, PAR1

Parquet readers locate the footer from the end of the file and all else by offsets from its start, so other readers
ignore the block in between. The trailer holds the digest of the footer and that of the block itself. The footer's entry
`ludic.digests` says that there is a block. So damage to the footer or the block is detected through the other. A file
without both, from an older ludic or another writer, is read unchecked. Digests are 64-bit XXH3: they detect accidents,
not forgery. Only `seal_file` opens a file.
"""

import io
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh3_64_intdigest

from ludic.errors import SchemaError
from ludic.store.filesystem import MemoryFile

DIGESTS_KEY = b"ludic.digests"
"""Key of the footer entry that marks a file with digests."""
PAGE_BYTES = 1 << 16
"""Size of a page, in bytes. A read takes whole pages; smaller ones cost more calls. Digests take 0.01% of a file."""
_MAGIC = b"LUDICxx1"
_TRAILER = struct.Struct("<QQ8sQ")
"""Number of bytes that have page digests, digest of footer to end, _MAGIC, digest of the block up to here."""
_FOOTER_END = 8
"""Number of bytes after a footer: its length (4), and PAR1."""


def seal(data: Any) -> bytes:
    """Return a Parquet file with its digests added. data: a buffer of the whole file, whose footer has DIGESTS_KEY."""
    view = memoryview(data).cast("B")
    start = _footer_start(view)
    return b"".join([view[:start], _block(view[:start], view[start:]), view[start:]])


def sound_footer(data: bytes) -> bytes | None:
    """Return the footer of a whole file, with its length and PAR1, if all bytes match their digests; else None."""
    view = memoryview(data)
    start = _footer_start(view) if len(data) > _FOOTER_END else 0
    if start < _TRAILER.size:
        return None
    num_bytes = _TRAILER.unpack_from(view, start - _TRAILER.size)[0]
    is_sound = num_bytes < start and _block(view[:num_bytes], view[start:]) == view[num_bytes:start]
    return bytes(view[start:]) if is_sound else None


def seal_file(path: Path) -> None:
    """Add the digests to a local file, which must be complete and not yet visible to readers."""
    with pa.memory_map(str(path)) as mapped:
        view = memoryview(mapped.read_buffer()).cast("B")
        start = _footer_start(view)
        end = _block(view[:start], view[start:]) + bytes(view[start:])
    with path.open("r+b") as file:
        file.seek(start)
        file.write(end)


def _footer_start(view: memoryview) -> int:
    return len(view) - _FOOTER_END - int.from_bytes(view[-_FOOTER_END:-4], "little")


def _block(content: memoryview, footer: memoryview) -> bytes:
    """Return the block of digests. content: all bytes before the block."""
    pages = _digest_pages(content).tobytes()
    own = _TRAILER.pack(len(content), xxh3_64_intdigest(footer), _MAGIC, 0)[:-8]
    return pages + own + xxh3_64_intdigest(pages + own).to_bytes(8, "little")


def _digest_pages(view: memoryview) -> np.ndarray:
    """Return the digest of each page: (num_pages,) uint64."""
    pages = [view[start : start + PAGE_BYTES] for start in range(0, len(view), PAGE_BYTES)]
    return np.array([xxh3_64_intdigest(page) for page in pages], "<u8")


def read_end(source: BinaryIO) -> bytes:
    """Read the trailer (if there is one), the footer, its length and PAR1; empty if there is no footer."""
    size = source.seek(0, io.SEEK_END)
    source.seek(max(0, size - _FOOTER_END))
    length = int.from_bytes(source.read(_FOOTER_END)[:4], "little") + _FOOTER_END
    if not _FOOTER_END < length < size:
        return b""
    source.seek(max(0, size - length - _TRAILER.size))
    return source.read(size)


@dataclass(frozen=True, slots=True)
class Digests:
    """Page digests of the first `num_bytes` bytes of a file, which come before the digests themselves."""

    num_bytes: int
    pages: np.ndarray
    """(num_pages,) uint64."""


def parse_end(source: BinaryIO, end: bytes, where: str) -> tuple[pq.FileMetaData, Digests | None]:
    """Parse the footer and the digests of a file; the digests are None if the file has none.

    end: as returned by `read_end`. Raises SchemaError if footer and digests don't match, and pyarrow's error if the
    footer can't be read.
    """
    footer_start = len(end) - _FOOTER_END - int.from_bytes(end[-_FOOTER_END:-4], "little")
    trailer, footer = end[:footer_start], end[footer_start:]
    if len(trailer) < _TRAILER.size or _TRAILER.unpack(trailer)[2] != _MAGIC:
        metadata = pq.read_metadata(pa.BufferReader(footer))
        return metadata, _lost_digests(source, len(end)) if DIGESTS_KEY in (metadata.metadata or {}) else None
    num_bytes, of_footer, _, of_block = _TRAILER.unpack(trailer)
    if xxh3_64_intdigest(footer) != of_footer:
        raise SchemaError(_damage(where, "its footer does not match its digest"))
    pages = _read_pages(source, num_bytes, len(end))
    if xxh3_64_intdigest(pages + trailer[:-8]) != of_block:
        raise SchemaError(_damage(where, "its digests do not match their own digest"))
    return pq.read_metadata(pa.BufferReader(footer)), Digests(num_bytes, np.frombuffer(pages, "<u8"))


def _lost_digests(source: BinaryIO, end_size: int) -> Digests:
    """Return digests that no page matches, for a file with DIGESTS_KEY but without digests.

    They were lost, or another program wrote the file with ludic's footer entries. The footer can still be read,
    since it may show that a newer ludic wrote the file.
    """
    num_bytes = source.seek(0, io.SEEK_END) - end_size
    return Digests(num_bytes, np.zeros(-(-num_bytes // PAGE_BYTES), "<u8"))


def _read_pages(source: BinaryIO, num_bytes: int, end_size: int) -> bytes:
    """Read the page digests, which lie between the pages and the end; empty if their size does not fit there."""
    stop = source.seek(0, io.SEEK_END) - end_size
    if stop - num_bytes != 8 * -(-num_bytes // PAGE_BYTES):
        return b""
    source.seek(num_bytes)
    return source.read(stop - num_bytes)


def _damage(where: str, what: str) -> str:
    return (
        f"{where}: {what}, so a disk, a copy or another program has changed it; put a sound copy in its place, or let "
        "`ludic verify --repair` quarantine it"
    )


def _read_buffer(source: BinaryIO, num_bytes: int) -> pa.Buffer:
    """Read without a copy where the source allows: copying 2 MB takes half as long as reading their columns."""
    if isinstance(source, pa.NativeFile):
        return source.read_buffer(num_bytes)
    if isinstance(source, MemoryFile):
        start = source.tell()
        return pa.py_buffer(source.data)[start : start + num_bytes]
    return pa.py_buffer(source.read(num_bytes))


class CheckedFile:
    """The part of a Parquet file before its digests, for random reads; raises SchemaError if a page does not match."""

    closed = False

    def __init__(self, source: BinaryIO, digests: Digests, where: str) -> None:
        """digests: as returned by `parse_end`. where: names the file in errors."""
        self._source, self._pages, self.size, self._where = source, digests.pages, digests.num_bytes, where
        self._position = 0
        self._start, self._data = 0, pa.py_buffer(b"")
        """Offset and bytes of the pages that were read last, kept because small columns share a page."""
        self._unread = np.ones(len(digests.pages), bool)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def read_buffer(self, num_bytes: int) -> pa.Buffer:
        """Read without a copy; Arrow calls this instead of `read`."""
        start, stop = self._position, min(self._position + num_bytes, self.size)
        if not self._start <= start <= stop <= self._start + self._data.size:
            self._load(start // PAGE_BYTES, -(-stop // PAGE_BYTES))
        self._position = stop
        return self._data[start - self._start : stop - self._start]

    def read(self, num_bytes: int) -> bytes:
        return self.read_buffer(num_bytes).to_pybytes()

    def check_rest(self) -> None:
        """Check the pages that were not read."""
        for page in np.flatnonzero(self._unread).tolist():
            self._load(page, page + 1)

    def close(self) -> None:
        """Do nothing: the caller that opened the source closes it."""

    def _load(self, first: int, last: int) -> None:
        """Read and check the pages from `first` up to, not including, `last`."""
        start, stop = first * PAGE_BYTES, min(last * PAGE_BYTES, self.size)
        self._source.seek(start)
        self._data = _read_buffer(self._source, stop - start)
        self._start = start
        broken = np.flatnonzero(_digest_pages(memoryview(self._data)) != self._pages[first:last])
        if len(broken):
            self._data = pa.py_buffer(b"")
            start += PAGE_BYTES * int(broken[0])
            raise SchemaError(
                _damage(self._where, f"the {PAGE_BYTES:,} bytes from {start:,} on do not match their digest")
            )
        self._unread[first:last] = False
