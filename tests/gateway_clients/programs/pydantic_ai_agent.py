"""An agent of Pydantic AI over chat completions."""

import asyncio
from collections.abc import AsyncIterable

from common import MODEL, STREAMS, TASK, TOOLS, finish
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel(MODEL), instructions="You are careful.", tools=list(TOOLS.values()))


async def read_stream(_: object, events: AsyncIterable[object]) -> None:
    async for _ in events:
        pass


async def main() -> None:
    # With a handler of events, it asks for streams.
    finish((await agent.run(TASK, event_stream_handler=read_stream if STREAMS else None)).output)


asyncio.run(main())
