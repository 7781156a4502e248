"""Follow folders in which another program leaves rollouts: import each file once, when it is complete.

Reads the folders, paths or URLs, and imports/ of the root; writes what ludic.adapters.imports.importing writes, and
nothing into the folders. A file is complete if
  - two looks, one after the other, find it with the same size and time;
  - its program appends to no file of the format, or writes the file of a newer step beside it by now, or the file has
    rested for `rest_s`;
  - its end is there: a last line that is JSON, the footer of a Parquet file.
What was imported is known by name, size and time, which imports/ keeps, so that a new start reads no content. A file
with another content under the same name is imported, too: its program has written it again. One that has only grown is
not, since its first groups are stored: it is named. A file that can't be imported is named once, and tried again when
it changes. Links, which may lead anywhere, and pipes are named and not read. While a filesystem fails, files are left
for the next look. Raises what concerns the root itself: errors of its model or tokenizer, or that it is gone.
"""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ludic.adapters.complaints import Complaints
from ludic.adapters.imports.formats import ImportFormat
from ludic.adapters.imports.importing import identity, importer
from ludic.adapters.imports.records import UNKNOWN, FileState, open_file, read_records, read_state
from ludic.app import Imported, said_of
from ludic.base import Track, is_lines, is_url, untracked
from ludic.errors import ConfigError, MissingRootError, StoreError
from ludic.root import IMPORTED, IMPORTED_BY, IMPORTS, ImportReport, Root
from ludic.settings import check_url

logger = logging.getLogger("ludic.import")

INTERVAL_S = 2.0
"""Default time between two looks."""
REST_S = 600.0
"""Default rest of a file that its program may append to. An orchestrator waits as long for its slowest rollout."""

_PATIENCE = 5
"""Looks until a file without an end is named."""
_LAST_LINE = 1 << 20
"""Bytes of a last line without line break that are read; a longer one is no end."""
_CONCURRENT_READS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A file that was imported, as imports/ says."""

    state: FileState
    sha256: str
    """Beginning of the digest of its content and of the fields of its path."""
    is_whole: bool = True
    """Whether its import came to its end."""


@dataclass(slots=True, kw_only=True)
class _File:
    state: FileState
    since_s: float
    """Since when it has rested in this state, on the follower's clock."""
    num_polls: int = 1
    is_settled: bool = False
    """Whether nothing is to be done until the file changes: it was imported, or can't be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """The folders, and what was seen in them."""

    root: Root
    folders: Sequence[str]
    format: ImportFormat
    import_one: Callable[[str, Track], ImportReport]
    rest_s: float
    """Seconds after which a file without change is complete, if its program may append to it."""
    clock: Callable[[], float] = time.monotonic
    files: dict[str, _File] = field(default_factory=dict)
    stored: dict[str, _Stored] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    """Why a file is not imported, by its name."""
    absent: set[str] = field(default_factory=set)
    """Folders, also below those that are followed, that were named because they could not be listed."""
    complaints: Complaints = field(default_factory=lambda: Complaints("ludic import"))

    def poll(self, stop: threading.Event) -> tuple[list[ImportReport], bool]:
        """Import the files that are complete; return their reports, and whether a file was new or changed."""
        reports, has_changed = [], False
        found = dict(self._list())
        for url in self.files.keys() - found.keys():
            del self.files[url]
            self.left.pop(url, None)
        newest = _newest_steps(self.format, found) if self.format.grows else {}
        open_files: list[tuple[str, _File]] = []
        for url, state in found.items():
            file = self._see(url, state)
            has_changed = has_changed or (file.num_polls == 1 and not file.is_settled)
            open_files += [] if file.is_settled else [(url, file)]
        for url, file in sorted(open_files, key=lambda each: (_step(self.format, each[0])[1], each[0])):
            if stop.is_set():
                break
            if self._is_due(url, file, newest):
                report = self._import(url, file)
                reports += [report] if report is not None and not report.was_there else []
                has_changed = has_changed or file.is_settled
        return reports, has_changed

    def _list(self) -> Iterator[tuple[str, FileState]]:
        """Yield the files of the format. A folder that can't be listed is named, and left for the next look."""
        own = f"{_absolute(self.root.url)}/"  # the root may lie in a followed folder
        for folder in self.folders:
            try:
                infos = self._infos(folder)
            except (OSError, ValueError, ImportError) as error:
                self._name(self.absent, folder, f"can't be read: {getattr(error, 'strerror', None) or error}")
                continue
            self.absent.discard(folder)
            for url, info in infos.items():
                if url.startswith(own) or url.rpartition("/")[2].startswith(".") or not self.format.takes(url):
                    continue
                if info.get("type", "file") == "file":
                    yield url, FileState.of(info)
                elif url not in self.left:
                    self.left[url] = "it is a link, a pipe or a device, which are not read; wanted a file"
                    logger.warning("%s: %s", url, self.left[url])

    def _infos(self, folder: str) -> dict[str, Mapping[str, Any]]:
        """Return what a filesystem says of all below a folder but folders, by name; name folders that it can't list."""
        filesystem, path = fsspec.core.url_to_fs(folder)
        filesystem.invalidate_cache()
        is_local = isinstance(filesystem, LocalFileSystem)
        infos = filesystem.find(path, withdirs=is_local, detail=True)
        if not infos and not filesystem.exists(path):
            raise FileNotFoundError(2, "does not exist yet")
        for name in [name for name, info in infos.items() if info.get("type") == "directory"]:
            del infos[name]
            try:
                os.scandir(name).close()  # which `find` does in silence
            except FileNotFoundError:
                pass
            except OSError as error:
                if name == path:
                    raise
                self._name(self.absent, name, f"can't be read: {error.strerror}")
        return {filesystem.unstrip_protocol(name) if is_url(folder) else name: info for name, info in infos.items()}

    @staticmethod
    def _name(named: set[str], what: str, reason: str) -> None:
        if what not in named:
            named.add(what)
            logger.warning("%s %s; it is looked at again", what, reason)

    def _see(self, url: str, state: FileState) -> _File:
        """Return what is known of a file, after one more look."""
        file = self.files.get(url)
        if file is not None and file.state == state:
            file.num_polls += 1
            return file
        stored = self.stored.get(url)
        is_stored = stored is not None and stored.is_whole and state != UNKNOWN and stored.state == state
        self.left.pop(url, None)
        # Its age counts once: afterwards this machine's time may jump, such as by a suspension, while it is written.
        age_s = _age_s(url, state) if file is None else 0.0
        self.files[url] = _File(state=state, since_s=self.clock() - age_s, is_settled=is_stored)
        return self.files[url]

    def _is_due(self, url: str, file: _File, newest: Mapping[str, int]) -> bool:
        if file.num_polls == 1:
            return False
        series, step = _step(self.format, url)
        rested = self.clock() - file.since_s >= self.rest_s
        if self.format.grows and step >= newest.get(series, step) and not rested:
            return False
        try:
            reason = unfinished(url, self.format)
        except (ConfigError, OSError) as error:
            reason = str(error)
        if reason is not None and file.num_polls > _PATIENCE and url not in self.left:
            self.left[url] = f"{reason}; it is imported when its program has written the rest"
            logger.warning("%s: %s", url, self.left[url])
        return reason is None

    def _import(self, url: str, file: _File) -> ImportReport | None:
        """Import a file; return its report, None if it is left, for now or until it changes."""
        before = read_state(url)
        try:
            if (grown := self._grown(url, file.state)) is not None:
                self._leave(url, file, grown)
                return None
            report = self.import_one(url, untracked)
            sha256 = report.worker_id.removeprefix(IMPORTED_BY)
            begun = IMPORTS.read(self.root, sha256) if report.was_there else None
        except ConfigError as error:
            if read_state(url) == before:  # else it changed while it was read
                self._leave(url, file, str(error))
            return None
        except MissingRootError:
            raise
        except (StoreError, OSError) as error:
            self.complaints.warn(f"{url} is not imported: {error}; it is tried again")
            return None
        file.is_settled = True
        self.left.pop(url, None)
        if begun is not None and begun.file != url:
            self._leave(url, file, f"its content is that of {begun.file}, which was imported; it is not imported again")
            return report
        self.stored[url] = _Stored(state=file.state, sha256=sha256)
        if not report.was_there:
            by = f"; texts were tokenised by the tokenizer of {report.tokenizer}" if report.tokenizer else ""
            logger.info("%s%s", said_of(report), by)
        return report

    def _grown(self, url: str, state: FileState) -> str | None:
        """Return why a file that was imported and has grown since is left; None for any other file."""
        stored = self.stored.get(url)
        before, now = (stored.state.size_bytes if stored else None), state.size_bytes
        if stored is None or before is None or now is None or now <= before:
            return None
        if not identity(url, self.format, before)[1].startswith(stored.sha256):
            return None  # its program wrote it again
        what = "what was appended is" if stored.is_whole else "and that was interrupted; the rest of it is"
        return f"grew by {now - before:,} bytes after it was imported; {what} not imported"

    def _leave(self, url: str, file: _File, reason: str) -> None:
        file.is_settled = True
        self.left[url] = reason
        logger.warning("%s", reason if url in reason else f"{url}: {reason}")

    @property
    def is_waiting(self) -> bool:
        """Whether a file may become due by rest alone."""
        return any(not file.is_settled and url not in self.left for url, file in self.files.items())


def follow(
    root: Root,
    folders: Sequence[str],
    format: str,
    stop: threading.Event,
    *,
    interval_s: float | None = None,
    rest_s: float | None = None,
    until_idle_s: float | None = None,
    **options: str | None,
) -> Imported:
    """Follow folders until `stop` is set, or they are idle; return what was imported.

    interval_s: seconds between two looks; None is INTERVAL_S. rest_s: seconds without a change after which a file is
    complete that its program may append to; None is REST_S, or until_idle_s if that is shorter. until_idle_s: ends when
    nothing has changed for as long; None goes on. options: of `importer`.
    """
    fmt, import_one = importer(root, format, **options)
    idle_s = until_idle_s
    rest_s = min(REST_S, idle_s or REST_S) if rest_s is None else rest_s
    folders = [_absolute(folder) for folder in folders]
    follower = Follower(root=root, folders=folders, format=fmt, import_one=import_one, rest_s=rest_s)
    follower.stored.update(_stored(root))
    reports: list[ImportReport] = []
    changed_s = follower.clock()
    while not stop.is_set():
        new, has_changed = follower.poll(stop)
        reports += new
        if has_changed:
            changed_s = follower.clock()
        elif idle_s is not None and follower.clock() - changed_s >= idle_s and not follower.is_waiting:
            break
        stop.wait(interval_s or INTERVAL_S)
    return Imported(root=root.url, files=reports, folders=folders, left=follower.left)


def _absolute(folder: str) -> str:
    """Return the name under which imports/ knows the files of a folder, wherever the next start is."""
    check_url(folder, "the folder's URL")
    return folder.rstrip("/") if is_url(folder) else Path(folder).absolute().as_posix()


def _stored(root: Root) -> Iterator[tuple[str, _Stored]]:
    """Yield the files of which the import began, by name."""
    done = set(IMPORTED.listed(root))
    begun = IMPORTS.listed(root)
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        for name, record in zip(begun, pool.map(lambda name: IMPORTS.read(root, *name), begun), strict=True):
            if record is not None:
                state = FileState(record.size_bytes, record.modified)
                yield record.file, _Stored(state=state, sha256=name.sha256, is_whole=name in done)


# --- Files -----------------------------------------------------------------------------------------------------------


def _step(fmt: ImportFormat, url: str) -> tuple[str, int]:
    """Return a file's path with its step left out, and the step; -1 for a path without."""
    match = re.search(fmt.path, url) if fmt.path else None
    name = next((name for name in ("file_step", "step") if match and match.groupdict().get(name)), None)
    if match is None or name is None:
        return url, -1
    return url[: match.start(name)] + url[match.end(name) :], int(match[name])


def _newest_steps(fmt: ImportFormat, found: Mapping[str, FileState]) -> dict[str, int]:
    """Return the step of each series of files, which differ in the step alone, that was written last.

    That is the newest step, unless the program has gone back to an earlier one and left the files of later ones.
    """
    newest: dict[str, tuple[float, int]] = {}
    for url, state in found.items():
        series, step = _step(fmt, url)
        written = _modified_s(url, state) or 0.0, step
        newest[series] = max(written, newest.get(series, written))
    return {series: step for series, (_, step) in newest.items()}


def _modified_s(url: str, state: FileState) -> float | None:
    """Return when a file of this machine was changed, in seconds since 1970; None for a URL, whose clock may differ."""
    with suppress(ValueError):
        return None if is_url(url) else float(state.modified)
    return None


def _age_s(url: str, state: FileState) -> float:
    """Return the seconds since the last change of a file of this machine; 0 if that is not known."""
    modified_s = _modified_s(url, state)
    return 0.0 if modified_s is None else max(0.0, time.time() - modified_s)


def unfinished(url: str, fmt: ImportFormat) -> str | None:
    """Return why a file is not whole; None if it is, or if its kind has no end that could be read alone."""
    if fmt.read is not read_records and not url.endswith(".jsonl"):
        return None
    with open_file(url) as file:
        beginning = file.read(8)
        size = file.seek(0, 2)
        if beginning.startswith(b"PAR1"):
            file.seek(max(0, size - 4))
            return None if size > 8 and file.read(4) == b"PAR1" else "its Parquet footer is absent"
        if not beginning:
            return "it is empty"
        if not is_lines(beginning, url):
            return None
        file.seek(max(0, size - _LAST_LINE))
        rest = file.read(_LAST_LINE).rpartition(b"\n")[2]
    if rest.strip():
        with suppress(ValueError, RecursionError):
            json.loads(rest)
            return None
        return "its last line is cut"
    return None
