"""An agent of the Agents SDK, over chat completions or, with API=responses, over responses."""

import asyncio
import os

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import MODEL, STREAMS, TASK, TOOLS, finish
from openai import AsyncOpenAI

set_tracing_disabled(True)
make_model = OpenAIResponsesModel if os.environ.get("API") == "responses" else OpenAIChatCompletionsModel
agent = Agent(
    name="careful",
    instructions="You are careful.",
    tools=[function_tool(tool, strict_mode=False) for tool in TOOLS.values()],
    model=make_model(model=MODEL, openai_client=AsyncOpenAI()),
)


async def main() -> None:
    if STREAMS:
        result = Runner.run_streamed(agent, TASK)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, TASK)
    finish(result.final_output)


asyncio.run(main())
