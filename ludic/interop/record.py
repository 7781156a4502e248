"""One record of a peer, read through a mapping: typed values under ludic's names.

Pure. Raises RefusedRecordError, whose text gives the field, the value that was found, and the type that was expected.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ludic.errors import SchemaError
from ludic.interop.mapping import ANY_NUMBER, FormatMapping

SMALL = 200
"""Maximum characters of a value that is kept as metadata though the mapping does not name it."""


class RefusedRecordError(SchemaError):
    """A record can't become a rollout. It is counted, and reported with its line and this reason."""


@dataclass(frozen=True)
class Record:
    """Gives a record's values by ludic's names; a null counts as absent."""

    values: Mapping[str, Any]
    """Values as in the file, and the fields of its path."""
    mapping: FormatMapping
    own_columns: Mapping[str, str]
    """Types of the run's own columns, by name."""

    @classmethod
    def of(
        cls, values: Mapping[str, Any], mapping: FormatMapping, path: Mapping[str, str], own_columns: Mapping[str, str]
    ) -> "Record":
        """Make a record: parse fields that are JSON text, and add fields of the path that the record lacks."""
        parsed = {name: _parse(name, value) if name in mapping.json else value for name, value in values.items()}
        return cls({**path, **parsed}, mapping, own_columns)

    def get(self, field: str) -> Any:
        """Return the first value present among the mapping's names for a field, else its default, else None."""
        for place in self.mapping.fields.get(field, ()):
            value = _look_up(self.values, place)
            if value is not None:
                return value
        return self.mapping.defaults.get(field)

    def text(self, field: str) -> str | None:
        value = self.get(field)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, bool | int | float):
            return str(value)
        raise self._misfit(field, value, "text")

    def number(self, field: str) -> float | None:
        value = self.get(field)
        if value is None:
            return None
        if isinstance(value, bool | int | float) and math.isfinite(value):
            return float(value)
        raise self._misfit(field, value, "a finite number")

    def integer(self, field: str) -> int | None:
        """Return an integer; text of digits is converted, since fields of a path are text."""
        value = self.get(field)
        if value is None:
            return None
        if isinstance(value, str) and value.isdecimal():
            return int(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer():
            return int(value)
        raise self._misfit(field, value, "a whole number")

    def array(self, field: str, dtype: type) -> np.ndarray | None:
        """Return an array of shape (length,). dtype: int32, float32 or bool."""
        value = self.get(field)
        if value is None:
            return None
        try:
            return to_array(value, dtype)
        except ValueError:
            raise self._misfit(field, value, f"a list of {np.dtype(dtype)}") from None

    def components(self) -> dict[str, float]:
        """Return reward_components: an object's numbers, or every number without another use. Only finite numbers."""
        if self._takes_any_number:
            found = {name: value for name, value in self.values.items() if name not in self._named}
        else:
            found = self.get("reward_components") or {}
            if not isinstance(found, Mapping):
                raise self._misfit("reward_components", found, "an object of numbers")
        return {name: float(value) for name, value in found.items() if _is_number(value) and math.isfinite(value)}

    def reward(self, components: Mapping[str, float]) -> float | None:
        """Return episode_reward, else the weighted sum of the components.

        Returns None if episode_reward is null, or if the record has neither.
        """
        given = self.number("episode_reward")
        says_null = any(place in self.values for place in self.mapping.fields.get("episode_reward", ()))
        if given is not None or says_null or not components:
            return given
        weights = self.mapping.reward_weights or dict.fromkeys(components, 1.0)
        return sum(weight * components[name] for name, weight in weights.items() if name in components)

    def extra(self) -> dict[str, Any]:
        """Return values of the run's own columns: mapped, or of the same name in the record."""
        found = {name: self.get(name) for name in self.mapping.fields if name.startswith("x_")}
        found |= {name: self.values[name] for name in self.own_columns if name in self.values}
        return {name: value for name, value in found.items() if value is not None}

    def leftovers(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return metadata, and the names of fields that are too large for metadata.

        Metadata holds fields that the mapping sends there, and small fields that it does not name.
        """
        mapped: dict[str, Any] = {}
        for place in self.mapping.fields.get("metadata", ()):
            value = _look_up(self.values, place)
            mapped |= value if isinstance(value, Mapping) else {place: value}
        unnamed = {name: value for name, value in self.values.items() if name not in self._named}
        if self._takes_any_number:
            unnamed = {name: value for name, value in unnamed.items() if not _is_number(value)}
        kept, not_kept = keep_small(unnamed)
        return as_texts(mapped) | kept, not_kept

    @property
    def _takes_any_number(self) -> bool:
        return self.mapping.fields.get("reward_components") == (ANY_NUMBER,)

    @cached_property
    def _named(self) -> frozenset[str]:
        of_path = self.mapping.path.groupindex.keys() if self.mapping.path else ()
        return self.mapping.known | frozenset(of_path) | frozenset(self.own_columns)

    def _misfit(self, field: str, value: Any, wanted: str) -> RefusedRecordError:
        shown = repr(value)
        places = " or ".join(self.mapping.fields.get(field, (field,)))
        return RefusedRecordError(f"{places} is {shown if len(shown) <= 60 else shown[:57] + '...'}, wanted {wanted}")


def to_array(values: Any, dtype: type) -> np.ndarray:
    """Convert a list to an array of shape (length,). Raises ValueError if its values do not fit the dtype.

    dtype: int32, float32 or bool.
    """
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in _KINDS[dtype]):
        raise ValueError("no list of numbers")
    converted: np.ndarray = array.astype(dtype)
    if dtype is np.int32 and not np.array_equal(converted, array):
        raise ValueError("beyond int32")
    return converted


_KINDS = {np.int32: "iu", np.float32: "iuf", np.bool_: "biu"}
"""Kinds of NumPy types that may be converted to each dtype."""


def _parse(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise RefusedRecordError(f"{name} is no JSON text: {error}") from error


def _look_up(values: Mapping[str, Any], place: str) -> Any:
    """Return the value of a field or of a dotted path; None if there is no such field."""
    if place in values:
        return values[place]
    value: Any = values
    for name in place.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as text: text unchanged, other values as JSON, nulls left out."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for name, value in values.items()
        if value is not None
    }


def keep_small(values: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return values that are small enough for metadata, as text, and the names of the others, without nulls."""
    texts = as_texts(values)
    kept = {name: text for name, text in texts.items() if len(text) <= SMALL}
    return kept, tuple(name for name in texts if name not in kept)
