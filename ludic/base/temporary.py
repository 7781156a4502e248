"""Create temporary folders, deleted at the end of their use, or by the next process if their owner was killed.

A folder is named ludic-PURPOSE-PID-START-PLACE-RANDOM: the id of its owner and the time when that process started, in
the kernel's ticks, show whether the owner is alive. PLACE is a digest of the boot and the namespace that the id belongs
to, since containers or machines may share a temporary folder. The first folder that a process makes somewhere deletes
those of dead owners beside it: only folders of the same user, never one behind a link, and none of another PLACE, whose
processes can't be seen from here. Folders are private (mode 0700). Raises OSError if the disk fails.
"""

import hashlib
import os
import re
import shutil
import socket
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from ludic.errors import StoreError

_NAME = re.compile(r"\.?ludic-[a-z]+-(\d+)-(\d+)-([0-9a-f]{12})-[^/]+")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@contextmanager
def temporary_folder(purpose: str, beside: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder that is deleted at the end of the block.

    purpose: a word in the folder's name. beside: an existing folder to make it in, hidden; None is the temporary
    folder of this machine (TMPDIR).
    """
    folder = make_folder(purpose, beside)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def folder_of_object(purpose: str, owner: object) -> Path:
    """Make a folder that is deleted with an object of this process, or when the process ends."""
    folder = make_folder(purpose)
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder


def make_folder(purpose: str, beside: Path | None = None) -> Path:
    """Make an empty folder, which the caller deletes; the arguments are those of `temporary_folder`."""
    parent = Path(tempfile.gettempdir()) if beside is None else beside
    _sweep_once(parent.absolute(), os.getpid())
    prefix = f"{'' if beside is None else '.'}ludic-{purpose}-{os.getpid()}-{_start_of(os.getpid()) or 0}-{_place()}-"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))


def private_folder(name: str) -> Path:
    """Return a folder in the machine's temporary folder that outlives this process; created if missing.

    Raises StoreError unless it is a folder of this user that no other user may enter, since others may create folders
    there, too.
    """
    path = Path(tempfile.gettempdir(), name)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700:
        return path
    kind = (
        "a symbolic link" if stat.S_ISLNK(found.st_mode) else f"of user {found.st_uid}, mode {found.st_mode & 0o7777:o}"
    )
    raise StoreError(
        f"{path} is {kind}; wanted a folder of user {os.geteuid()} with mode 700, since another user may have made it "
        "to read or redirect what is written there: delete it, or set TMPDIR to a folder of your own"
    )


def is_protected(folder: Path) -> bool:
    """Return whether no other user, except root, can write in a folder or replace it.

    This holds if this user or root owns each folder on its path, none of them is a link, and no other user may write in
    them. In a folder with the sticky bit, such as /tmp, others may write, but can't rename files of this user. Access
    lists that the mode does not show are not checked.
    """
    owners = {0, os.geteuid()}
    for part in (folder, *folder.parents):
        found = part.lstat()
        is_writable = found.st_mode & _OTHERS_WRITE and (part == folder or not found.st_mode & stat.S_ISVTX)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners or is_writable:
            return False
    return True


def in_temporary(folder: Path) -> bool:
    """Return whether a folder lies directly in the machine's temporary folder, where all users may make folders."""
    return folder.parent == Path(tempfile.gettempdir())


@cache
def _sweep_once(parent: Path, pid: int) -> None:
    """Delete folders of dead owners, once in each process: a forked one has another pid."""
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            with suppress(OSError):
                if match and _is_mine(entry) and match[3] == _place() and not _lives(int(match[1]), int(match[2])):
                    shutil.rmtree(entry.path, ignore_errors=True)


def _is_mine(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()


def _lives(pid: int, start: int) -> bool:
    """Return whether the process that had this id is alive; True if unknown."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's process may have the id now
        pass
    now = _start_of(pid)
    return now is None or start in (0, now)


def _start_of(pid: int) -> int | None:
    """Return when a process started, in ticks since the boot; None if unknown, as on macOS."""
    try:
        # The second field is the program's name in brackets, which may hold blanks and brackets.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


@cache
def _place() -> str:
    """Return a digest of the scope of process ids here: machine, boot and namespace."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii"))
    with suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
