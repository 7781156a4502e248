"""Read rollouts that the ledger names, from this root or others, also after compaction moved their rows.

The ledger's file, row_group and row give a row's address when its step was planned. If compaction has moved the row
since, the intent log names the new file, and the row is found there by rollout_id.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial

import numpy as np
import pyarrow as pa

from ludic.errors import SchemaError, StoreError
from ludic.schema import rollouts_schema
from ludic.store.files import RolloutFile, find_replacement
from ludic.store.parquet import group_ranges, open_parquet, read_row_groups, read_rows, release_memory, take_rows
from ludic.store.root import Root

_CONCURRENT_READS = 8


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
    # Decoding limits reads from a disk, so one thread per core is enough; reads from a server mostly wait.
    num_threads = min(_CONCURRENT_READS, pa.cpu_count()) if root.is_local else _CONCURRENT_READS
    table = take_rows(pa.concat_tables(_read_all(reads, num_threads)), order.tolist())
    release_memory(table.get_total_buffer_size())
    return table


_other_root = lru_cache(maxsize=64)(Root.open)
"""Opens another root once: run.json never changes."""


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
    assert table["rollout_id"].equals(rows["rollout_id"]), f"{name} is not what was planned"
    return table.select(columns)


def _replacement_of(root: Root, name: str) -> str:
    file = RolloutFile.parse(name)
    replacement = find_replacement(root, file) if file is not None else None
    if replacement is None:
        raise StoreError(
            f"{root.url}/{name} was planned for a step and is gone; start the trainer again to make a new plan"
        )
    return replacement.name


def _read_moved(root: Root, name: str, rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Return columns of rows found by rollout_id, reading only the row groups that may hold their groups."""
    group_ids = set(rows.column("group_id").to_pylist())
    schema = rollouts_schema(root.run.extra_columns)
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
            f"{root.url}/{name} should hold rollouts that were planned for a step, and does not; "
            "start the trainer again to make a new plan"
        ) from error
    return table.take(moved).select(columns)


def _with_id(columns: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(["rollout_id", *columns]))
