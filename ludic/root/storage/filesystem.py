"""Read, write and list files below one URL of any fsspec filesystem, without knowledge of runs.

A visible file is complete: creation is put-if-absent, replacement is atomic. Names are relative to the URL, with
forward slashes. An operation that fails for a transient reason is retried for about 30 s. Other failures raise
StoreError, which names the URL, the cause and what to do. Reading a file that does not exist raises FileNotFoundError.
No operation follows a symbolic link that leads out of a local folder or opens anything but a regular file: a listing
skips both with a warning, all other operations raise SchemaError (`Storage.at`, `Storage.file_for_others`,
ludic.root.storage.local). The same holds for keys of an object store that are not paths.
"""

import builtins
import io
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from glob import has_magic
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ludic.base import has_secret, is_path, public_url, temporary_folder
from ludic.errors import ConfigError, LudicError, SchemaError, StoreError
from ludic.root.storage import local
from ludic.root.storage.failures import (
    diagnose,
    explain,
    is_filesystem_error,
    is_refused_overwrite,
    is_transient,
    retried,
)
from ludic.root.storage.local import SCRATCH, Content
from ludic.settings import check_utf8

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_COMPARED_BYTES = 16 << 20
_LOCAL_PAUSE_S, _LOCAL_GROWTH = 0.005, 1.02
"""Shortest pause between two checks for a file on a local disk, where a check takes 0.15 ms and costs no request; and
the growth of the pauses: each is 2% of the wait so far."""

# memory:// checks and stores in two steps, and several threads of a process put files.
_memory_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Storage:
    """A folder on a filesystem."""

    url: str
    """URL as the user gave it, without a trailing slash."""
    fs: fsspec.AbstractFileSystem
    path: str
    """The folder within `fs`, without protocol."""
    stop: threading.Event | None = None
    """Once set, failed operations are not retried."""

    @classmethod
    def connect(cls, url: str, fs: fsspec.AbstractFileSystem | None = None) -> "Storage":
        """Connect to a URL.

        Raises ConfigError if it is empty, holds a secret or is not UTF-8, StoreError if no filesystem supports it.
        """
        url = str(url)
        if not url.strip():
            raise ConfigError("ROOT is empty; name a folder or a URL")
        _refuse_secrets(url)
        if fs is not None:
            path = fs._strip_protocol(url)
        else:
            fs, path = _connect(url)
        check_utf8(path, "the folder of the run")
        return cls(url.rstrip("/"), fs, path.rstrip("/"))

    @property
    def is_local(self) -> bool:
        return isinstance(self.fs, LocalFileSystem)

    def pauses(self, shortest_s: float, longest_s: float, *, least_s: float = 0.0) -> Iterator[float]:
        """Yield the seconds between checks for a file that another process writes.

        They grow while the file is missing, more slowly on a local disk. shortest_s: on an object store, where each
        check costs requests. least_s: of every pause, also on a local disk.
        """
        if self.is_local:
            return back_off(max(_LOCAL_PAUSE_S, least_s), longest_s, growth=_LOCAL_GROWTH)
        return back_off(max(shortest_s, least_s), longest_s)

    @property
    def _is_memory(self) -> bool:
        return isinstance(self.fs, MemoryFileSystem)

    def at(self, name: str) -> str:
        """Return the path of a file within `fs`.

        Raises SchemaError if the name, or a symbolic link on its way, leads out of the folder.
        """
        path = self._path(name)
        if self.is_local:
            local.check_links(self.path, name)
        return path

    def _path(self, name: str) -> str:
        return f"{self.path}/{check_inside(name, self.url)}"

    def _checked(self, name: str) -> str:
        """Return a name that `at` takes."""
        self.at(name)
        return name

    def folder_for_others(self, name: str) -> Path:
        """Return a folder of a local URL for another program that reads or writes in it.

        Raises SchemaError if the folder or any entry below it is a symbolic link that leads out of the URL, or is
        neither a folder nor a regular file.
        """
        assert self.is_local
        folder = Path(self.at(name))
        for stray, problem in local.strays(self.path, name).items():
            raise SchemaError(f"{self.path}/{stray} {problem}")
        return folder

    def file_for_others(self, name: str) -> str:
        """Return the path of a file within `fs` for another program, which can open it without blocking.

        Raises SchemaError as `at` does, and on a local disk for anything but a regular file, such as a named pipe.
        """
        path = self.at(name)
        if self.is_local:
            local.check_file(path)
        return path

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        return self._try(name, lambda: self._cat(name))

    def _cat(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        if type(self.fs) is LocalFileSystem:
            return local.read(self.at(name), start, end)
        return self.fs.cat_file(self.file_for_others(name), start=start, end=end)

    def read_range(self, name: str, start: int, end: int | None = None) -> bytes:
        """Return the bytes from `start` to before `end`; a negative start counts from the end."""
        if end is not None and 0 <= end <= start:
            return b""
        if start < 0 and not self._counts_from_the_end:
            start = max(0, self._size(name) + start)
        return self._try(name, lambda: self._cat(name, start, end))

    def _read_exactly(self, name: str, start: int, end: int) -> bytes:
        def read() -> bytes:
            data = self._cat(name, start, end)
            if len(data) != end - start:
                raise ConnectionError(f"{len(data):,} of {end - start:,} bytes were received")
            return data

        return self._try(name, read)

    def open_file(self, name: str) -> BinaryIO:
        """Open a file for random reads; the caller closes it."""
        if type(self.fs) is LocalFileSystem:  # not a user's subclass: Arrow reads its own files without Python
            return cast(BinaryIO, self._try(name, lambda: pa.OSFile(self.file_for_others(name))))
        if self.is_local:
            return self._try(name, lambda: self.fs.open(self.file_for_others(name), "rb"))
        if self._is_memory:  # fs.open would give every thread the same file, with one position
            return MemoryFile(self.read(name))
        tail, size = self._tail(name)
        return cast(BinaryIO, RemoteFile(partial(self._read_exactly, name), size, tail))

    def _tail(self, name: str) -> tuple[bytes, int]:
        """Return the end of a file and the file's size; takes one request for a small file if the protocol allows."""
        if not self._counts_from_the_end:
            size = self._size(name)
            return self.read_range(name, max(0, size - TAIL_BYTES), size), size
        try:
            tail = self.read_range(name, -TAIL_BYTES)
        except StoreError as error:
            # An empty file has no last byte: S3 answers 416, other stores return no bytes.
            if error.__cause__ is None or is_transient(error.__cause__) or self._size(name):
                raise
            return b"", 0
        return tail, len(tail) if len(tail) < TAIL_BYTES else self._size(name)

    @property
    def _counts_from_the_end(self) -> bool:
        """Return whether cat_file accepts a negative start; adlfs does not."""
        protocols = [self.fs.protocol] if isinstance(self.fs.protocol, str) else self.fs.protocol
        return not {"s3", "gs", "file", "memory"}.isdisjoint(protocols)

    def _size(self, name: str) -> int:
        return self._try(name, lambda: self.fs.info(self.at(name)))["size"]

    def refuse_lost_folders(self, names: Collection[str]) -> None:
        """Raise SchemaError if a folder directly below a local URL is a symbolic link that leads out of it.

        Also if one of `names` exists and is not a folder.
        """
        if self.is_local:
            for path in sorted(Path(self.path).iterdir()):
                if path.is_dir():
                    self.at(path.name)
                elif path.name in names:
                    raise SchemaError(f"{self.url}/{path.name} is not a folder, wanted one; move it out of the run")

    def exists(self, name: str) -> bool:
        """Return whether there is a file or folder; not one behind a symbolic link that leads out or nowhere."""
        path = self._path(name)
        if self.is_local:
            return self._try(name, lambda: local.is_there(self.path, name))
        try:
            self._try(name, lambda: self.fs.info(path))
        except FileNotFoundError:
            return False
        return True

    def list(self, name: str) -> builtins.list[str]:
        """Return the names of all files below a folder, sorted; empty if there are none."""
        name = check_inside(name, self.url).strip("/")
        if self.is_local:
            return self._try(name, lambda: sorted(self._below(entry.path) for entry in local.walk(self.path, name)))
        return sorted(self._find(name))

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size in bytes of each file below a folder, by name, sorted; empty if there are none."""
        name = check_inside(name, self.url).strip("/")
        if self.is_local:
            return dict(sorted(self._try(name, lambda: list(self._walk_sizes(name)))))
        return {file: info["size"] for file, info in sorted(self._find(name).items())}

    def _walk_sizes(self, name: str) -> Iterator[tuple[str, int]]:
        for entry in local.walk(self.path, name):
            with suppress(FileNotFoundError):  # another process has deleted it since it was listed
                yield self._below(entry.path), entry.stat().st_size

    def _below(self, path: str) -> str:
        return path[len(self.path) + 1 :]

    def _find(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the files below a folder, with the filesystem's info about each, without keys that are not paths."""
        found = self._find_all(name)
        for file in itertools.filterfalse(is_path, found):
            _warn(f"{self.url}/{file}")
        return {file: info for file, info in found.items() if is_path(file)}

    def _find_all(self, name: str) -> dict[str, dict[str, Any]]:
        """Return the files below a folder, with the filesystem's info about each, without folder markers.

        Consoles of object stores create empty objects whose keys end in "/" to show empty folders.
        """
        try:
            found = self._try(name, lambda: self.fs.find(self.at(name).rstrip("/"), detail=True))
        except FileNotFoundError:
            return {}
        files = {self._below(path): info for path, info in found.items() if info.get("type") != "directory"}
        return {file: info for file, info in files.items() if file and not file.endswith("/")}

    def strays(self) -> dict[str, str]:
        """Return the reason why listings skip a file, by name, for each such file below the folder."""
        if self.is_local:
            return self._try("", lambda: local.strays(self.path))
        return {file: _NO_PATH for file in sorted(self._find_all("")) if not is_path(file)}

    def folders(self, name: str) -> builtins.list[str]:
        """Return the names of the folders directly below a folder, sorted; empty if there are none."""
        name = name.strip("/")
        if self.is_local:
            try:
                return sorted(map(self._below, self._try(name, lambda: local.folders(self.path, name))))
            except FileNotFoundError:
                return []
        return [f"{name}/{folder}".lstrip("/") for folder in self.entries(name)[1]]

    def entries(self, name: str) -> tuple[builtins.list[str], builtins.list[str]]:
        """Return the own names of the files and of the folders directly below a folder of an object store, sorted.

        Takes one listing with a delimiter, which reads nothing below these folders. Empty if there is no such folder.
        """
        assert not self.is_local, "a local folder has links, which `folders` and `list` check"
        name = name.strip("/")
        try:
            found = self._try(name, lambda: self.fs.ls(self.at(name).rstrip("/"), detail=True))
        except FileNotFoundError:
            return [], []
        below = {self._below(entry["name"]).removesuffix("/"): entry["type"] for entry in found}
        paths = sorted(path for path in below if is_path(path) and path != name)
        folders = [path.rpartition("/")[2] for path in paths if below[path] == "directory"]
        return [path.rpartition("/")[2] for path in paths if below[path] != "directory"], folders

    def modified(self, name: str) -> datetime | None:
        """Return when a file was written, by the filesystem's clock; None if the filesystem does not say."""
        try:
            found = self._try(name, lambda: self.fs.modified(self.at(name)))
        except NotImplementedError:
            return None
        return found if found is None or found.tzinfo else found.replace(tzinfo=UTC)

    def put_if_absent(self, name: str, data: Content) -> bool:
        """Create a file. Returns False if it exists with other content.

        A retry after a lost answer finds its own bytes and returns True.
        """
        return self._create_or_compare(name, lambda: self._create(name, data), lambda: self.read(name) == data)

    def put_file_if_absent(self, file: Path, name: str) -> bool:
        """Create a file from a local file of any size. Returns False if it exists with other content.

        `file` is kept and must not change afterwards: on the same disk it may be a hard link to the same file.
        So write it into `scratch_folder`. A retry after a lost answer finds its own bytes and returns True.
        """
        return self._create_or_compare(name, lambda: self._create_from(file, name), lambda: self._holds(file, name))

    def _create_or_compare(self, name: str, create: Callable[[], None], is_same: Callable[[], bool]) -> bool:
        while True:
            try:
                self._try(name, create, writing=True)
                return True
            except FileExistsError:
                with suppress(FileNotFoundError):  # it was deleted in between, so try again
                    return is_same()

    def put(self, name: str, data: Content) -> None:
        """Create or replace a file atomically. Only for the few pointers that change, such as policies/LATEST."""
        if self.is_local:
            self._try(name, lambda: local.replace(self.path, self._checked(name), data), writing=True)
        else:
            self._try(name, lambda: self.fs.pipe_file(self.at(name), bytes(data)), writing=True)

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with all files below it; does nothing if it does not exist.

        A symbolic link is deleted itself, not its target.
        """
        path = self._path(name)
        try:
            if self.is_local:
                self._try(name, lambda: local.delete(self.path, name))
            else:
                self._try(name, lambda: self._delete_all(path))
        except FileNotFoundError:
            return

    def _delete_all(self, path: str) -> None:
        if not has_magic(path):
            self.fs.rm(path, recursive=True)
            return
        # fsspec's rm treats a path with [, * or ? as a pattern, and would delete all matches: other runs.
        for file in self.fs.find(path) or [path]:
            self.fs.rm_file(file)

    @contextmanager
    def scratch_folder(self) -> Iterator[Path]:
        """Create an empty local folder that no other user can write in or replace; deleted at the end.

        For a local URL it is on the same disk, where readers don't look, unless other users could replace it there and
        the system is not Linux. Raises StoreError if other users could replace it in the machine's temporary folder,
        too.
        """
        if not self.is_local:
            with _private_folder() as path:
                yield path
            return
        with ExitStack() as stack, self._scratch_folder() as folder:
            yield folder.path_for_others() or stack.enter_context(_private_folder())

    @contextmanager
    def _scratch_folder(self) -> Iterator[local.OpenFolder]:
        stack = ExitStack()
        with self.explained(SCRATCH, writing=True):
            folder = stack.enter_context(local.scratch_folder(self.path))
        try:
            yield folder
        finally:
            with self.explained(SCRATCH, writing=True), stack:
                self._try(SCRATCH, folder.clear, writing=True)

    def move_in(self, file: Path, name: str) -> None:
        """Move a local file to `name`, replacing any file of that name. Raises SchemaError if it is a link."""
        with self.explained(name, writing=True), local.opened(file.parent) as folder:
            self._move_in(folder, file.name, name)

    def _move_in(self, folder: local.OpenFolder, file: str, name: str) -> None:
        if self.is_local:
            with self.explained(name, writing=True):
                local.move_in(folder, file, self.path, self._checked(name))
        else:
            path = folder.path / file
            self._try(name, lambda: self.fs.put_file(str(path), self.at(name)), writing=True)
            path.unlink()

    def rename(self, name: str, target: str) -> None:
        """Move a file within the folder, replacing any file of the new name; on an object store copy, then delete.

        Raises FileNotFoundError if there is no such file.
        """
        with self.explained(name):
            if self.is_local:
                local.rename(self.path, self._checked(name), self._checked(target))
                return
            self.fs.cp_file(self.at(name), self.at(target))
        self.delete(name)

    def copy_all(self, names: Mapping[str, PurePosixPath], folder: Path) -> None:
        """Copy files into a local folder, each to the path that `names` gives for it.

        Raises StoreError if a path leads out of the folder, before any file is copied.
        """
        for name, relative in names.items():
            if ".." in relative.parts or relative.is_absolute():
                raise StoreError(f"{self.url}/{name} leads out of the copied folder; delete that file")
        folder.mkdir(parents=True, exist_ok=True)
        for name, relative in names.items():
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            self.copy_out(name, target)

    def copy_out(self, name: str, target: Path) -> None:
        """Copy a file to a local path."""
        if self._is_memory:  # see open_file
            target.write_bytes(self.read(name))
        else:
            self._try(name, lambda: self.fs.get_file(self.file_for_others(name), str(target)))

    def prove_put_if_absent(self, name: str, data: Content) -> None:
        """Create an existing file again, with its own bytes. Raises StoreError if the filesystem accepts that.

        Such a filesystem would overwrite rollouts.
        """
        try:
            self._try(name, lambda: self._create(name, data), writing=True)
        except FileExistsError:
            return
        raise StoreError(
            f"{self.url}: {type(self.fs).__name__} overwrites existing files even in create-only mode; ludic needs "
            "put-if-absent: use a local folder, S3, Google Cloud Storage or Azure (docs/storage.md has a table)"
        )

    def _create(self, name: str, data: Content) -> None:
        """Create a file. Raises FileExistsError if it exists."""
        target = self.at(name)
        if self.is_local:
            local.create(self.path, name, data)
        elif self._is_memory:
            with _memory_lock:
                self.fs.pipe_file(target, bytes(data), mode="create")
        else:
            with _refusal_named(target):
                self.fs.pipe_file(target, bytes(data), mode="create")

    def _create_from(self, file: Path, name: str) -> None:
        target = self.at(name)
        if self.is_local:
            with local.opened(file.parent) as folder:
                local.create_from(folder, file.name, self.path, name)
        elif self._is_memory:
            self._create(name, file.read_bytes())
        else:
            with _refusal_named(target):
                self.fs.put_file(str(file), target, mode="create")

    def _holds(self, file: Path, name: str) -> bool:
        """Return whether a stored file has the content of a local file."""
        with file.open("rb") as mine, self.open_file(name) as theirs:
            while block := mine.read(_COMPARED_BYTES):
                if theirs.read(len(block)) != block:
                    return False
            return theirs.read(1) == b""

    def _try(self, name: str, operation: Callable[[], Result], *, writing: bool = False) -> Result:
        with self.explained(name, writing=writing):
            return retried(operation, f"{self.url}/{name}", self.stop)

    @contextmanager
    def explained(self, name: str, *, writing: bool = False) -> Iterator[None]:
        """Turn a filesystem's error into a StoreError that names URL, cause and what to do.

        FileExistsError passes through. So does FileNotFoundError, unless the bucket is missing, or `writing` is set,
        when a folder is missing.
        """
        try:
            yield
        except (LudicError, FileExistsError):
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and not writing and not diagnose(error).is_missing_bucket:
                raise
            if not is_filesystem_error(error):
                raise
            raise StoreError(explain(error, f"{self.url}/{name}", writing=writing)) from error


def back_off(shortest_s: float, longest_s: float, *, growth: float = 1.2) -> Iterator[float]:
    """Yield pauses that grow from the shortest to the longest; a shortest beyond the longest stays as it is."""
    pause_s = shortest_s
    while True:
        yield pause_s
        pause_s = max(pause_s, min(growth * pause_s, longest_s))


@contextmanager
def _private_folder() -> Iterator[Path]:
    with temporary_folder("upload") as folder, local.opened(folder) as opened:
        path = opened.path_for_others()
        if path is None:
            raise StoreError(
                f"other users can rename folders of {folder.parent}, so ludic writes nothing there; set TMPDIR to a "
                "folder of your own"
            )
        yield path


def _connect(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the URL's filesystem, and the path within it."""
    try:
        if url.startswith(("s3://", "s3a://")):
            from ludic.root.storage.s3 import open_s3  # needs an optional extra of the package

            fs = open_s3()
            return fs, fs._strip_protocol(url)
        # Other processes add files; a cached listing would hide them.
        return fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise StoreError(
            f"{url}: {error}; `pip install 'ludic-rl[s3]'`, gcsfs or adlfs, depending on the URL"
        ) from error
    except (ValueError, OSError) as error:
        raise StoreError(f"{url}: {error}") from error


def _refuse_secrets(url: str) -> None:
    if has_secret(url):
        raise ConfigError(
            f"{public_url(url)} contains a user, a password or a key, which logs would show; "
            "put them into the environment or into fsspec's configuration files"
        )


def check_inside(name: str, url: str) -> str:
    """Return the name. Raises SchemaError if it leads out of the root: a damaged or hostile file holds such a name."""
    if ".." in name.split("/") or "\0" in name:
        raise SchemaError(
            f"{url}: a file of the run names {name!r}, which leads out of the run; ludic does not touch it"
        )
    return name


_NO_PATH = "is a key with an empty part, '.' or '..', which is not a valid path; ludic skips it: delete it"


@lru_cache(maxsize=1024)
def _warn(where: str) -> None:
    """Log once per process that a key is skipped."""
    logger.warning("skipped: %s %s", where, _NO_PATH)


@contextmanager
def _refusal_named(target: str) -> Iterator[None]:
    """Raise FileExistsError in place of a server's refusal of a put-if-absent."""
    try:
        yield
    except Exception as error:
        if is_refused_overwrite(error):
            raise FileExistsError(target) from error
        raise


# --- Files without a local path -------------------------------------------------------------------------------
# Random reads of files without a local path: remote files by ranged requests, and files in memory.


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
