"""Every Python process of ludic is started by ludic.base.processes, and imports nothing from its working directory."""

import ast
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hostile_folders import NAMES, hostile_folder, imported_from

import ludic
from ludic.base import processes

PACKAGE = Path(ludic.__file__).parent
FILES = [*sorted(PACKAGE.rglob("*.py")), *sorted((PACKAGE.parent / "pipelines").glob("*.py"))]
_OS = (name for name in dir(os) if name.startswith(("exec", "spawn", "posix_spawn", "fork", "popen", "system")))
STARTS = {
    *(f"os.{name}" for name in _OS),
    *(f"subprocess.{name}" for name in ("Popen", "run", "call", "check_call", "check_output", "getoutput")),
    "subprocess.getstatusoutput",
    *(f"asyncio.{module}create_subprocess_{kind}" for module in ("", "subprocess.") for kind in ("exec", "shell")),
    "concurrent.futures.ProcessPoolExecutor",
    "mcp.StdioServerParameters",
    "ray.init",
}
MODULES_OF_STARTS = ("multiprocessing", "torch.multiprocessing", "pty", "concurrent.futures.process")
AT_EXIT = "multiprocessing.util.Finalize"
"""Of these modules, what only orders the end of a process."""
METHODS_OF_STARTS = ("subprocess_exec", "subprocess_shell")
"""Methods of an event loop."""
BY_LIBRARIES = {
    # The user's own command line, which may be any program, with the user's consent to it.
    ("ludic/agents/tools/mcp.py", "mcp.StdioServerParameters"),
    ("ludic/app/launch/gateway.py", "asyncio.create_subprocess_exec"),
    # Run by processes.start_guarded, and then becomes the user's own command line.
    ("ludic/base/guard.py", "os.fork"),
    ("ludic/base/guard.py", "os.execvpe"),
    # Forks itself, after it was started by ludic.base.processes; tests/app/launch/test_fork_server.py compares both.
    ("ludic/app/launch/fork_server.py", "os.fork"),
    # With a job that keeps the working directory from Ray's processes; tests/clusters runs one.
    ("ludic/adapters/ray/launcher.py", "ray.init"),
}
"""Starts that a library, or a process started safely, makes, and why each is safe."""


def dotted(node: ast.AST) -> list[str]:
    """The parts of a name such as os.execv; [""] if it is none."""
    if isinstance(node, ast.Attribute):
        return [*dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def may_start(module: str) -> bool:
    return module.startswith(MODULES_OF_STARTS) and module != AT_EXIT


def starts(source: str) -> Iterator[str]:
    """Yield every name in a module by which a process can be started, annotations aside."""
    nodes = list(ast.walk(ast.parse(source)))
    names: dict[str, str] = {}
    annotations: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {
                each.asname or each.name.split(".")[0]: each.name if each.asname else each.name.split(".")[0]
                for each in node.names
            }
            yield from (each.name for each in node.names if may_start(each.name))
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            yield from (name for name in (f"{node.module}.{each.name}" for each in node.names) if may_start(name))
        for field in ("annotation", "returns"):
            if isinstance(hint := getattr(node, field, None), ast.AST):
                annotations.update(ast.walk(hint))
    for node in nodes:
        if node in annotations:
            continue
        if isinstance(node, ast.Attribute) and node.attr in METHODS_OF_STARTS:
            yield node.attr
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            first, *rest = dotted(node)
            if (name := ".".join([names.get(first, ""), *rest])) in STARTS:
                yield name
    # A command line that is given to another program, or to another machine.
    for node in nodes:
        if isinstance(node, ast.Attribute) and dotted(node) == ["sys", "executable"]:
            yield "sys.executable"
        words = node.elts if isinstance(node, ast.List | ast.Tuple) else []
        if words and isinstance(words[0], ast.Constant) and words[0].value in ("python", "python3"):
            yield "a list that begins with python"
        if isinstance(node, ast.keyword) and node.arg == "runtime_env":
            yield "runtime_env"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import subprocess as sp\nsp.run(x)", ["subprocess.run"]),
        ("from subprocess import Popen\nstart = Popen", ["subprocess.Popen"]),
        ("def f(p: 'subprocess.Popen', q: subprocess.Popen): return subprocess.PIPE\nimport subprocess", []),
        ("import os\nos.execv(a, b)\nos.spawnl(a)\nos.fork()", ["os.execv", "os.spawnl", "os.fork"]),
        ("import asyncio\nasyncio.create_subprocess_shell(x)", ["asyncio.create_subprocess_shell"]),
        ("async def f(loop): await loop.subprocess_exec(x)", ["subprocess_exec"]),
        ("from multiprocessing import Process", ["multiprocessing.Process"]),
        ("from multiprocessing.util import Finalize, spawnv_passfds", ["multiprocessing.util.spawnv_passfds"]),
        ("import torch.multiprocessing as mp", ["torch.multiprocessing"]),
        ("from concurrent.futures import ProcessPoolExecutor as P\nP()", ["concurrent.futures.ProcessPoolExecutor"]),
        ("import sys\nwords = [sys.executable, '-m', 'ludic']", ["sys.executable"]),
        ("words = ['python', '-m', 'torch.distributed.run']", ["a list that begins with python"]),
        ("actor.options(runtime_env={})", ["runtime_env"]),
    ],
)
def test_a_start_is_found_however_it_is_written(source: str, found: list[str]) -> None:
    assert list(starts(source)) == found


@pytest.mark.slow
def test_no_module_but_children_starts_a_process() -> None:
    found = {(str(path.relative_to(PACKAGE.parent)), name) for path in FILES for name in starts(path.read_text())}
    by_children = {(file, name) for file, name in found if file == "ludic/base/processes.py"}
    assert {"subprocess.Popen", "asyncio.create_subprocess_exec", "os.execve"} <= {name for _, name in by_children}
    assert found - by_children == BY_LIBRARIES


def start_python(args: list[str], folder: Path) -> int:
    return processes.start_python(args, cwd=folder).wait(60)


def start_python_in_loop(args: list[str], folder: Path) -> int:
    import asyncio

    async def run() -> int:
        # All variables of the process, as the interpreter of the tool `python` has them.
        process = await processes.start_python_in_loop(args, environment={"PATH": os.environ["PATH"]}, cwd=folder)
        return await process.wait()

    return asyncio.run(run())


def become_python(args: list[str], folder: Path) -> int:
    script = f"from ludic.base.processes import become_python; become_python({args!r})"
    return subprocess.run([sys.executable, "-P", "-c", script], cwd=folder, timeout=60).returncode


def python_words(args: list[str], folder: Path) -> int:
    """As in a job file: the words, and the variables that it exports."""
    words = processes.python_words(args, python=Path(sys.executable).name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(words, cwd=folder, env={**processes.SAFE_ENVIRONMENT, "PATH": path}, timeout=60).returncode


def protect_library_processes(args: list[str], folder: Path) -> int:
    script = (
        "import subprocess, sys; from ludic.base.processes import protect_library_processes as protect; protect(); "
    )
    script += f"sys.exit(subprocess.run([sys.executable, *{args!r}]).returncode)"
    return subprocess.run([sys.executable, "-P", "-c", script], cwd=folder, timeout=60).returncode


WAYS = [start_python, start_python_in_loop, become_python, python_words, protect_library_processes]
OTHERS = {
    *("safe_environment", "describe_end", "end_with_parent", "signal_when_parent_ends"),
    *("peak_memory", "host_bytes", "start_guarded"),
}
IMPORT = f"import {', '.join(name for name in NAMES if name in sys.stdlib_module_names)}"
CHILD = f"{IMPORT}, subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', '{IMPORT}']).returncode)"
"""Imports modules, and starts a process that does so, as torchrun and multiprocessing do."""


@pytest.mark.parametrize("way", WAYS)
def test_a_process_and_those_that_it_starts_import_nothing_from_their_folder(
    way: Callable[[list[str], Path], int], tmp_path: Path
) -> None:
    hostile = hostile_folder(tmp_path / "hostile")
    assert (way(["-c", CHILD], hostile), imported_from(hostile)) == (0, [])


def test_the_process_that_guards_a_users_command_imports_nothing_from_its_folder(tmp_path: Path) -> None:
    import asyncio

    async def run() -> int:
        process = await processes.start_guarded(["true"], hostile, {"PATH": os.environ["PATH"]}, {"CPU": 60})
        return await process.wait()

    hostile = hostile_folder(tmp_path / "hostile")
    assert (asyncio.run(run()), imported_from(hostile)) == (0, [])


def test_the_hostile_folder_is_hostile(tmp_path: Path) -> None:
    hostile = hostile_folder(tmp_path / "hostile")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=hostile, env=environment, capture_output=True)
    assert done.returncode == 1
    assert imported_from(hostile) != []


def test_every_way_to_start_a_process_was_tried() -> None:
    public = {name for name, each in vars(processes).items() if inspect.isfunction(each) and not name.startswith("_")}
    assert public - OTHERS == {way.__name__ for way in WAYS}


SPAWN = """
import multiprocessing, os, sys
from ludic.app.cli.main import main
if __name__ == "__main__":
    sys.argv = ["ludic", "--version"]
    try:
        main()
    except SystemExit:
        pass
    child = multiprocessing.get_context("spawn").Process(target=os.getpid)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


def test_what_a_library_starts_by_multiprocessing_in_a_command_imports_nothing_from_its_folder(tmp_path: Path) -> None:
    hostile = hostile_folder(tmp_path / "hostile")
    (tmp_path / "command.py").write_text(SPAWN)  # begins as the script `ludic` does, which its installer wrote
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run([sys.executable, tmp_path / "command.py"], cwd=hostile, env=environment, timeout=120)
    assert (done.returncode, imported_from(hostile)) == (0, [])
