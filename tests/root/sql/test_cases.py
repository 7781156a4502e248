"""The cases of tests/root/sql/cases/: tables of given rows, and of what the packaged SQL must make of them.

cases/README.md says how a case is written. Each file is named after one of ludic/root/sql/.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from strategies import make_group

from ludic.base.by_name import packaged_names, read_packaged
from ludic.records.conversion import to_table
from ludic.records.rollout import RolloutBatch, RolloutMetadata
from ludic.root.sql.connection import open_duckdb
from ludic.root.sql.library import (
    advantages,
    load_filter,
    load_measure,
    load_selection,
    run_measure,
    run_query,
    run_selection,
)

CASES = Path(__file__).parent / "cases"
WANTED = {
    "advantages": ("advantage", "token_advantages", "pair_id"),
    "filters": ("is_dropped",),
    "selections": ("position",),
    "measures": ("part", "total", "num_values", "num_missing", "num_trials"),
}
"""Columns that say what must come out, by folder of ludic/root/sql/."""
ELSEWHERE = {
    "advantages": {
        **dict.fromkeys(("turn_returns", "mt_grpo", "gigpo", "tree_grpo", "fold_grpo"), "test_agent_advantages.py"),
    },
    "filters": {},
    "selections": dict.fromkeys(("uniform", "epochs", "recency"), "test_selections.py"),
    "measures": dict.fromkeys(("maj_at_k", "tool_errors"), "../../eval/test_measures.py"),
}
"""SQL over turns, or that draws: the tests of it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One section of a file of cases."""

    file: Path
    title: str
    params: Mapping[str, Any] = field(default_factory=dict)
    tables: Sequence[Sequence[Mapping[str, str]]]
    """Cells by column, line by line: the given rows, and for measures also those that must come out."""

    @property
    def folder(self) -> str:
        return self.file.parent.name

    @property
    def name(self) -> str:
        return self.file.stem

    def __str__(self) -> str:
        return f"{self.name}: {self.title}"


def read_cases(file: Path) -> Iterator[Case]:
    """Raises ValueError, with the place, for a file that is not written as cases/README.md says."""
    for section in re.split(r"^## ", file.read_text(), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        found = re.search(r"^Parameters: (.*)$", text, re.MULTILINE)
        params = dict(re.findall(r"`(\w+) = ([^`]+)`", found[1])) if found else {}
        tables = [read_table(lines, f"{file}: {title}") for lines in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)]
        if len(tables) != (2 if file.parent.name == "measures" else 1):
            raise ValueError(f"{file}: {title}: has {len(tables)} tables; cases/README.md says how many it wants")
        yield Case(
            file=file,
            title=title,
            params={key: ast.literal_eval(value) for key, value in params.items()},
            tables=tables,
        )


def read_table(text: str, where: str) -> list[dict[str, str]]:
    header, rule, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    if any(set(cell) != {"-"} for cell in rule) or any(len(line) != len(header) for line in (rule, *lines)):
        raise ValueError(f"{where}: is no table with a cell for each of {', '.join(header)} in every line")
    return [dict(zip(header, line, strict=True)) for line in lines]


ALL = [case for file in sorted(CASES.glob("*/*.md")) for case in read_cases(file)]


def of(folder: str) -> Any:
    return pytest.mark.parametrize("case", [case for case in ALL if case.folder == folder], ids=str)


@cache
def connection() -> duckdb.DuckDBPyConnection:
    """One for all cases: a new one takes longer than most of them."""
    return open_duckdb()


# --- Given rows --------------------------------------------------------------------------------------------------


@cache
def a_rollout() -> pa.Table:
    """A scored rollout of one token and no turns: where a table of cases names no column, its rows are like it."""
    group = make_group(rewards=[0.0], response_length=1)
    (rollout,) = group.rollouts
    rollout = replace(rollout, trajectory_id=None, agent_steps=(), environment_steps=(), group_id="g")
    batch = RolloutBatch(groups=(replace(group, rollouts=(rollout,)),), metadata=RolloutMetadata(worker_id="w"))
    return to_table(batch, run_id="run", sequence=0)


@cache
def a_group() -> pa.Table:
    """A row of the relation `groups` that selections read."""
    con = open_duckdb()
    con.register("given", a_rollout())
    con.execute(
        """create table rollouts as
        select *, 'file' as file, 0 as row_group, 0 as "row", 0 as arrival, 0 as num_uses from given"""
    )
    con.execute("create table judged as select rollout_id, group_id, null as reason from rollouts")
    con.execute(f"create view queue as\n{read_packaged('plan', 'queue')}")
    return run_query(con, read_packaged("plan", "groups"))


@cache
def an_episode() -> pa.Table:
    """A row of the view `eval_episodes` that measures read."""
    con = open_duckdb()
    con.register("given", a_rollout())
    con.execute("create table evals as select *, 0 as version, 'env' as env from given")
    return run_query(con, read_packaged("views", "eval_episodes"))


def register(con: duckdb.DuckDBPyConnection, name: str, like: pa.Table, lines: Sequence[Mapping[str, str]]) -> None:
    """Create the table `name` with a row for each line: its cells, and for other columns the values of `like`."""
    con.register("like_this", like)
    types = dict(con.sql("select column_name, column_type from (describe from like_this)").fetchall())
    rows = []
    for line in lines:
        unknown = line.keys() - types.keys()
        assert not unknown, f"{name} has no column {', '.join(unknown)}"
        cells = ", ".join(
            f'({as_sql(cell, types[column])})::{types[column]} as "{column}"' for column, cell in line.items()
        )
        rows.append(f"select * replace ({cells}) from like_this")  # noqa: S608
    con.execute(f"create or replace table {name} as {' union all by name '.join(rows)}")


def as_sql(cell: str, type_: str) -> str:
    """A cell as an expression: of text it is the text itself, of anything else SQL."""
    return "'" + cell.replace("'", "''") + "'" if type_ == "VARCHAR" and cell != "null" else cell


def value_of(cell: str) -> Any:
    """The value of an expression; its decimals as floats."""
    (value,) = duckdb.sql(f"select {cell} as value").fetchall()[0]
    return [float(each) for each in value] if isinstance(value, list) else as_float(value)


def as_float(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else value


def approximately(value: Any) -> Any:
    return value if value is None or isinstance(value, str | bool) else pytest.approx(value, rel=1e-9, abs=1e-12)


def given(case: Case, identity: str) -> list[dict[str, str]]:
    """The given cells of each line, numbered where they lack the column that tells rows apart."""
    lines = []
    for number, line in enumerate(case.tables[0], 1):
        cells = {column: cell for column, cell in line.items() if column not in WANTED[case.folder]}
        lines.append({identity: f"r{number}"} | cells)
    return lines


# --- The tests ---------------------------------------------------------------------------------------------------


@of("advantages")
def test_advantages(case: Case) -> None:
    con = connection()
    lines = [{"episode_id": line["rollout_id"]} | line for line in given(case, "rollout_id")]
    register(con, "rollouts", a_rollout(), lines)
    found = {row["rollout_id"]: row for row in advantages(con, case.name, **case.params).to_pylist()}
    for line, wanted in zip(lines, case.tables[0], strict=True):
        for column in WANTED["advantages"]:
            if column in wanted:
                row = found.get(line["rollout_id"], {})
                value = wanted[column] if column == "pair_id" and wanted[column] != "null" else value_of(wanted[column])
                assert row.get(column) == approximately(value), (line, column)
    assert found.keys() <= {line["rollout_id"] for line in lines}


@of("filters")
def test_filters(case: Case) -> None:
    con = connection()
    lines = [{"episode_id": line["rollout_id"]} | line for line in given(case, "rollout_id")]
    register(con, "rollouts", a_rollout(), lines)
    text = load_filter(case.name)
    params = {name: value_of(value) if isinstance(value, str) else value for name, value in case.params.items()}
    query = f"select rollout_id, coalesce((\n{text.text}\n), false) as is_dropped from rollouts"  # noqa: S608
    found = dict(zip(*run_query(con, query, text.bind(params)).to_pydict().values(), strict=True))
    assert found == {
        line["rollout_id"]: value_of(row["is_dropped"]) for line, row in zip(lines, case.tables[0], strict=True)
    }


@of("selections")
def test_selections(case: Case) -> None:
    con = connection()
    lines = [
        {"queue_position": f"{{v: {line.get('policy_version', 0)}, a: {number}, f: 'file', g: 0, r: 0}}"} | line
        for number, line in enumerate(given(case, "group_id"))
    ]
    register(con, "groups", a_group(), lines)
    con.execute("create or replace view queue as select group_id, queue_position from groups")
    text = load_selection(case.name)
    values = text.bind({"seed": 0, "step": 1, "trainer_version": 0} | case.params)
    candidates = run_query(con, "select group_id from groups")["group_id"]
    found = run_selection(con, text, values, candidates).to_pylist()
    positions = {line["group_id"]: row["position"] for line, row in zip(lines, case.tables[0], strict=True)}
    assert found == sorted(
        (each for each, at in positions.items() if at != "null"), key=lambda each: int(positions[each])
    )


@of("measures")
def test_measures(case: Case) -> None:
    con = connection()
    seen: dict[str, int] = {}
    lines = []
    for line in given(case, "episode_id"):
        example = line["env_example_id"]
        lines.append({"sample_index": str(seen.setdefault(example, 0))} | line)
        seen[example] += 1
    register(con, "given", an_episode(), lines)
    rows = run_measure(con, load_measure(case.name), case.params, over="select * from given").to_pylist()
    _, wanted = case.tables
    key = [column for column in ("env_example_id", "part") if column in wanted[0]]
    found = {tuple(row[column] for column in key): row for row in rows}
    assert found.keys() == {tuple(line[column] for column in key) for line in wanted}
    for line in wanted:
        row = found[tuple(line[column] for column in key)]
        for column in line.keys() - set(key):
            assert row[column] == approximately(value_of(line[column])), (line, column)


@pytest.mark.parametrize("folder", WANTED)
def test_every_packaged_sql_has_cases_or_tests_elsewhere(folder: str) -> None:
    with_cases = {file.stem for file in (CASES / folder).glob("*.md")}
    assert with_cases | ELSEWHERE[folder].keys() == set(packaged_names(folder))
    for name, file in ELSEWHERE[folder].items():
        assert name in (Path(__file__).parent / file).read_text()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("## a\n\n| x | advantage |\n| --- | --- |\n| 1 |\n", "a cell for each of x, advantage"),
        ("## a\n\nNo table.\n", "has 0 tables"),
    ],
)
def test_a_case_that_is_not_written_as_the_readme_says_is_an_error_with_its_place(
    tmp_path: Path, text: str, reason: str
) -> None:
    file = tmp_path / "rloo.md"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"rloo\.md: a: .*{reason}"):
        list(read_cases(file))
