"""Tools by name: `calculator`, `python`, path/to/file.py:name, mcp:COMMAND or mcp:https://ADDRESS.

Every failure raises ConfigError, which says what was requested, what was found and what to change.
"""

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType

from ludic.agents.tools.calculator import calculator
from ludic.agents.tools.functions import function_tool
from ludic.agents.tools.interpreter import PythonInterpreter
from ludic.agents.tools.mcp import McpServer, check_server
from ludic.agents.tools.tool import Tool
from ludic.errors import ConfigError
from ludic.paths import local_path
from ludic.user_code import load_named
from ludic.user_files import NO_FILES, Files, python_file_of, read_user_file

BUILT_IN: Mapping[str, Callable[[], Tool]] = MappingProxyType(
    {"calculator": lambda: function_tool(calculator), "python": PythonInterpreter}
)
MCP = "mcp:"


def check_tools(names: Sequence[str], files: Files = NO_FILES) -> None:
    """Raise ConfigError for the first name that can't be a tool, or that comes twice. Runs no code of a file or server.

    files: files to use instead of those on disk, by path as in the name.
    """
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"tool {name} is given twice; give each once")
        if name.startswith(MCP):
            check_server(name.removeprefix(MCP).strip())
        elif name not in BUILT_IN:
            _check_file(name, files)


def make_tools(names: Sequence[str], files: Files = NO_FILES) -> list[Tool]:
    """Return the tools of all names; a server gives all of its tools.

    Runs the users' files and starts the servers. files: as in check_tools. Raises ConfigError as check_tools does, and
    for a function without a schema or a server that can't be reached.
    """
    check_tools(names, files)
    return [tool for name in names for tool in _make(name, files)]


def _make(name: str, files: Files) -> Iterable[Tool]:
    if name in BUILT_IN:
        return [BUILT_IN[name]()]
    if name.startswith(MCP):
        return McpServer(name.removeprefix(MCP).strip()).tools
    return [_from_file(name, files)]


def _from_file(name: str, files: Files) -> Tool:
    path, _, attribute = name.rpartition(":")
    _, module = load_named(path, f"tool {name}", ConfigError, files)
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"tool {name}: {attribute!r} is {type(found).__name__}; wanted a function or a Tool")
    return as_tool(found)


def as_tool(found: Callable[..., object] | Tool) -> Tool:
    """Return a tool as it is, and a function as a tool. Raises ConfigError for a function without a schema."""
    if isinstance(found, Tool) and not isinstance(found, type):
        return found
    return function_tool(found)


def _check_file(name: str, files: Files) -> None:
    path = python_file_of(name)
    if path is None:
        raise _unknown(name)
    attribute = name.rpartition(":")[2]
    try:
        file = files[path] if path in files else read_user_file(local_path(path, f"the file of tool {name}"))
        defined = _defined_names(ast.parse(file.source, str(file.path)))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"tool {name}: {error}") from error
    if attribute not in defined and "*" not in defined:  # of `from module import *`, nothing is known
        raise ConfigError(f"tool {name}: {path} defines no {attribute!r}; it defines {', '.join(defined) or 'nothing'}")


def _defined_names(block: ast.AST) -> list[str]:
    """Return the names that a module defines or imports, also under `if` and `try`, without private ones."""
    names: list[str] = []
    for node in ast.iter_child_nodes(block):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.append(node.name)
            case ast.Import() | ast.ImportFrom():
                names += [(alias.asname or alias.name).split(".")[0] for alias in node.names]
            case ast.Name(ctx=ast.Store()):
                names.append(node.id)
            case _:
                names += _defined_names(node)
    return [name for name in names if not name.startswith("_")]


def _unknown(name: str) -> ConfigError:
    close = get_close_matches(name, BUILT_IN, n=1)
    suggestion = f"did you mean {close[0]}? " if close else ""
    return ConfigError(
        f"tool {name!r} is unknown; {suggestion}there are {', '.join(BUILT_IN)}, path/to/file.py:function, "
        f"{MCP}COMMAND and {MCP}https://ADDRESS"
    )
