"""Rows without nulls of their own give the same tokens, whatever kind of table or file holds them."""

import csv
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import FAMILIES

from ludic.adapters.imports.episodes import rows_of
from ludic.adapters.imports.formats import jsonl
from ludic.adapters.imports.forms import conversations, pairs
from ludic.adapters.imports.records import ImportRecord, read_records
from ludic.app.operations.fit_inputs import read_rows
from ludic.base.data_files import SUFFIXES, table_rows
from ludic.environments.qa_rows import QuestionColumns, QuestionSource


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(name: str, **properties: str) -> dict[str, Any]:
    described = {each: {"type": kind} for each, kind in properties.items()}
    parameters = {"type": "object", "properties": described, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _asked(text: str, *calls: Mapping[str, Any], **fields: Any) -> list[dict[str, Any]]:
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
    called = [{"role": "assistant", "content": "", "tool_calls": [*calls], **fields}] if calls else []
    return [{"role": "user", "content": text}, *called, *results]


ROWS: list[dict[str, Any]] = [
    {
        "messages": [
            *_asked("beds?", _call("order", bed="wide", litres=2), _call("open", code=17)),
            {"role": "assistant", "content": "Done.", "reasoning_content": "Both worked."},
        ],
        "tools": [_tool("order", bed="string", litres="integer"), _tool("open", code="integer")],
    },
    {
        "messages": [*_asked("clean", _call("clean")), {"role": "assistant", "content": "Clean.", "weight": 1}],
        "tools": [_tool("clean")],
    },
    {"messages": [*_asked("hello"), {"role": "assistant", "content": "Hi."}]},
]
"""Calls with arguments of other names, schemas of other parameters, and fields that one message alone has."""
PAIRS: list[dict[str, Any]] = [
    {
        "prompt": _asked("beds?", _call("order", bed="wide")),
        "chosen": [{"role": "assistant", "content": "Done.", "reasoning_content": "It worked."}],
        "rejected": [{"role": "assistant", "content": "What?"}],
        "tools": [_tool("order", bed="string")],
    },
    {
        "prompt": _asked("open", _call("open", code=17)),
        "chosen": [{"role": "assistant", "content": "Open."}],
        "rejected": [{"role": "assistant", "content": "No.", "name": "x"}],
        "tools": [_tool("open", code="integer")],
    },
]


def _lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        names = [*dict.fromkeys(name for row in rows for name in row)]
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([json.dumps(row[name]) if name in row else "" for name in names] for row in rows)


def _write_arrow(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)


FILES: dict[str, Callable[[Path, Any], Any]] = {
    ".jsonl": lambda path, rows: path.write_bytes(_lines(rows)),
    ".ndjson": lambda path, rows: path.write_bytes(_lines(rows)),
    ".json": lambda path, rows: path.write_text(json.dumps(rows)),
    ".csv": _write_csv,
    ".parquet": lambda path, rows: pq.write_table(pa.Table.from_pylist(rows), path),
    ".arrow": _write_arrow,
}


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    suffix = path.suffixes[-2] if path.suffix == ".gz" else path.suffix
    FILES[suffix](path, rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(path.read_bytes()))
    return path


def _pandas(rows: Sequence[Mapping[str, Any]]) -> Any:
    return pytest.importorskip("pandas").DataFrame(rows)


def _dataset(rows: Sequence[Mapping[str, Any]]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(rows)


TABLES: dict[str, Callable[[Any], Any]] = {
    "list": lambda rows: rows,
    "Arrow table": pa.Table.from_pylist,
    "Polars": pl.DataFrame,
    "pandas": _pandas,
    "datasets": _dataset,
    "datasets, chosen rows": lambda rows: _dataset([*rows, rows[0]]).select(range(len(rows))),
}
KINDS = [*TABLES, "folder of datasets", *SUFFIXES]


@pytest.fixture(params=KINDS)
def bring(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Any], Any]:
    """Makes a data set of one kind."""
    if request.param in TABLES:
        return TABLES[request.param]

    def write(rows: Any) -> Path:
        path = tmp_path / f"rows{request.param if request.param in SUFFIXES else ''}"
        if request.param in SUFFIXES:
            return _write(path, rows)
        _dataset(rows).save_to_disk(str(path))
        return path

    return write


def tokens_of(records: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """Prompt and response of each row, in a template that shows tools, calls and thinking."""
    family = FAMILIES["qwen3 thinking"]
    tokenizer = family.tokenizer()
    found = rows_of(
        [jsonl(ImportRecord(record)) for record in records], lambda: tokenizer, lambda: (tokenizer.eos_token_id,)
    )
    assert all(isinstance(rows, list) for rows in found), found
    return [(row.prompt_tokens.tolist(), row.response_tokens.tolist()) for rows in found for row in rows]


@pytest.mark.parametrize(("rows", "read"), [(ROWS, conversations), (PAIRS, pairs)], ids=["sft", "dpo"])
def test_every_table_gives_the_tokens_of_the_list_of_dicts(
    bring: Callable[[Any], Any], rows: list[dict[str, Any]], read: Callable[..., Any]
) -> None:
    found = tokens_of(read(*read_rows(bring(rows), {})).records)
    wanted = tokens_of(read(rows, "dataset").records)
    assert len(found) >= len(rows)
    assert found == wanted


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_file_is_imported_with_the_same_tokens(suffix: str, tmp_path: Path) -> None:
    path = _write(tmp_path / f"rows{suffix}", ROWS)
    assert tokens_of([values for _, values in read_records(str(path))]) == tokens_of(ROWS)


def test_questions_of_every_file_are_the_same_messages(tmp_path: Path) -> None:
    asked = [{"question": _asked("beds?", _call("order", bed="wide")), "answer": "a"}]
    asked += [{"question": _asked("open", _call("open", code=17)), "answer": "b"}]
    columns = QuestionColumns(question="question", answer="answer", answer_pattern=None, problem_of=lambda _: None)
    found = {}
    for suffix in SUFFIXES:
        rows = QuestionSource(name=str(_write(tmp_path / f"rows{suffix}", asked))).read(columns)
        found[suffix] = [rows[number].messages for number in range(len(rows))]
    assert found[".jsonl"][0][1].tool_calls[0].arguments == '{"bed": "wide"}'
    assert all(each == found[".jsonl"] for each in found.values())


# --- Nulls of one's own ----------------------------------------------------------------------------------------------


def test_null_is_absent_in_structs_alone() -> None:
    type_ = pa.struct(
        {"a": pa.int64(), "b": pa.list_(pa.int64()), "c": pa.map_(pa.string(), pa.struct({"d": pa.int64()}))}
    )
    rows = [{"s": {"a": None, "b": [1, None], "c": [("k", {"d": None}), ("l", None)]}}, {"s": None}]
    table = pa.Table.from_pylist(rows, schema=pa.schema({"s": type_, "t": pa.list_(type_), "n": pa.int64()}))
    assert table_rows(table) == [
        {"s": {"b": [1, None], "c": [("k", {}), ("l", None)]}, "t": None, "n": None},
        {"s": None, "t": None, "n": None},
    ]
    assert table_rows(table, maps_as_pydicts="lossy")[0]["s"]["c"] == {"k": {}, "l": None}


def test_json_keeps_its_nulls() -> None:
    text = '{"city": null, "a": 2}'
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array([text, None]))
    assert table_rows(pa.table({"x": column, "y": [text, None]})) == [
        {"x": {"city": None, "a": 2}, "y": text},
        {"x": None, "y": None},
    ]
