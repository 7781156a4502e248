"""The protocol of a tool."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Tool(Protocol):
    """Something that a model can call by name with arguments, and that answers with text.

    One instance serves every episode of a process, often several calls at once. A call that fails raises; the message
    of a ToolError goes to the model as it is, any other error as its class and message. A call is cancelled when its
    time is over, and must release what it holds.
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
