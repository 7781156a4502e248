"""The rooms of the package: few, in layers, entered by their doors; and no module imports itself through others.

The contracts in pyproject.toml say which room stands above which; `.ci/contracts.py` checks them.
"""

import ast
import importlib
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import ludic

PACKAGE = Path(ludic.__file__).parent
PROJECT = PACKAGE.parent


def contracts() -> ModuleType:
    """The script that checks the contracts, as a module."""
    spec = spec_from_file_location("contracts", PROJECT / ".ci" / "contracts.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONTRACTS = contracts()
DOORS = CONTRACTS.doors()
SETTINGS = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
LAYERS = SETTINGS["tool"]["importlinter"]["contracts"][0]["layers"]
ROOMS = {name for layer in LAYERS for name in layer.replace(":", "|").replace(" ", "").split("|")}


def room_of(module: str) -> str:
    """The room that a module is in: ludic.root of ludic.root.rows.reader; "" for the package itself."""
    return ".".join(module.split(".")[:2]) if module.count(".") else ""


def crossings(folder: Path = PACKAGE) -> Iterator[tuple[str, str, str]]:
    """The file, the module and the name of each name that a room takes from another."""
    for file in sorted(folder.rglob("*.py")):
        mine = room_of(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ludic"):
                for each in node.names:
                    whole = f"{node.module}.{each.name}"
                    module = str(node.module) if node.module != "ludic" else whole
                    if room_of(module) in ROOMS and room_of(module) != mine:
                        yield str(file.relative_to(PACKAGE)), str(node.module), each.name


def circle_in(package: Path) -> list[str]:
    """Return modules of a package that import each other in a circle, each the next; none if there is no circle.

    Imports within functions count, and those from a lazy door lead to the module behind it; those for type checkers do
    not count.
    """
    graph = CONTRACTS.graph_of(package, for_type_checkers=False)
    try:
        TopologicalSorter({each: graph.find_modules_directly_imported_by(each) for each in graph.modules}).prepare()
    except CycleError as error:
        return list(error.args[1])[::-1]
    return []


def test_no_modules_of_ludic_import_each_other_in_a_circle() -> None:
    assert circle_in(PACKAGE) == []


def test_a_circle_is_found_through_functions_and_doors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "__init__.py": "",
        "low.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from circled.high import make\n",
        "high.py": "from circled.room import NAME\ndef make(): ...\n",
        "room/__init__.py": "",
        "room/__init__.pyi": "from .inside import NAME as NAME\nfrom .other import OTHER as OTHER\n",
        "room/inside.py": "from circled import low\nNAME = 1\n",
        "room/other.py": "from circled import high\nOTHER = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / "circled" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert circle_in(tmp_path / "circled") == []  # high takes NAME, and not OTHER, at the door
    (tmp_path / "circled/low.py").write_text("def late():\n    from circled import high\n")
    circle = circle_in(tmp_path / "circled")
    assert circle[0] == circle[-1]
    assert set(circle) == {"circled.low", "circled.high", "circled.room.inside"}


def test_the_top_of_the_package_is_few_rooms_in_few_layers() -> None:
    # A folder of an earlier commit may still hold compiled files.
    found = [each for each in PACKAGE.iterdir() if each.is_file() or any(each.glob("*.py"))]
    entries = {each.name for each in found} - {"schemas", "coming_from.toml"}
    assert len(entries) <= 19, sorted(entries)
    assert len(LAYERS) <= 14
    rooms = {f"ludic.{each.name.removesuffix('.py')}" for each in PACKAGE.iterdir() if each.name in entries}
    assert rooms - {"ludic.__init__", "ludic.__main__", "ludic.py.typed"} == ROOMS


def test_rooms_take_names_of_each_other_at_their_doors() -> None:
    found = [each for each in crossings() if each[1] != "ludic.errors"]
    inside = [(file, module, name) for file, module, name in found if (module, name) not in DOORS]
    assert len(found) > 1000
    assert len(inside) / len(found) <= 0.05, inside


def test_what_a_door_has_is_taken_by_other_rooms_or_by_users() -> None:
    taken = {(module, name) for _, module, name in crossings()}
    users = [*PROJECT.glob("docs/*.md"), PROJECT / "README.md", *PROJECT.glob("notebooks/*.ipynb")]
    scripts = [each for folder in ("pipelines", "benchmarks") for each in PROJECT.glob(f"{folder}/**/*.py")]
    text = "\n".join(each.read_text(encoding="utf-8") for each in (*users, *scripts))
    assert [f"{door}: {name}" for door, name in DOORS if (door, name) not in taken and name not in text] == []


@pytest.mark.parametrize("door", sorted({door for door, _ in DOORS}))
def test_a_door_is_lazy_and_leads_to_what_its_module_has(door: str) -> None:
    names = [name for found, name in DOORS if found == door]
    room = importlib.import_module(door)
    assert room.__doc__
    assert dir(room) == sorted(names)
    light = next((name for name in names if DOORS[door, name] in sys.modules), None)
    if light is not None:
        assert getattr(room, light) is getattr(sys.modules[DOORS[door, light]], light)
    with pytest.raises(AttributeError, match="no_such_name"):
        room.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ludic.store", "ludic.root"),
        ("ludic.sql.connect", "ludic.root.sql"),
        ("ludic.run_config", "ludic.run"),
        ("ludic.agents.play", "ludic.agents"),
        ("ludic.models.first_model", "ludic.root.weights"),
    ],
)
def test_a_module_that_moved_is_named_where_it_is_now(old: str, new: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf" is part of {new} since ludic 0.1.0; write `from {new} import "):
        importlib.import_module(old)
    importlib.import_module(new)


def test_an_unknown_module_is_unknown_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'ludic.nothing'$"):
        importlib.import_module("ludic.nothing")
