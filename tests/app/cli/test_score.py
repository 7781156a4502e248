"""`ludic score`: what it prints, and docs/scores.md, whose scorer and queries run."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ludic.root.root import Root
from ludic.root.rows.tables import ScoreLog
from ludic.root.sql.connection import connect
from ludic.root.sql.library import advantages, run_query
from ludic.root.sql.planner import BatchRules, Planner

GUIDE = (Path(__file__).parents[3] / "docs/scores.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


@pytest.fixture
def scorer(tmp_path: Path) -> str:
    """The scorer of the guide."""
    (text,) = blocks("python")
    (tmp_path / "mine.py").write_text(text)
    return f"{tmp_path / 'mine.py'}:score"


@pytest.mark.slow
def test_a_person_is_told_the_counts_and_a_program_gets_them(ludic, breakable: Path, scorer: str) -> None:
    result = ludic("score", breakable, "--scorer", scorer, "--where", "policy_version = 0")
    assert (result.code, result.err) == (0, "")
    assert re.fullmatch(r"score@[0-9a-f]{12}: 8 rollouts scored; 0 failed; cost 0\n", result.out)
    report = json.loads(ludic("score", breakable, "--scorer", scorer, "--json").out)
    assert (report["num_scored"], report["num_done_before"], report["reasons"]) == (8, 8, {})
    stats = ludic("watch", breakable, "--totals").out
    assert re.search(r"^score +[0-9a-f]{12} +length +16 ", stats, re.MULTILINE)
    assert ludic("verify", breakable).code == 0


def test_failures_are_told_on_stderr_and_are_no_failure_of_the_command(ludic, breakable: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def score(rollout):\n    return None\n")
    result = ludic("score", breakable, "--scorer", f"{tmp_path / 'bad.py'}:score", "--name", "bad")
    assert result.code == 0
    assert "0 rollouts scored; 16 failed" in result.out
    assert result.err.startswith("ludic: 16 failed: returned None, wanted a number")


def test_wrong_usage_is_a_line(ludic, breakable: Path) -> None:
    result = ludic("score", breakable)
    assert result.code in (1, 2)
    assert "wanted one scorer" in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.slow
def test_the_queries_and_the_advantage_of_the_guide_run(ludic, breakable: Path, scorer: str, tmp_path: Path) -> None:
    assert ludic("score", breakable, "--scorer", scorer).code == 0
    con = connect(breakable)
    *queries, advantage = blocks("sql")
    agreement, costs, evals = (run_query(con, query).to_pylist() for query in queries)
    assert [(row["scorer"], row["name"]) for row in agreement] == [("score", "length"), ("score", "polite")]
    assert [(row["read"], row["cost"]) for row in costs] == [(None, 0.0)]
    assert evals == []
    (tmp_path / "judged.sql").write_text(advantage)
    Planner(BatchRules(advantage=str(tmp_path / "judged.sql"), scorers=("judge",), groups_per_batch=1))
    assert advantages(con, str(tmp_path / "judged.sql"))["advantage"].to_pylist() == [0.0] * 16  # no judge has scored


@pytest.mark.slow
def test_scores_that_another_program_wrote_wrong_are_named(breakable: Path, ludic) -> None:
    row = {"rollout_id": "r", "name": "score", "scorer_version": "aa", "created_at": datetime.now(UTC)}
    root = Root.open(str(breakable))
    with ScoreLog(root, "judge") as log:
        log.append(row | {"value": float("inf")})
        log.append(row | {"value": 1.0, "error": "both"})
        log.append(row)
    (name,) = root.list("scores")
    (breakable / "scores/scorer=other").mkdir()
    (breakable / name).rename(breakable / name.replace("scorer=judge", "scorer=other"))
    result = ludic("verify", breakable)
    assert result.code == 1
    assert "misnamed" in result.out
    assert "unsound_scores" in result.out
