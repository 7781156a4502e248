"""Check the Parquet files of a root: read each to its last page, and compare it with its name and its schema.

Memory is bounded: four files are read at a time, and of each file a compressed row group and about 8 MB of its rows
are in memory. A file counts as broken only if it can't be read from memory either: network errors raise StoreError.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from ludic.errors import LudicError, NewerSchemaError, SchemaError, StoreError
from ludic.maintenance.verify.findings import Finding, reason_of
from ludic.maintenance.verify.rows import RowChecks
from ludic.schema import arrow_schema, check_schema
from ludic.store import RolloutFile, Root
from ludic.store.cut_record import read_cut
from ludic.store.encoding import group_starts
from ludic.store.files import AppendedFile, Folder, RequestsFile, Source, parse_file
from ludic.store.labels import LABELS_NAME
from ludic.store.ledger import ledger_name
from ludic.store.names import NUMBER
from ludic.store.parquet import UNREADABLE, check_text, is_broken, open_checked
from ludic.store.scores import SCORES_NAME, scorer_folder
from ludic.store.sources import sources_of
from ludic.store.token_stats import TOKEN_STATS_NAME, token_stats_name
from ludic.store.track import Track, untracked

TABLES = {
    "rollouts": "rollouts",
    "evals": "rollouts",
    "batches": "batches",
    "requests": "requests",
    "metrics": "metrics",
    "reference": "reference",
    "token_stats": "token_stats",
    "scores": "scores",
    "labels": "labels",
}
"""The table that each folder of Parquet files holds."""

_CONCURRENT_FILES = 4
_BATCH_BYTES = 8 << 20
_MOST_NAMES = 3
FOREIGN_NAME = "ludic writes no file of this name; move it out of the run"
_NAMES = {
    "batches": re.compile(rf"batches/attempt={NUMBER}/step={NUMBER}\.parquet"),
    "metrics": re.compile(r"metrics/(train|worker)-[^/]+-\d+\.parquet"),
    "reference": re.compile(r"reference/model=[0-9a-f]{32}/[0-9a-f]{32}\.parquet"),
    "token_stats": TOKEN_STATS_NAME,
    "scores": SCORES_NAME,
    "labels": LABELS_NAME,
}
"""The names of the files of each folder; for rollouts, evals and requests, parse_file knows them."""
# `ludic export --format delta` writes its log beside the files that it registers.
_DELTA_LOG = "/_delta_log/"
_KEYS = {
    "rollouts": ["run_id", "group_id", "policy_version", "env_name", "worker_id", "sequence"],
    "batches": ["attempt_id", "step"],
    "requests": ["run_id", "worker_id"],
    "metrics": ["run_id"],
    "reference": ["model"],
    "token_stats": ["attempt_id", "step"],
    "scores": ["run_id", "scorer"],
    "labels": ["run_id"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """Size, number of rows and problem of a Parquet file, from its footer."""

    name: str
    size_bytes: int
    num_rows: int = 0
    problem: str | None = None
    """Why the file can't be used; None if it is sound."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of checking one file."""

    name: str
    findings: tuple[Finding, ...] = ()
    sources: tuple[Source, ...] = ()
    """Sources of a compacted file, as its footer names them."""
    has_digests: bool = True
    """False for a sound file whose writer stored no digests."""


def check_tables(root: Root, rows: RowChecks, track: Track = untracked) -> list[Checked]:
    """Read every file of TABLES, and pass the rollouts to `rows`; a file that vanishes in between has no findings."""
    names = [name for folder in TABLES for name in root.list(folder) if _DELTA_LOG not in name]
    with ThreadPoolExecutor(_CONCURRENT_FILES) as pool:
        return list(track(pool.map(lambda name: check_file(root, name, rows), names), len(names), "files"))


def read_footers(
    root: Root, folder: str, track: Track = untracked, *, known: Mapping[str, int] | None = None
) -> list[Footer]:
    """Return size, number of rows and problem of each Parquet file of a folder of TABLES, reading only footers.

    known: number of rows, by name, of sound files whose footers need not be read.
    """
    sizes = {
        name: size for name, size in root.sizes(folder).items() if name.endswith(".parquet") and _DELTA_LOG not in name
    }
    known = known or {}
    left = [name for name in sizes if name not in known]
    with ThreadPoolExecutor(8) as pool:
        found = list(track(pool.map(lambda name: _read_footer(root, name, sizes[name]), left), len(left), folder))
    found += [Footer(name=name, size_bytes=sizes[name], num_rows=known[name]) for name in sizes.keys() & known.keys()]
    return sorted(found, key=attrgetter("name"))


def parse_ledger_name(name: str) -> tuple[int, int] | None:
    """Return attempt_id and step of a file of batches/; None for any other name."""
    match = _NAMES["batches"].fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def _read_footer(root: Root, name: str, size_bytes: int) -> Footer:
    try:
        with root.open_file(name) as source, open_checked(source, name) as (file, _):
            check_schema(file.schema_arrow, _table_of(name), name)
            return Footer(name=name, size_bytes=size_bytes, num_rows=file.metadata.num_rows)
    except (*UNREADABLE, LudicError) as error:
        return Footer(name=name, size_bytes=size_bytes, problem=_problem(name, error))


def _table_of(name: str) -> str:
    return TABLES[name.partition("/")[0]]


def _problem(name: str, error: Exception) -> str:
    return reason_of(error).removeprefix(f"{name}: ")


def check_file(root: Root, name: str, rows: RowChecks | None = None) -> Checked:
    """Read one file of TABLES, and pass its rollouts to `rows`. Raises StoreError if the filesystem fails."""
    try:
        content = _read(root, name, rows) if name.endswith(".parquet") else None
    except FileNotFoundError:
        return Checked(name)
    except NewerSchemaError as error:
        return Checked(name, (Finding(check="newer_schema", where=name, problem=_problem(name, error)),))
    except SchemaError as error:
        return Checked(name, (Finding(check="unreadable", where=name, problem=_problem(name, error)),))
    if content is None or not is_name(name):
        return Checked(name, (Finding(check="misnamed", where=name, problem=FOREIGN_NAME),))
    return Checked(name, tuple(_disagreements(root, name, content)), content.sources, content.has_digests)


def is_name(name: str) -> bool:
    """Return whether ludic gives this name to a file in a folder of TABLES."""
    pattern = _NAMES.get(name.partition("/")[0])
    return bool(pattern.fullmatch(name)) if pattern else parse_file(name) is not None


@dataclass(slots=True)
class _Content:
    """Keys of a file's rows, for comparison with its name and its footer."""

    runs: set[str] = field(default_factory=set)
    """run_ids of the rows."""
    homes: set[str] = field(default_factory=set)
    """Names of the files in which the rows were committed, as _home_of writes them."""
    scattered: set[str] = field(default_factory=set)
    """group_ids whose rows are not contiguous."""
    sources: tuple[Source, ...] = ()
    """Sources of a compacted file, as its footer names them."""
    has_digests: bool = False


def _read(root: Root, name: str, rows: RowChecks | None) -> _Content:
    """Read all of a file.

    Raises SchemaError if the file is broken or foreign, FileNotFoundError if it does not exist, StoreError if the
    filesystem fails.
    """
    with root.explained(name), root.open_file(name) as source:
        try:
            return read_content(source, name, rows)
        except (LudicError, FileNotFoundError):
            raise
        except UNREADABLE as error:
            if is_broken(root, name):
                raise SchemaError(reason_of(error)) from error
            raise StoreError(f"{root.url}/{name}: {type(error).__name__}: {reason_of(error)}") from error


def read_content(source: BinaryIO, name: str, rows: RowChecks | None = None) -> _Content:
    """Read all of a file. Raises SchemaError if the file is not as it was written, and pyarrow's errors."""
    table, file = _table_of(name), parse_file(name)
    content = _Content()
    groups: list[str] = []
    with open_checked(source, name, pre_buffer=True) as (parquet, checked):
        content.has_digests = checked is not None
        check_schema(parquet.schema_arrow, table, name)
        if file is not None and file.is_compacted:
            content.sources = tuple(sources_of(parquet, file))
        for keys in _read_row_groups(parquet, name, rows):
            if "run_id" in _KEYS[table]:
                content.runs |= set(keys.column("run_id").unique().to_pylist())
            content.homes |= _homes(keys, name)
            if table == "rollouts":
                groups += keys.column("group_id").take(group_starts(keys)).to_pylist()
        if checked is not None:
            checked.check_rest()
    content.scattered = _scattered(groups)
    return content


def _read_row_groups(parquet: pq.ParquetFile, name: str, rows: RowChecks | None) -> Iterator[pa.Table]:
    """Decode all columns of each row group, pass the batches to `rows`, and yield the key columns."""
    table = _table_of(name)
    for index in range(parquet.num_row_groups):
        row_group = parquet.metadata.row_group(index)
        batch_size = max(1, _BATCH_BYTES * row_group.num_rows // max(1, row_group.total_byte_size))
        batches = []
        for batch in parquet.iter_batches(batch_size, row_groups=[index], use_threads=False):
            check_text(batch, name)
            _check_nulls(batch, table, name)
            if table == "rollouts" and rows is not None:
                rows.add(batch)
            batches.append(batch.select(_KEYS[table]))
        if sum(batch.num_rows for batch in batches) != row_group.num_rows:
            raise SchemaError(f"{name}: row group {index} has fewer rows than the {row_group.num_rows} of its footer")
        if batches:
            yield pa.Table.from_batches(batches)


def _check_nulls(batch: pa.RecordBatch, table: str, name: str) -> None:
    for column in arrow_schema(table):
        if not column.nullable and batch.column(column.name).null_count:
            raise SchemaError(f"{name}: column {column.name!r} has nulls, wanted none")


def _homes(keys: pa.Table, name: str) -> set[str]:
    match name.partition("/")[0]:
        case "batches":
            return {ledger_name(**row) for row in _distinct(keys, "attempt_id", "step")}
        case "metrics" | "labels":
            return {name}
        case "requests":
            file = RequestsFile.parse(name) or RequestsFile("", 0)
            return {_home_of(file, Source(row["worker_id"], file.sequence)) for row in _distinct(keys, "worker_id")}
        case "reference":
            base = name.rpartition("/")[2]
            return {f"reference/model={row['model']}/{base}" for row in _distinct(keys, "model")}
        case "token_stats":
            match = TOKEN_STATS_NAME.fullmatch(name)
            rank = int(match[3]) if match else 0
            return {token_stats_name(**row, rank=rank) for row in _distinct(keys, "attempt_id", "step")}
        case "scores":
            return {f"{scorer_folder(row['scorer'])}/{name.rpartition('/')[2]}" for row in _distinct(keys, "scorer")}
    # A group is stored in the partition of its oldest version.
    groups = keys.group_by(["group_id", "env_name", "worker_id", "sequence"], use_threads=False)
    groups = groups.aggregate([("policy_version", "min")])
    rows = _distinct(groups, "policy_version_min", "env_name", "worker_id", "sequence")
    folder: Folder = "evals" if name.startswith("evals/") else "rollouts"
    return {
        RolloutFile(row["policy_version_min"], row["env_name"], row["worker_id"], row["sequence"], folder).name
        for row in rows
    }


def _home_of(file: AppendedFile, source: Source) -> str:
    """Return the name under which a source of a file was committed.

    Rows of requests/ do not hold the sequence of their file, so a compacted file there is compared by worker_id: the
    name has * for the sequence.
    """
    name = replace(file, worker_id=source.worker_id, sequence=source.sequence).name
    if isinstance(file, RequestsFile) and file.is_compacted:
        return name.removesuffix(f"-{source.sequence}.parquet") + "-*.parquet"
    return name


def _distinct(table: pa.Table, *columns: str) -> list[dict[str, Any]]:
    return table.select(columns).group_by(list(columns), use_threads=False).aggregate([]).to_pylist()


def _scattered(groups: Sequence[str]) -> set[str]:
    """Return the group_ids that occur again after another group_id.

    groups: the group_id of each run of equal ids, row group by row group.
    """
    runs = [group_id for index, group_id in enumerate(groups) if index == 0 or groups[index - 1] != group_id]
    return {group_id for group_id, count in Counter(runs).items() if count > 1}


def _disagreements(root: Root, name: str, content: _Content) -> Iterator[Finding]:
    """Find rows of a file that do not agree with its name or its footer."""
    others = sorted(content.runs - {root.run_id})
    if others and read_cut(root) is None:  # a cut holds what its steps trained on, of any run
        yield Finding(check="misnamed", where=name, problem=f"holds rows that belong in another run ({others[0]})")
        return
    wanted = {name}
    file = parse_file(name)
    if file is not None and file.is_compacted:
        wanted = {_home_of(file, source) for source in content.sources}
        yield from _source_problems(name, content.homes, wanted)
    elif content.homes - wanted:
        yield Finding(
            check="misnamed", where=name, problem=f"holds rows that belong in {first_names(content.homes - wanted)}"
        )
    if content.scattered:
        yield Finding(check="scattered_groups", where=name, problem=first_names(content.scattered))


def _source_problems(name: str, homes: set[str], sources: set[str]) -> Iterator[Finding]:
    """Find sources whose rows a compacted file holds though its footer does not name them, and the reverse."""
    if homes - sources:
        problem = f"holds rows of {first_names(homes - sources)}, which its footer does not name"
        yield Finding(check="compaction", where=name, problem=problem)
    if sources - homes:
        problem = f"holds no rows of {first_names(sources - homes)}, which its footer names"
        yield Finding(check="compaction", where=name, problem=problem)


def first_names(names: set[str]) -> str:
    """Return the first names in order as text, with the number of further names."""
    shown = sorted(names)[:_MOST_NAMES]
    more = f" and {len(names) - len(shown):,} more" if len(names) > len(shown) else ""
    return f"{', '.join(shown)}{more}"
