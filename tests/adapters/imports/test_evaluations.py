"""Samples of lm-evaluation-harness and lighteval, read into evals/.

logs/ holds files that both programs wrote themselves: logs/write_lm_eval.py and logs/write_lighteval.py.
"""

import json
from pathlib import Path
from typing import Any

import peers
import pyarrow.parquet as pq
import pytest
from evaluations import store_evaluation

import ludic
from ludic.adapters.imports.evaluations import score_number
from ludic.adapters.imports.importing import start_for_import
from ludic.errors import ConfigError

LOGS = Path(__file__).with_name("logs")
DATE = "2026-11-01T10-20-30.123456"
GENERATED, CHOSEN = LOGS / f"samples_sums_gen_{DATE}.jsonl", LOGS / f"samples_sums_mc_{DATE}.jsonl"
QUERY = """
    select env_example_id as id, episode_reward as reward, reward_components as scores, error,
        messages[-1].content as answer, response_tokens, env_name, purpose
    from evals order by id
"""


@pytest.fixture
def run(tmp_path: Path, model_folder: str) -> ludic.Run:
    return start(tmp_path / "run", model_folder)


def start(folder: Path, model: str) -> ludic.Run:
    return ludic.Run(start_for_import(str(folder), model, "jsonl", env="sums"))


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rewards(run: ludic.Run) -> list[tuple[str, float | None]]:
    return [(row["id"], row["reward"]) for row in run.sql(QUERY).to_dicts()]


# --- lm-evaluation-harness -------------------------------------------------------------------------------


@pytest.mark.slow
def test_lm_eval_a_document_is_one_sample_and_its_first_filter_the_reward(run: ludic.Run):
    (report,) = run.import_(GENERATED, "lm-eval")
    assert (report.num_records, report.num_rollouts, report.refused) == (3, 3, [])
    rows = run.sql(QUERY).to_dicts()
    # strict-match wants "#### 5"; flexible-extract takes the last number.
    assert rewards(run) == [("0", 0.0), ("1", 1.0), ("2", 0.0)]
    assert [dict(row["scores"]) for row in rows] == [
        {"exact_match,flexible-extract": 1.0},
        {"exact_match,flexible-extract": 0.0},
        {"exact_match,flexible-extract": 0.0},
    ]
    assert [row["answer"] for row in rows] == ["The answer is 2", "#### 5 or 6", ""]
    assert {(row["env_name"], row["purpose"], row["error"]) for row in rows} == {("sums_gen", "eval", None)}
    assert not run.verify().findings


@pytest.mark.slow
def test_lm_eval_an_empty_answer_is_the_end_token_and_counts(run: ludic.Run):
    run.import_(GENERATED, "lm-eval")
    (row,) = [row for row in run.sql(QUERY).to_dicts() if row["answer"] == ""]
    assert len(row["response_tokens"]) == 1
    (mean,) = [row for row in run.eval(stored=True).measures.to_dicts() if row["measure"] == "mean_reward"]
    assert mean["estimate"] == pytest.approx(1 / 3)  # what lm_eval reports as exact_match,strict-match


@pytest.mark.slow
def test_lm_eval_the_answer_to_a_multiple_choice_is_the_likeliest(run: ludic.Run):
    run.import_(CHOSEN, "lm-eval")
    rows = run.sql(QUERY).to_dicts()
    assert [row["answer"] for row in rows] == [" 2", " 4", " 8"]
    assert rewards(run) == [("0", 1.0), ("1", 0.0), ("2", 1.0)]
    assert [dict(row["scores"]) for row in rows] == [{"acc_norm,none": score} for score in (1.0, 0.0, 1.0)]


@pytest.mark.slow
def test_lm_eval_is_compared_in_pairs_with_our_own_samples(run: ludic.Run, tmp_path: Path, model_folder: str):
    theirs = start(tmp_path / "theirs", model_folder)
    theirs.import_(GENERATED, "lm-eval", env="sums")
    store_evaluation(run.root, {"0": [1.0], "1": [1.0], "2": [0.0], "3": [1.0]}, version=2, env_name="sums")
    (row,) = run.compare("2", f"{theirs.url}@0").compared.rows
    # Ours gain at example 0; 1 and 2 are equal, 3 is only ours.
    assert (row["num_examples"], row["num_only_a"], row["difference"]) == (3, 1, pytest.approx(-1 / 3))
    assert row["test"] == "mcnemar"


def test_files_of_two_tasks_or_models_are_evaluations_of_their_own(run: ludic.Run, tmp_path: Path):
    other = [record | {"exact_match": 1.0} for record in records(GENERATED)]
    run.import_([GENERATED, peers.write_lines(tmp_path / GENERATED.name, other)], "lm-eval", env="sums")
    found = run.eval(stored=True)
    assert found.samples["num_samples"].to_list() == [3, 3]
    means = [row["estimate"] for row in found.measures.to_dicts() if row["measure"] == "mean_reward"]
    assert sorted(means) == [pytest.approx(1 / 3), 1.0]


@pytest.mark.slow
def test_a_second_import_changes_nothing(run: ludic.Run):
    run.import_([GENERATED, CHOSEN], "lm-eval")
    before = run.sql("select * from evals order by rollout_id")
    assert [report.was_there for report in run.import_([GENERATED, CHOSEN], "lm-eval")] == [True, True]
    assert run.sql("select * from evals order by rollout_id").equals(before)


def test_lm_eval_a_prompt_for_a_chat_server_is_messages(run: ludic.Run, tmp_path: Path):
    record = records(GENERATED)[0]
    record["arguments"]["gen_args_0"]["arg_0"] = [json.dumps([{"role": "user", "content": "1 + 1 ="}])]
    run.import_(peers.write_lines(tmp_path / GENERATED.name, [record]), "lm-eval")
    (messages,) = run.sql("select messages from evals")["messages"].to_list()
    said = [(message["role"], message["content"]) for message in messages]
    assert said == [("user", "1 + 1 ="), ("assistant", "The answer is 2")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"resps": []}, "resps is [], wanted a generated text, or a log probability for each choice"),
        ({"resps": [["-3.5"]], "arguments": {"gen_args_0": {"arg_0": "text"}}}, "resps is [['-3.5']], wanted"),
        ({"arguments": {"gen_args_0": 7}}, "arguments is {'gen_args_0': 7}, wanted an object with gen_args_0.arg_0"),
        ({"arguments": None}, "has no arguments"),
        ({"metrics": 7}, "metrics is '7', wanted a list of names"),
    ],
)
def test_lm_eval_a_line_that_can_not_be_used_is_refused_alone(
    change: dict[str, Any], reason: str, run: ludic.Run, tmp_path: Path
):
    good, bad = records(GENERATED)[:2]
    (report,) = run.import_(peers.write_lines(tmp_path / GENERATED.name, [good, bad | change, "{"]), "lm-eval")
    assert report.num_rollouts == 1
    assert sorted(refusal.line for refusal in report.refused) == [2, 3]
    assert any(refusal.reason.startswith(reason) for refusal in report.refused), report.refused


@pytest.mark.slow
def test_a_sample_that_is_not_scored_is_kept_without_a_reward(run: ludic.Run, tmp_path: Path):
    lines = [
        json.dumps(record | {"exact_match": score})
        for record, score in zip(records(GENERATED)[:3], [float("nan"), None, 0.5], strict=True)
    ]
    (report,) = run.import_(peers.write_lines(tmp_path / GENERATED.name, lines), "lm-eval")
    assert rewards(run) == [("0", None), ("1", None), ("2", 0.5)]
    assert report.num_unscored == 2
    assert run.eval(stored=True).samples["num_unscored"].item() == 2


def test_a_file_without_a_usable_line_leaves_nothing(run: ludic.Run, tmp_path: Path):
    with pytest.raises(ConfigError, match="none of 1 records can be used as format lm-eval; the first, at 1: has no"):
        run.import_(peers.write_lines(tmp_path / "samples_x.jsonl", [{"doc_id": "../../x"}]), "lm-eval")
    assert run.sql("select count(*) as n from evals")["n"].item() == 0


def test_ids_with_path_names_stay_ids(run: ludic.Run, tmp_path: Path):
    lines = [record | {"doc_id": "../../../etc/x"} for record in records(GENERATED)[:1]]
    run.import_(peers.write_lines(tmp_path / GENERATED.name, lines), "lm-eval", env="../../out")
    assert rewards(run) == [("../../../etc/x", 0.0)]
    assert {path.name for path in tmp_path.iterdir()} == {"run", GENERATED.name}
    assert not (tmp_path.parent / "out").exists()


@pytest.mark.parametrize(
    ("value", "number"),
    [
        *[("C", 1.0), ("P", 0.5), ("I", 0.0), ("N", 0.0), (True, 1.0), ("True", 1.0), ("0.25", 0.25), (3, 3.0)],
        *[("maybe", None), (float("inf"), None), ([1.0], None), (None, None), (10**400, None)],
    ],
)
def test_scores_of_other_programs_are_numbers_or_none(value: Any, number: float | None):
    assert score_number(value) == number


# --- lighteval -------------------------------------------------------------------------------------------


def details(task: str) -> Path:
    (path,) = LOGS.glob(f"details_{task}*.parquet")
    return path


@pytest.mark.slow
def test_lighteval_a_row_is_a_sample_with_its_metrics(run: ludic.Run):
    (report,) = run.import_(details("sums"), "lighteval")
    assert (report.num_rollouts, report.refused) == (3, [])
    rows = run.sql(QUERY).to_dicts()
    assert rewards(run) == [("0", 1.0), ("1", 0.0), ("2", None)]  # the last one's metric is NaN
    assert [row["answer"] for row in rows] == ["The answer is 2", "6", ""]
    assert [dict(row["scores"]) for row in rows] == [{"length": 15.0}, {"length": 1.0}, {"length": 0.0}]
    assert {row["env_name"] for row in rows} == {"sums|0"}
    (counts,) = run.eval(stored=True).samples.to_dicts()
    assert (counts["num_samples"], counts["num_unscored"]) == (3, 1)
    assert run.sql("select wanted from evals order by env_example_id")["wanted"].to_list() == ["2", "5", "8"]


def test_lighteval_the_answer_to_a_multiple_choice_is_the_likeliest(run: ludic.Run):
    run.import_(details("choose"), "lighteval", env="sums")
    rows = run.sql(QUERY).to_dicts()
    assert [(row["answer"], row["reward"], row["env_name"]) for row in rows] == [("5", 1.0, "sums"), ("5", 0.0, "sums")]


def test_lighteval_rows_of_other_columns_and_broken_files_are_refused(run: ludic.Run, tmp_path: Path):
    old = tmp_path / "details_old.parquet"
    pq.write_table(pq.read_table(details("sums")).select(["metric"]), old)
    with pytest.raises(ConfigError, match=r"the first, at 1: has no doc\.query; details of lighteval before 0\.11"):
        run.import_(old, "lighteval")
    old.write_bytes(details("sums").read_bytes()[:-60] + b"PAR1")
    with pytest.raises(ConfigError, match="is not a Parquet file that can be read"):
        run.import_(old, "lighteval")
    assert run.sql("select count(*) as n from evals")["n"].item() == 0
