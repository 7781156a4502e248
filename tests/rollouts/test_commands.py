"""Commands of an agent run in a folder, within limits, with few variables, and leave no process behind."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ludic.errors import ConfigError
from ludic.rollouts.commands import CommandEnd, environment_of, fill, limits_of, run_command, split_command
from ludic.run.config import RunConfig


def run_config(**settings: object) -> RunConfig:
    return RunConfig(model="m", env=("moar_cats",), agent_command="true", **settings)


def run(
    words: list[str], folder: Path, limits: Mapping[str, int] = {}, secret: str = "", **variables: str
) -> CommandEnd:
    environment = environment_of(run_config(), folder, variables)
    return asyncio.run(run_command(words, folder=folder, environment=environment, limits=limits, secret=secret))


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not collected yet does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_for(pid_file: Path) -> int:
    while not (pid_file.exists() and pid_file.read_text().strip()):
        time.sleep(0.01)
    return int(pid_file.read_text())


def test_the_exit_code_and_the_end_of_the_output_are_kept_without_secrets(tmp_path: Path) -> None:
    script = 'head -c 100000 /dev/zero | tr "\\0" x; echo; echo "key $KEY at $PWD"; echo last >&2; exit 3'
    end = run(["sh", "-c", script], tmp_path, secret="sk-ludic-1", KEY="sk-ludic-1")
    assert end.exit_code == 3
    assert len(end.output) <= 4000
    assert end.output.endswith(f"key *** at {tmp_path}\nlast")
    assert run(["no-such-program"], tmp_path).exit_code == 127


def test_a_command_gets_only_the_named_variables_of_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "of-the-worker")
    monkeypatch.setenv("PROJECT", "of-the-user")
    environment = environment_of(run_config(agent_variables=("PROJECT",)), tmp_path, {"OPENAI_API_KEY": "k"})
    assert "SOME_API_KEY" not in environment
    assert (environment["PROJECT"], environment["HOME"]) == ("of-the-user", str(tmp_path))
    shown = asyncio.run(run_command(["env"], folder=tmp_path, environment=environment, limits={})).output
    assert "PYTHONSAFEPATH" not in shown  # Python agents import from their own folder
    assert "OPENAI_API_KEY=" in shown


@pytest.mark.parametrize(
    ("settings", "script", "code"),
    [
        pytest.param({"agent_cpu_s": 1}, "while True: pass", 128 + 24, marks=pytest.mark.slow),
        ({"agent_memory_mb": 200}, "bytearray(3 * 10**8)", 1),
        ({"agent_open_files": 20}, "import os; [os.dup(0) for _ in range(30)]", 1),
        ({"agent_file_mb": 1}, "open('big', 'wb').write(bytes(2 * 10**6))", 1),
    ],
)
def test_a_limit_ends_a_process(tmp_path: Path, settings: dict[str, int], script: str, code: int) -> None:
    words = [sys.executable, "-I", "-S", "-c", script]
    if "agent_cpu_s" not in settings:
        assert run(words, tmp_path).exit_code == 0
    assert run(words, tmp_path, limits_of(run_config(**settings))).exit_code == code


def test_no_process_outlives_its_command(tmp_path: Path) -> None:
    script = "setsid sleep 1000 & echo $! > apart; sleep 1001 & echo $! > beside; exit 0"
    assert run(["sh", "-c", script], tmp_path).exit_code == 0
    assert not is_running(wait_for(tmp_path / "apart"))
    assert not is_running(wait_for(tmp_path / "beside"))


def test_the_processes_of_a_command_end_when_it_is_cancelled(tmp_path: Path) -> None:
    async def cancel() -> None:
        words = ["sh", "-c", "sleep 1000 & echo $! > inner; echo $$ > outer; wait"]
        environment = environment_of(run_config(), tmp_path, {})
        task = asyncio.create_task(run_command(words, folder=tmp_path, environment=environment, limits={}))
        while not (tmp_path / "outer").exists():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(cancel())
    assert not is_running(wait_for(tmp_path / "inner"))
    assert not is_running(wait_for(tmp_path / "outer"))


WORKER = """
import asyncio, sys
from pathlib import Path
from ludic.rollouts.commands import run_command
words = ["sh", "-c", "setsid sleep 1000 & echo $! > apart; echo $$ > outer; wait"]
asyncio.run(run_command(words, folder=Path(sys.argv[1]), environment={"PATH": sys.argv[2]}, limits={}))
"""


@pytest.mark.slow  # imports ludic in a process
def test_the_processes_of_a_command_end_when_their_worker_is_killed(tmp_path: Path) -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), os.environ["PATH"]])
    outer, apart = wait_for(tmp_path / "outer"), wait_for(tmp_path / "apart")
    assert is_running(outer)
    assert is_running(apart)
    worker.kill()
    worker.wait()
    until = time.monotonic() + 5
    while (is_running(outer) or is_running(apart)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_running(outer)
    assert not is_running(apart)


def test_a_text_of_the_example_is_one_word_and_never_code(tmp_path: Path) -> None:
    prompt = "a'b\"; touch stolen; $(touch stolen) {model}"
    words = fill(split_command("agent_command", "printf %s {prompt}"), {"prompt": prompt, "model": "m"})
    assert run(words, tmp_path).output == prompt
    assert not (tmp_path / "stolen").exists()
    words = fill(split_command("agent_command", "sh -c 'printf %s \"$1\"' sh {prompt}"), {"prompt": prompt})
    assert run(words, tmp_path).output == prompt
    with pytest.raises(ConfigError, match=r"\{prompt\} in the script of sh -c, where a text would be run as code"):
        split_command("agent_command", "sh -c 'codex {prompt}'")


def test_a_command_that_can_never_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("")
    for command, words in (
        ("cat {exmple}", r"has \{exmple\}, which nothing replaces; did you mean \{example\}\?"),
        ("", "agent_command is empty"),
        ("sh 'open", "can't be split into words"),
        ("nonesuch {prompt}", "there is no program 'nonesuch' on this machine"),
        ("python3 agent.py", f"names agent.py, a file of {tmp_path}.*write {tmp_path}/agent.py"),
    ):
        with pytest.raises(ConfigError, match=words):
            split_command("agent_command", command)
