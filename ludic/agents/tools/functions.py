"""Make tools of Python functions: the schema comes from type hints and the docstring."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ludic.agents.tools.threads import in_thread
from ludic.errors import ConfigError, one_line

EXAMPLE = (
    'def add(a: int, b: int) -> int: """Add two numbers.\\n\\nArgs:\\n    a: First number.\\n    b: Second number."""'
)


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
    except Exception as error:  # it raises Exceptions of its own, and whatever a hint that can't be evaluated raises
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
    except (TypeError, ValueError, RecursionError):  # keys that are no text, or an object that holds itself
        return str(result)
