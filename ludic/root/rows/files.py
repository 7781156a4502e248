"""List the files of rollouts and requests, resolve files that compaction has moved, and find rows by id.

A group whose rollouts differ in policy_version, because weights changed while it was sampled, is in the partition of
the oldest version. Compaction writes files under a worker_id that no worker may have; their footers name the sources
that they replace. Raises SchemaError if a compacted file does not name its sources, StoreError if the filesystem fails.
"""

import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ludic.errors import ConfigError, SchemaError, StoreError
from ludic.records import rollouts_schema
from ludic.root.catalogue import (
    CALLS,
    COMPACTIONS,
    EVALS,
    NUMBER,
    REQUESTS,
    ROLLOUTS,
    WORKER_ID,
    PlanName,
    RolloutsName,
    SequenceName,
    Table,
)
from ludic.root.json_records import COMPACTED, CompactionRecord, Folder, PlannedOutput, encode_record
from ludic.root.root import Root
from ludic.root.rows.parquet import group_ranges, open_parquet, read_row_groups, read_rows

# --- Names and listings ---------------------------------------------------------------------------------------


_ROWS: Mapping[Folder, Table[RolloutsName]] = {"rollouts": ROLLOUTS, "evals": EVALS}
FOLDERS = tuple(_ROWS)
"""Folders of rollouts."""
_CONCURRENT_LISTINGS = 16
_SLOT = re.compile(rf"w{NUMBER}-")


class SourceFile(NamedTuple):
    """Identity of the rows that a worker committed as one file, whatever file holds them now; readers count by it."""

    worker_id: str
    sequence: int


def parse_source(worker_id: object, sequence: object) -> SourceFile:
    """Parse a source that a file names. Raises ValueError if no worker commits such a source."""
    if not isinstance(worker_id, str) or not isinstance(sequence, int) or sequence < 0:
        raise ValueError(f"[{worker_id!r}, {sequence!r}] is not a worker_id with a sequence")
    return SourceFile(check_worker_id(worker_id), sequence)


class _Appended:
    """Common part of the names of appended and compacted files."""

    __slots__ = ()
    worker_id: str
    sequence: int

    @property
    def source(self) -> SourceFile:
        """Source of a worker's file; not for compacted files, which have several."""
        assert not self.is_compacted, f"{self.worker_id}-{self.sequence} has many sources"
        return SourceFile(self.worker_id, self.sequence)

    @property
    def is_compacted(self) -> bool:
        return self.worker_id.startswith(COMPACTED)


@dataclass(frozen=True, slots=True, order=True)
class RolloutFile(_Appended):
    """A file of rollouts, described by its name alone."""

    version: int
    env_name: str
    worker_id: str
    sequence: int
    folder: Folder = "rollouts"

    table: ClassVar = ROLLOUTS.table
    """Table of its rows."""

    @property
    def partition(self) -> str:
        """Path of the file's folder below the root."""
        return self.name.rpartition("/")[0]

    @property
    def name(self) -> str:
        """Path below the root."""
        name = RolloutsName(self.version, self.env_name, self.worker_id, self.sequence)
        return _ROWS[self.folder].name(name)

    @classmethod
    def parse(cls, name: str) -> "RolloutFile | None":
        """Parse a file's path below the root; returns None for a name that workers and compaction never write."""
        folder: Folder = "evals" if name.startswith("evals/") else "rollouts"
        found = _ROWS[folder].parse(name)
        return None if found is None else cls(*found, folder)


@dataclass(frozen=True, slots=True, order=True)
class SequenceFile(_Appended):
    """A file of requests/ or calls/, described by its name alone; the whole folder is one partition."""

    worker_id: str
    sequence: int
    folder: str = REQUESTS.folder

    @property
    def table(self) -> str:
        """Table of its rows."""
        return _BY_SEQUENCE[self.folder].table

    @property
    def partition(self) -> str:
        """Path of the file's folder below the root."""
        return self.folder

    @property
    def name(self) -> str:
        """Path below the root."""
        return _BY_SEQUENCE[self.folder].name(SequenceName(self.worker_id, self.sequence))

    @classmethod
    def parse(cls, name: str) -> "SequenceFile | None":
        """Parse a file's path below the root; returns None for a name that ludic never writes."""
        row = _BY_SEQUENCE.get(name.partition("/")[0])
        found = None if row is None else row.parse(name)
        return None if row is None or found is None else cls(*found, row.folder)


_BY_SEQUENCE: Mapping[str, Table[SequenceName]] = {row.folder: row for row in (REQUESTS, CALLS)}
UNDIVIDED = tuple(_BY_SEQUENCE)
"""Folders of appended files without partitions."""
AppendedFile = RolloutFile | SequenceFile
"""A file that a worker or a gateway appended, or that compaction merged from such files of its partition."""


def output_of(file: AppendedFile, plan: int, index: int) -> AppendedFile:
    """Return an output of a compaction's plan in the partition of a file."""
    return replace(file, worker_id=f"{COMPACTED}{plan}", sequence=index)


def parse_file(name: str) -> AppendedFile | None:
    """Parse a path below the root; returns None for a name that workers and compaction never write."""
    return RolloutFile.parse(name) or SequenceFile.parse(name)


def check_worker_id(worker_id: str) -> str:
    """Return the id. Raises ConfigError if it is not safe in a file name."""
    if not WORKER_ID.fullmatch(worker_id):
        raise ConfigError(
            f"worker_id {worker_id!r} is not a file name; wanted at most 200 letters, digits, '-', '.' and '_', not "
            f"beginning with '.' or '_', and not {COMPACTED!r}"
        )
    return worker_id


def slot_prefix(slot: int) -> str:
    """Return the prefix of the worker_ids of a slot of the schedule."""
    return f"w{slot}-"


def slot_of(worker_id: str) -> int | None:
    """Return the slot of a worker; None if it follows no schedule, such as an import."""
    match = _SLOT.match(worker_id)
    return int(match[1]) if match else None


def group_numbers(rows: pa.Table) -> np.ndarray:
    """Return each row's group number in the schedule, (num_rows,) int64; -1 for a row that follows no schedule."""
    # A group of the schedule samples the requests number * group_size, number * group_size + 1, ..., so its number
    # identifies them, whichever worker sampled it. Imports, and writers that follow no schedule, have no requests.
    workers = rows["worker_id"].combine_chunks().dictionary_encode()
    slots = [slot_of(worker_id) for worker_id in workers.dictionary.to_pylist()]
    is_scheduled = np.array([slot is not None for slot in slots], np.bool_)[workers.indices.to_numpy()]
    indexes, sizes = rows["request_index"].to_numpy(), rows["group_size"].to_numpy()
    return np.where(is_scheduled & (indexes >= 0) & (sizes > 0), indexes // np.maximum(sizes, 1), -1)


def version_folder(folder: Folder, version: int) -> str:
    """Return the folder of the partitions of a version."""
    return _ROWS[folder].below(version=version)


def list_names(root: Root, versions: range | None = None, folder: Folder = "rollouts") -> list[str]:
    """List the names of all files in a range of versions, or in all; partitions of other versions are not listed."""
    if versions is None:
        return root.list(folder)
    folders = [version_folder(folder, version) for version in versions]
    if root.is_local:  # a thread costs more than a local listing
        return [name for each in folders for name in root.list(each)]
    with ThreadPoolExecutor(_CONCURRENT_LISTINGS) as pool:
        return [name for names in pool.map(root.list, folders) for name in names]


def list_files(root: Root, versions: range | None = None, folder: Folder = "rollouts") -> list[RolloutFile]:
    """List rollout files in a range of versions, or in all, sorted by version, environment, worker and sequence."""
    return sorted(file for file in map(RolloutFile.parse, list_names(root, versions, folder)) if file is not None)


def list_versions(root: Root, folder: Folder = "rollouts") -> list[int]:
    """List the versions that have a partition, in order."""
    return _ROWS[folder].first_fields(root)


# --- Sources --------------------------------------------------------------------------------------------------
# The sources of a file of rollouts or requests: the files, as workers committed them, that its rows came from.
#
# A worker's file is its own source. A compacted file holds all rows of its sources, and names the sources in the entry
# `ludic.sources` of its footer: a JSON list of [worker_id, sequence].


SOURCES_KEY = b"ludic.sources"


def sources_to_json(sources: Iterable[SourceFile]) -> bytes:
    """Return the value of SOURCES_KEY in a compacted file's footer."""
    return json.dumps([list(source) for source in sources]).encode()


def sources_of(parquet: pq.ParquetFile, file: AppendedFile) -> list[SourceFile]:
    """Return the sources of an open file. Raises SchemaError if a compacted file does not name its sources."""
    if not file.is_compacted:
        return [file.source]
    try:
        pairs = json.loads((parquet.metadata.metadata or {})[SOURCES_KEY])
        return [parse_source(worker_id, sequence) for worker_id, sequence in pairs]
    except (KeyError, ValueError, TypeError) as error:
        raise SchemaError(
            f"{file.name} does not name its sources in its footer, so ludic's compaction did not write it"
        ) from error


def find_sources(root: Root, file: AppendedFile) -> list[SourceFile] | None:
    """Return the sources of a file as `read_sources` does; None if it is broken or gone."""
    try:
        return read_sources(root, file)
    except (SchemaError, FileNotFoundError):
        return None


def read_sources(root: Root, file: AppendedFile) -> list[SourceFile]:
    """Return the sources of a file, from its name or, if compacted, its footer. Raises the errors of `open_parquet`."""
    if not file.is_compacted:
        return [file.source]
    with open_parquet(root, file.name, file.table) as parquet:
        return sources_of(parquet, file)


# --- Plans of compactions -------------------------------------------------------------------------------------
# The intent log of compaction: which sources go into which compacted file, decided once for all compactors.
#
# Plan N of a partition is compactions/{partition}/{N}.json, put if absent. A compactor reads all earlier plans before
# it puts a new plan, so no source is planned twice. Only the stored file counts: a plan that can't be read is a plan
# without outputs, and its number stays taken. Plans are never deleted, so that no compacted file's name is used again.


@dataclass(frozen=True, slots=True)
class Output:
    """A planned compacted file, and the sources that it replaces."""

    file: AppendedFile
    sources: tuple[SourceFile, ...]


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """One compaction of a partition; compacted files are named by its number."""

    partition: str
    number: int
    outputs: tuple[Output, ...]

    @property
    def name(self) -> str:
        """Path below the root."""
        return COMPACTIONS.name_of(self)


def put_plan(root: Root, number: int, files: Sequence[Sequence[AppendedFile]]) -> None:
    """Store a plan with an output for each sequence of files, unless the number is taken; read it to find out.

    files: of one partition, at least one.
    """
    outputs = [
        PlannedOutput(name=output_of(of_output[0], number, index).name, sources=[file.source for file in of_output])
        for index, of_output in enumerate(files)
    ]
    plan = encode_record(CompactionRecord(outputs=outputs), indent=None)
    root.put_if_absent(COMPACTIONS.name(PlanName(files[0][0].partition, number)), plan)


def read_partition_plans(root: Root, partition: str) -> list[CompactionPlan]:
    """Return the plans of one partition, in order; read by name, since a listing may be delayed."""
    plans: list[CompactionPlan] = []
    while (plan := _read_plan(root, partition, len(plans))) is not None:
        plans.append(plan)
    return plans


def read_plans(root: Root) -> list[CompactionPlan]:
    """Return the plans of all partitions."""
    partitions = dict.fromkeys(found.partition for found in COMPACTIONS.listed(root))
    return [plan for partition in partitions for plan in read_partition_plans(root, partition)]


def find_replacement(root: Root, file: RolloutFile) -> RolloutFile | None:
    """Return the compacted file that was planned to replace a worker's file that is gone; None if there is no plan."""
    if file.is_compacted:
        return None
    for plan in reversed(read_partition_plans(root, file.partition)):
        for output in plan.outputs:
            if file.source in output.sources:
                return replace(file, worker_id=output.file.worker_id, sequence=output.file.sequence)
    return None


def _read_plan(root: Root, partition: str, number: int) -> CompactionPlan | None:
    """Return a plan; None if it does not exist. A plan that can't be read has no outputs."""
    try:
        plan = COMPACTIONS.read(root, partition, number)
        outputs = tuple(_parse_output(output, partition) for output in plan.outputs) if plan else ()
    except ValueError:  # also those of SchemaError and ConfigError
        plan, outputs = CompactionRecord(outputs=()), ()
    return CompactionPlan(partition, number, outputs) if plan else None


def _parse_output(output: PlannedOutput, partition: str) -> Output:
    file = parse_file(output.name)
    if file is None or not file.is_compacted or file.partition != partition:
        raise ValueError(output.name)
    return Output(file, tuple(parse_source(worker_id, sequence) for worker_id, sequence in output.sources))


# --- Files without doubled rows -------------------------------------------------------------------------------
# List a set of rollout files that holds each stored row once.
#
# During compaction, and after one that crashed, a worker's file may lie beside the compacted file
# that holds its rows. Footers are read only in partitions that have both kinds of file.


_CONCURRENT_READS = 8


def current_files(root: Root, folder: Folder = "rollouts") -> list[RolloutFile]:
    """List the current files, sorted, without workers' files whose rows a compacted file holds.

    A broken compacted file is left out if its partition has workers' files; else it is listed.
    """
    partitions: defaultdict[str, list[RolloutFile]] = defaultdict(list)
    for file in list_files(root, folder=folder):
        partitions[file.partition].append(file)
    mixed = [files for files in partitions.values() if len({file.is_compacted for file in files}) == 2]
    hidden = {file for files in mixed for file in _hidden(root, files)}
    return [file for files in partitions.values() for file in files if file not in hidden]


def _hidden(root: Root, files: Sequence[RolloutFile]) -> list[RolloutFile]:
    """Return the files of a partition to leave out: doubled workers' files, and compacted files broken or gone."""
    compacted = [file for file in files if file.is_compacted]
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        sources_of = dict(zip(compacted, pool.map(partial(find_sources, root), compacted), strict=True))
    doubled = {source for sources in sources_of.values() for source in sources or ()}
    return [file for file in files if (sources_of[file] is None if file.is_compacted else file.source in doubled)]


# --- One rollout or group -------------------------------------------------------------------------------------
# Find a rollout or a group by its id: the addresses of its rows, and the rows.
#
# Reads a listing, footers, and the ids of row groups whose statistics may include the id. Ludic's ids are uuid7 and so
# grow with time, as versions and sequences do. The search begins with the files where that order puts the id and
# continues with all others, so clock skew and foreign ids only cost time. Files that can't be read are skipped.


_ID_COLUMNS = ("rollout_id", "group_id")
_LOCAL_READS, _REMOTE_READS = 2, 16
_MOST_LISTINGS = 10


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Address of a row: file, row group, and row within it."""

    file: RolloutFile
    row_group: int
    row: int


def find_rows(root: Root, row_or_group_id: str, version: int | None = None) -> list[Address]:
    """Return the addresses of the rows of the rollout or group with this id, in file order; empty if there are none.

    version: the partition's version if it is known; then no other version is listed. Raises StoreError.
    """
    versions = None if version is None else range(version, version + 1)
    found: list[Address] | None = None
    for _ in range(_MOST_LISTINGS):
        files = [file for folder in FOLDERS for file in list_files(root, versions, folder)]
        found = _search(root, files, row_or_group_id)
        if found is not None:
            break
    return found or []


def read_addresses(root: Root, addresses: Sequence[Address]) -> pa.Table:
    """Read rows of one file with all columns of the run.

    Raises SchemaError if the file is broken, FileNotFoundError if it is gone.
    """
    (name,) = {address.file.name for address in addresses}
    positions = [(address.row_group, address.row) for address in addresses]
    return read_rows(root, name, positions, rollouts_schema(root.extra_columns).names)


def _search(root: Root, files: Sequence[RolloutFile], wanted: str) -> list[Address] | None:
    """Return the rows found; None if there are none and a file vanished, whose rows a compacted file may hold now."""
    has_vanished = False
    ordered = _likeliest_first(root, files, wanted)
    with ThreadPoolExecutor(_LOCAL_READS if root.is_local else _REMOTE_READS) as pool:
        for start in range(0, len(ordered), _REMOTE_READS):
            results = list(pool.map(lambda file: _rows_in(root, file, wanted), ordered[start : start + _REMOTE_READS]))
            has_vanished |= None in results
            # Return the first file's rows only: a source and its compacted file may both exist.
            for found in filter(None, results):
                return found
    return None if has_vanished else []


def _likeliest_first(root: Root, files: Sequence[RolloutFile], wanted: str) -> list[RolloutFile]:
    """Sort the files by time as far as names show it, then by distance from the position where a bisection puts the id.

    The bisection reads a few footers.
    """
    num_before: Counter[tuple[int, str, str]] = Counter()
    order_of: dict[RolloutFile, tuple[int, int]] = {}
    for file in sorted(files):
        worker = (file.version, file.env_name, file.worker_id)
        order_of[file] = (file.version, num_before[worker])
        num_before[worker] += 1
    ordered = sorted(order_of, key=order_of.__getitem__)
    low, high = 0, len(ordered)
    while high - low > 1:
        middle = (low + high) // 2
        lowest = _lowest_id(root, ordered[middle])
        low, high = (middle, high) if lowest is not None and lowest <= wanted else (low, middle)
    return [ordered[index] for index in sorted(range(len(ordered)), key=lambda index: abs(index - low))]


def _lowest_id(root: Root, file: RolloutFile) -> str | None:
    try:
        with open_parquet(root, file.name) as parquet:
            return min((lowest for lowest, _ in group_ranges(parquet)), default=None)
    except (SchemaError, FileNotFoundError):
        return None


def _rows_in(root: Root, file: RolloutFile, wanted: str) -> list[Address] | None:
    """Return the addresses in one file, none if it is broken; returns None if the file is gone."""
    try:
        with open_parquet(root, file.name) as parquet:
            ranges = zip(*(group_ranges(parquet, column) for column in _ID_COLUMNS), strict=True)
            return [
                Address(file, row_group, row)
                for row_group, bounds in enumerate(ranges)
                for row in _rows_of(parquet, row_group, bounds, wanted, f"{root.url}/{file.name}")
            ]
    except FileNotFoundError:
        return None
    except SchemaError:
        return []


def _rows_of(
    parquet: pq.ParquetFile, row_group: int, bounds: Sequence[tuple[str, str | None]], wanted: str, where: str
) -> Iterator[int]:
    """Yield the rows of a row group with this id. bounds: lowest and highest id of each of _ID_COLUMNS."""
    columns = [
        name
        for name, (lowest, highest) in zip(_ID_COLUMNS, bounds, strict=True)
        if lowest <= wanted and (highest is None or wanted <= highest)
    ]
    if columns:
        table = read_row_groups(parquet, [row_group], columns, where)
        # Compare in Python: for a constant, pyarrow's compute functions import pandas if it is installed, which takes
        # 0.2 s.
        ids = zip(*(column.to_pylist() for column in table.columns), strict=True)
        yield from (row for row, ids_of_row in enumerate(ids) if wanted in ids_of_row)


# --- All rows -------------------------------------------------------------------------------------------------
# Stream whole rows of a root with one row group in memory at a time, however long the rollouts are.
#
# Reads rollouts/ or evals/, file by file in the order of versions. A broken file is left out with a warning. Raises
# StoreError if a file is deleted before it is read.


logger = logging.getLogger(__name__)


def whole_rows(root: Root, folder: Folder = "rollouts", rollout_ids: Set[str] | None = None) -> pa.RecordBatchReader:
    """Return all columns of all rows, each row once, although compaction may have doubled it.

    rollout_ids: return only rows with these ids; None means all rows.
    """
    schema = rollouts_schema(root.extra_columns)
    return pa.RecordBatchReader.from_batches(schema, _whole_batches(root, folder, schema, rollout_ids))


def _whole_batches(
    root: Root, folder: Folder, schema: pa.Schema, rollout_ids: Set[str] | None
) -> Iterator[pa.RecordBatch]:
    wanted = None if rollout_ids is None else pa.array(sorted(rollout_ids), pa.string())
    for file in current_files(root, folder):
        where = f"{root.url}/{file.name}"
        try:
            with open_parquet(root, file.name) as parquet:
                for table in _row_groups_with(parquet, schema, wanted, where):
                    yield from table.to_batches()
        except FileNotFoundError:
            raise StoreError(f"{where} was deleted meanwhile by a compaction or an expiry; try again") from None
        except SchemaError as error:
            logger.warning("left out: %s", error)


def _row_groups_with(
    parquet: pq.ParquetFile, schema: pa.Schema, wanted: pa.Array | None, where: str
) -> Iterator[pa.Table]:
    for row_group in range(parquet.num_row_groups):
        if wanted is None:
            yield read_row_groups(parquet, [row_group], schema.names, where, schema)
            continue
        ids = read_row_groups(parquet, [row_group], ["rollout_id"], where).column("rollout_id")
        is_wanted = pc.is_in(ids, value_set=wanted)
        if pc.any(is_wanted).as_py():
            yield read_row_groups(parquet, [row_group], schema.names, where, schema).filter(is_wanted)
