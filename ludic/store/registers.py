"""Registers: records that are numbered without gaps, so that N + 1 exists exactly if N is no longer the newest.

A record is put if absent under the next free number. So of several processes one gets a number, and one read by name
finds what is newer: a listing, which may lag, is only a hint. ludic deletes no record of a register.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ludic.store.catalogue import Records, Row
from ludic.store.json_files import encode_record

if TYPE_CHECKING:
    from ludic.store.filesystem import Storage

R = TypeVar("R")


class Register(Generic[R]):
    """The records of a row that has a first number."""

    def __init__(self, root: "Storage", row: Records[Any, R], *key: Any, beside: Row[Any] | None = None) -> None:
        """key: fields of the name before the number, such as a slot. beside: a row whose files take numbers, too."""
        assert row.first is not None, f"{row.kind} is no register"
        self._root, self._row, self._key, self._first = root, row, key, row.first
        self._rows = [row] if beside is None else [row, beside]

    def name(self, number: int) -> str:
        """Return the path below the root."""
        return self._row.name(self._row.fields._make([*self._key, number]))

    def read(self, number: int) -> R | None:
        """Return a record; None if the number is free. Raises SchemaError if the file is broken."""
        return self._row.read(self._root, *self._key, number)

    def newest(self) -> int:
        """Return the newest number; the one before the first if there is none. Raises SchemaError for a broken file."""
        number = self.newest_listed()
        while self.read(number + 1) is not None:
            number += 1
        return number

    def newest_record(self) -> R | None:
        """Return the newest record; None if there is none. Raises SchemaError for a broken file."""
        newest, number = None, max(self._first, self.newest_listed())
        while (record := self.read(number)) is not None:
            newest, number = record, number + 1
        return newest

    def newest_listed(self) -> int:
        """Return the newest number that is listed; the one before the first if none is. There may be newer ones."""
        names = self._root.list(self._row.below(**dict(zip(self._row.fields._fields, self._key, strict=False))))
        numbers: list[int] = [found[-1] for row in self._rows for found in row.parsed(names)]
        return max(numbers, default=self._first - 1)

    def claim(self, make: Callable[[int], R], *, first: int) -> R:
        """Put the record that `make` makes of the first free number from `first` on, and return it."""
        number = first
        while (record := self.try_claim(number, make)) is None:
            number += 1
        return record

    def try_claim(self, number: int, make: Callable[[int], R]) -> R | None:
        """Put the record of a number, and return it; None if another process has the number."""
        record = make(number)
        return record if self._root.put_if_absent(self.name(number), encode_record(record)) else None
