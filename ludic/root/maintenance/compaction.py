"""Merge the many small files of a partition into few large ones, safely despite crashes and concurrent readers.

A plan is written to the intent log first (store/files.py). Then each output is written beside its sources if absent,
and only sources that a stored output's footer names are deleted. A compactor that finds an unfinished plan continues
it. Each step depends only on stored files, so concurrent or killed compactors do no harm. While both a source and its
output exist, ludic's readers return the rows once; other readers see them twice. Compacted files are never compacted
again; files that arrive late go into the next plan. Raises StoreError if the filesystem fails; broken sources are left
alone and reported.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.base import TARGET_BYTES, Frame, Part, Result, Track, plural, untracked
from ludic.errors import SchemaError
from ludic.records import VERSION_KEY, arrow_schema, as_schema, rollouts_schema
from ludic.root.attempts import newest_attempt
from ludic.root.catalogue import CALLS, FILE_KINDS, REQUESTS, ROLLOUTS, Table
from ludic.root.gateways import lives_that_are_over
from ludic.root.root import Root
from ludic.root.rows.files import (
    FOLDERS,
    SOURCES_KEY,
    UNDIVIDED,
    AppendedFile,
    CompactionPlan,
    SourceFile,
    list_versions,
    output_of,
    parse_file,
    put_plan,
    read_partition_plans,
    read_sources,
    sources_to_json,
    version_folder,
)
from ludic.root.rows.parquet import (
    ROW_GROUP_BYTES,
    check_text,
    group_ranges,
    group_starts,
    open_parquet,
    open_writer,
    read_within,
    release_memory,
    row_group_bounds,
    with_capture,
)
from ludic.root.weights.policies import latest_policy

# --- Merging files --------------------------------------------------------------------------------------------
# Merge files of one partition of rollouts, requests or calls into a larger one, sorted by group_id (calls by
# episode_id), in bounded memory.
#
# Row groups of the sources are read in the order of their smallest group_id, each once, with some read-ahead. As many
# as fit into the buffer are sorted together, so where row groups of two buffers overlap, groups are slightly out of
# order, which only makes pruning less effective. Groups stay whole. Raises LostSourceError if a source is broken or
# gone, StoreError if the filesystem fails.


ROW_GROUP_ROWS = 1024
"""Maximum rows in a row group of a compacted file; ROW_GROUP_BYTES may end it earlier. More rows make scans hardly
faster, but the read of one rollout slower (benchmarks/compaction.py)."""
REQUESTS_ROW_GROUP_ROWS = 1 << 16
"""Maximum rows in a row group of a compacted file of requests/, whose rows are small and are read all together."""

_MERGED_BY = {row.table: row.merged_by for row in FILE_KINDS if isinstance(row, Table) and row.merged_by is not None}
_MOST_BYTES = ROW_GROUP_BYTES
"""Memory for rows that are sorted together, and maximum bytes of a row group."""
_READ_AHEAD_BYTES = 32 << 20
_TABLE_BYTES = 1 << 14
"""Memory that a small table takes beside its values, so that thousands of tiny files stay within the bounds above."""
_SMALL_GROUP_BYTES = 1 << 12
"""Average bytes of a group below which a copy costs less than a slice for each group, as in requests/."""
_CONCURRENT_READS = 8
_INDEXED_AHEAD = 256


class LostSourceError(Exception):
    """A source can't be merged: holds its file and the reason (None if it is gone). The output is made without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceIndex:
    """Schema, number of rows and row groups of a source, read before the merge."""

    file: AppendedFile
    schema: pa.Schema
    num_rows: int
    row_groups: tuple["_RowGroup", ...]


class _RowGroup(NamedTuple):
    """A row group of a source; row groups sort in the order in which they are read."""

    bound: str
    """Lower bound of its group_ids, or of other ids by which rows are merged."""
    file: AppendedFile
    number: int
    size_bytes: int
    """Uncompressed size."""


def read_indexes(root: Root, files: Sequence[AppendedFile]) -> tuple[list[SourceIndex], list[LostSourceError]]:
    """Return the indexes of files that can be merged with each other, and errors for the others; reads only footers."""
    indexes: list[SourceIndex] = []
    lost: list[LostSourceError] = []
    schemas = list[pa.Schema]()
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        # Some at a time, since each waiting result holds its own schema.
        batches = (files[start : start + _INDEXED_AHEAD] for start in range(0, len(files), _INDEXED_AHEAD))
        for index in chain.from_iterable(pool.map(partial(_try_index, root), batch) for batch in batches):
            if isinstance(index, SourceIndex):
                index = _share_schema(index, _own_schema(root, index.file), schemas)
            if isinstance(index, SourceIndex):
                indexes.append(index)
            else:
                lost.append(index)
    return indexes, lost


def _try_index(root: Root, file: AppendedFile) -> "SourceIndex | LostSourceError":
    try:
        return _read_index(root, file)
    except LostSourceError as error:
        return error


def _read_index(root: Root, file: AppendedFile) -> SourceIndex:
    with _lost(file), open_parquet(root, file.name, file.table) as parquet:
        metadata = parquet.metadata
        if metadata.num_rows == 0:
            raise SchemaError("it holds no rows, so no worker wrote it")
        return SourceIndex(
            file=file,
            schema=parquet.schema_arrow,
            num_rows=metadata.num_rows,
            row_groups=tuple(
                _RowGroup(lowest, file, number, metadata.row_group(number).total_byte_size)
                for number, (lowest, _) in enumerate(group_ranges(parquet, _MERGED_BY[file.table]))
            ),
        )


def _share_schema(index: SourceIndex, own: pa.Schema, schemas: list[pa.Schema]) -> "SourceIndex | LostSourceError":
    """Return the index with an equal schema from `schemas`, to which a new schema is added if it fits the others.

    A schema takes about 50 kB, and thousands of files have the same schema.
    """
    for schema in schemas:
        if schema.equals(index.schema, check_metadata=True):
            return replace(index, schema=schema)
    try:
        common_schema(own, [*schemas, index.schema])
    except pa.ArrowException as error:
        return LostSourceError(index.file, f"its columns do not fit those of other files: {error}")
    schemas.append(index.schema)
    return index


def _own_schema(root: Root, file: AppendedFile) -> pa.Schema:
    return rollouts_schema(root.extra_columns) if file.table == "rollouts" else arrow_schema(file.table)


@contextmanager
def _lost(file: AppendedFile) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise LostSourceError(file, None) from error
    except SchemaError as error:
        raise LostSourceError(file, str(error)) from error


def common_schema(own: pa.Schema, schemas: Iterable[pa.Schema]) -> pa.Schema:
    """Return the run's own schema, then columns that only these files have, with the newest minor version of all.

    Raises pa.ArrowTypeError if two schemas differ in the type of a column.
    """
    merged, versions = own, [_minor(own)]
    for schema in schemas:
        merged = pa.unify_schemas([merged, schema])
        versions.append(_minor(schema))
    fields = [field if field.name in own.names else field.with_nullable(True) for field in merged]
    version = ".".join(map(str, max(versions)))
    return pa.schema(fields, metadata={**(own.metadata or {}), VERSION_KEY: version.encode()})


def _minor(schema: pa.Schema) -> tuple[int, ...]:
    return tuple(int(part) for part in schema.metadata[VERSION_KEY].split(b"."))


def write_merged(root: Root, sources: Sequence[SourceIndex], target: Path) -> None:
    """Write all rows of the sources into a local file whose footer names them; replaces the file if it exists."""
    schema = common_schema(_own_schema(root, sources[0].file), (source.schema for source in sources))
    table = sources[0].file.table
    column, max_rows = _MERGED_BY[table], REQUESTS_ROW_GROUP_ROWS if table == REQUESTS.table else ROW_GROUP_ROWS
    plain_table = None if table == ROLLOUTS.table else table
    names = sources_to_json(source.file.source for source in sources)
    row_groups = sorted(row_group for source in sources for row_group in source.row_groups)
    num_rows = 0
    with (
        ThreadPoolExecutor(_CONCURRENT_READS) as pool,
        open_writer(target, schema, {SOURCES_KEY: names}, plain_table=plain_table) as writer,
    ):
        for rows in _sorted_by(column, _read_ahead(pool, root, row_groups, schema)):
            num_rows, size_bytes = num_rows + rows.num_rows, rows.nbytes
            release_memory(size_bytes)  # also before, since encoding takes the most memory
            for start, stop in row_group_bounds(rows, max_rows=max_rows, max_bytes=_MOST_BYTES, column=column):
                writer.write_table(rows.slice(start, stop - start), row_group_size=stop - start)
            del rows
            release_memory(size_bytes)
    assert num_rows == sum(source.num_rows for source in sources), "rows were lost or duplicated by the merge"


def _read_ahead(
    pool: ThreadPoolExecutor, root: Root, row_groups: Iterable[_RowGroup], schema: pa.Schema
) -> Iterator[pa.Table]:
    """Yield the tables of row groups in order, reading some ahead."""
    reading: deque[tuple[int, Future[pa.Table]]] = deque()
    ahead_bytes = 0
    for row_group in row_groups:
        size_bytes = row_group.size_bytes + _TABLE_BYTES
        while reading and ahead_bytes + size_bytes > _READ_AHEAD_BYTES:
            ahead_bytes -= reading[0][0]
            yield reading.popleft()[1].result()
        reading.append((size_bytes, pool.submit(_read, root, row_group, schema)))
        ahead_bytes += size_bytes
    while reading:
        yield reading.popleft()[1].result()


def _read(root: Root, row_group: _RowGroup, schema: pa.Schema) -> pa.Table:
    """Return the rows of a row group; null where it lacks a column of `schema`."""
    file = row_group.file
    with _lost(file), open_parquet(root, file.name, file.table) as parquet:
        table = read_within(parquet, [row_group.number], None, file.name)
        check_text(table, file.name)
        mine = pc.equal(table["worker_id"], file.worker_id)
        if file.table == "rollouts":
            mine = pc.and_(mine, pc.equal(table["sequence"], file.sequence))
        if not pc.all(mine).as_py():
            raise SchemaError("it holds rows of another worker or sequence, so it is a copy under a wrong name")
        return as_schema(with_capture(table) if file.table == "rollouts" else table, schema, file.name)


def _sorted_by(column: str, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Join tables up to _MOST_BYTES, a larger one alone, and sort the groups of each joined table by their id."""
    taken: list[pa.Table] = []
    num_bytes = 0
    for table in tables:
        size_bytes = table.nbytes + _TABLE_BYTES
        if taken and num_bytes + size_bytes > _MOST_BYTES:
            yield _sort_groups(pa.concat_tables(taken), column)
            taken, num_bytes = [], 0
        taken.append(table)
        num_bytes += size_bytes
        del table  # else it stays in memory while the rows are written
    yield _sort_groups(pa.concat_tables(taken), column)


def _sort_groups(rows: pa.Table, column: str) -> pa.Table:
    """Return the rows sorted by the id of their group, without a copy if groups are large."""
    starts = group_starts(rows, column)
    if rows.nbytes < _SMALL_GROUP_BYTES * len(starts):
        return rows.take(pc.sort_indices(rows[column]))
    order = np.argsort(rows[column].take(pa.array(starts)).to_numpy(), kind="stable")
    stops = np.append(starts[1:], rows.num_rows)
    return pa.concat_tables([rows.slice(starts[group], stops[group] - starts[group]) for group in order])


# --- Compaction -----------------------------------------------------------------------------------------------


_CONCURRENT_REQUESTS = 8
_LISTED_AHEAD = 64
_MOST_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file that was not compacted, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class CompactedPartition:
    """Files and bytes of a partition before and after compaction; in a dry run, as they would be."""

    name: str
    num_files_before: int
    num_files_after: int
    size_bytes_before: int
    size_bytes_after: int
    """In a dry run a new file counts the bytes of its sources, since only writing shows its size."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CompactionReport(Result):
    """Result of a compaction; in a dry run, as it would be."""

    root: str
    """URL or path of the root."""
    dry_run: bool
    before_version: int | None = None
    """Versions below this one were compacted, and requests/ and calls/, which have no versions; None means all."""
    partitions: list[CompactedPartition] = field(default_factory=list)
    """Partitions in which something changed."""
    skipped: list[Skipped] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        figures = asdict(self)
        return figures | {"before": figures.pop("before_version")}

    def parts(self) -> Iterator[Part]:
        """Each partition before and after, the files left alone, and a summary."""
        if self.partitions:
            columns = ("name", "num_files_before", "num_files_after", "size_bytes_before", "size_bytes_after")
            rows = [asdict(each) for each in self.partitions]
            yield Frame("partitions", rows, columns, most=len(rows), titles={"name": "partition"})
        for skipped in self.skipped:
            yield f"left alone: {skipped.name}: {skipped.reason}"
        num_files = sum(partition.num_files_before for partition in self.partitions)
        num_left = sum(partition.num_files_after for partition in self.partitions)
        if self.partitions:
            became = "would become" if self.dry_run else "became"
            yield f"{plural(num_files, 'file')} of {plural(len(self.partitions), 'partition')} {became} {num_left:,}"
        elif self.before_version == 0:
            yield "no version is sealed yet: name one with --before, or use --all-versions for a finished run"
        else:
            yield "there is nothing to compact"


def sealed_before(root: Root) -> int:
    """Return the first version that is not sealed; workers and the newest trainer's window are past all sealed
    versions.

    Returns 0 if none is sealed: no policy was published, or the trainer takes rollouts of any age. A recorded trainer
    takes none from here, so all versions but its newest are sealed.
    """
    latest, attempt = latest_policy(root), newest_attempt(root)
    if attempt is not None and attempt.other_trainer is not None:
        return max(list_versions(root, "rollouts"), default=0)
    window = attempt.config.get("max_off_policy_steps") if attempt else None
    if latest is None or window is None:
        return 0
    # A worker may still be sampling with the version before.
    return max(0, latest.version - max(1, window))


def compact(
    root: Root,
    *,
    before_version: int | None = None,
    target_bytes: int = TARGET_BYTES,
    dry_run: bool = False,
    track: Track = untracked,
) -> CompactionReport:
    """Compact requests/ and calls/, and the partitions of versions below `before_version`; None means all versions.

    Compacted files are left alone, so a second call does nothing. Broken files stay where they are and are reported.
    Raises StoreError if the filesystem fails; calling it again is safe.
    """
    report = CompactionReport(root=root.url, dry_run=dry_run, before_version=before_version)
    folders = [
        version_folder(folder, version)
        for folder in FOLDERS
        for version in list_versions(root, folder)
        if before_version is None or version < before_version
    ]
    # Workers only add files to requests/, and nothing reads its newest files first: all may be compacted. In calls/
    # those of lives that are over: a gateway that lives may put a file again whose first answer was lost.
    folders += UNDIVIDED
    for sizes in track(_list_ahead(root, folders), len(folders), "folders"):
        for name, files in _by_partition(sizes).items():
            if name == CALLS.folder:
                over = lives_that_are_over(root, {file.worker_id for file in files if not file.is_compacted})
                files = {file: size for file, size in files.items() if file.is_compacted or file.worker_id in over}
            partition = _Partition(root, name, files)
            partition.compact(target_bytes, dry_run=dry_run)
            report.partitions.extend(partition.change())
            report.skipped.extend(Skipped(*pair) for pair in sorted(partition.skipped.items()))
    return report


def _list_ahead(root: Root, folders: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield the sizes of files below each folder, some of them listed ahead."""
    with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
        for start in range(0, len(folders), _LISTED_AHEAD):
            yield from pool.map(root.sizes, folders[start : start + _LISTED_AHEAD])


def _by_partition(sizes: Mapping[str, int]) -> dict[str, dict[AppendedFile, int]]:
    partitions: dict[str, dict[AppendedFile, int]] = {}
    for name, size_bytes in sizes.items():
        file = parse_file(name)
        if file is not None:
            partitions.setdefault(file.partition, {})[file] = size_bytes
    return partitions


class _Partition:
    """The files of a partition and their sizes, kept up to date while they are compacted."""

    def __init__(self, root: Root, name: str, sizes: Mapping[AppendedFile, int]) -> None:
        self._root, self._name, self._before = root, name, sizes
        self._sizes = dict(sizes)
        self._indexes: dict[AppendedFile, SourceIndex] = {}
        self.skipped: dict[str, str] = {}
        self._written: set[AppendedFile] = set()
        """Outputs that this process wrote, or read whole and found sound."""
        self._is_shared = False
        """True if files vanished or appeared, because another process compacts or expires this partition, too."""

    def change(self) -> list[CompactedPartition]:
        """Return the change of this partition as a list of one; empty if nothing changed."""
        if self._sizes == self._before:
            return []
        before, after = self._before.values(), self._sizes.values()
        return [CompactedPartition(self._name, len(before), len(after), sum(before), sum(after))]

    def compact(self, target_bytes: int, *, dry_run: bool) -> None:
        """Finish existing plans, plan the remaining files, and finish that plan. Raises StoreError."""
        if len(self._sizes) < 2 or not self._sources():
            return
        self._work_off(target_bytes, dry_run=dry_run)
        if self._is_shared and not dry_run:
            self._sizes = _by_partition(self._root.sizes(self._name)).get(self._name, {})

    def _work_off(self, target_bytes: int, *, dry_run: bool) -> None:
        for _ in range(_MOST_ROUNDS):
            plans = read_partition_plans(self._root, self._name)
            fresh = self._finish_plans(plans, dry_run=dry_run)
            outputs = self._divide(fresh, target_bytes)
            if dry_run:
                self._pretend(len(plans), outputs)
            if dry_run or not outputs:
                return
            put_plan(self._root, len(plans), outputs)

    def _finish_plans(self, plans: Sequence[CompactionPlan], *, dry_run: bool) -> list[AppendedFile]:
        """Finish each planned output that has a source here; return the files that no plan will replace."""
        here = self._sources()
        outputs = {output.file: output for plan in plans for output in plan.outputs}
        # The newest plan counts: a source is planned again only if its output was stored broken.
        owners = {source: output.file for output in outputs.values() for source in output.sources}
        broken: set[AppendedFile] = set()
        for output in sorted({owners[source] for source in here if source in owners}, key=attrgetter("name")):
            try:
                self._finish(output, [s for s in outputs[output].sources if owners[s] == output], dry_run=dry_run)
            except SchemaError as error:
                self.skipped[output.name] = str(error)
                broken.add(output)
        fresh = (source for source in here if source not in owners or owners[source] in broken)
        return [here[source] for source in fresh if here[source].name not in self.skipped]

    def _finish(self, output: AppendedFile, sources: Sequence[SourceFile], *, dry_run: bool) -> None:
        """Make an output unless it exists, and delete the sources in it. Raises SchemaError if it was stored broken."""
        held = self._held(output)
        if held is None:
            held = set(sources) if dry_run else self._make(output, sources)
        self._is_shared |= output not in self._sizes
        here = self._sources()  # only now, since _make removes sources that it finds gone
        replaced = [here[source] for source in here.keys() & held]
        if replaced and not dry_run and not self._is_sound(output):
            replaced = []
        if dry_run:
            self._sizes.setdefault(output, sum(self._sizes[file] for file in replaced))
        else:
            with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
                list(pool.map(self._root.delete, [file.name for file in replaced]))
        for file in replaced:
            del self._sizes[file]
        for source in (here.keys() & set(sources)) - held:
            self.skipped.setdefault(here[source].name, f"it was left out of {output.name}")

    def _make(self, output: AppendedFile, sources: Sequence[SourceFile]) -> set[SourceFile]:
        """Write an output from the sources that can be read; return the sources that the stored output holds."""
        while (held := self._held(output)) is None:
            files = [replace(output, worker_id=worker_id, sequence=sequence) for worker_id, sequence in sources]
            indexes = self._read_indexes(files)
            if not indexes:
                return set()
            with self._root.scratch_folder() as folder:
                try:
                    write_merged(self._root, indexes, folder / "compacted.parquet")
                except LostSourceError as error:
                    self._note_lost(error)
                    continue
                if self._root.put_file_if_absent(folder / "compacted.parquet", output.name):
                    self._written.add(output)
                self._sizes[output] = (folder / "compacted.parquet").stat().st_size
        return held

    def _is_sound(self, output: AppendedFile) -> bool:
        """Return True if an output still exists. Raises SchemaError if it is damaged and its sources can replace it."""
        if output in self._written:
            return True
        try:
            with open_parquet(self._root, output.name, output.table, whole=True):
                self._written.add(output)
        except FileNotFoundError:
            self._is_shared = True
        return output in self._written

    def _held(self, output: AppendedFile) -> set[SourceFile] | None:
        """Return the sources whose rows a stored output holds; None if the output does not exist."""
        try:
            return set(read_sources(self._root, output))
        except FileNotFoundError:
            return None

    def _divide(self, files: Sequence[AppendedFile], target_bytes: int) -> list[list[AppendedFile]]:
        """Divide files, in order of time, into outputs of at least two files; rewriting one alone gains nothing."""
        outputs: list[list[AppendedFile]] = []
        filled_bytes = target_bytes
        for index in sorted(self._read_indexes(files), key=lambda index: min(index.row_groups)):
            if filled_bytes >= target_bytes:
                outputs.append([])
                filled_bytes = 0
            outputs[-1].append(index.file)
            filled_bytes += self._sizes[index.file]
        if len(outputs) > 1 and len(outputs[-1]) == 1:
            outputs[-2].extend(outputs.pop())
        return [output for output in outputs if len(output) > 1]

    def _pretend(self, plan: int, outputs: Sequence[Sequence[AppendedFile]]) -> None:
        for index, files in enumerate(outputs):
            self._sizes[output_of(files[0], plan, index)] = sum(self._sizes.pop(file) for file in files)

    def _read_indexes(self, files: Sequence[AppendedFile]) -> list[SourceIndex]:
        """Return the indexes of files that can be merged with each other, and note the others; reads each file once."""
        unknown = [file for file in files if file not in self._indexes and file.name not in self.skipped]
        found, lost = read_indexes(self._root, unknown)
        self._indexes |= {index.file: index for index in found}
        for error in lost:
            self._note_lost(error)
        return [self._indexes[file] for file in files if file in self._indexes]

    def _note_lost(self, error: LostSourceError) -> None:
        file, reason = error.args
        self._indexes.pop(file, None)
        if reason is None:
            self._sizes.pop(file, None)
            self._is_shared = True
        else:
            self.skipped[file.name] = reason

    def _sources(self) -> dict[SourceFile, AppendedFile]:
        return {file.source: file for file in self._sizes if not file.is_compacted}
