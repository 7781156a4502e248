"""Append to and read the small tables of a root: metrics, scores, labels, token_stats and reference.

All tables share one appender and one tail; sections below add what is specific to a table. ludic.root.rows.ledger
writes the ledger, and RolloutWriter the requests. A file is complete and immutable once listed; a killed process loses
the rows that wait for its next file. Raises SchemaError if a file is broken, StoreError if the filesystem fails.
"""

import getpass
import hashlib
import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Self, TypeVar
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.base import storable
from ludic.errors import ConfigError, SchemaError, StoreError
from ludic.records import NULL_PARTITION, Row, arrow_schema, as_schema, check_schema, conform, new_id, plain_rows
from ludic.root.catalogue import (
    LABELS,
    METRICS,
    REFERENCE,
    SCORES,
    TOKEN_STATS,
    MetricsName,
    RankName,
    ReferenceName,
    ScoresName,
    Table,
    UuidName,
)
from ludic.root.json_records import CheckpointId
from ludic.root.root import Root
from ludic.root.rows.files import check_worker_id
from ludic.root.rows.parquet import (
    MOST_FILE_BYTES,
    UNREADABLE,
    check_text,
    decode,
    encode_plain,
    open_checked,
    read_within,
)
from ludic.root.rows.writer import MAX_WAITING, BackgroundAppender, NamedFile

if TYPE_CHECKING:
    from ludic.root.storage.filesystem import Storage

logger = logging.getLogger(__name__)

F = TypeVar("F", bound="NamedTuple")
Item = TypeVar("Item")

_CONCURRENT_READS = 16

# --- Files of a table -----------------------------------------------------------------------------------------


def put_table(root: "Storage", row: Table[F], of: F, rows: pa.Table) -> bool:
    """Put a file if absent; returns False if its name is taken by other content. rows: of the table's own schema.

    Raises SchemaError for rows of another table, StoreError if the filesystem fails.
    """
    return root.put_if_absent(row.name(of), encode_plain(conform(rows, row.table)))


def read_table(root: "Storage", row: Table[F], of: F) -> pa.Table:
    """Return all rows of a file in the table's own schema; columns that an older file lacks are null.

    Raises FileNotFoundError if there is no such file, SchemaError if it is broken or newer, StoreError if the
    filesystem fails.
    """
    where = f"{root.url}/{row.name(of)}"
    table = decode(root.read(row.name(of)), where, row.table)
    check_schema(table.schema, row.table, where)
    return conform(table, row.table)


class TableLog(Generic[Item]):
    """Appends items to files of a table, in a thread. Close it, or use it in `with`."""

    def __init__(
        self,
        root: Root,
        row: Table[F],
        make_tables: Callable[[Sequence[Item]], Iterable[tuple[F, pa.Table]]],
        *,
        file_items: int,
        flush_age_s: float,
        max_waiting: int = MAX_WAITING,
        encode: Callable[[pa.Table], bytes] = encode_plain,
    ) -> None:
        """make_tables: called in the thread; returns the rows of each file, under a name that no other file has.

        file_items: number of items that make a file at once; fewer do so after flush_age_s seconds. While max_waiting
        items wait to be written, `append` waits.
        """
        self._row, self._make_tables, self._encode = row, make_tables, encode
        self._appender = BackgroundAppender[Item](
            root,
            self._make_files,
            is_full=lambda items: len(items) >= file_items,
            flush_age_s=flush_age_s,
            max_waiting=max_waiting,
        )

    def append(self, item: Item) -> None:
        """Append one item. Raises the error of an earlier write, once; that write is tried again."""
        self._appender.append(item)

    def flush(self) -> None:
        """Return when all items are stored. Raises the error of this write, or, once, of an earlier one."""
        self._appender.flush()

    def close(self) -> None:
        """Write the remaining items and stop the thread."""
        self._appender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _make_files(self, items: Sequence[Item]) -> list[NamedFile]:
        return [(self._row.name(of), self._encode(table)) for of, table in self._make_tables(items)]


def _in_one_file(table: str, names: Iterator[F], stamp: Row, rows: Sequence[Row]) -> Iterator[tuple[F, pa.Table]]:
    """Yield rows as one file with the next name. stamp: columns of all rows."""
    yield next(names), pa.Table.from_pylist([{**row, **stamp} for row in rows], arrow_schema(table))


class TableTail(Generic[F]):
    """Reads the files of a table that were written since the last poll.

    Listings get slower as the run grows, so they take at most a given share of the time. Between listings, files that
    follow the newest known file of each active writer are requested by name: the last field of a name counts a writer's
    files, and the others name the writer.
    """

    def __init__(
        self,
        root: Root,
        row: Table[F],
        *,
        within: Sequence[Row] = ({},),
        newest_files: int | None = None,
        listing_share: float = 0.0,
        level: int = logging.DEBUG,
    ) -> None:
        """within: the first fields of the names to read, of each listing. newest_files: number of files of each writer
        that the first poll reads; None reads all. listing_share: minimum time between listings, as a multiple of the
        time that the last listing took; 0 lists in each poll. level: of the log entry for a broken file.
        """
        self._root, self._row, self._within, self._newest_files = root, row, within, newest_files
        self._listing_share, self._level = listing_share, level
        self.broken: dict[F, str] = {}
        """Problems of the files that can't be read."""
        self._seen: set[F] = set()
        self._next: dict[tuple[Any, ...], int] = {}
        """Next sequence of each writer that had new files in the last listing."""
        self._list_at = -math.inf
        """Time of the next listing, on the monotonic clock."""

    def poll(self) -> list[tuple[F, pa.Table]]:
        """Return the name and rows of new files; a broken file has no rows (`ludic verify` lists broken files).

        Raises StoreError if the filesystem fails; the next poll reads those files again.
        """
        is_due = not self._seen or time.monotonic() >= self._list_at
        return self._read_listed() if is_due else self._read_next()

    def _read_listed(self) -> list[tuple[F, pa.Table]]:
        since = time.monotonic()
        listed = [of for known in self._within for of in self._row.listed(self._root, **known)]
        took_s = time.monotonic() - since
        new = [of for of in listed if of not in self._seen]
        wanted = new if self._seen or self._newest_files is None else _newest(new, self._newest_files)
        with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            found = list(zip(wanted, pool.map(self._read, wanted), strict=True))
        self._next = {of[:-1]: of[-1] + 1 for of in new}
        self._seen.update(listed)
        self._list_at = time.monotonic() + self._listing_share * took_s
        return [(of, rows) for of, rows in found if rows is not None]

    def _read_next(self) -> list[tuple[F, pa.Table]]:
        with ThreadPoolExecutor(_CONCURRENT_READS) as pool:  # one by one, 1,000 workers on S3 would take 20 s and more
            found = [pair for pairs in pool.map(self._read_on, list(self._next.items())) for pair in pairs]
        self._seen.update(of for of, _ in found)
        self._next |= {of[:-1]: of[-1] + 1 for of, _ in found}
        return found

    def _read_on(self, following: tuple[tuple[Any, ...], int]) -> list[tuple[F, pa.Table]]:
        """Return the files of a writer from a sequence on, each with its rows."""
        writer, sequence = following
        found: list[tuple[F, pa.Table]] = []
        while (rows := self._read(of := self._row.fields._make([*writer, sequence + len(found)]))) is not None:
            found.append((of, rows))
        return found

    def _read(self, of: F) -> pa.Table | None:
        """Return the rows of a file, none for a broken file; None if there is no such file."""
        try:
            return read_table(self._root, self._row, of)
        except FileNotFoundError:
            return None
        except SchemaError as error:
            logger.log(self._level, "left out %s that can't be read: %s", self._row.kind, error)
            self.broken[of] = str(error)
            return arrow_schema(self._row.table).empty_table()


def _newest(names: Sequence[F], most: int) -> list[F]:
    """Return the last `most` names of each writer. names: sorted."""
    by_writer = itertools.groupby(names, key=lambda of: of[:-1])
    return [of for _, of_writer in by_writer for of in list(of_writer)[-most:]]


# --- metrics/ -------------------------------------------------------------------------------------------------
# One row per gradient step and one row per worker's call of its engine. Rows gather for at most a second, then a thread
# writes them; a killed process loses at most that second.


POPULATIONS = {
    "reward_mean": "considered rollouts, dropped ones too",
    "response_length_mean": "used rollouts",
}
"""The rollouts of a gradient step whose mean each of these columns holds, for titles and labels.

A reward measures the policy, so filters that drop whole groups must not change it; a length describes the trained rows.
"""


class MetricsLog(TableLog[Row]):
    """Appends rows of the metrics table (schemas/metrics.v1.json)."""

    def __init__(self, root: Root, kind: Literal["train", "worker"], writer_id: str) -> None:
        """writer_id: part of the files' names; must be unique to one life of one process."""
        names = map(partial(MetricsName, kind, check_worker_id(writer_id)), itertools.count())
        make_tables = partial(_in_one_file, METRICS.table, names, {"kind": kind, "run_id": root.run_id})
        super().__init__(root, METRICS, make_tables, file_items=32, flush_age_s=1.0)

    def write(self, **values: Any) -> None:
        """Append one row; columns that are not given are null, and so are numbers that are not finite."""
        self.append(metrics_row(**values))


def metrics_row(**values: Any) -> Row:
    """Return a row of the metrics table with the current time; absent columns, infinities and NaN become null.

    The map `other` is left without such numbers.
    """
    unknown = set(values) - set(arrow_schema("metrics").names)
    assert not unknown, f"no such metrics: {unknown}"
    finite = {name: None if _is_not_finite(value) else value for name, value in values.items()}
    if other := finite.get("other"):
        finite["other"] = {name: value for name, value in other.items() if not _is_not_finite(value)}
    return {"created_at": datetime.now(UTC)} | finite


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


class MetricsTail:
    """Reads the rows that were written since the last poll, for live displays. Listings take at most 5% of the time."""

    def __init__(self, root: Root, *, newest_files: int | None = None) -> None:
        """newest_files: number of files of each writer that the first poll reads; None reads all."""
        self._run_id = root.run_id
        self._tail = TableTail(root, METRICS, newest_files=newest_files, listing_share=20.0)

    @property
    def broken(self) -> Mapping[MetricsName, str]:
        """Problems of the files that could not be read so far."""
        return self._tail.broken

    def poll(self) -> list[dict[str, Any]]:
        """Return new rows of this run, in no particular order; a broken file is left out. Raises as TableTail.poll."""
        rows = (row for _, table in self._tail.poll() for row in plain_rows(table))
        return [row for row in rows if row["run_id"] in (None, self._run_id)]


def metrics_file_names(root: Root) -> dict[str, list[str]]:
    """Return the names of the files of each writer, train-ID or worker-ID, in the order in which they were written."""
    by_writer = itertools.groupby(METRICS.listed(root), key=lambda file: file[:2])
    return {"-".join(writer): [METRICS.name(file) for file in of_writer] for writer, of_writer in by_writer}


def read_metrics(root: Root, name: str, columns: Sequence[str]) -> list[Row]:
    """Return columns of the rows of one file, in its order, and run_id; a column that the file lacks is None.

    Rows of another run are left out. Raises FileNotFoundError if there is no such file, SchemaError if it is broken,
    StoreError if the filesystem fails.
    """
    where, wanted = f"{root.url}/{name}", [*columns, "run_id"]
    table = decode(root.read(name), where, METRICS.table, wanted)
    fields = pa.schema([arrow_schema(METRICS.table).field(column) for column in wanted])
    rows = plain_rows(as_schema(table, fields, where))
    return [row for row in rows if row["run_id"] == root.run_id]


def steps_that_count(rows: Mapping[CheckpointId, Row]) -> list[Row]:
    """Return rows in order of steps, without steps that a later attempt has trained again."""
    kept: list[Row] = []
    for (_, step), row in sorted(rows.items(), reverse=True):
        if not kept or step < kept[-1]["step"]:
            kept.append(row)
    return kept[::-1]


# --- scores/ --------------------------------------------------------------------------------------------------
# Values that scorers gave to stored rollouts, appended at any time by any number of processes. Writes
# scores/scorer=NAME/{uuid7}-{sequence}.parquet, put if absent, with a new uuid7 for each log; reads the files of some
# scorers as they appear. A killed scorer loses its last seconds. Raises ConfigError for a scorer's name that a file
# can't have, StoreError if the filesystem fails.


PLAN_COLUMNS = ("rollout_id", "name", "value", "scorer", "scorer_version", "error", "created_at")
"""Columns of scores that the plan of a batch uses."""

_FILE_SCORES = 1024
# A percent-encoded name of a folder, scorer=NAME, has at most 255 bytes on common filesystems.
_MOST_BYTES = 200
_REFERENCE_SIGNS = "@:,"


def check_scorer_name(name: str) -> str:
    """Return the name. Raises ConfigError if no folder can have it, or if settings could not refer to it."""
    is_folder = 0 < len(quote(name, safe="")) <= _MOST_BYTES and name != NULL_PARTITION
    if not is_folder or not name.isprintable() or any(sign in name for sign in _REFERENCE_SIGNS):
        raise ConfigError(
            f"scorer name {name!r} can't be used; wanted printable characters without {' '.join(_REFERENCE_SIGNS)}, "
            f"at most {_MOST_BYTES} bytes when percent-encoded, and not {NULL_PARTITION}"
        )
    return name


class ScoreLog(TableLog[Row]):
    """Appends rows of the scores table (schemas/scores.v1.json) of one scorer, without scorer and run_id."""

    def __init__(self, root: Root, scorer: str) -> None:
        """Raises ConfigError for a name that can't be used."""
        names = map(partial(ScoresName, check_scorer_name(scorer), new_id()), itertools.count())
        make_tables = partial(_in_one_file, SCORES.table, names, {"scorer": scorer, "run_id": root.run_id})
        super().__init__(
            root, SCORES, make_tables, file_items=_FILE_SCORES, flush_age_s=2.0, max_waiting=4 * _FILE_SCORES
        )


class ScoreReader:
    """Reads the scores of some scorers that were written since the last poll."""

    def __init__(self, root: Root, scorers: Iterable[str]) -> None:
        within = [{"scorer": scorer} for scorer in dict.fromkeys(scorers)]
        self._tail = TableTail(root, SCORES, within=within, level=logging.WARNING)

    def poll(self) -> pa.Table | None:
        """Return PLAN_COLUMNS of new rows; None if there are none. A broken file is left out with a warning.

        Raises StoreError if the filesystem fails; the next poll reads those files again.
        """
        tables = [
            table.filter(pc.equal(table["scorer"], of.scorer)).select(PLAN_COLUMNS) for of, table in self._tail.poll()
        ]
        found = pa.concat_tables(tables) if tables else None
        return found if found is not None and found.num_rows else None


# --- token_stats/ ---------------------------------------------------------------------------------------------
# Statistics of each token that gradient steps trained on, for SQL; training never reads them. A thread writes
# token_stats/attempt=A/step=S-rank=R.parquet, one file per step and rank, so that no rank waits for another. A killed
# trainer loses the files of its last steps.


_LISTS_OF_NUMBERS = ("trainer_logprobs", "entropy", "weight")
_ROUNDED_LISTS = ("entropy", "weight")
_DROPPED_BITS = 13
# The rows of a step are read together, and each row group adds its own dictionaries and statistics.
_STEP_ROWS = 4096


class TokenStatsLog(TableLog[Callable[[], pa.Table]]):
    """Appends files of the token_stats table (schemas/token_stats.v1.json).

    An item is a function that makes the rows of a step, called in the thread; a table without rows makes no file.
    """

    def __init__(self, root: Root, rank: int) -> None:
        def make_tables(makers: Sequence[Callable[[], pa.Table]]) -> Iterator[tuple[RankName, pa.Table]]:
            for table in (make() for make in makers):
                if table.num_rows:
                    yield RankName(table["attempt_id"][0].as_py(), table["step"][0].as_py(), rank), table

        super().__init__(root, TOKEN_STATS, make_tables, file_items=1, flush_age_s=0.0, encode=encode_token_stats)


def encode_token_stats(table: pa.Table) -> bytes:
    """Return the Parquet bytes of a step's rows; floats are split into byte streams, as in rollouts, and compressed."""
    schema = arrow_schema("token_stats")
    assert table.schema.equals(schema)
    lists = [f"{name}.list.element" for name in _LISTS_OF_NUMBERS]
    return encode_plain(
        table,
        row_group_size=_STEP_ROWS,
        use_dictionary=["attempt_id", "step", "response_length"],
        column_encoding=dict.fromkeys(lists, "BYTE_STREAM_SPLIT"),
        write_statistics=["attempt_id", "step", "rollout_id"],
    )


def to_token_stats(
    *, attempt_id: int, step: int, rollout_ids: Sequence[str], lengths: np.ndarray, **lists: np.ndarray
) -> pa.Table:
    """Return rows of the token_stats table.

    lengths: (num_rows,) response tokens of each rollout. lists: values of each list column, concatenated over rows.
    """
    offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
    values = lists | {name: round_to_11_bits(lists[name]) for name in _ROUNDED_LISTS}
    columns = {
        "attempt_id": pa.repeat(pa.scalar(attempt_id, pa.int32()), len(rollout_ids)),
        "step": pa.repeat(pa.scalar(step, pa.int64()), len(rollout_ids)),
        "rollout_id": pa.array(rollout_ids, pa.string()),
        "response_length": pa.array(lengths, pa.int32()),
    }
    schema = arrow_schema("token_stats")
    for name in lists:
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values[name]), type=schema.field(name).type)
    return pa.table([columns[name] for name in schema.names], schema=schema)


def round_to_11_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 values to a significand of 11 bits, as in float16, and keep the range of float32.

    The low bits are then 0 and compress to nothing; float16 columns are a type that not every reader supports.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    half = np.uint32(1 << (_DROPPED_BITS - 1))
    return ((bits + half) & np.uint32(2**32 - (1 << _DROPPED_BITS))).view(np.float32)


# --- labels/ --------------------------------------------------------------------------------------------------
# Marks and notes that people gave to stored rollouts, appended at any time by any number of people. Writes
# labels/{uuid7}.parquet, put if absent, one file for each label; a later label of the same name and author replaces an
# earlier one in the view `labels`. Raises ConfigError for a label that can't be stored, StoreError if the filesystem
# fails.


LABEL = "label"
"""Default name of a label."""


def put_label(
    root: Root, rollout_id: str, value: float | str | None, note: str | None, *, name: str = LABEL, author: str | None
) -> None:
    """Store one label. value: a number or a text. Without value and note, the label withdraws an earlier one."""
    is_text = isinstance(value, str)
    number = None if is_text or value is None else float(value)
    if number is not None and not math.isfinite(number):
        raise ConfigError(f"the label of {rollout_id} is {number}; wanted a finite number or a text")
    if not name.strip():
        raise ConfigError(f"the label of {rollout_id} has no name; leave it out, or give one such as {LABEL!r}")
    row = {
        "rollout_id": rollout_id,
        "name": storable(name),
        "value": number,
        "text": storable(str(value)) if is_text and value else None,
        "note": storable(note) if note else None,
        "author": storable(author or _user()),
        "created_at": datetime.now(UTC),
        "run_id": root.run_id,
    }
    put_table(root, LABELS, UuidName(new_id()), pa.Table.from_pylist([row], arrow_schema(LABELS.table)))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError) as error:  # a container may have a user without a name
        raise ConfigError("the user of this machine has no name, and a label needs an author; give one") from error


# --- reference/ -----------------------------------------------------------------------------------------------
# Cached logprobs of rollouts under reference models, for a second epoch or an offline run. Writes
# reference/model=FINGERPRINT/DIGEST.parquet, put if absent. The digest covers the rollouts, temperatures and lengths,
# not the logprobs, so computing the same rows again adds no file. Only a cache: a broken file is skipped with a
# warning, and its rows are computed again. Raises StoreError if the filesystem fails.


# A second epoch takes rollouts in another order, so it reads few rows of many files.
_CACHE_ROWS = 16
_INDEX_COLUMNS = ["rollout_id", "temperature", "response_length"]


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """Address of a rollout's reference logprobs, with the temperature and length that they were computed for."""

    temperature: float
    response_length: int
    """Number of stored logprobs, one per response token."""
    file: str
    row: int


def write_reference(root: Root, model: str, rows: pa.Table) -> pa.Table:
    """Store rows of the reference table, all of one model; return their index, as `read_reference_index` does.

    model: fingerprint of the model.
    """
    assert rows.schema.equals(arrow_schema("reference"))
    if not rows.num_rows:
        return _index(rows, "")
    rows = rows.sort_by([(name, "ascending") for name in _INDEX_COLUMNS])
    name = REFERENCE.name(ReferenceName(model, _digest(rows)))
    # An existing file has the same rows in the same order; only last digits of its logprobs may differ.
    root.put_if_absent(name, encode_plain(rows, row_group_size=_CACHE_ROWS))
    return _index(rows, name)


def read_reference_index(root: Root, model: str) -> pa.Table:
    """Return the index of a model's stored rows: rollout_id, and the fields of ReferenceRow."""
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        tables = list(pool.map(lambda name: _read_index(root, name), REFERENCE.names(root, model=model)))
    return pa.concat_tables([_index(arrow_schema("reference").empty_table(), ""), *tables])


def read_reference(root: Root, name: str, rows: Sequence[int]) -> list[np.ndarray]:
    """Return reference_logprobs of rows of a file, (response_length,) float32 each; reads only their row groups.

    Raises FileNotFoundError or SchemaError if the file was deleted or damaged since it was indexed.
    """
    try:
        where = f"{root.url}/{name}"
        with root.open_file(name) as source, open_checked(source, where, "reference", pre_buffer=True) as (file, _):
            ends = np.cumsum([file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)])
            groups = np.searchsorted(ends, rows, side="right")
            row_groups = np.unique(groups)
            table = read_within(file, row_groups.tolist(), ["reference_logprobs"], where)
    except (FileNotFoundError, StoreError, SchemaError):
        raise
    except UNREADABLE as error:
        raise SchemaError(f"{root.url}/{name}: can't be read any more: {error}; delete it: it is a cache") from error
    sizes = np.diff(ends, prepend=0)
    # First row of each row group that was read, in the file and in the table.
    in_file, in_table = ends - sizes, np.zeros_like(ends)
    in_table[row_groups] = np.cumsum(sizes[row_groups]) - sizes[row_groups]
    column = table.column("reference_logprobs").take(np.asarray(rows) - in_file[groups] + in_table[groups])
    return [value.values.to_numpy() for value in column]


class ReferenceIndex:
    """Index of the stored reference logprobs of rollouts in one or several roots."""

    def __init__(self) -> None:
        self._roots: dict[str, Root] = {}
        self._rows: dict[str, tuple[str, ReferenceRow]] = {}
        """URL of the root, and the address there, by rollout_id."""

    def note(self, root: Root, index: pa.Table) -> None:
        """Add rows of `read_reference_index` or `write_reference`; of two of a rollout the longer one counts."""
        self._roots[root.url] = root
        for row in index.to_pylist():
            rollout_id, address = row.pop("rollout_id"), ReferenceRow(**row)
            if rollout_id not in self._rows or self._rows[rollout_id][1].response_length <= address.response_length:
                self._rows[rollout_id] = (root.url, address)

    def include(self, other: "ReferenceIndex") -> None:
        """Add all rows of another index."""
        self._roots |= other._roots
        self._rows |= other._rows

    def has(self, rollout_id: str, temperature: float, response_length: int) -> bool:
        """Return whether the logprobs of this number of response tokens are stored, for this temperature."""
        if rollout_id not in self._rows:
            return False
        _, address = self._rows[rollout_id]
        return address.response_length >= response_length and address.temperature == temperature

    def read(
        self, lengths: Mapping[str, int | None], on_broken: Callable[[Exception, str], object]
    ) -> dict[str, np.ndarray]:
        """Return the logprobs of rollouts that are stored, by rollout_id, each (length,) float32, nats.

        lengths: number of response tokens by rollout_id; None for all. The models are causal, so the beginning of a
        longer response can be used. on_broken: called with the error, and the location, of a file that can't be read,
        whose rollouts are left out.
        """
        by_file: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
        for rollout_id in lengths:
            if rollout_id in self._rows:
                url, address = self._rows[rollout_id]
                by_file[url, address.file][rollout_id] = address.row

        def read(file: tuple[str, str], rows: Mapping[str, int]) -> list[tuple[str, np.ndarray]]:
            url, name = file
            try:
                return list(zip(rows, read_reference(self._roots[url], name, list(rows.values())), strict=True))
            except (FileNotFoundError, SchemaError) as error:
                on_broken(error, f"{url}/{name}")
                return []

        with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            found = pool.map(read, by_file, by_file.values())
        return {rollout_id: logprobs[: lengths[rollout_id]] for of_file in found for rollout_id, logprobs in of_file}


def _digest(rows: pa.Table) -> str:
    about = repr(rows.select(_INDEX_COLUMNS).to_pydict())
    return hashlib.blake2b(about.encode(), digest_size=16).hexdigest()


def _read_index(root: Root, name: str) -> pa.Table:
    where = f"{root.url}/{name}"
    try:
        with root.open_file(name) as source, open_checked(source, where, "reference", pre_buffer=True) as (file, _):
            check_schema(file.schema_arrow, "reference", where)
            rows = read_within(file, range(file.num_row_groups), _INDEX_COLUMNS, where, MOST_FILE_BYTES)
            check_text(rows, where)
            return _index(rows, name)
    except StoreError:
        raise
    except UNREADABLE as error:
        logger.warning("skipped %s/%s, whose logprobs are computed again: %s", root.url, name, error)
        return _index(arrow_schema("reference").empty_table(), "")


def _index(rows: pa.Table, name: str) -> pa.Table:
    columns = {column: rows.column(column).combine_chunks() for column in _INDEX_COLUMNS}
    files, row_numbers = pa.array([name] * rows.num_rows, pa.string()), pa.array(range(rows.num_rows), pa.int64())
    return pa.table({**columns, "file": files, "row": row_numbers})
