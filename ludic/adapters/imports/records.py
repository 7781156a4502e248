"""Read the records of a file of another program, in any container of ludic.base.data_files, and their fields with
types.

Reads a local path or any fsspec URL. Raises ConfigError if the file can't be read, RefusedRecordError if a field can't
be used: its text gives the field, the value that was found, and the type that was wanted.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import fsspec
import msgspec
import numpy as np
import pyarrow as pa

from ludic.base import read_rows, table_rows
from ludic.errors import ConfigError, RefusedRecordError
from ludic.records import (
    ArrayColumn,
    Columns,
    FinishReason,
    Purpose,
    Ragged,
    WeightSpan,
    add_rewards,
    array_columns,
    refusal,
)
from ludic.settings import check_url

NumberedRecords = Iterator[tuple[int, dict[str, Any] | str]]
"""Records with their lines or numbers, from 1; a text is the reason for which one can't be read."""


def read_records(url: str) -> NumberedRecords:
    """Yield each record of a data file, with its line or, of an array or a table, its number from 1."""
    with open_file(url) as file:
        for found in read_rows(file, url, to_rows=_to_rows):
            yield found.number, found.value


def _to_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    return table_rows(batch, maps_as_pydicts="lossy")


def open_file(url: str) -> Any:
    """Open a file for reading. Raises ConfigError if that fails, or if its URL, which is stored, holds a secret."""
    check_url(url, "the file's URL")
    try:
        return fsspec.open(url, "rb").open()
    except (OSError, ValueError, ImportError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{url} can't be read: {reason}") from error


@dataclass(frozen=True, slots=True)
class FileState:
    """What a filesystem says of a file, which changes with its content."""

    size_bytes: int | None
    modified: str
    """Time of its last change, or its ETag; empty if the filesystem does not say."""

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> "FileState":
        """info: what fsspec's info and find give."""
        found = (info.get(name) for name in ("ETag", "etag", "mtime", "LastModified", "last_modified", "created"))
        return cls(info.get("size"), str(next((each for each in found if each is not None), "")))


UNKNOWN = FileState(None, "")


def read_state(url: str) -> FileState:
    """Return the state of a file; UNKNOWN if its filesystem has none, or the file can't be read."""
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
        filesystem.invalidate_cache()
        return FileState.of(filesystem.info(path))
    except (OSError, ValueError, ImportError, NotImplementedError):
        return UNKNOWN


@dataclass(frozen=True, slots=True)
class ImportRecord:
    """A record's fields; a null counts as absent. Fields that a format does not ask for become metadata.

    A dot in a name leads into a nested object. Several names are tried in order; if none is present, the value is None.
    """

    values: Mapping[str, Any]
    """Values as in the file, and the fields of its path."""
    used: set[str] = field(default_factory=set)
    """Names of fields that do not become metadata; add redundant ones."""

    def __getitem__(self, name: str) -> Any:
        """Return a value. Raises RefusedRecordError if it is absent."""
        return self.need(name)[0]

    def need(self, *names: str) -> list[Any]:
        """Return the values of all names. Raises RefusedRecordError if one is absent."""
        found = {name: self.get(name) for name in names}
        absent = [name for name, value in found.items() if value is None]
        if absent:
            raise RefusedRecordError(f"has no {' and no '.join(absent)}")
        return list(found.values())

    def get(self, *names: str) -> Any:
        for name in names:
            self.used.update((name, name.partition(".")[0]))
        for name in names:
            if (value := _look_up(self.values, name)) is not None:
                return value
        return None

    def text(self, *names: str) -> str | None:
        return self._get(names, _to_text, "text")

    def number(self, *names: str) -> float | None:
        return self._get(names, _to_number, "a finite number")

    def integer(self, *names: str) -> int | None:
        """Return an integer; text of digits is converted, since fields of a path are text."""
        return self._get(names, _to_integer, "a whole number")

    def array(self, name: str, dtype: Any) -> np.ndarray | None:
        """Return an array of shape (length,). dtype: of integers, floats or bool."""
        return self._get([name], lambda value: to_array(value, dtype), f"a list of {np.dtype(dtype)}")

    def columns(self) -> Columns:
        """Return the arrays of a row that it has, by the name of their column."""
        found = {
            column.name: self._get([column.name], partial(to_values, column), _wanted(column))
            for column in array_columns().values()
        }
        return {name: values for name, values in found.items() if values is not None}

    def object(self, name: str) -> dict[str, Any]:
        """Return an object, which may be JSON text; empty if it is absent."""
        return self._get([name], _to_object, "an object") or {}

    def rest(self) -> dict[str, Any]:
        """Return the fields that were not asked for, without nulls."""
        return {name: value for name, value in self.values.items() if name not in self.used and value is not None}

    def _get(self, names: Iterable[str], convert: Callable[[Any], Any], wanted: str) -> Any:
        value = self.get(*names)
        try:
            return None if value is None else convert(value if convert is _to_text else _from_text(value))
        except ValueError:
            raise refusal(" or ".join(names), value, wanted) from None


def _from_text(value: Any) -> Any:
    """Return the value of a JSON text, as which CSV has numbers and lists; other values as they are."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def to_array(values: Any, dtype: Any, num_dimensions: int = 1) -> np.ndarray:
    """Convert a list, or lists of equal lengths, to an array. Raises ValueError if its values do not fit the dtype.

    dtype: of integers, floats or bool.
    """
    array, wanted = np.asarray(values), np.dtype(dtype)  # raises ValueError if lists are of unequal lengths
    if array.ndim != num_dimensions or (array.size and array.dtype.kind not in _KINDS[wanted.kind]):
        raise ValueError("no list of numbers")
    with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite, and the row is refused for it
        converted: np.ndarray = array.astype(wanted)
    if wanted.kind == "i" and not np.array_equal(converted, array):
        raise ValueError(f"beyond {wanted}")
    return converted


_KINDS = {"i": "iu", "f": "iuf", "b": "biu"}
"""Kinds of NumPy types that may be converted to each kind."""


def to_values(column: ArrayColumn, values: Any) -> Any:
    """Convert what a file has to the values of a column. Raises ValueError if it does not fit."""
    if not column.ragged:
        return to_array(values, column.dtype, column.num_dimensions)[()]
    if not isinstance(values, list):
        raise ValueError("no list of lists")
    return Ragged.of((to_array(each, column.dtype) for each in values), column.dtype)


def _wanted(column: ArrayColumn) -> str:
    """Describe the values of a column in a file, for a message."""
    if not column.num_dimensions:
        return f"a number that is {column.dtype}"
    is_even = column.num_dimensions > 1 and not column.ragged
    lists = "a list of " + "lists of " * (column.num_dimensions - 1)
    return f"{lists}{column.dtype}{', of equal lengths' * is_even}"


def finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are finite numbers."""
    return {name: float(value) for name, value in values.items() if is_number(value) and math.isfinite(value)}


def is_number(value: Any) -> bool:
    """Return whether a value is a number, which a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as text: text unchanged, other values as JSON, nulls left out."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for name, value in values.items()
        if value is not None
    }


def _look_up(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field or of a dotted path; None if there is no such field."""
    if name in values:
        return values[name]
    if "." not in name:
        return None
    value: Any = values
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _to_text(value: Any) -> str:
    if not isinstance(value, str | bool | int | float):
        raise ValueError
    return str(value)


def _to_number(value: Any) -> float:
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _to_integer(value: Any) -> int:
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    if not is_number(value) or not float(value).is_integer():
        raise ValueError
    return int(value)


def _to_object(value: Any) -> dict[str, Any]:
    parsed = json.loads(value) if isinstance(value, str) else value
    if not isinstance(parsed, Mapping | None):
        raise ValueError
    return dict(parsed or {})


# --- Columns under ludic's own names ----------------------------------------------------------------------


FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "tool_calls": "stop", "length": "length"}
"""finish_reason of the rollouts table, by OpenAI's name."""

_TEXTS = (
    "env_name",
    "env_example_id",
    "agent_id",
    "model",
    "engine",
    "capture",
    "wanted",
    "truncation_reason",
    "error",
)
_INTEGERS = ("policy_version", "policy_version_last", "top_k", "max_tokens", "seed")


def own_columns(record: ImportRecord) -> dict[str, Any]:
    """Return the columns of an episode in a record that has them under the names of the rollouts table.

    Without episode_reward it is the sum of reward_components. A `correct` that is no bool is the user's own, and kept
    as metadata.
    """
    components, reward = finite_numbers(record.object("reward_components")), record.number("episode_reward")
    if "episode_reward" not in record.values and components:
        reward = add_rewards(components.values())
    correct = record.values.get("correct")
    if isinstance(correct, bool):
        record.used.add("correct")
    return {
        **{name: record.text(name) for name in _TEXTS},
        **{name: record.integer(name) for name in _INTEGERS},
        **{name: record.number(name) for name in ("temperature", "top_p")},
        "purpose": purpose_of(record.text("purpose")),
        "finish_reason": finish_reason_of(record.text("finish_reason")),
        "episode_reward": reward,
        "reward_components": components,
        "correct": correct if isinstance(correct, bool) else None,
        "weight_versions": _weight_versions(record),
        "example_columns": _example_columns(record),
    }


def purpose_of(text: str | None) -> Purpose:
    return "train" if text in (None, "", "train") else "eval"


def finish_reason_of(text: str | None) -> FinishReason | None:
    if text is not None and (not isinstance(text, str) or text not in FINISH_REASONS):
        raise refusal("finish_reason", text, ", ".join(FINISH_REASONS))
    return FINISH_REASONS.get(text or "")


def _example_columns(record: ImportRecord) -> Any:
    """Return columns of the data set: an object, or its JSON text, as ludic exports it."""
    columns = record.get("example_columns")
    if columns is None or isinstance(columns, dict | str):
        return columns
    raise refusal("example_columns", columns, "an object, or its JSON text")


def _weight_versions(record: ImportRecord) -> tuple[WeightSpan, ...] | None:
    spans = record.get("weight_versions")
    try:
        return msgspec.convert(spans, tuple[WeightSpan, ...] | None)
    except msgspec.ValidationError:
        raise refusal("weight_versions", spans, "a list of objects with version, start and end") from None
