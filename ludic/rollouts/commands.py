"""Run commands for an episode: its agent, and the command that scores its work, in a folder and within limits.

A command is no shell: its words are split as a shell does, and placeholders such as {prompt} are replaced within words,
so that a text of the episode is never read as code. It gets few variables of this process, its processes end with it,
and only the end of its output is kept. This is no sandbox: it runs as the same user, with the network and all files.
Raises ConfigError for a command that can't be run.
"""

import asyncio
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ludic.base import mask, start_guarded, storable
from ludic.errors import ConfigError, similar_names
from ludic.run import RunConfig
from ludic.settings import GRACE_S

if TYPE_CHECKING:
    from asyncio.subprocess import Process

KEPT_VARIABLES = re.compile(r"PATH|LANG|LANGUAGE|LC_\w+|TZ|TERM|TMPDIR|SSL_CERT_(FILE|DIR)|(?i:no_proxy)")
"""Matches the variables of this process that a command gets. Proxies stay out, since the model is on this machine."""
PLACEHOLDERS = ("prompt", "example", "folder", "answer", "model", "base_url")
_PLACEHOLDER = re.compile(rf"\{{({'|'.join(PLACEHOLDERS)})\}}")
_ALIKE = 0.8
"""Likeness, from 0 to 1, from which a text in braces is a placeholder with a mistake, and not the agent's own."""
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")
_OUTPUT_BYTES = 16_384
"""Bytes of the end of the output that are kept in memory."""
KEPT_CHARACTERS = 4_000
"""Characters of the end of the output that a row keeps."""
_MEGA = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEnd:
    """How a command ended."""

    exit_code: int
    """128 + N for signal N, 127 if it could not be started."""
    output: str
    """End of its output and errors, without secrets."""

    def __str__(self) -> str:
        last = " ".join(self.output.split())[-300:]
        return f"exit code {self.exit_code}" + (f", last output: {last}" if last else ", no output")


def split_command(setting: str, command: str) -> tuple[str, ...]:
    """Return the words of a command. setting: its name. Raises ConfigError for one that could never be run.

    A placeholder within the script of a shell is refused: the text would become code.
    """
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"{setting} {command!r} can't be split into words: {error}") from error
    if not words:
        raise ConfigError(f"{setting} is empty, wanted a command such as 'python agent.py {{prompt}}'")
    if Path(words[0]).name in _SHELLS and "-c" in words[:-1]:
        script = words[words.index("-c") + 1]
        if found := _PLACEHOLDER.search(script):
            raise ConfigError(
                f"{setting} has {found[0]} in the script of {words[0]} -c, where a text would be run as code; write "
                f'"$1" there, and the words sh {found[0]} behind the script'
            )
    for name in re.findall(r"\{(\w+)\}", command):
        if name not in PLACEHOLDERS and (near := similar_names(name, PLACEHOLDERS, least=_ALIKE)):
            raise ConfigError(f"{setting} has {{{name}}}, which nothing replaces; did you mean {{{near[0]}}}?")
    for word in words:
        if Path(word).suffix and not Path(word).is_absolute() and Path(word).is_file():
            raise ConfigError(
                f"{setting} names {word}, a file of {Path.cwd()}, and runs in a folder of its own; write "
                f"{Path(word).absolute()}"
            )
    check_program(setting, words[0])
    return words


def check_program(setting: str, program: str) -> None:
    """Raise ConfigError unless a program can be found here. A placeholder or a path in the folder is not looked for."""
    if _PLACEHOLDER.search(program) or (os.sep in program and not Path(program).is_absolute()):
        return
    if shutil.which(program) is None:
        raise ConfigError(f"{setting}: there is no program {program!r} on this machine (PATH); install it")


def fill(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return the words with their placeholders replaced, each once: a value is not looked through again."""
    return [_PLACEHOLDER.sub(lambda found: values[found[1]], word) for word in words]


def environment_of(run: RunConfig, home: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Return all variables of a command: those that it may have of this process, and those of its episode."""
    kept = {name: value for name, value in os.environ.items() if KEPT_VARIABLES.fullmatch(name)}
    named = {name: os.environ[name] for name in run.agent_variables if name in os.environ}
    return {**kept, "HOME": str(home), **named, **variables}


def limits_of(run: RunConfig) -> dict[str, int]:
    """Return the limits of each process of a command, by the end of the name of the resource."""
    limits = {
        "CPU": run.agent_cpu_s,
        "AS": run.agent_memory_mb and run.agent_memory_mb * _MEGA,
        "NOFILE": run.agent_open_files,
        "FSIZE": run.agent_file_mb and run.agent_file_mb * _MEGA,
    }
    return {name: most for name, most in limits.items() if most is not None}


async def run_command(
    words: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    limits: Mapping[str, int],
    secret: str = "",
    source: Path = Path(os.devnull),
) -> CommandEnd:
    """Run a command to its end. If this is cancelled, all its processes are killed first.

    secret: to mask. source: file that is its standard input.
    """
    process = await start_guarded(words, folder, environment, limits, source)
    output = bytearray()
    try:
        assert process.stdout is not None
        while piece := await process.stdout.read(1 << 16):
            output += piece
            del output[:-_OUTPUT_BYTES]
        exit_code = await process.wait()
    finally:
        await _end(process)
    return CommandEnd(exit_code=exit_code, output=_shown(bytes(output), secret))


async def _end(process: "Process") -> None:
    """End the processes of a command that still runs, and wait for it."""
    assert process.stdin is not None
    process.stdin.close()  # its guard ends all processes then
    if process.returncode is None:
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), GRACE_S)
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()


def _shown(output: bytes, secret: str) -> str:
    text = output.decode(errors="replace")
    if secret:
        text = text.replace(secret, "***")
    return storable(mask(text))[-KEPT_CHARACTERS:].strip()
