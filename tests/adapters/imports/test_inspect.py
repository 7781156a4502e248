"""Logs that inspect_ai wrote, read into evals/; hostile files are refused in one line."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evaluations import store_evaluation

import ludic
from ludic.adapters.imports import evaluations
from ludic.adapters.imports.importing import start_for_import
from ludic.app.cli.main import main
from ludic.errors import ConfigError
from ludic.models.tiny import make_tiny_chat_model
from ludic.records.rollout import Message

inspect_log = pytest.importorskip("inspect_ai.log", reason="`make inspect` makes an environment with inspect_ai")
pytestmark = pytest.mark.slow  # inspect_ai takes seconds to import

TASK = Path(__file__).with_name("inspect_task.py")


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A log that a real task of inspect_ai wrote, and its samples with their scores."""
    folder = tmp_path_factory.mktemp("logs")
    command, env = [sys.executable, str(TASK), str(folder)], {**os.environ, "INSPECT_LOG_LEVEL": "error"}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=240, check=True)
    (path,) = folder.glob("*.eval")
    return path, json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("chat") / "model"
    make_tiny_chat_model(
        str(folder), [[Message(role="user", content="1 + 1 ="), Message(role="assistant", content="2")]]
    )
    return str(folder)


@pytest.fixture
def run(tmp_path: Path, chat_model: str) -> ludic.Run:
    return start(tmp_path / "run", chat_model)


def start(folder: Path, model: str) -> ludic.Run:
    return ludic.Run(start_for_import(str(folder), model, "jsonl", env="sums"))


def change(source: Path, target: Path, replace: Callable[[str, bytes], bytes]) -> Path:
    """Copy a log with the content of its members replaced."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, replace(name, old.read(name)))
    return target


def test_a_log_of_inspect_reads_back_with_its_scores(run: ludic.Run, written: tuple[Path, list[Any]]):
    path, samples = written
    (report,) = run.import_(path, "inspect")
    assert (report.num_rollouts, report.num_groups, report.refused) == (6, 3, [])
    # match asks for the whole answer, includes for a part of it.
    assert [scores for *_, scores in samples if scores] == [
        {"match": "C", "includes": "C"},
        {"match": "I", "includes": "I"},
        {"match": "I", "includes": "C"},
        {"match": "C", "includes": "C"},
    ]
    rows = run.sql("""
        select env_example_id as id, metadata['epoch']::int as epoch, episode_reward as reward,
            reward_components['includes'] as includes, error, model, temperature, max_tokens, purpose, env_name,
            metadata['level'] as level, finish_reason
        from evals order by epoch, id
    """).to_dicts()
    assert [(row["id"], row["epoch"], row["reward"], row["includes"]) for row in rows] == [
        ("../two", 1, 1.0, 1.0),
        ("broken", 1, None, None),
        ("five", 1, 0.0, 0.0),
        ("../two", 2, 0.0, 1.0),
        ("broken", 2, None, None),
        ("five", 2, 1.0, 1.0),
    ]
    common = {"model": "mockllm/model", "temperature": 0.5, "max_tokens": 17, "purpose": "eval", "env_name": "sums"}
    assert all(common.items() <= row.items() for row in rows)
    assert [row["level"] for row in rows if row["id"] == "../two"] == ["3", "3"]
    assert {"the tool" in (row["error"] or "") for row in rows if row["id"] == "broken"} == {True}
    assert {row["error"] for row in rows if row["id"] != "broken"} == {None}
    assert not run.verify().findings


def test_failed_samples_are_shown_and_a_second_import_changes_nothing(run: ludic.Run, written: tuple[Path, list[Any]]):
    run.import_(written[0], "inspect")
    found = run.eval(stored=True)
    (counts,) = found.samples.to_dicts()
    assert (counts["num_samples"], counts["num_unscored"], counts["num_failed"]) == (6, 2, 2)
    (mean,) = [row for row in found.measures.to_dicts() if row["measure"] == "mean_reward"]
    assert (mean["estimate"], mean["num_missing"]) == (0.5, 2)
    (again,) = run.import_(written[0], "inspect")
    assert again.was_there
    assert run.eval(stored=True).samples.equals(found.samples)


def test_messages_are_those_of_the_sample(run: ludic.Run, written: tuple[Path, list[Any]]):
    run.import_(written[0], "inspect")
    query = "select messages from evals where env_example_id = 'five' and metadata['epoch'] = '2'"
    (messages,) = run.sql(query)["messages"].to_list()
    said = [(message["role"], message["content"]) for message in messages]
    assert said == [("system", "Answer."), ("user", "2 + 3 ="), ("assistant", "5")]


def test_an_imported_log_is_compared_in_pairs_with_our_own_samples(
    run: ludic.Run, tmp_path: Path, written: tuple[Path, list[Any]], chat_model: str
):
    theirs = start(tmp_path / "theirs", chat_model)
    theirs.import_(written[0], "inspect")
    store_evaluation(run.root, {"../two": [1.0], "five": [1.0], "other": [0.0]}, version=7, env_name="sums")
    compared = run.compare("7", f"{theirs.url}@0").compared
    (row,) = compared.rows
    # Ours are right at both; theirs at half the samples of each.
    assert (row["num_examples"], row["estimate_a"], row["estimate_b"]) == (2, 1.0, 0.5)
    assert any("not both were sampled by `ludic eval`" in warning for warning in compared.warnings)


def test_two_logs_in_one_root_are_two_evaluations(run: ludic.Run, tmp_path: Path, written: tuple[Path, list[Any]]):
    other = change(
        written[0], tmp_path / "other.eval", lambda name, data: data.replace(b"mockllm/model", b"mockllm/other")
    )
    run.import_([written[0], other], "inspect")
    assert run.eval(stored=True).samples["num_samples"].to_list() == [6, 6]


def test_what_ludic_wrote_comes_back_with_version_rewards_and_agents(run: ludic.Run, tmp_path: Path):
    rewards = {"a": [1.0, None], "b": [0.5, 0.25]}
    said = (Message(role="user", content="1 + 1 ="), Message(role="assistant", content="2"))
    options = {"env_name": "sums", "reward_components": {"exact": 0.5}, "messages": said}
    store_evaluation(run.root, rewards, version=3, **options)
    run.export("inspect", tmp_path / "logs")
    copy = start(tmp_path / "copy", run.root.record.model)
    copy.import_(list((tmp_path / "logs").glob("*.eval")), "inspect")
    same = ["policy_version", "env_name", "num_examples", "num_samples", "num_unscored", "num_failed"]
    assert copy.eval(stored=True).samples.select(same).equals(run.eval(stored=True).samples.select(same))
    columns = "env_example_id, policy_version, episode_reward, reward_components, agent_id, error"
    query = f"select {columns} from evals order by all"  # noqa: S608
    assert copy.sql(query).equals(run.sql(query))


def test_env_names_the_environment_instead_of_the_task(run: ludic.Run, written: tuple[Path, list[Any]]):
    run.import_(written[0], "inspect", env="addition")
    assert run.eval(stored=True).samples["env_name"].to_list() == ["addition"]


# --- Hostile files ---------------------------------------------------------------------------------------


def not_a_zip(source: Path, target: Path) -> None:
    target.write_bytes(b"{}" * 100)


def truncated(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes()[:-300])


def empty(source: Path, target: Path) -> None:
    zipfile.ZipFile(target, "w").close()


def newer_version(source: Path, target: Path) -> None:
    def replace(name: str, data: bytes) -> bytes:
        return json.dumps(json.loads(data) | {"version": 99}).encode() if name == "header.json" else data

    change(source, target, replace)


def broken_header(source: Path, target: Path) -> None:
    change(source, target, lambda name, data: b"{" if name == "header.json" else data)


@pytest.mark.parametrize("damage", [not_a_zip, truncated, empty, newer_version, broken_header])
def test_a_file_that_is_no_log_is_refused_in_one_line(
    damage: Callable[[Path, Path], None],
    run: ludic.Run,
    tmp_path: Path,
    written: tuple[Path, list[Any]],
    capsys: pytest.CaptureFixture[str],
):
    bad = tmp_path / "bad.eval"
    damage(written[0], bad)
    with pytest.raises(SystemExit, match="1"):
        main(["import", run.url, str(bad), "--from", "inspect"])
    said = capsys.readouterr().err
    assert (len(said.splitlines()), str(bad) in said, "Traceback" in said) == (1, True, False), said
    assert run.sql("select count(*) as n from evals")["n"].item() == 0


def test_a_member_that_would_fill_the_memory_is_refused(
    run: ludic.Run, written: tuple[Path, list[Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(evaluations, "LARGEST_MEMBER", 500)
    with pytest.raises(ConfigError, match=r"takes .* bytes, wanted at most 500"):
        run.import_(written[0], "inspect")


def test_a_broken_sample_is_refused_alone_and_named(run: ludic.Run, tmp_path: Path, written: tuple[Path, list[Any]]):
    bad = change(written[0], tmp_path / "bad.eval", lambda name, data: b"{" if "five_epoch_1" in name else data)
    (report,) = run.import_(bad, "inspect")
    assert (report.num_rollouts, len(report.refused)) == (5, 1)
    assert report.refused[0].reason.startswith("sample 'five' can't be read: ")


def test_a_nan_score_is_no_reward(run: ludic.Run, tmp_path: Path, written: tuple[Path, list[Any]]):
    log = inspect_log.read_eval_log(str(written[0]))
    for sample in log.samples:
        for score in (sample.scores or {}).values():
            score.value = float("nan")
    inspect_log.write_eval_log(log, str(tmp_path / "nan.eval"))
    run.import_(tmp_path / "nan.eval", "inspect")
    assert (
        run.sql("select count(*) as n from evals where episode_reward is null and error is not null")["n"].item() == 6
    )


def test_a_log_may_be_at_a_url(run: ludic.Run, written: tuple[Path, list[Any]], tmp_path: Path):
    shutil.copy(written[0], tmp_path / "log.eval")
    (report,) = run.import_((tmp_path / "log.eval").as_uri(), "inspect")
    assert report.num_rollouts == 6
