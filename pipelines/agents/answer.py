"""An agent in plain OpenAI calls: one call, whose answer is the final text.

ludic run runs/cats --model MODEL --env moar_cats --agent pipelines/agents/answer.py:run
"""

from typing import Any

from openai import AsyncOpenAI


async def run(example: dict[str, Any], client: AsyncOpenAI, model: str) -> str | None:
    """Answer the example's messages."""
    said = await client.chat.completions.create(model=model, messages=example["messages"])
    return said.choices[0].message.content
