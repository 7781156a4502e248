"""Random reads of files that no local path names: remote ones by ranged requests, and ones in memory."""

import io
from collections.abc import Callable
from typing import Any

TAIL_BYTES = 1 << 20
"""Bytes of the end of a file, read first: they hold a Parquet file's footer, and all of most rollout files."""


class MemoryFile(io.BytesIO):
    """File of bytes in memory, which can also be read without a copy: by slices of `data`."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.data = data


class RemoteFile(io.RawIOBase):
    """Bytes of a file whose end is already in memory; each read before the end is one request."""

    def __init__(self, read_range: Callable[[int, int], bytes], size: int, tail: bytes) -> None:
        super().__init__()
        self._read_range, self._size, self._tail = read_range, size, tail
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._read(self._position, min(self._position + len(view), self._size))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def readall(self) -> bytes:
        """Return the remaining bytes, in one request."""
        data = self._read(self._position, self._size)
        self._position += len(data)
        return data

    def _read(self, start: int, end: int) -> bytes:
        tail_start = self._size - len(self._tail)
        if start >= end:
            return b""
        if start >= tail_start:
            return self._tail[start - tail_start : end - tail_start]
        return self._read_range(start, end)
