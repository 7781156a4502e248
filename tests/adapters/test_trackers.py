"""TensorBoard's event files and W&B's offline files, read back."""

import json
import os
import posixpath
import re
from pathlib import Path

import pytest
from forks import Forked
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import create_root, fill, make_model, query
from wandb_files import read_offline_run, read_table

from ludic.adapters.trackers import mlflow_name, tensorboard
from ludic.root.root import Root
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run
from ludic.training.config import TrackerConfig
from ludic.training.tracking import Sample, TrackedRun

SAMPLE = Sample(
    env_name="maths",
    policy_version=3,
    prompt="What is *two* times three?\nShow your steps.",
    answer="# Six",
    wanted="6",
    correct=False,
    reward=0.5,
    components={"format": 0.5, "right": 0.0},
    advantage=-0.25,
    response_length=7,
    rollout_id="r1",
)


def tracked(root: Root, after_step: int | None = 0) -> TrackedRun:
    return TrackedRun(root=root, config=TrackerConfig(), settings={"learning_rate": 0.1}, after_step=after_step)


def events(root: Root) -> EventAccumulator:
    return EventAccumulator(f"{root.path}/tensorboard").Reload()


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return put_run(str(tmp_path / "run"), RunConfig(model="m", env=("maths",)))


def test_tensorboard_holds_each_number_at_its_step_also_one_of_an_earlier_step(root):
    with tensorboard(tracked(root)) as log:
        log.numbers(1, {"loss": 0.5, "env/maths/reward_mean": 1.0})
        log.numbers(2, {"loss": 0.25})
        log.numbers(0, {"eval/maths/reward_mean": 2.0})
    found = events(root)
    curves = {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}
    assert curves == {
        "loss": [(1, 0.5), (2, 0.25)],
        "env/maths/reward_mean": [(1, 1.0)],
        "eval/maths/reward_mean": [(0, 2.0)],
    }
    (settings,) = found.Tensors("settings/text_summary")
    assert settings.tensor_proto.string_val[0] == b"- learning_rate: 0.1"


def test_steps_that_are_trained_again_take_the_place_of_earlier_ones_in_tensorboard(root):
    with tensorboard(tracked(root)) as log:
        for step in (1, 2, 3):
            log.numbers(step, {"loss": float(step)})
    with tensorboard(tracked(root, after_step=1)) as log:
        log.numbers(2, {"loss": 20.0})
    with tensorboard(tracked(root, after_step=None)) as log:  # after training: an evaluation replaces nothing
        log.numbers(1, {"eval": 5.0})
    found = events(root)
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(1, 1.0), (2, 20.0)]
    assert [(e.step, e.value) for e in found.Scalars("eval")] == [(1, 5.0)]


def test_tensorboard_shows_a_sample_as_text_in_which_markdown_means_nothing(root):
    with tensorboard(tracked(root)) as log:
        log.samples(20, [SAMPLE])
    (event,) = events(root).Tensors("samples/maths/text_summary")
    assert event.step == 20
    assert event.tensor_proto.string_val[0].decode() == (
        "reward 0.5, format 0.5, right 0, correct no, advantage -0.25, tokens 7, version 3, rollout r1\n\n"
        "prompt:\n\n    What is *two* times three?\n    Show your steps.\n\nanswer:\n\n    # Six\n\nwanted:\n\n    6"
    )


def test_a_name_that_mlflow_does_not_take_is_changed_and_two_names_stay_two():
    kept = "env/maths 2.0: easy-ü/component/num_cats"
    assert mlflow_name(kept) == kept
    hostile = [
        "env/a*b/x",
        "env/a?b/x",
        "env/../x",
        "env//x",
        "/x",
        "x/",
        ".",
        "",
        "a\n",
        "e\x1b[1m",
        "x" * 300,
        "x" * 301,
    ]
    taken = [mlflow_name(name) for name in hostile]
    assert len({*taken}) == len(hostile)
    # The rule that MLflow 3.17 checks: its characters, its length, and a path that is normal.
    for name in taken:
        assert re.fullmatch(r"[/\w.\- :]{1,250}", name)
        assert posixpath.normpath(name) == name
        assert not name.startswith(("/", ".."))
    assert taken[0].startswith("env/a_b-")
    assert taken[0].endswith("/x")


# --- Weights & Biases, offline: a trainer in a process of its own, since W&B reads its variables once -----------------

TRAIN = """
import sys
from ludic.root.root import Root
from tiny_runs import train_here

root = Root.open(sys.argv[1])
train_here(root, num_steps=2, log_to="wandb", checkpoint_every=2, tracker_samples_every=2)
train_here(root, num_steps=4, log_to="wandb", tracker_samples_every=None, where="env_name <> 'secret-of-s3'")
"""


@pytest.mark.slow
def test_wandb_gets_curves_samples_and_names_and_a_resumed_trainer_continues_its_run(tmp_path):
    root = create_root(str(tmp_path / "cats"), make_model(tmp_path / "model"))
    fill(root, num_files=3)
    variables = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_PROJECT": "theirs",
        "WANDB_TAGS": "a,b",
        "WANDB_ENTITY": "them",
        "AWS_SECRET_ACCESS_KEY": "secret-of-s3",
    }
    (tmp_path / "train.py").write_text(TRAIN)
    process = Forked([tmp_path / "train.py", root.url], tmp_path / "log", os.environ | variables, cwd=tmp_path)
    assert process.wait(240) == 0, process.printed()
    folders = sorted(tmp_path.glob("wandb/offline-run-*"))
    first, second = map(read_offline_run, folders)

    ours = {"run_id": root.run_id}
    assert first.facts == ours | {"project": "theirs", "entity": "them", "display_name": "cats", "tags": ["a", "b"]}
    assert second.facts == first.facts
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert first.axes == {"step": "", "*": "step"}
    assert first.config["env"] == ["moar_cats"]
    assert first.config["learning_rate"] == 1e-3
    assert second.config["where"] == "env_name <> '***'"

    rewards = dict(query(root, "select step, reward_mean from metrics where kind = 'train'"))
    for name in ("reward_mean", "env/moar_cats/reward_mean", "env/moar_cats/component/num_cats"):
        assert dict(first.curve(name) + second.curve(name)) == pytest.approx(rewards)
    (of_step_2,) = [row for row in first.rows if "samples/path" in row]
    samples = read_table(folders[0], of_step_2, "samples")
    assert [(row["step"], row["env_name"]) for row in samples] == [(2, "moar_cats")] * 4
    rows = query(root, "select rollout_id, episode_reward, reward_components from rollouts")
    stored = {rollout_id: (reward, components) for rollout_id, reward, components in rows}
    for row in samples:
        assert (row["reward"], json.loads(row["components"])) == stored[row["rollout_id"]]
        assert row["prompt"] == "Say something about cats."
        assert row["answer"].startswith("cat number ")
    assert not any("samples/path" in row for row in second.rows)
