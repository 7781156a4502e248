"""Files of a local disk: created whole or not at all, replaced atomically, listed without asking for each file.

A file is written and synced below `scratch`, a folder of the same disk that no reader looks into, then linked or
renamed to its name. Raises what the operating system raises; FileExistsError where a name is taken.
"""

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

Content = bytes | memoryview
"""Of a file; a view of what Arrow encoded spares a copy on its way to the disk."""
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1


def create(target: Path, data: Content, scratch: Path) -> None:
    """Write a file that is not there yet."""
    with _written(target, data, scratch) as temporary:
        _give_name(temporary, target)


def replace(target: Path, data: Content, scratch: Path) -> None:
    """Write a file, whether it is there or not."""
    with _written(target, data, scratch) as temporary:
        temporary.replace(target)
        _fsync(target.parent)


def create_from(file: Path, target: Path, scratch: Path) -> None:
    """Give a file that is complete a second name, or its copy where it lies on another disk; `file` stays."""
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


def walk(folder: str) -> Iterator[os.DirEntry[str]]:
    """Files below a folder, in no order; what vanishes meanwhile is left out. NotADirectoryError for a file."""
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
    """A complete file in `scratch`; gone at the end."""
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
        # exFAT and many FUSE mounts have no hard links; an exclusive rename keeps the same promise.
        _rename_exclusively(temporary, target)
        _fsync(target.parent)


def _link(file: Path, target: Path) -> None:
    os.link(file, target)
    _fsync(target.parent)


def _rename_exclusively(file: Path, target: Path) -> None:
    """rename(2) that refuses to replace; OSError (ENOTSUP) where the kernel or the disk has none."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is not None:
        if not renameat2(_AT_FDCWD, os.fsencode(file), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE):
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(target))
    raise OSError(errno.ENOTSUP, "this disk has neither hard links nor a rename that refuses to replace", str(target))


def _fsync(path: Path) -> None:
    """What a file or a folder holds survives a power cut; a link does only when its folder is synced too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
