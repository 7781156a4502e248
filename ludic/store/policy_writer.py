"""Write the weights of published versions: full ones, and between them differences to the version before.

A reader that follows every version downloads one difference each; a late one downloads the newest full version and the
differences since. A new writer, as after a restart, begins with a full version. The files of the last version are kept
in the local temporary folder, where they are compared with the next: a copy of the weights outside memory, and nothing
is read back from the root.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ludic.store.catalogue import DELTAS, WEIGHTS
from ludic.store.manifest import write_manifest
from ludic.store.policies import upload_policy, write_policy
from ludic.store.policy_files import DELTA_SUFFIX
from ludic.store.records import Delta, encode_record
from ludic.store.root import Root
from ludic.store.weight_deltas import write_delta
from ludic.temporary import temporary_folder

_WEIGHTS = ".safetensors"


@dataclass(frozen=True, slots=True)
class _Version:
    """Local files of a version."""

    number: int
    folder: Path
    digests: dict[str, str]
    """By file, as in digests.json."""


class PolicyWriter:
    """Writes the versions of one trainer, one at a time. `close` deletes the local files."""

    def __init__(self, root: Root, full_every: int | None = None) -> None:
        """full_every: one version of so many is full, the others are differences; None: all are full."""
        self._root, self._full_every = root, full_every
        self._stack = ExitStack()
        self._folder: Path | None = None
        """Local folder of the versions' files, made when it is needed; not below a local root, where it would look like
        the leftover of a killed writer."""
        self._last: _Version | None = None
        self._num_deltas = 0
        """Differences since the last full version."""

    def write(self, version: int, save: Callable[[Path], None]) -> int:
        """Write the files of a claimed version, the one that completes it last; returns the bytes of all.

        save: writes a Hugging Face folder into an empty local folder.
        """
        if self._full_every is None:
            return write_policy(self._root, version, save)
        if self._folder is None:
            self._folder = self._stack.enter_context(temporary_folder("published"))
        files = self._folder / f"version={version}"
        files.mkdir()
        save(files)
        new = _Version(version, files, write_manifest(files))
        last, self._last = self._last, None  # if writing fails, the next version is full
        num_bytes = None
        if last is not None and self._num_deltas + 1 < self._full_every:
            num_bytes = self._write_delta(last, new)
        self._num_deltas = 0 if num_bytes is None else self._num_deltas + 1
        if num_bytes is None:
            num_bytes = self._write_full(new)
        if last is not None:
            shutil.rmtree(last.folder, ignore_errors=True)
        self._last = new
        return num_bytes

    def close(self) -> None:
        """Delete the local files."""
        self._stack.close()
        self._folder = self._last = None

    def _write_full(self, new: _Version) -> int:
        with self._root.scratch_folder() as folder:
            shutil.copytree(new.folder, folder, copy_function=_link, dirs_exist_ok=True)
            return upload_policy(self._root, new.number, folder, last=WEIGHTS.file)

    def _write_delta(self, last: _Version, new: _Version) -> int | None:
        """Write differences and return their bytes; None if the versions differ in more than the values of tensors."""
        if last.digests.keys() != new.digests.keys():
            return None
        changed = [name for name, digest in new.digests.items() if last.digests[name] != digest]
        if not all(name.endswith(_WEIGHTS) for name in changed):
            return None
        with self._root.scratch_folder() as folder:
            for name in changed:
                target = folder / f"{name}{DELTA_SUFFIX}"
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    write_delta(last.folder / name, new.folder / name, target)
                except (
                    ValueError,
                    FileNotFoundError,
                ):  # other tensors than before, or the temporary folder was cleaned
                    return None
            write_manifest(folder)
            delta = Delta(version=new.number, base=last.number, files=new.digests)
            (folder / DELTAS.file).write_bytes(encode_record(delta))
            return upload_policy(self._root, new.number, folder, last=DELTAS.file)


def _link(source: str, target: str) -> None:
    """Make a hard link, or a copy if that is impossible, as on another disk: uploading moves files away."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
