"""The `ludic` command: run a subcommand with settings from flags and a TOML file; report errors in one line.

Results go to stdout, progress and logs to stderr. Exits with 0 for success, 1 for a reported failure, 2 for wrong
usage. A command's flags are imported only for that command, and its module only when the command runs.
"""

import errno
import importlib
import keyword
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ludic.children import protect_children_of_libraries
from ludic.cli.settings import parse
from ludic.errors import LudicError, similar_names
from ludic.installed import LUDIC, installed_version
from ludic.masking import mask
from ludic.printable import printable

GROUPS = {
    "First": {
        "demo": "Teach a tiny model on this machine, in a minute; with --agents, to call a tool",
        "run": "Start or resume a run: workers and trainer on this machine or a Ray cluster",
        "watch": "Show the live state of a run",
        "view": "Look at a run in the terminal or a browser: versions, groups, rollouts, tokens, labels",
        "eval": "Evaluate versions of a run, or a model, on held-out examples",
        "sql": "Query rollouts, batches and metrics in SQL",
    },
    "Start": {
        "create": "Create a run without starting a process",
        "worker": "Sample rollouts for a run",
        "train": "Train on a run's rollouts, and publish weights",
        "serve": "Run a vLLM server on this machine that follows a run's policies",
        "launch": "Write the files that start a run with Slurm, Kubernetes or SkyPilot",
    },
    "Look": {
        "stats": "Summarize a run: environments, versions, steps and files",
        "show": "Show one rollout or group",
        "sample": "Sample answers from a run's policy or from a model",
        "report": "Write a run, its evaluations and a comparison as one HTML file",
    },
    "Evaluate": {
        "eval compare": "Compare two evaluations on the same examples, in pairs",
        "eval contamination": "Find prompts of an evaluation in texts that a run trained on",
        "score": "Score stored rollouts, by a function or an LLM judge",
    },
    "Ask again": {
        "what-if": "Plan a run's stored batches by another advantage, filters or algorithm",
        "bisect": "Find the first step at which a SQL predicate is true",
        "cut": "Write the smallest folder that replays one step bit for bit",
    },
    "Keep": {
        "verify": "Check a root's files and data; with --repair, quarantine broken files",
        "compact": "Rewrite the many small files of finished versions into few large ones",
        "expire": "Delete rollouts that are no longer needed",
    },
    "Exchange": {
        "export": "Export weights (Hugging Face), tables (Delta, Iceberg) or text (JSONL, CSV)",
        "import": "Import rollouts that other programs wrote",
    },
}
"""Commands and their descriptions, in the groups of `ludic --help`. The first group has no title there."""
COMMANDS = {name: about for group in GROUPS.values() for name, about in group.items()}
"""Commands and their descriptions. Each is a module of ludic.cli.flags (`import` is import_.py) with a dataclass
`Settings`, and one of ludic.cli with a function `main(settings)`. Flags with many options also have `FIRST`, the names
of those on the first page of --help."""

_RESUMING = ("run", "train", "launch")
"""Commands that reuse settings of a root; their modules have `earlier_settings(root, given)`."""
_MOST_LINES = 4
_COLUMN = 22
"""Column of the descriptions in `ludic --help`."""
_UNWRITABLE = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT)
"""Error numbers of a full or broken device."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit."""
    if argv is None:  # this process is the command, and nobody else's
        protect_children_of_libraries()
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
        fail(str(error))
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
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter("%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class _PrintableFormatter(logging.Formatter):
    """Escapes control characters, which names in a root may contain, and masks secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(mask(super().format(record)))


def fail(message: str) -> None:
    """Print the message's first lines as one line on stderr, and exit with 1. Only rank 0 prints; all ranks exit."""
    lines = [line.strip() for line in mask(message).splitlines() if line.strip()]
    more = f" (and {len(lines) - _MOST_LINES} more)" if len(lines) > _MOST_LINES else ""
    if os.environ.get("RANK", "0") == "0":
        print(printable(f"ludic: {' '.join(lines[:_MOST_LINES])}{more}"), file=sys.stderr)
    sys.exit(1)


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        _print_help()
        return 0
    if args[0] == "--completion":
        return _print_completion(args[1:])
    if args[0] in ("-V", "--version", "version"):
        print(f"ludic {installed_version(LUDIC) or '(from a folder that is not installed)'}")
        return 0
    words = 2 if " ".join(args[:2]) in COMMANDS else 1
    name = " ".join(args[:words])
    if name not in COMMANDS:
        close = similar_names(name, COMMANDS)
        hint = f"did you mean `ludic {close[0]}`?" if close else "`ludic --help` lists them"
        print(printable(mask(f"ludic: there is no command {name!r}; {hint}")), file=sys.stderr)
        return 2
    return _run(name, args[words:])


def module_of(name: str) -> str:
    """Return the name of a command's modules: eval_compare for `eval compare`, import_ for `import`."""
    return f"{name.replace(' ', '_').replace('-', '_')}{'_' if keyword.iskeyword(name) else ''}"


def _run(name: str, args: list[str]) -> int:
    module = module_of(name)
    flags = importlib.import_module(f"ludic.cli.flags.{module}")
    settings = parse(
        flags.Settings,
        args,
        program=f"ludic {name}",
        description=COMMANDS[name],
        earlier=partial(_earlier_settings, module) if name in _RESUMING else None,
        first=getattr(flags, "FIRST", ()),
    )
    importlib.import_module(f"ludic.cli.{module}").main(settings)
    return 0


def _print_completion(args: list[str]) -> int:
    from ludic.cli.completion import SHELLS, completion

    if len(args) != 1 or args[0] not in SHELLS:
        print(f"ludic: --completion needs a shell: {', '.join(SHELLS)}", file=sys.stderr)
        return 2
    print(completion(args[0]))
    return 0


def _earlier_settings(module: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings that the root holds. given: those that flags and file give."""
    return importlib.import_module(f"ludic.cli.{module}").earlier_settings(given["root"], given)


def _print_help() -> None:
    width = shutil.get_terminal_size().columns
    print("usage: ludic COMMAND ROOT [OPTIONS]\n\nPost-training with storage as the spine.\n")
    for title, commands in GROUPS.items():
        if title != "First":
            print(f"\n{title}:")
        for name, about in commands.items():
            lines = textwrap.wrap(about, max(width - _COLUMN, 20))
            print(f"  {name:<{_COLUMN - 2}}{lines[0]}", *(f"{' ' * _COLUMN}{line}" for line in lines[1:]), sep="\n")
    for line in (
        "`ludic COMMAND --help` lists its options; `--config FILE.toml` sets them from a file.",
        "`ludic --version` says which ludic this is; `ludic --completion bash|zsh|fish` completes in a shell.",
    ):
        print(f"\n{textwrap.fill(line, width)}")
