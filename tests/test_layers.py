"""No module of ludic imports itself through others, so that each file can be read, moved and tested after those below.

The contracts of import-linter in pyproject.toml say which folders stand above which; within a folder they say nothing.
"""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest


def circle_in(package: str) -> list[str]:
    """Return modules of a package that import each other in a circle, each the next; none if there is no circle.

    Imports within functions count, those for type checkers do not.
    """
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    try:
        TopologicalSorter({each: graph.find_modules_directly_imported_by(each) for each in graph.modules}).prepare()
    except CycleError as error:
        return list(error.args[1])[::-1]
    return []


def test_no_modules_of_ludic_import_each_other_in_a_circle() -> None:
    assert circle_in("ludic") == []


def test_a_circle_is_found_through_functions_and_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "__init__.py": "",
        "low.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from circled.high import make\n",
        "high.py": "from circled.room import NAME\ndef make(): ...\n",
        "room/__init__.py": "from circled import low\nNAME = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / "circled" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert circle_in("circled") == []
    (tmp_path / "circled/low.py").write_text("def late():\n    from circled import high\n")
    circle = circle_in("circled")
    assert circle[0] == circle[-1]
    assert set(circle) == {"circled.low", "circled.high", "circled.room"}
