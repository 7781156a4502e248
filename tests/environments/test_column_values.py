"""Columns reach scorers with the values that Arrow has, over all of its types; docs/environments.md says which."""

import re
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ludic.app.operations.fit_inputs import Inputs
from ludic.base.data_files import table_rows
from ludic.environments.column_values import MARK, read_back, spelled
from ludic.environments.qa_rows import QuestionColumns, QuestionSource

DAY, NOON = date(2026, 2, 28), datetime(2026, 2, 28, 12, 30, 0, 123)
ARRAYS: dict[str, list[pa.Array]] = {
    "NA": [pa.nulls(1)],
    "BOOL": [pa.array([True])],
    **{
        f"{sign}INT{bits}": [pa.array([7], f"{sign.lower()}int{bits}")]
        for sign in ("", "U")
        for bits in (8, 16, 32, 64)
    },
    "UINT64": [pa.array([2**64 - 1], pa.uint64())],
    "HALF_FLOAT": [pa.array([1.5], pa.float16())],
    "FLOAT": [pa.array([each], pa.float32()) for each in (1.5, float("nan"), float("inf"))],
    "DOUBLE": [pa.array([each], pa.float64()) for each in (0.1, -0.0, 5e-324, float("nan"), float("-inf"))],
    **{
        f"DECIMAL{bits}": [pa.array([Decimal("1.50")], getattr(pa, f"decimal{bits}")(5, 2))]
        for bits in (32, 64, 128, 256)
    },
    "STRING": [pa.array([each]) for each in ("a", "", "北京", "\x00", MARK)],
    "LARGE_STRING": [pa.array(["a"], pa.large_string())],
    "STRING_VIEW": [pa.array(["a"], pa.string_view())],
    "BINARY": [pa.array([each]) for each in (b"\xff\x00", b"")],
    "LARGE_BINARY": [pa.array([b"\xff"], pa.large_binary())],
    "BINARY_VIEW": [pa.array([b"\xff"], pa.binary_view())],
    "FIXED_SIZE_BINARY": [pa.array([b"\xff\xfe"], pa.binary(2))],
    "DATE32": [pa.array([DAY], pa.date32())],
    "DATE64": [pa.array([DAY], pa.date64())],
    "TIME32": [pa.array([time(1, 2, 3)], pa.time32("s"))],
    "TIME64": [pa.array([time(1, 2, 3, 4)], pa.time64("us"))],
    "TIMESTAMP": [
        *(pa.array([NOON.replace(microsecond=0)], pa.timestamp("s", zone)) for zone in (None, "UTC", "Europe/Berlin")),
        *(pa.array([NOON], pa.timestamp("us", zone)) for zone in (None, "+02:00")),
        *(pa.array([1], pa.timestamp("ns", zone)) for zone in (None, "Europe/Berlin")),
    ],
    "DURATION": [pa.array([timedelta(days=-1, microseconds=1)], pa.duration("us")), pa.array([-1], pa.duration("ns"))],
    "INTERVAL_MONTH_DAY_NANO": [pa.array([(1, 2, 3)], pa.month_day_nano_interval())],
    "LARGE_LIST": [pa.array([[1.0, float("nan")]], pa.large_list(pa.float64()))],
    "LIST_VIEW": [pa.array([[1.0, float("nan")]], pa.list_view(pa.float64()))],
    "LARGE_LIST_VIEW": [pa.array([[1.0, float("nan")]], pa.large_list_view(pa.float64()))],
    "LIST": [pa.array([each]) for each in ([NOON], [[b"a"]], [], [float("nan")])],
    "FIXED_SIZE_LIST": [pa.array([["a", "b"]], pa.list_(pa.string(), 2))],
    "STRUCT": [pa.array([each]) for each in ({"a": DAY, "b": None}, {MARK: "a"}, {MARK: ["tuple", "a"]})],
    "MAP": [pa.array([[("a", NOON), ("b", None)]], pa.map_(pa.string(), pa.timestamp("us")))],
    "DICTIONARY": [pa.array(["a"]).dictionary_encode()],
    "RUN_END_ENCODED": [pa.RunEndEncodedArray.from_arrays([1], ["a"])],
    "DENSE_UNION": [
        pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array(["a"])]),
    ],
    "SPARSE_UNION": [pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array(["a"])])],
}
"""Columns of one row, by the name of their type's id."""
NEVER_MADE = {"INTERVAL_MONTHS", "INTERVAL_DAY_TIME"}
"""Types of C++ that pyarrow makes no columns of."""
COLUMNS = [(f"{name}_{number}", array) for name, arrays in ARRAYS.items() for number, array in enumerate(arrays)]


def same(a: Any, b: Any) -> bool:
    """Whether two values are the same, of the same types, NaN too."""
    if (isinstance(a, tuple) and isinstance(b, tuple)) or type(a) is type(b) is list:
        return len(a) == len(b) and all(map(same, a, b))
    if type(a) is type(b) is dict:
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and repr(a) == repr(b)


def of_parquet() -> Iterator[tuple[str, pa.Array]]:
    """Those columns that Parquet holds."""
    for name, array in COLUMNS:
        try:
            pq.write_table(pa.table({name: array}), pa.BufferOutputStream())
        except (pa.ArrowException, OSError):
            continue
        yield name, array


def test_every_type_of_arrow_has_a_column() -> None:
    ids = {name.removeprefix("Type_") for name in dir(pa.lib) if name.startswith("Type_")}
    assert ids == {*ARRAYS} | NEVER_MADE


@pytest.mark.parametrize(("name", "array"), COLUMNS)
def test_a_value_comes_back_from_json_and_messagepack(name: str, array: pa.Array) -> None:
    (value,) = array.to_pylist()
    for form in (msgspec.json, msgspec.msgpack):
        assert same(read_back(form.decode(form.encode(spelled(value)))), value)


@pytest.mark.parametrize("value", [UUID(int=7), (1, ("a",)), {1: "a", (2,): DAY}, {MARK: 1, "a": 2}, {MARK: {MARK: 1}}])
def test_values_of_a_list_in_memory_come_back(value: Any) -> None:
    assert same(read_back(msgspec.json.decode(msgspec.json.encode(spelled(value)))), value)


@pytest.mark.parametrize(
    "value",
    [
        {MARK: 5},
        {MARK: ["none", 1]},
        {MARK: [1, 2, 3]},
        {MARK: [[1], 2]},
        {MARK: ["Decimal", "x"]},
        {MARK: ["date", 1]},
        {MARK: ["mapping", [1]]},
    ],
)
def test_an_object_of_a_file_that_stands_for_nothing_stays(value: Any) -> None:
    assert read_back(value) == value


def rows_of(path: Path | str, *, stored: str | None = None) -> Any:
    names = tuple(name for name, _ in of_parquet())
    columns = QuestionColumns(
        question="question", answer=None, answer_pattern=None, problem_of=lambda answer: None, others=names
    )
    return QuestionSource(name=str(path), stored=stored).read(columns)[0].columns


def test_columns_of_a_file_and_of_a_table_in_memory_reach_a_scorer_the_same(tmp_path: Path) -> None:
    table = pa.table({"question": ["1 + 1?"], **dict(of_parquet())})
    assert table.num_columns > 50
    pq.write_table(table, tmp_path / "rows.parquet")
    (wanted,) = table_rows(pq.read_table(tmp_path / "rows.parquet").drop_columns("question"))
    assert same(dict(rows_of(tmp_path / "rows.parquet")), wanted)
    inputs = Inputs.of(str(tmp_path / "run"))
    stored = inputs.path_of(inputs.put_questions(table_rows(table), "dataset")["stored"])
    (wanted,) = table_rows(table.drop_columns("question"))
    assert same(dict(rows_of("questions", stored=str(stored))), wanted)


def test_the_guide_says_what_each_type_becomes() -> None:
    text = (Path(__file__).parents[2] / "docs/environments.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`.*`) \| .* \| `(\w+)` \|$", text.partition("| type of the column |")[2].partition("\n\n")[0], re.M
    )
    told = {name.upper(): kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}
    told["NA"] = told.pop("NULL")
    assert told.keys() == ARRAYS.keys()
    for name, arrays in ARRAYS.items():
        for array in arrays:
            (value,) = array.to_pylist()
            kinds = {each.__name__ for each in type(value).__mro__}
            assert told[name] in kinds or (told[name] == "None" and value is None), name
