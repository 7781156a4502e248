"""Small real filesystems for tests: one that the test controls, one that overwrites, one on which all goes wrong.

FaultyFileSystem reaches the files of any other filesystem, and at every storage call may fail in one of the ways in
which networks, object stores and processes do.
"""

import errno
import io
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ludic.root.root import Root

Answer = TypeVar("Answer")
Entry = dict[str, Any]


class UnreliableFileSystem(MemoryFileSystem):
    """The files of memory://, through a connection that the test controls. Never cached: each test makes its own."""

    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.is_up = threading.Event()
        """Writes wait for it."""
        self.is_up.set()
        self.waits = threading.Event()
        """Set once a write waits, or has waited."""
        self.failures_before: list[Exception] = []
        """Each raised by one write, which stores nothing."""
        self.failures_after: list[Exception] = []
        """Each raised by one write after it stored everything: the answer is lost."""
        self.failures_of_reads: list[Exception] = []
        self.written: list[str] = []
        """Names of the files stored, without folders, in order."""
        self.shown: list[str] | None = None
        """All that listings show, whether it is there or not; None: what is there."""

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: Any) -> Any:
        if self.shown is None:
            return super().find(path, maxdepth, withdirs, **options)
        return {name: {"name": name, "size": 0} for name in self.shown if name.startswith(path)}

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if not self.is_up.is_set():
            self.waits.set()
            assert self.is_up.wait(60), "the test never let the write pass"
        if self.failures_before:
            raise self.failures_before.pop(0)
        super().pipe_file(path, value, mode=mode, **options)
        self.written.append(path.rpartition("/")[2])
        if self.failures_after:
            raise self.failures_after.pop(0)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if self.failures_of_reads:
            raise self.failures_of_reads.pop(0)
        return super().cat_file(path, start, end, **options)


class OverwritingFileSystem(MemoryFileSystem):
    """Takes mode="create" and overwrites all the same, as obstore's adapter does."""

    protocol = "overwriting"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("overwriting://", "memory://"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        super().pipe_file(path, value, mode="overwrite", **options)


class Fault(Enum):
    """What may go wrong at one storage call."""

    ERROR_BEFORE = auto()
    """An error; nothing was done."""
    ERROR_AFTER = auto()
    """An error, although it was done."""
    FULL = auto()
    """A write finds no space."""
    LATE = auto()
    """A write or a deletion times out, and is done when the storage gets round to it (SharedStorage.settle)."""
    TWICE = auto()
    """A write or a deletion is sent twice, and answered by what became of the second."""
    SHORT = auto()
    """A read of an open file gives half of what is there."""
    STALE = auto()
    """A listing misses the newest files."""
    GHOSTS = auto()
    """A listing shows files that are deleted."""
    MEANWHILE = auto()
    """Before it is done, another process acts (SharedStorage.meanwhile)."""
    DIE_BEFORE = auto()
    """The process ends; nothing was done."""
    DIE_AFTER = auto()
    """The process ends when it was done."""
    DIE_WITHIN = auto()
    """The process ends in a write, half of which is there: no object store does so, but copying tools do."""


CRASHES = (Fault.DIE_BEFORE, Fault.DIE_AFTER, Fault.DIE_WITHIN)


class ProcessDied(BaseException):
    """Raised by every storage call of a process that has died, so that nothing it cleans up reaches the storage."""


class SharedStorage:
    """A filesystem that several connections share, and what they must remember of it together."""

    def __init__(self, inner: AbstractFileSystem, seed: int = 0) -> None:
        self.inner = inner
        self.injected: Counter[Fault] = Counter()
        """Faults that really happened."""
        self.torn: set[str] = set()
        """Paths of files of which half was written, whatever became of them."""
        self.newest: deque[str] = deque(maxlen=3)
        self.deleted: deque[Entry] = deque(maxlen=3)
        self.late: list[Callable[[], object]] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self.random = random.Random(seed)

    def settle(self) -> None:
        """Do what was late, in any order."""
        self.random.shuffle(self.late)
        while self.late:
            with suppress(FileExistsError, FileNotFoundError):
                self.late.pop()()


class FaultyFileSystem(AbstractFileSystem):
    """One process's connection to a storage.

    `faults` has an entry for each of its next calls; a fault that only some calls can have waits for such a one.

    Behaves as object stores do, over memory:// too: a file is put whole, or refused; a folder is deleted file by
    file; listings are in any order.
    """

    cachable = False

    def __init__(self, storage: SharedStorage, **options: Any) -> None:
        super().__init__(**options)
        self.storage = storage
        self.faults: deque[Fault | None] = deque()
        self.is_dead = False
        self._lock = threading.RLock()

    def _call(self, call: Callable[[], Answer], special: Mapping[Fault, Callable[[], Answer]] | None = None) -> Answer:
        """Make a call, or what its fault makes of it; `special` are those faults that only such a call can have."""
        with self._lock:
            if self.is_dead:
                raise ProcessDied
            outcomes = {
                None: call,
                Fault.ERROR_BEFORE: self._fail,
                Fault.ERROR_AFTER: lambda: self._fail(call()),
                Fault.MEANWHILE: lambda: self.storage.meanwhile() or call(),
                Fault.DIE_BEFORE: self._die,
                Fault.DIE_AFTER: lambda: self._die(call()),
                **(special or {}),
            }
            if not self.faults or self.faults[0] not in outcomes:
                return call()
            fault = self.faults.popleft()
            if fault is not None:
                self.storage.injected[fault] += 1
            return outcomes[fault]()

    def _fail(self, *done: object) -> NoReturn:
        raise ConnectionResetError(errno.ECONNRESET, "the connection broke")

    def _die(self, *done: object) -> NoReturn:
        self.is_dead = True
        raise ProcessDied

    def _change(self, change: Callable[[], None], special: Mapping[Fault, Callable[[], None]] | None = None) -> None:
        def later() -> NoReturn:
            self.storage.late.append(change)
            raise TimeoutError(errno.ETIMEDOUT, "no answer")

        def twice() -> None:
            with suppress(FileExistsError):
                change()
            change()

        self._call(change, {Fault.LATE: later, Fault.TWICE: twice, **(special or {})})

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        def write(data: bytes = value) -> None:
            self.storage.inner.pipe_file(path, data, mode=mode, **options)
            self.storage.newest.append(path)

        def find_no_space() -> NoReturn:
            raise OSError(errno.ENOSPC, "No space left on device")

        def tear() -> NoReturn:
            with suppress(FileExistsError):
                write(value[: len(value) // 2])
                self.storage.torn.add(path)
            self._die()

        self._change(write, {Fault.FULL: find_no_space, Fault.DIE_WITHIN: tear})

    def put_file(self, lpath: str, rpath: str, callback: Any = None, mode: str = "overwrite", **options: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes(), mode=mode)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        self._change(lambda: self.storage.inner.cp_file(path1, path2, **options))

    def rm_file(self, path: str) -> None:
        def delete() -> None:
            entry = self.storage.inner.info(path)
            self.storage.inner.rm_file(path)
            self.storage.deleted.append(entry)

        self._change(delete)

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        paths = [path] if isinstance(path, str) else path
        files = [file for each in paths for file in (self.find(each) if recursive else []) or [each]]
        for file in files:
            self.rm_file(file)

    def _list(self, path: str, entries: Callable[[], Iterable[Entry]]) -> list[Entry]:
        def stale() -> list[Entry]:
            return [entry for entry in entries() if entry["name"] not in self.storage.newest]

        def with_ghosts() -> list[Entry]:
            deleted = (entry for entry in self.storage.deleted if entry["name"].startswith(f"{path}/"))
            return list({entry["name"]: entry for entry in (*deleted, *entries())}.values())

        found = self._call(lambda: list(entries()), {Fault.STALE: stale, Fault.GHOSTS: with_ghosts})
        return self.storage.random.sample(found, len(found))

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **options: Any
    ) -> Any:
        inner = self.storage.inner
        found = self._list(path, lambda: inner.find(path, maxdepth, withdirs, detail=True, **options).values())
        return {entry["name"]: entry for entry in found} if detail else [entry["name"] for entry in found]

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        found = self._call(lambda: self.storage.inner.ls(path, detail=True, **options))
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **options: Any) -> Entry:
        return self._call(lambda: self.storage.inner.info(path, **options))

    def exists(self, path: str, **options: Any) -> bool:
        return self._call(lambda: self.storage.inner.exists(path, **options))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return self._call(lambda: self.storage.inner.cat_file(path, start, end, **options))

    def get_file(self, rpath: str, lpath: str, callback: Any = None, outfile: Any = None, **options: Any) -> None:
        Path(lpath).write_bytes(self.cat_file(rpath))

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        assert mode == "rb", "the store writes whole files"
        return _OpenFile(self, self.cat_file(path))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._call(lambda: self.storage.inner.makedirs(path, exist_ok=exist_ok))

    def _strip_protocol(self, path: Any) -> Any:
        return self.storage.inner._strip_protocol(path)


class _OpenFile(io.RawIOBase):
    """Each read is a call."""

    def __init__(self, fs: FaultyFileSystem, data: bytes) -> None:
        super().__init__()
        self._fs, self._file = fs, io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        def read_half() -> int:
            return self._file.readinto(memoryview(buffer)[: len(buffer) // 2])

        return self._fs._call(lambda: self._file.readinto(buffer), {Fault.SHORT: read_half})

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def num_files(root: Root, folders: Iterable[str] = ("rollouts", "evals", "metrics")) -> int:
    return sum(len(root.list(folder)) for folder in folders)
