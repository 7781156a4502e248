"""Ranks and workers of a launcher that was killed or stopped; every process is real.

Each is started in a folder with modules that it would import, were it to look there.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hostile_folders import hostile_folder, imported_from
from s3_proxy import Delay, S3Proxy
from tiny_runs import create_root, fill, make_model

from ludic.store import Root, ledger_steps
from ludic.store.attempts import complete_checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = ("--offline", "--num-steps", "100000", "--device", "cpu", "--checkpoint-every", "None")


@pytest.fixture
def source(tmp_path) -> Root:
    root = create_root(str(tmp_path / "source"), make_model(tmp_path / "model"))
    fill(root, num_files=1)
    return root


@pytest.fixture(autouse=True)
def hostile(tmp_path) -> Iterator[Path]:
    """The working directory of all processes."""
    folder = hostile_folder(tmp_path / "hostile")
    yield folder
    assert imported_from(folder) == []


def started(tmp_path, *args: str) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [Path(sys.executable).with_name("ludic"), *args]
    with (tmp_path / "log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=tmp_path / "hostile", stdout=log, stderr=log, env=environment, start_new_session=True
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


@pytest.mark.parametrize(("stop_within_s", "is_kept"), [("2", False), ("60", True)])
def test_a_stopped_trainer_has_the_time_for_its_last_checkpoint_that_the_user_gives(
    tmp_path, source, s3_server, s3_bucket, monkeypatch, stop_within_s, is_kept
):
    """Each file of a checkpoint takes 3 s to a slow bucket."""
    proxy = S3Proxy(s3_server)
    proxy.react = lambda method, path: Delay(3.0) if method == "PUT" and "/checkpoints/" in path else None
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    url = f"{s3_bucket}/{uuid.uuid4()}"
    root = create_root(url, source.run.model)
    flags = ("--ranks", "2", "--sources", source.url, *TRAIN, "--stop-within-s", stop_within_s)
    launcher = started(tmp_path, "train", url, *flags)
    wait_until(launcher, lambda: len(ledger_steps(root, 1)) >= 2, tmp_path)
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    launcher.terminate()
    launcher.wait(120)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert alive == []
    assert bool(complete_checkpoints(root)) == is_kept, (tmp_path / "log").read_text()
    proxy.close()
