"""Ranks and workers of a launcher that was killed end; every process is real."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tiny_runs import create_root, fill, make_model

from ludic.store import Root, ledger_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = ("--offline", "--num-steps", "100000", "--device", "cpu", "--checkpoint-every", "None")


@pytest.fixture
def source(tmp_path) -> Root:
    root = create_root(str(tmp_path / "source"), make_model(tmp_path / "model"))
    fill(root, num_files=1)
    return root


def started(tmp_path, *args: str) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "ludic", *args], stdout=log, stderr=log, env=environment, start_new_session=True
        )


def wait_until(process: subprocess.Popen, holds: Callable[[], bool], tmp_path) -> None:
    while not holds():
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["torchrun", "its process group"])
def test_no_rank_outlives_torchrun(tmp_path, source, kill):
    url = str(tmp_path / "trained")
    launcher = started(tmp_path, "train", url, "--ranks", "2", "--sources", source.url, *TRAIN)
    wait_until(launcher, (Path(url) / "run.json").exists, tmp_path)
    wait_until(launcher, lambda: len(ledger_steps(Root.open(url), 1)) >= 2, tmp_path)
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    assert len(ranks) == 2
    kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == [], (tmp_path / "log").read_text()


def test_nothing_outlives_ludic_run(tmp_path):
    url = str(tmp_path / "run")
    flags = ("--model", make_model(tmp_path / "model"), "--env", "moar_cats", "--ranks", "2", "--num-steps", "100000")
    sizes = ("--group-size", "2", "--groups-per-batch", "2", "--max-tokens", "8", "--accept-incomplete")
    run = started(tmp_path, "run", url, *flags, *sizes, "--device", "cpu")
    wait_until(run, (Path(url) / "run.json").exists, tmp_path)
    wait_until(run, lambda: len(ledger_steps(Root.open(url), 1)) >= 1, tmp_path)
    children = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == [], (tmp_path / "log").read_text()
