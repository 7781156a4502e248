"""Check the Parquet files of a root: read each file completely, and compare it with its name and its schema.

Memory is bounded: four files are read at a time, and of each file a compressed row group and about 8 MB of its rows
are in memory. A file counts as broken only if it can't be read from memory either: network errors raise StoreError.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from ludic.base import Track, untracked
from ludic.errors import LudicError, NewerSchemaError, SchemaError, StoreError
from ludic.records import arrow_schema, check_schema
from ludic.root.attempts import find_cut
from ludic.root.catalogue import FILE_KINDS, FOREIGN, Table
from ludic.root.maintenance.verify.checks import Finding, RowChecks, reason_of
from ludic.root.root import Root
from ludic.root.rows.files import CompactionPlan, SequenceFile, SourceFile, parse_file, read_plans, sources_of
from ludic.root.rows.parquet import (
    MOST_ROW_GROUP_BYTES,
    UNREADABLE,
    batches_within,
    check_text,
    group_starts,
    is_broken,
    open_checked,
)

TABLES: Mapping[str, Table[Any]] = {row.folder: row for row in FILE_KINDS if isinstance(row, Table)}
"""The row of each folder of Parquet files."""

_CONCURRENT_FILES = 4
_BATCH_BYTES, _BATCH_ROWS = 8 << 20, 1 << 14
_MOST_NAMES = 3
FOREIGN_NAME = "ludic writes no file of this name; move it out of the run"
NOT_OURS = tuple(row.template.partition("{")[0] for row in FOREIGN)
"""Folders where other programs write, such as the logs of Delta exports beside the files that they register."""
_OF_ROLLOUTS = ["run_id", "group_id", "policy_version", "env_name", "worker_id", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFooter:
    """Size, number of rows and problem of a Parquet file, from its footer."""

    name: str
    size_bytes: int
    num_rows: int = 0
    problem: str | None = None
    """Why the file can't be used; None if it is sound."""


@dataclass(frozen=True, slots=True)
class CheckedTable:
    """The result of checking one file."""

    name: str
    findings: tuple[Finding, ...] = ()
    sources: tuple[SourceFile, ...] = ()
    """Sources of a compacted file, as its footer names them."""
    has_digests: bool = True
    """False for a sound file whose writer stored no digests."""


def check_tables(root: Root, rows: RowChecks, track: Track = untracked) -> list[CheckedTable]:
    """Read every file of TABLES, and pass the rollouts to `rows`; a file that vanishes in between has no findings."""
    names = [name for folder in TABLES for name in root.list(folder) if not name.startswith(NOT_OURS)]
    with ThreadPoolExecutor(_CONCURRENT_FILES) as pool:
        return list(track(pool.map(lambda name: check_file(root, name, rows), names), len(names), "files"))


def read_footers(
    root: Root, folder: str, track: Track = untracked, *, known: Mapping[str, int] | None = None
) -> list[FileFooter]:
    """Return size, number of rows and problem of each Parquet file of a folder of TABLES, reading only footers.

    known: number of rows, by name, of sound files whose footers need not be read.
    """
    sizes = {
        name: size
        for name, size in root.sizes(folder).items()
        if name.endswith(".parquet") and not name.startswith(NOT_OURS)
    }
    known = known or {}
    left = [name for name in sizes if name not in known]
    with ThreadPoolExecutor(8) as pool:
        found = list(track(pool.map(lambda name: _read_footer(root, name, sizes[name]), left), len(left), folder))
    found += [
        FileFooter(name=name, size_bytes=sizes[name], num_rows=known[name]) for name in sizes.keys() & known.keys()
    ]
    return sorted(found, key=attrgetter("name"))


def _read_footer(root: Root, name: str, size_bytes: int) -> FileFooter:
    try:
        table = _row_of(name).table
        with root.open_file(name) as source, open_checked(source, name, table) as (file, _):
            check_schema(file.schema_arrow, table, name)
            return FileFooter(name=name, size_bytes=size_bytes, num_rows=file.metadata.num_rows)
    except (*UNREADABLE, LudicError) as error:
        return FileFooter(name=name, size_bytes=size_bytes, problem=_problem(name, error))


def _row_of(name: str) -> Table[Any]:
    return TABLES[name.partition("/")[0]]


def _problem(name: str, error: Exception) -> str:
    return reason_of(error).removeprefix(f"{name}: ")


def check_file(root: Root, name: str, rows: RowChecks | None = None) -> CheckedTable:
    """Read one file of TABLES, and pass its rollouts to `rows`. Raises StoreError if the filesystem fails."""
    try:
        content = _read(root, name, rows) if name.endswith(".parquet") else None
    except FileNotFoundError:
        return CheckedTable(name)
    except NewerSchemaError as error:
        return CheckedTable(name, (Finding(check="newer_schema", where=name, problem=_problem(name, error)),))
    except SchemaError as error:
        return CheckedTable(name, (Finding(check="unreadable", where=name, problem=_problem(name, error)),))
    if content is None or _row_of(name).parse(name) is None:
        return CheckedTable(name, (Finding(check="misnamed", where=name, problem=FOREIGN_NAME),))
    return CheckedTable(name, tuple(_disagreements(root, name, content)), content.sources, content.has_digests)


@dataclass(slots=True)
class _Content:
    """Keys of a file's rows, for comparison with its name and its footer."""

    runs: set[str] = field(default_factory=set)
    """run_ids of the rows."""
    homes: set[str] = field(default_factory=set)
    """Names of the files in which the rows were committed."""
    scattered: set[str] = field(default_factory=set)
    """group_ids whose rows are not contiguous."""
    sources: tuple[SourceFile, ...] = ()
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
    row, file = _row_of(name), parse_file(name)
    content = _Content()
    groups: list[str] = []
    with open_checked(source, name, row.table, pre_buffer=True) as (parquet, checked):
        content.has_digests = checked is not None
        check_schema(parquet.schema_arrow, row.table, name)
        if file is not None and file.is_compacted:
            content.sources = tuple(sources_of(parquet, file))
        for keys in _read_row_groups(parquet, name, rows):
            if "run_id" in keys.column_names:
                content.runs |= set(keys.column("run_id").unique().to_pylist())
            content.homes |= _homes(keys, row, name)
            if row.table == "rollouts":
                groups += keys.column("group_id").take(group_starts(keys)).to_pylist()
        if checked is not None:
            checked.check_rest()
    content.scattered = _scattered(groups)
    return content


def _read_row_groups(parquet: pq.ParquetFile, name: str, rows: RowChecks | None) -> Iterator[pa.Table]:
    """Decode all columns of each row group, pass the batches to `rows`, and yield the key columns."""
    table, columns = _row_of(name).table, _keys_of(_row_of(name))
    for index in range(parquet.num_row_groups):
        row_group = parquet.metadata.row_group(index)
        batch_size = max(1, _BATCH_BYTES * row_group.num_rows // max(1, row_group.total_byte_size))
        batches = []
        for batch in batches_within(parquet, [index], None, name, MOST_ROW_GROUP_BYTES, min(batch_size, _BATCH_ROWS)):
            check_text(batch, name)
            _check_nulls(batch, table, name)
            if table == "rollouts" and rows is not None:
                rows.add(batch)
            batches.append(batch.select(columns))
        if sum(batch.num_rows for batch in batches) != row_group.num_rows:
            raise SchemaError(f"{name}: row group {index} has fewer rows than the {row_group.num_rows} of its footer")
        if batches:
            yield pa.Table.from_batches(batches)


def _check_nulls(batch: pa.RecordBatch, table: str, name: str) -> None:
    for column in arrow_schema(table):
        if not column.nullable and batch.column(column.name).null_count:
            raise SchemaError(f"{name}: column {column.name!r} has nulls, wanted none")


def _keys_of(row: Table[Any]) -> list[str]:
    """Return the columns that determine the file of a row: those in the file's name, and the run."""
    if row.table == "rollouts":
        return _OF_ROLLOUTS
    return [column for column in arrow_schema(row.table).names if column in (*row.fields._fields, "run_id")]


def _homes(keys: pa.Table, row: Table[Any], name: str) -> set[str]:
    """Return the names of the files that the rows of a file belong in."""
    of = row.parse(name)
    if of is None:
        return set()
    if row.table == "rollouts":
        # A group is stored in the partition of its oldest version.
        groups = keys.group_by(["group_id", "env_name", "worker_id", "sequence"], use_threads=False)
        keys = groups.aggregate([("policy_version", "min")]).rename_columns({"policy_version_min": "version"})
    columns = [column for column in row.fields._fields if column in keys.column_names]
    homes = {row.home(of, values) for values in _distinct(keys, *columns)} if columns else {name}
    file = parse_file(name)
    return {_committed(home) for home in homes} if file is not None and file.is_compacted else homes


def _committed(name: str) -> str:
    """Return the name of a source of a compacted file, from its rows.

    Rows of requests/ and calls/ do not hold the sequence of their file, so it is *: they are compared by worker_id.
    """
    file = SequenceFile.parse(name)
    return f"{file.partition}/{file.worker_id}-*.parquet" if file is not None else name


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
    if others and find_cut(root) is None:  # a cut holds all rows of its steps, of any run
        yield Finding(check="misnamed", where=name, problem=f"holds rows that belong in another run ({others[0]})")
        return
    wanted = {name}
    file = parse_file(name)
    if file is not None and file.is_compacted:
        wanted = {_committed(replace(file, **source._asdict()).name) for source in content.sources}
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


# --- Compactions ----------------------------------------------------------------------------------------------
# Check compacted files against their plans and each other, and find interrupted compactions.
#
# The part above compares rows with footers, and ludic/root/sql/checks/lost_sources.sql finds lost sources of rollouts/
# and evals/: rows of requests/ do not name their source. Raises StoreError if the filesystem fails.


_RUN_COMPACT = "`ludic compact` does"


def check_compactions(root: Root, stored: Sequence[CheckedTable]) -> Iterator[Finding]:
    """Find compacted files and plans that are wrong. stored: all files of rollouts/, evals/ and requests/."""
    plans = read_plans(root)
    for plan in plans:
        if not plan.outputs:
            problem = "is not a plan that ludic can read, so it counts as a plan that replaces nothing"
            yield Finding(check="compaction", where=plan.name, problem=problem)
    planned = _planned(plans)
    holders: dict[str, str] = {}
    for file in stored:
        held = _source_names(file)
        if held and file.name not in planned:
            yield Finding(check="compaction", where=file.name, problem="no plan in compactions/ lists it")
        elif held - planned.get(file.name, held):
            problem = f"holds {first_names(held - planned[file.name])}, which its plan does not list"
            yield Finding(check="compaction", where=file.name, problem=problem)
        for source in sorted(held & holders.keys()):
            yield Finding(check="compaction", where=file.name, problem=f"holds {source}, and so does {holders[source]}")
        holders |= dict.fromkeys(held, file.name)


def unfinished_compactions(root: Root, stored: Sequence[CheckedTable]) -> Iterator[Finding]:
    """Find the leftovers of killed compactors: outputs not written yet, and replaced files not deleted yet."""
    names = {file.name for file in stored}
    held = {file.name: _source_names(file) for file in stored}
    for output, sources in _planned(read_plans(root)).items():
        if output not in names and sources & names:
            problem = f"should replace {first_names(sources & names)}, but is not written yet; {_RUN_COMPACT}"
            yield Finding(check="unfinished", where=output, problem=problem)
        elif held.get(output, set()) & names:
            problem = f"replaces {first_names(held[output] & names)}, to be deleted; {_RUN_COMPACT}"
            yield Finding(check="unfinished", where=output, problem=problem)


def _planned(plans: Sequence[CompactionPlan]) -> dict[str, set[str]]:
    """Return the names of the files that each output replaces, by the output's name."""
    return {
        output.file.name: {replace(output.file, **source._asdict()).name for source in output.sources}
        for plan in plans
        for output in plan.outputs
    }


def _source_names(file: CheckedTable) -> set[str]:
    """Return the names of the files whose rows a compacted file holds; empty for any other file."""
    compacted = parse_file(file.name)
    assert compacted is not None or not file.sources
    return {replace(compacted, **source._asdict()).name for source in file.sources} if compacted else set()
