"""The runs that the pages show, by label, each read through one connection that stays open.

A run is opened when a page first asks for it. Files that were stored since are listed in the background, so that a page
never waits for that. Raises UnknownIdError for a label that there is not.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from ludic.app.show.data import RunData
from ludic.app.show.lookup import UnknownIdError
from ludic.errors import LudicError
from ludic.root import Root

_RENEW_AFTER_S = 5.0
"""Seconds after which the files of a run are listed again, when a page asks for it."""
_MOST_KEPT = 64
"""Computed values, such as all curves of a run, that are kept until the run has new data."""
_MOST_NOTICES = 5

Kept = TypeVar("Kept")


class Site:
    """One run, or the runs of a folder."""

    def __init__(self, root: Root | None = None, *, author: str | None = None) -> None:
        self._author = author
        self._lock = threading.Lock()
        self._runs: dict[str, RunData] = {} if root is None else {"": RunData(root, author)}
        self._listed_at: dict[str, float] = {}
        self._kept: dict[tuple[str, str], tuple[Any, Any]] = {}
        """Version and value by key, the last used ones at the end."""
        self._making: dict[tuple[str, str], threading.Lock] = {}
        self._notices = _Notices()
        self.has_several = root is None
        """Whether the site shows a folder of runs, so that addresses name one."""

    def run(self, label: str) -> RunData:
        """Return a run for one request."""
        with self._lock:
            if label not in self._runs:
                raise UnknownIdError(f"there is no run {label!r}")
            run = self._runs[label]
            now = time.monotonic()
            is_old = now - self._listed_at.setdefault(label, now) > _RENEW_AFTER_S
            if is_old:
                self._listed_at[label] = now
        if is_old:
            threading.Thread(target=run.refresh, name="ludic-refresh", daemon=True).start()
        return run.session()

    def kept(self, key: tuple[str, str], version: Any, make: Callable[[], Kept]) -> Kept:
        """Return what `make` returned before for this key and an equal version, or call it; one caller at a time."""
        with self._lock:
            lock = self._making.setdefault(key, threading.Lock())
        with lock:
            known = self._kept.pop(key, None)
            found = known[1] if known is not None and known[0] == version else make()
            self._kept[key] = version, found
        with self._lock:
            while len(self._kept) > _MOST_KEPT:
                oldest = next(iter(self._kept))
                del self._kept[oldest]
        return found

    def notices(self) -> list[str]:
        """Return the newest warnings that ludic logged while it read the runs, such as of files that it left out."""
        return self._notices.newest()

    @property
    def first_page(self) -> str:
        """Name of the page at the address /."""
        return "runs" if self.has_several else "overview"

    def warm_up(self) -> None:
        """Open the run before a browser asks for it. The pages show an error of it, too."""
        for run in self._runs.values():
            with suppress(LudicError):
                run.ask("select count(*) from rollouts", {})

    def link(self, label: str, page: str, query: Mapping[str, Any]) -> str:
        """Return the address of a page of a run. query: values, without those that are None or empty."""
        given = {name: str(value) for name, value in query.items() if value is not None and str(value)}
        words = ("r", label, page) if label else (page,)
        return "/" + "/".join(quote(word, safe="/") for word in words) + (f"?{urlencode(given)}" if given else "")


class _Notices(logging.Handler):
    """Keeps the newest different warnings of ludic's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: dict[str, None] = {}
        logging.getLogger("ludic").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self._texts.pop(text, None)
        self._texts[text] = None
        while len(self._texts) > _MOST_NOTICES:
            del self._texts[next(iter(self._texts))]

    def newest(self) -> list[str]:
        with self.lock:  # type: ignore[union-attr]
            return list(self._texts)
