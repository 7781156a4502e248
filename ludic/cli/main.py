"""The `ludic` command: picks a command, reads its settings from flags and a TOML file, explains errors in a line.

Results go to stdout, progress and logs to stderr. Exit 0; 1 for a failure that was explained;
2 for wrong usage. A command's module is imported only when it is asked for.
"""

import difflib
import importlib
import keyword
import logging
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ludic.cli.settings import parse
from ludic.errors import LudicError

COMMANDS = {
    "demo": "Teach a tiny model on this machine, in a minute",
    "run": "Start or resume a run: workers and trainer on this machine",
    "worker": "Sample rollouts for a run",
    "train": "Train on a run's rollouts, and publish weights",
    "sample": "Ask a model, or a run's policy, a question",
    "sql": "Ask a run's rollouts, batches and metrics in SQL",
    "stats": "What is in a root",
    "watch": "What a run does right now, live, from its files",
    "show": "One rollout or group, readable",
    "verify": "Check a root's files and data; with --repair, set broken files aside",
    "compact": "Rewrite the many small files of finished versions into few large ones",
    "expire": "Delete what is no longer needed",
    "export": "A Hugging Face folder of its weights, a Delta or Iceberg table of its files, or JSONL or CSV",
    "import": "Bring in rollouts that other programs wrote",
}
"""Each is a module of ludic.cli (`import` is import_.py) with a dataclass `Settings` and a function `main(settings)`;
those that go on from what is in a root have a function `earlier_settings(root, args)` as well."""

_MOST_LINES = 4


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit."""
    args = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    for chatty in ("httpx", "botocore", "aiobotocore", "transformers"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").propagate = False  # it prints by itself
    try:
        code = _dispatch(args)
        sys.stdout.flush()  # here, where a closed pipe is understood
        sys.exit(code)
    except LudicError as error:
        fail(str(error))
    except BrokenPipeError:
        # The reader of our output went away, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        fail("interrupted")


def fail(message: str) -> None:
    """One line to stderr, of the message's first ones, and exit 1. Of several ranks, which fail alike, one speaks."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    more = f" (and {len(lines) - _MOST_LINES} more)" if len(lines) > _MOST_LINES else ""
    if os.environ.get("RANK", "0") == "0":
        print(f"ludic: {' '.join(lines[:_MOST_LINES])}{more}", file=sys.stderr)
    sys.exit(1)


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        _print_help()
        return 0
    name = args[0]
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `ludic {close[0]}`?" if close else "`ludic --help` lists them"
        print(f"ludic: there is no command {name!r}; {hint}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"ludic.cli.{name}{'_' if keyword.iskeyword(name) else ''}")
    texts = {"program": f"ludic {name}", "description": COMMANDS[name]}
    earlier = {}
    if len(args) > 1 and not args[1].startswith("-") and hasattr(module, "earlier_settings"):
        earlier = module.earlier_settings(args[1], args[2:])
    module.main(parse(module.Settings, args[1:], **texts, earlier=earlier))
    return 0


def _print_help() -> None:
    console = Console()
    console.print("[bold]ludic[/] COMMAND ROOT [options]     post-training with storage as the spine\n")
    table = Table.grid(padding=(0, 2))
    for name, line in COMMANDS.items():
        table.add_row(f"  [bold]{name}[/]", line)
    console.print(table)
    console.print("\n`ludic COMMAND --help` lists its options; `--config FILE.toml` sets them from a file.")
