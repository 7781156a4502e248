"""Settings of the processes that ludic starts here: one JSON file each, which the process reads with --config.

Arguments would be parsed again, have a largest length and are shown to all users of the machine. The files are in a
private temporary folder (ludic.temporary), which is deleted when the process that made it ends, or by the next one if
it was killed. A restarted process gets its file anew. Files for clusters (ludic.adapters.clusters) hold flags instead:
people read and change them, and a file beside them would have to reach every machine.
"""

import json
import os
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from ludic.temporary import folder_of_object


def config_args(name: str, settings: Mapping[str, Any]) -> list[str]:
    """Write a process's settings, by the names of its flags; return the arguments that name the file.

    name: of the process, for people. The file's name ends with a digest of the settings, so a process that has not read
    its file yet never finds those of another.
    """
    text = json.dumps(dict(settings), indent=1)
    if not _files_of(os.getpid()).folder.is_dir():  # a run of days outlives what cleans temporary folders
        _files_of.cache_clear()
    path = _files_of(os.getpid()).folder / f"{name}-{sha256(text.encode()).hexdigest()[:16]}.json"
    path.write_text(text)
    return ["--config", str(path)]


class _Files:
    """The folder of this process's files, which is deleted with it."""

    def __init__(self) -> None:
        self.folder: Path = folder_of_object("config", self)


@cache
def _files_of(pid: int) -> _Files:
    """pid: a forked process gets a folder of its own."""
    return _Files()
