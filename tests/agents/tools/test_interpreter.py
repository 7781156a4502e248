"""Programs that really run, and really end at their limits."""

import ast
import asyncio
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ludic.agents.tools import interpreter
from ludic.agents.tools.interpreter import PythonInterpreter
from ludic.agents.tools.toolbox import Toolbox
from ludic.errors import ToolError
from ludic.records.rollout import ToolCall


def run(code: str, **limits: float) -> str:
    return asyncio.run(PythonInterpreter(**limits)({"code": code}))  # type: ignore[arg-type]


def error_of(code: str, **limits: float) -> str:
    with pytest.raises(ToolError) as raised:
        run(code, **limits)
    return str(raised.value)


def test_a_program_returns_what_it_prints() -> None:
    assert run("import sys\nprint('猫', 1 + 1)\nprint('also', file=sys.stderr)") == "猫 2\nalso\n"


def test_a_silent_program_is_told_to_print() -> None:
    assert run("1 + 1") == "[no output; print what you want to see]"


def test_installed_packages_can_be_imported() -> None:
    assert run("import numpy\nprint(numpy.arange(3).sum())") == "3\n"


def test_an_error_is_its_traceback_with_the_same_text_each_time() -> None:
    error = error_of("print('before')\n1 / 0")
    assert error.startswith('before\nTraceback (most recent call last):\n  File "main.py", line 2, in <module>')
    assert error.endswith("ZeroDivisionError: division by zero\n[ended with exit code 1]")
    assert error == error_of("print('before')\n1 / 0")
    assert error_of("import sys; sys.exit(3)") == "[ended with exit code 3]"
    assert error_of("import os; os.abort()") == "[ended by signal SIGABRT]"
    assert "SyntaxError" in error_of("def")
    assert "null bytes" in error_of("a\0b")
    assert run("print('\ud800')") == "?\n"


def test_sets_print_in_the_same_order_each_time() -> None:
    assert run("print(set('abcdef'))") == run("print(set('abcdef'))")


def test_no_variable_of_the_environment_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    printed = run("import os, sys\nprint(sorted(os.environ))\nprint(os.environ['HOME'] == os.getcwd(), sys.path)")
    assert "SECRET_TOKEN" not in printed
    assert "elsewhere" not in printed
    assert "\nTrue" in printed


def test_each_call_begins_in_an_empty_folder_that_is_gone_afterwards() -> None:
    folder = run("import os\nopen('a.txt', 'w').write('a')\nprint(os.listdir(), end='')\nprint(os.getcwd(), end='')")
    listed, path = folder[: folder.index("]") + 1], folder[folder.index("]") + 1 :]
    assert sorted(ast.literal_eval(listed)) == ["a.txt", "main.py"]
    assert not Path(path).exists()
    assert run("import os\nprint(os.listdir())") == "['main.py']\n"


def test_standard_input_is_empty() -> None:
    assert "EOFError" in error_of("input()")


@pytest.mark.slow
def test_a_program_is_killed_at_its_time_limit_with_the_processes_that_it_started(ends: Callable[[int], bool]) -> None:
    code = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "60"])
print(os.getpid(), child.pid)
while True: pass
"""
    start = time.monotonic()
    error = error_of(code, time_limit_s=1.0)
    assert time.monotonic() - start < 5
    pids, end = error.split("\n")
    assert end == "[stopped after 1 s]"
    assert all(ends(int(pid)) for pid in pids.split())


def test_a_program_that_ignores_signals_is_killed() -> None:
    code = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    assert error_of(code, time_limit_s=0.5) == "[stopped after 0.5 s]"


def test_a_child_that_is_left_behind_is_killed_when_the_program_has_ended(ends: Callable[[int], bool]) -> None:
    code = "import subprocess\nn = subprocess.DEVNULL\nprint(subprocess.Popen(['sleep', '60'], stdout=n, stderr=n).pid)"
    assert ends(int(run(code)))


@pytest.mark.slow
def test_a_detached_process_that_holds_the_output_does_not_hold_the_call() -> None:
    code = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '20'], start_new_session=True)\n"
        "print('started', flush=True)"
    )
    start = time.monotonic()
    # A busy machine takes a second until Python prints.
    assert error_of(code, time_limit_s=4.0) == "started\n[stopped after 4 s]"
    assert time.monotonic() - start < 15


def test_the_memory_limit_is_hit() -> None:
    assert "MemoryError" in error_of("x = bytearray(400_000_000)", memory_limit_bytes=300_000_000)
    assert run("x = bytearray(100_000_000)\nprint(len(x))", memory_limit_bytes=300_000_000) == "100000000\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may raise its limits")
def test_the_memory_limit_cant_be_raised() -> None:
    code = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))"
    assert "ValueError" in error_of(code)


def test_a_file_is_not_larger_than_its_limit() -> None:
    assert "File too large" in error_of("open('a', 'wb').write(bytes(2_000_000))", file_limit_bytes=1_000_000)


def test_endless_output_ends_the_program() -> None:
    start = time.monotonic()
    error = error_of("while True: print('y' * 99)", output_limit_bytes=1_000)
    assert error == ("y" * 99 + "\n") * 10 + "[stopped after 1,000 bytes of output]"
    assert time.monotonic() - start < 5


@pytest.mark.slow
def test_a_call_that_is_cancelled_kills_its_program(tmp_path: Path, ends: Callable[[int], bool]) -> None:
    """Also by the limit of a toolbox that is shorter than the interpreter's own."""
    note = tmp_path / "pid"
    code = f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    toolbox = Toolbox([PythonInterpreter()], time_limit_s=4.0)
    call = ToolCall(id="1", name="python", arguments=json.dumps({"code": code}))
    assert asyncio.run(toolbox.run(call)).error == "python took longer than 4 s and was stopped"
    assert ends(int(note.read_text()))


@pytest.mark.slow
def test_programs_beyond_the_limit_wait_their_turn_without_losing_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "MAX_PROGRAMS", 2)
    code = "import time\nstart = time.time()\ntime.sleep(0.5)\nprint(start, time.time())"

    async def run_all() -> list[str]:
        return await asyncio.gather(*(PythonInterpreter(time_limit_s=2.0)({"code": code}) for _ in range(8)))

    times = [tuple(map(float, printed.split())) for printed in asyncio.run(run_all())]
    assert max(sum(start <= moment < end for start, end in times) for moment, _ in times) == 2
    assert max(end for _, end in times) - min(start for start, _ in times) >= 2.0  # 8 of 0.5 s, two at a time


@pytest.mark.slow
def test_programs_run_side_by_side() -> None:
    async def run_all() -> list[str]:
        return await asyncio.gather(
            *(PythonInterpreter()({"code": f"import time; time.sleep(1); print({i})"}) for i in range(8))
        )

    start = time.monotonic()
    assert asyncio.run(run_all()) == [f"{i}\n" for i in range(8)]
    assert time.monotonic() - start < 6
