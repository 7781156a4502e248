"""The ledger in the memory of a viewer's connection: the same rows as in its files, whatever is stored in between."""

from pathlib import Path

import pyarrow as pa
import pytest
from strategies import make_batch

import ludic
from ludic.records import arrow_schema
from ludic.root.attempts import start_attempt
from ludic.root.root import Root
from ludic.root.rows.ledger import write_ledger
from ludic.root.rows.writer import RolloutWriter
from ludic.root.sql import renew
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

ROWS = "select attempt_id, step, rollout_id, advantage, token_advantages, superseded from all_batches order by all"


def plan(root: Root, attempt: object, step: int, advantages: list[float] | None = None) -> None:
    """Write a step of one rollout."""
    schema = arrow_schema("batches")
    row = {
        "attempt_id": attempt.attempt_id,
        "step": step,
        "batch_index": 0,
        "rollout_id": f"r{step}",
        "lag": 0,
        "group_id": "g",
        "env_name": "moar_cats",
        "policy_version": 0,
        "trainer_version": 0,
        "file": "f",
        "row_group": 0,
        "row": 0,
        "prompt_length": 1,
        "response_length": 1,
        "weight": 1.0,
        "used": True,
        "advantage": step / 2,
        "token_advantages": advantages,
    }
    write_ledger(root, attempt, step, pa.Table.from_pylist([row], schema))


@pytest.mark.filterwarnings("error")
def test_a_renewed_connection_shows_the_ledger_as_its_files_do_without_reading_them_again(tmp_path: Path) -> None:
    root = put_run(str(tmp_path / "run"), RunConfig(model="m", env=("moar_cats",)))
    with RolloutWriter(root, "w0-a") as writer:
        writer.append(make_batch(worker_id="w0-a", num_groups=1))
    first = start_attempt(root)
    con = ludic.connect(root, sealed=True)
    renew(con)  # nothing is stored yet
    assert con.sql(ROWS).fetchall() == []
    for step in (1, 2):
        plan(root, first, step)
    plan(root, first, 3, advantages=[0.25])
    renew(con)
    assert con.sql(ROWS).fetchall() == ludic.connect(root).sql(ROWS).fetchall()
    assert con.sql("select used_step from requests").fetchall() == []  # views above it are bound again
    # an attempt that continues after step 1 supersedes the others; a file of tokens is read as before
    second = start_attempt(root, parent_attempt=1, parent_step=1)
    plan(root, second, 2, advantages=[0.75])
    assert con.sql("select count(*) from all_batches").fetchall() == [(3,)]  # as of the last renewal
    renew(con)
    found = con.cursor().sql(ROWS).fetchall()
    assert found == ludic.connect(root).sql(ROWS).fetchall()
    assert [(row[0], row[1], row[-1]) for row in found] == [(1, 1, False), (1, 2, True), (1, 3, True), (2, 2, False)]
    for name in root.list("batches"):
        if "attempt=1" in name and name.endswith(("1.parquet", "2.parquet")):
            Path(root.at(name)).write_bytes(b"torn")
    assert con.sql(ROWS).fetchall() == found


def test_a_ledger_that_cant_be_read_fails_the_queries_that_read_it_and_no_other(tmp_path: Path) -> None:
    root = put_run(str(tmp_path / "run"), RunConfig(model="m", env=("moar_cats",)))
    attempt = start_attempt(root)
    plan(root, attempt, 1)
    (name,) = root.list("batches")
    whole = Path(root.at(name)).read_bytes()
    Path(root.at(name)).write_bytes(b"torn")
    con = ludic.connect(root, sealed=True)
    renew(con)
    with pytest.raises(Exception, match=r"torn|parquet|magic"):
        con.sql(ROWS).fetchall()
    assert con.sql("select count(*) from rollouts").fetchall() == [(0,)]
    Path(root.at(name)).write_bytes(whole)
    renew(con)
    assert len(con.sql(ROWS).fetchall()) == 1
