"""cut: the smallest folder that trains one step again bit for bit, without the run that it came from."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from forks import Forked
from forks import ludic as forked_ludic
from tiny_runs import copied, create_root, fill, make_model, train_here

import ludic
from ludic.app.launch.train import open_to_train
from ludic.errors import ConfigError, SchemaError
from ludic.eval.what_if.cut import cut
from ludic.root.attempts import checkpoint_folder, read_cut
from ludic.root.maintenance.verify import check_root
from ludic.root.root import Root
from ludic.root.rows.tombstones import expire, stored_files
from ludic.root.storage.filesystem import Storage
from ludic.run.run_json import run_of, to_json
from ludic.training.inherited_settings import next_config

REPOSITORY = Path(ludic.__file__).parents[1]
SETTINGS = {"checkpoint_every": 1, "keep_checkpoints": None, "filters": ("drop_zero_variance_groups",)}
REWARDS = [[0.0, 1.0, 0.0, 1.0], [0.0] * 4, [1.0, 0.0, 0.0, 0.5], [0.5, 1.0, 0.25, 0.0]]


def make_run(url: str, model: str, *, num_steps: int = 4, **settings) -> Root:
    root = create_root(url, model)
    for seed in range(3):
        fill(root, num_files=1, worker_id=f"w{seed}-test", seed=seed, rewards=REWARDS)
    assert train_here(root, num_steps=num_steps, **(SETTINGS | settings)) == num_steps
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return make_run(str(folder / "run"), make_model(folder / "model"))


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run that a test may change."""
    return copied(run, tmp_path / "run")


def sha256(root: Root, name: str) -> str:
    return hashlib.sha256(root.read(name)).hexdigest()


def weights_after(root: Root, step: int, attempt_id: int = 1) -> bytes:
    return root.read(f"{checkpoint_folder((attempt_id, step))}/model.safetensors")


@pytest.mark.slow
def test_a_cut_is_a_sound_root_with_one_batch_and_only_its_rollouts(run, tmp_path):
    made = cut(run, 3, str(tmp_path / "out"))
    root = Root.open(str(tmp_path / "out"))
    assert check_root(root).findings == []
    assert (made.step, made.first_step) == (3, 3)
    considered = ludic.connect(run).execute("select count(*) from batches where step = 3").fetchone()[0]
    assert ludic.connect(root).execute("select count(*) from rollouts").fetchone()[0] == considered == made.num_rollouts
    assert root.list("batches") == ["batches/attempt=1/step=3.parquet"]
    # The policy that step 3 started from is version 2, after two steps; the checkpoint of step 2 has the optimizer.
    assert made.policy_version == 2
    assert root.exists("policies/version=2/model.safetensors")
    assert {"optimizer.safetensors", "checkpoint.json"} <= {
        Path(name).name for name in root.list("checkpoints/attempt=1/step=2")
    }
    assert made.weights_sha256 == {"model.safetensors": sha256(run, "checkpoints/attempt=1/step=3/model.safetensors")}
    assert f"    {made.command}\n" in root.read("README.txt").decode()


@pytest.mark.slow
def test_the_written_commands_replay_their_steps_bit_for_bit_after_the_run_is_gone(tmp_path):
    model = make_model(tmp_path / "model")
    run = make_run(str(tmp_path / "original" / "run"), model, num_steps=3)
    steps = (1, 3)
    wanted = {step: weights_after(run, step) for step in steps}
    commands = {step: cut(run, step, str(tmp_path / f"step {step}" / "out")).command for step in steps}
    (tmp_path / "original").rename(tmp_path / "gone")
    (tmp_path / "model").rename(tmp_path / "gone model")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--shared", str(REPOSITORY), str(clone)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(clone), "HOME": str(tmp_path / "home")}
    for step in steps:
        folder = tmp_path / f"step {step}"
        program, *args = commands[step].split()
        assert program == "ludic"
        if step == 1:
            result = forked_ludic(*args, folder=folder)
        else:
            words = [sys.executable, "-m", "ludic", *args]
            result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert "last bits" not in result.stderr
        again = Root.open(str(folder / "again"))
        assert weights_after(again, step, attempt_id=1 if step == 1 else 2) == wanted[step]
        readme = (folder / "out" / "README.txt").read_text()
        sums = [line for line in readme.splitlines() if line.endswith(".safetensors")]
        subprocess.run(["sha256sum", "-c"], input="\n".join(sums), text=True, cwd=folder, check=True)


@pytest.mark.slow
def test_without_a_checkpoint_right_before_the_step_the_batches_between_are_cut_too(tmp_path):
    model = make_model(tmp_path / "model")
    run = make_run(str(tmp_path / "run"), model, checkpoint_every=2, advantage="token_returns", full_version_every=4)
    made = cut(run, 4, str(tmp_path / "out"))
    assert (made.step, made.first_step) == (4, 3)
    cut_root = Root.open(made.folder)
    assert cut_root.list("batches") == [f"batches/attempt=1/step={step}.parquet" for step in (3, 4)]
    # Version 3 is stored as differences there, and in full here.
    assert run.exists("policies/version=3/delta.json")
    assert cut_root.exists("policies/version=3/config.json")
    again = str(tmp_path / "again")
    root = open_to_train(again, next_config(again, {"replay_batches": made.folder}))
    assert train_here(root, replay_batches=made.folder) == 4
    assert weights_after(root, 4, attempt_id=2) == weights_after(run, 4)


def test_the_policy_published_after_the_step_tells_the_weights_if_its_checkpoint_is_gone(copy, tmp_path):
    copy.delete(checkpoint_folder((1, 1)))
    made = cut(copy, 1, str(tmp_path / "out"))
    assert made.weights_sha256 == {"model.safetensors": sha256(copy, "policies/version=1/model.safetensors")}


@pytest.mark.parametrize("kind", ["config", "tokenizer", "weights"])
def test_a_file_name_in_another_users_root_writes_nothing_outside_of_the_cut(run, tmp_path, kind):
    """The first weights are a policy of step 0, whose fingerprints are not compared; the root comes with a file."""
    theirs = Root.open(shutil.copytree(run.url, tmp_path / "shared" / "deep" / "root").as_posix())
    (tmp_path / "shared" / "deep" / ".bashrc").write_text("theirs")
    identity = json.loads(theirs.read("model/identity.json"))
    identity.pop("digest")
    identity[kind]["../../../.bashrc"] = "0" * 64
    theirs.put("model/identity.json", json.dumps(identity).encode())
    (tmp_path / "home").mkdir()
    with pytest.raises(
        SchemaError, match=rf"model/identity\.json .*: {kind} has '\.\./\.\./\.\./\.bashrc', wanted a path"
    ):
        cut(theirs, 1, str(tmp_path / "home" / "cut"))
    assert list((tmp_path / "home").iterdir()) == []


def test_a_cut_goes_to_a_new_or_an_empty_folder_only(run, tmp_path):
    (tmp_path / "empty").mkdir()
    cut(run, 2, str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        cut(run, 2, str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="wanted a folder of this machine"):
        cut(run, 2, "s3://bucket/out")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize("step", [0, 9])
def test_a_step_that_was_not_planned_is_refused(run, tmp_path, step):
    with pytest.raises(ConfigError, match=f"has no step {step}; its batches have steps 1 to 4"):
        cut(run, step, str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_expired_rollouts_are_named_and_leave_no_folder(copy, tmp_path):
    expire(copy, stored_files(copy), rule="all")
    with pytest.raises(ConfigError, match=r"step 1 needs rollouts/.* is gone: its rollouts have expired"):
        cut(copy, 1, str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_pruned_policy_is_left_out_and_said(copy, tmp_path):
    copy.delete("policies/version=1/config.json")
    made = cut(copy, 2, str(tmp_path / "out"))
    assert made.policy_version is None
    assert "was pruned and is not here" in (tmp_path / "out" / "README.txt").read_text()


def test_options_that_look_like_credentials_are_left_out(copy, tmp_path):
    options = {"moar_cats": {"api_key": "sk-123", "size": 3, "judge": {"access_token": "t-456"}}}
    copy.put("run.json", to_json(replace(run_of(copy), env_options=options), copy.run_id))
    cut(Root.open(copy.url), 1, str(tmp_path / "out"))
    for file in (tmp_path / "out").rglob("*"):
        assert not (file.is_file() and any(secret in file.read_bytes() for secret in (b"sk-123", b"t-456")))
    assert Root.open(str(tmp_path / "out")).record.env_options["moar_cats"]["size"] == 3


CUT_AND_DIE = """
import os
import signal
import sys

from ludic.root.root import Root
from ludic.eval.what_if import cut as module


def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)


module.readme_text = die
module.cut(Root.open(sys.argv[1]), 2, sys.argv[2])
"""


@pytest.mark.slow
def test_a_cut_that_is_killed_leaves_no_folder_and_can_be_made_again(run, tmp_path):
    (tmp_path / "cut_and_die.py").write_text(CUT_AND_DIE)
    process = Forked([tmp_path / "cut_and_die.py", run.url, tmp_path / "out"], tmp_path / "log")
    assert process.wait() == -signal.SIGKILL, process.printed()
    assert not (tmp_path / "out").exists()
    cut(run, 2, str(tmp_path / "out"))
    assert read_cut(Root.open(str(tmp_path / "out"))).step == 2


@pytest.mark.slow
def test_a_run_on_s3_is_cut_into_a_local_folder(run, s3_bucket, tmp_path):
    url = f"{s3_bucket}/{uuid.uuid4()}"
    storage = Storage.connect(url)
    for name in run.list(""):
        storage.put(name, run.read(name))
    made = cut(Root.open(url), 2, str(tmp_path / "out"))
    assert check_root(Root.open(str(tmp_path / "out"))).findings == []
    assert s3_bucket not in (tmp_path / "out" / "README.txt").read_text()
    assert (made.step, made.num_rollouts) == (2, 8)
