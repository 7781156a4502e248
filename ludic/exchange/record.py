"""One record of a peer, seen through a mapping: typed values under ludic's names.

Pure. Raises RefusedRecordError, whose text says which field holds what, and what was wanted.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ludic.errors import SchemaError
from ludic.exchange.mapping import ANY_NUMBER, FormatMapping

SMALL = 200
"""Characters of a value that the mapping does not name up to which it is kept as metadata."""


class RefusedRecordError(SchemaError):
    """A record that can't become a rollout. It is counted, with its place and this reason."""


@dataclass(frozen=True)
class Record:
    """Values by ludic's names; what is null counts as absent."""

    values: Mapping[str, Any]
    """As in the file, with the path's fields."""
    mapping: FormatMapping
    own_columns: Mapping[str, str]
    """The run's own columns, type by name."""

    @classmethod
    def of(
        cls, values: Mapping[str, Any], mapping: FormatMapping, path: Mapping[str, str], own_columns: Mapping[str, str]
    ) -> "Record":
        """Parse fields that are JSON text, and add those of the path that the record lacks."""
        parsed = {name: _parse(name, value) if name in mapping.json else value for name, value in values.items()}
        return cls({**path, **parsed}, mapping, own_columns)

    def get(self, field: str) -> Any:
        """The first that is there of the mapping's places, else its default, else None."""
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
        """Digits count as the number they say, since paths have nothing else."""
        value = self.get(field)
        if value is None:
            return None
        if isinstance(value, str) and value.isdecimal():
            return int(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer():
            return int(value)
        raise self._misfit(field, value, "a whole number")

    def array(self, field: str, dtype: type) -> np.ndarray | None:
        """(length,) of dtype int32, float32 or bool."""
        value = self.get(field)
        if value is None:
            return None
        try:
            return to_array(value, dtype)
        except ValueError:
            raise self._misfit(field, value, f"a list of {np.dtype(dtype)}") from None

    def components(self) -> dict[str, float]:
        """reward_components: an object's numbers, or every number that nothing else names. NaN is left out."""
        if self._takes_any_number:
            found = {name: value for name, value in self.values.items() if name not in self._named}
        else:
            found = self.get("reward_components") or {}
            if not isinstance(found, Mapping):
                raise self._misfit("reward_components", found, "an object of numbers")
        return {name: float(value) for name, value in found.items() if _is_number(value) and math.isfinite(value)}

    def reward(self, components: Mapping[str, float]) -> float | None:
        """episode_reward, else the weighted sum of the components; None where that is null, or there is neither."""
        given = self.number("episode_reward")
        says_null = any(place in self.values for place in self.mapping.fields.get("episode_reward", ()))
        if given is not None or says_null or not components:
            return given
        weights = self.mapping.reward_weights or dict.fromkeys(components, 1.0)
        return sum(weight * components[name] for name, weight in weights.items() if name in components)

    def extra(self) -> dict[str, Any]:
        """Values of the run's own columns: mapped, or of the same name in the record."""
        found = {name: self.get(name) for name in self.mapping.fields if name.startswith("x_")}
        found |= {name: self.values[name] for name in self.own_columns if name in self.values}
        return {name: value for name, value in found.items() if value is not None}

    def leftovers(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """Metadata, which is what the mapping sends there and what it does not name and is small; and the names of
        what is too large for that."""
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
    """(length,) of dtype int32, float32 or bool. Raises ValueError for what is no such list."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in _KINDS[dtype]):
        raise ValueError("no list of numbers")
    converted: np.ndarray = array.astype(dtype)
    if dtype is np.int32 and not np.array_equal(converted, array):
        raise ValueError("beyond int32")
    return converted


_KINDS = {np.int32: "iu", np.float32: "iuf", np.bool_: "biu"}
"""Kinds of NumPy types that may become one."""


def _parse(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise RefusedRecordError(f"{name} is no JSON text: {error}") from error


def _look_up(values: Mapping[str, Any], place: str) -> Any:
    """A field, or what a dotted path leads to; None where there is none."""
    if place in values:
        return values[place]
    value: Any = values
    for name in place.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Texts as they are, anything else as JSON, nothing for null."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for name, value in values.items()
        if value is not None
    }


def keep_small(values: Mapping[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Those that metadata can hold, as text, and the names of the others."""
    texts = as_texts(values)
    kept = {name: text for name, text in texts.items() if len(text) <= SMALL}
    return kept, tuple(name for name in texts if name not in kept)
