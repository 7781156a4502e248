"""The SQL files of ludic/sql/figures/ and plan/: one statement each, which says what it gives; and the shared means."""

import ast
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

import ludic
from ludic.code.kinds import packaged_names, read_packaged
from ludic.sql.reports import figure, means

PACKAGE = Path(ludic.__file__).parent
NAMES = [(folder, name) for folder in ("figures", "plan") for name in packaged_names(folder)]


@pytest.mark.parametrize(("folder", "name"), NAMES)
def test_a_file_is_one_select_whose_first_line_says_what_it_gives(folder: str, name: str) -> None:
    text = read_packaged(folder, name)
    first, *others = text.splitlines()
    assert first.startswith(f"-- {name}: ")
    assert others[0].startswith("-- grain: ")
    assert any("reads: " in line for line in others if line.startswith("--"))
    (statement,) = duckdb.extract_statements(text.replace("$predicates", "true").replace("from $rows", "from rollouts"))
    assert statement.type == duckdb.StatementType.SELECT


def test_every_figure_is_shown_somewhere() -> None:
    texts = {
        str(node.value)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    formed = {"messages_of_rollouts", "messages_of_evals"}  # figure(f"messages_of_{folder}")
    assert set(packaged_names("figures")) - formed <= texts


def test_means_are_those_of_the_rows_that_the_keys_tell_apart(con_of_rollouts: duckdb.DuckDBPyConnection) -> None:
    rows = con_of_rollouts.sql(means("env_name, policy_version", "rollouts")).fetchall()
    # (1 + 0) / 2 and 3 / 1, the unscored one aside; lengths (2 + 4) / 2 and (6 + 8) / 2; of version 1 one of two failed
    assert rows == [("a", 0, 2, 1, 0.5, 3.0, 0.5, 0.0, 0.0, 0.0), ("a", 1, 2, 2, 3.0, 7.0, 0.0, 0.0, 0.0, 0.5)]


@pytest.fixture
def con_of_rollouts() -> Iterator[duckdb.DuckDBPyConnection]:
    con = duckdb.connect()
    con.execute(
        "create table rollouts as from (values ('a', 0, 'g', 1.0, 2, true, null), ('a', 0, 'g', 0.0, 4, false, null), "
        "('a', 1, 'h', 3.0, 6, false, null), ('a', 1, 'i', null, 8, false, 'gone')) "
        "as t(env_name, policy_version, group_id, episode_reward, response_length, truncated, error)"
    )
    con.execute("alter table rollouts add column incomplete_completion boolean default false")
    con.execute("alter table rollouts add column parse_error boolean default false")
    yield con
    con.close()


def test_a_figure_that_is_not_there_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        figure("no_such_figure")
