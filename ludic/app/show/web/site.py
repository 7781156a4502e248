"""The runs that the pages show: one, or those below a folder by their labels; each is read through one connection.

A run is opened when a page first asks for it. Files that were stored since are listed in the background, so that a page
never waits for that. Raises UnknownIdError for a label that there is not, MissingRootError if a run is gone.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

from ludic.app.show.data import RunData
from ludic.app.show.lookup import UnknownIdError
from ludic.app.show.run_table import RunTable, tabulate
from ludic.base import host_bytes
from ludic.errors import LudicError
from ludic.root import Root

_RENEW_AFTER_S = 5.0
"""Seconds after which the files of a run, or the runs of a folder, are listed again when a page asks for them."""
_TOO_OLD_S = 30.0
"""Seconds after which a page waits for a new list of the runs of a folder."""
_MOST_OPEN = 16
"""Runs whose connections stay open; those that were asked for longest ago are closed."""
_MOST_KEPT = 256
"""Computed values, such as all curves of a run, that are kept until the run has new data."""
_MOST_NOTICES = 5
_MOST_MEMORY = 8 << 30

Kept = TypeVar("Kept")


class Site:
    """What the server shows; as a context manager, it stops to collect warnings at the end."""

    def __init__(self, shown: Root | str, *, author: str | None = None) -> None:
        """shown: a run, or the folder or URL of runs. author: of labels; None is the user of this machine."""
        self._author = author
        self._folder = shown if isinstance(shown, str) else None
        self._lock = threading.Lock()
        self._runs: dict[str, RunData] = {}
        """Open runs by label, the last used one at the end."""
        if isinstance(shown, Root):
            self._runs[""] = RunData(shown, author, memory_bytes())
        self._listed_at: dict[str, float] = {}
        self._table: tuple[float, RunTable] | None = None
        """When the runs of the folder were listed, and their table."""
        self._tabulating = threading.Lock()
        self._kept: dict[tuple[str, str], tuple[Any, Any]] = {}
        """Version and value by key, the last used ones at the end."""
        self._making: dict[tuple[str, str], threading.Lock] = {}
        self._notices = _Notices()

    def __enter__(self) -> Self:
        logging.getLogger("ludic").addHandler(self._notices)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("ludic").removeHandler(self._notices)

    @property
    def has_several(self) -> bool:
        """Whether the site shows a folder of runs, so that addresses name one."""
        return self._folder is not None

    @property
    def first_page(self) -> str:
        """Name of the page at the address /."""
        return "runs" if self.has_several else "overview"

    def warm_up(self) -> None:
        """Open the run, or list the runs, before a browser asks for it. The pages show an error of it, too."""
        with suppress(LudicError):
            if self.has_several:
                self.table()
            else:
                self.run("").ask("select count(*) from rollouts", {})

    # --- Runs ---------------------------------------------------------------------------------------------

    def run(self, label: str) -> RunData:
        """Return a run for one request."""
        with self._lock:
            run = self._runs.get(label)
        if run is None:
            run = RunData(Root.open(self._url(label)), self._author, memory_bytes())
        now = time.monotonic()
        with self._lock:
            run = self._runs.pop(label, run)  # another request may have opened it, too
            self._runs[label] = run
            while len(self._runs) > _MOST_OPEN:
                del self._runs[next(iter(self._runs))]  # its connection closes with the last request that has it
            is_old = now - self._listed_at.get(label, -math.inf) > _RENEW_AFTER_S
            if is_old:
                self._listed_at[label] = now
        if is_old:
            threading.Thread(target=run.renew, name="ludic-renew", daemon=True).start()
        return run.session()

    def _url(self, label: str) -> str:
        known = {each.label: each.url for each in self.table().runs}
        if label not in known:
            raise UnknownIdError(f"there is no run {label!r} below {self._folder}")
        return known[label]

    def table(self) -> RunTable:
        """Return the runs of the folder, as of some seconds ago."""
        known, now = self._table, time.monotonic()
        age_s = now - known[0] if known is not None else _TOO_OLD_S
        if known is None or age_s >= _TOO_OLD_S:
            return self._tabulate(now)
        if age_s > _RENEW_AFTER_S:
            threading.Thread(target=self._tabulate, args=(now,), name="ludic-runs", daemon=True).start()
        return known[1]

    def _tabulate(self, asked_at: float) -> RunTable:
        assert self._folder is not None
        with self._tabulating:
            if self._table is None or self._table[0] < asked_at:
                self._table = time.monotonic(), tabulate(self._folder)
            return self._table[1]

    def link(self, label: str, page: str, query: Mapping[str, Any]) -> str:
        """Return the address of a page of a run. query: values or lists of them, without None and empty ones."""
        given = [
            (name, str(each))
            for name, value in query.items()
            for each in (value if isinstance(value, list | tuple) else [value])
            if each is not None and str(each)
        ]
        words = ("r", label, page) if label else (page,)
        return "/" + "/".join(quote(word, safe="/") for word in words) + (f"?{urlencode(given)}" if given else "")

    # --- What is kept -------------------------------------------------------------------------------------

    def kept(self, key: tuple[str, str], version: Any, make: Callable[[], Kept]) -> Kept:
        """Return what `make` returned before for this key and an equal version, or call it; one caller at a time."""
        with self._lock:
            lock = self._making.setdefault(key, threading.Lock())
        with lock:
            known = self._kept.get(key)
            found = known[1] if known is not None and known[0] == version else make()
            with self._lock:
                self._kept.pop(key, None)
                self._kept[key] = version, found
                while len(self._kept) > _MOST_KEPT:
                    del self._kept[next(iter(self._kept))]
        return found

    def notices(self) -> list[str]:
        """Return the newest warnings that ludic logged while it read the runs, such as of files that it left out."""
        return self._notices.newest()


def memory_bytes() -> int:
    """Return the memory that the queries of a run may take: half of this machine's, at most 8 GB."""
    return min(_MOST_MEMORY, (host_bytes() or 2 * _MOST_MEMORY) // 2)


class _Notices(logging.Handler):
    """Keeps the newest different warnings of ludic's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self._texts.pop(text, None)
        self._texts[text] = None
        while len(self._texts) > _MOST_NOTICES:
            del self._texts[next(iter(self._texts))]

    def newest(self) -> list[str]:
        return list(self._texts)
