"""What the views and the scan say about the files of a root."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from subprocess import run

import polars as pl
import pyarrow as pa
import pytest

import ludic
from ludic.errors import MissingRootError, QueryError
from ludic.records.tables import arrow_schema
from ludic.root.attempts import start_attempt
from ludic.root.claims import claim_slot, held_slot
from ludic.root.root import Root
from ludic.root.rows.files import RolloutFile
from ludic.root.rows.ledger import ledger_name
from ludic.root.rows.parquet import encode, encode_plain
from ludic.root.rows.tables import write_reference
from ludic.root.sql.library import run_query
from ludic.root.sql.root_views import RangedFileSystem, _KeptViews
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

pytestmark = pytest.mark.slow

VIEWS = (
    "rollouts",
    "groups",
    "steps",
    "evals",
    "batches",
    "all_batches",
    "requests",
    "request_episodes",
    "bias_by_length",
    "bias_by_order",
    "attempts",
    "attempt_chain",
    "workers",
    "policies",
    "metrics",
    "reference",
    "token_stats",
    "all_token_stats",
    "trained_tokens",
    "mismatch",
    "scores",
    "all_scores",
    "labels",
    "all_labels",
)


@pytest.fixture(params=["local", "memory"])
def filesystem(request: pytest.FixtureRequest) -> str:
    """DuckDB reads a folder itself, and any other filesystem through fsspec."""
    return request.param


in_a_folder = pytest.mark.parametrize("filesystem", ["local"])
"""For tests of what a view makes of rows, however they were read."""


def put_steps(root: Root, attempt_id: int, steps: range) -> None:
    """A ledger of one row for each step."""
    for step in steps:
        row = {
            "attempt_id": attempt_id,
            "step": step,
            "batch_index": 0,
            "rollout_id": f"rollout-{attempt_id}-{step}",
            "group_id": f"group-{attempt_id}-{step}",
            "env_name": "moar_cats",
            "policy_version": step,
            "trainer_version": step,
            "lag": 0,
            "file": "file",
            "row_group": 0,
            "row": 0,
            "prompt_length": 1,
            "response_length": 1,
            "advantage": 1.0,
            "weight": 1.0,
            "used": True,
        }
        table = pa.Table.from_pylist([row], schema=arrow_schema("batches"))
        assert root.put_if_absent(ledger_name(attempt_id, step), encode_plain(table))


def test_logprobs_of_a_reference_are_a_view_on_every_filesystem(root: Root):
    schema = arrow_schema("reference")
    rows = [
        {
            "model": f"{i:032x}",
            "rollout_id": "r",
            "temperature": 1.0,
            "response_length": 2,
            "reference_logprobs": [-i, -2],
        }
        for i in (1, 3)
    ]
    for row in rows:
        write_reference(root, row["model"], pa.Table.from_pylist([row], schema=schema))
    found = ludic.connect(root).sql("select * exclude (root) from reference order by model").to_arrow_table()
    assert found.to_pylist() == rows
    assert found.column_names == schema.names


def steps_of(root: Root, sql: str) -> list[tuple]:
    return ludic.connect(root).sql(sql).fetchall()


def test_a_missing_root_is_explained(tmp_path):
    for read in (ludic.connect, ludic.scan):
        with pytest.raises(MissingRootError, match="holds no run"):
            read(str(tmp_path / "nothing"))


def test_an_empty_root_has_every_view_without_rows(root: Root):
    con = ludic.connect(root.url)
    for view in VIEWS:
        assert con.sql(f"from {view}").fetchall() == [], view


def test_connecting_lists_no_files(root: Root, monkeypatch: pytest.MonkeyPatch):
    put_steps(root, 1, range(1, 3))
    listed: list[tuple] = []

    def noted(method: Callable[..., list[str]]) -> Callable[..., list[str]]:
        return lambda *args: (listed.append(args), method(*args))[1]

    monkeypatch.setattr(Root, "list", noted(Root.list))
    monkeypatch.setattr(RangedFileSystem, "glob", noted(RangedFileSystem.glob))
    con = ludic.connect(root)
    assert listed == []
    assert con.sql("select count(*) from all_batches").fetchall() == [(2,)]
    assert listed


@in_a_folder
def test_views_of_an_empty_root_have_the_types_of_a_full_one(root: Root, store, rows):
    con = ludic.connect(root)
    empty = {view: con.sql(f"from {view}").types for view in VIEWS}
    assert (
        run_query(con, "select * exclude (version, env, root) from rollouts").schema.names
        == arrow_schema("rollouts").names
    )
    store(rows([[1.0]]))
    put_steps(root, 1, range(1, 2))
    start_attempt(root)
    policy = {"version": 1, "step": 0, "attempt_id": 1, "parent_version": None, "created_at": "2026-01-01T00:00:00Z"}
    root.put("policies/version=1/policy.json", json.dumps(policy).encode())
    assert {view: con.sql(f"from {view}").types for view in VIEWS} == empty
    assert con.sql("select version, step from policies").fetchall() == [(1, 0)]


def types(*roots: Root) -> list[tuple[str, str, str]]:
    query = "select table_name, column_name, data_type from duckdb_columns() where schema_name = 'main' order by all"
    return ludic.connect(*roots).execute(query).fetchall()


def test_views_that_this_process_has_created_before_are_the_same_for_another_root(
    tmp_path: Path, rows, run_config: RunConfig
) -> None:
    first, second = (put_run(str(tmp_path / name), run_config) for name in ("first", "second"))
    expected = types(first)
    assert {name for name, _, _ in expected} > set(VIEWS)
    second.put_if_absent(RolloutFile(0, "moar_cats", "w0", 0).name, encode(rows([[1.0, 0.5]])))
    assert types(second) == expected
    for _ in range(2):
        both = ludic.connect(first, second)
        assert both.execute("select root, count(*) from rollouts group by 1").fetchall() == [(second.url, 2)]
        assert both.execute("select root from roots").fetchall() == [(first.url,), (second.url,)]
        assert ludic.connect(first).execute("select count(*) from rollouts").fetchall() == [(0,)]
    other = put_run(str(tmp_path / "other"), replace(run_config, extra_columns={"x_mine": "int64"}))
    assert ("rollouts", "x_mine", "BIGINT") in types(other)
    assert types(first) == expected


@pytest.fixture
def first_root(tmp_path: Path, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Root:
    """A root in a process that has not connected to any."""
    monkeypatch.setattr("ludic.root.sql.root_views._kept", _KeptViews())
    return put_run(str(tmp_path / "run"), run_config)


def test_views_are_created_anew_when_somebody_has_deleted_those_that_are_kept(
    first_root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    expected = types(first_root)
    (folder,) = tmp_path.glob("ludic-views-*")
    assert [file.name for file in folder.iterdir()] == ["0.duckdb"]
    assert types(first_root) == expected
    rmtree(folder)
    assert types(first_root) == expected


def test_a_process_that_can_not_keep_views_connects_all_the_same(
    first_root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    expected = types(first_root)
    assert types(first_root) == expected


def test_rollouts_come_back_as_written_with_their_partition(root: Root, store, rows):
    table = rows([[1.0, None, 0.5]], policy_version=12, env_name="reasoning_gym/leg counting")
    store(table)
    found = run_query(ludic.connect(root), "from rollouts order by group_index")
    names = table.schema.names
    assert found.select(names).to_pylist() == table.to_pylist()
    assert found.select(["version", "env"]).to_pylist() == [{"version": 12, "env": "reasoning_gym/leg counting"}] * 3


def test_what_was_written_since_is_seen_after_a_refresh(root: Root, store, rows):
    con = ludic.connect(root)
    counts = []
    for sequence in range(3):
        counts.append(con.sql("select count(*) from rollouts").fetchall()[0][0])
        store(rows([[1.0, 0.0]], sequence=sequence, seed=sequence))
        counts.append(con.sql("select count(*) from rollouts").fetchall()[0][0])
        ludic.refresh(con)
    assert counts == [0, 0, 2, 2, 4, 4]
    with pytest.raises(QueryError, match=r"needs a connection that ludic\.connect returned"):
        ludic.refresh(con.cursor())


def test_a_filter_on_version_reads_no_other_version(root: Root, store, rows):
    store(rows([[1.0, 0.0]], policy_version=1))
    root.put("rollouts/version=2/env=moar_cats/worker-0.parquet", b"no Parquet at all")
    con = ludic.connect(root)
    for view, num_rows in {"rollouts": 2, "groups": 1, "steps": 4}.items():
        assert con.table(view).filter("version = 1").count("*").fetchall() == [(num_rows,)]
    assert ludic.scan(root).filter(pl.col("version") == 1).select("rollout_id").collect().height == 2


def test_a_workers_file_that_can_not_be_read_is_left_out_with_a_warning(root: Root, store, rows, caplog):
    store(rows([[1.0, 0.0]]))
    root.put("rollouts/version=0/env=moar_cats/broken-0.parquet", b"no Parquet at all")
    con = ludic.connect(root)
    assert run_query(con, "from rollouts").num_rows == run_query(con, "from rollouts").num_rows == 2
    assert [record.getMessage() for record in caplog.records] == [
        "left out files that can't be read: rollouts/version=0/env=moar_cats/broken-0.parquet; "
        f"`ludic verify {root.url}` shows why"
    ]


@in_a_folder
def test_any_other_file_that_can_not_be_read_can_be_left_out(root: Root, store, rows):
    name = store(rows([[1.0, 0.0]]))
    broken = "rollouts/version=0/env=other/compacted.0-0.parquet"
    root.put(broken, b"no Parquet at all")
    with pytest.raises(QueryError, match=r"compacted\.0-0\.parquet"):
        run_query(ludic.connect(root), "from rollouts")
    assert run_query(ludic.connect(root, without=[broken]), "from rollouts").num_rows == 2
    assert run_query(ludic.connect(root, without=[broken, name]), "from rollouts").num_rows == 0


@pytest.mark.parametrize("folder", ["it's [1]", "a*b?", "version=7/env=x", "{a,b} é"])
def test_folders_may_have_any_name(tmp_path, rows, folder: str):
    for url in (f"{tmp_path}/{folder}", f"memory://{tmp_path}/{folder}"):
        root = put_run(url, RunConfig(model="tiny", env=("moar_cats",)))
        root.put("rollouts/version=3/env=moar_cats/worker-0.parquet", encode(rows([[1.0, 0.0]], policy_version=3)))
        assert ludic.connect(url).sql("select version, env, num_episodes from groups").fetchall() == [
            (3, "moar_cats", 2)
        ]
        assert ludic.scan(url).select("version", "env").unique().collect().rows() == [(3, "moar_cats")]


def test_columns_that_older_files_lack_are_null_and_newer_ones_are_left_out(root: Root, store, rows):
    full = rows([[1.0]], num_turns=2, truncation_reason=["env"])
    old = full.drop_columns(["truncation_reason", "action_mask"]).append_column("future", pa.array([1]))
    root.put("rollouts/version=0/env=moar_cats/a-0.parquet", encode(old))
    store(full)
    found = run_query(ludic.connect(root), "select finish_reason, truncation_reason, len(action_mask) from rollouts")
    assert sorted(map(str, found.to_pylist())) == sorted(
        str({"finish_reason": "stop", "truncation_reason": reason, "len(action_mask)": length})
        for reason, length in ((None, None), ("env", 16))
    )
    scanned = ludic.scan(root).select("truncation_reason", pl.col("action_mask").list.len()).collect()
    assert sorted(scanned.rows(), key=str) == [("env", 16), (None, None)]


@in_a_folder
def test_groups_count_episodes_once(root: Root, store, rows):
    # three episodes of rewards 1, 0 and none; the first has two rows
    table = rows(
        [[1.0, 1.0, 0.0, None]],
        episode_id=["a", "a", "b", "c"],
        group_size=[3] * 4,
        response_length=[10, 20, 30, 40],
        truncated=[True, True, False, False],
        parse_error=[False, False, True, False],
    )
    store(table)
    found = run_query(ludic.connect(root), "from groups").to_pylist()[0]
    assert {name: found[name] for name in ("num_rollouts", "num_episodes", "num_scored", "group_size")} == {
        "num_rollouts": 4,
        "num_episodes": 3,
        "num_scored": 2,
        "group_size": 3,
    }
    assert (found["reward_mean"], found["reward_min"], found["reward_max"]) == (0.5, 0.0, 1.0)
    assert found["reward_std"] == pytest.approx(0.5**0.5)  # sqrt((.25 + .25) / 1)
    assert found["response_length_mean"] == 25.0
    assert (found["num_truncated"], found["num_parse_errors"], found["num_errors"]) == (2, 1, 1)
    assert found["num_incomplete_completions"] == 0


@in_a_folder
def test_steps_are_agent_and_environment_steps(root: Root, store, rows):
    store(rows([[1.0]], num_turns=2))
    con = ludic.connect(root)
    query = 'select kind, step_index, turn, "start", "end", agent_steps, reward from steps order by kind, step_index'
    # 16 tokens: a turn of 7, an observation of one, a turn of 8
    assert con.sql(query).fetchall() == [
        ("agent", 0, 0, 0, 7, None, None),
        ("agent", 1, 1, 8, 16, None, None),
        ("environment", 0, 0, None, None, [0], 0.0),
        ("environment", 1, 1, None, None, [1], 1.0),
    ]


@in_a_folder
def test_a_step_says_whether_its_completion_hit_max_tokens(root: Root, store, rows):
    table = rows([[1.0, 0.0]], num_turns=2)
    steps = table["agent_steps"].to_pylist()
    steps[1][1]["finish_reason"] = "length"
    column = table.schema.get_field_index("agent_steps")
    store(table.set_column(column, table.schema.field(column), pa.array(steps, table.schema.field(column).type)))
    query = """
    select group_index, kind, step_index from steps join rollouts using (rollout_id) where steps.incomplete_completion
    """
    assert sorted(ludic.connect(root).execute(query).fetchall()) == [(1, "agent", 1), (1, "environment", 1)]


def test_evals_are_apart_from_rollouts(root: Root, rows):
    root.put("evals/version=4/env=moar_cats/worker-0.parquet", encode(rows([[1.0, 0.0]], policy_version=4)))
    con = ludic.connect(root)
    assert con.sql("select version, count(*) from evals group by all").fetchall() == [(4, 2)]
    assert con.sql("select count(*) from rollouts").fetchall() == [(0,)]


@in_a_folder
def test_the_ledger_is_the_chain_of_parents_from_the_newest_attempt(root: Root):
    start_attempt(root)
    put_steps(root, 1, range(1, 11))
    start_attempt(root, parent_attempt=1, parent_step=6)  # resumed from the checkpoint of step 6
    put_steps(root, 2, range(7, 13))
    start_attempt(root, parent_attempt=1, parent_step=4)  # a branch from an older one
    put_steps(root, 3, range(5, 8))
    assert steps_of(root, "select attempt_id, step from batches order by step") == [
        *[(1, step) for step in (1, 2, 3, 4)],
        *[(3, step) for step in (5, 6, 7)],
    ]
    start_attempt(root, parent_attempt=2, parent_step=9)  # attempt 2's checkpoint turns out to be the better one
    put_steps(root, 4, range(10, 11))
    assert steps_of(root, "select attempt_id, step from batches order by step") == [
        *[(1, step) for step in (1, 2, 3, 4, 5, 6)],
        *[(2, step) for step in (7, 8, 9)],
        (4, 10),
    ]
    assert steps_of(root, "select attempt_id, first_step, last_step from attempt_chain order by attempt_id") == [
        (1, 1, 6),
        (2, 7, 9),
        (4, 10, None),
    ]


@in_a_folder
def test_what_a_fenced_trainer_still_writes_is_superseded(root: Root):
    start_attempt(root)
    put_steps(root, 1, range(1, 4))
    start_attempt(root, parent_attempt=1, parent_step=2)
    con = ludic.connect(root)
    put_steps(root, 2, range(3, 4))
    put_steps(root, 1, range(4, 5))  # late, by the attempt that was fenced
    assert con.sql("select attempt_id, step from batches order by step").fetchall() == [(1, 1), (1, 2), (2, 3)]
    assert con.sql("select attempt_id, step from all_batches where superseded order by step").fetchall() == [
        (1, 3),
        (1, 4),
    ]


def test_a_scan_has_the_columns_of_the_view(root: Root, store, rows):
    empty = ludic.scan(root)
    assert empty.collect().height == 0
    store(rows([[1.0, 0.0]], policy_version=5))
    full = ludic.scan(root)
    assert full.collect_schema() == empty.collect_schema()
    assert full.collect_schema().names() == ludic.connect(root).sql("from rollouts").columns
    assert full.select("version", pl.col("episode_reward").mean()).unique().collect().rows() == [(5, 0.5)]


def test_importing_ludic_is_light():
    code = "import sys, ludic; print(sorted({'duckdb', 'polars', 'pyarrow', 'torch', 'numpy'} & set(sys.modules)))"
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_sampling_needs_no_duckdb():
    code = "import sys, ludic.app.launch.sample; print('duckdb' in sys.modules)"
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_supervising_needs_no_torch():
    modules = "ludic.app.launch.local, ludic.app.launch.preflight"
    code = f"import sys, {modules}; print({{'torch', 'transformers'}} & {{*sys.modules}})"
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_ludic_has_what_it_says():
    for name in ludic.__all__:
        named = getattr(ludic, name).__name__
        assert named in (name, f"{name}_run", f"{name}_runs")  # ludic.open is open_run, ludic.compare is compare_runs
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ludic.nothing  # noqa: B018


@in_a_folder
def test_an_attempts_numerics_are_json_text_and_null_where_they_are_not_recorded(root):
    start_attempt(root)
    start_attempt(root, numerics={"num_threads": [2], "torch": "2.13.0"})
    query = "select numerics->>'torch', numerics->>'$.num_threads[0]' from attempts order by attempt_id"
    assert ludic.connect(root).execute(query).fetchall() == [(None, None), ("2.13.0", "2")]


@in_a_folder
def test_lives_of_workers_are_listed_by_slot(root: Root):
    first = claim_slot(root, 0, "w0-a")
    with held_slot(root, 0, "w0-b"):
        pass
    rows = ludic.connect(root).execute(
        "select * exclude (created_at, lost, root), ended_at is null from workers order by life"
    )
    found = [(slot, life, worker_id, owner, lives) for slot, life, worker_id, owner, _, lives in rows.fetchall()]
    assert found == [(0, 1, "w0-a", first.owner, True), (0, 2, "w0-b", first.owner, False)]
