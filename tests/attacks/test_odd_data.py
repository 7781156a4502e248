"""Rows and values that another writer or a query may bring: no traceback, and nothing that a terminal obeys."""

import os
import pty
from contextlib import closing
from pathlib import Path

import duckdb
import polars as pl
import pytest
from forks import Forked
from tiny_runs import create_root, fill, make_model, train_here

import ludic as ludic_package
from ludic.adapters.judge import _parse, compile_pattern
from ludic.errors import QueryError
from ludic.root.root import Root
from ludic.root.rows.tables import MetricsLog
from ludic.root.sql.connection import connect
from ludic.root.sql.query import result_of, to_frame


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    folder = tmp_path_factory.mktemp("odd")
    root = create_root(str(folder / "run"), make_model(folder / "model"))
    fill(root, num_files=1)
    train_here(root, num_steps=1)
    return root


def test_metrics_of_other_kinds_are_passed_over(root: Root) -> None:
    run = ludic_package.Run(root)
    before = [row["step"] for row in run.watch(once=True).steps]
    for number, kind in enumerate(("audit", "train", "train")):
        with closing(MetricsLog(root, "train", f"forged{number}")) as log:
            log._kind = kind  # type: ignore[assignment]
            log.write(policy_version=1, **({"step": 7} if number == 1 else {"attempt_id": 1} if number == 2 else {}))
    run = ludic_package.Run(root)
    assert [row["step"] for row in run.watch(once=True).steps] == before == [1]
    assert "Reward" in run.report().html


ALL_TYPES = [f'"{name}"' for name in duckdb.sql("select * from test_all_types() limit 0").columns]


@pytest.fixture(scope="module")
def sealed(root: Root) -> duckdb.DuckDBPyConnection:
    """What Run.sql asks, once for all queries."""
    return connect(root, sealed=True)


@pytest.mark.parametrize("column", ALL_TYPES)
def test_every_type_of_duckdb_is_a_frame_or_an_error_of_one_line(
    root: Root, sealed: duckdb.DuckDBPyConnection, column: str
) -> None:
    def frame(query: str) -> pl.DataFrame:
        with result_of(sealed, [root], query) as reader:
            return to_frame(reader)

    query = f"select {column} from test_all_types()"  # noqa: S608
    if column in ('"interval"', '"union"'):
        with pytest.raises(QueryError, match=f"^Polars has no type for the columns .*{column[1:-1]}"):
            frame(query)
    else:
        assert isinstance(frame(query), pl.DataFrame)


@pytest.mark.parametrize("to_terminal", [True, False])
def test_a_terminal_obeys_no_data_and_a_file_gets_it_whole(root: Root, tmp_path: Path, to_terminal: bool) -> None:
    query = "select chr(27) || '[31mred' || chr(10) || 'x' as text"
    for form in ("csv", "json"):
        ours, theirs = pty.openpty()
        out = Path(os.ttyname(theirs)) if to_terminal else tmp_path / form
        process = Forked(["ludic", "sql", root.url, query, "--format", form], tmp_path / "log", out=out)
        assert process.wait(120) == 0, process.printed()
        said = os.read(ours, 10_000) if to_terminal else out.read_bytes()
        os.close(ours)
        os.close(theirs)
        assert (b"\x1b" in said) == (form == "csv" and not to_terminal)
        assert b"red" in said


@pytest.mark.parametrize("text", ["1_0", "\u0663", "nan", "inf", "1e", "--1", "", "1,5", "0x10"])
def test_a_judges_number_is_a_plain_decimal(text: str) -> None:
    assert _parse(f"Score: {text}.", compile_pattern(r"Score: (.*)\.", "pattern")) is None


@pytest.mark.parametrize(("text", "value"), [("7", 7.0), ("-1.5", -1.5), (" +.5 ", 0.5), ("2.", 2.0), ("1e-3", 0.001)])
def test_a_judges_decimal_is_its_value(text: str, value: float) -> None:
    assert _parse(f"Score:{text}!", compile_pattern(r"Score:(.*)!", "pattern")) == value
