"""The SQL of a plan reaches no file, network, extension or setting: a root's SQL runs unseen by who trains on it."""

from pathlib import Path

import pytest

from ludic.errors import QueryError
from ludic.root.sql.planner import BatchRules, Planner


@pytest.fixture
def secret(tmp_path) -> Path:
    path = tmp_path / "secret.csv"
    path.write_text("key\n1\n")
    return path


@pytest.mark.parametrize(
    "expression",
    [
        "(select count(*) from read_text('{file}'))",
        "(select count(*) from read_csv('{file}'))",
        "(select count(*) from '{file}')",
        "(select count(*) from glob('{folder}/*'))",
        "(select count(*) from read_parquet('http://127.0.0.1:9/x.parquet'))",
        "(select count(*) from duckdb_secrets())",
    ],
)
def test_no_text_of_a_plan_reads_what_is_outside(secret, tmp_path, expression):
    outside = expression.format(file=secret, folder=tmp_path)
    (tmp_path / "mine.sql").write_text(f"select rollout_id, {outside} as advantage from rollouts")  # noqa: S608
    (tmp_path / "drop.sql").write_text(f"{outside} > 0")
    (tmp_path / "select.sql").write_text(f"select group_id from groups where {outside} > 0")  # noqa: S608
    for rules in (
        {"advantage": f"{tmp_path}/mine.sql"},
        {"filters": (f"{tmp_path}/drop.sql",)},
        {"where": f"{outside} > 0"},
        {"selection": f"{tmp_path}/select.sql"},
    ):
        with pytest.raises(QueryError, match="disabled by configuration"):
            Planner(BatchRules(groups_per_batch=1, **rules))


@pytest.mark.parametrize(
    "statement",
    [
        "copy rollouts to '{file}'",
        "attach '{file}' as x",
        "install httpfs",
        "set threads = 8",
        "export database '{file}'",
    ],
)
def test_only_a_select_is_an_advantage(tmp_path, statement):
    target = tmp_path / "written"
    (tmp_path / "mine.sql").write_text(statement.format(file=target))
    with pytest.raises(QueryError, match="wanted one SELECT"):
        Planner(BatchRules(groups_per_batch=1, advantage=f"{tmp_path}/mine.sql"))
    assert not target.exists()
