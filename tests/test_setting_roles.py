"""What a setting is stands on its field: no module lists names of settings."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ludic
from ludic.app.cli.commands import COMMANDS
from ludic.app.cli.settings import settings_of_command

PACKAGE = Path(ludic.__file__).parent
SAMPLER = "attributes of another program's own sampling settings"
ALLOWED = {"adapters/openrlhf.py": SAMPLER, "adapters/trl_sampling.py": SAMPLER, "adapters/verl.py": SAMPLER}
"""Modules with a list that has names of settings and means something else, with what it means."""
FEWEST = 3


def lists_of_names(source: str, names: set[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield line and texts of each list whose texts all are settings: tuples, sets, lists, and dicts that are data.

    A dict within a function holds arguments, and a class may name its own fields.
    """
    tree = ast.parse(source)
    own: dict[ast.AST, set[str]] = {}
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = {
                each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and hasattr(each.target, "id")
            }
            own |= dict.fromkeys(ast.walk(node), fields)
        elif isinstance(node, ast.FunctionDef | ast.Lambda):
            inside.update(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple | ast.Set | ast.List):
            elements = node.elts
        elif isinstance(node, ast.Dict) and node not in inside:
            elements = [key for key in node.keys if key is not None]
        else:
            continue
        plain = [each for each in elements if not isinstance(each, ast.Starred)]
        texts = [each.value for each in plain if isinstance(each, ast.Constant) and each.value in names]
        if FEWEST <= len(texts) == len(plain) and not own.get(node, set()) & {*texts}:
            yield node.lineno, texts


@pytest.mark.slow  # reads the whole package
def test_no_module_lists_settings_for_what_they_are():
    names = {each.name for command in COMMANDS.values() for each in settings_of_command(command.operation)}
    found = {
        f"{path.relative_to(PACKAGE)}:{line}": texts
        for path in PACKAGE.rglob("*.py")
        if str(path.relative_to(PACKAGE)) not in ALLOWED
        for line, texts in lists_of_names(path.read_text(encoding="utf-8"), names)
    }
    assert found == {}, "say it with a Role on the fields"
