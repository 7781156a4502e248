"""A root that somebody else made runs none of its code unasked; one's own runs the text that it was made with."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
from strategies import make_batch
from tiny_models import publish
from tiny_runs import create_root

from ludic.root.attempts import read_attempt, start_attempt
from ludic.root.root import Root
from ludic.root.rows.writer import RolloutWriter
from ludic.root.sql.connection import connect

ENVIRONMENT = """
from pathlib import Path
from ludic.environments.environment import Example, Score
from ludic.records.rollout import Message

with Path({marker!r}).open("a") as file:
    file.write("x")

class Cats:
    def example(self, index, split):
        return Example(example_id=str(index), messages=(Message(role="user", content="aa ab"),))

    def score(self, example, answer):
        return Score(reward={reward})
"""
ADVANTAGE = """
from pathlib import Path

with Path({marker!r}).open("a") as file:
    file.write("x")

def mine(rollouts):
    return rollouts.select(["rollout_id"]).append_column("advantage", rollouts["episode_reward"])
"""
REFUSED = "names code that this user has not agreed to run: "


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture
def marker(folder) -> Path:
    """A file that the user's code writes when it runs."""
    return folder / "marker"


def write_environment(path: Path, marker: Path, reward: float = 1.0) -> None:
    path.write_text(ENVIRONMENT.format(marker=str(marker), reward=reward))


@pytest.fixture
def mine(folder, marker, model_folder) -> Root:
    """A run of this user's own environment, with weights to sample with."""
    write_environment(folder / "cats.py", marker)
    root = create_root(str(folder / "run"), model_folder, env=("cats.py:Cats",), max_tokens=4, accept_incomplete=True)
    publish(root, model_folder, budget=100)
    return root


@pytest.fixture
def hostile(mine, marker, monkeypatch, folder) -> Root:
    """The same run for another user, with an attempt that names a function of a file that the root brings along."""
    with RolloutWriter(mine, "w0-test") as writer:
        writer.append(make_batch(worker_id="w0-test", num_groups=4, group_size=4))
    (folder / "run" / "evil.py").write_text(ADVANTAGE.format(marker=str(marker)))
    config = {"advantage": f"{folder}/run/evil.py:mine", "num_steps": 1, "device": "cpu"}
    start_attempt(mine, config=config)
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(folder / "other"))
    (folder / "cats.py").unlink()
    return mine


def work(ludic, root: Root, *flags: str):
    return ludic("worker", root.url, "--slot", "0", "--num-groups", "1", "--device", "cpu", *flags)


def test_a_foreign_root_runs_no_code_unasked(ludic, hostile, marker):
    for command in (
        ["worker", "--num-groups", "1"],
        ["train", "--num-steps", "1"],
        ["run", "--num-steps", "1"],
        ["train", "--resume", "--num-steps", "1"],
        ["train", "--offline", "--epochs", "1"],
    ):
        result = ludic(command[0], hostile.url, *command[1:])
        assert (result.code, marker.exists()) == (1, False), command
        assert REFUSED in result.err or "no complete checkpoint" in result.err
        assert "Traceback" not in result.err


@pytest.mark.slow
def test_reading_and_sampling_a_foreign_root_runs_no_code(ludic, hostile, marker, folder):
    flags = {
        "sample": ["--prompt", "aa", "--max-tokens", "2", "--device", "cpu"],
        "view": ["0"],
        "watch": ["--totals"],
        "sql": ["select count(*) from rollouts"],
        "export": ["--format", "jsonl", "--out", str(folder / "out.jsonl")],
        "expire": ["--keep-versions", "5", "--dry-run"],
    }
    for command in ("watch", "verify", "sample", "view", "sql", "compact", "expire", "export"):
        ludic(command, hostile.url, *flags.get(command, []))
        assert not marker.exists(), command


@pytest.mark.slow
def test_a_worker_names_the_file_and_runs_it_once_it_is_agreed_to(ludic, hostile, marker):
    result = work(ludic, hostile)
    assert f"{REFUSED}environment 'cats.py:Cats', {hostile.url}/code/" in result.err
    assert work(ludic, hostile, "--trust-code").code == 0
    assert marker.exists()
    assert work(ludic, hostile).code == 0


def test_another_text_of_the_same_root_is_refused_again(ludic, hostile, marker):
    assert work(ludic, hostile, "--trust-code").code == 0
    marker.unlink()
    text = Path(hostile.path, "evil.py").read_bytes()
    name = sha256(text).hexdigest()
    hostile.put(f"code/{name}.py", text)
    entry = {"sha256": name, "path": "/cats.py", "imports": {}}
    hostile.put("code/2.json", json.dumps({"files": {"cats.py": entry}}).encode())
    result = work(ludic, hostile)
    assert (result.code, marker.exists()) == (1, False)
    assert name[:12] in result.err


def test_an_installed_callable_with_options_of_the_root_is_refused(ludic, folder, marker, model_folder, monkeypatch):
    name = "subprocess:check_output"
    root = create_root(
        str(folder / "run"), model_folder, env=(name,), env_options={name: {"args": ["touch", str(marker)]}}
    )
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(folder / "other"))
    result = work(ludic, root)
    assert (result.code, marker.exists()) == (1, False)
    assert "environment 'subprocess:check_output' with options" in result.err


def test_a_foreign_root_does_not_get_files_of_this_machine(ludic, folder, model_folder, monkeypatch):
    root = create_root(str(folder / "run"), model_folder)
    (folder / "private.sql").write_text("select 'secret'")
    start_attempt(root, config={"advantage": str(folder / "private.sql"), "num_steps": 1, "device": "cpu"})
    monkeypatch.setenv("LUDIC_CONFIG_DIR", str(folder / "other"))
    assert REFUSED in ludic("train", root.url).err
    assert root.list("code") == []


@pytest.mark.slow
def test_a_replay_of_a_foreign_root_runs_none_of_its_code(ludic, hostile, marker, folder):
    result = ludic("train", str(folder / "again"), "--replay-batches", hostile.url)
    assert result.code == 1
    assert not marker.exists()
    result = ludic(
        "train", str(folder / "after"), "--offline", "--sources", hostile.url, "--epochs", "1", "--device", "cpu"
    )
    assert (result.code, marker.exists()) == (0, False)
    assert work(ludic, Root.open(str(folder / "after"))).code == 1
    assert not marker.exists()


@pytest.mark.slow
def test_an_edited_scorer_does_not_run_until_it_is_asked_for(ludic, mine, folder, marker, caplog):
    assert work(ludic, mine).code == 0
    write_environment(folder / "cats.py", marker, reward=5.0)
    assert work(ludic, mine).code == 0
    assert f"{folder}/cats.py is not the text that the run uses" in caplog.text
    assert work(ludic, mine, "--update-code").code == 0
    assert work(ludic, mine).code == 0
    query = "select any_value(episode_reward) from rollouts group by request_index // 4 order by request_index // 4"
    assert connect(mine).execute(query).fetchall() == [(1.0,), (1.0,), (5.0,), (5.0,)]


def test_a_run_goes_on_from_another_folder_and_without_its_files(ludic, mine, folder, monkeypatch):
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    (folder / "cats.py").unlink()
    assert work(ludic, mine).code == 0


def test_a_name_that_the_user_gives_needs_no_more_consent(ludic, hostile, folder, marker):
    (folder / "own.py").write_text(ADVANTAGE.format(marker=str(marker)))
    flags = ["--advantage", "own.py:mine", "--num-steps", "1", "--max-off-policy-steps", "None", "--device", "cpu"]
    result = ludic("train", hostile.url, *flags)
    assert (result.code, marker.exists()) == (0, True), result.err
    assert read_attempt(hostile, 2).code[0]["path"] == str(folder / "own.py")


@pytest.mark.slow
def test_show_and_a_view_say_which_text_scored_and_which_weighed(ludic, mine, folder):
    assert work(ludic, mine).code == 0
    assert work(ludic, mine).code == 0
    scorer = (folder / "cats.py").read_text()
    flags = ["--num-steps", "1", "--device", "cpu"]
    assert ludic("train", mine.url, *flags).code == 0
    digest = sha256(scorer.encode()).hexdigest()
    query = "select life, attempt_id, name, sha256, text from code where role = $role order by life"
    con = connect(mine, sealed=True)
    lives = con.execute(query, {"role": "environment"}).fetchall()
    assert lives == [(life, None, "cats.py:Cats", digest, scorer) for life in (1, 2)]
    ((_, attempt_id, name, _, text),) = con.execute(query, {"role": "advantage"}).fetchall()
    assert (attempt_id, name, text) == (1, "rloo", None)
    (rollout_id,) = connect(mine).execute("select min(rollout_id) from rollouts").fetchone()
    shown = ludic("view", mine.url, rollout_id).out
    assert f"cats.py:Cats,sha256{digest[:12]}of{folder}/cats.py(life1ofslot0)" in "".join(shown.split())
    assert "advantage of attempt 1" in shown
    code = json.loads(ludic("view", mine.url, rollout_id, "--json").out)["code"]
    assert [record["name"] for record in code] == ["cats.py:Cats", "rloo"]


@pytest.mark.parametrize(
    "setting", ["{folder}/run/x.py:y:mine", "{folder}/run/x.py:y.sql", "{folder}/run/x.py:y.py:mine"]
)
def test_no_name_of_a_file_gets_around_consent(ludic, hostile, marker, folder, setting) -> None:
    # x.py:y and x.py:y.py are names of files on Linux.
    for name in ("x.py", "x.py:y", "x.py:y.py"):
        (folder / "run" / name).write_text(ADVANTAGE.format(marker=str(marker)))
    (folder / "run" / "x.py:y.sql").write_text("select rollout_id, 7 as advantage from rollouts")
    config = {"advantage": setting.format(folder=folder), "num_steps": 1, "device": "cpu"}
    start_attempt(hostile, config=config)
    result = ludic("train", hostile.url)
    assert result.code == 1
    assert not marker.exists()
