"""Find tools by name (calculator, python, path/to/file.py:name, mcp:TARGET), and make tools of functions.

Every failure raises ConfigError, which names the request, the value found and the change to make.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludic.agents.tools.mcp import McpServer, check_server
from ludic.agents.tools.toolbox import Tool, make_validator
from ludic.environments import HeldEnvironment, SingleTurn, is_tool
from ludic.errors import ConfigError, one_line
from ludic.settings import MCP, NO_FILES, TOOL, Files, file_of, find, in_thread
from ludic.settings.kinds import check


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
    """Return a tool unchanged, and a function as a tool. Raises ConfigError for a function without a schema."""
    if isinstance(found, Tool) and not isinstance(found, type):
        return found
    return function_tool(found)


# --- Functions as tools: the schema comes from type hints and the docstring ------------------------------

EXAMPLE = (
    'def add(a: int, b: int) -> int: """Add two numbers.\\n\\nArgs:\\n    a: First number.\\n    b: Second number."""'
)

_Parts = Mapping[str, tuple[Mapping[str, Any], Any]]
"""Schema and validator of tools by their names."""
_parts: dict[type, _Parts] = {}
"""Tools of environments by class, cached: making them takes longer than an episode of one step."""


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function as a tool. Asynchronous functions run on the event loop, all others in a thread of their own."""

    name: str
    schema: Mapping[str, Any]
    function: Callable[..., Any]

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Call the function by keyword. A result that is not text is written as JSON."""
        if inspect.iscoroutinefunction(self.function):
            return _as_text(await self.function(**arguments))
        result = await in_thread(lambda: self.function(**arguments))
        return _as_text(await result if inspect.isawaitable(result) else result)


def function_tool(function: Callable[..., Any]) -> FunctionTool:
    """Return a tool of a function, with the schema of transformers.utils.get_json_schema.

    Each parameter needs a type hint and a line under `Args:` of the docstring. Raises ConfigError if one lacks them, or
    if a parameter can't be given by name.
    """
    from transformers.utils import get_json_schema  # imports torch

    name = getattr(function, "__name__", type(function).__name__)
    unnamed = [parameter for parameter in inspect.signature(function).parameters.values() if not _has_name(parameter)]
    if unnamed:
        raise ConfigError(f"tool {name}: parameter {unnamed[0]} can't be given by name; models give arguments by name")
    try:
        schema = get_json_schema(function)
    except Exception as error:  # it raises its own exceptions, and any error of a hint that can't be evaluated
        raise ConfigError(
            f"tool {name}: no schema could be made: {one_line(error)}; wanted such as {EXAMPLE}"
        ) from error
    return FunctionTool(name, schema, function)


def _has_name(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are not texts, or an object that contains itself
        return str(result)


# --- Tools of an environment: its methods that are marked with ludic.environments.environment.tool ------------


@dataclass(frozen=True, slots=True)
class EnvironmentTool:
    """A method of the environment of one episode."""

    name: str
    schema: Mapping[str, Any]
    held: HeldEnvironment

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Call the method by keyword, in time, where the environment runs."""
        return _as_text(await self.held.call(self.name, **arguments))


def environment_tools(held: HeldEnvironment) -> tuple[list[EnvironmentTool], dict[str, Any]]:
    """Return the tools of an episode's environment, and their validators by name.

    Raises ConfigError for a method without a valid schema.
    """
    inner = held.environment.environment if isinstance(held.environment, SingleTurn) else held.environment
    if type(inner) not in _parts:
        _parts[type(inner)] = _make_parts(inner)
    parts = _parts[type(inner)]
    tools = [EnvironmentTool(name, schema, held) for name, (schema, _) in parts.items()]
    return tools, {name: validator for name, (_, validator) in parts.items()}


def _make_parts(environment: Any) -> _Parts:
    names = [name for name in dir(type(environment)) if is_tool(getattr(type(environment), name, None))]
    made = [function_tool(getattr(environment, name)) for name in names]
    return {tool.name: (tool.schema, make_validator(tool.schema)) for tool in made}
