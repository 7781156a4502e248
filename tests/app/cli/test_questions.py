"""Runs on questions of a file, with a user's scorer: sampled, recorded, and never run or read unasked."""

import json
from pathlib import Path

import pytest
from tiny_models import publish
from tiny_runs import create_root

from ludic.root.root import Root
from ludic.root.sql.connection import connect

SCORER = """
from pathlib import Path

with Path({marker!r}).open("a") as file:
    file.write("x")

def length(example, answer):
    return len(example.data["answer"])
"""
NAME = "qa/rows.jsonl"
OPTIONS = {"scorer": "score.py:length", "heldout_share": 0}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with questions and a scorer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(tmp_path / "config"))
    (tmp_path / "rows.jsonl").write_text('{"question": "aa ab", "answer": "abc"}\n')
    (tmp_path / "score.py").write_text(SCORER.format(marker=str(tmp_path / "marker")))
    return tmp_path


@pytest.fixture
def root(folder: Path, model_folder: str) -> Root:
    """A run of this user's on the questions."""
    options = {"env": (NAME,), "env_options": {NAME: OPTIONS}, "max_tokens": 4, "accept_incomplete": True}
    root = create_root(str(folder / "run"), model_folder, **options)
    publish(root, model_folder, budget=100)
    return root


def work(ludic, root: Root, *flags: str):
    return ludic("worker", root.url, "--slot", "0", "--num-groups", "1", "--device", "cpu", *flags)


def test_answers_get_the_reward_of_the_scorer_that_the_root_keeps(ludic, root, folder):
    (folder / "score.py").unlink()
    result = work(ludic, root)
    assert result.code == 0, result.err
    rows = connect(root).execute("select distinct env_name, episode_reward, error from rollouts").fetchall()
    assert rows == [(NAME, 3.0, None)]


@pytest.mark.slow
def test_the_scorer_and_the_digest_of_the_data_are_recorded(ludic, root, folder, caplog):
    assert work(ludic, root).code == 0
    query = "select role, name, sha256 is not null from code where role in ('environment', 'scorer') order by role"
    assert connect(root).execute(query).fetchall() == [("environment", NAME, True), ("scorer", "score.py:length", True)]
    (rollout_id,) = connect(root).execute("select min(rollout_id) from rollouts").fetchone()
    shown = json.loads(ludic("view", root.url, rollout_id, "--json").out)["code"]
    assert [record["name"] for record in shown] == [NAME, "score.py:length"]
    (folder / "rows.jsonl").write_text('{"question": "aa ab", "answer": "abcd"}\n')
    assert work(ludic, root).code == 0
    assert "environment 'qa/rows.jsonl' is not what life 1 of slot 0 ran" in caplog.text


def test_a_foreign_root_neither_reads_a_file_nor_runs_a_scorer_unasked(ludic, root, folder, monkeypatch):
    (folder / "marker").unlink(missing_ok=True)
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(folder / "other"))
    result = work(ludic, root)
    assert result.code == 1
    assert not (folder / "marker").exists()
    assert f"environment '{NAME}' with options {json.dumps(OPTIONS)}" in result.err
    assert "scorer 'score.py:length'" in result.err
    assert work(ludic, root, "--trust-code").code == 0
    assert (folder / "marker").exists()


@pytest.mark.slow
def test_another_scorer_needs_to_be_asked_for(ludic, root, folder):
    assert work(ludic, root).code == 0
    text = (folder / "score.py").read_text()
    (folder / "score.py").write_text(text.replace("len(", "10 * len("))
    assert work(ludic, root).code == 0
    assert work(ludic, root, "--update-code").code == 0
    rewards = connect(root).execute("select episode_reward, count(*) > 0 from rollouts group by all order by all")
    assert rewards.fetchall() == [(3.0, True), (30.0, True)]


def test_a_scorer_that_is_not_there_ends_the_creation_before_it_begins(ludic, folder, model_folder):
    (folder / "score.py").unlink()
    options = json.dumps({NAME: OPTIONS})
    result = ludic(
        "run",
        "--create-only",
        str(folder / "new"),
        "--model",
        str(model_folder),
        "--env",
        NAME,
        "--env-options",
        options,
    )
    assert result.code == 1
    assert "there is no file" in result.err
    assert not (folder / "new").exists()
