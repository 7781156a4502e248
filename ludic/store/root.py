"""The root of a run: one folder on any fsspec filesystem, and the few operations the store builds on.

A file that is visible is complete: creation is put-if-absent, replacement is atomic. Names
are relative to the root, with forward slashes. Failures of the filesystem raise StoreError
naming root, file, cause and what to do, after some 30 s of trying again where that may help.
"""

import builtins
import threading
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import fsspec

from ludic.errors import ConfigError, MissingRootError
from ludic.records import new_id
from ludic.store.code import consented_files, copy_code, keep_files
from ludic.store.filesystem import Storage
from ludic.store.local import Content
from ludic.store.run import RunConfig, from_json, to_json
from ludic.user_files import NO_FILES

RUN_FILE = "run.json"


@dataclass(frozen=True, slots=True)
class Root:
    """An opened root. Cheap to pass around; holds no open files."""

    url: str
    """As the user gave it, without a trailing slash."""
    fs: fsspec.AbstractFileSystem
    path: str
    """The root within `fs`, without protocol."""
    run_id: str
    """uuid7, drawn when the run was started."""
    run: RunConfig
    stop: threading.Event | None = None
    """Once set, operations that fail are no longer tried again."""

    @classmethod
    def open(cls, url: str, *, writable: bool = False, fs: fsspec.AbstractFileSystem | None = None) -> "Root":
        """Open a run that exists.

        `writable` also proves that the filesystem refuses to overwrite, by putting run.json again.
        `fs` is used in place of the URL's own filesystem.
        Raises MissingRootError where there is no run.json, StoreError where the filesystem fails.
        """
        storage = Storage.at(url, fs)
        try:
            data = storage.read(RUN_FILE)
        except FileNotFoundError:
            raise MissingRootError(
                f"{storage.url} holds no run: {RUN_FILE} is missing; `ludic run` starts one"
            ) from None
        run, run_id = from_json(data, f"{storage.url}/{RUN_FILE}")
        if writable:
            storage.prove_put_if_absent(RUN_FILE, data)
        return cls(storage.url, storage.fs, storage.path, run_id, run)

    @classmethod
    def create(
        cls, url: str, run: RunConfig, *, like: "Root | None" = None, fs: fsspec.AbstractFileSystem | None = None
    ) -> "Root":
        """Start a run, or open it when the same settings started it before.

        The users' files that `run` names are copied into a new root, and whoever creates it consents to run them;
        like: they are copied from that run, which gave the settings, and consent stays to be given.
        Raises ConfigError naming each setting that differs from the run that is there, or a file that is missing.
        """
        storage = Storage.at(url, fs)
        run_id = new_id()
        data = to_json(run, run_id)
        root = cls(storage.url, storage.fs, storage.path, run_id, run)
        # Consent comes before the run: whoever is cut short can go on.
        files = NO_FILES if like or storage.exists(RUN_FILE) else consented_files(root)
        if storage.put_if_absent(RUN_FILE, data):
            storage.prove_put_if_absent(RUN_FILE, data)
            keep_files(root, files) if like is None else copy_code(like, root)
            return root
        root = cls.open(url, writable=True, fs=fs)
        differing = run.differences(root.run)
        if differing:
            raise ConfigError(
                f"{root.url} was started with other settings ({differing}); keep them or choose another root"
            )
        return root

    @property
    def is_local(self) -> bool:
        return self._storage.is_local

    @property
    def _storage(self) -> Storage:
        return Storage(self.url, self.fs, self.path, self.stop)

    def explained(self, name: str) -> AbstractContextManager[None]:
        """Turn a filesystem's error into a StoreError that names root and file; presence and absence pass through."""
        return self._storage.explained(name)

    def at(self, name: str) -> str:
        """Path of a file within `fs`."""
        return self._storage.at_path(name)

    def read(self, name: str) -> bytes:
        """Content of a file; FileNotFoundError when there is none."""
        return self._storage.read(name)

    def read_range(self, name: str, start: int, end: int | None = None) -> bytes:
        """Bytes from `start` to before `end`; a negative start counts from the end."""
        return self._storage.read_range(name, start, end)

    def open_file(self, name: str) -> BinaryIO:
        """A file to read at random, for the caller to close; FileNotFoundError when there is none."""
        return self._storage.open_file(name)

    def exists(self, name: str) -> bool:
        return self._storage.exists(name)

    def list(self, name: str) -> builtins.list[str]:
        """Names of all files below a folder, sorted; empty when there is none."""
        return self._storage.list(name)

    def sizes(self, name: str) -> dict[str, int]:
        """Names of all files below a folder, sorted, with their bytes; empty when there is none."""
        return self._storage.sizes(name)

    def folders(self, name: str) -> builtins.list[str]:
        """Names of the folders directly below a folder, sorted; empty when there is none."""
        return self._storage.folders(name)

    def put_if_absent(self, name: str, data: Content) -> bool:
        """Create a file. False when it is there with other content.

        A retry after a lost answer finds its own bytes, and is True.
        """
        return self._storage.put_if_absent(name, data)

    def put_file_if_absent(self, file: Path, name: str) -> bool:
        """Create a file from a local one, however large. False when it is there with other content.

        `file` stays, and must not change any more: on the root's own disk both names are of one file.
        So write it into `scratch_folder`. A retry after a lost answer finds its own bytes, and is True.
        """
        return self._storage.put_file_if_absent(file, name)

    def put(self, name: str, data: Content) -> None:
        """Create or replace a file, atomically. Only for the few pointers that change, such as policies/LATEST."""
        self._storage.put(name, data)

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with all that is below; nothing happens where there is none."""
        self._storage.delete(name)

    @contextmanager
    def scratch_folder(self) -> Iterator[Path]:
        """An empty local folder, gone at the end; where the root is local, on its disk and out of readers' sight."""
        with self._storage.scratch_folder() as folder:
            yield folder

    def upload(self, folder: str | Path, name: str, *, last: str | None = None) -> None:
        """Move the files of a local folder and of its folders below `name`; each appears whole, one after the other.

        last: the file that tells readers that all are there; without it a marker must follow.
        """
        files = {file.relative_to(folder).as_posix(): file for file in Path(folder).rglob("*") if not file.is_dir()}
        for relative in sorted(files, key=lambda relative: (relative == last, relative)):
            self._storage.move_in(files[relative], f"{name}/{relative}")

    def download(self, name: str, folder: str | Path, *, leave_out: Collection[str] = ()) -> None:
        """Copy the files below `name`, and their folders, into a local folder, without those of some names.

        Raises StoreError for a name that leads out of the folder, before anything is copied.
        """
        names = {file: PurePosixPath(file).relative_to(name) for file in self.list(name)}
        self._storage.download({file: path for file, path in names.items() if path.name not in leave_out}, Path(folder))
