"""Users' own Python files: run one as a module, and say in a line where something in it failed.

What runs is the text that was read (ludic.user_files), whatever has become of the file since.
"""

import importlib.abc
import importlib.util
import linecache
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

from ludic.errors import in_a_line
from ludic.user_files import UserFile

_beside: dict[str, UserFile] = {}
"""Modules that came with files which were run, by module name."""


def load_file(file: UserFile) -> ModuleType:
    """Run the file as a module of its own; it is not importable by others, and needs no package around it.

    The modules that came with it are importable from then on. Raises ImportError for one whose name is taken by
    another module, and whatever the file raises.
    """
    for name, beside in file.imports.items():
        _make_importable(name, beside)
    module_name = f"ludic_file_{sha256(str(file.path).encode() + file.source).hexdigest()[:16]}"
    spec = _spec(module_name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up while it still runs
    assert spec.loader is not None
    with only_exceptions():
        spec.loader.exec_module(module)
    return module


class _TextLoader(importlib.abc.InspectLoader):
    """Runs the text that was read, not the file of that name."""

    def __init__(self, file: UserFile) -> None:
        self.file = file

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self.file.source)

    def get_code(self, fullname: str) -> CodeType:
        path = str(self.file.path)
        code = compile(self.file.source, path, "exec", dont_inherit=True)
        source = self.get_source(fullname)
        # Tracebacks and inspect show the lines that run; an entry without a time is never read again from the disk.
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        return code


class _BesideFinder(importlib.abc.MetaPathFinder):
    """Finds the modules that came with users' files."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return _spec(fullname, _beside[fullname]) if fullname in _beside else None


_finder = _BesideFinder()


def _spec(module_name: str, file: UserFile) -> ModuleSpec:
    spec = importlib.util.spec_from_file_location(module_name, file.path, loader=_TextLoader(file))
    assert spec is not None
    return spec


def _make_importable(name: str, file: UserFile) -> None:
    """Raises ImportError where an import of that name would give, or has given, another module."""
    loader = getattr(sys.modules.get(name), "__loader__", None)
    loaded = loader.file if isinstance(loader, _TextLoader) else _beside.get(name)
    if (name in sys.modules and loaded is None) or (loaded is not None and loaded.source != file.source):
        raise ImportError(f"module {name} of {file.path} has the name of another module that is in use; rename it")
    _beside[name] = file
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


@contextmanager
def exit_is_an_error() -> Iterator[None]:
    """RuntimeError in place of the SystemExit of a user's code: an episode may fail, the process goes on."""
    try:
        yield
    except SystemExit as error:
        failure = RuntimeError(f"sys.exit({error.code!r}) was called; raise an error instead")
        raise failure.with_traceback(error.__traceback__) from error


@contextmanager
def only_exceptions() -> Iterator[None]:
    """RuntimeError in place of what is no Exception, where a user's code is loaded. Ctrl-C passes."""
    try:
        with exit_is_an_error():
            yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        failure = RuntimeError(f"{type(error).__name__} was raised: {error}; raise an Exception instead")
        raise failure.with_traceback(error.__traceback__) from error


def describe_failure(path: Path, error: Exception) -> str:
    """Such as: mine.py, line 7, failed: KeyError: 'reward'. The line is the last one of the file that was reached."""
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.absolute()
    ]
    where = f"{path}, line {lines[-1]}," if lines else str(path)
    return f"{where} failed: {describe(error)}"


def describe(error: Exception) -> str:
    """The error on one line, such as: KeyError: 'reward'."""
    return f"{type(error).__name__}: {in_a_line(error)}"
