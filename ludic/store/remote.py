"""A file that is read at random by ranged requests."""

import io
from collections.abc import Callable
from typing import Any

TAIL_BYTES = 1 << 20
"""Read first: with it comes the footer of a Parquet file, and most files of rollouts are not larger."""


class RemoteFile(io.RawIOBase):
    """Bytes of a file whose end is at hand; each read before that is one request."""

    def __init__(self, read_range: Callable[[int, int], bytes], size: int, tail: bytes) -> None:
        super().__init__()
        self._read_range, self._size, self._tail = read_range, size, tail
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._read(self._place, min(self._place + len(view), self._size))
        view[: len(data)] = data
        self._place += len(data)
        return len(data)

    def readall(self) -> bytes:
        """The rest, in one request."""
        data = self._read(self._place, self._size)
        self._place += len(data)
        return data

    def _read(self, start: int, end: int) -> bytes:
        tail_start = self._size - len(self._tail)
        if start >= end:
            return b""
        if start >= tail_start:
            return self._tail[start - tail_start : end - tail_start]
        return self._read_range(start, end)
