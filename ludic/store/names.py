"""Check names below a root, which other programs may have written: their numbers, and that they stay in the root.

Also names this process, for claims.
"""

import os
import re
import socket

from ludic.errors import SchemaError

DIGITS = r"(?:0|[1-9][0-9]{0,17})"
"""Pattern of a number in a file's name, as ludic writes it; it fits into int64."""
NUMBER = f"({DIGITS})"
"""The same as a group."""
SCRATCH = ".tmp"
"""Folder of files that are not complete yet, below a local root; no reader looks into it."""

_NUMBER = re.compile(DIGITS)


def parse_number(text: str) -> int | None:
    """Parse a number as ludic writes it; None for a sign, leading zeros, digits of other scripts, over 18 digits."""
    return int(text) if _NUMBER.fullmatch(text) else None


def check_inside(name: str, url: str) -> str:
    """Return the name. Raises SchemaError if it leads out of the root: a damaged or hostile file holds such a name."""
    if ".." in name.split("/") or "\0" in name:
        raise SchemaError(f"{url}: a file of the run names {name!r}, which leads out of the run; it is not touched")
    return name


def owner_name(pid: int | None = None) -> str:
    """Return the readable name of a process of this machine, host-pid. pid: None means this process."""
    return f"{socket.gethostname()}-{os.getpid() if pid is None else pid}"
