"""A real MCP server for the tests: over stdio, or over HTTP on the port that is given."""

import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("words")


@server.tool()
def shout(text: str, times: int = 1) -> str:
    """Say it loudly.

    Args:
        text: What to say.
    """
    return (text.upper() + "!") * times


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("the words are gone")


@server.tool()
def secret(variable: str = "SECRET_TOKEN") -> str:
    """Look for a secret."""
    return os.environ.get(variable, "none")


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    import anyio

    await anyio.sleep(seconds)
    return "done"


@server.tool()
def pid() -> str:
    """Tell the process."""
    return str(os.getpid())


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
