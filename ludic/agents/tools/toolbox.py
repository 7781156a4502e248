"""Run the tool calls of a model within limits on time and output.

`Toolbox.run` returns the call with its result or its error. A tool that fails never ends the episode: the error is text
that the model reads.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ludic.agents.tools.arguments import check_arguments, make_validator, read_arguments
from ludic.agents.tools.tool import Tool
from ludic.code.run import describe, only_exceptions
from ludic.errors import ConfigError, ToolError, unknown_name
from ludic.printable import shortened, storable
from ludic.records import ToolCall
from ludic.waits import finished


class Toolbox:
    """Tools of one agent, with limits.

    tools: raises ConfigError if two have one name, or if a schema is no JSON schema. time_limit_s: seconds for each
    call, None is no limit. output_limit: characters of a result or an error; the rest is cut, and the text says so.
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

    async def run(self, call: ToolCall, *, also: Sequence[str] = ()) -> ToolCall:
        """Return the call with either its result or its error. Raises only if this task is cancelled.

        also: names of further tools that the model has, for the error if it calls an unknown one.
        """
        try:
            tool, arguments = self._prepare(call, also)
            result = self._cut(str(await self._run_in_time(tool, arguments)))
        except ToolError as error:
            return replace(call, result=None, error=self._cut(str(error)))
        except Exception as error:
            return replace(call, result=None, error=self._cut(describe(error)))
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

    def _cut(self, text: str) -> str:
        """Return text that can be stored as UTF-8 and is not too long."""
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
