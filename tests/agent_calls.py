"""Rows of agents' model calls as a gateway appends them, and episodes of several calls, each extending the last one."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ludic.records import Message, Row, WeightSpan, new_id
from ludic.root import EpisodeClaim, Life, Root, claim_episode, held_life, seal_episode
from ludic.root.rows.calls import CallLog

SYSTEM = Message(role="system", content="be brief")
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def call_row(episode_id: str = "e", **values: Any) -> dict[str, Any]:
    """A row of an attempt 1; with response_tokens also their logprobs and version."""
    row = {
        "episode_id": episode_id,
        "attempt": 1,
        "call_id": new_id(),
        "event": "call",
        "dialect": "chat",
        "path": "/v1/chat/completions",
        "request_digest": "a" * 64,
        "retry_count": 0,
        **values,
    }
    if "response_tokens" in row:
        num = len(row["response_tokens"])
        row.setdefault("response_logprobs", -np.arange(num, dtype=np.float32))
        row.setdefault("weight_versions", (WeightSpan(version=0, start=0, end=num),))
    return row


def claimed(life: Life, episode_id: str = "e", attempt: int = 1) -> EpisodeClaim:
    key = {"key_digest": "b" * 64, "group_id": f"group-{episode_id}", "env_name": "env", "env_example_id": "1"}
    return claim_episode(life, episode_id=episode_id, attempt=attempt, **key)


def conversation(episode_id: str = "e", num_calls: int = 3) -> Iterator[list[Row]]:
    """Intent and answer of each call; each extends the one before it, and answers its own number twice."""
    prompt, messages = tokens(1, 2, 3), (SYSTEM, Message(role="user", content="count"))
    base: dict[str, Any] = {}
    for number in range(num_calls):
        call_id, answer = new_id(), Message(role="assistant", content=f"{number} {number}")
        sampled = tokens(100 + number, 100 + number)
        row = call_row(
            episode_id,
            call_id=call_id,
            prompt_tokens=prompt,
            response_tokens=sampled,
            messages=messages,
            answer=answer,
            tools=TOOLS,
            finish_reason="stop",
            capture="sampler",
            model="tiny",
            **base,
        )
        yield [call_row(episode_id, event="intent", call_id=call_id), row]
        base = {"base_call_id": call_id, "base_length": len(prompt) + 2}
        base |= {"base_messages_call_id": call_id, "base_num_messages": len(messages) + 1}
        prompt = np.concatenate([prompt, sampled, tokens(200 + number)])
        messages = (*messages, answer, Message(role="user", content="on"))


def store(root: Root, life: Life, episodes: Sequence[Sequence[Sequence[Row]]]) -> None:
    """Append the calls of episodes, one after the other; each call is a file."""

    async def append() -> None:
        async with CallLog(root, life) as log:
            for calls in episodes:
                for rows in calls:
                    await log.append(*rows)

    asyncio.run(append())


def store_episodes(root: Root, *episode_ids: str, num_calls: int = 3, seal: bool = True) -> str:
    """Store sealed episodes of a life that has ended, one after the other, and return the life's worker_id."""
    with held_life(root) as life:
        claims = [claimed(life, episode_id) for episode_id in episode_ids]
        store(root, life, [list(conversation(episode_id, num_calls)) for episode_id in episode_ids])
        for claim in claims if seal else ():
            seal_episode(life, claim, end="complete", reward=0.5)
    return life.worker_id
