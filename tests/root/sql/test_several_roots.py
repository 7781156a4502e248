"""Several roots in one connection: rows say which root they are from, and runs are not mixed."""

import re
from pathlib import Path

import duckdb
import polars as pl
import pytest

import ludic
from ludic.errors import QueryError
from ludic.records.tables import rollouts_schema
from ludic.root.attempts import start_attempt
from ludic.root.root import Root
from ludic.root.rows.parquet import encode
from ludic.root.sql.library import advantages
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run


def make_root(url: object, rewards=(), *, rows, seed: int = 0, version: int = 0, **extra: tuple[str, object]) -> Root:
    """A run with one file of rollouts; extra: type and value of columns of its own."""
    columns = {name: type_ for name, (type_, _) in extra.items()}
    root = put_run(str(url), RunConfig(model="tiny", env=("moar_cats",), extra_columns=columns))
    if rewards:
        table = rows(rewards, seed=seed, policy_version=version)
        schema = rollouts_schema(columns)
        values = table.to_pydict() | {name: [value] * table.num_rows for name, (_, value) in extra.items()}
        table = type(table).from_pydict(values, schema=schema)
        root.put(f"rollouts/version={version}/env=moar_cats/worker-{seed}.parquet", encode(table))
    return root


@pytest.fixture
def two(tmp_path: Path, rows) -> tuple[Root, Root]:
    """Rewards 1, 0 in a local root, and 0, .5, 1 in one on another filesystem."""
    first = make_root(tmp_path / "it's a", [[1.0, 0.0]], rows=rows, seed=1, version=3)
    return first, make_root(f"memory://{tmp_path}/b", [[0.0, 0.5, 1.0]], rows=rows, seed=2, version=4)


@pytest.mark.slow
def test_a_run_is_read_as_its_root_is(two) -> None:
    runs = [ludic.open(root.url) for root in two]
    count = "select count(*) from rollouts"
    assert ludic.connect(runs[0]).sql(count).fetchall() == [(2,)]
    assert ludic.connect(runs).sql(count).fetchall() == ludic.connect(*runs).sql(count).fetchall() == [(5,)]
    assert ludic.scan(Path(runs[0].url), runs[1]).select(pl.len()).collect().item() == 5
    assert runs[0].sql(count, also=[runs[1]]).item() == 5


MEANS = "select root, count(*), avg(episode_reward) from rollouts group by root order by root"


@pytest.mark.slow
@pytest.mark.parametrize("as_list", [True, False])
def test_each_row_says_which_root_it_is_from_as_it_was_given(two: tuple[Root, Root], as_list: bool):
    a, b = (root.url for root in two)
    con = ludic.connect([a, b]) if as_list else ludic.connect(a, b)
    assert con.sql(MEANS).fetchall() == [(a, 2, 0.5), (b, 3, 0.5)]
    assert con.sql("select root, model from roots").fetchall() == [(a, "tiny"), (b, "tiny")]
    scanned = ludic.scan([a, b]) if as_list else ludic.scan(a, b)
    counts = scanned.group_by("root").agg(pl.len(), pl.col("episode_reward").mean()).sort("root")
    assert counts.collect().rows() == [(a, 2, 0.5), (b, 3, 0.5)]


@pytest.mark.slow
def test_one_root_has_the_same_columns_as_several(two: tuple[Root, Root]):
    one, several = ludic.connect(two[0]), ludic.connect(*two)
    views = [name for (name,) in one.sql("select view_name from duckdb_views() where schema_name = 'main'").fetchall()]
    assert {"rollouts", "groups", "steps", "metrics", "attempts", "batches"} <= set(views)
    for view in [view for view in views if not view.startswith(("duckdb_", "pragma_", "sqlite_"))]:
        assert one.table(view).columns == several.table(view).columns
        assert one.table(view).columns[-1] == ("ledger_root" if "batches" in view else "root")
    assert ludic.scan(two[0]).collect_schema() == ludic.scan(*two).collect_schema()


@pytest.mark.slow
def test_a_folder_may_be_a_path_and_lists_of_rows_are_those_of_their_root(two: tuple[Root, Root]):
    con = ludic.connect(Path(two[0].url), two[1])
    counted = "select root, bool_and(len(response_tokens) = response_length) from rollouts group by root order by root"
    assert con.sql(counted).fetchall() == [(root.url, True) for root in two]
    assert con.sql("select root, count(*) from steps group by root order by root").fetchall() == [
        (two[0].url, 4),  # an agent's and an environment's step for each rollout
        (two[1].url, 6),
    ]


def test_a_filter_on_root_opens_no_file_of_the_other(two: tuple[Root, Root]):
    two[1].put("rollouts/version=4/env=moar_cats/compacted.0-0.parquet", b"no Parquet at all")
    con = ludic.connect(*two)
    assert con.execute("select count(*) from rollouts where root = ?", [two[0].url]).fetchall() == [(2,)]
    assert ludic.scan(*two).filter(root=two[0].url).select("rollout_id").collect().height == 2


def test_ledgers_of_two_roots_stay_apart(two: tuple[Root, Root]):
    for root in two:
        start_attempt(root)
    start_attempt(two[1], parent_attempt=1, parent_step=6)
    con = ludic.connect(*two)
    assert con.sql("select root, attempt_id, last_step from attempt_chain order by all").fetchall() == [
        (two[0].url, 1, None),
        (two[1].url, 1, 6),
        (two[1].url, 2, None),
    ]


@pytest.mark.slow
def test_a_refresh_looks_at_every_root(two: tuple[Root, Root], rows):
    con = ludic.connect(*two)
    assert con.sql("select count(*) from rollouts").fetchall() == [(5,)]
    for seed, root in enumerate(two, start=5):
        make_root(root.url, [[1.0]], rows=rows, seed=seed)
    assert con.sql("select count(*) from rollouts").fetchall() == [(5,)]
    ludic.refresh(con)
    assert con.sql(MEANS).fetchall() == [(two[0].url, 3, pytest.approx(2 / 3)), (two[1].url, 4, 0.625)]


@pytest.mark.slow
def test_a_column_that_one_run_has_is_null_for_the_others(tmp_path: Path, rows):
    a = make_root(tmp_path / "a", [[1.0]], rows=rows, seed=1, x_judge=("string", "good"), x_score=("int64", 2))
    b = make_root(tmp_path / "b", [[1.0]], rows=rows, seed=2, x_score=("double", 0.5), x_tags=("list<string>", ["t"]))
    wanted = [(a.url, "good", 2.0, None), (b.url, None, 0.5, ["t"])]
    query = "select root, x_judge, x_score, x_tags from rollouts order by root"
    assert ludic.connect(a, b).sql(query).fetchall() == wanted
    assert ludic.scan(a, b).sort("root").select("root", "x_judge", "x_score", "x_tags").collect().rows() == wanted


def test_columns_of_one_name_that_no_type_holds_are_refused(tmp_path: Path, rows):
    a = make_root(tmp_path / "a", rows=rows, x_judge=("string", "good"))
    b = make_root(tmp_path / "b", rows=rows, x_judge=("int64", 1))
    for read in (ludic.connect, ludic.scan):
        with pytest.raises(QueryError, match=rf"column x_judge is string in {a.url} and int64 in {b.url}; read these"):
            read(a, b)


def test_a_root_named_twice_is_refused_and_so_is_none(two: tuple[Root, Root]):
    for read in (ludic.connect, ludic.scan):
        with pytest.raises(QueryError, match=r"is the same folder as .*; name each root once"):
            read(two[0], f"{two[0].url}/")
        with pytest.raises(QueryError, match="give the folder or URL of at least one run"):
            read([])


@pytest.mark.slow
def test_advantages_compare_rollouts_of_one_run_alone(tmp_path: Path, rows):
    # The second root is a copy of the first that went on: their first group has the same id.
    a = make_root(tmp_path / "a", [[1.0, 0.0]], rows=rows, seed=1)
    b = make_root(tmp_path / "b", [[1.0, 0.0]], rows=rows, seed=1)
    make_root(b.url, [[1.0, 1.0]], rows=rows, seed=2)
    con = ludic.connect(a, b)
    # means: 1/2 in the first, 3/4 in the second
    assert sorted(advantages(con, "reinforce")["advantage"].to_pylist()) == [-0.75, -0.5, 0.25, 0.25, 0.25, 0.5]
    assert sorted(advantages(con, "rloo")["advantage"].to_pylist()) == [-1, -1, 0, 0, 1, 1]
    kept = advantages(con, "rloo", filters=["drop_zero_variance_groups"])
    assert sorted(kept["advantage"].to_pylist()) == [-1, -1, 1, 1]


@pytest.mark.slow
def test_the_guides_code_runs(tmp_path: Path, rows, monkeypatch: pytest.MonkeyPatch):
    for seed, name in enumerate(("rloo", "grpo")):
        make_root(tmp_path / "runs" / name, [[1.0, 0.0]], rows=rows, seed=seed, version=12)
    guide = (Path(__file__).parents[3] / "docs/reading.md").read_text(encoding="utf-8")
    section = guide.partition("## Several runs at once, with ludic")[2]
    monkeypatch.chdir(tmp_path)
    names: dict[str, duckdb.DuckDBPyConnection] = {}
    for line in (
        re.search(r"```python\n(.*?)```", section, re.DOTALL)[1].replace("con.sql", "rows = con.sql").splitlines()
    ):
        exec(line, names)
    assert names["rows"].fetchall() == [("runs/grpo", "moar_cats", 0.5), ("runs/rloo", "moar_cats", 0.5)]
