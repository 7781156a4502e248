"""Tool calls as a model makes them."""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest

from ludic.agents.tools.toolbox import Toolbox
from ludic.records.rollout import ToolCall

Run = Callable[..., ToolCall]


@pytest.fixture
def ends() -> Callable[[int], bool]:
    """Wait for a process to end: a killed one needs a moment. Returns whether it has ended within 10 s."""

    def wait(pid: int) -> bool:
        deadline = time.monotonic() + 10
        with suppress(psutil.NoSuchProcess):
            while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
        return True

    return wait


@pytest.fixture
def run() -> Run:
    """Run one call of a toolbox, with arguments given by name."""

    def run_call(toolbox: Toolbox, name: str, /, **arguments: Any) -> ToolCall:
        return asyncio.run(toolbox.run(ToolCall(id="call_0", name=name, arguments=json.dumps(arguments))))

    return run_call
