"""`ludic sql`: tables for people, and formats that hold the whole result."""

import csv
import io
import json
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from forks import Forked
from rich.console import Console
from tiny_runs import fill

from ludic.app.show.tables import print_table
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.sql.connection import connect
from ludic.root.sql.query import open_result

pytestmark = pytest.mark.slow

REWARDS = "select version, count(*) as n, avg(episode_reward) as reward from rollouts group by all order by all"


def test_a_table_has_a_header_and_a_line_a_row(ludic, trained: Root) -> None:
    result = ludic("sql", trained.url, REWARDS)
    assert (result.code, result.err) == (0, "")
    header, _, *rows = (line.split() for line in result.out.splitlines())
    assert header == ["version", "n", "reward"]
    # (1 + 0 + .5 + .5 + 4 * .25) / 8; (2 + 1) / 7, since one is not scored
    assert rows == [["0", "8", "0.375"], ["1", "8", "0.428571"]]


def test_the_query_that_readme_begins_with_gives_its_columns(ludic, trained: Root) -> None:
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    query, header = re.findall(r'^    \$ ludic sql runs/shop "([^"]*)"\n(.*)$', text, re.MULTILINE)[0]
    result = ludic("sql", trained.url, query.replace("shop.py:Cats", "moar_cats"))
    assert (result.code, result.err) == (0, "")
    found, _, *rows = (line.split() for line in result.out.splitlines())
    assert found == header.split()
    assert len(rows) == 1  # the only step is below 10


def test_a_table_shows_so_many_rows_and_says_how_many_there_are(ludic, trained: Root) -> None:
    result = ludic("sql", trained.url, "select * from range(25000)", "--max-rows", "2")
    assert [line.strip() for line in result.out.splitlines()[2:4]] == ["0", "1"]
    assert result.out.splitlines()[4].startswith("2 of 25,000 rows; ")


def test_piped_tables_are_as_wide_as_they_need_and_without_colours(ludic, trained: Root) -> None:
    result = ludic("sql", trained.url, "select * from rollouts")
    assert "\x1b" not in result.out
    header = result.out.splitlines()[0].split()
    assert (header[0], *header[-2:]) == ("rollout_id", "env", "root")


@pytest.mark.parametrize(
    ("query", "beginning"), [("select * from rollouts", "row 1 ─"), ("select version from rollouts", "version")]
)
def test_on_a_terminal_rows_too_wide_for_it_stand_one_below_the_other(
    trained: Root, query: str, beginning: str
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with open_result([trained], query) as result:
        print_table(result, console, max_rows=3)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith(beginning)
    assert max(map(len, lines)) <= 80


def test_long_lists_are_shown_by_their_first_items(ludic, trained: Root) -> None:
    out = ludic("sql", trained.url, "select range(100) as many, {'a': null, 'b': true} as both").out
    assert "[0, 1, 2, 3, 4, 5, … 100 in all]" in out
    assert "{a: null, b: true}" in out


def test_what_a_model_wrote_is_shown_as_text_and_never_obeyed(ludic, trained: Root) -> None:
    out = ludic(
        "sql", trained.url, "select '[bold]x[/bold] :smile: ' || chr(27) || '[2J' || chr(10) || 'y' as text"
    ).out
    assert "[bold]x[/bold] :smile: \\x1b[2J\\ny" in out


def test_json_holds_every_row_with_its_nested_values(ludic, trained: Root) -> None:
    result = ludic("sql", trained.url, "select * from rollouts order by request_index", "--format", "json")
    rows = json.loads(result.out)
    assert len(rows) == 16
    assert rows[0]["reward_components"] == {"num_cats": 1.0}
    assert len(rows[0]["response_tokens"]) == 16
    assert rows[0]["created_at"] == "2026-01-02T03:04:05.678901+00:00"
    assert rows[0]["action_mask"] is None
    assert [row["episode_reward"] for row in rows[12:]] == [None, 1.0, 0.0, 0.0]


def test_json_knows_no_nan_and_keeps_big_integers(ludic, trained: Root) -> None:
    query = "select 'nan'::double as nan, sum(9007199254740993::bigint) as big, 1.5::decimal(4, 2) as half"
    assert json.loads(ludic("sql", trained.url, query, "--format", "json").out) == [
        {"nan": None, "big": 9007199254740993, "half": 1.5}
    ]


def test_columns_of_one_name_are_told_apart(ludic, trained: Root) -> None:
    out = ludic("sql", trained.url, "select 1 as a, 2 as a, 3 as a_1", "--format", "json").out
    assert json.loads(out) == [{"a": 1, "a_1": 2, "a_1_1": 3}]


def test_no_rows_are_an_empty_document(ludic, trained: Root) -> None:
    query = "select 1 as a where false"
    assert json.loads(ludic("sql", trained.url, query, "--format", "json").out) == []
    assert ludic("sql", trained.url, query, "--format", "csv").out == "a\n"


def test_csv_keeps_text_and_writes_lists_as_json(ludic, trained: Root) -> None:
    query = "select 'a,\"b\"\nc' as text, [1, null] as list, null as nothing, true as yes"
    out = ludic("sql", trained.url, query, "--format", "csv").out
    assert list(csv.reader(io.StringIO(out))) == [
        ["text", "list", "nothing", "yes"],
        ['a,"b"\nc', "[1, null]", "", "true"],
    ]


def test_parquet_goes_through_a_pipe(trained: Root, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    query = ["ludic", "sql", trained.url, "select * from rollouts", "--format", "parquet"]
    process = Forked(query, tmp_path / "log", out=pipe)
    table = pq.read_table(io.BytesIO(pipe.read_bytes()))
    assert process.wait(120) == 0
    assert table.num_rows == 16
    assert table.column_names[-3:] == ["version", "env", "root"]


@pytest.mark.parametrize(
    ("suffix", "beginning"), [("json", b'[\n{"version": 0,'), ("csv", b"version,n,reward\n"), ("parquet", b"PAR1")]
)
def test_the_name_of_the_file_says_the_format(
    ludic, trained: Root, tmp_path: Path, suffix: str, beginning: bytes
) -> None:
    path = tmp_path / f"out.{suffix}"
    result = ludic("sql", trained.url, REWARDS, "--out", path)
    assert (result.code, result.out, result.err) == (0, "", "")
    assert path.read_bytes().startswith(beginning)


def test_a_failing_query_leaves_no_file(ludic, trained: Root, tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    # Fails late, after many batches were written.
    query = "select if(range = 900000, error('late'), range) from range(1000000)"
    result = ludic("sql", trained.url, query, "--out", path)
    assert result.code == 1
    assert "late" in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_explained(ludic, trained: Root, tmp_path: Path) -> None:
    result = ludic("sql", trained.url, "select 1", "--out", tmp_path / "none" / "x.csv")
    assert result.code == 1
    assert result.err == f"ludic: {tmp_path}/none/x.csv can't be written: No such file or directory\n"


def test_out_below_a_file_is_explained(ludic, trained, tmp_path) -> None:
    (tmp_path / "file").touch()
    result = ludic("sql", trained.url, "select 1", "--out", tmp_path / "file" / "x.csv")
    assert (result.code, result.err) == (1, f"ludic: {tmp_path}/file/x.csv can't be written: Not a directory\n")


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("selec", 'Parser Error: syntax error at or near "selec"'),
        ("select * from rolouts", "Table with name rolouts does not exist"),
        ("select rewrd from rollouts", 'Referenced column "rewrd" not found'),
        ("select 'a'::int", "Could not convert string 'a' to INT32"),
        ("select * from rollouts where rollout_id = $id", "Values were not provided for the following parameters: id"),
        ("  ", "the query is empty"),
    ],
)
def test_bad_sql_is_explained_in_one_line(ludic, trained: Root, query: str, reason: str) -> None:
    result = ludic("sql", trained.url, query)
    assert (result.code, result.out) == (1, "")
    assert reason in result.err
    assert result.err.startswith("ludic: ")
    assert result.err.count("\n") == 1
    assert "ludic verify" not in result.err


def test_a_broken_file_of_a_worker_is_left_out_and_named(ludic, breakable: Path, caplog) -> None:
    name = list_files(Root.open(str(breakable)))[0].name
    (breakable / name).write_bytes(b"PAR1 torn")
    result = ludic("sql", breakable, "select count(*) as n from rollouts", "--format", "csv")
    assert (result.code, result.out) == (0, "n\n8\n")
    (record,) = caplog.records
    assert name in record.getMessage()
    assert f"`ludic verify {breakable}`" in record.getMessage()


def test_a_root_anywhere_can_be_asked(ludic, root: Root) -> None:
    out = ludic("sql", root.url, "select count(*) as n from rollouts", "--format", "json").out
    assert json.loads(out) == [{"n": 0}]


OUTSIDE = {
    "a file": "from read_text('{outside}')",
    "a folder": "from glob('{folder}/*')",
    "a path that climbs": "from read_text('{root}/../outside.txt')",
    "a database": "attach '{folder}/a.db'",
    "an extension": "install httpfs",
    "a setting": "set enable_external_access = true",
    "a copy": "copy (select 1) to '{folder}/made.csv'",
    "a copy into the run": "copy (select 1) to '{root}/made.csv'",
    "a copy after a query": "select 1; copy (select 1) to '{root}/made.csv'",
    "an export": "export database '{folder}/made'",
    "an analysis of a copy": "explain analyze copy (select 1) to '{root}/made.csv'",
    "an analysis of a copy, with a comment": "explain /* */ analyze copy (select 1) to '{root}/made.csv'",
    "an analysis with options": "explain (analyze) copy (select 1) to '{root}/made.csv'",
    "a prepared copy": "prepare x as copy (select 1) to '{root}/made.csv'; execute x",
    "a database in the run": "attach '{root}/made.csv' as z; create table z.t as select 1",
    "a copy within a query": "with x as (/**/copy (select E'\\'') to '{root}/made.csv') select * from x",
    "a copy within a pivot": "with x as (copy (select 1) to '{root}/made.csv') pivot x on Count",
    "an analysis of a copy within a query": "explain analyze with x as (copy (select 1) to '{root}/made.csv') from x",
    "a deletion within a query": "with x as (delete from roots returning root) from x",
    "a copy of a pivot": "copy (pivot rollouts on env_name using count(*)) to '{root}/made.csv'",
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_a_query_neither_reads_nor_writes_outside_of_the_run(ludic, trained: Root, tmp_path: Path, what: str) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("secret")
    query = OUTSIDE[what].format(outside=outside, folder=tmp_path, root=trained.path)
    result = ludic("sql", trained.url, query)
    assert (result.code, result.out) == (1, "")
    assert result.err.count("\n") == 1
    assert "--unsafe" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["outside.txt"]
    assert not Path(trained.path, "made.csv").exists()


@pytest.mark.parametrize(
    "query",
    [
        "-- how many?\nfrom rollouts select count(*)",
        "with counts as (select count(*) from rollouts) from counts",
        "with copy(delete) as (select '(insert') select (delete) as update from copy",
        "pivot rollouts on env_name using count(*)",
        "from (pivot rollouts on env_name using count(*))",
        "describe rollouts",
        "summarize rollouts",
        "show tables",
        "explain from rollouts",
        "explain analyze select count(*) from rollouts",
        "explain (format json) select 1",
    ],
)
def test_all_kinds_of_queries_are_answered(ludic, trained: Root, query: str) -> None:
    assert ludic("sql", trained.url, query).code == 0


def test_unsafe_lets_a_query_write(ludic, trained: Root, tmp_path: Path) -> None:
    assert ludic("sql", trained.url, f"copy (select 7 as a) to '{tmp_path}/made.csv'", "--unsafe").code == 0
    assert (tmp_path / "made.csv").read_text() == "a\n7\n"


@pytest.mark.parametrize("root_url", ["local", "memory"], indirect=True)
def test_a_sealed_connection_reads_every_view_of_a_root(root: Root) -> None:
    # Of a folder, and of what Python reads: lists of cached rows are read from the files themselves.
    fill(root, num_files=2, groups_per_file=1)
    con = connect(root, sealed=True)
    for view in con.sql("select distinct view_name from duckdb_views() where not internal").fetchall():
        con.sql(f"from {view[0]}").to_arrow_table()
    assert con.sql("select sum(len(response_tokens)) > 0 from rollouts").fetchall() == [(True,)]


def test_several_runs_are_asked_at_once(ludic, trained: Root, started: Root, breakable: Path) -> None:
    query = "select root, count(*) as n from rollouts group by root order by root"
    wanted = sorted([{"root": trained.url, "n": 16}, {"root": str(breakable), "n": 16}], key=lambda row: row["root"])
    for args in ((breakable, started.url, query), (query, "--also", breakable)):
        result = ludic("sql", trained.url, *args, "--format", "json")
        assert (result.code, result.err, json.loads(result.out)) == (0, "", wanted)
    assert ludic("sql", trained.url, breakable, query).out.splitlines()[0].split() == ["root", "n"]
    result = ludic("sql", trained.url, f"{trained.url}/", "select 1")
    assert result.err == f"ludic: {trained.url} is the same folder as {trained.url}; name each root once\n"


def test_a_pipe_is_written_to_and_stays_one(ludic, trained: Root, tmp_path: Path) -> None:
    """As root, a file in the place of /dev/null would break the machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_bytes)
        assert ludic("sql", trained.url, "select 1 as a", "--format", "csv", "--out", pipe).code == 0
        assert read.result(timeout=60) == b"a\n1\n"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]
