"""Loading advantage and filter SQL, and what is said about files that can't work."""

import re
from pathlib import Path
from typing import Any

import pytest

import ludic
from ludic.errors import QueryError
from ludic.records.tables import arrow_schema
from ludic.root.sql.connection import open_duckdb
from ludic.root.sql.library import advantages, load_advantage, load_filter, required_columns, run_query

SQL = Path(ludic.__file__).parent / "sql"


@pytest.fixture
def con(rows):
    con = open_duckdb()
    con.register("rollouts", rows([[1.0, 0.0, 0.5]]))
    return con


@pytest.fixture
def sql_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "mine.sql"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_an_unknown_name_is_answered_with_close_ones():
    with pytest.raises(QueryError, match="advantage 'rlo' is unknown; did you mean 'rloo'"):
        load_advantage("rlo")
    with pytest.raises(QueryError, match="filter 'drop_truncate' is unknown; did you mean 'drop_truncated'"):
        load_filter("drop_truncate")


def test_a_missing_file_is_named():
    with pytest.raises(QueryError, match=r"advantage nowhere/mine\.sql: there is no file .*nowhere/mine\.sql"):
        load_advantage("nowhere/mine.sql")


def test_a_users_file_runs_like_a_packaged_one(con, sql_file):
    path = sql_file(
        "-- é; twice the reward\nselect rollout_id, 2 * episode_reward as advantage from rollouts; -- done;\n"
    )
    assert load_advantage(path).name == "mine"
    assert advantages(con, path)["advantage"].to_pylist() == [2.0, 0.0, 1.0]


def test_a_semicolon_in_a_string_is_no_end(con, sql_file):
    path = sql_file("select rollout_id, length('a;b') as advantage from rollouts where 'x' <> ';'")
    assert advantages(con, path)["advantage"].to_pylist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("selec rollout_id from rollouts", "syntax error at or near"),
        ("select 1; select 2", "holds SELECT, SELECT"),
        ("drop table rollouts", "holds DROP"),
        ("-- nothing", "holds nothing"),
        ("select rollout_id, 1 as advantage from rollouts) union (select 1, 2", "syntax error at or near"),
    ],
)
def test_what_is_not_one_select_is_refused_with_the_file_and_the_reason(sql_file, text: str, reason: str):
    path = sql_file(text)
    with pytest.raises(QueryError) as caught:
        load_advantage(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert reason in str(caught.value)
    assert "wanted one SELECT over rollouts" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_column_that_is_not_there_is_named_with_duckdbs_reason(con, sql_file):
    path = sql_file("select rollout_id, rewrad as advantage from rollouts")
    with pytest.raises(
        QueryError, match=r'mine\.sql: Binder Error: Referenced column "rewrad" not found.*wanted one SELECT'
    ):
        advantages(con, path)


@pytest.mark.parametrize(
    "columns",
    ["rollout_id", "rollout_id, 1 as adv", "rollout_id, 'high' as advantage", "rollout_id, 1 as advantage, 2 as b"],
)
def test_other_columns_than_rollout_id_and_advantage_are_refused(con, sql_file, columns: str):
    path = sql_file(f"select {columns} from rollouts")  # noqa: S608
    with pytest.raises(QueryError, match=r"mine\.sql: returns rollout_id .*wanted one SELECT"):
        advantages(con, path)


def test_token_advantages_are_a_list_of_numbers(con, sql_file):
    path = sql_file("select rollout_id, [episode_reward, 0] as token_advantages from rollouts")
    assert advantages(con, path)["token_advantages"].to_pylist() == [[1.0, 0.0], [0.0, 0.0], [0.5, 0.0]]


def test_parameters_are_bound_by_name_and_others_are_left_out(con, sql_file):
    path = sql_file("select rollout_id, episode_reward * $scale as advantage from rollouts")
    assert advantages(con, path, scale=3, other="x")["advantage"].to_pylist() == [3.0, 0.0, 1.5]


def test_a_parameter_without_value_is_named(con, sql_file):
    path = sql_file("select rollout_id, $scale * $shift as advantage from rollouts")
    with pytest.raises(QueryError, match=r"mine\.sql: no value for \$shift; give it as a parameter"):
        advantages(con, path, scale=3)


def test_a_header_line_gives_a_parameter_its_default(con, sql_file):
    path = sql_file("-- default: scale = 2\nselect rollout_id, episode_reward * $scale as advantage from rollouts")
    assert advantages(con, path)["advantage"].to_pylist() == [2.0, 0.0, 1.0]
    assert advantages(con, path, scale=4)["advantage"].to_pylist() == [4.0, 0.0, 2.0]


def test_a_default_that_is_no_json_is_refused(sql_file):
    with pytest.raises(QueryError, match="default of scale is 2x, wanted JSON"):
        load_advantage(sql_file("-- default: scale = 2x\nselect rollout_id, $scale as advantage from rollouts"))


@pytest.mark.parametrize(
    "text", ["truncated) from rollouts; drop table rollouts; --", "truncated), (parse_error", "-- none"]
)
def test_a_filter_is_an_expression_and_nothing_else(sql_file, text: str):
    with pytest.raises(QueryError, match=r"mine\.sql: .*wanted one predicate"):
        load_filter(sql_file(text))


def test_required_columns_are_those_named_outside_of_comments(sql_file):
    path = sql_file(
        "-- messages would be heavy\nselect rollout_id, len(Response_Tokens) - my_metadata as advantage from rollouts"
    )
    columns = arrow_schema("rollouts").names
    assert required_columns([load_advantage(path)], columns) == ["rollout_id", "response_tokens"]
    assert required_columns([load_filter("drop_errors")], columns) == ["episode_reward", "error"]


def test_run_query_gives_the_rows_or_one_line(con):
    assert run_query(con, "select $a + 1 as b", {"a": 1}).to_pylist() == [{"b": 2}]
    with pytest.raises(QueryError) as caught:
        run_query(con, "select nothing\nfrom rollouts")
    assert str(caught.value).startswith('Binder Error: Referenced column "nothing" not found')
    assert "\n" not in str(caught.value)


def test_a_python_variable_is_never_taken_for_a_table(con, rows):
    hidden = rows([[1.0]])
    assert hidden.num_rows == 1
    with pytest.raises(QueryError, match="hidden does not exist"):
        run_query(con, "from hidden")


def test_filters_drop_rows_after_the_baseline_was_taken(con, rows):
    con.register("rollouts", rows([[1.0, 0.0, 0.5], [2.0, 2.0]], truncated=[True, False, False, False, False]))
    drop = ["drop_truncated", "drop_zero_variance_groups"]
    # baselines (0 + .5)/2, (1 + .5)/2, (1 + 0)/2; the first is truncated, the second group has one reward only
    assert sorted(advantages(con, "rloo", filters=drop)["advantage"].to_pylist()) == [-0.75, 0.0]


def test_parameters_of_filters_are_given_with_those_of_the_advantage(con, rows):
    con.register("rollouts", rows([[1.0, 0.0]], policy_version=3))
    found = [
        advantages(con, "rloo", filters=["max_off_policy_steps"], trainer_version=version, max_off_policy_steps=2)
        for version in (5, 6)
    ]
    assert [table.num_rows for table in found] == [2, 0]
    with pytest.raises(QueryError, match=r"max_off_policy_steps\.sql: no value for \$max_off_policy_steps"):
        advantages(con, "rloo", filters=["max_off_policy_steps"], trainer_version=5)


def test_sql_that_fails_names_advantage_and_filters(con, tmp_path):
    (tmp_path / "mine.sql").write_text("no_such_column")
    with pytest.raises(QueryError, match=r"rloo\.sql and .*mine\.sql: .*no_such_column"):
        advantages(con, "rloo", filters=[str(tmp_path / "mine.sql")])


def test_a_users_advantage_reads_the_rewards_of_peers(con, sql_file):
    path = sql_file(
        """select rollout_id, (episode_reward - lowest - mean) / (std + $epsilon) as advantage
        from trajectory_rows left join rewards_of_peers using (group_id, peers)"""
    )
    mine, grpo = (
        found.sort_by("rollout_id") for found in (advantages(con, path, epsilon=1e-6), advantages(con, "grpo"))
    )
    assert mine.equals(grpo)


# --- Macros ---------------------------------------------------------------------------------------------


def baseline_of(*rewards: float | None) -> dict[str, Any]:
    con = open_duckdb()
    con.execute("create table given (reward double)")
    con.executemany("insert into given values (?)", [[reward] for reward in rewards])
    ((found,),) = con.execute("select baseline_of(reward) from given").fetchall()
    return found


def test_a_baseline_is_of_the_scored_rewards_relative_to_the_lowest():
    # 0, 1 and 2 above the lowest
    assert baseline_of(5.0, None, 4.0, 6.0) == {"n": 3, "lowest": 4.0, "total": 3.0, "std": 1.0}
    assert baseline_of(0.7) == {"n": 1, "lowest": 0.7, "total": 0.0, "std": 0.0}
    assert baseline_of(None) == {"n": 0, "lowest": None, "total": None, "std": 0.0}


def test_a_baseline_loses_no_digits_of_large_rewards():
    # sums of the rewards themselves would be rounded to multiples of 8
    assert baseline_of(*(1e16 + 2 * i for i in range(5)))["total"] == 20.0


@pytest.mark.parametrize("path", sorted(SQL.rglob("*.sql")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_packaged_sql_hashes_a_list(path: Path):
    """DuckDB gives [0, 5] and [5] one hash."""
    text = re.sub(r"--.*", "", path.read_text(encoding="utf-8"))
    for found in re.finditer(r"\bhash\(", text):
        depth, end = 1, found.end()
        while depth:
            depth, end = depth + {"(": 1, ")": -1}.get(text[end], 0), end + 1
        argument = text[found.end() : end - 1]
        assert "[" not in re.sub(r"array_to_string\(.*?\)", "", argument), argument
