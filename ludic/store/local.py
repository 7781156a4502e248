"""Files on a local disk: created whole or not at all, replaced atomically, listed without a stat of each file.

A file is written and synced below `scratch`, a folder on the same disk that no reader looks into, then linked or
renamed to its name. Raises the operating system's errors; FileExistsError if a name is taken.
"""

import ctypes
import errno
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

Content = bytes | memoryview
"""Content of a file; a memoryview of Arrow's output saves a copy."""
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1


def create(target: Path, data: Content, scratch: Path) -> None:
    """Create a file. Raises FileExistsError if it exists."""
    with _written(target, data, scratch) as temporary:
        _give_name(temporary, target)


def replace(target: Path, data: Content, scratch: Path) -> None:
    """Create a file, or replace it atomically."""
    with _written(target, data, scratch) as temporary:
        temporary.replace(target)
        _fsync(target.parent)


def create_from(file: Path, target: Path, scratch: Path) -> None:
    """Create `target` as a hard link to a complete file, or as a copy if the disk can't link them; `file` stays."""
    follow_umask(file)
    _fsync(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _link(file, target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        with _temporary(scratch) as temporary:
            shutil.copyfile(file, temporary)
            _fsync(temporary)
            _give_name(temporary, target)


def move_in(file: Path, target: Path) -> None:
    """Move a complete file to `target`, replacing any file of that name."""
    follow_umask(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(file, target)


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


def walk(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield the files below a folder, unordered; none if it does not exist. Skips folders that vanish during the walk.

    Raises NotADirectoryError if `folder` is a file.
    """
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    yield from walk(entry.path)
                else:
                    yield entry
    except FileNotFoundError:
        return


@contextmanager
def _written(target: Path, data: Content, scratch: Path) -> Iterator[Path]:
    """Write a complete file in `scratch`, which is deleted at the end of the block."""
    with _temporary(scratch) as temporary:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary


@contextmanager
def _temporary(scratch: Path) -> Iterator[Path]:
    scratch.mkdir(parents=True, exist_ok=True)
    temporary = scratch / uuid4().hex
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _give_name(temporary: Path, target: Path) -> None:
    try:
        _link(temporary, target)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # exFAT and many FUSE mounts have no hard links; an exclusive rename gives the same guarantee.
        _rename_exclusively(temporary, target)
        _fsync(target.parent)


def _link(file: Path, target: Path) -> None:
    os.link(file, target)
    _fsync(target.parent)


def _rename_exclusively(file: Path, target: Path) -> None:
    """Rename a file without replacing another. Raises OSError (ENOTSUP) if the kernel or the disk can't do that."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is not None:
        if not renameat2(_AT_FDCWD, os.fsencode(file), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE):
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(target))
    raise OSError(errno.ENOTSUP, "this disk has neither hard links nor a rename that refuses to replace", str(target))


def _fsync(path: Path) -> None:
    """Make a file's or folder's content survive a power cut; a new link survives only if its folder is synced, too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
