"""Small real filesystems for tests: one that fails, stalls or loses answers on demand, one that overwrites."""

import threading
from collections.abc import Iterable
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from ludic.store.root import Root


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


def num_files(root: Root, folders: Iterable[str] = ("rollouts", "evals", "metrics")) -> int:
    return sum(len(root.list(folder)) for folder in folders)
