"""`ludic grid`: which runs it makes of its settings, what it refuses before a start, and whole grids of processes."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from app.cli.conftest import ludic as run_ludic
from app.cli.conftest import model_folder

from ludic.app.launch.grid import GridProcesses, GridRun, combinations
from ludic.app.operations.start import run
from ludic.app.show.runs import find_runs, summarise
from ludic.errors import ConfigError
from ludic.root.root import Root
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run
from ludic.settings.table import settings_of

__all__ = ["model_folder"]
ludic = run_ludic
TABLE = {each.name: each for each in settings_of(run) if each.may_be_in_file}


def names(*given: str) -> list[str]:
    return [each.name for each in combinations("runs/exp", given, TABLE)]


def test_the_roots_are_named_by_the_values_however_they_were_typed() -> None:
    assert names("learning_rate=1e-6,3e-6", "seed=0,1") == [
        "learning_rate=1e-6,seed=0",
        "learning_rate=1e-6,seed=1",
        "learning_rate=3e-6,seed=0",
        "learning_rate=3e-6,seed=1",
    ]
    assert names("seed=0", "learning-rate=0.000001") == names("--learning_rate=1e-06", "seed=0")
    (first, *_) = combinations("s3://bucket/exp/", ["learning_rate=1e-6,1e-5"], TABLE)
    assert (first.url, first.settings) == ("s3://bucket/exp/learning_rate=1e-6", {"learning_rate": 1e-6})
    assert names("accept_incomplete=true,false", "lora_rank=None,8")[0] == "accept_incomplete=true,lora_rank=None"


def test_a_value_that_is_no_path_is_named_safely_and_by_a_digest() -> None:
    envs = names("env=qa/a.jsonl,qa-a.jsonl.py:A,../../x.py:Env")
    assert [each[:-9] for each in envs] == ["env=qa-a.jsonl", "env=qa-a.jsonl.py-A", "env=..-..-x.py-Env"]
    assert all(re.fullmatch(r"[\w.=+-]+-[0-9a-f]{8}", each) for each in envs)
    (nested,) = combinations("x", ['env_options={"a":{"n":1,"m":[2,3]}}'], TABLE)
    assert nested.settings["env_options"] == {"a": {"n": 1, "m": [2, 3]}}
    (long,) = names(f"where=reward > 1{' or reward > 2' * 99}")
    assert len(long) <= 210


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["learning_rte=1"], "setting 'learning_rte' is unknown; did you mean 'learning_rate'?"),
        (["learning_rate=1e-6,fast"], "--set learning_rate is 'fast', wanted a number"),
        (["seed=0,1", "seed=2"], "--set gives seed twice"),
        (["learning_rate=1e-6,0.000001"], "--set gives learning_rate the value 1e-6 twice"),
        (["seed"], "--set is 'seed', wanted NAME=VALUE,VALUE"),
    ],
)
def test_what_makes_no_grid_is_named(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        combinations("runs/exp", given, TABLE)


def test_all_wrong_combinations_are_named_and_nothing_starts(ludic, tmp_path: Path) -> None:
    file = tmp_path / "exp.toml"
    file.write_text('model = "nowhere"\nenv = ["moar_cats"]\nclose_groups_at = 4\n')
    root = tmp_path / "runs"
    put_run(f"{root}/group_size=8", RunConfig(model="tiny", env=("moar_cats",), group_size=8))
    result = ludic("grid", file, "--root", root, "--set", "group_size=2,4,8")
    assert result.code == 1
    for said in (
        "group_size=2: close_groups_at is 4, wanted at most 2 (group_size)",
        "group_size=4: model: nowhere",
        f"group_size=8: {root}/group_size=8 was started with other settings (model is 'tiny' there, 'nowhere' was",
    ):
        assert said in result.err, result.err
    assert [each.name for each in root.iterdir()] == ["group_size=8"]
    file.write_text("root = 3\nnum_stepz = 4\n")
    assert "setting 'num_stepz' is unknown; did you mean 'num_steps'" in ludic("grid", file, "--set", "seed=1").err
    assert "FILE and --config are both given" in ludic("grid", file, "--config", file, "--set", "seed=1").err


def test_jobs_at_the_same_time_share_out_the_gpus() -> None:
    runs = [GridRun(name=f"{each}", url=f"{each}", settings={}) for each in range(2)]
    processes = GridProcesses(runs, {}, 2, gpus=("0", "1", "5"), stop_within_s=1)
    assert processes._gpus == [("0", "5"), ("1",)]


# --- Whole grids -----------------------------------------------------------------------------------------------------


@pytest.fixture
def start(tmp_path: Path, model_folder: str) -> Callable[..., subprocess.Popen[str]]:
    """start("seed=0,1"): `ludic grid` over a file of the tiny model, as a process."""
    own = {"model": model_folder, "env": ["moar_cats"], "group_size": 4, "groups_per_batch": 2, "max_tokens": 8}
    own |= {"accept_incomplete": True, "max_off_policy_steps": 4, "learning_rate": 1e-3, "checkpoint_every": 1}

    def begin(*args: Any, **settings: Any) -> subprocess.Popen[str]:
        lines = (f"{name} = {json.dumps(value)}" for name, value in {**own, **settings}.items())
        (tmp_path / "exp.toml").write_text("\n".join(lines))
        command = [sys.executable, "-m", "ludic", "grid", "exp.toml", *map(str, args)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes)

    return begin


def rest_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=280)
    return process.returncode, said


@pytest.mark.slow
def test_a_grid_continues_after_its_kill_and_that_of_a_run_and_ends(tmp_path: Path, start) -> None:
    grid = ("--set", "seed=0,1", "--jobs", 2)
    folder = tmp_path / "runs" / "exp"

    def steps() -> list[int]:
        return [each.step for each in summarise(find_runs(folder))] if folder.is_dir() else []

    def await_steps(process: subprocess.Popen[str], at_least: int) -> None:
        deadline = time.monotonic() + 240
        while sum(step >= at_least for step in steps()) < 2:
            assert time.monotonic() < deadline, steps()
            assert process.poll() is None, rest_of(process)
            time.sleep(0.2)

    process = start(*grid, num_steps=10_000)
    await_steps(process, 2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive, "processes of the grid outlive it"
    found = summarise(find_runs(folder))
    assert [each.state for each in found] == ["stopped", "stopped"]
    ids = [each.run_id for each in found]

    process = start(*grid, num_steps=10_000)
    await_steps(process, max(steps()) + 1)
    runs = {" ".join(each.cmdline()): each for each in psutil.Process(process.pid).children()}
    next(run for command, run in runs.items() if "seed=1" in command).kill()
    assert process.stdout is not None
    said = next(line for line in process.stdout if "failed" in line)
    assert "seed=1: failed: " in said
    process.send_signal(signal.SIGTERM)
    code, said = rest_of(process)
    assert (code, "all runs have stopped; the same command continues" in said) == (1, True), said

    last = max(steps()) + 1
    code, said = rest_of(start(*grid, num_steps=last))
    assert code == 0, said
    found = summarise(find_runs(folder))
    assert [(each.state, each.step) for each in found] == [("finished", last)] * 2, said
    assert [each.run_id for each in found] == ids
    assert [Root.open(each.url).exists("logs/run.log") for each in found] == [True] * 2
    code, said = rest_of(start(*grid, num_steps=last))
    assert (code, "started" in said, said.count("finished")) == (0, False, 2), said
