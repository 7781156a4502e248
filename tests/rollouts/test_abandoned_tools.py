"""A tool that ignores its cancellation does not hold up the batch, whatever ends its call."""

import asyncio
import time
from functools import partial
from typing import Any

import pytest
from chat_models import scripted_agent
from episodes import Script, end

from ludic.agents.episode import by_environment, run_episode
from ludic.agents.requests import EpisodeLimits
from ludic.agents.tools.registry import function_tool
from ludic.agents.tools.toolbox import Toolbox
from ludic.environments.limits import LimitedEnvironments
from ludic.errors import ModelError
from ludic.records.rollout import Rollout
from ludic.rollouts.sampler import GroupSampler
from ludic.run.config import RunConfig

SCRIPT = LimitedEnvironments("script", lambda: Script([end()]))
CALL = '<tool_call>{"name": "stubborn", "arguments": {}}</tool_call>'

ended: list[str] = []


async def stubborn() -> str:
    """Wait, whoever asks for an end. A batch that waits for it takes a minute and finds it ended."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            await asyncio.sleep(until - time.monotonic())
        except asyncio.CancelledError:
            continue
    ended.append("stubborn")
    return "done"


def sample(tool_limit_s: float | None, limits: EpisodeLimits, script: list[str]) -> list[Rollout]:
    """Rows of a batch of one episode, whose model calls the tool and then runs out of script or answers."""
    toolbox = Toolbox([function_tool(stubborn)], time_limit_s=tool_limit_s)
    play: Any = partial(run_episode, by_environment, scripted_agent(script, toolbox=toolbox), limits=limits)
    run = RunConfig(model="m", env=("script",), group_size=1, max_tokens=64)
    sampler = GroupSampler(run=run, run_episode=play, environments={"script": SCRIPT})
    (group,) = sampler.sample([0], "worker").groups
    return list(group.rollouts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool_limit_s", "timeout_s", "reason"), [(0.05, None, None), (None, 0.2, "time_limit")], ids=["tool", "episode"]
)
def test_the_batch_ends_without_the_tool(
    tool_limit_s: float | None, timeout_s: float | None, reason: str | None
) -> None:
    for _ in range(2):  # the second batch is not held up by the first one's tool
        (row,) = sample(tool_limit_s, EpisodeLimits(timeout_s=timeout_s), [CALL, "answer"])
        assert (row.error, row.truncation_reason) == (None, reason)
    assert ended == []


@pytest.mark.slow
def test_an_error_of_the_engine_ends_the_batch_without_the_tool() -> None:
    agent = scripted_agent([CALL], toolbox=Toolbox([function_tool(stubborn)]))

    async def play(make: Any, request: Any) -> list[Rollout]:
        if request.group_index == 0:
            return await run_episode(by_environment, agent, make, request)
        await asyncio.sleep(0.2)  # the tool of the other episode runs
        raise ModelError("half loaded")

    run = RunConfig(model="m", env=("script",), group_size=2, max_tokens=64)
    sampler = GroupSampler(run=run, run_episode=play, environments={"script": SCRIPT})
    with pytest.raises(ModelError, match="half loaded"):
        sampler.sample([0], "worker")
    assert ended == []
