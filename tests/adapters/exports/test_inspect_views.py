"""The views inspect_samples and inspect_evals, without inspect_ai; test_inspect_logs.py compares them with its own."""

import re
from pathlib import Path

import pytest
from evaluations import store_evaluation

import ludic
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

DOCS = Path(ludic.__file__).parents[1] / "docs" / "interop.md"


@pytest.fixture
def run(tmp_path: Path) -> ludic.Run:
    root = put_run(str(tmp_path / "run"), RunConfig(model="m", env=("addition",)))
    store_evaluation(root, {"a": [1.0, 0.0], "b": [0.8, None]}, version=3)
    return ludic.Run(root)


def test_samples_have_the_epochs_and_scores_of_inspect(run: ludic.Run):
    rows = run.sql("select id, epoch, score_reward, total_tokens, error from inspect_samples order by id, epoch").rows()
    # 5 prompt tokens and 3 sampled ones each
    assert rows == [("a", 1, 1.0, 8, None), ("a", 2, 0.0, 8, None), ("b", 1, 0.8, 8, None), ("b", 2, None, 8, "broken")]


def test_evaluations_are_counted_with_their_failures(run: ludic.Run):
    (row,) = run.sql("select * exclude (root) from inspect_evals").to_dicts()
    assert row == {
        "task_name": "addition",
        "model": "m@3",
        "task_arg_policy_version": 3,
        "task_arg_evaluation": "0123456789abcdef",
        "epochs": 2,
        "dataset_samples": 2,
        "total_samples": 4,
        "completed_samples": 3,
        "score_reward_mean": pytest.approx(0.65),  # ((1 + 0) / 2 + .8) / 2
    }


@pytest.mark.slow
def test_the_queries_in_the_docs_run(run: ludic.Run):
    queries = re.findall(r'ludic sql runs/demo "(select .* from inspect_.*)"', DOCS.read_text())
    assert [run.sql(query).height for query in queries] == [1, 1]
