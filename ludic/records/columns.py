"""Define the arrays of a row from the catalogue of columns; check, cut and join them. No I/O.

A column of `schemas/rollouts.v1.json` with the key `along` is an array of a Rollout; the rest of ludic learns about the
array from that row alone. Its further keys are the fields of ArrayColumn and not part of the stored schema. Raises
SchemaError for a row of the catalogue that is wrong.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, Literal, Self, TypeVar, get_args, overload

import numpy as np
import pyarrow as pa

from ludic.records.tables import Column, load_table

Along = Literal["row", "prompt", "response", "read"]
SetBy = Literal["transcript", "sampler", "episode"]
WhenTrained = Literal["always", "on request"]

Columns = Mapping[str, Any]
"""Arrays of one row or completion by the name of their column; a column that is left out is absent.

An array is a NumPy array whose first dimension runs along the tokens, a Ragged if its lists differ in length, or a
plain number for a column with one value a row."""

TOKEN_IDS = "token ids"
"""A range: from 0 to the model's vocabulary."""
NUM_TOKEN_IDS = 2**31
"""Number of token ids that a column can hold: the limit where no model is known."""


class Ragged(Sequence[np.ndarray]):
    """Lists of numbers, one a token, of different lengths; kept flat."""

    __slots__ = ("bounds", "values")

    def __init__(self, values: np.ndarray, bounds: np.ndarray) -> None:
        """values: (K,), the numbers of all lists. bounds: (n + 1,) int64: start of each list, then the end."""
        self.values, self.bounds = values, bounds

    @classmethod
    def of(cls, lists: Iterable[Any], dtype: Any) -> Self:
        """Join lists of numbers. Raises ValueError if an integer dtype can't hold one of them exactly."""
        arrays, own = [np.asarray(each) for each in lists], np.dtype(dtype)
        found = np.concatenate([np.zeros(0, own), *arrays])
        values = found.astype(own, copy=False)
        if own.kind in "iu" and values.dtype != found.dtype and not np.array_equal(values, found):
            raise ValueError(f"a list holds numbers that {own} can't represent")
        ends = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return cls(values, ends)

    @property
    def shape(self) -> tuple[int]:
        """(n,), the number of lists, as for an array with one value for each."""
        return (len(self.bounds) - 1,)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __repr__(self) -> str:
        return f"Ragged({self.values!r}, {self.bounds!r})"

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, index: slice) -> "Ragged": ...

    def __getitem__(self, index: int | slice) -> "np.ndarray | Ragged":
        """Return one list, or the lists of a slice without step, as views."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"a slice of a Ragged has step {step}, wanted 1")
            bounds = self.bounds[start : max(start, stop) + 1]
            return Ragged(self.values[bounds[0] : bounds[-1]], bounds - bounds[0])
        position = range(len(self))[index]
        return self.values[self.bounds[position] : self.bounds[position + 1]]

    def misfit(self, dtype: np.dtype) -> str | None:
        """Return why this is not a Ragged of a dtype with consecutive lists; None if it is."""
        values, bounds = self.values, self.bounds
        if not isinstance(values, np.ndarray) or values.dtype != dtype or values.ndim != 1:
            return f"holds {getattr(values, 'dtype', type(values).__name__)}, wanted {dtype}"
        if not isinstance(bounds, np.ndarray) or bounds.ndim != 1 or bounds.dtype.kind != "i" or not len(bounds):
            return "has bounds that are not a non-empty one-dimensional integer array"
        if bounds[0] != 0 or bounds[-1] != len(values) or (np.diff(bounds) < 0).any():
            return f"has bounds that do not rise from 0 to its {len(values)} numbers"
        return None

    @property
    def counts(self) -> np.ndarray:
        """(n,) int64: length of each list."""
        return self.bounds[1:] - self.bounds[:-1]  # np.diff takes four times as long for a few lists


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayColumn:
    """One array of a row: a row of the catalogue."""

    name: str
    dtype: np.dtype
    """Dtype of its numbers, in memory and in Arrow."""
    arrow_type: pa.DataType
    along: Along
    """Tokens that have a value: prompt; response; read, which is prompt and response without the last token, which the
    model never reads; or row, which is one value for all."""
    num_dimensions: int
    """Dimensions of the array: 1 is a number a token, 2 is k numbers a token; 0 is one number for the row."""
    is_nullable: bool
    ragged: bool = False
    """True if the numbers of a token are a list of any length."""
    ascending: bool = False
    """True if the numbers of a token, along the last dimension, must rise."""
    holds_token: bool = False
    """True if the numbers of a sampled token include the token itself; a Ragged along the response."""
    fill: Any = None
    """Value of response tokens that were not sampled, which is checked; None allows any value, and an assembled row has
    0, or no numbers."""
    null: Any = None
    """Value in a batch for a row without the array; None is NaN for floats, else 0."""
    lowest: float | None = None
    """Minimum; None is the least finite number of the type."""
    highest: float | None = None
    wanted: str | None = None
    """The range in words, for messages; None is its two numbers."""
    is_token_ids: bool = False
    """True if numbers are from 0 to the model's vocabulary."""
    set_by: SetBy
    """Source of the values: the assembled transcript, the sampler with each completion, or the episode."""
    trained: WhenTrained | None = None
    """True if training reads it: always, or when a trainer asks for it; None is never."""
    encoding: str | None = None
    """Encoding of its numbers in Parquet files; None is Parquet's default."""

    @classmethod
    def of(cls, column: Column) -> Self:
        """Read a row of the catalogue."""
        keys, type_, depth = dict(column.catalogue), column.type, 0
        while pa.types.is_list(type_):
            type_, depth = type_.value_type, depth + 1
        assert "set_by" in keys, f"{column.name} has no set_by, wanted one of {get_args(SetBy)}"
        found = keys.pop("range", (None, None))
        lowest, highest = (0, None) if found == TOKEN_IDS else found
        known = {field.name for field in fields(cls)}
        assert keys.keys() <= known, f"{column.name} has {sorted(keys.keys() - known)}, wanted fields of ArrayColumn"
        assert keys["along"] in get_args(Along), f"{column.name} runs along {keys['along']}, wanted {get_args(Along)}"
        assert depth > 0 or keys["along"] == "row", f"{column.name} runs along {keys['along']}, wanted a list"
        is_list_a_token = depth == 2 and keys["along"] != "row"
        assert is_list_a_token or not keys.get("ragged"), f"{column.name} is ragged, wanted a list of numbers a token"
        holds = not keys.get("holds_token") or (keys.get("ragged") and keys["along"] == "response")
        assert holds, f"{column.name} holds its tokens, wanted ragged and along the response"
        return cls(
            name=column.name,
            dtype=np.dtype(type_.to_pandas_dtype()),
            arrow_type=column.type,
            num_dimensions=depth,
            is_nullable=column.nullable,
            lowest=lowest,
            highest=highest,
            is_token_ids=found == TOKEN_IDS,
            **keys,
        )

    @property
    def is_along_response(self) -> bool:
        return self.along == "response"

    @property
    def is_number_a_token(self) -> bool:
        """True if the array has one number for each of its tokens."""
        return self.along != "row" and self.num_dimensions == 1

    def length(self, prompt_length: int, response_length: int) -> int:
        """Return the number of tokens with values, in a row of these lengths; not for an array along the row."""
        if self.along == "response":
            return response_length
        return prompt_length if self.along == "prompt" else max(0, prompt_length + response_length - 1)

    def lengths(self, prompts: np.ndarray, responses: np.ndarray) -> np.ndarray:
        """Return the `length` of many rows. prompts, responses: (rows,) of integers, lengths of their tokens."""
        if self.along == "read":
            return np.maximum(prompts.astype(np.int64) + responses - 1, 0)
        return prompts if self.along == "prompt" else responses

    def cut(self, values: Any, prompt_length: int, start: int, stop: int) -> Any:
        """Return the values of a row whose response is cut to start:stop; the tokens before then belong to its prompt.

        values: of the whole row. prompt_length: before the cut.
        """
        if values is None or self.along == "row":
            return values
        if self.along == "response":
            return values[start:stop]
        if self.along == "read":
            return values[: self.length(prompt_length, stop)]
        return self.concatenate([values, self.unknown(start, like=values)]) if start else values

    def unknown(self, num_tokens: int, like: Any = None) -> Any:
        """Return the values of tokens without values: `null`.

        like: values of another row; the result takes its shape beyond the tokens.
        """
        if self.ragged:
            return Ragged(np.zeros(0, self.dtype), np.zeros(num_tokens + 1, np.int64))
        null = self.null if self.null is not None else np.nan if self.dtype.kind == "f" else 0
        return np.full((num_tokens, *(() if like is None else like.shape[1:])), null, self.dtype)

    def unsampled(self, num_tokens: int, like: Any = None) -> Any:
        """Return the values of tokens that were not sampled: `fill`, else 0 or no numbers. like: as for `unknown`."""
        if self.ragged:
            return self.unknown(num_tokens)
        return np.full((num_tokens, *(() if like is None else like.shape[1:])), self.fill or 0, self.dtype)

    def concatenate(self, parts: Sequence[Any]) -> Any:
        """Lay values of consecutive tokens end to end; parts: at least one."""
        if not self.ragged:
            return np.concatenate(parts, dtype=self.dtype)
        counts = np.concatenate([each.counts for each in parts])
        return Ragged(np.concatenate([each.values for each in parts]), np.append(0, np.cumsum(counts)))

    def bounds(self, num_ids: int = NUM_TOKEN_IDS) -> tuple[float, float]:
        """Return the minimum and the maximum of its range. num_ids: size of the model's vocabulary."""
        if self.is_token_ids:
            return 0, num_ids - 1
        limits = np.iinfo(self.dtype) if self.dtype.kind in "iu" else np.finfo(self.dtype)
        lowest = float(limits.min) if self.lowest is None else self.lowest
        return lowest, float(limits.max) if self.highest is None else self.highest

    # --- Checks --------------------------------------------------------------------------------------------

    def fit_all(self, arrays: Sequence[Any], prompts: Sequence[int | None], responses: Sequence[int | None]) -> bool:
        """Return whether `misfit` and `wrong_length` find nothing in the arrays of many rows; looks at all at once.

        prompts, responses: lengths of each row's tokens; None where they are not known. May be False for arrays that
        fit.
        """
        rows = [row for row in zip(arrays, prompts, responses, strict=True) if row[0] is not None]
        if len(rows) < len(arrays) and not self.is_nullable:
            return False
        if not rows:
            return True
        found, of_prompt, of_response = zip(*rows, strict=True)
        if self.along == "row" or set(map(type, found)) != {Ragged if self.ragged else np.ndarray}:
            return False
        if None in of_prompt or None in of_response:
            return False
        if self.ragged:
            is_of_type = not any(each.misfit(self.dtype) for each in found)
        else:
            is_of_type = set(map(attrgetter("dtype", "ndim"), found)) == {(self.dtype, self.num_dimensions)}
        if self.along == "read" or (not self.ragged and self.num_dimensions > 1):
            return is_of_type and not any(map(self.wrong_length, found, of_prompt, of_response))
        return is_of_type and tuple(map(len, found)) == (of_prompt if self.along == "prompt" else of_response)

    def misfit(self, values: Any) -> str | None:
        """Return how values differ from the column in type, dtype or dimensions; None if they do not."""
        if values is None:
            return None if self.is_nullable else f"is NoneType, wanted {self._wanted()}"
        if self.num_dimensions == 0:
            kinds = {"b": (bool, np.bool_), "i": (int, np.integer)}.get(self.dtype.kind, (float, int, np.number))
            is_number = isinstance(values, kinds) and (self.dtype.kind == "b" or not isinstance(values, bool))
            return None if is_number else f"is {type(values).__name__}, wanted {self._wanted()}"
        if self.ragged:
            if not isinstance(values, Ragged):
                return f"is {type(values).__name__}, wanted {self._wanted()}"
            return values.misfit(self.dtype)
        if not isinstance(values, np.ndarray):
            return f"is {type(values).__name__}, wanted {self._wanted()}"
        if values.dtype != self.dtype or values.ndim != self.num_dimensions:
            return f"is {values.dtype} of shape {values.shape}, wanted {self._wanted()}"
        return None

    def _wanted(self) -> str:
        """Describe the type of its values, for a message."""
        if self.num_dimensions == 0:
            return f"one {self.dtype}"
        if self.ragged:
            return f"a Ragged of {self.dtype}"
        dimensions = {1: "one dimension", 2: "two dimensions", 3: "three dimensions"}
        wanted = dimensions.get(self.num_dimensions, f"{self.num_dimensions} dimensions")
        return f"a NumPy array of {self.dtype} of {wanted}"

    def wrong_length(self, values: Any, prompt_length: int, response_length: int) -> str | None:
        """Return why there is not one value for each token; None if there is. The type must fit."""
        if values is None or self.along == "row":
            return None
        wanted = self.length(prompt_length, response_length)
        if len(values) == wanted and (self.ragged or not wanted or 0 not in values.shape):
            return None
        if self.along == "read":
            tokens = f"wanted {wanted}: prompt_tokens, and response_tokens without the last one"
        else:
            tokens = f"{self.along}_tokens has {wanted}"
        if self.num_dimensions == 1 or self.ragged:
            return f"has length {len(values)}, {tokens}"
        return f"has shape {values.shape}, {tokens}"

    def bad_numbers(self, values: Any, num_ids: int = NUM_TOKEN_IDS) -> str | None:
        """Return why numbers are not finite, out of range, or do not rise; None if all are sound."""
        numbers = values.values if self.ragged else np.asarray(values)
        if not numbers.size or self.dtype.kind == "b":
            return None
        lowest, highest = self.bounds(num_ids)
        # If there is a NaN, it is minimum and maximum, and compares as false.
        if not (numbers.min() >= lowest and numbers.max() <= highest):
            with np.errstate(invalid="ignore"):
                is_bad = ~((numbers >= lowest) & (numbers <= highest))
            return self._at(values, is_bad, self.wanted_number(num_ids))
        if self.ascending:
            falls = numbers[..., 1:] <= numbers[..., :-1]
            if self.ragged:
                firsts = values.bounds[(values.bounds > 0) & (values.bounds < len(numbers))]
                falls[firsts - 1] = False  # the first number of a list has no predecessor
            if falls.any():
                is_bad = np.concatenate([np.zeros((*numbers.shape[:-1], 1), bool), falls], axis=-1)
                return self._at(values, is_bad, "wanted sorted numbers, each once")
        return None

    def wanted_number(self, num_ids: int = NUM_TOKEN_IDS) -> str:
        """Describe the range of its numbers, for a message."""
        if self.is_token_ids:
            return f"wanted a token id from 0 to {num_ids - 1}"
        if self.wanted is not None:
            return f"wanted {self.wanted}"
        if self.lowest is None and self.highest is None:
            return f"wanted a finite {self.dtype}"
        lowest, highest = self.bounds()
        return f"wanted {lowest:g} to {highest:g}"

    def _at(self, values: Any, is_bad: np.ndarray, wanted: str) -> str:
        """Name the first of the bad numbers and its token. is_bad: shaped as the numbers."""
        numbers = values.values if self.ragged else np.asarray(values)
        bad = np.argwhere(is_bad)
        first = numbers[tuple(bad[0])]
        if self.along == "row":
            return f"is {first}, {wanted}"
        of_number = np.searchsorted(values.bounds, bad[:, 0], side="right") - 1 if self.ragged else bad[:, 0]
        tokens = np.unique(of_number)
        others = f", and {len(tokens) - 1} more" if len(tokens) > 1 else ""
        return f"is {first} at token {tokens[0]}{others}, {wanted}"

    def not_filled(self, values: Any, is_sampled: np.ndarray) -> str | None:
        """Return why the values of tokens that were not sampled are not `fill`; None if they are.

        values: along the response. is_sampled: (response_length,) bool.
        """
        if self.fill is None or not self.is_along_response:
            return None
        if self.ragged:
            is_other, wanted = values.counts > 0, "wanted no numbers, since action_mask is 0"
        else:
            # NaN is reported as such.
            is_other = values != self.fill if self.dtype.kind == "b" else np.abs(values - self.fill) > 0
            is_other = np.any(is_other, axis=tuple(range(1, values.ndim)))
            wanted = f"wanted {self.fill}, since action_mask is 0"
        tokens = np.flatnonzero(is_other & ~is_sampled)
        if not len(tokens):
            return None
        others = f", and {len(tokens) - 1} more" if len(tokens) > 1 else ""
        found = values[int(tokens[0])]
        return f"is {found.tolist() if isinstance(found, np.ndarray) else found} at token {tokens[0]}{others}, {wanted}"

    def lacks_token(self, values: Any, tokens: np.ndarray, is_sampled: np.ndarray) -> str | None:
        """Describe sampled tokens that are missing among their own numbers; None if there are none.

        values: along the response. tokens: (response_length,) int32. is_sampled: (response_length,) bool.
        """
        if not self.holds_token:
            return None
        owners = np.repeat(np.arange(len(values)), values.counts)
        has_token = np.bincount(owners[values.values == tokens[owners]], minlength=len(values)) > 0
        found = np.flatnonzero(is_sampled & ~has_token)
        if not len(found):
            return None
        others = f", and {len(found) - 1} more" if len(found) > 1 else ""
        return f"at token {found[0]}{others} lacks the sampled token, wanted it among the kept ones"


@cache
def array_columns() -> Mapping[str, ArrayColumn]:
    """Return the arrays of a row by name, in the order of the table."""
    columns = load_table("rollouts").columns
    return {column.name: ArrayColumn.of(column) for column in columns if "along" in column.catalogue}


def select(is_wanted: Callable[[ArrayColumn], bool]) -> tuple[ArrayColumn, ...]:
    """Return the arrays of a row for which `is_wanted` holds."""
    return tuple(filter(is_wanted, array_columns().values()))


T = TypeVar("T")


def with_columns(value: T, **columns: Any) -> T:
    """Return a copy of a Rollout, Completion or another value that has `columns`, with these; None leaves one out."""
    of_value: Columns = value.columns  # type: ignore[attr-defined]
    changed = {name: each for name, each in {**of_value, **columns}.items() if each is not None}
    return replace(value, columns=changed)  # type: ignore[type-var]


def reasons_against(
    columns: Columns, prompt_length: int, response_length: int, num_ids: int = NUM_TOKEN_IDS
) -> Iterator[tuple[str, str]]:
    """Yield each invalid column of a row or a completion, with the reason: type, length, or numbers."""
    of_catalogue = array_columns()
    for name, values in columns.items():
        if values is None:  # None means absent
            continue
        if (column := of_catalogue.get(name)) is None:
            yield str(name), f"is not an array of a row, wanted one of {', '.join(of_catalogue)}"
        elif reason := (
            column.misfit(values)
            or column.wrong_length(values, prompt_length, response_length)
            or column.bad_numbers(values, num_ids)
        ):
            yield name, reason
