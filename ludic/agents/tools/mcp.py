"""Call the tools of an MCP server (Model Context Protocol) with the official `mcp` package, over stdio or HTTP.

Each process connects once to a server for all of its episodes, so a server with a state shares it between episodes. A
program runs as the same user, with HOME, PATH and a few more environment variables, and no others; `env TOKEN=$TOKEN
program` passes one from this process. Errors name the program or the host, since the rest of a command line or an
address may hold secrets.
"""

import asyncio
import os
import re
import shlex
import shutil
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from urllib.parse import urlsplit

from ludic.base import keep_secret, mask, require
from ludic.errors import ConfigError, ToolError
from ludic.settings.user_code import describe

CONNECT_LIMIT_S = 60.0
"""Seconds for a server to start and to list its tools."""
CLOSE_LIMIT_S = 10.0
"""Seconds for ending a program that did not answer."""


@dataclass(frozen=True, slots=True)
class McpTool:
    """One tool of a server."""

    server: "McpServer"
    name: str
    schema: Mapping[str, Any]

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Call the server. Raises ToolError if it reports an error."""
        return await self.server.call(self.name, arguments)


class McpServer:
    """A connection to a server, kept by an event loop in its own thread, so calls may come from any event loop.

    target: a command line, or an http(s) address. Raises ConfigError if the server can't be reached. When the
    connection is lost, calls on their way fail and the next call connects again. It ends with `close`, with this
    process, or when neither the server nor a tool of it is in use.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._lock = Lock()
        # Holds only the newest session; a list, so that `close` finds it without a reference to this object.
        self._sessions = [_start(target)]
        self.close = weakref.finalize(self, lambda sessions: sessions[0].stop(), self._sessions)
        try:
            listed = self._sessions[0].ready.result(CONNECT_LIMIT_S + CLOSE_LIMIT_S)
        except Exception as error:
            self.close()
            raise ConfigError(_unreachable(target, error)) from error
        self.tools = [McpTool(self, tool.name, _schema_of(tool)) for tool in listed]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return the text of its result. Raises ToolError if the result is an error.

        The model reads the error, so errors that are not the server's show only their class.
        """
        from mcp import MCPError

        session = self._session()
        try:
            # Without the shield, the time limit of one call would end the connection for all waiting calls.
            await asyncio.shield(asyncio.wrap_future(session.ready))
        except Exception as error:
            raise ToolError(f"{_name(self.target)} could not be reached: {type(_first(error)).__name__}") from error
        call = asyncio.run_coroutine_threadsafe(session.call(name, arguments), session.loop)
        try:
            result = await asyncio.wrap_future(call)
        except MCPError:
            raise
        except Exception as error:
            raise ToolError(f"{_name(self.target)} failed: {type(_first(error)).__name__}") from error
        if result.is_error:
            raise ToolError(mask(_text_of(result)))
        return _text_of(result)

    def _session(self) -> "_Session":
        """Return the session, or a new one if its connection is lost."""
        with self._lock:
            if self._sessions[0].has_ended:
                self._sessions[0] = _start(self.target)
            return self._sessions[0]


class _Session:
    """The connection, as the thread runs it; holds no reference to its McpServer, so that the latter can be freed."""

    def __init__(self, target: str) -> None:
        self.server = _client_target(target)
        self.ready: Future[list[Any]] = Future()
        self.loop = asyncio.new_event_loop()
        self.stopping = asyncio.Event()
        self.client: Any = None
        self.has_ended = False

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            try:
                runner.run(self._serve())
            except BaseException as error:
                # A later error shows in the calls.
                if not self.ready.done():
                    self.ready.set_exception(error)
            finally:
                self.has_ended = True

    async def _serve(self) -> None:
        """Connect, list the tools, and wait; a connection must end in the task that began it."""
        from mcp import Client

        async with asyncio.timeout(CONNECT_LIMIT_S) as limit, Client(self.server) as self.client:
            self.ready.set_result(await self._list_tools())
            limit.reschedule(None)
            await self.stopping.wait()

    async def _list_tools(self) -> list[Any]:
        page = await self.client.list_tools()
        tools = list(page.tools)
        while page.next_cursor:
            page = await self.client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        return tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            return await self.client.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                self.has_ended = True
                self.stopping.set()
            raise

    def stop(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.stopping.set)


def _start(target: str) -> _Session:
    session = _Session(target)
    Thread(target=session.run, daemon=True, name="ludic-mcp").start()
    return session


def check_server(target: str) -> None:
    """Raise ConfigError for a target that can't be a server; nothing is started or contacted."""
    require("mcp", "agents", "MCP server")
    try:
        command = [] if _is_address(target) else shlex.split(target)
        name = _name(target)
    except ValueError as error:
        raise ConfigError(f"MCP server: its address or command line can't be read: {error}") from error
    if _is_address(target):
        return
    if not command:
        raise ConfigError("MCP server: no command is given; wanted mcp:COMMAND ARGUMENTS or mcp:https://ADDRESS")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{name}: there is no program {command[0]!r}; give its path, or install it")


def _is_address(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _client_target(target: str) -> Any:
    from mcp import StdioServerParameters

    if _is_address(target):
        return target
    command, *arguments = map(_with_value, shlex.split(target))
    return StdioServerParameters(command=command, args=arguments)


def _with_value(word: str) -> str:
    """Return NAME=$VARIABLE with the value from the environment, any other word unchanged."""
    match = re.fullmatch(r"(\w+=)\$(\w+)", word)
    if match is None:
        return word
    if match[2] not in os.environ:
        raise ConfigError(f"MCP server: {word} names a variable that is not set; set {match[2]} where the worker runs")
    return match[1] + keep_secret(os.environ[match[2]])


def _name(target: str) -> str:
    """Name the program or the host. Raises ValueError if there is none to read."""
    if _is_address(target):
        return f"MCP server {urlsplit(target).hostname}"
    words = (Path(word).name for word in shlex.split(target) if "=" not in word)
    return f"MCP server {next((word for word in words if word != 'env'), '')}".rstrip()


def _schema_of(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _text_of(result: Any) -> str:
    """Return the text blocks of a result; images and other blocks are named, since the model reads only text."""
    return "\n".join(getattr(block, "text", None) or f"[{block.type} left out]" for block in result.content)


def _unreachable(target: str, error: BaseException) -> str:
    name = _name(target)
    return f"{name}: it could not be reached: {describe(_first(error)).replace(target, name)}"


def _first(error: BaseException) -> Exception:
    """Return the first error inside exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
