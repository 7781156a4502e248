"""Convert arrays of rows to Arrow columns and back, bit for bit and without a Python loop over tokens. No I/O.

Raises TooLargeError if the arrays of many rows do not fit into one Arrow array.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise, starmap
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ludic.records.columns import ArrayColumn, Ragged

MAX_ELEMENTS = 2**31 - 1
"""Maximum elements of an Arrow list array and bytes of a string array, whose offsets are int32."""


class TooLargeError(Exception):
    """Values do not fit in one Arrow array; the rows are then converted in smaller parts."""


def check_size(count: int, column: str, unit: str) -> None:
    """Raise TooLargeError if a column can't hold this number of units."""
    if count > MAX_ELEMENTS:
        raise TooLargeError(f"{column} holds {count} {unit}, at most {MAX_ELEMENTS} fit in a row")


# --- To Arrow ------------------------------------------------------------------------------------------


def to_arrow(column: ArrayColumn, arrays: Sequence[Any], numbers: pa.Array | None = None) -> pa.Array:
    """Return the arrays of rows, None for an absent one, as an Arrow array of the column's type.

    numbers: the result of `join` for these arrays, if known; then no array may be absent.
    """
    type_ = column.arrow_type
    if column.num_dimensions == 0:
        return pa.array([None if each is None else column.dtype.type(each) for each in arrays], type_)
    present = [array for array in arrays if array is not None]
    if not present:
        return pa.nulls(len(arrays), type_)
    # Offsets first, so that an array with too many numbers for them is refused before the numbers are joined.
    outer = _offsets([0 if array is None else len(array) for array in arrays], column.name)
    levels, types = [], [type_]
    for level in range(1, column.num_dimensions):
        levels.append(_offsets(_list_lengths(column, present, level), column.name))
        types.append(types[-1].value_type)
    inner = join(column, present) if numbers is None else numbers
    for offsets, list_type in zip(reversed(levels), reversed(types[1:]), strict=True):
        inner = pa.ListArray.from_arrays(offsets, inner, type=list_type)
    is_absent = None
    if len(present) < len(arrays):
        is_absent = pa.array([array is None for array in arrays], pa.bool_())
    return pa.ListArray.from_arrays(outer, inner, type=type_, mask=is_absent)


def _list_lengths(column: ArrayColumn, arrays: Sequence[Any], level: int) -> np.ndarray:
    """Return the lengths of all lists at a level below the outermost; level: 1 for the lists of tokens."""
    if column.ragged:
        return np.concatenate([np.zeros(0, np.int64), *(array.counts for array in arrays)])
    counts = [int(np.prod(array.shape[:level])) for array in arrays]
    return np.repeat(np.array([array.shape[level] for array in arrays], np.int64), counts)


def join(column: ArrayColumn, arrays: Sequence[Any]) -> pa.Array:
    """Concatenate the numbers of arrays, as they are in the innermost lists of the column."""
    parts = [array.values if column.ragged else array.reshape(-1) for array in arrays]
    type_ = pa.from_numpy_dtype(column.dtype)
    if pa.types.is_boolean(type_):
        return pa.array(np.concatenate([np.empty(0, np.bool_), *parts]), type_)
    # Allocate from Arrow's pool, which keeps its pages; fresh pages of the system cost ten times as much as the copy.
    length = sum(map(len, parts))
    buffer = pa.allocate_buffer(length * column.dtype.itemsize)
    if length:
        np.concatenate(parts, out=np.frombuffer(buffer, column.dtype), casting="equiv")
    return pa.Array.from_buffers(type_, length, [None, buffer])


def _offsets(lengths: Iterable[int] | np.ndarray, column: str) -> pa.Array:
    """Return (rows + 1,) int32: the start of each row's elements, and the end of the last row's."""
    ends = np.append(0, np.cumsum(np.asarray(lengths, np.int64)))
    check_size(int(ends[-1]), column, "elements")
    return pa.array(ends.astype(np.int32))


# --- From Arrow ----------------------------------------------------------------------------------------

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def plain_rows(table: pa.Table, *, maps_as_dicts: bool = False) -> list[dict[str, Any]]:
    """Return what `table.to_pylist()` does, without pandas. maps_as_dicts: maps are dicts, not lists of pairs.

    For a time with a zone, pyarrow imports pandas if it is installed, which takes half a second.
    """
    columns = [_plain_values(column, maps_as_dicts) for column in table.columns]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _plain_values(column: pa.ChunkedArray, maps_as_dicts: bool) -> list[Any]:
    type_ = column.type
    if pa.types.is_timestamp(type_) and type_.unit == "us" and type_.tz is not None:
        with suppress(ZoneInfoNotFoundError, ValueError):  # an offset such as +01:00, which is no name
            zone = ZoneInfo(type_.tz)
            return [
                None if count is None else (_EPOCH + timedelta(microseconds=count)).astimezone(zone)
                for count in column.cast(pa.int64()).to_pylist()
            ]
    return column.to_pylist(maps_as_pydicts="lossy" if maps_as_dicts else None)


def values_of(column: ArrayColumn, array: pa.ChunkedArray) -> list[Any]:
    """Return each row's array, a read-only view of the column's buffers (of bits: unpacked); None for a null.

    An array of several dimensions that holds a null, or lists that are not all of one length, has no elements.
    """
    # Chunk by chunk: joining chunks would copy, and could overflow their offsets.
    if column.num_dimensions == 0:
        return array.to_pylist()
    read = _ragged if column.ragged else _flat if column.num_dimensions == 1 else _regular
    return [value for chunk in array.chunks for value in read(chunk)]


def _flat(array: pa.ListArray) -> list[np.ndarray | None]:
    flat = array.flatten().to_numpy(zero_copy_only=not pa.types.is_boolean(array.type.value_type))
    return [None if part is None else flat[part] for part in _slices(array)]


def _ragged(array: pa.ListArray) -> list[Ragged | None]:
    inner = array.flatten()
    flat, bounds = inner.values.to_numpy(), inner.offsets.to_numpy()
    rows: list[Ragged | None] = []
    for part in _slices(array):
        if part is None:
            rows.append(None)
        else:
            of_row = bounds[part.start : part.stop + 1]
            rows.append(Ragged(flat[of_row[0] : of_row[-1]], of_row - of_row[0]))
    return rows


def _regular(array: pa.ListArray) -> list[np.ndarray | None]:
    inner, levels = array.flatten(), list[np.ndarray]()
    while pa.types.is_list(inner.type):
        levels.append(inner.offsets.to_numpy())
        inner = inner.values
    nulls = np.zeros(0, np.int64)
    if inner.null_count:
        nulls = np.flatnonzero(inner.is_null().to_numpy(zero_copy_only=False))
        inner = pc.fill_null(inner, pa.scalar(0, pa.int8()).cast(inner.type))
    flat = inner.to_numpy(zero_copy_only=not pa.types.is_boolean(inner.type))
    return [None if part is None else _regular_row(flat, nulls, levels, part) for part in _slices(array)]


def _regular_row(flat: np.ndarray, nulls: np.ndarray, levels: Sequence[np.ndarray], part: slice) -> np.ndarray:
    """Return one row. nulls: indexes into flat. levels: offsets of the lists at each level. part: its tokens' lists."""
    start, stop, shape = part.start, part.stop, [part.stop - part.start]
    for offsets in levels:
        of_row = offsets[start : stop + 1]
        lengths = np.diff(of_row)
        if not len(lengths) or (lengths != lengths[0]).any():
            return np.zeros([0] * (len(levels) + 1), flat.dtype)
        start, stop = int(of_row[0]), int(of_row[-1])
        shape.append(int(lengths[0]))
    if len(nulls) and np.searchsorted(nulls, start) < np.searchsorted(nulls, stop):
        return np.zeros([0] * (len(levels) + 1), flat.dtype)
    return flat[start:stop].reshape(shape)


def _slices(array: pa.ListArray) -> list[slice | None]:
    """Return each row's slice of array.flatten(), which skips elements hidden by nulls and slices; None for a null."""
    if array.null_count == len(array):
        return [None] * len(array)
    if not array.null_count:
        offsets = array.offsets.to_numpy()
        return list(starmap(slice, pairwise((offsets - offsets[0]).tolist())))
    lengths = pc.list_value_length(array).fill_null(0).to_numpy()
    ends = np.cumsum(lengths, dtype=np.int64)
    parts = map(slice, (ends - lengths).tolist(), ends.tolist())
    return [part if valid else None for part, valid in zip(parts, array.is_valid().to_pylist(), strict=True)]
