"""What the targets of the Makefile install."""

import re
import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("target", "installed"),
    [("demo", [".[train]"]), ("demo-agents", [".[train]"]), ("unit", [".[train]", ".[dev]"]), ("test-vllm", ["."])],
)
def test_the_demos_install_what_runs_and_trains(target: str, installed: list[str]) -> None:
    make = ["make", "--dry-run", "--always-make", target]
    said = subprocess.run(make, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60, check=True)
    assert re.findall(r"--editable '?([^\s']+)", said.stdout) == installed
