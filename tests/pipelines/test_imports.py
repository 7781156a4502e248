"""Pipelines and notebooks use the Python API: none imports the command line."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FILES = sorted([*(REPOSITORY / "pipelines").glob("*.py"), *(REPOSITORY / "notebooks").glob("*.ipynb")])


def source(path: Path) -> str:
    if path.suffix == ".py":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in "".join(cell["source"]).splitlines()]
    return "\n".join(line for line in lines if not line.startswith(("%", "!")))


def imported(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_an_import_of_the_command_line_is_found() -> None:
    for text in (
        "from ludic.app.cli.train import main",
        "from ludic.app import cli",
        "def f():\n    import ludic.app.cli.main as m",
    ):
        assert any(f"{name}.".startswith("ludic.app.cli.") for name in imported(text))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_none_imports_the_command_line(path: Path) -> None:
    assert [name for name in imported(source(path)) if f"{name}.".startswith("ludic.app.cli.")] == []
