"""Completion of `ludic` in a shell, in a real bash."""

import subprocess
from pathlib import Path

import pytest

from ludic.app.cli.completion import SHELLS, completion
from ludic.app.cli.main import COMMANDS

TRY = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_ludic
echo "${COMPREPLY[*]}"
"""


def completed(folder: Path, *words: str) -> list[str]:
    script = folder / "ludic.bash"
    script.write_text(completion("bash"))
    command = ["bash", "-uc", TRY, "bash", str(script), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ludic", "ev"], ["eval"]),
        (["ludic", "com"], ["compare", "compact"]),
        (["ludic", "compare", "--conf"], ["--config", "--confidence"]),
        (["ludic", "eval", "ROOT", "--until"], ["--until-step"]),
        (["ludic", "run", "ROOT", "--no-of"], ["--no-offline"]),
        (["ludic", "run", "ROOT", "--schedule", ""], ["constant", "linear", "cosine"]),
        (["ludic", "run", "ROOT", "--schedule", "=", "l"], ["linear"]),
        (["ludic", "run", "ROOT", "--algorithm", "dr"], ["dr_grpo"]),
        (["ludic", "run", "--help", "op"], ["optimizer"]),
        (["ludic", "verify", "RO"], []),
    ],
)
def test_bash_completes(tmp_path: Path, words: list[str], found: list[str]) -> None:
    assert completed(tmp_path, *words) == found


def test_all_commands_are_completed(tmp_path: Path) -> None:
    assert {*completed(tmp_path, "ludic", "")} >= {*COMMANDS}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_gets_its_script(ludic, shell: str) -> None:
    result = ludic("--completion", shell)
    assert (result.code, result.err) == (0, "")
    assert "learning-rate" in result.out


@pytest.mark.parametrize("args", [[], ["tcsh"], ["bash", "zsh"]])
def test_another_shell_is_wrong_usage(ludic, args: list[str]) -> None:
    result = ludic("--completion", *args)
    assert (result.code, result.out) == (2, "")
    assert result.err == "ludic: --completion needs a shell: bash, zsh, fish\n"
