"""A reader's cursor: the sources, groups of partly used sources, and requests that a trainer has consumed.

A source is the rows that a worker committed as one file, whatever file holds them now. It is named by worker_id and
a sequence number that the worker counts up, so consumed sources are a set of intervals for each worker, however many
there are. A request is named by its group's number in the schedule. Numbers are dense, so a set of them is a few
intervals, too. The cursor is stored in the checkpoint.
"""

import bisect
from collections.abc import Iterable
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
        place = bisect.bisect_right(self._starts, number) - 1
        return place >= 0 and number < self._stops[place]

    def __len__(self) -> int:
        """Number of integers, not of intervals."""
        return sum(self._stops) - sum(self._starts)

    def add(self, number: int) -> None:
        """Add a number, and join the intervals that it touches."""
        if number in self:
            return
        place = bisect.bisect_right(self._starts, number)
        joins_left = place > 0 and self._stops[place - 1] == number
        joins_right = place < len(self._starts) and self._starts[place] == number + 1
        if joins_left and joins_right:
            self._stops[place - 1] = self._stops.pop(place)
            del self._starts[place]
        elif joins_left:
            self._stops[place - 1] = number + 1
        elif joins_right:
            self._starts[place] = number
        else:
            self._starts.insert(place, number)
            self._stops.insert(place, number + 1)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._stops, strict=True))


class Cursor:
    """Set of consumed sources (as intervals by worker), groups of partly used sources, and requests."""

    def __init__(self) -> None:
        self._files: dict[str, Intervals] = {}
        self._groups: dict[tuple[str, int], set[str]] = {}
        self.requests = Intervals()
        """Group numbers of the schedule whose group was consumed; no other group may use them."""
        self.in_use: dict[int, str] = {}
        """Group numbers that a step considered, with the group_id of their group, which is to be delivered again."""
        self.knows_requests = True
        """False for the cursor of an older ludic, until `recall_requests` has found the requests."""

    def has_source(self, worker_id: str, sequence: int) -> bool:
        """Return whether every group of the source is consumed."""
        return sequence in self._files.get(worker_id, _EMPTY)

    def has_group(self, worker_id: str, sequence: int, group_id: str) -> bool:
        """Return whether this group of the source is consumed."""
        used = self._groups.get((worker_id, sequence), ())
        return group_id in used or self.has_source(worker_id, sequence)

    def consume(self, worker_id: str, sequence: int, group_ids: Iterable[str], *, whole: bool) -> None:
        """Add groups of one source. With `whole`, no group of it is left, and it becomes a number in an interval."""
        if whole:
            self._groups.pop((worker_id, sequence), None)
            self._files.setdefault(worker_id, Intervals()).add(sequence)
        else:
            self._groups.setdefault((worker_id, sequence), set()).update(group_ids)

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
        state: dict[str, Any] = {
            "files": {worker: intervals.pairs for worker, intervals in sorted(self._files.items())},
            "groups": [[worker, sequence, sorted(ids)] for (worker, sequence), ids in sorted(self._groups.items())],
        }
        if self.knows_requests:
            state |= {"requests": self.requests.pairs, "in_use": sorted(self.in_use.items())}
        return state

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "Cursor":
        cursor = cls()
        cursor._files = {
            worker: Intervals((start, stop) for start, stop in pairs) for worker, pairs in state["files"].items()
        }
        cursor._groups = {(worker, sequence): set(ids) for worker, sequence, ids in state["groups"]}
        cursor.knows_requests = "requests" in state
        cursor.requests = Intervals((start, stop) for start, stop in state.get("requests", ()))
        cursor.in_use = dict(state.get("in_use", ()))
        return cursor


_EMPTY = Intervals()
