"""What the programs of the clients share: the task, two real tools, and how the last text is printed."""

import os
import subprocess
from pathlib import Path

MODEL, TASK, STREAMS = os.environ["MODEL"], os.environ["TASK"], os.environ["STREAM"] == "1"


def run(command: str) -> str:
    """Run a shell command in the working folder and return what it prints.

    Args:
        command: The command.
    """
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60).stdout


def read_file(path: str) -> str:
    """Return the text of a file.

    Args:
        path: The file's path.
    """
    return Path(path).read_text()


TOOLS = {"run": run, "read_file": read_file}
"""Both take one text."""
PARAMETERS = {"run": "command", "read_file": "path"}
SCHEMAS = [
    {
        "name": name,
        "description": tool.__doc__.splitlines()[0],
        "parameters": {
            "type": "object",
            "properties": {PARAMETERS[name]: {"type": "string"}},
            "required": [PARAMETERS[name]],
        },
    }
    for name, tool in TOOLS.items()
]


def finish(text: str) -> None:
    """Print the last text on a line of its own: some clients print before it."""
    print(f"\nFINAL: {text}")
