"""Find and read the users' .py and .sql files that settings name, without running them.

A file is read once, so that the text that runs (ludic.settings) is the text that is stored (ludic.root.code).

A Python file is read with the modules in its folder that it imports by name, directly or through each other: cats.py
with `import words` is read with words.py. Packages in its folder, and modules imported by a computed name, must be
installed. Raises OSError if a file can't be read.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

MCP = "mcp:"
"""Prefix of tools of a server."""
COMMAND = "command:"
"""Prefix of a command line as code of a user's (ludic.settings.consent)."""
QUESTIONS = "qa/"
"""Prefix of environments that read questions from a file or a dataset."""
MAX_BYTES = 10_000_000
"""Maximum bytes of a file; larger files are refused, since a root stores a copy of each."""


ORIGIN = "# Lines of: "
"""Beginning of the last line of a text that ludic.fit extracted from another file; the line holds its path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFile:
    """A file's text, and the path that it was read from."""

    path: Path
    """Absolute path; the __file__ of its module, so that on its original machine the code finds data beside it."""
    source: bytes
    imports: Mapping[str, "UserFile"] = field(default_factory=dict)
    """Modules in the folder of a Python file that it or they import, by module name; their own `imports` are empty."""

    origin: str | None = None
    """Path of the file that these lines are from; None looks for it in the text."""

    @property
    def shown_path(self) -> str:
        """Path for errors: that of the file from which ludic.fit extracted these lines, if the text names it."""
        found = self.source.rpartition(ORIGIN.encode())[2] if ORIGIN.encode() in self.source else b""
        return self.origin or found.decode(errors="replace").strip() or str(self.path)

    @property
    def sha256(self) -> str:
        """SHA-256 of the text, in hexadecimal."""
        return digest(self.source)

    @property
    def suffix(self) -> str:
        """Suffix of the file's name: .py or .sql."""
        return self.path.suffix

    def is_same_text(self, other: "UserFile") -> bool:
        """Return whether both files and the modules that they import have the same text."""
        return self.digests == other.digests

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each text by module name; "" is the file itself."""
        return {"": self.sha256, **{name: module.sha256 for name, module in sorted(self.imports.items())}}

    @property
    def paths(self) -> dict[str, str]:
        """Path of each text, its module's __file__, by module name; "" is the file itself."""
        return {"": str(self.path), **{name: str(module.path) for name, module in sorted(self.imports.items())}}


Files = Mapping[str, UserFile]
"""Users' files by their names in the settings, such as cats.py."""
NO_FILES: Files = MappingProxyType({})


def digest(source: bytes) -> str:
    """Return the SHA-256 of a text, in hexadecimal."""
    return sha256(source).hexdigest()


def file_of(setting: str) -> str | None:
    """Return the file that a setting names: cats.py of cats.py:Cats, mine.sql of mine.sql; None if it names no file.

    All code that runs a user's file calls this, since consent is to the files that it finds.
    """
    is_sql = setting.endswith(".sql") and not setting.startswith(COMMAND)
    return python_file_of(setting) or (setting if is_sql else None)


def python_file_of(setting: str) -> str | None:
    """Return the file of path/to/file.py:name; None for any other setting, and for each tool mcp:COMMAND or command."""
    if setting.startswith((MCP, COMMAND)):
        return None
    path, _, _ = setting.rpartition(":")
    return path if path.endswith(".py") else None


def files_of(settings: Iterable[str]) -> list[str]:
    """Return the files that settings name, each once, in the order of the settings."""
    return list(dict.fromkeys(file for file in map(file_of, settings) if file is not None))


def read_user_file(path: Path) -> UserFile:
    """Read a file and the modules beside it that it imports.

    Raises FileNotFoundError if there is no such file, OSError if one can't be read or is too long.
    """
    path = path.absolute()
    source = _read(path)
    modules = modules_beside(path, source) if path.suffix == ".py" else {}
    imports = {name: UserFile(path=path.with_name(f"{name}.py"), source=text) for name, text in modules.items()}
    return UserFile(path=path, source=source, imports=imports)


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    with path.open("rb") as file:
        source = file.read(MAX_BYTES + 1)
    if len(source) > MAX_BYTES:
        raise OSError(
            f"{path} has more than {MAX_BYTES:,} bytes, too large to store in a root; read data from elsewhere"
        )
    return source


def modules_beside(path: Path, source: bytes) -> dict[str, bytes]:
    """Return the texts, by name, of modules in the same folder that a file imports, directly or through each other."""
    found: dict[str, bytes] = {}
    unread = [source]
    while unread:
        for name in imported_names(unread.pop()):
            beside = path.with_name(f"{name}.py")
            if name not in found and name != path.stem and beside.is_file():
                found[name] = _read(beside)
                unread.append(found[name])
    return found


def imported_names(source: bytes) -> Iterator[str]:
    """Yield the top-level names of non-standard modules that a text imports anywhere; none if it can't be parsed."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the error appears when the file is run
        return
    for node in nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        yield from (name for name in (full.split(".")[0] for full in names) if name not in sys.stdlib_module_names)
