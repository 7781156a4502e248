"""A stdout that can't be written, and users' code that ends the process: one line, and nothing is lost."""

import subprocess
import sys
from pathlib import Path

import pytest
from forks import Forked

from ludic.environments.registry import make_environment
from ludic.errors import ConfigError, QueryError
from ludic.root.root import Root
from ludic.root.sql.library import load_advantage

SHOWN = pytest.mark.parametrize(
    ("command", "options"), [("watch", ["--totals"]), ("sql", ["select * from rollouts", "--format", "csv"])]
)


@pytest.mark.slow
@SHOWN
def test_a_stdout_that_is_closed_is_named(trained: Root, command: str, options: list[str]) -> None:
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "ludic", command, trained.url, *options]
    ended = subprocess.run(shell, stderr=subprocess.PIPE, text=True)
    line = "ludic: stdout is closed, and results go there; redirect it to a file or to /dev/null\n"
    assert (ended.returncode, ended.stderr) == (1, line)


@pytest.mark.slow
@SHOWN
def test_a_stdout_that_is_full_is_named(trained: Root, command: str, options: list[str], tmp_path: Path) -> None:
    process = Forked(["ludic", command, trained.url, *options], tmp_path / "err", out=Path("/dev/full"))
    line = "ludic: stdout can't be written: No space left on device\n"
    assert (process.wait(120), process.printed()) == (1, line)


def test_an_environment_file_that_exits_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "leaves.py"
    file.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"leaves\.py, line 2, failed: RuntimeError: sys\.exit\(3\) was called"):
        make_environment(f"{file}:Any")


def test_an_advantage_file_that_exits_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "leaves.py"
    file.write_text("import sys\n\ndef advantage(rollouts):\n    return rollouts\n\nsys.exit(4)\n")
    with pytest.raises(QueryError, match=r"leaves\.py, line 6, failed: RuntimeError: sys\.exit\(4\) was called"):
        load_advantage(f"{file}:advantage")
