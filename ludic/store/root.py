"""The root of a run: one folder on any fsspec filesystem, with the file operations that the store uses.

A visible file is complete: creation is put-if-absent, replacement is atomic. Names are relative
to the root, with forward slashes. A filesystem error raises StoreError, which names root, file,
cause and what to do; errors that may pass are retried for about 30 s first.
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
    """The URL as the user gave it, without a trailing slash."""
    fs: fsspec.AbstractFileSystem
    path: str
    """The root within `fs`, without protocol."""
    run_id: str
    """A uuid7, drawn when the run was started."""
    run: RunConfig
    stop: threading.Event | None = None
    """Once set, failed operations are not retried."""

    @classmethod
    def open(cls, url: str, *, writable: bool = False, fs: fsspec.AbstractFileSystem | None = None) -> "Root":
        """Open an existing run.

        writable: also check that the filesystem refuses to overwrite, by creating run.json a second time.
        fs: filesystem to use instead of the URL's own.
        Raises MissingRootError if there is no run.json, StoreError if the filesystem fails.
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
        """Start a run, or open an existing run that has the same settings.

        A new root gets copies of the users' files that `run` names; creating it is consent to run them.
        like: the run that the settings come from. The files are copied from it, and consent is still needed.
        Raises ConfigError naming each setting that differs from the existing run, or a missing file.
        """
        storage = Storage.at(url, fs)
        run_id = new_id()
        data = to_json(run, run_id)
        root = cls(storage.url, storage.fs, storage.path, run_id, run)
        # Consent is stored before run.json: if the process is killed in between, the same command can resume.
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
        """Turn filesystem errors into StoreErrors that name root and file.

        FileExistsError passes through, and so does FileNotFoundError, unless the bucket is missing.
        """
        return self._storage.explained(name)

    def at(self, name: str) -> str:
        """Return the path of a file within `fs`."""
        return self._storage.at_path(name)

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError if there is no such file."""
        return self._storage.read(name)

    def read_range(self, name: str, start: int, end: int | None = None) -> bytes:
        """Return the bytes from `start` to before `end`; a negative start counts from the end."""
        return self._storage.read_range(name, start, end)

    def open_file(self, name: str) -> BinaryIO:
        """Open a file for random reads; the caller closes it. Raises FileNotFoundError if there is no such file."""
        return self._storage.open_file(name)

    def exists(self, name: str) -> bool:
        return self._storage.exists(name)

    def list(self, name: str) -> builtins.list[str]:
        """Return the names of all files below a folder, sorted; empty if there are none."""
        return self._storage.list(name)

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size in bytes of each file below a folder, by name, sorted; empty if there are none."""
        return self._storage.sizes(name)

    def folders(self, name: str) -> builtins.list[str]:
        """Return the names of the folders directly below a folder, sorted; empty if there are none."""
        return self._storage.folders(name)

    def put_if_absent(self, name: str, data: Content) -> bool:
        """Create a file. Returns False if it exists with other content.

        A retry after a lost answer finds its own bytes and returns True.
        """
        return self._storage.put_if_absent(name, data)

    def put_file_if_absent(self, file: Path, name: str) -> bool:
        """Create a file from a local file of any size. Returns False if it exists with other content.

        `file` is kept and must not change afterwards: on the root's own disk it may be a hard link to the same file.
        So write it into `scratch_folder`. A retry after a lost answer finds its own bytes and returns True.
        """
        return self._storage.put_file_if_absent(file, name)

    def put(self, name: str, data: Content) -> None:
        """Create or replace a file atomically. Only for the few pointers that change, such as policies/LATEST."""
        self._storage.put(name, data)

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with all files below it; does nothing if it does not exist."""
        self._storage.delete(name)

    @contextmanager
    def scratch_folder(self) -> Iterator[Path]:
        """Make an empty local folder, deleted at the end; for a local root, on its disk where readers don't look."""
        with self._storage.scratch_folder() as folder:
            yield folder

    def upload(self, folder: str | Path, name: str, *, last: str | None = None) -> None:
        """Move all files of a local folder, subfolders included, below `name`; each appears whole, one after the other.

        last: the file that is moved last and tells readers that all files are there; if None, a marker must follow.
        """
        files = {file.relative_to(folder).as_posix(): file for file in Path(folder).rglob("*") if not file.is_dir()}
        for relative in sorted(files, key=lambda relative: (relative == last, relative)):
            self._storage.move_in(files[relative], f"{name}/{relative}")

    def download(self, name: str, folder: str | Path, *, leave_out: Collection[str] = ()) -> None:
        """Copy the files below `name`, subfolders included, into a local folder. leave_out: file names to skip.

        Raises StoreError if a name leads out of the folder, before anything is copied.
        """
        names = {file: PurePosixPath(file).relative_to(name) for file in self.list(name)}
        self._storage.download({file: path for file, path in names.items() if path.name not in leave_out}, Path(folder))
