"""Evaluations as logs of inspect_ai: its own readers open them and find the numbers of `run.eval`."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from evaluations import store_evaluation

import ludic
from ludic.app.cli.main import main
from ludic.errors import ConfigError
from ludic.records.rollout import Message, ToolCall
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

inspect_log = pytest.importorskip("inspect_ai.log", reason="`make inspect` makes an environment with inspect_ai")
pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword")  # inspect_ai under pandas 3.1

REWARDS = {"../../a": [1.0, 0.0], "b": [0.5, None], "<script>": [0.25, 1.0]}


def conversation(example: str, index: int) -> tuple[Message, ...]:
    call = ToolCall(id="call-1", name="add", arguments='{"x": 2}')
    return (
        Message(role="system", content="Answer."),
        Message(role="user", content=f"What is {example}?"),
        Message(role="assistant", content="I add.", tool_calls=(call,)),
        Message(role="tool", name="add", content="9"),
        Message(role="assistant", content=f"answer {index}"),
    )


@pytest.fixture
def run(tmp_path: Path) -> ludic.Run:
    """Version 3 of one environment with REWARDS, version 4 of another."""
    root = put_run(str(tmp_path / "run"), RunConfig(model="org/m", env=("addition",)))
    store_evaluation(
        root,
        REWARDS,
        version=3,
        messages=conversation,
        reward_components=lambda example, index: {"exact": float(index)},
        metadata=lambda example, index: {"target": "7"},
    )
    store_evaluation(root, {"b": [1.0]}, version=4, env_name="a/b c")
    return ludic.Run(root)


@pytest.fixture
def logs(run: ludic.Run, tmp_path: Path) -> Path:
    run.export("inspect", tmp_path / "logs")
    return tmp_path / "logs"


def read(logs: Path, env_name: str = "addition") -> Any:
    found = [inspect_log.read_eval_log(str(path)) for path in logs.glob("*.eval")]
    (log,) = [log for log in found if log.eval.task == env_name]
    return log


def test_a_log_is_written_for_each_version_and_environment(run: ludic.Run, tmp_path: Path):
    report = run.export("inspect", tmp_path / "logs")
    assert sorted(report.files) == sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert [name.split("_")[:2] for name in report.files] == [["addition", "v3"], ["a-b-c", "v4"]]
    assert report.num_samples == 7
    assert [name[0] for name in run.export("inspect", tmp_path / "new", version=4).files] == ["a"]


def test_inspects_reader_finds_the_samples(logs: Path):
    log = read(logs)
    samples = {(sample.id, sample.epoch): sample for sample in log.samples}
    assert set(samples) == set(itertools.product(REWARDS, (1, 2)))
    assert (log.status, log.eval.model, log.eval.config.epochs) == ("success", "m@3", 2)
    sample = samples["../../a", 2]
    assert [message.role for message in sample.input] == ["system", "user"]
    assert [message.text for message in sample.messages][2:] == ["I add.", "9", "answer 1"]
    assert (sample.messages[2].tool_calls[0].arguments, sample.messages[3].tool_call_id) == ({"x": 2}, "call-1")
    assert (sample.output.completion, sample.target) == ("answer 1", "7")
    assert {name: score.value for name, score in sample.scores.items()} == {"reward": 0.0, "exact": 1.0}
    assert (sample.output.usage.input_tokens, sample.output.usage.output_tokens) == (5, 3)
    assert sample.metadata["rollout_id"] == sample.uuid


def test_a_failed_sample_is_kept_with_its_error_and_no_reward(logs: Path):
    (failed,) = [sample for sample in read(logs).samples if sample.error]
    assert (failed.id, failed.epoch, failed.error.message) == ("b", 2, "broken")
    assert math.isnan(failed.scores["reward"].value)
    results = read(logs).results
    assert (results.total_samples, results.completed_samples) == (6, 5)
    assert (results.scores[0].scored_samples, results.scores[0].unscored_samples) == (5, 1)


def test_a_metric_says_its_interval(run: ludic.Run, logs: Path, tmp_path: Path):
    (row,) = run.eval(3, stored=True, measures=["success_rate"]).measures.to_dicts()
    metric = read(logs).results.scores[0].metrics["success_rate"]
    assert metric.metadata == {"interval": "korn_graubard", "low": row["low"], "high": row["high"]}
    assert read(logs).results.scores[0].metrics["response_length"].metadata == {"interval": "too few examples (3)"}
    assert "response_length_stderr" not in read(logs).results.scores[0].metrics


def test_inspects_dataframes_have_the_numbers_of_the_evaluation(run: ludic.Run, logs: Path):
    from inspect_ai.analysis import evals_df, samples_df

    (row,) = evals_df(str(logs)).query("task_name == 'addition'").to_dict("records")
    measures = {each["measure"]: each for each in run.eval(3, stored=True).measures.to_dicts()}
    # ((1 + 0) / 2 + .5 + (.25 + 1) / 2) / 3: each example counts once, with its samples that were scored
    assert row["score_headline_value"] == pytest.approx(3.25 / 6)
    for name, column in {"mean_reward": "mean", "pass_at_k": "pass_at_k", "success_rate": "success_rate"}.items():
        assert row[f"score_reward_{column}"] == pytest.approx(measures[name]["estimate"]), name
    assert row["score_headline_stderr"] == pytest.approx(measures["mean_reward"]["std_error"])
    assert row["task_arg_policy_version"] == 3
    samples = samples_df(str(logs))
    samples = samples[samples["log"].str.contains("addition_v3")]
    rewards = samples["score_reward"].dropna().to_list()
    counts = run.eval(3, stored=True).samples.to_dicts()[0]
    assert (len(samples), len(samples) - len(rewards)) == (counts["num_samples"], counts["num_unscored"])
    of_examples = samples.groupby("id")["score_reward"].mean()
    assert of_examples.mean() == pytest.approx(measures["mean_reward"]["estimate"])
    assert samples["total_tokens"].sum() == counts["num_prompt_tokens"] + counts["num_sampled_tokens"]
    assert set(samples["id"]) == set(REWARDS)


def test_the_view_has_the_columns_and_values_of_inspects_dataframe(run: ludic.Run, logs: Path):
    from inspect_ai.analysis import evals_df, samples_df

    theirs = samples_df(str(logs))
    theirs = theirs[theirs["log"].str.contains("addition_v3")].sort_values(["id", "epoch"])
    ours = run.sql("select * exclude (root) from inspect_samples where task_name = 'addition' order by id, epoch")
    for name in ("id", "epoch", "target", "total_tokens", "turn_count", "metadata_rollout_id", "metadata_episode_id"):
        assert ours[name].to_list() == theirs[name].to_list(), name
    assert ours["error"].fill_null("").to_list() == theirs["error"].fillna("").to_list()
    scores = theirs["score_reward"]
    of_theirs = [None if missing else score for missing, score in zip(scores.isna(), scores, strict=True)]
    assert of_theirs == ours["score_reward"].to_list()
    of_evals = {"task_name", "model", "task_arg_policy_version", "task_arg_evaluation"}
    assert set(ours.columns) - {*of_evals, "score_components"} <= set(theirs.columns)
    (evals,) = evals_df(str(logs)).query("task_name == 'addition'").to_dict("records")
    (counted,) = run.sql("select * exclude (root) from inspect_evals where task_name = 'addition'").to_dicts()
    assert {name: evals[name] for name in counted} == counted | {"score_reward_mean": pytest.approx(3.25 / 6)}
    assert counted["score_reward_mean"] == pytest.approx(3.25 / 6)


def test_a_second_export_replaces_the_logs_with_what_is_stored_now(run: ludic.Run, logs: Path):
    names = {path.name for path in logs.iterdir()}
    store_evaluation(run.root, {"d": [1.0]}, version=3, first_example=3)
    run.export("inspect", logs)
    assert {path.name for path in logs.iterdir()} == names
    assert "d" in {sample.id for sample in read(logs).samples}


def test_samples_of_several_agents_have_ids_of_their_own(run: ludic.Run, tmp_path: Path):
    for agent in ("x", "y"):
        store_evaluation(run.root, {"b": [1.0]}, version=5, agent_id=agent, env_name="duel", first_example=ord(agent))
    run.export("inspect", tmp_path / "new", version=5)
    assert sorted(sample.id for sample in read(tmp_path / "new", "duel").samples) == ["b x", "b y"]


def test_a_folder_that_is_a_file_and_a_root_without_evaluations_are_refused(run: ludic.Run, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/addition_v3.* can't be written: "):
        run.export("inspect", tmp_path / "file")
    with pytest.raises(ConfigError, match="has no evaluation of version 9"):
        run.export("inspect", tmp_path / "new", version=9)
    assert not (tmp_path / "new").exists()


def test_the_command_says_what_it_wrote(run: ludic.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(["export", run.url, "--format", "inspect", "--out", str(tmp_path / "logs")])
    assert capsys.readouterr().out.startswith(f"{tmp_path}/logs: 2 logs of 7 samples; ")
