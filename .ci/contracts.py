"""Check the import contracts of pyproject.toml: `python .ci/contracts.py`. Exits with 1 if one is broken.

A door, ludic/ROOM/__init__.pyi, is lazy: a plain import graph ends at it. Here each name that is imported from a door
leads to the module that defines it, so that a contract sees the same arrows as without doors.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
from importlinter import configuration
from importlinter.application.app_config import settings
from importlinter.application.use_cases import lint_imports

from ludic.app.cli.docs import names_at_doors

PACKAGE = Path(__file__).parents[1] / "ludic"


def doors(package: Path = PACKAGE) -> dict[tuple[str, str], str]:
    """Return the module that defines each name of each door, by the door and the name."""
    places = names_at_doors(package)
    return {(door, name): ".".join(path.relative_to(package.parent).parts) for door, name, path in places}


def names_from(tree: ast.Module, door: str, *, for_type_checkers: bool) -> Iterator[tuple[int, str]]:
    """Yield line and name of each import from a door."""
    unseen: set[ast.AST] = set()
    if not for_type_checkers:
        unseen = {part for node in ast.walk(tree) if _is_unseen(node) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == door and node not in unseen:
            yield from ((node.lineno, each.name) for each in node.names)


def _is_unseen(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def graph_of(package: Path = PACKAGE, *, for_type_checkers: bool = True, external: bool = False) -> grimp.ImportGraph:
    """Return the import graph of a package, with doors replaced by the modules behind them.

    for_type_checkers: whether imports below `if TYPE_CHECKING` count. external: whether other packages are in it.
    """
    graph = grimp.build_graph(
        package.name,
        include_external_packages=external,
        exclude_type_checking_imports=not for_type_checkers,
        cache_dir=None,
    )
    behind = doors(package)
    for door in {door for door, _ in behind}:
        for importer in graph.find_modules_that_directly_import(door):
            graph.remove_import(importer=importer, imported=door)
            path = package.parent / Path(*importer.split("."))
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for line, name in names_from(tree, door, for_type_checkers=for_type_checkers):
                if (module := behind.get((door, name))) is not None:
                    text = f"from {door} import {name}"
                    graph.add_import(importer=importer, imported=module, line_number=line, line_contents=text)
    return graph


class _Builder:
    """Builds the graph that import-linter checks."""

    def build(
        self,
        root_package_names: list[str],
        cache_dir: str | None,
        include_external_packages: bool = False,
        exclude_type_checking_imports: bool = False,
    ) -> grimp.ImportGraph:
        return graph_of(for_type_checkers=not exclude_type_checking_imports, external=include_external_packages)


if __name__ == "__main__":
    sys.path.insert(0, str(PACKAGE.parent))
    configuration.configure()
    settings.configure(GRAPH_BUILDER=_Builder())
    sys.exit(not lint_imports(no_logo=True))
