"""Ranks and workers of a launcher that was killed or stopped.

`ludic run` is started as a user does it, in a folder with modules that its processes would import, were they to look
there.
"""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from forks import Forked
from hostile_folders import hostile_folder, imported_from
from s3_proxy import Delay, S3Proxy
from tiny_runs import create_root, fill, make_model

from ludic.root.attempts import complete_checkpoints
from ludic.root.root import Root
from ludic.root.rows.ledger import ledger_steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = ("--offline", "--num-steps", "100000", "--device", "cpu", "--checkpoint-every", "None")


@pytest.fixture
def source(tmp_path) -> Root:
    root = create_root(str(tmp_path / "source"), make_model(tmp_path / "model"))
    fill(root, num_files=1)
    return root


def wait_until(process: subprocess.Popen | Forked, holds: Callable[[], bool], tmp_path) -> None:
    while not holds():
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)


def test_no_rank_outlives_torchrun(tmp_path, source):
    url = str(tmp_path / "trained")
    launcher = Forked(["ludic", "train", url, "--ranks", "2", "--sources", source.url, *TRAIN], tmp_path / "log")
    wait_until(launcher, (Path(url) / "run.json").exists, tmp_path)
    wait_until(launcher, lambda: len(ledger_steps(Root.open(url), 1)) >= 2, tmp_path)
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    assert len(ranks) == 2
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == [], (tmp_path / "log").read_text()


def test_nothing_outlives_ludic_run(tmp_path):
    url = str(tmp_path / "run")
    flags = ("--model", make_model(tmp_path / "model"), "--env", "moar_cats", "--ranks", "2", "--num-steps", "100000")
    sizes = ("--group-size", "2", "--groups-per-batch", "2", "--max-tokens", "8", "--accept-incomplete")
    command = [Path(sys.executable).with_name("ludic"), "run", url, *flags, *sizes, "--device", "cpu"]
    hostile = hostile_folder(tmp_path / "hostile")
    with (tmp_path / "log").open("wb") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        run = subprocess.Popen(command, cwd=hostile, stdout=log, stderr=log, env=environment, start_new_session=True)
    wait_until(run, (Path(url) / "run.json").exists, tmp_path)
    wait_until(run, lambda: len(ledger_steps(Root.open(url), 1)) >= 1, tmp_path)
    children = psutil.Process(run.pid).children(recursive=True)
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == [], (tmp_path / "log").read_text()
    assert imported_from(hostile) == []


@pytest.mark.parametrize(("stop_within_s", "is_kept"), [("2", False), ("60", True)])
def test_a_stopped_trainer_has_the_time_for_its_last_checkpoint_that_the_user_gives(
    tmp_path, source, s3_server, s3_bucket, monkeypatch, stop_within_s, is_kept
):
    """Each file of a checkpoint takes 3 s to a slow bucket."""
    proxy = S3Proxy(s3_server)
    proxy.react = lambda method, path: Delay(3.0) if method == "PUT" and "/checkpoints/" in path else None
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    url = f"{s3_bucket}/{uuid.uuid4()}"
    root = create_root(url, source.record.model)
    flags = ("--ranks", "2", "--sources", source.url, *TRAIN, "--stop-within-s", stop_within_s)
    launcher = Forked(["ludic", "train", url, *flags], tmp_path / "log")
    wait_until(launcher, lambda: len(ledger_steps(root, 1)) >= 2, tmp_path)
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    launcher.terminate()
    launcher.wait(120)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == []
    assert bool(complete_checkpoints(root)) == is_kept, (tmp_path / "log").read_text()
    proxy.close()
