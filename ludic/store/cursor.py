"""A reader's cursor: the sources, groups of partly used sources, and requests that a trainer has consumed.

A source is the rows that a worker committed as one file, whatever file holds them now. It is named by worker_id and
a sequence number that the worker counts up, so consumed sources are a set of intervals for each worker, however many
there are. A request is named by its group's number in the schedule. Numbers are dense, so a set of them is a few
intervals, too. The cursor is stored in the checkpoint.

A trainer with a window of versions never reads older versions again, so its cursor forgets their sources. If a later
trainer reads them, `ludic.store.recall` finds in the ledger what was consumed.
"""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any


class Intervals:
    """A set of integers of at least 0, held as disjoint half-open intervals [start, stop) in order."""

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in pairs:
            self._starts.append(start)
            self._stops.append(stop)

    def __contains__(self, number: int) -> bool:
        index = bisect.bisect_right(self._starts, number) - 1
        return index >= 0 and number < self._stops[index]

    def __len__(self) -> int:
        """Number of integers, not of intervals."""
        return sum(self._stops) - sum(self._starts)

    def add(self, number: int) -> None:
        """Add a number, and join the intervals that it touches."""
        if number in self:
            return
        index = bisect.bisect_right(self._starts, number)
        joins_left = index > 0 and self._stops[index - 1] == number
        joins_right = index < len(self._starts) and self._starts[index] == number + 1
        if joins_left and joins_right:
            self._stops[index - 1] = self._stops.pop(index)
            del self._starts[index]
        elif joins_left:
            self._stops[index - 1] = number + 1
        elif joins_right:
            self._starts[index] = number
        else:
            self._starts.insert(index, number)
            self._stops.insert(index, number + 1)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._stops, strict=True))

    @property
    def distances(self) -> list[int]:
        """The bounds of all intervals in order, each as the distance from the bound before: a quarter of the text."""
        bounds = [bound for pair in zip(self._starts, self._stops, strict=True) for bound in pair]
        return [bound - before for before, bound in zip([0, *bounds], bounds, strict=False)]

    @classmethod
    def from_distances(cls, distances: Iterable[int]) -> "Intervals":
        bounds = list(accumulate(distances))
        return cls(zip(bounds[::2], bounds[1::2], strict=True))


class _Consumed:
    """Consumed sources, groups and requests of some versions."""

    def __init__(self) -> None:
        self.files: dict[str, Intervals] = {}
        """Sequences of sources, by worker_id."""
        self.groups: dict[tuple[str, int], set[str]] = {}
        """group_ids of partly used sources."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "files": {worker: intervals.pairs for worker, intervals in sorted(self.files.items())},
            "groups": [[worker, sequence, sorted(ids)] for (worker, sequence), ids in sorted(self.groups.items())],
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "_Consumed":
        consumed = cls()
        consumed.files = {worker: Intervals(map(tuple, pairs)) for worker, pairs in state["files"].items()}
        consumed.groups = {(worker, sequence): set(ids) for worker, sequence, ids in state["groups"]}
        return consumed


class Cursor:
    """Set of consumed sources (as intervals by worker), groups of partly used sources, and requests."""

    def __init__(self) -> None:
        self._consumed: dict[int | None, _Consumed] = {None: _Consumed()}
        """Consumed data by version; under None if the version is unknown or the trainer has no window of versions."""
        self.first_version = 0
        """First version that the cursor knows; see `forget_before`."""
        self.requests = Intervals()
        """Group numbers of the schedule whose group was consumed; no other group may use them."""
        self.in_use: dict[int, str] = {}
        """Group numbers that a step considered, with the group_id of their group, which is to be delivered again."""
        self.knows_requests = True
        """False for the cursor of an older ludic, until `recall_requests` has found the requests."""

    def has_source(self, worker_id: str, sequence: int) -> bool:
        """Return whether every group of the source is consumed."""
        return any(sequence in consumed.files.get(worker_id, _EMPTY) for consumed in self._consumed.values())

    def has_group(self, worker_id: str, sequence: int, group_id: str) -> bool:
        """Return whether this group of the source is consumed."""
        source = worker_id, sequence
        is_used = any(group_id in consumed.groups.get(source, ()) for consumed in self._consumed.values())
        return is_used or self.has_source(*source)

    def consume(
        self, worker_id: str, sequence: int, group_ids: Iterable[str], *, whole: bool, version: int | None = None
    ) -> None:
        """Add groups of one source. With `whole`, no group of it is left, and it becomes a number in an interval.

        version: of the source's partition, for a cursor that is to forget it; None keeps it forever.
        """
        if version is not None and version < self.first_version:
            return
        into = self._consumed.setdefault(version, _Consumed())
        if whole:
            for consumed in self._consumed.values():
                consumed.groups.pop((worker_id, sequence), None)
            into.files.setdefault(worker_id, Intervals()).add(sequence)
        else:
            into.groups.setdefault((worker_id, sequence), set()).update(group_ids)

    def forget_before(self, version: int) -> None:
        """Forget the sources of older versions, which must never be delivered again from this cursor."""
        self.first_version = max(self.first_version, version)
        self._consumed = {
            key: consumed for key, consumed in self._consumed.items() if key is None or key >= self.first_version
        }

    def use_request(self, number: int, group_id: str) -> None:
        """Assign a request to a group; does nothing if the request is consumed or has a group already."""
        if number not in self.requests:
            self.in_use.setdefault(number, group_id)

    def finish_request(self, number: int) -> None:
        """Mark a request as consumed, so that no other group may use it."""
        self.in_use.pop(number, None)
        self.requests.add(number)

    def to_dict(self) -> dict[str, Any]:
        """Return the cursor as values for JSON."""
        state = self._consumed[None].to_dict()
        versions = {str(key): consumed.to_dict() for key, consumed in self._consumed.items() if key is not None}
        if versions or self.first_version:
            state |= {"versions": versions, "first_version": self.first_version}
        if self.knows_requests:
            state |= {"requests": self.requests.distances, "in_use": sorted(self.in_use.items())}
        return state

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "Cursor":
        """Load a cursor, also one of an older ludic, which has no versions, and requests as pairs or none."""
        cursor = cls()
        versions = state.get("versions", {})
        cursor._consumed = {int(version): _Consumed.from_dict(consumed) for version, consumed in versions.items()}
        cursor._consumed[None] = _Consumed.from_dict(state)
        cursor.first_version = state.get("first_version", 0)
        cursor.knows_requests = "requests" in state
        requests = state.get("requests", [])
        is_older = any(isinstance(each, Sequence) for each in requests[:1])
        cursor.requests = Intervals(map(tuple, requests)) if is_older else Intervals.from_distances(requests)
        cursor.in_use = dict(state.get("in_use", ()))
        return cursor


_EMPTY = Intervals()
