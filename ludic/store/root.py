"""The root of a run: one folder on any fsspec filesystem, and the few operations the store builds on.

A file that is visible is complete: creation is put-if-absent, replacement is atomic. Names
are relative to the root, with forward slashes. Failures of the filesystem raise StoreError
naming root and file; nothing is half-written.
"""

import builtins
import io
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ludic.errors import ConfigError, LudicError, MissingRootError, StoreError
from ludic.records import new_id
from ludic.store.run import RunConfig, from_json, to_json

RUN_FILE = "run.json"
_TEMPORARY = ".tmp"
"""Below a local root: what is not complete yet."""
_USER_INFO = re.compile(r"://[^/@]*@")

# memory:// checks and stores in two steps; one process has many threads that put.
_memory_lock = threading.Lock()


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

    @classmethod
    def open(cls, url: str, *, writable: bool = False) -> "Root":
        """Open a run that exists.

        `writable` also proves that the filesystem refuses to overwrite, by putting run.json again.
        Raises MissingRootError where there is no run.json, StoreError where the filesystem fails.
        """
        storage = _Storage.at(url)
        try:
            data = storage.read(RUN_FILE)
        except FileNotFoundError:
            raise MissingRootError(
                f"{storage.url} holds no run: {RUN_FILE} is missing; `ludic run` starts one"
            ) from None
        run, run_id = from_json(data, f"{storage.url}/{RUN_FILE}")
        if writable:
            storage.prove_put_if_absent(data)
        return cls(storage.url, storage.fs, storage.path, run_id, run)

    @classmethod
    def create(cls, url: str, run: RunConfig) -> "Root":
        """Start a run, or open it when the same settings started it before.

        Raises ConfigError naming each setting that differs from the run that is there.
        """
        storage = _Storage.at(url)
        run_id = new_id()
        data = to_json(run, run_id)
        if storage.put_if_absent(RUN_FILE, data):
            storage.prove_put_if_absent(data)
            return cls(storage.url, storage.fs, storage.path, run_id, run)
        root = cls.open(url, writable=True)
        differing = run.differences(root.run)
        if differing:
            raise ConfigError(
                f"{root.url} was started with other settings ({differing}); keep them or choose another root"
            )
        return root

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    @property
    def _storage(self) -> "_Storage":
        return _Storage(self.url, self.fs, self.path)

    def explained(self, name: str) -> AbstractContextManager[None]:
        """Turn a filesystem's error into a StoreError that names root and file; presence and absence pass through."""
        return self._storage.explained(name)

    def at(self, name: str) -> str:
        """Path of a file within `fs`."""
        return f"{self.path}/{name}"

    def read(self, name: str) -> bytes:
        """Content of a file; FileNotFoundError when there is none."""
        return self._storage.read(name)

    def open_file(self, name: str) -> BinaryIO:
        """A file to read at random, for the caller to close; FileNotFoundError when there is none."""
        if isinstance(self.fs, MemoryFileSystem):
            # memory:// would hand the same file, with one position, to every thread.
            return io.BytesIO(self.read(name))
        with self.explained(name):
            return self.fs.open(self.at(name), "rb")

    def exists(self, name: str) -> bool:
        with self.explained(name):
            return self.fs.exists(self.at(name))

    def list(self, name: str) -> builtins.list[str]:
        """Names of all files below a folder, sorted; empty when there is none."""
        with self.explained(name):
            found = self.fs.find(self.at(name))
        return sorted(path[len(self.path) + 1 :] for path in found)

    def folders(self, name: str) -> builtins.list[str]:
        """Names of the folders directly below a folder, sorted; empty when there is none."""
        with self.explained(name):
            try:
                entries = self.fs.ls(self.at(name), detail=True)
            except FileNotFoundError:
                return []
        return sorted(
            entry["name"].rstrip("/")[len(self.path) + 1 :] for entry in entries if entry["type"] == "directory"
        )

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create a file. False when it is there with other content.

        A retry after a lost answer finds its own bytes, and is True.
        """
        return self._storage.put_if_absent(name, data)

    def put(self, name: str, data: bytes) -> None:
        """Create or replace a file, atomically. Only for the few pointers that change, such as policies/LATEST."""
        self._storage.put(name, data)

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with all that is below; nothing happens where there is none."""
        with self.explained(name):
            try:
                self.fs.rm(self.at(name), recursive=True)
            except FileNotFoundError:
                return

    @contextmanager
    def scratch_folder(self) -> Iterator[Path]:
        """An empty local folder, gone at the end; where the root is local, on its disk and out of readers' sight."""
        parent = Path(self.at(_TEMPORARY)) if self.is_local else None
        with self.explained(_TEMPORARY):
            if parent is not None:
                parent.mkdir(exist_ok=True)
            folder = tempfile.TemporaryDirectory(prefix="ludic-", dir=parent)
        with folder as path:
            yield Path(path)

    def upload(self, folder: str | Path, name: str, *, last: str | None = None) -> None:
        """Move the files of a local folder below `name`; each appears whole, one after the other.

        last: the file that tells readers that all are there; without it a marker must follow.
        """
        files = sorted(Path(folder).iterdir(), key=lambda file: (file.name == last, file.name))
        with self._storage.explained(name, writing=True):
            self.fs.makedirs(self.at(name), exist_ok=True)
            for file in files:
                self._move_in(file, f"{name}/{file.name}")

    def _move_in(self, file: Path, name: str) -> None:
        if self.is_local:
            shutil.move(file, self.at(name))
        else:
            self.fs.put_file(str(file), self.at(name))
            file.unlink()

    def download(self, name: str, folder: str | Path) -> None:
        """Copy the files below `name` into a local folder."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for file in self.list(name):
            self._copy_out(file, Path(folder) / Path(file).name)

    def _copy_out(self, name: str, target: Path) -> None:
        if isinstance(self.fs, MemoryFileSystem):
            target.write_bytes(self.read(name))  # see open_file
        else:
            with self.explained(name):
                self.fs.get_file(self.at(name), str(target))


@dataclass(frozen=True, slots=True)
class _Storage:
    """What Root can do before run.json is known."""

    url: str
    fs: fsspec.AbstractFileSystem
    path: str

    @classmethod
    def at(cls, url: str) -> "_Storage":
        if _USER_INFO.search(str(url)):
            raise ConfigError(
                f"{_USER_INFO.sub('://', str(url))} was given with a user or a password, which logs would show; "
                "put them into the environment or into fsspec's configuration files"
            )
        try:
            # Listings change under our hands; a cached one would hide new files.
            fs, path = fsspec.core.url_to_fs(str(url), use_listings_cache=False)
        except (ValueError, ImportError, OSError) as error:
            raise StoreError(f"{url}: {error}") from error
        return cls(str(url).rstrip("/"), fs, path.rstrip("/"))

    def read(self, name: str) -> bytes:
        with self.explained(name):
            return self.fs.cat_file(f"{self.path}/{name}")

    def put_if_absent(self, name: str, data: bytes) -> bool:
        try:
            with self.explained(name, writing=True):
                self._create(name, data)
        except FileExistsError:
            return self.read(name) == data
        return True

    def put(self, name: str, data: bytes) -> None:
        with self.explained(name, writing=True):
            if isinstance(self.fs, LocalFileSystem):
                with self._temporary_file(name, data) as temporary:
                    temporary.replace(f"{self.path}/{name}")
            else:
                self.fs.pipe_file(f"{self.path}/{name}", data)

    def prove_put_if_absent(self, data: bytes) -> None:
        """Put run.json again, with the bytes that it holds: a filesystem that accepts that would overwrite rollouts."""
        try:
            with self.explained(RUN_FILE, writing=True):
                self._create(RUN_FILE, data)
        except FileExistsError:
            return
        raise StoreError(
            f"{self.url}: {type(self.fs).__name__} overwrites files although it was asked to create only; "
            "ludic needs put-if-absent: use a local folder, memory:// or s3fs"
        )

    def _create(self, name: str, data: bytes) -> None:
        """Create a file; FileExistsError when there is one."""
        target = f"{self.path}/{name}"
        if isinstance(self.fs, LocalFileSystem):
            with self._temporary_file(name, data) as temporary:
                os.link(temporary, target)
                _fsync_folder(Path(target).parent)
        else:
            try:
                with _memory_lock if isinstance(self.fs, MemoryFileSystem) else nullcontext():
                    self.fs.pipe_file(target, data, mode="create")
            except OSError as error:
                if _is_refusal(error):
                    raise FileExistsError(target) from error
                raise

    @contextmanager
    def _temporary_file(self, name: str, data: bytes) -> Iterator[Path]:
        """A complete file on the root's own disk, out of sight of readers; gone at the end."""
        folder = Path(self.path, _TEMPORARY)
        folder.mkdir(parents=True, exist_ok=True)
        Path(self.path, name).parent.mkdir(parents=True, exist_ok=True)
        temporary = folder / uuid4().hex
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def explained(self, name: str, *, writing: bool = False) -> Iterator[None]:
        """Turn a filesystem's error into a StoreError that names root and file; presence and absence pass through.

        While writing, absence is an error too: that of the bucket or of the folder.
        """
        try:
            yield
        except (LudicError, FileExistsError):
            raise
        except Exception as error:
            is_absence = isinstance(error, FileNotFoundError) and not writing
            if is_absence or not _is_filesystem_error(error):
                raise
            raise StoreError(f"{self.url}/{name}: {type(error).__name__}: {error}") from error


def _is_filesystem_error(error: Exception) -> bool:
    # botocore's errors are no OSErrors, and botocore is there only with the s3 extra.
    known = isinstance(error, OSError | NotImplementedError)
    return known or type(error).__module__.split(".")[0] in {"botocore", "aiobotocore", "aiohttp"}


def _is_refusal(error: OSError) -> bool:
    # S3's 412; s3fs knows it only from servers that name the condition, and we set no other one.
    response = getattr(error.__cause__, "response", None) or {}
    return response.get("Error", {}).get("Code") == "PreconditionFailed"


def _fsync_folder(folder: Path) -> None:
    """A link survives a power cut only when its folder is synced too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
