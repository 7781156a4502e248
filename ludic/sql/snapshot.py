"""List the files behind `rollouts` and `evals` of a connection, at the first query, and keep the list until a refresh.

Reads the root. Caches the scalars of workers' files: many files in the user's cache folder (LUDIC_CACHE_DIR overrides
it), few files in a temporary folder that is deleted with the connection. An unreadable file is left out with a warning.
Raises StoreError if the root can't be read.
"""

import hashlib
import logging
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from ludic.errors import StoreError
from ludic.paths import cache_folder as user_cache
from ludic.sql.scalars import Scalars, update
from ludic.store import RolloutFile, Root
from ludic.store.files import Folder, current_files, list_names
from ludic.temporary import folder_of_object

logger = logging.getLogger(__name__)

FEW_FILES = 64
"""Up to this many files are read again for each connection, in 0.1 s, so that a small run leaves no cache behind."""

_MOST_LISTINGS = 10
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class Stored:
    """Files that serve one folder: together they hold each of its rows once."""

    segments: Sequence[Path] = ()
    """Files on this machine with the scalars of workers' files; see ludic.sql.scalars."""
    compacted: Sequence[RolloutFile] = ()


class Snapshot:
    """The files of a root, as of the first query after the last `refresh`. Threads may share a snapshot."""

    def __init__(self, root: Root, without: Collection[str] = ()) -> None:
        """Create an empty snapshot, until the first `refresh`. without: names of files to leave out."""
        self.has_begun = False
        """Whether files are listed at all."""
        self._root, self._without = root, frozenset(without)
        self._lock = threading.Lock()
        self._stored: dict[Folder, Stored] = {"rollouts": Stored(), "evals": Stored()}
        self._private: Path | None = None

    def refresh(self) -> None:
        """List the files again at the next query."""
        with self._lock:
            self.has_begun = True
            self._stored.clear()

    def stored(self, folder: Folder) -> Stored:
        """Return the files that serve a folder."""
        with self._lock:
            if folder not in self._stored:
                self._stored[folder] = self._look(folder)
            return self._stored[folder]

    def folders(self) -> list[Path]:
        """Return the folders of this machine that hold segments, now or later."""
        return [cache_folder(self._root), self._private_folder()]

    def _look(self, folder: Folder) -> Stored:
        for _ in range(_MOST_LISTINGS):
            files = [file for file in current_files(self._root, folder) if file.name not in self._without]
            scalars = self._update([file for file in files if not file.is_compacted], folder)
            # A file that vanished was compacted or has expired: list the files again.
            if not scalars.gone:
                if broken := sorted(scalars.broken):
                    names = ", ".join([*broken[:_MOST_NAMES], *(["..."] if len(broken) > _MOST_NAMES else [])])
                    logger.warning("left out what can't be read: %s; `ludic verify %s` says why", names, self._root.url)
                return Stored(scalars.segments, [file for file in files if file.is_compacted])
        raise StoreError(f"{self._root.url}: files keep vanishing while they are read, such as {scalars.gone[0]}")

    def _update(self, files: Sequence[RolloutFile], folder: Folder) -> Scalars:
        if len(files) > FEW_FILES:
            shared = cache_folder(self._root) / folder
            try:
                return update(self._root, files, shared)
            except StoreError:
                raise
            except OSError as error:
                logger.warning("can't keep scalars in %s, so each connection reads them again: %s", shared, error)
        return update(self._root, files, self._private_folder() / folder)

    def _private_folder(self) -> Path:
        if self._private is None:
            self._private = folder_of_object("scalars", self)
        return self._private


def count_rows(root: Root, folder: Folder) -> dict[str, int]:
    """Return the number of rows of each readable file of workers by name, from cached scalars; empty for few files.

    New files are read into the cache, where the next connection finds them. Raises StoreError.
    """
    if len(list_names(root, folder=folder)) <= FEW_FILES:
        return {}
    snapshot = Snapshot(root)
    snapshot.refresh()
    counts: dict[str, int] = {}
    for path in snapshot.stored(folder).segments:
        names = pq.read_table(path, columns=["file"])["file"].value_counts()
        counts |= zip(names.field("values").to_pylist(), names.field("counts").to_pylist(), strict=True)
    return counts


def cache_folder(root: Root) -> Path:
    """Return the folder that caches a run's scalars between connections; a copy of the run has another folder."""
    digest = hashlib.sha256(root.fs.unstrip_protocol(root.path).encode()).hexdigest()[:16]
    return user_cache() / "scalars" / f"{root.run_id}-{digest}"
