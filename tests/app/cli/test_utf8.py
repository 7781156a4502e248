"""Texts that are no UTF-8 are refused by the name of their setting, in every text of every command."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_origin

import pytest

import ludic
from ludic.app.cli.commands import COMMANDS
from ludic.app.cli.settings import settings_of_command
from ludic.app.operations.create import create
from ludic.errors import ConfigError
from ludic.root.root import Root
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run
from ludic.settings.flags import WrongUsageError, read_flags
from ludic.settings.table import Setting

BYTE = os.fsdecode(b"caf\xe9")
"""What Python makes of an argument in Latin-1."""


def given(each: Setting) -> str | None:
    """A value of a setting with a byte that is no UTF-8; None if it takes no text of one's own."""
    kinds = {get_origin(kind) or kind for kind in each.kinds}
    if {str, Path, tuple} & kinds:
        return BYTE
    return json.dumps({"a": [BYTE]}) if Mapping in kinds else None


def texts_of(command: str) -> list[tuple[Setting, str]]:
    table = settings_of_command(COMMANDS[command].operation)
    return [(each, value) for each in table if not each.only_in_file and (value := given(each)) is not None]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_text_of_a_command_is_refused_by_name(command: str) -> None:
    table = settings_of_command(COMMANDS[command].operation)
    positions = {other.name: str(next(iter(other.choices), "x")) for other in table if other.by_position}
    for each, value in texts_of(command):
        args = [each.flag, value]
        if each.by_position and not each.has_flag:
            args = [*[*positions.values()][: [*positions].index(each.name)], value]
        is_free = {str, Path, Mapping} & {get_origin(kind) or kind for kind in each.kinds}  # a list may be of numbers
        with pytest.raises(WrongUsageError, match="the byte 0xe9" if is_free else "the byte 0xe9|wanted") as failure:
            read_flags(table, args)
        name = each.shown.metavar if each.by_position and each.shown else each.flag
        assert str(failure.value).startswith(name), each.name


def test_texts_are_found_in_every_command() -> None:
    assert all(texts_of(command) for command in COMMANDS)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return put_run(str(tmp_path / "run"), RunConfig(model="tiny", env=("moar_cats",)))


@pytest.mark.parametrize(
    ("text", "problem"),
    [(BYTE, "the byte 0xe9, which is no UTF-8"), ("a\ud83d", "half a character"), ("\ude00", "half a character")],
)
def test_python_refuses_such_a_text_too(root: Root, text: str, problem: str) -> None:
    run = ludic.open(root.url)
    calls: list[tuple[str, Any]] = [
        ("query", lambda: run.sql(f"select '{text}'")),
        ("where", lambda: run.export("jsonl", "x.jsonl", where=f"env_name = '{text}'")),
        ("the folder of the run", lambda: ludic.connect(f"{root.url}{text}")),
        ("model", lambda: create("x", model=text, env=("a",))),
        ("env_options", lambda: create("x", model="tiny", env=("a",), env_options={"a": {"b": [text]}})),
        ("env_options", lambda: create("x", model="tiny", env=("a",), env_options={text: {}})),
    ]
    for name, call in calls:
        with pytest.raises(ConfigError, match=f"^{name} holds {problem}"):
            call()


@pytest.mark.slow
def test_the_command_line_answers_in_one_line(root: Root) -> None:
    query = b"select '\xe9'"
    done = subprocess.run([sys.executable, "-m", "ludic", "sql", root.url, query], capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        b"ludic: QUERY holds the byte 0xe9, which is no UTF-8, in \"select '\\udce9'\"; write or rename it in UTF-8\n"
    )
