"""Write and read the ledger, the rollouts that each gradient step used and dropped: batches/.

The ledger is the authoritative record. The rows of a step, and the parts that a reader's cursor has forgotten, are
restored from it. Raises FencedError if a newer attempt owns the root, SchemaError if a file is broken, StoreError if
planned rollouts are gone.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.errors import FencedError, SchemaError, StoreError
from ludic.records import arrow_schema, rollouts_schema
from ludic.root.attempts import chain, check_not_fenced, newest_attempt_id, read_attempt, read_parent
from ludic.root.catalogue import BATCHES, StepName
from ludic.root.json_records import Attempt, CheckpointId
from ludic.root.root import Root
from ludic.root.rows.files import RolloutFile, SourceFile, find_replacement, group_numbers, list_files
from ludic.root.rows.parquet import (
    group_ranges,
    open_parquet,
    read_columns,
    read_row_groups,
    read_rows,
    release_memory,
    take_rows,
)
from ludic.root.rows.reader import Cursor
from ludic.root.rows.tables import put_table, read_table
from ludic.root.rows.tombstones import read_tombstones

# --- Steps ----------------------------------------------------------------------------------------------------
# A step's file is written before its gradient step, and never changed.


_EVERY_STEP = 2**62

_CONCURRENT_READS = 8


def ledger_name(attempt_id: int, step: int) -> str:
    return BATCHES.name(StepName(attempt_id, step))


def write_ledger(root: Root, attempt: Attempt, step: int, rows: pa.Table) -> None:
    """Commit a step's rows (schema of the batches table). Raises FencedError if a newer attempt owns the root."""
    assert rows.schema.equals(arrow_schema("batches"))
    check_not_fenced(root, attempt)
    name = StepName(attempt.attempt_id, step)
    if not put_table(root, BATCHES, name, rows):
        raise FencedError(
            f"{root.url}/{BATCHES.name(name)} exists with other content: another process trains as this attempt"
        )


def step_numbers(rows: pa.Table) -> dict[str, Any]:
    """Return the metrics of a step that follow from its ledger alone, by column of the metrics table.

    rows: of one step. A mean of no rows is None, and so are the off-policy steps of rows of other roots, which have
    versions of their own.
    """
    used = rows.filter(rows["used"])
    own, dropped = used.filter(pc.is_null(used["root"])), rows.filter(pc.invert(rows["used"]))
    return {
        "num_rollouts": used.num_rows,
        "num_groups": len(used["group_id"].unique()),
        "reward_mean": pc.mean(rows["episode_reward"]).as_py(),
        "response_length_mean": pc.mean(used["response_length"]).as_py(),
        "advantage_mean": pc.mean(used["advantage"]).as_py(),
        "advantage_std": pc.stddev(used["advantage"]).as_py(),
        "off_policy_steps_mean": pc.mean(own["lag"]).as_py(),
        "off_policy_steps_max": pc.max(own["lag"]).as_py(),
        "drops": dict(Counter(dropped["reason"].to_pylist())),
    }


def read_ledger(root: Root, attempt_id: int, step: int) -> pa.Table:
    """Read a step's rows as planned; columns that a file of an older schema lacks are null.

    Raises FileNotFoundError if the step was not planned, SchemaError if the file is broken.
    """
    return read_table(root, BATCHES, StepName(attempt_id, step))


def count_uses(root: Root, checkpoint: CheckpointId | None) -> dict[str, int]:
    """Count the steps that trained on each group up to a checkpoint, in attempts that may use a group again.

    The reader's cursor holds only groups that are used up; this counts the uses of groups that it delivers again.
    """
    if checkpoint is None:
        return {}
    checkpoint_ids = effective_steps(root, checkpoint, of=lambda attempt_id: _max_uses(root, attempt_id) > 1)
    return recall_groups(root, checkpoint_ids)[0]


def effective_steps(
    root: Root, checkpoint: CheckpointId, *, of: Callable[[int], bool] = lambda _: True
) -> list[CheckpointId]:
    """Return attempt_id and step of steps planned up to a checkpoint, unordered. of: whether to include an attempt."""
    checkpoint_ids: list[CheckpointId] = []
    for link in chain(checkpoint[0], partial(read_parent, root)):
        if of(link.attempt_id):
            last_step = checkpoint[1] if link.last_step is None else min(link.last_step, checkpoint[1])
            checkpoint_ids += [
                (link.attempt_id, step) for step in ledger_steps(root, link.attempt_id) if step <= last_step
            ]
    return checkpoint_ids


def attempt_of_steps(root: Root) -> dict[int, int]:
    """Return the attempt_id of each step of the effective ledger, in order of steps; {} before the first."""
    newest = newest_attempt_id(root)
    found = effective_steps(root, (newest, _EVERY_STEP)) if newest else []
    return {step: attempt_id for attempt_id, step in sorted(found, key=lambda planned: planned[1])}


def recall_groups(root: Root, checkpoint_ids: Iterable[CheckpointId]) -> tuple[dict[str, int], set[str]]:
    """Return how many of these steps trained on each group, and the groups that they considered but did not use."""
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        steps = list(pool.map(lambda checkpoint_id: _groups_of_step(root, *checkpoint_id), checkpoint_ids))
    uses = Counter(group_id for used, _ in steps for group_id in used)
    return dict(uses), {group_id for _, seen in steps for group_id in seen} - uses.keys()


def superseded_groups(root: Root) -> set[str]:
    """Return the groups that only steps considered which a later attempt has replaced."""
    effective = {(attempt_id, step) for step, attempt_id in attempt_of_steps(root).items()}
    superseded = {(found.attempt_id, found.step) for found in BATCHES.listed(root)} - effective
    if not superseded:
        return set()
    (used, dropped), (used_again, dropped_again) = (recall_groups(root, steps) for steps in (superseded, effective))
    return (used.keys() | dropped) - used_again.keys() - dropped_again


def _groups_of_step(root: Root, attempt_id: int, step: int) -> tuple[list[str], list[str]]:
    """Return the groups that a step used, and all groups that it considered."""
    rows = read_ledger(root, attempt_id, step)
    used = rows.filter(rows["used"])
    return used["group_id"].unique().to_pylist(), rows["group_id"].unique().to_pylist()


def newest_rows(root: Root, checkpoint: CheckpointId, num_rows: int, *, of_groups: bool) -> Iterator[pa.Table]:
    """Yield scored ledger rows of steps up to a checkpoint, newest step first, up to num_rows rows.

    A rollout is in the table of the newest step that used it. of_groups: whole groups that were used, not only their
    used rows.
    """
    seen: set[str] = set()
    for attempt_id, step in sorted(effective_steps(root, checkpoint), key=lambda planned: planned[1], reverse=True):
        if len(seen) >= num_rows:
            return
        rows = read_ledger(root, attempt_id, step)
        used = rows["used"]
        if of_groups:
            used = pc.is_in(rows["group_id"], rows["group_id"].filter(used).unique())
        is_known = pc.is_in(rows["rollout_id"], pa.array(seen, pa.string()))
        rows = rows.filter(pc.and_(used, pc.and_(pc.is_valid(rows["episode_reward"]), pc.invert(is_known))))
        seen.update(rows["rollout_id"].to_pylist())
        yield rows


def consumed_groups(root: Root, checkpoint: CheckpointId) -> set[str]:
    """Return the groups that steps up to a checkpoint used for the last time, or dropped, in online attempts."""
    checkpoint_ids = effective_steps(root, checkpoint, of=lambda attempt_id: _is_online(_config(root, attempt_id)))
    max_uses = {attempt_id: _config(root, attempt_id).get("max_uses", 1) for attempt_id in dict(checkpoint_ids)}
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        steps = pool.map(
            lambda checkpoint_id: _consumed_by(read_ledger(root, *checkpoint_id), max_uses[checkpoint_id[0]]),
            checkpoint_ids,
        )
        return {group_id for groups in steps for group_id in groups}


def _consumed_by(rows: pa.Table, max_uses: int) -> set[str]:
    stays = pc.fill_null(pc.and_(rows["used"], pc.less(rows["num_uses"], max_uses)), False)
    groups = rows["group_id"]
    return set(groups.unique().to_pylist()) - set(groups.filter(stays).unique().to_pylist())


def _max_uses(root: Root, attempt_id: int) -> int:
    """Return the max_uses of an online attempt, and 1 for others: offline and replay attempts' uses do not count.

    They trained on groups that workers do not deliver here, or that are to be used again.
    """
    config = _config(root, attempt_id)
    return config.get("max_uses", 1) if _is_online(config) else 1


def _is_online(config: Mapping[str, Any]) -> bool:
    return not (config.get("offline") or config.get("replay_batches"))


def _config(root: Root, attempt_id: int) -> Mapping[str, Any]:
    try:
        return read_attempt(root, attempt_id).config
    except FileNotFoundError:
        return {}


def ledger_steps(root: Root, attempt_id: int) -> list[int]:
    """Return the steps that an attempt planned, in order."""
    return [found.step for found in BATCHES.listed(root, attempt_id=attempt_id)]


# --- Rows of a step -------------------------------------------------------------------------------------------
# Read rollouts that the ledger names, from this root or others, also after compaction moved their rows.
#
# The ledger's file, row_group and row give a row's address when its step was planned. If compaction has moved the row
# since, the intent log names the new file, and the row is found there by rollout_id.


def read_rollouts(
    root: Root, rows: pa.Table, columns: Sequence[str], *, on_broken: Callable[[str, str], object] | None = None
) -> pa.Table:
    """Return columns of at least one rollout, in the order of `rows`; files are read concurrently, each opened once.

    rows: rollout_id, group_id, file, row_group, row and optionally root, as in the ledger. on_broken: called with the
    name of each broken file of this root, and the reason. Raises SchemaError if a file is broken, StoreError if a file
    is gone and was not compacted, or if the filesystem fails.
    """
    rows_of: dict[tuple[str | None, str], list[int]] = {}
    urls = rows.column("root").to_pylist() if "root" in rows.column_names else [None] * rows.num_rows
    for index, file in enumerate(zip(urls, rows.column("file").to_pylist(), strict=True)):
        rows_of.setdefault(file, []).append(index)
    reads = [
        partial(_read_file, root, name, take_rows(rows, of_file), columns, on_broken)
        if url is None
        else partial(_read_file, _other_root(url), name, take_rows(rows, of_file), columns, None)
        for (url, name), of_file in rows_of.items()
    ]
    order = np.argsort([index for of_file in rows_of.values() for index in of_file])
    # Reads from a disk are limited by decoding, so one thread per core is enough; reads from a server mostly wait.
    num_threads = min(_CONCURRENT_READS, pa.cpu_count()) if root.is_local else _CONCURRENT_READS
    table = take_rows(pa.concat_tables(_read_all(reads, num_threads)), order.tolist())
    release_memory(table.get_total_buffer_size())
    return table


_other_root = lru_cache(maxsize=64)(Root.open)
"""Open another root, once: run.json never changes."""


def _read_all(reads: Sequence[Callable[[], pa.Table]], num_threads: int) -> list[pa.Table]:
    """Run all reads, even if one fails, then return their tables or raise the first error.

    A single read or a single thread runs in this thread: another thread costs one core more than it gains, and after it
    ends it keeps the memory of a group of gigabytes.
    """
    if min(num_threads, len(reads)) == 1:
        return [future.result() for future in [_run(read) for read in reads]]
    with ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(read) for read in reads]
    return [future.result() for future in futures]


def _run(read: Callable[[], pa.Table]) -> "Future[pa.Table]":
    future: Future[pa.Table] = Future()
    try:
        future.set_result(read())
    except Exception as error:
        future.set_exception(error)
    return future


def _read_file(
    root: Root, name: str, rows: pa.Table, columns: Sequence[str], on_broken: Callable[[str, str], object] | None
) -> pa.Table:
    """Return columns of rows that were planned from one file, or from the file that compaction moved them to."""
    try:
        try:
            return _read_planned(root, name, rows, columns)
        except FileNotFoundError:
            name = _replacement_of(root, name)
            return _read_moved(root, name, rows, columns)
    except SchemaError as error:
        if on_broken is not None:
            on_broken(name, str(error))
        raise


def _read_planned(root: Root, name: str, rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    addresses = list(zip(rows.column("row_group").to_pylist(), rows.column("row").to_pylist(), strict=True))
    table = read_rows(root, name, addresses, _with_id(columns))
    assert table["rollout_id"].equals(rows["rollout_id"]), f"{name} does not hold the planned rollouts"
    return table.select(columns)


def _replacement_of(root: Root, name: str) -> str:
    file = RolloutFile.parse(name)
    replacement = find_replacement(root, file) if file is not None else None
    if replacement is None:
        raise StoreError(
            f"{root.url}/{name} was planned for a step and is missing; start the trainer again to make a new plan"
        )
    return replacement.name


def _read_moved(root: Root, name: str, rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Return columns of rows found by rollout_id, reading only the row groups that may hold their groups."""
    group_ids = set(rows.column("group_id").to_pylist())
    schema = rollouts_schema(root.extra_columns)
    try:
        with open_parquet(root, name) as parquet:
            row_groups = [
                number
                for number, (lowest, highest) in enumerate(group_ranges(parquet))
                if any(lowest <= group_id and (highest is None or group_id <= highest) for group_id in group_ids)
            ]
            table = read_row_groups(parquet, row_groups, _with_id(columns), f"{root.url}/{name}", schema)
        row_of = {rollout_id: row for row, rollout_id in enumerate(table.column("rollout_id").to_pylist())}
        moved = [row_of[rollout_id] for rollout_id in rows.column("rollout_id").to_pylist()]
    except (FileNotFoundError, KeyError) as error:
        raise StoreError(
            f"{root.url}/{name} lacks rollouts that were planned for a step; start the trainer again to make a new plan"
        ) from error
    return table.take(moved).select(columns)


def _with_id(columns: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(["rollout_id", *columns]))


# --- What a cursor does not hold ------------------------------------------------------------------------------
# Restore what a reader's cursor does not hold, from stored rollouts and the ledger.
#
# A cursor forgets versions behind the trainer's window. A later trainer with a larger window, or with none, reads these
# versions again: it must get each group once, and every group that was never consumed. The cursor of an older ludic
# holds no requests. Reads batches/, expired/ and the ids of rollouts. Raises StoreError if the filesystem fails,
# SchemaError if the ledger is damaged.


_SOURCE = ["worker_id", "sequence", "group_id"]


def recall_sources(root: Root, cursor: Cursor, first_version: int, checkpoint: CheckpointId, *, forgets: bool) -> None:
    """Restore what a cursor has forgotten of versions from `first_version` on; does nothing if it forgot none of them.

    checkpoint: that of the cursor. forgets: as in RolloutReader.consume.
    """
    forgotten = range(first_version, cursor.first_version)
    if not forgotten:
        return
    consumed = consumed_groups(root, checkpoint)
    cursor.first_version = first_version
    files = list_files(root, forgotten)
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        for file, sources in zip(files, pool.map(partial(_groups_of_sources, root), files), strict=True):
            for source, group_ids in sources.items():
                used, version = group_ids & consumed, file.version if forgets else None
                if used:
                    cursor.consume(*source, used, whole=used == group_ids, version=version)


def recall_requests(root: Root, cursor: Cursor, in_use: Collection[str]) -> None:
    """Add to the cursor of an older ludic the requests of its consumed groups and of the groups in use.

    in_use: group_ids that steps trained on, and that may be delivered again. Reads ids of all rollouts; expired groups
    count as consumed. Raises StoreError if the filesystem fails.
    """
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        for rows in pool.map(partial(_read_requests, root), list_files(root)):
            for number, worker_id, sequence, group_id in rows:
                if cursor.has_group(worker_id, sequence, group_id):
                    cursor.finish_request(number)
                elif group_id in in_use:
                    cursor.use_request(number, group_id)
    partitions = [partition for tombstone in read_tombstones(root) for partition in tombstone.partitions]
    for first, last in [pair for each in partitions if each.folder == "rollouts" for pair in each.groups]:
        for number in range(first, last):
            cursor.finish_request(number)
    cursor.knows_requests = True


def _groups_of_sources(root: Root, file: RolloutFile) -> dict[SourceFile, set[str]]:
    """Return the group_ids of each source of a file; none if the file is broken or was deleted."""
    sources: defaultdict[SourceFile, set[str]] = defaultdict(set)
    for worker_id, sequence, group_id in _rows(_read(root, file, _SOURCE)):
        sources[SourceFile(worker_id, sequence)].add(group_id)
    return sources


def _read_requests(root: Root, file: RolloutFile) -> set[tuple[int, str, int, str]]:
    """Return number, worker_id, sequence and group_id of each scheduled group; none if the file is broken or gone."""
    rows = _read(root, file, [*_SOURCE, "request_index", "group_size"])
    if rows is None:
        return set()
    return {
        (number, *row) for number, row in zip(group_numbers(rows).tolist(), _rows(rows), strict=True) if number >= 0
    }


def _read(root: Root, file: RolloutFile, columns: list[str]) -> pa.Table | None:
    """Return columns of a file, or of the file that compaction moved it to; None if it is broken or was deleted."""
    try:
        return read_columns(root, file.name, columns)
    except SchemaError:
        return None
    except FileNotFoundError:
        replacement = find_replacement(root, file)
        return _read(root, replacement, columns) if replacement else None


def _rows(table: pa.Table | None) -> Iterator[tuple[str, int, str]]:
    """Yield worker_id, sequence and group_id of each row."""
    if table is not None:
        yield from zip(*(table[name].to_pylist() for name in _SOURCE), strict=True)
