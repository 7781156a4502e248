"""What rollouts are grouped by: a column of theirs, or one of the data set, whatever its name is."""

import json
from collections.abc import Iterator
from string import Template

import duckdb
import pytest

from ludic.errors import QueryError
from ludic.root.sql.connection import open_duckdb
from ludic.root.sql.reports import by_column, figure

HOSTILE = ("a.b", "$.a", "$", "/a/b", "~1", 'q"', "q'; drop table rollouts; --", "ü🐈", "", "*", "[0]", "\\")
BREAKING = ("line\nbreak", "\r\n", "nul\0", "a\n'; drop table rollouts")
STORED: list[dict[str, object] | None] = [
    {"level": "hard", "meta": {"depth": 2, "x/y": True}, "env_name": "own", "nothing": None},
    {"level": "easy", "meta": {"depth": 10}, "a": {"b": "path"}},
    {name: index for index, name in enumerate((*HOSTILE, *BREAKING))},
    None,
]


@pytest.fixture
def con() -> Iterator[duckdb.DuckDBPyConnection]:
    with open_duckdb() as con:
        columns = (
            "group_id varchar, env_name varchar, episode_reward double, messages varchar[], example_columns varchar"
        )
        con.execute(f"create table rollouts ({columns})")
        texts = [*(columns and json.dumps(columns) for columns in STORED), "no JSON"]
        con.executemany(
            "insert into rollouts values (?, 'cats', ?, [], ?)",
            [[f"g{index // 2}", float(index), text] for index, text in enumerate(texts)],
        )
        con.execute("create view evals as from rollouts where episode_reward = 0")
        yield con


def values(con: duckdb.DuckDBPyConnection, name: str) -> list[object]:
    sql = by_column(con, name)
    assert not {"\n", "\r"} & {*sql}
    rows = con.sql(f"select {sql} from rollouts order by episode_reward").fetchall()  # noqa: S608
    return [value for (value,) in rows]


def test_a_value_is_that_of_the_column_then_of_the_key_then_of_the_path(con: duckdb.DuckDBPyConnection) -> None:
    assert values(con, "level") == ["hard", "easy", None, None, None]
    assert values(con, "env_name") == ["cats"] * 5  # the column, not the key
    assert values(con, "meta.depth") == ["2", "10", None, None, None]
    assert values(con, "meta.x/y") == ["true", None, None, None, None]
    assert values(con, "meta") == ['{"depth":2,"x/y":true}', '{"depth":10}', None, None, None]
    assert values(con, "nothing") == [None] * 5


def test_a_name_is_only_ever_a_name(con: duckdb.DuckDBPyConnection) -> None:
    for index, name in enumerate((*HOSTILE, *BREAKING)):
        assert values(con, name) == [None, None, str(index), None, None], name
    assert con.sql("select count(*) from rollouts").fetchall() == [(5,)]


def test_an_unknown_name_is_answered_with_those_that_there_are(con: duckdb.DuckDBPyConnection) -> None:
    with pytest.raises(QueryError) as failed:
        by_column(con, "leve")
    text = str(failed.value)
    assert text.startswith("column 'leve' is unknown; did you mean 'level'? the data set has the columns ")
    assert "has the columns '', '\\r\\n', $, $.a, *, /a/b, [0], " in text
    assert "q'; drop table rollouts; --, ~1 and 1 more; " in text
    assert text.endswith("; rollouts have group_id, env_name, episode_reward, example_columns")
    for name in ("\ud800", "meta.none", "level.depth", "a\0"):
        with pytest.raises(QueryError, match=r"^column "):
            by_column(con, name)
    with pytest.raises(QueryError, match="'messages' holds a list in each row; wanted one value to group by"):
        by_column(con, "messages")
    with pytest.raises(QueryError, match="evals have group_id"):
        by_column(con, "a.b", "evals")
    for index in range(9):
        con.execute(f"alter table rollouts add column c{index} int")
    with pytest.raises(QueryError, match=r"example_columns, c0, c1, c2, c3, [.][.][.]$"):
        by_column(con, "leve")
    con.execute("update rollouts set example_columns = null")
    with pytest.raises(QueryError, match="the data set has no further columns here; rollouts have"):
        by_column(con, "level")


def test_rewards_by_a_column_are_those_of_groups_and_the_rarest_values_are_counted(
    con: duckdb.DuckDBPyConnection,
) -> None:
    con.execute(
        "insert into rollouts values ('g0', 'cats', 4.0, [], '{\"level\":\"hard\"}'), ('g0', 'cats', null, [], '{}')"
    )
    sql = Template(figure("rewards_by_column")).safe_substitute(value=by_column(con, "level"))
    assert con.execute(sql, {"most": 2}).fetchall() == [
        # of g0 one that is not scored; of g1 2 and 3; of g2 4
        (None, 4, [2.5, 4.0], 3, 7),
        ("hard", 2, [2.0], 3, 7),  # of g0 0 and 4
    ]
