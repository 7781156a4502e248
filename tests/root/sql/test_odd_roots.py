"""Roots whose path DuckDB would take for a pattern, as sweeps name them, are read whole; what they match is not."""

import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import duckdb
import fsspec
import pytest
from every_kind import make_full_root

import ludic
from ludic.errors import QueryError
from ludic.root.root import Root
from ludic.root.sql.query import open_result
from ludic.root.sql.root_views import _VIEWS

pytestmark = pytest.mark.slow

NAMES = ("lr=[1e-3]", "st*ar", "q?x", "[1]*?/[[]x]")
"""Names of roots; the last one is in a folder of such a name."""
SECRET = b"key\n1\n"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """A root with a file of every kind, compacted ones too; without weights, which no view reads."""
    root = make_full_root(tmp_path_factory.mktemp("plain"))
    for name in root.list(""):
        if name.endswith((".safetensors", ".pt")):
            root.delete(name)
    return root


@pytest.fixture(scope="module")
def wanted(plain: Root) -> dict[str, list[tuple]]:
    return counts(ludic.connect(plain))


@pytest.fixture
def parent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty folder for roots."""
    if request.param == "local":
        yield str(tmp_path)
        return
    bucket = "memory:/" if request.param == "memory" else request.getfixturevalue("s3_bucket")
    url = f"{bucket}/{uuid.uuid4()}"
    yield url
    fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    fs.rm(path, recursive=True)


def copied(root: Root, url: str) -> Root:
    fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    for name in root.list(""):
        fs.makedirs(f"{path}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{path}/{name}", root.read(name))
    return Root.open(url)


def counts(con: duckdb.DuckDBPyConnection) -> dict[str, list[tuple]]:
    """The number of rows of each view; and, since a count reads no list, the tokens."""
    found = {view: con.sql(f"select count(*) from {view}").fetchall() for view in _VIEWS}  # noqa: S608
    return found | {"tokens": con.sql("select sum(len(response_tokens)) from rollouts").fetchall()}


def matched(name: str) -> str:
    """A name that the pattern `name` matches, if it matches any but itself."""
    return name.replace("[1e-3]", "1").replace("[1]", "1").replace("[[]x]", "[x]").replace("*", "x").replace("?", "x")


@pytest.mark.parametrize(
    ("parent", "name"),
    [*(("local", name) for name in NAMES), ("memory", NAMES[0]), ("memory", NAMES[-1]), ("s3", NAMES[0])],
    indirect=["parent"],
)
def test_each_view_shows_what_it_shows_of_a_plain_root(plain: Root, wanted: dict, parent: str, name: str) -> None:
    root = copied(plain, f"{parent}/{name}")
    copied(plain, f"{parent}/{matched(name)}")
    assert all(
        wanted[view] > [(0,)] for view in ("rollouts", "evals", "metrics", "batches", "workers", "gone", "tokens")
    )
    assert counts(ludic.connect(root, sealed=True)) == wanted
    con = ludic.connect(root, without=root.list("metrics"))
    assert con.sql("select count(*) from metrics").fetchall() == [(0,)]


def test_a_cache_and_a_temporary_folder_of_such_names_serve(
    plain: Root, wanted: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp [1]*").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp [1]*"))
    monkeypatch.setenv("LUDIC_CACHE_DIR", str(tmp_path / "cache [1]*"))
    for few in (0, 64):  # scalars are in the user's cache, in a temporary folder
        monkeypatch.setattr("ludic.root.sql.listed_files.FEW_FILES", few)
        assert counts(ludic.connect(plain, sealed=True)) == wanted
    assert [*(tmp_path / "cache [1]*").rglob("*.parquet")]


def single_escape(path: str) -> str:
    """The shortest pattern that matches one path, which a file may have for its name."""
    return re.sub(r"([\[*?])", r"[\1]", path)


def assert_not_read(con: duckdb.DuckDBPyConnection, path: str) -> None:
    with pytest.raises((duckdb.PermissionException, duckdb.IOException)):
        con.execute("select * from read_csv($1)", [path])


@pytest.mark.parametrize("name", NAMES)
def test_a_query_reaches_no_file_outside(plain: Root, tmp_path: Path, name: str) -> None:
    root = Root.open(shutil.copytree(plain.path, tmp_path / name).as_posix())
    inside = f"{tmp_path}/{name}"
    Path(inside, "link.csv").symlink_to(tmp_path / "secret.csv")
    siblings = {single_escape(name), matched(name), f"{name}2", f"{single_escape(name)}2", "."} - {name}
    for sibling in siblings:
        (tmp_path / sibling).mkdir(parents=True, exist_ok=True)
        (tmp_path / sibling / "secret.csv").write_bytes(SECRET)
    outside = [f"{tmp_path}/{sibling}/secret.csv" for sibling in siblings]
    outside += [f"{inside}/../secret.csv", f"{inside}/link.csv", f"{inside}/rollouts/../../secret.csv"]
    con = ludic.connect(root, sealed=True)
    for path in [*outside, *map(single_escape, outside), f"{tmp_path}/*/secret.csv", f"{tmp_path}/**/secret.csv"]:
        assert_not_read(con, path)


@pytest.mark.parametrize("parent", ["memory", "s3"], indirect=True)
def test_a_query_reaches_no_other_object(plain: Root, parent: str) -> None:
    run, name = plain.read("run.json"), "lr=[1]"
    fs, path = fsspec.core.url_to_fs(parent, use_listings_cache=False)
    fs.pipe_file(f"{path}/{name}/run.json", run)
    siblings = ("lr=1", "lr=[[]1]", "lr=_1]", "lr=_1]2", "lr=[1]2")
    for sibling in siblings:
        fs.pipe_file(f"{path}/{sibling}/secret.csv", SECRET)
    con = ludic.connect(f"{parent}/{name}", sealed=True)
    for sibling in (*siblings, "lr=_1]/../lr=1", "lr=*", "*", "**"):
        for protocol in ("ludic0", *([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)):
            assert_not_read(con, f"{protocol}://{path}/{sibling}/secret.csv")


def test_an_error_names_a_file_as_people_write_it(plain: Root, tmp_path: Path) -> None:
    root = Root.open(shutil.copytree(plain.path, tmp_path / "lr=[1]*").as_posix())
    broken = next(name for name in root.list("metrics") if name.endswith(".parquet"))
    Path(root.path, broken).write_bytes(b"none")
    with pytest.raises(QueryError, match=re.escape(f"{root.path}/{broken}")) as failure:
        with open_result([root], "from metrics") as rows:
            rows.read_all()
    assert len(str(failure.value)) < 600
