"""cut: the smallest folder that trains one step again bit for bit, without the run that it came from."""

import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import create_root, fill, make_model, train_here

import ludic
from ludic.errors import ConfigError
from ludic.launch.here import open_to_train
from ludic.maintenance.verify import check_root
from ludic.store import Root
from ludic.store.attempts import checkpoint_folder, read_cut
from ludic.store.tombstones import expire, stored_files
from ludic.training.inherited_settings import next_config
from ludic.what_if.cut import cut

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
@pytest.mark.parametrize("step", [1, 3])
def test_the_written_command_replays_the_step_bit_for_bit_after_the_run_is_gone(tmp_path, step):
    model = make_model(tmp_path / "model")
    run = make_run(str(tmp_path / "original" / "run"), model, num_steps=3)
    wanted = weights_after(run, step)
    made = cut(run, step, str(tmp_path / "there" / "out"))
    (tmp_path / "original").rename(tmp_path / "gone")
    (tmp_path / "model").rename(tmp_path / "gone model")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--shared", str(REPOSITORY), str(clone)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(clone), "HOME": str(tmp_path / "home")}
    program, *args = made.command.split()
    assert program == "ludic"
    result = subprocess.run(
        [sys.executable, "-m", "ludic", *args],
        cwd=tmp_path / "there",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert "last bits" not in result.stderr
    again = Root.open(str(tmp_path / "there" / "again"))
    assert weights_after(again, step, attempt_id=1 if step == 1 else 2) == wanted
    readme = (tmp_path / "there" / "out" / "README.txt").read_text()
    sums = [line for line in readme.splitlines() if line.endswith(".safetensors")]
    subprocess.run(["sha256sum", "-c"], input="\n".join(sums), text=True, cwd=tmp_path / "there", check=True)


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


def test_the_policy_published_after_the_step_tells_the_weights_if_its_checkpoint_is_gone(tmp_path):
    settings = {"num_steps": 2, "keep_checkpoints": 1}
    run = make_run(str(tmp_path / "run"), make_model(tmp_path / "model"), **settings)
    made = cut(run, 1, str(tmp_path / "out"))
    assert made.weights_sha256 == {"model.safetensors": sha256(run, "policies/version=1/model.safetensors")}


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


def test_expired_rollouts_are_named_and_leave_no_folder(tmp_path):
    run = make_run(str(tmp_path / "run"), make_model(tmp_path / "model"), num_steps=1)
    expire(run, stored_files(run), rule="all")
    with pytest.raises(ConfigError, match=r"step 1 needs rollouts/.* is gone: its rollouts have expired"):
        cut(run, 1, str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]


def test_a_pruned_policy_is_left_out_and_said(tmp_path):
    run = make_run(str(tmp_path / "run"), make_model(tmp_path / "model"), num_steps=2)
    run.delete("policies/version=1/config.json")
    made = cut(run, 2, str(tmp_path / "out"))
    assert made.policy_version is None
    assert "was pruned and is not here" in (tmp_path / "out" / "README.txt").read_text()


@pytest.mark.slow
def test_options_that_look_like_credentials_are_left_out(tmp_path):
    options = {"moar_cats": {"api_key": "sk-123", "size": 3, "judge": {"access_token": "t-456"}}}
    root = create_root(str(tmp_path / "run"), make_model(tmp_path / "model"), env_options=options)
    fill(root, num_files=1)
    train_here(root, num_steps=1)
    cut(root, 1, str(tmp_path / "out"))
    for file in (tmp_path / "out").rglob("*"):
        assert not (file.is_file() and any(secret in file.read_bytes() for secret in (b"sk-123", b"t-456")))
    assert Root.open(str(tmp_path / "out")).run.env_options["moar_cats"]["size"] == 3


def _cut_and_die(url: str, out: str) -> None:
    from ludic.what_if import cut as module

    def die(*args, **options):
        os.kill(os.getpid(), signal.SIGKILL)

    module.readme_text = die
    module.cut(Root.open(url), 2, out)


@pytest.mark.slow
def test_a_cut_that_is_killed_leaves_no_folder_and_can_be_made_again(run, tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=_cut_and_die, args=(run.url, str(tmp_path / "out")))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    cut(run, 2, str(tmp_path / "out"))
    assert read_cut(Root.open(str(tmp_path / "out"))).step == 2


@pytest.mark.slow
def test_a_run_on_s3_is_cut_into_a_local_folder(s3_bucket, tmp_path):
    run = make_run(f"{s3_bucket}/run", make_model(tmp_path / "model"), num_steps=2)
    made = cut(run, 2, str(tmp_path / "out"))
    assert check_root(Root.open(str(tmp_path / "out"))).findings == []
    assert s3_bucket not in (tmp_path / "out" / "README.txt").read_text()
    assert (made.step, made.num_rollouts) == (2, 8)
