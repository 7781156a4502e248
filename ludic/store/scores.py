"""scores/: values that scorers gave to stored rollouts, appended at any time by any number of processes.

Writes scores/scorer=NAME/{uuid7}-{sequence}.parquet, put if absent, with a new uuid7 for each log; reads the files of
some scorers as they appear. A file is complete and immutable once listed; a killed scorer loses its last seconds.
Raises ConfigError for a scorer's name that a file can't have, StoreError if the filesystem fails.
"""

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import ConfigError, SchemaError
from ludic.records import new_id
from ludic.schema import arrow_schema
from ludic.store.catalogue import SCORES, ScoresName
from ludic.store.parquet import encode_plain
from ludic.store.root import Root
from ludic.store.tables import read_table
from ludic.store.writer import BackgroundAppender, NamedFile

logger = logging.getLogger(__name__)

PLAN_COLUMNS = ("rollout_id", "name", "value", "scorer", "scorer_version", "error", "created_at")
"""Columns of scores that plans of batches use."""

_FILE_ROWS = 1024
_FLUSH_AGE_S = 2.0
# A percent-encoded name of a folder, scorer=NAME, has at most 255 bytes on common filesystems.
_MOST_BYTES = 200
_REFERENCE_SIGNS = "@:,"

Row = Mapping[str, Any]
"""One row of the scores table, by column; columns that are left out are null."""


def check_scorer_name(name: str) -> str:
    """Return the name. Raises ConfigError if no folder can have it, or if settings could not refer to it."""
    is_short = 0 < len(quote(name, safe="")) <= _MOST_BYTES
    if not is_short or not name.isprintable() or any(sign in name for sign in _REFERENCE_SIGNS):
        raise ConfigError(
            f"scorer name {name!r} can't be used; wanted printable characters without {' '.join(_REFERENCE_SIGNS)}, "
            f"at most {_MOST_BYTES} bytes when percent-encoded"
        )
    return name


class ScoreLog:
    """Appends rows of the scores table (schemas/scores.v1.json) of one scorer. Close it, or use it in `with`."""

    def __init__(self, root: Root, scorer: str) -> None:
        """Raises ConfigError for a name that can't be used."""
        self._stamp = {"scorer": check_scorer_name(scorer), "run_id": root.run_id}
        self._scorer, self._log = scorer, new_id()
        self._sequence = itertools.count()
        self._appender = BackgroundAppender[Row](
            root,
            self._make_files,
            is_full=lambda rows: len(rows) >= _FILE_ROWS,
            flush_age_s=_FLUSH_AGE_S,
            max_waiting=4 * _FILE_ROWS,
        )

    def append(self, row: Row) -> None:
        """Append one row, without scorer and run_id; a thread writes it. Raises the error of an earlier write."""
        self._appender.append(row)

    def close(self) -> None:
        """Write the remaining rows and stop the thread."""
        self._appender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _make_files(self, rows: Sequence[Row]) -> list[NamedFile]:
        table = pa.Table.from_pylist([{**row, **self._stamp} for row in rows], arrow_schema("scores"))
        name = SCORES.name(ScoresName(self._scorer, self._log, next(self._sequence)))
        return [(name, encode_plain(table))]


class ScoreReader:
    """Reads the scores of some scorers that were written since the last poll."""

    def __init__(self, root: Root, scorers: Iterable[str]) -> None:
        self._root, self._scorers = root, list(scorers)
        self._seen: set[ScoresName] = set()

    def poll(self) -> pa.Table | None:
        """Return PLAN_COLUMNS of new rows; None if there are none. A broken file is left out with a warning.

        Raises StoreError if the filesystem fails; the next poll reads those files again.
        """
        tables: list[pa.Table] = []
        names: list[ScoresName] = []
        for scorer in self._scorers:
            for name in SCORES.listed(self._root, scorer=scorer):
                if name not in self._seen:
                    tables.append(self._read(name))
                    names.append(name)
        self._seen.update(names)
        found = pa.concat_tables(tables) if tables else None
        return found if found is not None and found.num_rows else None

    def _read(self, name: ScoresName) -> pa.Table:
        try:
            table = read_table(self._root, SCORES, name)
        except (SchemaError, FileNotFoundError) as error:
            logger.warning("left out scores that can't be read: %s", error)
            table = arrow_schema("scores").empty_table()
        return table.filter(pc.equal(table["scorer"], name.scorer)).select(PLAN_COLUMNS)
