"""Each attempt says which texts decided its advantages, and runs the root's copies of a user's files."""

import logging
from hashlib import sha256

import pytest
from tiny_runs import create_root, fill, ledger, train_here

from ludic.base.by_name import read_packaged
from ludic.errors import QueryError
from ludic.root.attempts import read_attempt
from ludic.root.code import keep_files
from ludic.root.root import Root
from ludic.run.code_snapshots import find_files
from ludic.settings.consent import CodeUse, give_consent

ADVANTAGE = """
def scaled(rollouts, *, by=1.0):
    return rollouts.select(["rollout_id"]).append_column("advantage", rollouts["episode_reward"])
"""


@pytest.fixture
def root(tmp_path, tiny_folder, monkeypatch) -> Root:
    """A run with rollouts; the working directory has an advantage and a filter of the user's."""
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(ADVANTAGE)
    (tmp_path / "short.sql").write_text("response_length < 0")
    root = create_root(str(tmp_path / "run"), tiny_folder)
    fill(root, num_files=4)
    return root


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def train_mine(root: Root, **settings) -> int:
    return train_here(root, advantage="mine.py:scaled", filters=("short.sql",), **settings)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.slow
def test_an_attempt_says_which_texts_it_plans_with(root, tmp_path):
    train_mine(root, num_steps=1)
    advantage, filter_, selection = read_attempt(root, 1).code
    assert (advantage["role"], advantage["name"], advantage["sha256"]) == (
        "advantage",
        "mine.py:scaled",
        digest(ADVANTAGE),
    )
    assert (filter_["role"], filter_["name"], filter_["path"]) == ("filter", "short.sql", str(tmp_path / "short.sql"))
    assert (selection["name"], selection["sha256"]) == ("fifo", digest(read_packaged("selections", "fifo")))
    assert selection["package"].startswith("ludic-rl ")
    assert root.read(f"code/{advantage['sha256']}.py").decode() == ADVANTAGE
    assert root.read(f"code/{filter_['sha256']}.sql") == b"response_length < 0"


@pytest.mark.slow
def test_a_resumed_trainer_plans_with_the_copy_from_any_folder(root, tmp_path, monkeypatch, caplog):
    train_mine(root, num_steps=1)
    (tmp_path / "mine.py").write_text(ADVANTAGE.replace("episode_reward", "response_length"))
    train_mine(root, num_steps=2)
    assert [line for line in warnings(caplog) if "mine.py is not the text that the run uses" in line]
    (tmp_path / "mine.py").unlink()
    (tmp_path / "short.sql").unlink()
    monkeypatch.chdir("/")
    train_mine(root, num_steps=3)
    assert {read_attempt(root, number).code[0]["sha256"] for number in (1, 2, 3)} == {digest(ADVANTAGE)}
    assert all(0 <= row[7] <= 1 for row in ledger(root) if row[9])


def test_other_code_than_that_of_the_attempt_before_is_named(root, tmp_path, caplog):
    train_mine(root, num_steps=1)
    changed = ADVANTAGE + "# changed\n"
    (tmp_path / "mine.py").write_text(changed)
    use = CodeUse(role="advantage", setting="mine.py:scaled")
    now = find_files(root, [use], update=True).files
    give_consent(use, now, root=root.url, run_id=root.run_id)
    keep_files(root, now)
    train_mine(root, num_steps=2)
    digests = f"sha256 {digest(ADVANTAGE)[:12]} then, {digest(changed)[:12]} now"
    assert f"advantage 'mine.py:scaled' is not what attempt 1 ran: {digests}" in warnings(caplog)
    assert read_attempt(root, 2).code[0]["sha256"] == digest(changed)


def test_a_file_that_does_not_work_is_not_kept(root, tmp_path):
    (tmp_path / "mine.py").write_text("1 / 0\n")
    with pytest.raises(QueryError, match="ZeroDivisionError"):
        train_mine(root, num_steps=1)
    assert root.list("code") == []
    (tmp_path / "mine.py").write_text(ADVANTAGE)
    assert train_mine(root, num_steps=1) == 1


@pytest.mark.slow
def test_offline_training_records_its_texts_as_well(root):
    train_here(root, offline=True, epochs=1, advantage="mine.py:scaled", num_steps=1)
    assert [(record["role"], record["name"]) for record in read_attempt(root, 1).code] == [
        ("advantage", "mine.py:scaled"),
        ("selection", "epochs"),
    ]


def test_an_attempt_of_before_has_no_code(root):
    root.put(
        "attempts/7.json",
        b"""{"attempt_id": 7, "parent_attempt": null, "parent_step": null, "owner": "me",
        "created_at": "2026-01-01T00:00:00+00:00", "config": {}, "of_a_newer_ludic": 1}""",
    )
    assert read_attempt(root, 7).code == []
