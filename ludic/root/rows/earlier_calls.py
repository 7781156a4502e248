"""Read the calls of many episodes of a gateway's earlier lives: each file of calls/ is looked through once.

A gateway that starts again reads an episode when its first call comes. A life's files hold calls of all episodes that
it had at a time, so to read all of them for each episode would take quadratic time. Raises SchemaError, StoreError.
"""

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from ludic.records import arrow_schema, conform
from ludic.root.catalogue import CALLS, EPISODES
from ludic.root.json_records import COMPACTED, EpisodeClaim
from ludic.root.root import Root
from ludic.root.rows.calls import sorted_calls
from ludic.root.rows.parquet import decode

_CONCURRENT_READS = 8
_MOST_KEPT_BYTES = 128 << 20
"""Bytes of decoded files that are kept for the next episodes."""
T = TypeVar("T")

_NAME = ["episode_id", "attempt"]


class EarlierCalls:
    """Reads calls; may be called from any thread, and reads for one caller at a time."""

    def __init__(self, root: Root, live: str) -> None:
        """live: worker_id whose files still grow in number."""
        self._root, self._live = root, live
        self._listed: set[str] = set()
        """worker_ids whose files are all known."""
        self._looked_through: set[str] = set()
        self._names_of: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        """Names of the files with calls of an attempt at an episode."""
        self._kept: OrderedDict[str, pa.Table] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def read(self, episode_id: str, attempt: int) -> pa.Table:
        """Return the rows of an attempt at an episode, in order of call_id and time, as `read_calls` does."""
        names = EPISODES.listed(self._root, episode_id=episode_id, attempt=attempt)
        claims = [EPISODES.read(self._root, *name) for name in names]
        workers = {claim.worker_id for claim in claims if isinstance(claim, EpisodeClaim)}
        with self._lock:
            while True:
                self._look_through(workers)
                files = self._names_of[episode_id, attempt]
                found = self._tables(files)
                if len(found) == len(files):
                    break
                self._forget()  # a compaction moved rows to other files
        known = pa.array(sorted(workers), pa.string())
        mine = [rows.filter(_of_attempt(rows, episode_id, attempt)) for rows in found]
        mine = [rows.filter(pc.is_in(rows["worker_id"], known)) for rows in mine]
        return sorted_calls(pa.concat_tables([arrow_schema(CALLS.table).empty_table(), *mine]))

    def _look_through(self, workers: Iterable[str]) -> None:
        """Find out which episodes the files of these lives have calls of."""
        if self._listed.issuperset(workers) and self._live not in workers:
            return
        self._listed.update(workers)
        new = [
            CALLS.name(found)
            for found in CALLS.listed(self._root)
            if found.worker_id in self._listed or found.worker_id.startswith(COMPACTED)
        ]
        new = [name for name in new if name not in self._looked_through]
        for name, episodes in zip(new, self._map(self._episodes_in, new), strict=True):
            self._looked_through.add(name)
            for episode in episodes:
                self._names_of[episode].append(name)

    def _episodes_in(self, name: str) -> set[tuple[str, int]]:
        rows = self._decoded(name, _NAME)
        return set() if rows is None else {*zip(*(rows[column].to_pylist() for column in _NAME), strict=True)}

    def _tables(self, names: Iterable[str]) -> list[pa.Table]:
        """Return the rows of files, without those that are gone."""
        missing = [name for name in names if name not in self._kept]
        read = dict(zip(missing, self._map(self._decoded, missing), strict=True))
        found = [self._kept.get(name, read.get(name)) for name in names]
        for name, rows in read.items():
            if rows is not None:
                self._kept[name] = rows
                self._kept_bytes += rows.nbytes
        while self._kept_bytes > _MOST_KEPT_BYTES:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return [rows for rows in found if rows is not None]

    def _map(self, function: Callable[[str], T], names: Sequence[str]) -> list[T]:
        """Return what a function returns for each name; waits for several files of an object store at a time."""
        if self._root.is_local or len(names) < 2:
            return [function(name) for name in names]
        with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            return [*pool.map(function, names)]

    def _decoded(self, name: str, columns: list[str] | None = None) -> pa.Table | None:
        """Return the rows of a file; None if it is gone."""
        try:
            rows = decode(self._root.read(name), f"{self._root.url}/{name}", CALLS.table, columns)
        except FileNotFoundError:
            return None
        return rows if columns is not None else conform(rows, CALLS.table)

    def _forget(self) -> None:
        self._listed.clear()
        self._looked_through.clear()
        self._names_of.clear()
        self._kept.clear()
        self._kept_bytes = 0


def _of_attempt(rows: pa.Table, episode_id: str, attempt: int) -> pa.ChunkedArray:
    return pc.and_(pc.equal(rows["episode_id"], episode_id), pc.equal(rows["attempt"], attempt))
