"""Metrics that ludic wrote before 1.8 read under the names that columns have now, also beside newer rows.

The store was written once, with the ludic of commit fe489d51 (metrics 1.7), and is never written again:
`log.write(attempt_id=1, step=step, policy_version=step, loss=-0.125, lag_mean=step / 4, lag_max=step)` for steps 1, 2.
"""

import shutil
from pathlib import Path

import pytest

import ludic
from ludic.errors import QueryError
from ludic.root.root import Root
from ludic.root.rows.tables import MetricsLog, MetricsTail

STORED = {1: (0.25, 1), 2: (0.5, 2)}


@pytest.fixture
def root(tmp_path) -> Root:
    shutil.copytree(Path(__file__).parent / "metrics-v1.7", tmp_path / "run")
    return Root.open(str(tmp_path / "run"))


def test_former_names_of_columns_read_as_those_of_now(root):
    log = MetricsLog(root, "train", "2")
    log.write(attempt_id=2, step=3, policy_version=3, off_policy_steps_mean=1.5, off_policy_steps_max=4)
    log.close()
    query = "select step, off_policy_steps_mean, off_policy_steps_max from metrics order by step"
    for rows in (ludic.open(root.url).sql(query).rows(named=True), MetricsTail(root).poll()):
        found = {row["step"]: (row["off_policy_steps_mean"], row["off_policy_steps_max"]) for row in rows}
        assert found == {**STORED, 3: (1.5, 4)}


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("select lag_max from metrics", "lag_max off_policy_steps_max"),
        ("select avg(b.lag) from batches b", "lag off_policy_steps"),
    ],
)
def test_an_error_about_a_former_name_gives_the_new_one(root, query, name):
    with pytest.raises(QueryError, match=f"SQL calls {name}"):
        ludic.open(root.url).sql(query)
