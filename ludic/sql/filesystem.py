"""Let several threads of DuckDB read files of any fsspec filesystem safely.

DuckDB calls seek and read of one Python file object from several threads. If another thread seeks in between, a query
returns wrong rows or none (DuckDB 2.0, 1 query of 50 on memory://). Here each thread has its own position, and a read
is one ranged request. Read-only; passes on the filesystem's errors.
"""

import threading
from datetime import UTC, datetime
from typing import Any

from fsspec import AbstractFileSystem

_NEVER = datetime(1970, 1, 1, tzinfo=UTC)


class RangedFileSystem(AbstractFileSystem):
    """Serves the files of another filesystem as PROTOCOL://PATH, for DuckDB's register_filesystem."""

    cachable = False

    def __init__(self, fs: AbstractFileSystem, protocol: str = "ludic") -> None:
        """Wrap `fs`. protocol: must be unique in a connection, and without punctuation."""
        super().__init__()
        self._fs, self.protocol = fs, protocol
        self._sizes: dict[str, int] = {}

    def glob(self, path: str, **_: Any) -> list[str]:
        """List the paths that match. The listing includes sizes, which saves a request for each file."""
        found = self._fs.glob(self._path(path), detail=True)
        self._sizes |= {name: info["size"] for name, info in found.items()}
        return sorted(found)

    def open(self, path: str, mode: str = "rb", **_: Any) -> "RangedFile":
        assert mode == "rb", f"{path} is only read"
        return RangedFile(self._fs, self._path(path), self.size(path))

    def size(self, path: str) -> int:
        path = self._path(path)
        if path not in self._sizes:
            self._sizes[path] = self._fs.size(path)
        return self._sizes[path]

    def modified(self, path: str) -> datetime:
        """Return a constant: files of a root never change, so DuckDB's caches of them stay valid."""
        return _NEVER

    def exists(self, path: str, **_: Any) -> bool:
        return self._fs.exists(self._path(path))

    def _path(self, url: str) -> str:
        return url.removeprefix(f"{self.protocol}://").rstrip("/")


class RangedFile:
    """A file that threads share. A read starts at this thread's last seek, else at the end of the last read."""

    def __init__(self, fs: AbstractFileSystem, path: str, size: int) -> None:
        self._fs, self._path, self._size = fs, path, size
        self._position = 0
        self._own = threading.local()

    def seek(self, position: int) -> int:
        self._position = self._own.position = position
        return position

    def tell(self) -> int:
        return self._own.__dict__.get("position", self._position)

    def read(self, num_bytes: int) -> bytes:
        start = self._own.__dict__.pop("position", self._position)
        self._position = end = min(start + num_bytes, self._size)
        return self._fs.cat_file(self._path, start=start, end=end) if start < end else b""

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        """Do nothing: no file is open between reads."""
