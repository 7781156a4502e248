"""docs/viewing.md: labels of the example, the query over them, and a person as a scorer."""

import re
import shutil
from pathlib import Path

import pytest

import ludic

GUIDE = (Path(__file__).parents[4] / "docs/viewing.md").read_text(encoding="utf-8")
LABEL, SCORER = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
(QUERY,) = re.findall(r"```sql\n(.*?)```", GUIDE, re.DOTALL)


@pytest.mark.slow
def test_labels_can_be_queried_and_become_scores(made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(made.path, tmp_path / "runs/mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOGNAME", "bob")
    exec(compile(LABEL, "docs/viewing.md", "exec"), {})
    run = ludic.open("runs/mine")
    found = run.sql(QUERY).select("author", "num_labels", "mark_mean").rows()
    assert found == [("ann", 1, 0.0), ("bob", 1, 1.0)]
    Path("people.py").write_text(SCORER, encoding="utf-8")
    where = "rollout_id in (select rollout_id from labels where value is not null)"
    assert f'--where "{where}"' in GUIDE
    report = run.score("people.py:score", where=where)
    assert (report.num_scored, report.num_failed) == (2, 0)
    scored = run.sql(
        "select scores.value as value, labels.value as mark from scores inner join labels using (rollout_id)"
    ).rows()
    assert sorted(scored) == [(0.0, 0.0), (1.0, 1.0)]
