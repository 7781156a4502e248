"""Take functions out of the script or notebook that defines them, as the text of a file of their own.

Workers run the text. It holds what the functions need, and nothing of what starts a run:

    a script        its imports, functions and classes that the functions need, found in its syntax tree, on the same
                    lines, so that a traceback names the line in the script
    a module        of the user's own: its whole text
    a notebook      the source of each function, with the functions and imports that it names
    a package       an import

A constant, such as a text, a list of numbers or a regular expression, has the value that it has now. Another object
that a script or a notebook has computed is refused by its name: a module makes its objects itself. Nothing is pickled.
Raises ConfigError.
"""

import ast
import inspect
import re
import subprocess
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from ludic.base import start_python
from ludic.errors import ConfigError
from ludic.settings.user_files import imported_names, modules_beside

_MAIN = "__main__"
_ADVICE = "move the function into a file of its own, such as rewards.py, and import it from there"
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractedCode:
    """Functions as the text of a file."""

    source: str
    names: Mapping[str, str]
    """Name of each function in the text, by the name that it was given by."""
    modules: Mapping[str, bytes]
    """Texts of the modules that the text imports from beside it, by name."""
    origin: str | None
    """Path of the file that has these lines, or "notebook"; None for functions of installed packages."""


def extract(functions: Mapping[str, Callable[..., Any]]) -> ExtractedCode:
    """Return functions as a text that other processes can run. functions: by names that errors tell."""
    for name, function in functions.items():
        if not isinstance(function, FunctionType):
            raise ConfigError(f"{name} is {function!r}, wanted a function that is defined with def")
        if function.__name__ == "<lambda>":
            raise ConfigError(f"{name} is a lambda, whose text can't be taken alone; define it with def")
    installed = _installed(each.__module__ for each in functions.values() if each.__module__ != _MAIN)
    base = _base_of(functions.values(), installed)
    text = _Text(base)
    for name, function in functions.items():
        text.add(name, function, installed)
    source = text.render()
    modules = modules_beside((Path.cwd() if base is None else base.path.parent) / "_.py", source.encode())
    where = "the notebook" if base is None else str(base.path)
    _check_imports([source.encode(), *modules.values()], modules, where)
    origin = None if base is None else _shown_path(base.path)
    if any(_is_cell(each) for each in functions.values()):
        origin = origin or "notebook"
    names = {name: function.__name__ for name, function in functions.items()}
    return ExtractedCode(source=source, names=names, modules=modules, origin=origin)


def _shown_path(path: Path) -> str:
    """Return a path as errors show it: from the working directory if it is below."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _is_cell(function: Any) -> bool:
    """Return whether a function is of a notebook or a prompt, whose lines are in no file."""
    return not Path(function.__code__.co_filename).is_file()


def _check_imports(texts: Sequence[bytes], modules: Mapping[str, bytes], where: str) -> None:
    """Raise ConfigError for a module that this program has imported and a worker could not."""
    roots = {root for text in texts for root in imported_names(text)} - modules.keys()
    absent = sorted((roots & sys.modules.keys()) - _installed(roots))
    if absent:
        raise ConfigError(
            f"{where} imports {absent[0]!r}, which is not installed, so workers can't import it; install it "
            "(pip install -e FOLDER), or make it one module beside the file"
        )


def _installed(modules: Iterable[str]) -> frozenset[str]:
    """Return the top-level names of those modules that a process can import without this program's own sys.path."""
    roots = {module.partition(".")[0] for module in modules}
    known = roots & (sys.stdlib_module_names | {"ludic"})
    return frozenset(known | _found_elsewhere(tuple(sorted(roots - known))))


@cache
def _found_elsewhere(names: tuple[str, ...]) -> frozenset[str]:
    if not names:
        return frozenset()
    look = "import sys, importlib.util as u; print(*(n for n in sys.argv[1:] if u.find_spec(n)))"
    with start_python(["-c", look, *names], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        return frozenset(process.communicate()[0].decode().split())


# --- The file of the functions ---------------------------------------------------------------------------------------


class _Base:
    """The script or the module that the text begins with."""

    def __init__(self, module: ModuleType, path: Path) -> None:
        self.module, self.path = module, path
        self.is_script = module is sys.modules[_MAIN]
        source = path.read_text(encoding="utf-8")
        self.lines, self.body = source.splitlines(), ast.parse(source, str(path)).body
        self.binding: dict[str, list[ast.stmt]] = {}
        """Statements that bind a name, in order, by the name."""
        for statement in self.body:
            for symbol in symtable.symtable(ast.unparse(statement), "<taken>", "exec").get_symbols():
                if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
                    self.binding.setdefault(symbol.get_name(), []).append(statement)

    def holds(self, name: str, value: Any) -> bool:
        """Return whether the file has this value under the name now."""
        return vars(self.module).get(name, _MISSING) is value


def _base_of(functions: Iterable[Any], installed: frozenset[str]) -> _Base | None:
    """Return the file that the text begins with: the script if it holds a function, else a module; None for neither."""
    for function in sorted(functions, key=lambda each: each.__module__ != _MAIN):
        module = sys.modules.get(function.__module__)
        if module is None or function.__module__.partition(".")[0] in installed:
            continue
        path = Path(getattr(module, "__file__", None) or "").absolute()
        if function.__module__ == _MAIN and (_is_cell(function) or not path.is_file()):
            continue
        if not path.is_file() or "." in function.__module__:
            raise ConfigError(
                f"{function.__qualname__} is in {function.__module__}, which is not installed, so workers can't import "
                "it; install the package (pip install -e FOLDER), or put the function into a file without a package"
            )
        return _Base(module, path)
    return None


# --- The text --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Text:
    """A text that grows by what functions need."""

    base: _Base | None
    kept: list[ast.stmt] = field(default_factory=list)
    """Statements of the script."""
    before: dict[str, str] = field(default_factory=dict)
    """Statements that come first, by the name that each binds."""
    after: list[str] = field(default_factory=list)
    """Functions that are no statements of the script, each after those that it needs."""
    taken: dict[str, Any] = field(default_factory=dict)
    """Values of the names that were resolved."""

    def add(self, name: str, function: Any, installed: frozenset[str]) -> None:
        """Add a function with all that it needs. name: for errors."""
        base, module = self.base, function.__module__
        if base is not None and module == base.module.__name__:
            if not base.is_script and "__file__" in _needed("\n".join(base.lines)):
                self.before["__file__"] = f"__file__ = {str(base.path)!r}"
        elif module != _MAIN and module.partition(".")[0] not in installed:
            path = Path(getattr(sys.modules.get(module), "__file__", None) or "").absolute()
            if "." in module or path.parent != (Path.cwd() if base is None else base.path.parent):
                raise ConfigError(f"{name} is in {path}, and another function elsewhere; put both into one file")
        self._need(function.__name__, function, f"{name} is")

    def _need(self, name: str, value: Any, what: str) -> None:
        """Add a name with what it needs. what: begins an error, such as "reward r is"."""
        base = self.base
        if name in self.taken:
            if self.taken[name] is not value and self.taken[name] != value:
                raise ConfigError(f"two values have the name {name!r}; {_ADVICE}")
            return
        self.taken[name] = value
        if base is None or not base.holds(name, value):
            self._resolve(name, value, what)
        elif base.is_script:  # else its whole text is there
            statements = base.binding.get(name, [])
            if statements and all(isinstance(each, _DEFINITIONS + _IMPORTS) for each in statements):
                for each in statements:
                    self._keep(each, base)
            else:
                self._resolve(name, value, what)

    def _keep(self, statement: ast.stmt, base: _Base) -> None:
        """Keep a statement of the script, with what it needs."""
        if isinstance(statement, ast.ImportFrom) and statement.level:
            raise ConfigError(f"{base.path}, line {statement.lineno}, imports from its own package; {_ADVICE}")
        self.kept.append(statement)
        self._need_all("\n".join(_lines_of(statement, base)), vars(base.module))

    def _need_all(self, source: str, scope: Mapping[str, Any]) -> None:
        for name in _needed(source):
            if name in scope and name not in ("__name__", "__builtins__"):
                self._need(name, scope[name], f"the name {name!r}, which a function uses, is")

    def _resolve(self, name: str, value: Any, what: str) -> None:
        """Add what is no statement of the script."""
        module, own = (str(getattr(value, each, "")) for each in ("__module__", "__name__"))
        if _is_plain(value):
            self.before[name] = f"{name} = {value!r}"
        elif isinstance(value, re.Pattern):
            self.before[name] = f"{name} = __import__('re').compile({value.pattern!r}, {value.flags})"
        elif isinstance(value, ModuleType):
            self.before[name] = f"import {value.__name__}" + (f" as {name}" if value.__name__ != name else "")
        elif module != _MAIN and getattr(sys.modules.get(module), own, _MISSING) is value:
            self.before[name] = f"from {module} import {own}" + (f" as {name}" if own != name else "")
        elif inspect.isfunction(value):
            if own != name:
                self._need(own, value, what)
                self.after.append(f"{name} = {own}")
            else:
                source = _source_of(value)
                self._need_all(source, _scope_of(value))
                self.after.append(source)
        else:
            shown = repr(value)
            shown = f"of type {type(value).__name__} ({shown if len(shown) <= 60 else shown[:60] + '...'})"
            raise ConfigError(f"{what} {shown}, which is no function, import, text, number or list of them; {_ADVICE}")

    def render(self) -> str:
        """Return the text, which ends with a newline."""
        lines = [*self.before.values()] if self.base is None else self._render_file(self.base)
        return "\n".join([*lines, *(f"\n\n{each}" for each in self.after)]).rstrip() + "\n"

    def _render_file(self, base: _Base) -> list[str]:
        """Return the kept statements, of a module all, on their own lines, and before them what comes first."""
        lines = [""] * len(base.lines) if base.is_script else base.lines
        first: int | None = None
        for statement in base.body:
            start = _first_line(statement) - 1
            is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
            if base.is_script and (is_future or statement in self.kept):
                texts = _lines_of(statement, base)
                lines[start] = f"{lines[start]}; {texts[0]}" if lines[start] else texts[0]
                lines[start + 1 : start + len(texts)] = texts[1:]
            is_head = is_future or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
            if first is None and not is_head and (not base.is_script or statement in self.kept):
                first = start
        if self.before:
            place = len(lines) if first is None else first
            is_free = place > 0 and not lines[place - 1]
            lines[place - 1 if is_free else place : place] = ["; ".join(self.before.values())]
        return lines


def _is_plain(value: Any) -> bool:
    """Return whether a value can be written as a literal."""
    if type(value) in (list, tuple, set):
        return (type(value) is not set or bool(value)) and all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if type(value) is float:
        return value - value == 0  # finite
    return type(value) in (str, bytes, int, bool, type(None))


def _first_line(statement: ast.stmt) -> int:
    return min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", ()))])


def _lines_of(statement: ast.stmt, base: _Base) -> list[str]:
    """Return the lines of a definition; an import as one line, without others on it."""
    if isinstance(statement, _DEFINITIONS):
        return base.lines[_first_line(statement) - 1 : statement.end_lineno]
    return [ast.unparse(statement)]


def _needed(source: str) -> list[str]:
    """Return the names of the module that a statement reads, also within its functions; builtin ones among them."""
    found: set[str] = set()

    def look(table: symtable.SymbolTable, is_top: bool) -> None:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (is_top or symbol.is_global()):
                found.add(symbol.get_name())
        for child in table.get_children():
            look(child, False)

    look(symtable.symtable(source, "<taken>", "exec"), True)
    return sorted(found)


def _scope_of(function: Any) -> Mapping[str, Any]:
    """Return the names that a function sees, with their values."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    try:
        return {**function.__globals__, **{name: cell.cell_contents for name, cell in cells}}
    except ValueError as error:
        raise ConfigError(f"{function.__qualname__} uses a name that has no value yet; {_ADVICE}") from error


def _source_of(function: Any) -> str:
    """Return the source of a function. Raises ConfigError if no file and no cell of a notebook has it as it is."""
    try:
        source = textwrap.dedent(inspect.getsource(function)).rstrip()
        ast.parse(source)
    except (OSError, TypeError, SyntaxError) as error:
        raise ConfigError(f"the source of {function.__qualname__} can't be read ({error}); {_ADVICE}") from error
    if hasattr(function, "__wrapped__") and not source.startswith("@"):
        raise ConfigError(f"{function.__qualname__} is wrapped by a call, which its source does not show; {_ADVICE}")
    return source
