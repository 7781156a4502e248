"""Columns of every kind that the catalogue can tell of: cut with their tokens, and packed over ranks, each value once.

The rows here are no columns of ludic. What is expected is told token by token, by position in the row.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ludic.records.columns import ArrayColumn, Ragged, array_columns
from ludic.records.tables import Column
from ludic.training.batches import packing
from ludic.training.batches.packing import (
    MicroBatch,
    PackedRagged,
    Sequences,
    TrainingSequence,
    assign,
    cap,
    cut_out,
    pack_each,
)

TYPES = (pa.float32(), pa.int16(), pa.bool_(), pa.float64(), pa.int32())
SHAPE = (2, 3)
"""Of the numbers of a token, with as many dimensions as the column has."""


def column_of(along: str, num_dimensions: int, type_: pa.DataType, **catalogue: Any) -> ArrayColumn:
    for _ in range(num_dimensions):
        type_ = pa.list_(type_)
    keys = {"along": along, "set_by": "sampler", "trained": "always", **catalogue}
    name = "_".join(map(str, (along, num_dimensions, *catalogue)))
    return ArrayColumn.of(Column(name=name, type=type_, nullable=True, doc="", catalogue=keys))


OTHERS = {
    column.name: column
    for column in (
        *(column_of("row", number, TYPES[number]) for number in range(3)),
        *(column_of(along, number, TYPES[number]) for along in ("prompt", "response", "read") for number in (1, 2, 3)),
        *(column_of(along, 2, pa.float32(), ragged=True) for along in ("prompt", "response", "read")),
        column_of("response", 2, pa.int32(), range="token ids"),
        column_of("read", 2, pa.int32(), ragged=True, range="token ids"),
        column_of("response", 1, pa.int32(), null=-1),
    )
}
CATALOGUE = {**array_columns(), **OTHERS}


@pytest.fixture(autouse=True, scope="module")
def catalogue() -> Iterator[None]:
    """The catalogue has these columns, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "array_columns", lambda: CATALOGUE)
        yield


def values_of(rng: np.random.Generator, column: ArrayColumn, num_tokens: int) -> Any:
    """Random numbers, no two of them equal if the dtype has so many."""
    if column.ragged:
        return Ragged.of([rng.permutation(1000)[: rng.integers(4)] for _ in range(num_tokens)], column.dtype)
    beyond = column.num_dimensions - (column.along != "row")
    shape = SHAPE[:beyond] if column.along == "row" else (num_tokens, *SHAPE[:beyond])
    numbers = rng.permutation(1000)[: int(np.prod(shape))].reshape(shape)
    return (numbers % 2 if column.dtype == bool else numbers).astype(column.dtype) if shape else float(numbers)


def row_of(rng: np.random.Generator, number: int) -> TrainingSequence:
    num_prompt, num_response = rng.integers(1, 5), rng.integers(0, 6)
    values = {
        name: values_of(rng, column, 0 if column.along == "row" else column.length(num_prompt, num_response))
        for name, column in OTHERS.items()
        if rng.random() < 0.6
    }
    return TrainingSequence(
        rollout_id=f"r{number}",
        prompt_tokens=rng.integers(0, 99, num_prompt, dtype=np.int32),
        response_tokens=rng.integers(0, 99, num_response, dtype=np.int32),
        advantage=1.0,
        columns={"response_logprobs": rng.normal(size=num_response).astype(np.float32), **values},
    )


def rows_of(seed: int) -> list[TrainingSequence]:
    rng = np.random.default_rng(seed)
    return [row_of(rng, number) for number in range(rng.integers(1, 7))]


def by_position(column: ArrayColumn, row: TrainingSequence) -> dict[int, Any]:
    """The numbers of each token by its position in prompt and response."""
    first = len(row.prompt_tokens) if column.along == "response" else 0
    return {first + index: np.asarray(each) for index, each in enumerate(row.columns[column.name])}


def unknown(column: ArrayColumn) -> np.ndarray:
    """The numbers of a token without any."""
    beyond = () if column.ragged else SHAPE[: column.num_dimensions - (column.along != "row")]
    null = column.null if column.null is not None else np.nan if column.dtype.kind == "f" else 0
    return np.zeros(0, column.dtype) if column.ragged else np.full(beyond, null, column.dtype)


def assert_equal(found: Any, expected: list[np.ndarray]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_is_part(found: Sequences, index: int, row: TrainingSequence, start: int, end: int) -> None:
    """The sequence at `index` is the part of the row whose response is start:end."""
    tokens, num_prompt = np.concatenate([row.prompt_tokens, row.response_tokens]), len(row.prompt_tokens)
    np.testing.assert_array_equal(found.prompt_tokens[index], tokens[: num_prompt + start])
    np.testing.assert_array_equal(found.response_tokens[index], tokens[num_prompt + start : num_prompt + end])
    for name, column in CATALOGUE.items():
        part = found.column(name)[index]
        if name not in row.columns:
            assert part is None
        elif column.along == "row":
            np.testing.assert_array_equal(part, row.columns[name])
        else:
            begin = num_prompt + start if column.along == "response" else 0
            length = {"prompt": num_prompt + start, "response": end - start, "read": num_prompt + end - 1}[column.along]
            known = by_position(column, row)
            assert_equal(part, [known.get(position, unknown(column)) for position in range(begin, begin + length)])


@given(st.integers(0, 2**32), st.integers(1, 11))
def test_cap_cuts_every_column_with_its_tokens(seed: int, max_seq_len: int) -> None:
    rows = rows_of(seed)
    capped, num_cut = cap(Sequences.of(rows), max_seq_len)
    ends = [max(0, min(max_seq_len - len(row.prompt_tokens), len(row.response_tokens))) for row in rows]
    assert num_cut == sum(end < len(row.response_tokens) for end, row in zip(ends, rows, strict=True))
    for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
        assert_is_part(capped, index, row, 0, end)


@given(st.integers(0, 2**32))
def test_parts_have_the_values_of_their_tokens_in_every_column(seed: int) -> None:
    rng, rows = np.random.default_rng(seed), rows_of(seed)
    of_parts = np.sort(rng.integers(len(rows), size=5))
    bounds = np.array([np.sort(rng.integers(len(rows[i].response_tokens) + 1, size=2)) for i in of_parts])
    parts = cut_out(Sequences.of(rows), of_parts, bounds[:, 0], bounds[:, 1])
    assert len(parts) == 5
    for index, (number, (start, end)) in enumerate(zip(of_parts.tolist(), bounds.tolist(), strict=True)):
        assert_is_part(parts, index, rows[number], start, end)


def expected_of(column: ArrayColumn, row: TrainingSequence) -> list[np.ndarray]:
    """The numbers of a row's tokens in a micro-batch."""
    num_prompt, num_response = len(row.prompt_tokens), len(row.response_tokens)
    if column.along == "row":
        return [np.asarray(row.columns.get(column.name, unknown(column)))] * num_response
    known = by_position(column, row) if column.name in row.columns else {}
    positions = range(num_prompt + num_response - 1)
    if column.along == "response":
        positions = range(num_prompt, num_prompt + num_response)
    return [known.get(position, unknown(column)) for position in positions]


def found_in(packed: torch.Tensor | PackedRagged) -> list[np.ndarray]:
    if isinstance(packed, torch.Tensor):
        return list(packed.numpy())
    lists = [packed.values[start:end].numpy() for start, end in pairwise(packed.bounds.tolist())]
    counts = [len(each) for each in lists]
    assert packed.rows.tolist() == [index for index, count in enumerate(counts) for _ in range(count)]
    assert packed.has_any.tolist() == [count > 0 for count in counts]
    return lists


def assert_holds(batch: MicroBatch, rows: list[TrainingSequence]) -> None:
    """Every column has the values of these rows, in their order, and only columns that one of them has are there."""
    assert batch.rollout_ids == tuple(row.rollout_id for row in rows)
    names = {name for row in rows for name in row.columns}
    assert batch.columns.keys() == names | {"response_logprobs", "action_mask"}
    for name in names:
        column, packed = CATALOGUE[name], batch.columns[name]
        assert_equal(found_in(packed), [each for row in rows for each in expected_of(column, row)])
        numbers = packed.values if isinstance(packed, PackedRagged) else packed
        assert numbers.numpy().dtype == (np.int64 if column.is_token_ids else column.dtype)


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(5, 25))
def test_ranks_hold_each_value_once_and_in_order(seed: int, num_ranks: int, budget: int) -> None:
    rows = rows_of(seed)
    sequences, seen = Sequences.of(rows), []
    for plans in assign(np.array([row.num_tokens for row in rows]), num_ranks, budget):
        for batch, plan in zip(pack_each(sequences, plans), plans, strict=True):
            packed = [rows[index] for index in plan if len(rows[index].response_tokens)]
            if packed:
                assert_holds(batch, packed)
            else:
                assert batch.rollout_ids == ()
                assert batch.action_mask.tolist() == [False]
            seen += batch.rollout_ids
    assert sorted(seen) == sorted(row.rollout_id for row in rows if len(row.response_tokens))


def test_a_column_that_no_row_has_is_one_unknown_value_a_token_for_those_who_ask() -> None:
    row = TrainingSequence(
        rollout_id="r",
        prompt_tokens=np.zeros(2, np.int32),
        response_tokens=np.zeros(3, np.int32),
        advantage=0.0,
        columns={"response_logprobs": np.zeros(3, np.float32)},
    )
    batch = packing.pack([row])
    found = {name: batch.column(name) for name in OTHERS}
    assert found["response_1"].tolist() == [0] * 3
    assert found["response_3"].isnan().all()
    assert found["response_1_null"].tolist() == [-1] * 3
    assert found["read_1"].shape == (4,)
    assert found["response_3"].shape == (3, 1, 1)
    assert found["row_0"].shape == (3,)
    assert found["row_2"].shape == (3, 1, 1)
    assert found["read_2_ragged"].has_any.tolist() == [False] * 4
    with pytest.raises(KeyError, match="spelling"):
        batch.column("spelling")
