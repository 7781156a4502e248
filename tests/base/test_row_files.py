"""Rows in CSV: every reader gives back the texts that were written."""

import csv
import io
from collections.abc import Callable
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow.csv as pa_csv
import pytest

from ludic.base.row_files import write_csv

# NUL is left out: DuckDB and pandas read no text with it.
TEXTS = [
    *map(chr, [*range(1, 0x20), 0x7F, 0x85, 0xA0, 0x2028, 0x2029, 0xFEFF]),
    *("first\rsecond", "a\r\nb", "\r", "\n", '"', '""', 'say "x", then', ",", " a ", "'", "\\", "\\N", "#", "=1+1"),
    *("NULL", "nan", "NA", "true", "007", "1e5", "2024-01-01", "[1]", "日本", "\U0001f600"),
]
NAMES = ["text", "a, b", 'c"d', "e\rf", "number"]
ROWS = [[text, text, text, text, number] for number, text in enumerate(TEXTS)]


def of_csv(data: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(data.decode(), newline="")))[1:]


def of_pandas(data: bytes) -> list[list[str]]:
    return pd.read_csv(io.BytesIO(data), dtype=str, keep_default_na=False).values.tolist()


def of_polars(data: bytes) -> list[list[str]]:
    return [[*row] for row in pl.read_csv(data, infer_schema=False).rows()]


def of_duckdb(data: bytes) -> list[list[str]]:
    options = {"sep": ",", "quotechar": '"', "escapechar": '"', "lineterminator": "\\n", "auto_detect": False}
    columns = dict.fromkeys(NAMES, "varchar")
    return [[*row] for row in duckdb.read_csv(io.BytesIO(data), columns=columns, header=True, **options).fetchall()]


def of_pyarrow(data: bytes) -> list[list[str]]:
    options = pa_csv.ParseOptions(newlines_in_values=True)
    types = pa_csv.ConvertOptions(column_types=dict.fromkeys(NAMES, "string"), strings_can_be_null=False)
    return [[*row.values()] for row in pa_csv.read_csv(io.BytesIO(data), None, options, types).to_pylist()]


def written(rows: list[list[Any]], names: list[str] = NAMES) -> bytes:
    sink = io.BytesIO()
    write_csv(names, rows, sink)
    return sink.getvalue()


@pytest.mark.parametrize("read", [of_csv, of_pandas, of_polars, of_duckdb, of_pyarrow])
def test_every_reader_gives_the_texts_back(read: Callable) -> None:
    assert read(written(ROWS)) == [[*map(str, row)] for row in ROWS]


def test_a_null_is_an_empty_field_and_a_list_is_json() -> None:
    assert written([[None, "", [1, "é"], True, 0.5]]) == (
        b'text,"a, b","c""d","e\rf",number\n,"","[1, ""\xc3\xa9""]",true,0.5\n'
    )
