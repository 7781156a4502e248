"""Run a user's Python file as a module, and say where the code in it failed: in one line, and as a traceback.

The text that ludic.settings.user_files has read is what runs, even if the file has changed since.
"""

import ast
import importlib.abc
import importlib.util
import inspect
import linecache
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import sha256
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ludic.base import left_out, mask, storable
from ludic.errors import Interruption, ScorerError, StopNowInterrupt, one_line
from ludic.settings.user_files import UserFile

_MOST_TRACEBACK = 4_000
"""Characters of a traceback; the middle of a longer one is left out."""

_STARTS = ("fit", "grpo", "sft", "dpo")
"""Functions of ludic that start a training."""

_beside: dict[str, UserFile] = {}
"""Modules imported by users' files that were run, by module name."""
_imported: dict[str, bytes] = {}
"""Texts of modules that the program itself has imported, as they were when a user's file first wanted one."""


def load_file(file: UserFile) -> ModuleType:
    """Run a file as a module of its own. Other modules can't import it by its name, and it needs no package.

    The modules that were read with it can be imported from then on. Raises ImportError if another module has the name
    of one of them, and any error that the file raises.
    """
    for name, beside in file.imports.items():
        if file.shown_path != str(file.path):
            beside = replace(beside, origin=str(Path(file.shown_path).with_name(f"{name}.py")))
        _make_importable(name, beside)
    module_name = f"ludic_file_{sha256(str(file.path).encode() + file.source).hexdigest()[:16]}"
    spec = _spec(module_name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up while it still runs
    assert spec.loader is not None
    with only_exceptions():
        spec.loader.exec_module(module)
    return module


def training_starts_at(source: bytes) -> int | None:
    """Return the line of a text that starts a training whenever the text is run; None if there is none.

    It is a call of ludic.grpo and its like, or of train() of a Trainer, outside of functions, classes and the part
    below `if __name__ == "__main__":`.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the error shows when the file is run
        return None
    has_trainer = any(
        alias.name.rpartition(".")[2].endswith("Trainer")
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    )
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or _is_main_part(statement):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and _starts_training(node.func, has_trainer=has_trainer):
                return node.lineno
    return None


def _is_main_part(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)


def _starts_training(called: ast.expr, *, has_trainer: bool) -> bool:
    if not isinstance(called, ast.Attribute):
        return False
    is_ludics = isinstance(called.value, ast.Name) and called.value.id == "ludic" and called.attr in _STARTS
    return is_ludics or (has_trainer and called.attr == "train")


class _TextLoader(importlib.abc.InspectLoader):
    """Loader that runs the text that was read, not the file on the disk."""

    def __init__(self, file: UserFile) -> None:
        self.file = file

    def get_source(self, fullname: str) -> str:
        return importlib.util.decode_source(self.file.source)

    def get_code(self, fullname: str) -> CodeType:
        path = self.file.shown_path
        code = compile(self.file.source, path, "exec", dont_inherit=True)
        source = self.get_source(fullname)
        running = getattr(sys.modules["__main__"], "__file__", None)
        if path != str(self.file.path) and running is not None and Path(running).absolute() == Path(path).absolute():
            return code  # this program is that script, with more lines than were taken
        # Makes tracebacks and inspect show the lines that run. An entry without a time is never reread from the disk.
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        return code


class _BesideFinder(importlib.abc.MetaPathFinder):
    """Finder of the modules that were read with users' files."""

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
    """Let later imports of `name` find this file. Raises ImportError if that name already belongs to another module.

    A program that calls ludic may have imported the same text itself; then its module stays.
    """
    module = sys.modules.get(name)
    loader = getattr(module, "__loader__", None)
    is_programs = not isinstance(loader, _TextLoader) and name not in _beside
    # The file may change later; the module does not.
    if is_programs and _has_text(module, file.source) and _imported.setdefault(name, file.source) == file.source:
        return
    loaded = loader.file if isinstance(loader, _TextLoader) else _beside.get(name)
    if (name in sys.modules and loaded is None) or (loaded is not None and loaded.source != file.source):
        raise ImportError(f"module {name} of {file.path} has the name of another module that is in use; rename it")
    _beside[name] = file
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _has_text(module: ModuleType | None, source: bytes) -> bool:
    """Return whether a module was imported from a file that holds this text."""
    path = Path(getattr(module, "__file__", None) or "")
    return path.is_file() and path.read_bytes() == source


@contextmanager
def only_exceptions(*, in_coroutine: bool = False) -> Iterator[None]:
    """Turn what a user's code raises into an Exception, as `as_error` does: a task may fail, the process goes on."""
    try:
        yield
    except BaseException as error:
        failure = as_error(error, in_coroutine=in_coroutine)
        if failure is None or failure is error:
            raise
        raise failure from error


def as_error(error: BaseException, *, in_coroutine: bool) -> Exception | None:
    """Return the Exception that stands for what a user's code raised; None if it must pass.

    The end of its time, Ctrl-C and, in a coroutine, the end of its task pass. A KeyboardInterrupt that the code raised
    itself does not: where ludic handles Ctrl-C, the real one is a StopNowInterrupt.
    """
    if isinstance(error, Exception):
        return error
    if isinstance(error, Interruption | StopNowInterrupt):
        return None
    from asyncio import CancelledError  # slow to import, and `ludic --help` needs none of it

    if in_coroutine and isinstance(error, CancelledError | GeneratorExit):
        return None
    if isinstance(error, SystemExit):
        text = f"sys.exit({error.code!r}) was called; raise an error instead"
    elif isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return None
    else:
        text = ": ".join(filter(None, (f"{type(error).__name__} was raised", one_line(error))))
        text += "; raise an Exception instead"
    return RuntimeError(text).with_traceback(error.__traceback__)


def describe_failure(path: Path, error: Exception) -> str:
    """Describe a failure in a user's file, such as: mine.py, line 7, failed: KeyError: 'reward'.

    The line is that of the innermost frame in the file.
    """
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).absolute() == path.absolute()
    ]
    where = f"{path}, line {lines[-1]}," if lines else str(path)
    return f"{where} failed: {describe(error)}"


def describe_at(error: Exception) -> str:
    """Describe an error with the file and the line that raised it, such as: KeyError: 'reward' (mine.py, line 7).

    The line is that of `failure_of`, unless an installed package has it. Where nobody can open the file, as for a cell
    of a notebook, it is shown: IndexError: list index out of range (notebook, line 5: return words[3]).
    """
    place = _trim(_traceback_of(error))
    if place is None or _is_installed(place.filename):
        return describe(error)
    shown = f": {mask(place.line)}" if place.line and not Path(place.filename).is_file() else ""
    return f"{describe(error)} ({place.filename}, line {place.lineno}{shown})"


def describe(error: Exception) -> str:
    """Return the error's class and message on one line, such as: KeyError: 'reward'."""
    return f"{type(error).__name__}: {one_line(error)}"


# --- Failures of users' code while it runs ----------------------------------------------------------------


_PLACE = re.compile(r" \([^()]+:\d+, in [^()]+\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFailure:
    """Error of a user's code, as texts that can be stored: without secrets, in UTF-8."""

    error: str
    """One line, such as: IndexError: list index out of range (rewards.py:12, in score)."""
    traceback: str | None
    """Traceback as Python prints it, from the first frame of the user's code on; None if there is no such frame."""


def failure_of(error: Exception) -> CodeFailure:
    """Describe an error of a user's code, with the file and the line of its innermost frame.

    Frames of ludic and of Python are not a user's; frames of installed packages are if there are no others. An error
    that ludic raises because of another one has the frames of that cause.
    """
    if isinstance(error, ScorerError) and error.failure_traceback is not None:
        return CodeFailure(error=storable(describe(error)), traceback=error.failure_traceback)
    found = _traceback_of(error)
    place = _trim(found)
    if place is None:
        return CodeFailure(error=storable(describe(error)), traceback=None)
    where = _place(place.filename, place.lineno, place.name)
    text = mask("".join(found.format()).rstrip())
    return CodeFailure(error=storable(f"{describe(error)}{where}"), traceback=storable(left_out(text, _MOST_TRACEBACK)))


def place_of_function(function: Callable[..., Any]) -> str:
    """Return where a user's function is defined, as a Failure's line ends, such as " (rewards.py:12, in ratio)".

    Empty for functions of ludic and of Python.
    """
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None or _is_of_ludic_or_python(code.co_filename):
        return ""
    return _place(code.co_filename, code.co_firstlineno, code.co_name)


def misfit_of_call(function: Callable[..., Any], names: Sequence[str], *, by_name: bool = False) -> str | None:
    """Return why a user's function can't be called with these arguments, and where it is; None if it can.

    Such as: takes (prompt, answer, label), wanted (example, answer) (rewards.py:12, in ratio). by_name: it is called
    with keywords. A function whose parameters Python can't tell may be called with any.
    """
    if not callable(function):
        return f"is {function!r}, wanted a function of ({', '.join(names)})"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(**dict.fromkeys(names)) if by_name else signature.bind(*names)
    except TypeError:
        taken = ", ".join(str(each.replace(annotation=each.empty)) for each in signature.parameters.values())
        return f"takes ({taken}), wanted ({', '.join(names)}){place_of_function(function)}"
    return None


def _place(file: str, line: int | None, name: str) -> str:
    return f" ({Path(file).name}:{line}, in {name})"


def _traceback_of(error: Exception) -> traceback.TracebackException:
    return traceback.TracebackException(type(error), error, error.__traceback__, lookup_lines=False)


def place_of(error: str) -> str:
    """Return the end of a Failure's line with the file and the line; empty if it names none."""
    found = _PLACE.fullmatch(error, max(0, error.rfind(" (")))
    return found[0] if found else ""


def without_place(error: str) -> str:
    """Return the line of a Failure without the file and the line that it names, for a model to read."""
    return error.removesuffix(place_of(error))


def _trim(found: traceback.TracebackException) -> traceback.FrameSummary | None:
    """Leave out the frames before the user's, also of causes; returns the innermost frame of the user's code."""
    for each in found.exceptions or ():
        _trim(each)
    cause = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    of_cause = None if cause is None else _trim(cause)
    frames = list(found.stack)
    foreign = [not _is_of_ludic_or_python(frame.filename) for frame in frames]
    if not any(foreign):
        found.stack.clear()
        return of_cause
    found.stack[:] = frames[foreign.index(True) :]
    others = [frame for frame, is_foreign in zip(frames, foreign, strict=True) if is_foreign]
    own = [frame for frame in others if not _is_installed(frame.filename)]
    return (own or others)[-1]


def _is_of_ludic_or_python(file: str) -> bool:
    if file.startswith("<"):  # generated code, such as the __init__ of a dataclass; but not a cell of a notebook
        return not file.startswith("<ipython")
    ludic, python = _folders()
    return file.startswith(ludic) or (file.startswith(python) and not _is_installed(file))


def _is_installed(file: str) -> bool:
    return f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file


@cache
def _folders() -> tuple[str, tuple[str, ...]]:
    """Return the folder of ludic's code, and those of Python's own, with a separator at the end."""
    python = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    return f"{Path(__file__).parents[1]}{os.sep}", tuple(f"{folder}{os.sep}" for folder in python)
