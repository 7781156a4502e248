"""Files below a folder of a local disk: created whole or not at all, replaced atomically, listed without many stats.

A file is written and synced below SCRATCH, a folder that no reader looks into, then linked or renamed to its name. No
file is written, moved or deleted through a symbolic link that leads out of the folder: each change goes through a
descriptor of the file's folder, which is opened part by part without following links. Raises the operating system's
errors; FileExistsError if a name is taken; SchemaError for a link that leads out.
"""

import ctypes
import errno
import logging
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from ludic.errors import SchemaError

logger = logging.getLogger(__name__)

Content = bytes | memoryview
"""Content of a file; a memoryview of Arrow's output saves a copy."""
SCRATCH = ".tmp"
"""Folder of files that are not complete yet, below a local root; no reader looks into it."""

_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_RENAME_NOREPLACE = 1
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
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


def create_from(file: Path, root: str, name: str) -> None:
    """Create a file as a hard link to a complete file, or as a copy if the disk can't link them; `file` stays."""
    follow_umask(file)
    _fsync(file)
    with _folder_of(root, name) as (folder, own):
        try:
            os.link(file, own, dst_dir_fd=folder)
            os.fsync(folder)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            with _copied(root, file) as (scratch, temporary):
                _give_name(scratch, temporary, folder, own)


def move_in(file: Path, root: str, name: str) -> None:
    """Move a complete file to a name below `root`, replacing any file of that name."""
    follow_umask(file)
    with _folder_of(root, name) as (folder, own):
        try:
            os.replace(file, own, dst_dir_fd=folder)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            with _copied(root, file) as (scratch, temporary):
                os.replace(temporary, own, src_dir_fd=scratch, dst_dir_fd=folder)
            file.unlink()


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
        if stat.S_ISDIR(os.stat(own, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(own, dir_fd=folder)  # follows no link, and refuses if a link takes the folder's place
        else:
            os.unlink(own, dir_fd=folder)


def make_scratch(root: str) -> Path:
    """Make an empty folder below SCRATCH, with the permissions of any new folder, and return its real path."""
    own = f"ludic-{uuid4().hex}"
    with _folder_of(root, f"{SCRATCH}/{own}") as (folder, _):
        os.mkdir(own, dir_fd=folder)
    return Path(os.path.realpath(root), SCRATCH, own)


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
        linked = next((path for path in (file.parent, file) if path.is_symlink()), None)
        if linked is None:
            raise
        raise SchemaError(f"{linked} is a symbolic link, and logs are written through none; delete the link") from None


def check_links(root: str, name: str) -> None:
    """Raise SchemaError if a part of a path below `root` is a symbolic link that leads out of `root`.

    Costs an lstat for each part, and a realpath for each link. `root` itself may be a link, or lie behind one.
    """
    path = root
    for part in filter(None, name.split("/")):
        path = f"{path}/{part}"
        try:
            is_link = stat.S_ISLNK(os.lstat(path).st_mode)
        except OSError:  # there is no such file
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
    return (
        f"{path} is a symbolic link that leads out of its run, to {os.path.realpath(path)}; ludic follows no such "
        "link: delete it, and put the files themselves there if they belong to the run"
    )


@lru_cache(maxsize=1024)
def _warn(path: str) -> None:
    """Say once in a process that a link is passed over."""
    logger.warning("passed over: %s", _refusal(path))


def follow_umask(path: Path) -> None:
    """Give a file or folder the permissions that a new one beside it gets.

    safetensors and tempfile make files and folders that only their owner can read, so that another user's worker on
    the same disk could not. The umask itself can't be read without changing it for all threads.
    """
    new = path.with_name(uuid4().hex)
    if path.is_dir():
        new.mkdir()
        wanted = new.stat().st_mode
        new.rmdir()
    else:
        new.touch()
        wanted = new.stat().st_mode
        new.unlink()
    if path.stat().st_mode != wanted:
        path.chmod(stat.S_IMODE(wanted))


def walk(root: str, name: str) -> Iterator[os.DirEntry[str]]:
    """Return the files below a folder of `root`, unordered; none if it does not exist. Skips folders that vanish.

    Links that lead out of `root` are passed over with a warning. Raises NotADirectoryError if the folder is a file.
    """
    folder = f"{root}/{name}" if name else root
    if leads_out(root, name):
        _warn(folder)
        return iter(())
    return _walk(root, folder)


def _walk(root: str, folder: str) -> Iterator[os.DirEntry[str]]:
    # With the real paths of the linked folders on the way, so that a link to a folder above it ends.
    pending: list[tuple[str, tuple[str, ...]]] = [(folder, ())]
    while pending:
        folder, linked = pending.pop()
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_symlink():  # known from the listing, without a stat
                    if entry.is_dir():
                        pending.append((entry.path, linked))
                    else:
                        yield entry
                elif _leads_out(root, entry.path):
                    _warn(entry.path)
                elif not entry.is_dir():
                    yield entry
                elif (real := os.path.realpath(entry.path)) not in linked:
                    pending.append((entry.path, (*linked, real)))


def links_out(root: str, name: str = "") -> Iterator[str]:
    """Yield the symbolic links below a folder of `root` that lead out of `root`, by their names below `root`."""
    pending = [f"{root}/{name}" if name else root]
    while pending:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    if _leads_out(root, entry.path):
                        yield entry.path[len(root) + 1 :]
                elif entry.is_dir():
                    pending.append(entry.path)


def folders(root: str, name: str) -> list[str]:
    """Return the paths of the folders directly below a folder, without links that lead out of `root`."""
    folder = f"{root}/{name}" if name else root
    if leads_out(root, name):
        _warn(folder)
        return []
    with os.scandir(folder) as entries:
        return [e.path for e in entries if e.is_dir() and not (e.is_symlink() and _leads_out(root, e.path))]


@contextmanager
def _folder_of(root: str, name: str, *, make: bool = True) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the folder of a file below `root`, made if it is missing, and the file's name in it.

    The way there is walked by real folders, each opened without following links: a link that another process puts
    there in the meantime is refused, too.
    """
    folder, _, own = name.rstrip("/").rpartition("/")
    check_links(root, folder)
    if make:
        Path(root).mkdir(parents=True, exist_ok=True)
    base = os.path.realpath(root)
    parts = [part for part in os.path.relpath(os.path.realpath(f"{base}/{folder}"), base).split("/") if part != "."]
    if ".." in parts:  # another process has put a link there since it was checked
        raise SchemaError(_refusal(f"{root}/{folder}"))
    descriptor = os.open(base, _FOLDER)
    try:
        for part in parts:
            above, descriptor = descriptor, _open_folder(part, descriptor, make=make)
            os.close(above)
        yield descriptor, own
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
def _copied(root: str, source: Path) -> Iterator[tuple[int, str]]:
    """Copy a file below SCRATCH, as `_written` does."""
    with _temporary(root) as (scratch, temporary):
        with source.open("rb") as data, os.fdopen(os.open(temporary, _NEW_FILE, 0o666, dir_fd=scratch), "wb") as file:
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
    raise OSError(errno.ENOTSUP, "this disk has neither hard links nor a rename that refuses to replace", own)


def _fsync(path: Path) -> None:
    """Make a file's content survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
