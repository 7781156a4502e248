"""A root with a sound file of every kind of the catalogue; a kind that it lacks is written by its row alone."""

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
from agent_calls import store_episodes
from tiny_runs import make_whole_root

from ludic.records.tables import arrow_schema
from ludic.root.catalogue import DATA, FILE_KINDS, FOREIGN, DataName, FileKind, Records, Table
from ludic.root.code import keep_files
from ludic.root.json_records import encode_record
from ludic.root.root import Root
from ludic.root.rows.evaluations import evaluation_of, put_evaluation
from ludic.root.rows.parquet import encode_plain
from ludic.settings.user_files import read_user_file

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
KINDS: tuple[FileKind[Any], ...] = tuple(row for row in FILE_KINDS if row not in FOREIGN)
"""The rows of the run's own files."""


def make_full_root(folder: Path) -> Root:
    """A short run, an evaluation, a user's file, an agent's episode, and a file of each kind that these lack."""
    root = make_whole_root(folder)
    store_episodes(root, "count-1", num_calls=2)
    put_evaluation(root, evaluation_of("moar_cats", {"max_steps": 1}, []))
    (folder / "mine.sql").write_text("select 1")
    keep_files(root, {"mine.sql": read_user_file(folder / "mine.sql")})
    rows = b'{"question": "2+2", "answer": "4"}\n'
    root.put(DATA.name(DataName(sha256(rows).hexdigest()[:16])), rows)
    for row in KINDS:
        if not names_of(root, row):
            name = row.name(a_name(row))
            root.put(name, a_file(root, row, name))
    return root


def names_of(root: Root, row: FileKind[Any]) -> list[str]:
    """Files of a kind, sorted: those that no other row of the folder names."""
    others = [] if not row.rest else [other for other in KINDS if not other.rest and other.folder == row.folder]
    names = (name for name in root.list("") if row.parse(name) is not None)
    return sorted(name for name in names if all(other.parse(name) is None for other in others))


def a_name(row: FileKind[Any], other: str = "") -> Any:
    """The fields of a name of this kind. other: a field that has another value than without it."""
    hints = get_type_hints(row.fields, include_extras=True)
    values = {}
    for name, hint in hints.items():
        first, second = _two_values(hint)
        values[name] = second if name == other else first
    return row.fields(**values)


def _two_values(hint: Any) -> tuple[Any, Any]:
    """Two values that a field of a name may have; raises ValueError for a spelling that matches none of these."""
    spelling = hint.__metadata__[0]
    if hint.__origin__ is int:
        return 7, 8
    candidates = (
        *(letter * size for size in (64, 32, 16) for letter in "ab"),
        *(f"0192929{digit}-0000-7000-8000-000000000001" for digit in "23"),
        *("train", "worker", "py", "sql"),
        *("requests", "rollouts/version=7/env=x"),
        *("w7-test", "w8-test", "file", "other", "/a.py", "/b.py", "a.py", "b.py"),
    )
    fitting = [each for each in candidates if re.fullmatch(spelling.pattern, each)]
    if len(fitting) < 2:
        raise ValueError(f"add two values of {spelling.pattern} to tests/every_kind.py")
    return fitting[0], fitting[1]


def a_file(root: Root, row: FileKind[Any], name: str) -> bytes:
    """Content of a file of this kind and name: a row of its table, a record, or a text."""
    of = row.parse(name)
    assert of is not None, name
    known = {**of._asdict(), "run_id": root.run_id}
    if isinstance(row, Table):
        schema = arrow_schema(row.table)
        line = {field.name: known.get(field.name, _a_value(field)) for field in schema}
        return encode_plain(pa.Table.from_pylist([line], schema))
    if isinstance(row, Records):
        return encode_record(a_record(row.record, known))
    return b"text"


def _a_value(field: pa.Field) -> Any:
    """A value of a column; null where that is allowed, but for measured numbers."""
    if field.nullable and not pa.types.is_floating(field.type):
        return None
    kinds = {pa.types.is_string: "x", pa.types.is_timestamp: NOON, pa.types.is_boolean: False, pa.types.is_list: []}
    return next((value for is_kind, value in kinds.items() if is_kind(field.type)), 0)


def a_record(type_: type, known: Mapping[str, Any]) -> Any:
    """A record with these fields, as far as it has them; others have their default, or a value of their type."""
    hints = get_type_hints(type_, include_extras=True)
    values = {}
    for each in dataclasses.fields(type_):
        if each.name in known:
            values[each.name] = known[each.name]
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            values[each.name] = _of_type(hints[each.name])
    return type_(**values)


def _of_type(hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return arguments[0]
    if origin in (Union, types.UnionType):
        return None if type(None) in arguments else _of_type(arguments[0])
    if origin is typing.Annotated:
        is_name = arguments[0] is str and getattr(arguments[1], "pattern", None) is not None
        return _two_values(hint)[0] if is_name else _of_type(arguments[0])
    simple: dict[Any, Any] = {str: NOON.isoformat(), int: 1, float: 1.0, bool: False}
    if hint in simple:
        return simple[hint]
    return {} if isinstance(origin, type) and issubclass(origin, Mapping) else []
