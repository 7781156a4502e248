"""Settings of child processes: private files that say all, and are gone with the process that wrote them."""

import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from command_settings import parsed

from ludic.app.launch.process import config_args
from ludic.app.launch.train import train_args
from ludic.app.operations.evaluations import eval_
from ludic.app.operations.start import train
from ludic.engines.config import EngineConfig
from ludic.eval.config import EvalConfig
from ludic.training.config import LossConfig, Objective, Orpo, PpoClip, Reinforce, Sft, TrainConfig, Vespo

WRITE = "from ludic.app.launch.process import config_args; print(config_args('worker-0', {'slot': 0})[1], flush=True)"


def test_a_trainer_gets_every_setting_as_it_is() -> None:
    config = TrainConfig.of(
        learning_rate=1e-7 / 3,
        betas=(0.1, 0.2),
        filters=("a b", "--x"),
        sql_params={"margin": 4, "name": "$HOME 'quoted' \n\u2713"},
        where='reward > 1 and env_name = "None"',
        max_grad_norm=None,
        wait_for_scores_s=None,
    )
    _, _, _, *args = train_args("root", config, 1, replaces=3, model="None/of-this")
    read = parsed(train, "root", *args)
    assert (read.root, read.train, read.replaces, read.model) == ("root", config, 3, "None/of-this")


OBJECTIVES = (
    Reinforce(is_ratio_cap=2.0, ratio_level="sequence"),
    PpoClip(clip_low=0.1, dual_clip=3.0, whiten_advantages=True),
    Vespo(vespo_k=(1.0, 2.0), is_ratio_bounds=(0.5, 2.0)),
    Sft(),
    Orpo(orpo_weight=0.3),
)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.name)
def test_a_trainer_gets_its_objective(objective: Objective) -> None:
    normalization = "sequences" if isinstance(objective, Orpo) else "tokens"
    config = TrainConfig(loss=LossConfig(objective=objective, loss_normalization=normalization))
    _, _, _, *args = train_args("root", config, 1)
    assert parsed(train, "root", *args).train == config


def test_an_evaluator_gets_a_switch_of_three_states() -> None:
    for accept in (True, False, None):
        args = config_args("evaluator", {"accept_incomplete": accept, "env": ("a", "b"), "engine": "transformers"})
        read = parsed(eval_, "root", *args)
        run = {} if accept is None else {"accept_incomplete": accept}
        assert (read.samples, read.engine) == (EvalConfig(run=run, env=("a", "b")), EngineConfig(engine="transformers"))


def test_files_are_private_and_of_their_content() -> None:
    one, same, other = (Path(config_args("worker-0", {"slot": slot})[1]) for slot in (0, 0, 1))
    assert one == same != other
    assert stat.S_IMODE(one.parent.stat().st_mode) == 0o700


def test_a_file_is_gone_with_its_process() -> None:
    path = subprocess.run([sys.executable, "-c", WRITE], capture_output=True, text=True, check=True).stdout.strip()
    assert path.endswith(".json")
    assert not Path(path).parent.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the start of a process is read from /proc")
def test_a_file_of_a_killed_process_is_deleted_by_the_next_one() -> None:
    code = f"{WRITE}; import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    path = Path(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    )
    assert path.exists()
    subprocess.run([sys.executable, "-c", WRITE], capture_output=True, check=True)
    assert not path.parent.exists()


def test_settings_are_written_again_if_a_cleaner_took_their_folder():
    first = Path(config_args("worker", {"slot": 1})[1])
    shutil.rmtree(first.parent)
    again = Path(config_args("worker", {"slot": 1})[1])
    assert json.loads(again.read_text()) == {"slot": 1}
