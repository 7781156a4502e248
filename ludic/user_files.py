"""Users' own files that settings name, .py and .sql: read once, so that the text that runs is the text that is kept.

A Python file is read with the modules beside it that it imports, by name and in turn: cats.py with `import words` is
read with words.py. Packages beside it, and modules that are imported by a computed name, must be installed.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

MAX_BYTES = 10_000_000
"""Longer files are refused: a root keeps a copy of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFile:
    """A file's text, and where it was read."""

    path: Path
    """Absolute; the __file__ of its module, so that data beside it is found on the machine that it came from."""
    source: bytes
    imports: Mapping[str, "UserFile"] = field(default_factory=dict)
    """The modules beside a Python file that it, or they, import; by module name, themselves without imports."""

    @property
    def sha256(self) -> str:
        """Of the text, in hexadecimal."""
        return digest(self.source)

    @property
    def suffix(self) -> str:
        """.py or .sql."""
        return self.path.suffix

    def is_same_text(self, other: "UserFile") -> bool:
        """Whether both, with what they import, run the same."""
        return self.digests == other.digests

    @property
    def digests(self) -> dict[str, str]:
        """sha256 by module name; "" is the file itself."""
        return {"": self.sha256, **{name: module.sha256 for name, module in sorted(self.imports.items())}}


Files = Mapping[str, UserFile]
"""By the names that settings have for them, such as cats.py."""
NO_FILES: Files = MappingProxyType({})


def digest(source: bytes) -> str:
    """The sha256 of a text, in hexadecimal."""
    return sha256(source).hexdigest()


def file_of(setting: str) -> str | None:
    """The file that a setting names: cats.py of cats.py:Cats, mine.sql of mine.sql; None if it names no file.

    Everything that runs a user's file asks this: consent is to the files that it finds.
    """
    return python_file_of(setting) or (setting if setting.endswith(".sql") else None)


def python_file_of(setting: str) -> str | None:
    """The file of path/to/file.py:name; None for any other setting."""
    place, _, _ = setting.rpartition(":")
    return place if place.endswith(".py") else None


def files_of(settings: Iterable[str]) -> list[str]:
    """The files that settings name, each once, in their order."""
    return list(dict.fromkeys(file for file in map(file_of, settings) if file is not None))


def read_user_file(path: Path) -> UserFile:
    """Raises FileNotFoundError, OSError for a file that can't be read or is too long."""
    path = path.absolute()
    source = _read(path)
    modules = _modules_beside(path, source) if path.suffix == ".py" else {}
    imports = {name: UserFile(path=path.with_name(f"{name}.py"), source=text) for name, text in modules.items()}
    return UserFile(path=path, source=source, imports=imports)


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    with path.open("rb") as file:
        source = file.read(MAX_BYTES + 1)
    if len(source) > MAX_BYTES:
        raise OSError(
            f"{path} has more than {MAX_BYTES:,} bytes, which is not kept in a root; read data from elsewhere"
        )
    return source


def _modules_beside(path: Path, source: bytes) -> dict[str, bytes]:
    """Texts of the modules in the same folder that a file imports, and that those import, by name."""
    found: dict[str, bytes] = {}
    unread = [source]
    while unread:
        for name in _imported_names(unread.pop()):
            beside = path.with_name(f"{name}.py")
            if name not in found and name != path.stem and beside.is_file():
                found[name] = _read(beside)
                unread.append(found[name])
    return found


def _imported_names(source: bytes) -> Iterator[str]:
    """First parts of the modules that a text imports anywhere, without the standard library's; none if it is broken."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # running it says what is wrong
        return
    for node in nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        yield from (name for name in (full.split(".")[0] for full in names) if name not in sys.stdlib_module_names)
