"""Create, replace and list files below a folder of a local disk, atomically and without following links out of it.

A file is written and synced below SCRATCH, a folder that no reader looks into, then linked or renamed to its name. No
file is written, moved or deleted through a symbolic link that leads out of the folder: each change goes through a
descriptor of the file's folder, which is opened part by part without following links. Only regular files are listed and
read: named pipes, sockets, devices and broken links are skipped. Raises the operating system's errors; FileExistsError
if a name is taken; SchemaError for a link that leads out, and when anything but a regular file is read.
"""

import ctypes
import errno
import logging
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NoReturn
from uuid import uuid4

from ludic.base import is_protected
from ludic.errors import SchemaError

logger = logging.getLogger(__name__)

Content = bytes | memoryview
"""Content of a file; a memoryview of Arrow's output saves a copy."""
SCRATCH = ".tmp"
"""Folder of files that are not complete yet, below a local root; no reader looks into it."""

_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_RENAME_NOREPLACE = 1
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_DESCRIPTORS = Path("/proc/self/fd")
_READ_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def create(root: str, name: str, data: Content) -> None:
    """Create a file. Raises FileExistsError if it exists."""
    with _written(root, data) as (scratch, temporary), _folder_of(root, name) as (folder, own):
        _give_name(scratch, temporary, folder, own)


def replace(root: str, name: str, data: Content) -> None:
    """Create a file, or replace it atomically."""
    with _written(root, data) as (scratch, temporary), _folder_of(root, name) as (folder, own):
        os.replace(temporary, own, src_dir_fd=scratch, dst_dir_fd=folder)
        os.fsync(folder)


def create_from(source: "OpenFolder", file: str, root: str, name: str) -> None:
    """Create a file as a hard link to a complete file, or as a copy if the disk can't link them; `file` stays."""
    with source.file(file) as (found, above, old), _folder_of(root, name) as (folder, own):
        os.fsync(found)
        try:
            os.link(old, own, src_dir_fd=above, dst_dir_fd=folder, follow_symlinks=False)
            os.fsync(folder)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            with _copied(root, found) as (scratch, temporary):
                _give_name(scratch, temporary, folder, own)


def move_in(source: "OpenFolder", file: str, root: str, name: str) -> None:
    """Move a complete file to a name below `root`, replacing any file of that name."""
    with source.file(file) as (found, above, old), _folder_of(root, name) as (folder, own):
        try:
            os.replace(old, own, src_dir_fd=above, dst_dir_fd=folder)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            with _copied(root, found) as (scratch, temporary):
                os.replace(temporary, own, src_dir_fd=scratch, dst_dir_fd=folder)
            os.unlink(old, dir_fd=above)


def rename(root: str, name: str, target: str) -> None:
    """Move a file within `root`, replacing any file of the new name. Raises FileNotFoundError if there is none."""
    try:
        with _folder_of(root, name, make=False) as (old, own), _folder_of(root, target) as (new, new_own):
            os.replace(own, new_own, src_dir_fd=old, dst_dir_fd=new)
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, error.strerror, f"{root}/{name}") from error


def delete(root: str, name: str) -> None:
    """Delete a file, a link itself, or a folder with all below it. Raises FileNotFoundError if there is none."""
    with _folder_of(root, name, make=False) as (folder, own):
        _delete(own, folder)


def _delete(own: str, folder: int) -> None:
    if stat.S_ISDIR(os.stat(own, dir_fd=folder, follow_symlinks=False).st_mode):
        shutil.rmtree(own, dir_fd=folder)  # follows no link, and refuses if a link takes the folder's place
    else:
        os.unlink(own, dir_fd=folder)


def open_to_append(file: Path) -> BinaryIO:
    """Open a file for appending, made if it is missing. Raises SchemaError if it or its folder is a symbolic link."""
    try:
        folder = os.open(file.parent, _FOLDER | os.O_NOFOLLOW)
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.fdopen(os.open(file.name, flags, 0o666, dir_fd=folder), "ab")
        finally:
            os.close(folder)
    except OSError:
        refuse_linked_log(file.parent, file)
        raise


def refuse_linked_log(*paths: Path) -> None:
    """Raise SchemaError if a log, or the folder of one, is a symbolic link."""
    for path in paths:
        if path.is_symlink():
            raise SchemaError(f"{path} is a symbolic link, and ludic writes no logs through links; delete the link")


def check_links(root: str, name: str) -> None:
    """Raise SchemaError if a part of a path below `root` is a symbolic link that leads out of `root`.

    Costs an lstat for each part, and a realpath for each link. `root` itself may be a link, or lie behind one.
    """
    path = root
    for part in filter(None, name.split("/")):
        path = f"{path}/{part}"
        try:
            is_link = stat.S_ISLNK(os.lstat(path).st_mode)
        except OSError:  # no such file
            return
        if is_link and _leads_out(root, path):
            raise SchemaError(_refusal(path))


def leads_out(root: str, name: str) -> bool:
    """Return whether a path below `root` goes through a symbolic link that leads out of `root`."""
    try:
        check_links(root, name)
    except SchemaError:
        return True
    return False


def _leads_out(root: str, path: str) -> bool:
    base = os.path.realpath(root)
    return not f"{os.path.realpath(path)}/".startswith(f"{base.rstrip('/')}/")


def _refusal(path: str) -> str:
    return f"{path} {_link_out(path)}"


def _link_out(path: str) -> str:
    return (
        f"is a symbolic link that leads out of its run, to {os.path.realpath(path)}; ludic does not follow it: "
        "delete it, and put the files themselves there if they belong to the run"
    )


_KINDS = {
    stat.S_IFIFO: "is a named pipe",
    stat.S_IFSOCK: "is a socket",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
    stat.S_IFDIR: "is a folder",
}
_NOT_READ = "wanted a file; ludic does not open it: delete it, or move it out of the run"
_NOWHERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
"""Errors of a path whose file does not exist, or is behind a link that leads nowhere."""


def check_file(path: str) -> None:
    """Raise SchemaError if a path leads to anything but a regular file; opening anything else could block.

    Raises FileNotFoundError if there is nothing, not even a link.
    """
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        if error.errno not in _NOWHERE or (error.errno == errno.ENOENT and not Path(path).is_symlink()):
            raise
        if error.errno == errno.ENOTDIR:
            raise SchemaError(_file_on_the_way(path)) from None
        raise SchemaError(f"{path} is a symbolic link to no file, {_NOT_READ}") from None
    if not stat.S_ISREG(mode):
        raise SchemaError(f"{path} {_no_file(mode)}")


def _file_on_the_way(path: str) -> str:
    found = next((above for above in reversed(Path(path).parents) if not above.is_dir()), Path(path).parent)
    kind = _KINDS.get(stat.S_IFMT(found.stat().st_mode), "is a file")
    return f"{found} {kind}, wanted a folder; choose another folder, or move it away"


def _no_file(mode: int) -> str:
    return f"{_KINDS.get(stat.S_IFMT(mode), 'is not a regular file')}, {_NOT_READ}"


def read(path: str, start: int | None = None, end: int | None = None) -> bytes:
    """Return the bytes of a file from `start` to before `end`; a negative start counts from the end.

    Raises the errors of `check_file`, also if another process puts a named pipe there in the meantime.
    """
    check_file(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe opens without waiting for a writer
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise SchemaError(f"{path} {_no_file(found.st_mode)}")
        first = start or 0
        first = first if first >= 0 else max(0, found.st_size + first)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            file.seek(first)
            return file.read() if end is None else file.read(max(0, end - first))
    finally:
        os.close(descriptor)


def is_there(root: str, name: str) -> bool:
    """Return whether there is a file or a folder below `root`, reached through no link that leads out or nowhere."""
    if leads_out(root, name):
        return False
    try:
        Path(root, name).stat()
    except OSError as error:
        if error.errno not in _NOWHERE:
            raise
        return False
    return True


@lru_cache(maxsize=1024)
def _warn(path: str, problem: str) -> None:
    """Log once per process that an entry of a folder is skipped."""
    logger.warning("skipped: %s %s", path, problem)


def follow_umask(path: Path) -> None:
    """Give a file or folder the permissions that a new one beside it gets.

    safetensors and tempfile create files and folders that only their owner can read, not another user's worker on the
    same disk. The umask itself can't be read without changing it for all threads.
    """
    kind = os.O_DIRECTORY if path.is_dir() else 0
    with opened(path.parent) as folder:
        found = os.open(path.name, _READ_FILE | kind, dir_fd=folder.descriptor)
        try:
            _follow_umask(found, folder.descriptor)
        finally:
            os.close(found)


def _follow_umask(found: int, folder: int) -> None:
    new = uuid4().hex
    if stat.S_ISDIR(os.fstat(found).st_mode):
        os.mkdir(new, dir_fd=folder)
        wanted = os.stat(new, dir_fd=folder).st_mode
        os.rmdir(new, dir_fd=folder)
    else:
        os.close(os.open(new, _NEW_FILE, 0o666, dir_fd=folder))
        wanted = os.stat(new, dir_fd=folder).st_mode
        os.unlink(new, dir_fd=folder)
    if os.fstat(found).st_mode != wanted:
        os.fchmod(found, stat.S_IMODE(wanted))


def walk(root: str, name: str) -> Iterator[os.DirEntry[str]]:
    """Return the regular files below a folder of `root`, unordered; none if it does not exist. Skips what vanishes.

    Skips all else with a warning: links that lead out of `root` or nowhere, named pipes, sockets and devices.
    """
    return _walk(root, f"{root}/{name}" if name else root, _warn)


def strays(root: str, name: str = "") -> dict[str, str]:
    """Return the reason why listings skip an entry, by name, for each such entry below a folder of `root`."""
    found: dict[str, str] = {}
    for _ in _walk(root, f"{root}/{name}" if name else root, found.__setitem__):
        pass
    return {path[len(root) + 1 :]: problem for path, problem in sorted(found.items())}


def _walk(root: str, folder: str, pass_over: Callable[[str, str], None]) -> Iterator[os.DirEntry[str]]:
    # Track the real paths of linked folders on the way, so that a link to a parent folder ends.
    pending: list[tuple[str, tuple[str, ...]]] = [(folder, ())] if _is_folder(root, folder, pass_over) else []
    while pending:
        folder, linked = pending.pop()
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):  # known from the listing, without a stat
                    yield entry
                elif (problem := _problem(root, entry)) is not None:
                    pass_over(entry.path, problem)
                elif not entry.is_dir():
                    yield entry
                elif not entry.is_symlink():
                    pending.append((entry.path, linked))
                elif (real := os.path.realpath(entry.path)) not in linked:
                    pending.append((entry.path, (*linked, real)))


def _problem(root: str, entry: os.DirEntry[str]) -> str | None:
    """Return why a listing skips an entry; None for a file or a folder, also behind a link that stays inside."""
    if not entry.is_symlink():
        with suppress(FileNotFoundError):  # deleted since it was listed
            return None if entry.is_dir() or entry.is_file() else _no_file(entry.stat().st_mode)
        return None
    if _leads_out(root, entry.path):
        return _link_out(entry.path)
    try:
        mode = entry.stat().st_mode
    except OSError:
        return f"is a symbolic link to no file, {_NOT_READ}"
    return None if stat.S_ISDIR(mode) or stat.S_ISREG(mode) else _no_file(mode)


def _is_folder(root: str, folder: str, pass_over: Callable[[str, str], None]) -> bool:
    """Return whether there is a folder to list; skips anything else, and a link that leads out."""
    if leads_out(root, folder[len(root) + 1 :]):
        pass_over(folder, _link_out(folder))
        return False
    try:
        is_folder = stat.S_ISDIR(Path(folder).stat().st_mode)
    except OSError as error:
        if error.errno not in _NOWHERE:
            raise
        if error.errno == errno.ENOENT and not Path(folder).is_symlink():
            return False
        is_folder = False
    if not is_folder:
        pass_over(folder, "is not a folder, wanted one: delete it, or move it out of the run")
    return is_folder


def folders(root: str, name: str) -> list[str]:
    """Return the paths of the folders directly below a folder, without links that lead out of `root` or nowhere."""
    folder = f"{root}/{name}" if name else root
    if not _is_folder(root, folder, _warn):
        return []
    with os.scandir(folder) as entries:
        return [entry.path for entry in entries if _problem(root, entry) is None and entry.is_dir()]


@contextmanager
def _folder_of(root: str, name: str, *, make: bool = True) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the folder of a file below `root`, made if it is missing, and the file's name in it.

    The way there is walked by real folders, each opened without following links: a link that another process puts
    there in the meantime is refused, too.
    """
    folder, _, own = name.rstrip("/").rpartition("/")
    check_links(root, folder)
    if make and not Path(root).is_dir():  # mkdir alone would take longer than all else here
        Path(root).mkdir(parents=True, exist_ok=True)
    base = os.path.realpath(root)
    parts = [part for part in os.path.relpath(os.path.realpath(f"{base}/{folder}"), base).split("/") if part != "."]
    if ".." in parts:  # another process has put a link there since it was checked
        raise SchemaError(_refusal(f"{root}/{folder}"))
    try:
        with opened(base) as above, _below(above.descriptor, parts, make=make) as descriptor:
            yield descriptor, own
    except OSError as error:
        if error.filename in (own, *parts):  # raised by a call with a descriptor, which has no path
            error.filename = f"{root}/{folder}".rstrip("/")
        raise


@contextmanager
def _below(folder: int, parts: Iterable[str], *, make: bool) -> Iterator[int]:
    """Yield a descriptor of a folder below an open one, reached without following links."""
    descriptor = os.dup(folder)
    try:
        for part in parts:
            above, descriptor = descriptor, _open_folder(part, descriptor, make=make)
            os.close(above)
        yield descriptor
    finally:
        os.close(descriptor)


def _open_folder(name: str, folder: int, *, make: bool) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, dir_fd=folder)
    return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)


@contextmanager
def _written(root: str, data: Content) -> Iterator[tuple[int, str]]:
    """Write a file below SCRATCH, deleted at the end of the block; yields its folder's descriptor and its name."""
    with _temporary(root) as (scratch, temporary):
        with os.fdopen(os.open(temporary, _NEW_FILE, 0o666, dir_fd=scratch), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield scratch, temporary


@contextmanager
def _copied(root: str, source: int) -> Iterator[tuple[int, str]]:
    """Copy an open file below SCRATCH, as `_written` does."""
    with _temporary(root) as (scratch, temporary):
        with (
            os.fdopen(os.dup(source), "rb") as data,
            os.fdopen(os.open(temporary, _NEW_FILE, 0o666, dir_fd=scratch), "wb") as file,
        ):
            shutil.copyfileobj(data, file)
            file.flush()
            os.fsync(file.fileno())
        yield scratch, temporary


@contextmanager
def _temporary(root: str) -> Iterator[tuple[int, str]]:
    with _folder_of(root, f"{SCRATCH}/{uuid4().hex}") as (scratch, temporary):
        try:
            yield scratch, temporary
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=scratch)


def _give_name(scratch: int, temporary: str, folder: int, own: str) -> None:
    try:
        os.link(temporary, own, src_dir_fd=scratch, dst_dir_fd=folder)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # exFAT and many FUSE mounts have no hard links; an exclusive rename gives the same guarantee.
        _rename_exclusively(scratch, temporary, folder, own)
    os.fsync(folder)  # a new link survives a power cut only if its folder is synced, too


def _rename_exclusively(scratch: int, temporary: str, folder: int, own: str) -> None:
    """Rename a file without replacing another. Raises OSError (ENOTSUP) if the kernel or the disk can't do that."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is not None:
        if not renameat2(scratch, os.fsencode(temporary), folder, os.fsencode(own), _RENAME_NOREPLACE):
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), own)
    raise OSError(errno.ENOTSUP, "this disk supports neither hard links nor an exclusive rename", own)


# --- Folders of other programs -------------------------------------------------------------------------------
# Libraries write files by path. They do so in a scratch folder; their files are then moved by descriptors.


@dataclass(frozen=True, slots=True)
class OpenFolder:
    """A folder of this machine, held by a descriptor: a later replacement at its path has no effect."""

    path: Path
    descriptor: int

    def files(self) -> list[str]:
        """Return the names of all files below the folder. Raises SchemaError for anything but files and folders."""
        found = []
        for where, folders, names, descriptor in os.fwalk(".", onerror=_fail, dir_fd=self.descriptor):
            for name in (*folders, *names):
                mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
                relative = f"{where}/{name}".removeprefix("./")
                if stat.S_ISREG(mode):
                    found.append(relative)
                elif not stat.S_ISDIR(mode):
                    raise SchemaError(_not_taken(self.path / relative))
        return found

    @contextmanager
    def file(self, name: str) -> Iterator[tuple[int, int, str]]:
        """Yield descriptors of a file below the folder and of the file's own folder, and its name there.

        The file gets the permissions of a new one. Raises SchemaError for a link, and for anything but a file.
        """
        *parts, own = name.split("/")
        with _below(self.descriptor, parts, make=False) as above:
            if not stat.S_ISREG(os.stat(own, dir_fd=above, follow_symlinks=False).st_mode):
                raise SchemaError(_not_taken(self.path / name))
            found = os.open(own, _READ_FILE, dir_fd=above)
            try:
                _follow_umask(found, above)
                yield found, above, own
            finally:
                os.close(found)

    def path_for_others(self) -> Path | None:
        """Return a path by which libraries reach this folder; None if other users can write in it or replace it.

        It is the folder's own path if no other user can rename a part of it, else Linux's path of the descriptor.
        """
        found = os.fstat(self.descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return None  # a disk without modes, or with mapped users
        real = Path(os.path.realpath(self.path))
        for path in (real, _DESCRIPTORS / str(self.descriptor)):
            with suppress(OSError):
                if (path != real or is_protected(real)) and os.path.samestat(path.stat(), found):
                    return path
        return None

    def clear(self) -> None:
        """Delete all that is in the folder; follows no link."""
        with suppress(FileNotFoundError), os.scandir(self.descriptor) as entries:  # it may have been deleted itself
            for name in [entry.name for entry in entries]:
                with suppress(FileNotFoundError):
                    _delete(name, self.descriptor)


@contextmanager
def opened(folder: str | Path) -> Iterator[OpenFolder]:
    """Open a folder, or the one that a link leads to."""
    descriptor = os.open(folder, _FOLDER)
    try:
        yield OpenFolder(Path(folder), descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def scratch_folder(root: str) -> Iterator[OpenFolder]:
    """Create an empty folder of mode 0700 below SCRATCH; delete it at the end, even if its path was replaced."""
    own = f"ludic-{uuid4().hex}"
    with _folder_of(root, f"{SCRATCH}/{own}") as (parent, _):
        os.mkdir(own, 0o700, dir_fd=parent)
        descriptor = os.open(own, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
        try:
            folder = OpenFolder(Path(root, SCRATCH, own), descriptor)
            with os.scandir(descriptor) as entries:
                if next(entries, None) is not None:  # it would be emptied at the end
                    raise SchemaError(
                        f"{folder.path} was replaced right after its creation: another process changes {SCRATCH}"
                    )
            try:
                yield folder
            finally:
                folder.clear()
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.stat(own, dir_fd=parent, follow_symlinks=False), os.fstat(descriptor)):
                        os.rmdir(own, dir_fd=parent)
        finally:
            os.close(descriptor)


def _fail(error: OSError) -> NoReturn:
    raise error


def _not_taken(path: Path) -> str:
    return f"{path} is a symbolic link, a pipe or a device, wanted a file; nothing of the folder is copied into the run"
