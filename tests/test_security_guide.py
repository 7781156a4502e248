"""docs/security.md has a row for each command, and says of each file of a root what another user could do with it."""

import re
from pathlib import Path

import ludic
from ludic.app.cli.commands import COMMANDS
from ludic.root.catalogue import FILE_KINDS

PAGE = (Path(__file__).parents[1] / "docs/security.md").read_text(encoding="utf-8")
PYTHON = {"connect", "scan", "plot", "record", "fit", "grpo", "sft", "dpo"}
"""Functions of the package that open a root by its URL and are no command's."""


def rows_of(heading: str) -> list[list[str]]:
    """Return the cells of the table whose first column has this heading."""
    _, _, rest = PAGE.partition(f"| {heading} |")
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_each_command_has_a_row_that_says_what_it_runs_reads_and_writes() -> None:
    rows = rows_of("command")
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]
    assert sorted(named) == sorted([*(f"ludic {name}" for name in COMMANDS), *(f"ludic.{name}" for name in PYTHON)])
    assert all(len(row) == 4 and all(row) for row in rows)


def test_the_functions_of_python_are_those_of_the_package() -> None:
    others = {"create", "open", "refresh", "compare", "runs"}  # of commands, but `refresh`, which is of `connect`
    functions = {name for name in ludic.__all__ if name[0].islower()}
    assert functions == PYTHON | others


def test_each_file_of_a_root_has_a_row_that_says_what_its_writers_could_do() -> None:
    named = [name.rstrip("/") for row in rows_of("files") for name in re.findall(r"`([^`]+)`", row[0])]
    # Exports are named by their own folder, which may lie below a folder of tables.
    wanted = {"_delta_log" if "_delta_log" in row.template else row.folder or row.template for row in FILE_KINDS}
    assert sorted(named) == sorted(wanted)


def test_each_role_is_of_known_commands_and_folders() -> None:
    known = {row.folder or row.template for row in FILE_KINDS}
    for role, commands, folders in rows_of("role"):
        words = re.sub(r"`|--repair|ludic\.connect|ludic\.record", "", commands).split(",")
        assert {word.strip() for word in words} - {""} <= COMMANDS.keys() | {"fit"}, role
        assert {name for name in re.findall(r"([\w.]+)/", folders) if name != "_delta_log"} <= known, role
