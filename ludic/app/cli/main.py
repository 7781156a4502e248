"""The `ludic` command: run a subcommand with settings from flags and a TOML file; report errors in one line.

Results go to stdout, progress and logs to stderr. Exits with 0 for success, 1 for a reported failure, 2 for wrong
usage; a process of `ludic run` exits with LASTING_EXIT_CODE for a failure that a new start would meet again. What a
command prints follows from its operation's result (ludic.base.results).
"""

import errno
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from ludic.app.cli.commands import COMMANDS, GONE, Command, groups
from ludic.app.cli.settings import JSON, exit_with_settings, parse
from ludic.app.launch.process import interrupt_on_sigterm, is_supervised, stop_on_signals
from ludic.base import LUDIC, installed_version, log_handler, mask, protect_library_processes
from ludic.base.printable import printable
from ludic.errors import DETAIL_INDENT, LASTING_EXIT_CODE, LudicError, similar_names
from ludic.settings import RUN, SettingsError, arguments, opens_its_root, takes_a_root

_MOST_LINES = 4
_COLUMN = 22
"""Column of the descriptions in `ludic --help`."""
_INSTEAD = {
    "start": "`ludic run ROOT` starts a run",
    "resume": "`ludic run ROOT` resumes a run, and `ludic train ROOT` its trainer",
    "stop": "Ctrl-C, or SIGTERM to the process, stops a run after a checkpoint",
    "status": "`ludic watch ROOT --once` prints the state of a run",
    "logs": "logs are files in ROOT/logs; `ludic watch ROOT` shows what happens",
}
"""What to do in the place of commands that people look for."""
_UNWRITABLE = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT)
"""Error numbers of a full or broken device."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit."""
    if argv is None:  # this process is the command, and nobody else's
        protect_library_processes()
    args = list(sys.argv[1:] if argv is None else argv)
    _log_to_stderr()
    if sys.stdout is None:
        fail("stdout is closed, and results go there; redirect it to a file or to /dev/null")
    for chatty in ("httpx", "httpx2", "botocore", "aiobotocore", "transformers"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").propagate = False  # it has its own handler
    try:
        code = _dispatch(args)
        sys.stdout.flush()  # here, where a closed pipe is handled
        sys.exit(code)
    except LudicError as error:
        code = LASTING_EXIT_CODE if error.is_lasting and is_supervised() else error.exit_code
        fail(str(error), code, error.detail)
    except BrokenPipeError:
        # The reader of our output has closed the pipe, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        fail(f"stdout can't be written: {error.strerror}")
    except KeyboardInterrupt:
        fail("interrupted")


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.INFO, handlers=[log_handler()])


def fail(message: str, exit_code: int = 1, detail: str | None = None) -> None:
    """Print the message's first lines as one line on stderr, and exit. Only rank 0 prints; all ranks exit.

    detail: further lines, which are printed indented.
    """
    lines = [line.strip() for line in mask(message).splitlines() if line.strip()]
    more = f" (and {len(lines) - _MOST_LINES} more)" if len(lines) > _MOST_LINES else ""
    if os.environ.get("RANK", "0") == "0":
        text = f"ludic: {' '.join(lines[:_MOST_LINES])}{more}"
        text += f"\n{textwrap.indent(mask(detail), DETAIL_INDENT, lambda line: True)}" if detail else ""
        print(printable(text), file=sys.stderr)
    sys.exit(exit_code)


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        _print_help()
        return 0
    if args[0] == "--completion":
        return _print_completion(args[1:])
    if args[0] in ("-V", "--version", "version"):
        print(f"ludic {installed_version(LUDIC) or '(from a folder that is not installed)'}")
        return 0
    name = args[0]
    for gone in (" ".join(args[:2]), name):
        if gone in GONE:
            print(f"ludic: ludic {gone}: this is now `{GONE[gone]}`", file=sys.stderr)
            return 2
    if name not in COMMANDS:
        close = similar_names(name, COMMANDS)
        hint = f"did you mean `ludic {close[0]}`?" if close else "`ludic --help` lists them"
        hint = _INSTEAD.get(name, hint)
        print(printable(mask(f"ludic: there is no command {name!r}; {hint}")), file=sys.stderr)
        return 2
    return _run(name, args[1:])


def _run(name: str, args: list[str]) -> int:
    """Call a command's operation and print its result; returns the exit status."""
    command = COMMANDS[name]
    operation = command.operation
    program = f"ludic {name}"
    values = parse(operation, args, program=program, description=command.about)
    as_json = values.get(JSON, False) if JSON in signature(operation).parameters else values.pop(JSON, False)
    try:
        result = _call(command, values)
    except SettingsError as error:
        exit_with_settings(operation, error, program)
    from ludic.base import Result, print_json, stdout_console

    if not isinstance(result, Result):
        return 0
    if result.is_out:
        pass
    elif as_json:
        print_json(result.to_dict())
    else:
        result.print_to(stdout_console())
    for remark in result.remarks:
        print(printable(mask(f"ludic: {remark}")), file=sys.stderr)
    if result.failure is not None:
        fail(result.failure)
    return 0


def _call(command: Command, values: Mapping[str, Any]) -> Any:
    """Call a command's operation with its settings by name; it gets an opened run, unless it opens that itself.

    That of `ludic train` is the function `train` in ludic/app/operations/start.py, and so on by name.
    """
    operation = command.operation
    parameters = signature(operation).parameters
    given = {**command.defaults, **arguments(operation, values)}
    positional: list[Any] = []
    if takes_a_root(operation):
        root = given.pop("root")
        positional.append(root if opens_its_root(operation) else _open_run(root))
    elif RUN in parameters:
        positional.append(None)
    many = [each.name for each in parameters.values() if each.kind is each.VAR_POSITIONAL]
    positional += [each for name in many for each in given.pop(name, ())]
    if command.on_sigterm == "stop":
        given["stop"] = stop_on_signals()
    elif command.on_sigterm == "interrupt":
        interrupt_on_sigterm()
    if "track" not in parameters:
        return operation(*positional, **given)
    from ludic.base import progress_bar

    with progress_bar() as track:
        return operation(*positional, **given, track=track)


def _open_run(url: str) -> Any:
    from ludic.app.operations.run import open_run

    return open_run(url)


def _print_completion(args: list[str]) -> int:
    from ludic.app.cli.completion import SHELLS, completion

    if len(args) != 1 or args[0] not in SHELLS:
        print(f"ludic: --completion needs a shell: {', '.join(SHELLS)}", file=sys.stderr)
        return 2
    print(completion(args[0]))
    return 0


def _print_help() -> None:
    width = shutil.get_terminal_size().columns
    print("usage: ludic COMMAND ROOT [OPTIONS]\n\nPost-training with storage as the spine.\n")
    for title, commands in groups().items():
        if title != "First":
            print(f"\n{title}:")
        for name, command in commands.items():
            lines = textwrap.wrap(command.about, max(width - _COLUMN, 20))
            print(f"  {name:<{_COLUMN - 2}}{lines[0]}", *(f"{' ' * _COLUMN}{line}" for line in lines[1:]), sep="\n")
    for line in (
        "`ludic COMMAND --help` lists its options; `--config FILE.toml` sets them from a file.",
        "`ludic --version` says which ludic this is; `ludic --completion bash|zsh|fish` completes in a shell.",
    ):
        print(f"\n{textwrap.fill(line, width)}")
