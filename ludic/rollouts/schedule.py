"""Which groups a worker makes, in which order: a function of run.json and the worker's slot alone.

Groups are numbered over the whole run. The worker in slot s of num_workers makes the numbers
s, s + num_workers, s + 2 num_workers, ...; a worker in a slot beyond that has numbers of its own,
so that any number of workers may join. request_index = group number x group_size + group_index.
"""

import os
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ludic.errors import ConfigError, SchemaError
from ludic.store import Root, RunConfig, list_files, read_columns
from ludic.store.cursor import Intervals

MAX_SLOT = 2**20
_GROUPS_A_SLOT = 2**32


@dataclass(frozen=True, slots=True)
class Schedule:
    """Group numbers start, start + stride, start + 2 stride, ..., 2**32 of them."""

    start: int
    stride: int

    @classmethod
    def of_slot(cls, run: RunConfig, slot: int) -> "Schedule":
        """Raises ConfigError for a slot out of range."""
        if not 0 <= slot < MAX_SLOT:
            raise ConfigError(f"slot is {slot}, wanted 0 to {MAX_SLOT - 1}")
        return cls(slot, run.num_workers) if slot < run.num_workers else cls((slot + 1) * _GROUPS_A_SLOT, 1)

    def position(self, group_number: int) -> int | None:
        """Place in this schedule; None for a number of another."""
        place, rest = divmod(group_number - self.start, self.stride)
        return place if 0 <= place < _GROUPS_A_SLOT and rest == 0 else None

    def missing(self, committed: Intervals) -> Iterator[int]:
        """Group numbers that are not committed, lowest first. committed: their places in this schedule."""
        for place in range(_GROUPS_A_SLOT):
            if place not in committed:
                yield self.start + place * self.stride


@dataclass(frozen=True, slots=True)
class EarlierLives:
    """What earlier lives of a slot committed."""

    positions: Intervals = field(default_factory=Intervals)
    """Places in the slot's schedule."""
    groups_by_version: Counter[int] = field(default_factory=Counter)


def new_slot() -> int:
    """A slot for a worker that was given none: far from those that `ludic run` deals out."""
    return MAX_SLOT // 2 + secrets.randbelow(MAX_SLOT // 2)


def new_worker_id(slot: int) -> str:
    """Unique to one life of one process; begins with the slot, so that a later life finds its files by name."""
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
    return f"{slot_prefix(slot)}{host}-{os.getpid()}-{time.time_ns():x}"


def slot_prefix(slot: int) -> str:
    return f"w{slot}-"


def read_earlier_lives(root: Root, slot: int) -> EarlierLives:
    """Read the request_index of everything that this slot committed; broken files count as never committed."""
    schedule = Schedule.of_slot(root.run, slot)
    lives = EarlierLives()
    for file in list_files(root):
        mine = file.worker_id.startswith(slot_prefix(slot))
        for number in _group_numbers(root, file.name) if mine else ():
            place = schedule.position(number)
            if place is not None:
                lives.positions.add(place)
                lives.groups_by_version[file.version] += 1
    return lives


def _group_numbers(root: Root, name: str) -> list[int]:
    try:
        table = read_columns(root, name, ["request_index", "group_size"])
    except (SchemaError, FileNotFoundError):
        return []
    numbers = table.column("request_index").to_numpy() // table.column("group_size").to_numpy()
    return np.unique(numbers).tolist()
