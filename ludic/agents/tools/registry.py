"""Tools by name: `calculator`, `python`, path/to/file.py:name, mcp:COMMAND or mcp:https://ADDRESS.

Every failure raises ConfigError, which says what was requested, what was found and what to change.
"""

from collections.abc import Callable, Iterable, Sequence

from ludic.agents.tools.functions import function_tool
from ludic.agents.tools.mcp import McpServer, check_server
from ludic.agents.tools.tool import Tool
from ludic.code.files import NO_FILES, Files, file_of
from ludic.code.kinds import MCP, TOOL, check, find
from ludic.errors import ConfigError


def check_tools(names: Sequence[str], files: Files = NO_FILES) -> None:
    """Raise ConfigError for the first name that can't be a tool, or that comes twice. Runs no code of a file or server.

    files: files to use instead of those on disk, by path as in the name.
    """
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"tool {name} is given twice; give each once")
        if name.startswith(MCP):
            check_server(name.removeprefix(MCP).strip())
        else:
            check(TOOL, name, files)


def make_tools(names: Sequence[str], files: Files = NO_FILES) -> list[Tool]:
    """Return the tools of all names; a server gives all of its tools.

    Runs the users' files and starts the servers. files: as in check_tools. Raises ConfigError as check_tools does, and
    for a function without a schema or a server that can't be reached.
    """
    check_tools(names, files)
    return [tool for name in names for tool in _make(name, files)]


def _make(name: str, files: Files) -> Iterable[Tool]:
    if name.startswith(MCP):
        return McpServer(name.removeprefix(MCP).strip()).tools
    return [built_in_tool(name) if file_of(name) is None else as_tool(find(TOOL, name, files))]


def built_in_tool(name: str) -> Tool:
    """Return a tool of ludic. Raises ConfigError for an unknown name."""
    found = find(TOOL, name)
    return found() if isinstance(found, type) else as_tool(found)


def as_tool(found: Callable[..., object] | Tool) -> Tool:
    """Return a tool as it is, and a function as a tool. Raises ConfigError for a function without a schema."""
    if isinstance(found, Tool) and not isinstance(found, type):
        return found
    return function_tool(found)
