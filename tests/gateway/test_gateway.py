"""Calls through the gateway, without HTTP: stored before they are answered, retried, replayed, taken over, refused."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway.scripted import Asked, says, scripted_agent
from tiny_runs import create_root

from ludic.engines.engine import SamplingParams
from ludic.gateway.calls import Answer, Caller, CallRequest
from ludic.gateway.config import GatewaySettings
from ludic.gateway.conversation import EngineBackend
from ludic.gateway.episodes import EpisodeFacts, OpenEpisode
from ludic.gateway.gateway import Gateway
from ludic.records.rollout import Message
from ludic.root.gateways import held_life
from ludic.root.root import Root
from ludic.root.rows.calls import read_calls, whole_prompts

SAMPLING = SamplingParams(max_tokens=64)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return create_root(str(tmp_path / "run"), "tiny")


def numbered(asked: Asked) -> str:
    """A turn that follows from the prompt and the seed alone."""
    return says(hashlib.sha256(f"{asked.request.seed} {asked.prompt}".encode()).hexdigest()[:8])


@asynccontextmanager
async def serving(
    root: Root,
    script: Any = numbered,
    *,
    lease_s: float = 60.0,
    address: str = "",
    sampling: SamplingParams = SAMPLING,
    **settings: Any,
) -> AsyncIterator[Gateway]:
    agent = scripted_agent(script)
    with ExitStack() as stack:
        life = stack.enter_context(held_life(root, address, lease_s=lease_s))
        gateway = Gateway(root, life, EngineBackend(agent), GatewaySettings(**settings), sampling)
        gateway.engine = agent.engine  # its log is the oracle
        await gateway.start()
        try:
            yield gateway
        finally:
            await gateway.drain()


def request(*texts: str, **values: Any) -> CallRequest:
    roles = ("user", "assistant")
    messages = tuple(Message(role=roles[index % 2], content=text) for index, text in enumerate(texts))
    return CallRequest(dialect="chat", messages=messages, **values)


def caller(asked: CallRequest, **values: Any) -> Caller:
    return Caller(request_digest=hashlib.sha256(repr(asked).encode()).hexdigest(), **values)


async def ask(
    gateway: Gateway, episode: OpenEpisode, *texts: str, asks: dict[str, Any] | None = None, **values: Any
) -> Answer:
    asked = request(*texts, **(asks or {}))
    return await gateway.call(episode, asked, caller(asked, **values))


async def converse(gateway: Gateway, episode: OpenEpisode, num_turns: int) -> list[Answer]:
    """A deterministic program: each turn follows from the answers before it."""
    said, answers = ["start"], []
    for _ in range(num_turns):
        answers.append(await ask(gateway, episode, *said))
        said += [answers[-1].message.content, f"after {answers[-1].message.content}"]
    return answers


def events(root: Root, episode: OpenEpisode) -> list[tuple[str, str]]:
    rows = read_calls(root, episode.episode_id, episode.attempt)
    return list(zip(rows["call_id"].to_pylist(), rows["event"].to_pylist(), strict=True))


def test_a_call_is_stored_before_its_answer_with_the_tokens_that_the_engine_sampled(root: Root) -> None:
    async def run() -> None:
        async with serving(root) as gateway:
            episode = await gateway.open_episode(facts=EpisodeFacts(env_name="mine"))
            answers = await converse(gateway, episode, 3)
            rows = read_calls(root, episode.episode_id, 1)
            assert sorted(events(root, episode)) == sorted(
                (answer.call_id, event) for answer in answers for event in ("intent", "call")
            )
            calls = rows.filter([event == "call" for event in rows["event"].to_pylist()])
            log = gateway.engine.log
            assert calls["response_tokens"].to_pylist() == [sample.tokens for sample in log]
            assert calls["response_logprobs"].to_pylist() == [sample.logprobs for sample in log]
            prompts = whole_prompts(rows)
            assert [prompts[answer.call_id].tolist() for answer in answers] == [
                sample.request.prompt_tokens.tolist() for sample in log
            ]
            assert calls["base_call_id"].to_pylist() == [None, answers[0].call_id, answers[1].call_id]
            assert calls["seed"].to_pylist() == [sample.request.seed for sample in log]

    asyncio.run(run())
