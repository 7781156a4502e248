"""Tool calls as a model makes them."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from ludic.agents.tools.toolbox import Toolbox
from ludic.records import ToolCall

Run = Callable[..., ToolCall]


@pytest.fixture
def run() -> Run:
    """Run one call of a toolbox, with arguments given by name."""

    def run_call(toolbox: Toolbox, name: str, /, **arguments: Any) -> ToolCall:
        return asyncio.run(toolbox.run(ToolCall(id="call_0", name=name, arguments=json.dumps(arguments))))

    return run_call
