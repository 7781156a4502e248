"""Rollouts are the same whichever way their files are served: few or many files of workers, compacted, or both."""

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from fsspec.implementations.local import LocalFileSystem

import ludic
from ludic.errors import QueryError
from ludic.records.tables import rollouts_schema
from ludic.root.maintenance.compaction import compact
from ludic.root.maintenance.verify.checks import ROW_CHECKS, small_views_as_tables
from ludic.root.root import Root
from ludic.root.rows.files import RolloutFile, list_files
from ludic.root.rows.parquet import encode
from ludic.root.sql import listed_files as snapshot
from ludic.root.sql.library import advantages, has_rows, load_checks, run_query
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

pytestmark = pytest.mark.slow

EXTRA = {"x_judge": "string", "x_spans": "list<int64>"}
WAYS = ("few files", "many files", "many files in one pass", "compacted", "half compacted")
# Every way on a disk; of those that read files in unlike manners one each in memory, which has only another filesystem.
every_way = pytest.mark.parametrize(
    "served",
    [*(("local", way) for way in WAYS), *(("memory", way) for way in ("few files", "many files", "half compacted"))],
    ids="-".join,
    indirect=True,
)


@dataclass(frozen=True)
class Run:
    """A root, and what is in it."""

    root: Root
    tables: dict[str, pa.Table]
    """By the name of the worker's file."""

    @property
    def expected(self) -> pa.Table:
        """All rows in the order of their ids, with their partition."""
        parts = []
        for name, table in self.tables.items():
            file = RolloutFile.parse(name)
            version, env = (pa.repeat(pa.scalar(value), table.num_rows) for value in (file.version, file.env_name))
            parts.append(table.append_column("version", version).append_column("env", env))
        return pa.concat_tables(parts).sort_by("rollout_id")


@pytest.fixture(params=["local", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path, rows) -> Iterator[Run]:
    run = make_run(str(tmp_path / "run") if request.param == "local" else f"memory://{tmp_path}/run", rows)
    yield run
    run.root.fs.rm(run.root.path, recursive=True)


def make_run(url: str, rows: Callable[..., pa.Table]) -> Run:
    """Versions 0 to 2 of two environments, two files of two groups in each."""
    root = put_run(url, RunConfig(model="tiny", env=("moar_cats",), extra_columns=EXTRA))
    tables: dict[str, pa.Table] = {}
    for seed in range(12):
        file = RolloutFile(seed // 4, ("moar_cats", "a/b c")[seed // 2 % 2], "worker-0", seed)
        table = rows(
            [[1.0, 0.0], [0.5, 0.25]],
            seed=seed,
            sequence=seed,
            policy_version=file.version,
            env_name=file.env_name,
        )
        tables[file.name] = with_extra(table, judge=[f"judge {seed}", None, "", "b"], spans=[[seed], None, [], [1, 2]])
        assert root.put_if_absent(file.name, encode(tables[file.name]))
    return Run(root, tables)


def with_extra(table: pa.Table, **columns: list) -> pa.Table:
    for name, values in columns.items():
        field = rollouts_schema(EXTRA).field(f"x_{name}")
        table = table.append_column(field, pa.array(values, field.type))
    return table


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Run]]:
    """Runs that tests share and only read, by filesystem and by how they are stored."""
    runs: dict[tuple[str, str], Run] = {}
    yield runs
    for run in runs.values():
        run.root.fs.rm(run.root.path, recursive=True)


@pytest.fixture
def served(
    request: pytest.FixtureRequest,
    runs: dict[tuple[str, str], Run],
    tmp_path_factory: pytest.TempPathFactory,
    rows,
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    filesystem, way = request.param
    if way != "few files":
        monkeypatch.setattr(snapshot, "FEW_FILES", 0)
    if way == "many files in one pass":
        monkeypatch.setattr(snapshot, "MANY_FILES", 0)
    stored = way if "compacted" in way else "as workers wrote it"
    if (filesystem, stored) not in runs:
        path = tmp_path_factory.mktemp("runs") / "run"
        run = runs[filesystem, stored] = make_run(str(path) if filesystem == "local" else f"memory://{path}", rows)
        if way == "compacted":
            compact(run.root)
        if way == "half compacted":
            compact(run.root, before_version=1)
    return runs[filesystem, stored]


@every_way
def test_every_column_of_every_row_comes_back(served: Run):
    expected = served.expected
    found = run_query(ludic.connect(served.root), "from rollouts order by rollout_id")
    assert found.column_names == [*expected.column_names, "root"]
    assert set(found["root"].to_pylist()) == {served.root.url}
    for name in expected.column_names:
        assert found[name].to_pylist() == expected[name].to_pylist(), name
    scanned = ludic.scan(served.root).sort("rollout_id").collect()
    assert scanned.columns == [*expected.column_names, "root"]
    flat = [name for name in expected.column_names if name not in ("reward_components", "metadata")]
    assert scanned.select(flat).rows() == pl.from_arrow(expected).select(flat).rows()


@every_way
def test_filters_find_the_same_rows(served: Run):
    rows = ludic.connect(served.root).table("rollouts")
    num_rows_of = {
        "version = 1": 16,
        "version >= 1 and env = 'a/b c'": 16,
        "x_judge = 'judge 7'": 1,
        "len(response_tokens) = 16 and version = 0": 16,
        "x_spans = [1, 2]": 12,
        "episode_reward > 0.3 and messages[1].role = 'user'": 24,
        "action_mask is not null": 0,
    }
    for where, num_rows in num_rows_of.items():
        assert rows.filter(where).aggregate("count(*), count(prompt_tokens), sum(len(messages))").fetchall() == [
            (num_rows, num_rows, 2 * num_rows if num_rows else None)
        ], where


@every_way
def test_lists_go_with_their_rows_in_any_order(served: Run):
    con = ludic.connect(served.root)
    columns = (served.expected[name].to_pylist() for name in ("rollout_id", "response_tokens"))
    tokens = dict(zip(*columns, strict=True))
    for order in ("md5(rollout_id)", "rollout_id desc", "sequence % 3, group_index"):
        rows = con.table("rollouts").order(order).limit(20).select("rollout_id", "response_tokens").fetchall()
        assert len(rows) == 20
        assert all(found == tokens[rollout_id] for rollout_id, found in rows)


@every_way
def test_threads_that_share_a_connection_read_the_same(served: Run):
    con = ludic.connect(served.root)
    query = "select sum(list_sum(response_tokens)), sum(len(agent_steps)) from rollouts"
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: con.cursor().execute(query).fetchall(), range(8)))
    tokens = sum(sum(tokens) for tokens in served.expected["response_tokens"].to_pylist())
    assert answers == [[(tokens, 48)]] * 8


@every_way
def test_advantages_and_checks_run_over_them(served: Run):
    con = ludic.connect(served.root)
    found = advantages(con, "rloo").to_pylist()
    rewards = dict(zip(*(served.expected[name].to_pylist() for name in ("rollout_id", "episode_reward")), strict=True))
    # groups of two: the baseline is the other one's reward
    other = {1.0: 0.0, 0.0: 1.0, 0.5: 0.25, 0.25: 0.5}
    assert {row["rollout_id"]: row["advantage"] for row in found} == {
        rollout_id: reward - other[reward] for rollout_id, reward in rewards.items()
    }
    checks = load_checks()
    assert [name for name in ROW_CHECKS if has_rows(con, checks[name])] == []
    with small_views_as_tables(con):
        assert [name for name in checks.keys() - set(ROW_CHECKS) if has_rows(con, checks[name])] == []


def test_they_come_from_s3_as_well(s3_bucket: str, tmp_path: Path, rows, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(snapshot, "FEW_FILES", 0)
    run = make_run(f"{s3_bucket}/{tmp_path.name}", rows)
    compact(run.root, before_version=1)
    found = run_query(ludic.connect(run.root.url), "from rollouts order by rollout_id")
    assert found.drop_columns("root").to_pylist() == run.expected.to_pylist()
    assert ludic.scan(run.root.url).select(pl.col("response_tokens").list.sum().sum()).collect().item() == sum(
        sum(tokens) for tokens in run.expected["response_tokens"].to_pylist()
    )


def test_rows_appear_once_while_files_are_swapped(run: Run):
    compact(run.root)
    for name, table in list(run.tables.items())[:3]:
        run.root.put(name, encode(table))  # as if its deletion had not come yet
    assert ludic.connect(run.root).sql("select count(*), count(distinct rollout_id) from rollouts").fetchall() == [
        (48, 48)
    ]
    assert ludic.scan(run.root).select(pl.len()).collect().item() == 48


def test_a_broken_compacted_file_gives_way_to_the_files_beside_it(run: Run):
    run.root.put("rollouts/version=1/env=moar_cats/compacted.0-0.parquet", b"torn")
    assert ludic.connect(run.root).sql("select count(*) from rollouts").fetchall() == [(48,)]


def test_foreign_files_are_passed_over(run: Run, rows):
    run.root.put("rollouts/_delta_log/1.checkpoint.parquet", encode(rows([[1.0]])))
    run.root.put("rollouts/_delta_log/1.json", b"{}")
    assert ludic.connect(run.root).sql("select count(*) from rollouts").fetchall() == [(48,)]
    assert ludic.scan(run.root).select(pl.len()).collect().item() == 48


def test_lists_of_files_that_were_compacted_since_are_found(run: Run):
    con = ludic.connect(run.root)
    assert con.sql("select count(*) from rollouts").fetchall() == [(48,)]
    compact(run.root)
    found = run_query(con, "select response_tokens from rollouts order by rollout_id")
    assert found["response_tokens"].to_pylist() == run.expected["response_tokens"].to_pylist()


def test_lists_of_files_that_are_gone_for_good_are_an_error_that_names_one(run: Run):
    con = ludic.connect(run.root)
    assert con.sql("select count(*) from rollouts").fetchall() == [(48,)]
    name = next(iter(run.tables))
    run.root.delete(name)
    # Lists are read when a query uses them, and only of the rows that its filters leave.
    assert run_query(con, "select episode_reward from rollouts").num_rows == 48
    assert run_query(con, "select response_tokens from rollouts where sequence <> 0").num_rows == 44
    with pytest.raises(QueryError, match=name):
        run_query(con, "select response_tokens from rollouts")
    ludic.refresh(con)
    assert run_query(con, "select response_tokens from rollouts").num_rows == 44


# What follows is of runs with many files, whose scalars stay on this machine.


class Counting(LocalFileSystem):
    """A local disk that remembers what was opened; no other class of fsspec's keeps a note of it."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def open(self, path: str, *args, **kwargs):
        self.opened.append(str(path))
        return super().open(path, *args, **kwargs)


@dataclass(frozen=True)
class Many:
    """A local run that counts as one of many files."""

    root: Root
    disk: Counting
    rows: Callable[..., pa.Table]

    def put(self, number: int) -> str:
        """One more file, of two rows."""
        name = RolloutFile(number // 10, "moar_cats", "worker-0", number).name
        table = self.rows([[1.0, 0.0]], seed=number, sequence=number, policy_version=number // 10)
        assert self.root.put_if_absent(name, encode(table))
        return name

    def opened(self) -> list[str]:
        """Files of rollouts that were opened since the last question."""
        opened = [path[path.index("/rollouts/") + 1 :] for path in self.disk.opened if "/rollouts/" in path]
        self.disk.opened.clear()
        return sorted(opened)


@pytest.fixture
def many(tmp_path: Path, rows, monkeypatch: pytest.MonkeyPatch) -> Many:
    """Of four files."""
    monkeypatch.setattr(snapshot, "FEW_FILES", 2)
    disk = Counting()
    root = put_run(str(tmp_path / "run"), RunConfig(model="tiny", env=("moar_cats",)), fs=disk)
    many = Many(root, disk, rows)
    for number in range(4):
        many.put(number)
    many.opened()
    return many


def count(root: Root) -> int:
    ((found,),) = ludic.connect(root).sql("select count(*) from rollouts").fetchall()
    return found


def segments(cache_dir: Path) -> list[Path]:
    return sorted(cache_dir.glob("scalars/*/rollouts/*.parquet"))


def test_only_new_files_are_opened(many: Many, cache_dir: Path):
    assert (count(many.root), len(many.opened())) == (8, 4)
    assert (count(many.root), many.opened()) == (8, [])
    new = [many.put(4), many.put(15)]
    assert (count(many.root), many.opened()) == (12, new)
    assert (count(many.root), many.opened()) == (12, [])
    assert len(segments(cache_dir)) == 2


def test_a_run_of_few_files_leaves_nothing_behind(many: Many, cache_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(snapshot, "FEW_FILES", 4)
    assert count(many.root) == 8
    assert not cache_dir.exists()


def test_rows_of_files_that_are_gone_are_not_shown_and_no_other_is_read_again(many: Many, cache_dir: Path):
    count(many.root)
    many.root.delete(RolloutFile(0, "moar_cats", "worker-0", 1).name)
    many.opened()
    assert (count(many.root), many.opened()) == (6, [])


def test_a_copy_of_the_run_elsewhere_has_a_cache_of_its_own(many: Many, tmp_path: Path):
    count(many.root)
    shutil.copytree(many.root.path, tmp_path / "copy")
    (tmp_path / "copy" / RolloutFile(0, "moar_cats", "worker-0", 1).name).unlink()
    assert (count(Root.open(str(tmp_path / "copy"))), count(many.root)) == (6, 8)


@pytest.mark.parametrize("damage", [b"", b"PAR1 foreign PAR1", None])
def test_a_damaged_or_foreign_segment_is_made_again(many: Many, cache_dir: Path, damage: bytes | None, rows):
    count(many.root)
    (segment,) = segments(cache_dir)
    segment.write_bytes(segment.read_bytes()[:-20] if damage is None else damage)
    (segment.parent / "stray.parquet").write_bytes(encode(rows([[1.0]])))
    many.opened()
    assert (count(many.root), len(many.opened())) == (8, 4)
    assert (count(many.root), many.opened()) == (8, [])


def test_without_a_folder_to_keep_them_in_all_works_with_a_warning(many: Many, tmp_path: Path, monkeypatch, caplog):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("LUDIC_CACHE_DIR", str(tmp_path / "file"))
    con = ludic.connect(many.root)
    for _ in range(2):
        assert con.sql("select count(*), sum(len(response_tokens)) from rollouts").fetchall() == [(8, 8 * 16)]
    (record,) = caplog.records
    assert record.getMessage().startswith(f"can't cache scalars in {tmp_path}/file/scalars/")


def test_many_small_segments_become_one(many: Many, cache_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(snapshot, "_MOST_SMALL_SEGMENTS", 3)
    for number in range(4, 9):
        many.put(number)
        count(many.root)
    # Each connection made one; the last found four, too many, and put all their rows into its own.
    old = segments(cache_dir)
    assert (count(many.root), len(old), len(segments(cache_dir))) == (18, 5, 5)
    for path in old:
        os.utime(path, (0, 0))  # nobody has used those that were replaced for a day
    assert (count(many.root), len(segments(cache_dir))) == (18, 1)
    many.opened()
    assert (count(many.root), many.opened()) == (18, [])


def test_connections_that_fill_the_cache_at_once_do_not_disturb_each_other(many: Many, cache_dir: Path):
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda number: (many.put(number + 4), count(many.root))[1], range(8)))
    assert all(found % 2 == 0 for found in counts)
    assert count(many.root) == 24
    con = ludic.connect(many.root)
    assert con.sql("select count(distinct rollout_id), sum(len(response_tokens)) from rollouts").fetchall() == [
        (24, 24 * 16)
    ]


def test_what_a_killed_process_left_is_deleted_after_a_day(many: Many, cache_dir: Path):
    count(many.root)
    torn = segments(cache_dir)[0].parent / "x.partial"
    torn.write_bytes(b"torn")
    count(many.root)
    assert torn.exists()
    os.utime(torn, (0, 0))
    count(many.root)
    assert not torn.exists()


def test_files_are_gathered_into_segments_of_bounded_size(many: Many, cache_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(snapshot, "SEGMENT_FILES", 3)
    assert (count(many.root), len(segments(cache_dir))) == (8, 2)
    assert len(list_files(many.root)) == 4
