"""Rewards are sums of rounded numbers: no SQL compares one with a number, or with another, but by the macros."""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import duckdb
import pytest

from ludic.base.by_name import packaged_names, read_packaged
from ludic.records.rollout import comparable_reward
from ludic.root.sql.connection import open_duckdb
from ludic.root.sql.library import _BY_EXAMPLE, run_query

FOLDERS = (
    *("advantages", "checks", "contamination", "figures", "filters", "measures", "notes", "plan", "selections"),
    "views",
)
MACROS = ("is_success", "comparable_reward")
NO_REWARDS = ("count", "count_star", "len", "isfinite", "hash")
"""Functions of rewards that return no reward."""
COMPARISONS = re.compile(r"COMPARE_(?!DISTINCT_FROM$)\w*|BETWEEN")
TEXTS = {f"{folder}/{name}": read_packaged(folder, name) for folder in FOLDERS for name in packaged_names(folder)}


def statement(file: str, text: str) -> str:
    """A SELECT that DuckDB's parser takes: a filter is a predicate, and figures and plans may be templates."""
    text = text.replace("$rivals", read_packaged("assembly", "rivals"))
    places = r"\$(\w+)" if file.startswith("views/") else r"\$(keys|rows|predicates)\b"
    text = re.sub(places, r"\1", text)
    return f"select\n{text}" if file.startswith("filters/") else text


def nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """All expressions, without the arguments of the macros and of NO_REWARDS."""
    if isinstance(tree, list):
        for each in tree:
            yield from nodes(each)
    elif isinstance(tree, dict):
        yield tree
        skipped = ["arguments", "children"] if tree.get("function_name") in (*MACROS, *NO_REWARDS) else []
        yield from nodes([value for key, value in tree.items() if key not in skipped])


def is_reward(node: dict[str, Any]) -> bool:
    """A column, or a name in a list comprehension, that holds rewards or their mean."""
    names = node.get("column_names") or [""]
    return (
        node.get("class") == "COLUMN_REF"
        and re.fullmatch(r"(?!num_)(\w+_)?rewards?(_(mean|min|max))?", names[-1]) is not None
    )


@cache
def parser() -> duckdb.DuckDBPyConnection:
    return open_duckdb()


def comparisons_of_rewards(sql: str) -> list[str]:
    """Types of the comparisons in a statement of which one side is a reward."""
    (text,) = parser().execute("select json_serialize_sql(?)", [sql]).fetchall()[0]
    tree = json.loads(text)
    assert not tree["error"], tree
    return [
        node["type"]
        for node in nodes(tree)
        if (node.get("type") == "COMPARE_IN" or COMPARISONS.fullmatch(node.get("type") or ""))
        and any(map(is_reward, nodes(list(node.values()))))
    ]


@pytest.mark.parametrize("file", TEXTS)
def test_no_sql_compares_a_reward_but_by_the_macros(file: str) -> None:
    assert comparisons_of_rewards(statement(file, TEXTS[file])) == []


def test_values_of_measures_are_compared_by_a_macro() -> None:
    sql = _BY_EXAMPLE.format(over="from x", measure="select value as reward from x", part="1", trials="1")
    assert "comparable_reward(value) in (0, 1)" in sql


@pytest.mark.parametrize(
    "predicate",
    [
        "episode_reward >= 1",
        "max(episode_reward) = min(episode_reward)",
        "coalesce(reward, 0) in (0, 1)",
        "list_avg([(reward >= $success)::integer for reward in rewards]) between 0 and 1",
        "count(*) filter (t.reward < 1.0) > 3",
    ],
)
def test_a_comparison_of_a_reward_is_found(predicate: str) -> None:
    assert comparisons_of_rewards(f"select {predicate} from t")  # noqa: S608


def test_sums_of_rounded_numbers_are_what_they_should_be() -> None:
    con = open_duckdb()
    sums = [0.7 + 0.2 + 0.1, 0.6 + 0.3 + 0.1, sum([0.1] * 10), 1.0, 1.1]
    assert sums[0] != 1.0
    for each in sums:
        row = run_query(
            con, "select is_success($r::double, null, null) as s, comparable_reward($r::double) as c", {"r": each}
        )
        assert row.to_pylist() == [{"s": True, "c": comparable_reward(each)}]
    query = "select is_success($r::double, $c::boolean, $t::double) as s"
    for reward, correct, threshold, wanted in [
        (0.9999, None, None, False),
        (1 - 2e-9, None, None, False),
        (0.3, True, None, True),
        (1.3, False, None, False),
        (0.3, True, 0.5, False),
        (0.1 + 0.2 + 0.2, False, 0.5, True),
        (None, True, None, None),
    ]:
        found = run_query(con, query, {"r": reward, "c": correct, "t": threshold}).to_pylist()
        assert found == [{"s": wanted}], (reward, correct, threshold)
