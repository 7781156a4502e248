"""Make stores of many rollouts quickly: they repeat the rows of one batch of realistic shape under new ids.

Ids are uuid7, later in each file than in the file before; rewards and flags are drawn for every row. Files are as
workers would have written them; `compact_copy` makes a compacted copy of a store.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.rollouts import make_batch
from ludic.records import to_table
from ludic.root import Root
from ludic.root.maintenance import compact
from ludic.root.rows import RolloutFile, encode
from ludic.root.storage import Content
from ludic.run import RunConfig, put_run

GROUP_SIZE = 8
GROUPS_A_FILE = 8
NUM_WORKERS = 25
_FIRST_MS = 1_760_000_000_000
_MS_A_FILE = 100


def make_store(
    url: str,
    num_files: int,
    *,
    num_versions: int,
    mean_length: int,
    base_groups: int = 256,
    groups_a_file: int = GROUPS_A_FILE,
) -> Root:
    """Make a run whose files are spread evenly over versions and workers.

    base_groups: most groups of 8 with distinct content; other groups repeat it.
    """
    root = put_run(url, RunConfig(model="none", env=("moar_cats",), group_size=GROUP_SIZE))
    num_distinct = min(base_groups, num_files * groups_a_file)
    base = to_table(make_batch(num_distinct, mean_length=mean_length), run_id=root.run_id, sequence=0)
    rng = np.random.default_rng(0)
    for number in range(num_files):
        worker_id, sequence = f"w{number % NUM_WORKERS}-benchmark", number // NUM_WORKERS
        file = RolloutFile(number * num_versions // num_files, "moar_cats", worker_id, sequence)
        _put(root, file, encode(_rows(base, number, file, rng, groups_a_file)))
    return root


def compact_copy(root: Root, url: str) -> Root:
    """Copy a run and compact the copy; unchanged files are hard links."""
    shutil.copytree(root.path, url, copy_function=os.link)
    copy = Root.open(url)
    compact(copy)
    return copy


def _put(root: Root, file: RolloutFile, data: Content) -> None:
    """Write a file without the sync to disk of a commit."""
    path = Path(root.at(file.name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _rows(base: pa.Table, number: int, file: RolloutFile, rng: np.random.Generator, num_groups: int) -> pa.Table:
    """Return the rows of a file: rows of the base with new ids, provenance and outcome."""
    num_rows = num_groups * GROUP_SIZE
    table = base.slice(number * num_rows % base.num_rows, num_rows)
    first_ms = _FIRST_MS + number * _MS_A_FILE
    columns = {
        "rollout_id": (ids := list(_uuid7s(num_rows, first_ms, rng))),
        "trajectory_id": ids,
        "episode_id": list(_uuid7s(num_rows, first_ms, rng)),
        "group_id": np.repeat(np.array(list(_uuid7s(num_groups, first_ms, rng)), object), GROUP_SIZE),
        "worker_id": [file.worker_id] * num_rows,
        "sequence": [file.sequence] * num_rows,
        "policy_version": [file.version] * num_rows,
        "policy_version_last": [file.version] * num_rows,
        "created_at": [first_ms * 1000] * num_rows,
        "episode_reward": np.round(rng.random(num_rows), 3),
        "truncated": rng.random(num_rows) < 0.05,
        "incomplete_completion": rng.random(num_rows) < 0.03,
        "parse_error": rng.random(num_rows) < 0.02,
    }
    for name, values in columns.items():
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))
    return table


def _uuid7s(count: int, first_ms: int, rng: np.random.Generator) -> Iterator[str]:
    """Yield ids, one per millisecond."""
    for ms, bits in enumerate(rng.integers(0, 2**62, count).tolist(), start=first_ms):
        time, tail = f"{ms:012x}", f"{bits:016x}"
        yield f"{time[:8]}-{time[8:]}-7{tail[:3]}-8{tail[3:6]}-{tail[4:16]}"
