"""Users' own Python files: run one as a module, and say in a line where something in it failed."""

import importlib.util
import sys
import traceback
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from ludic.errors import in_a_line


def load_file(path: Path) -> ModuleType:
    """Run the file as a module of its own; it is not importable by others, and needs no package around it.

    Raises FileNotFoundError, and whatever the file raises.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.absolute()}")
    module_name = f"ludic_file_{sha256(str(path.absolute()).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up while it still runs
    spec.loader.exec_module(module)
    return module


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
