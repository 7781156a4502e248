"""Compute the numbers of the groups that a worker samples, from run.json and the worker's slot.

Groups are numbered over the whole run. The worker in slot s of num_workers samples the numbers s, s + num_workers,
s + 2 num_workers, ... A worker in a slot beyond num_workers has its own range of numbers, so that any number of
workers may join. request_index = group number x group_size + group_index.
"""

import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow.compute as pc

from ludic.errors import ConfigError, SchemaError
from ludic.root import Root
from ludic.root.rows import (
    Intervals,
    MadeFile,
    RolloutFile,
    find_replacement,
    list_files,
    read_columns,
    read_sources,
    read_tombstones,
    slot_of,
    slot_prefix,
)
from ludic.run import RunConfig, run_of

MAX_SLOT = 2**20
_GROUPS_A_SLOT = 2**32
_MAX_REQUEST = 2**63 - 1
_CONCURRENT_READS = 8


@dataclass(frozen=True, slots=True)
class Schedule:
    """The 2**32 group numbers start, start + stride, start + 2 stride, ..."""

    start: int
    stride: int

    @classmethod
    def of_slot(cls, run: RunConfig, slot: int) -> "Schedule":
        """Return the schedule of a slot. Raises ConfigError if the slot is out of range."""
        if not 0 <= slot < MAX_SLOT:
            raise ConfigError(f"slot is {slot}, wanted 0 to {MAX_SLOT - 1}")
        if slot < run.num_workers:
            return cls(slot, run.num_workers)
        start = (slot + 1) * _GROUPS_A_SLOT
        if (start + _GROUPS_A_SLOT) * run.group_size > _MAX_REQUEST:
            raise ConfigError(
                f"slot is {slot}, wanted 0 to {run.num_workers - 1} (num_workers) with a group_size as large as "
                f"{run.group_size:,}: request_index would not fit 64 bits"
            )
        return cls(start, 1)

    def position(self, group_number: int) -> int | None:
        """Return a group number's position in this schedule; None if it belongs to another schedule."""
        position, rest = divmod(group_number - self.start, self.stride)
        return position if 0 <= position < _GROUPS_A_SLOT and rest == 0 else None

    def missing(self, committed: Intervals) -> Iterator[int]:
        """Yield the group numbers that are not committed, lowest first. committed: positions in this schedule."""
        for position in range(_GROUPS_A_SLOT):
            if position not in committed:
                yield self.start + position * self.stride


@dataclass(frozen=True, slots=True)
class CommittedGroups:
    """Groups that earlier lives of a slot committed."""

    positions: Intervals = field(default_factory=Intervals)
    """Positions in the slot's schedule."""
    files: list[MadeFile] = field(default_factory=list)
    """Files that hold them, without compacted and expired ones."""

    def add(self, positions: Iterable[int | None]) -> int:
        """Add positions, except those of other schedules (None); return the number of new ones."""
        new = {position for position in positions if position is not None and position not in self.positions}
        for position in new:
            self.positions.add(position)
        return len(new)


def new_slot() -> int:
    """Return a random slot for a worker without one, far above the slots that `ludic run` assigns."""
    return MAX_SLOT // 2 + secrets.randbelow(MAX_SLOT // 2)


def new_worker_id(slot: int) -> str:
    """Return an id that is unique to one life of one process. It begins with the slot, so later lives find files."""
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
    return f"{slot_prefix(slot)}{host}-{os.getpid()}-{time.time_ns():x}"


def read_earlier_lives(root: Root, slot: int) -> CommittedGroups:
    """Read which groups this slot committed, from its own files, compacted files and tombstones of expired files.

    Broken files count as not committed, expired files as committed. Rows of another run, whose worker outlived a root
    that was created again, count as not committed, since they are never trained on.
    """
    schedule = Schedule.of_slot(run_of(root), slot)
    lives = CommittedGroups()
    for file, numbers in _stored_groups(root, slot):
        num_new = lives.add(map(schedule.position, numbers))
        if not file.is_compacted:
            lives.files.append(MadeFile(file.worker_id, file.sequence, file.version, num_new))
    # Read tombstones last: they include files that expire while the others are read.
    lives.add(map(schedule.position, _expired_groups(root)))
    return lives


def _stored_groups(root: Root, slot: int) -> Iterator[tuple[RolloutFile, list[int]]]:
    """Yield each file with groups of the slot, and the numbers of these groups."""
    files = [file for file in list_files(root) if file.is_compacted or slot_of(file.worker_id) == slot]
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        yield from zip(files, pool.map(partial(_group_numbers, root, slot), files), strict=True)


def _expired_groups(root: Root) -> Iterator[int]:
    """Yield the number of each expired group, of all slots."""
    for tombstone in read_tombstones(root):
        for partition in tombstone.partitions:
            if partition.folder == "rollouts":
                yield from (number for pair in partition.groups for number in range(*pair))


def _group_numbers(root: Root, slot: int, file: RolloutFile) -> list[int]:
    """Return the group numbers of a slot's rows in a file, or in the file that replaced it since the listing."""
    try:
        if all(slot_of(source.worker_id) != slot for source in read_sources(root, file)):
            return []
        table = read_columns(root, file.name, ["run_id", "worker_id", "request_index", "group_size"])
    except SchemaError:
        return []
    except FileNotFoundError:
        replacement = find_replacement(root, file)
        return _group_numbers(root, slot, replacement) if replacement else []
    is_own = pc.fill_null(pc.equal(table["run_id"], root.run_id), True)
    mine = table.filter(pc.and_(is_own, pc.starts_with(table["worker_id"], slot_prefix(slot))))
    return np.unique(mine["request_index"].to_numpy() // mine["group_size"].to_numpy()).tolist()
