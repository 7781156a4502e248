"""Run Python code of the model as a tool, in a separate process with limits.

It protects a run from accidents: endless loops, too much memory, endless output, and secrets in environment variables.
It is not a sandbox. The code runs as the same user on the same machine, so it can

- use the network, and reach services of this machine,
- read every file that the user can read (keys and tokens in the home folder, other episodes' temporary folders), and
  write or delete every file that the user can write; the temporary folder is only its working directory,
- see and end other processes of the user, this run's included, and read their environment, with its secrets, in /proc,
- start processes: each has the memory limit for itself, their number is not limited, and one that leaves the process
  group (setsid) survives the time limit,
- fill the disk with many files, since the limit is on each file,
- as root, raise its own limits.

A model in training finds these possibilities by accident. Run workers with this tool in a container or a virtual
machine without network, secrets and other people's data.
"""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from ludic.base import describe_end, python_words, start_python_in_loop, temporary_folder
from ludic.errors import ToolError

# Limits are set by the child before it becomes the interpreter: a function between fork and exec may hang in a process
# with threads. A hard limit can't be raised again, except by root.
_START = """
import os, resource, sys
memory, file_size, *command = sys.argv[1:]
for limit, value in (("AS", memory), ("FSIZE", file_size), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (int(value), int(value)))
os.execv(command[0], command)
"""
# -s, with -P and a nearly empty environment, equals -I, which would ignore PYTHONHASHSEED.
_FLAGS = ("-s", "-X", "utf8", "-u")
_ENVIRONMENT = MappingProxyType(
    {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONHASHSEED": "0",  # the same code prints sets in the same order
        "PYTHONDONTWRITEBYTECODE": "1",
        # One thread: many interpreters run at once, and OpenBLAS reserves memory for each thread.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
)
_SCRIPT = "main.py"

MAX_PROGRAMS = 16 * (os.cpu_count() or 1)
"""Maximum concurrent programs of this process; others wait. A start takes 0.1 s of CPU time: hundreds at once would
reach their time limits before they begin."""
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

SCHEMA: Mapping[str, Any] = MappingProxyType(
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Run a Python program and return what it prints. Variables and files of earlier calls are "
            "gone.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The program; print what you want to see."}},
                "required": ["code"],
            },
        },
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonInterpreter:
    """The tool `python(code)`: one new process for each call, in an empty temporary folder that is deleted afterwards.

    A program that ends with an error, or at a limit, raises ToolError with its output. Not a sandbox: see the module's
    first lines for its limits.
    """

    time_limit_s: float = 10.0
    """Seconds until the process and its group are killed."""
    memory_limit_bytes: int = 1 << 30
    """Address space of each process (RLIMIT_AS), in bytes."""
    output_limit_bytes: int = 8_000
    """Bytes of standard output and error together, after which the program is killed."""
    file_limit_bytes: int = 10_000_000
    """Largest size of a file that the program writes, in bytes."""
    name: str = "python"

    @property
    def schema(self) -> Mapping[str, Any]:
        return SCHEMA

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Run `code` and return its output."""
        slot = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_PROGRAMS))
        # The time limit begins after the wait.
        async with slot:
            return await self._run_in_new_folder(arguments["code"])

    async def _run_in_new_folder(self, code: str) -> str:
        with temporary_folder("python") as folder:
            # The real path is the one that tracebacks show.
            return await self._run(folder.resolve(), code)

    async def _run(self, folder: Path, code: str) -> str:
        (folder / _SCRIPT).write_text(code, encoding="utf-8", errors="replace")
        process = await start_python_in_loop(
            self._args(folder),
            cwd=folder,
            environment={**_ENVIRONMENT, "HOME": str(folder), "TMPDIR": str(folder)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        output = bytearray()
        try:
            async with asyncio.timeout(self.time_limit_s):
                end = await self._read(process, output)
        except TimeoutError:
            end = f"stopped after {self.time_limit_s:g} s"
        finally:
            await _kill(process)
        # Names of temporary folders are random; without them the same code has the same output.
        text = output.decode(errors="replace").replace(f"{folder}/", "")
        end = end or describe_end(process.returncode or 0)
        if end:
            raise ToolError(f"{text.rstrip()}\n[{end}]".lstrip())
        return text or "[no output; print what you want to see]"

    def _args(self, folder: Path) -> tuple[str, ...]:
        limits = (str(self.memory_limit_bytes), str(self.file_limit_bytes))
        return ("-I", "-S", "-c", _START, *limits, *python_words([*_FLAGS, str(folder / _SCRIPT)]))

    async def _read(self, process: asyncio.subprocess.Process, output: bytearray) -> str | None:
        """Read until no process holds the pipe, then wait for the end. Returns why the program must stop, if so."""
        assert process.stdout is not None
        while chunk := await process.stdout.read(65_536):
            output += chunk
            if len(output) > self.output_limit_bytes:
                del output[self.output_limit_bytes :]
                return f"stopped after {self.output_limit_bytes:,} bytes of output"
        await process.wait()
        return None


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the process and those that it started, and release the pipe."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    # Closes the pipe, which a process outside the group may still hold; wait() would wait for that one.
    process._transport.close()  # type: ignore[attr-defined]
    await process.wait()
