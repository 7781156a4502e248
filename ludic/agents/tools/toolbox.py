"""Define the protocol of tools, and run a model's calls of tools within limits of time and output.

`Toolbox.run` returns the call with its result or its error. A tool that fails never ends the episode: the error is text
that the model reads. Arguments are checked against the tool's JSON schema first.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from ludic.base import read_json, shortened, storable
from ludic.errors import ConfigError, ToolError, unknown_name
from ludic.records import ToolCall
from ludic.settings import CodeFailure, failure_of, finished, only_exceptions
from ludic.settings.user_code import describe


@runtime_checkable
class Tool(Protocol):
    """Something that a model can call by name with arguments, and that answers with text.

    One instance serves every episode of a process, often several calls at once. A call that fails raises; the model
    reads the message of a ToolError unchanged, and class and message of any other error. A call is cancelled at its
    time limit, and must release its resources.
    """

    @property
    def name(self) -> str:
        """Name that the model writes."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """{"type": "function", "function": {"name", "description", "parameters"}}, as chat templates take it.

        `parameters` is a JSON schema of an object.
        """

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Run the tool with arguments that match the schema."""


class Toolbox:
    """Tools of one agent, with limits.

    tools: raises ConfigError if two have the same name, or if a schema is not a JSON schema. time_limit_s: seconds for
    each call, None is no limit. output_limit: characters of a result or an error; the rest is cut, and the text says
    so.
    validators: by name, of tools whose schemas were checked before, which takes some time.
    """

    def __init__(
        self,
        tools: Iterable[Tool],
        *,
        time_limit_s: float | None = 30.0,
        output_limit: int = 10_000,
        validators: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.time_limit_s = time_limit_s
        self.output_limit = output_limit
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise ConfigError(f"two tools are named {tool.name!r}; rename one, since the model calls them by name")
            self._tools[tool.name] = tool
        self._validators = {
            name: validators.get(name) or make_validator(tool.schema) for name, tool in self._tools.items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tools."""
        return tuple(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of all tools, for the `tools` of a chat template."""
        return [dict(tool.schema) for tool in self._tools.values()]

    async def run(
        self, call: ToolCall, *, also: Sequence[str] = (), note: Callable[[CodeFailure], None] = lambda failure: None
    ) -> ToolCall:
        """Return the call with either its result or its error. Raises only if this task is cancelled.

        also: names of further tools that the model has, for the error if it calls an unknown one. note: called with the
        error of the tool's code, unless it is a ToolError.
        """
        try:
            tool, arguments = self._prepare(call, also)
            result = self.cut(str(await self._run_in_time(tool, arguments)))
        except ToolError as error:
            return replace(call, result=None, error=self.cut(str(error)))
        except Exception as error:
            note(failure_of(error))
            return replace(call, result=None, error=self.cut(describe(error)))
        return replace(call, result=result, error=None)

    def _prepare(self, call: ToolCall, also: Sequence[str]) -> tuple[Tool, Mapping[str, Any]]:
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolError(unknown_name("tool", call.name, [*self._tools, *also]))
        arguments = read_arguments(call.arguments)
        check_arguments(self._validators[call.name], arguments)
        return tool, arguments

    async def _run_in_time(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        task = await finished(_call(tool, arguments), self.time_limit_s)
        if task is None:
            raise ToolError(f"{tool.name} took longer than {self.time_limit_s:g} s and was stopped")
        return _outcome(task, tool)

    def cut(self, text: str) -> str:
        """Return a result or an error as text that can be stored as UTF-8 and is not too long."""
        return shortened(storable(text), self.output_limit)[0]


async def _call(tool: Tool, arguments: Mapping[str, Any]) -> str:
    with only_exceptions(
        in_coroutine=True
    ):  # in a task, SystemExit and KeyboardInterrupt would end the whole event loop
        return await tool(arguments)


def _outcome(task: asyncio.Task[str], tool: Tool) -> str:
    if task.cancelled():
        raise ToolError(f"{tool.name} cancelled itself")
    return task.result()


# --- Arguments of a call ---------------------------------------------------------------------------------
# Every problem raises ToolError, with a message that tells the model what to change.

MAX_PROBLEMS = 5
"""Maximum number of problems that one message lists."""
MAX_PROBLEM_CHARS = 300
"""Maximum characters of a problem in a message; jsonschema prints the whole refused value."""


def read_arguments(text: str) -> dict[str, Any]:
    """Parse the JSON text of a call's arguments. Raises ToolError unless it is one JSON object."""
    try:
        arguments = read_json(text)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the arguments are not valid JSON ({error}); wanted one JSON object") from error
    if not isinstance(arguments, dict):
        raise ToolError(f"the arguments are JSON, but {_json_type(arguments)}; wanted one JSON object")
    return arguments


def make_validator(schema: Mapping[str, Any]) -> Any:
    """Return a jsonschema validator of a tool's parameters. Raises ConfigError if its schema is not a JSON schema."""
    from jsonschema.exceptions import SchemaError as InvalidSchema
    from referencing import Registry

    function = schema["function"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    try:
        _validator_class().check_schema(parameters)
    except InvalidSchema as error:
        raise ConfigError(f"tool {function['name']}: its parameters are not a JSON schema: {error.message}") from error
    # An empty registry: a schema from a server must not make this process fetch addresses.
    return _validator_class()(parameters, registry=Registry())


def check_arguments(validator: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ToolError with the arguments that do not fit the schema."""
    problems = [*_unknown_names(validator.schema, arguments), *map(_describe, validator.iter_errors(arguments))]
    if problems:
        more = len(problems) - MAX_PROBLEMS
        listed = "; ".join(problems[:MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        raise ToolError(f"the arguments do not fit: {listed}")


@cache
def _validator_class() -> Any:
    """Draft 2020-12 with `nullable`, which transformers writes for `X | None`, and without 3.0 as an integer."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    def is_integer(checker: Any, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    def nullable(keyword: str) -> Any:
        check = Draft202012Validator.VALIDATORS[keyword]

        def check_unless_null(validator: Any, wanted: Any, value: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
            if not (value is None and schema.get("nullable")):
                yield from check(validator, wanted, value, schema) or ()

        return check_unless_null

    return extend(
        Draft202012Validator,
        {keyword: nullable(keyword) for keyword in ("type", "enum", "anyOf")},
        type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", is_integer),
    )


def _unknown_names(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[str]:
    """Describe arguments that the schema does not list. JSON schema allows them; for a call they are mistakes."""
    if "properties" not in schema or "additionalProperties" in schema or "patternProperties" in schema:
        return []
    known = ", ".join(schema["properties"]) or "none"
    unknown = [name for name in arguments if name not in schema["properties"]]
    return [_cut(f"there is no argument {name!r} (there are: {known})") for name in unknown]


def _describe(error: Any) -> str:
    place = "".join(f"[{key!r}]" for key in list(error.absolute_path)[1:])
    where = f"argument {error.absolute_path[0]}{place}: " if error.absolute_path else ""
    return _cut(f"{where}{error.message}")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_PROBLEM_CHARS else f"{text[:MAX_PROBLEM_CHARS]}..."


def _json_type(value: Any) -> str:
    if isinstance(value, list):
        return "an array"
    return "a string" if isinstance(value, str) else f"the value {json.dumps(value, ensure_ascii=False)}"
