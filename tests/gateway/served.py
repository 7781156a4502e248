"""A whole gateway on this machine for tests: scripted engine, prompts, store, HTTP; and an account of its tokens."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from gateway.scripted import Asked, Turn, scripted_agent

from ludic.agents.agent import Agent
from ludic.engines.engine import SamplingParams
from ludic.gateway.assembly import Assembly, SealedEpisode, assemble_episodes
from ludic.gateway.config import GatewaySettings, HttpSettings
from ludic.gateway.conversation import EngineBackend
from ludic.gateway.episodes import EpisodeResult, key_digest
from ludic.gateway.gateway import Gateway
from ludic.gateway.server import new_loop, running
from ludic.root.gateways import held_life
from ludic.root.root import Root
from ludic.root.rows.calls import read_calls, read_prompt

OWN_KEY = "sk-own-key-of-the-tests"


def post(url: str, body: Any, key: str) -> httpx2.Response:
    """Ask without reading the certificates of this machine, which takes longer than a call."""
    return httpx2.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60, verify=False)


@dataclass
class Episode:
    """An episode that is open over HTTP."""

    url: str
    """Of the gateway."""
    episode_id: str
    attempt: int
    key: str = field(repr=False)

    @property
    def base_url(self) -> str:
        """Below it are the calls of the episode, without /v1."""
        return f"{self.url}/e/{self.episode_id}/{self.attempt}"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def post(self, path: str, body: Any = None) -> httpx2.Response:
        return post(f"{self.base_url}{path}", body or {}, self.key)

    def seal(self, reward: float = 1.0) -> None:
        self.post("/seal", {"reward": reward}).raise_for_status()


@dataclass
class ServedGateway:
    """A gateway that runs in a thread of its own."""

    root: Root
    agent: Agent
    url: str = ""
    gateway: Gateway | None = None
    _loop: Any = None
    _stop: Any = None
    _failures: list[BaseException] = field(default_factory=list)

    def open_episode(self, **values: Any) -> Episode:
        opened = post(f"{self.url}/episodes", values, OWN_KEY)
        assert opened.status_code == 201, opened.text
        found = opened.json()
        return Episode(self.url, found["episode_id"], found["attempt"], found["key"])

    def wait_for_flight(self) -> None:
        """Wait until a call is in flight."""
        assert self.gateway is not None
        until = time.monotonic() + 60
        while not self.gateway.num_in_flight:
            assert time.monotonic() < until, "no call comes"
            time.sleep(0.002)

    def stop(self) -> None:
        """Let the gateway drain, as at the end of the block."""
        self._loop.call_soon_threadsafe(self._stop.set)

    def wait_until_idle(self) -> None:
        """Wait for the calls whose clients have gone away."""
        assert self.gateway is not None
        until = time.monotonic() + 60
        while self.gateway.num_in_flight:
            assert time.monotonic() < until, f"{self.gateway.num_in_flight} calls do not end"
            time.sleep(0.002)

    def assembly(self, episode: Episode, reward: float = 1.0) -> Assembly:
        """Rows and audit of an episode, from what is stored alone."""
        calls = read_calls(self.root, episode.episode_id, episode.attempt)
        digests = set(calls["system_digest"].to_pylist()) - {None}
        sealed = SealedEpisode(
            episode_id=episode.episode_id, attempt=episode.attempt, result=EpisodeResult(reward=reward)
        )
        return assemble_episodes(calls, [sealed], {each: read_prompt(self.root, each) for each in digests})[0]


def serve_until_killed(
    root_url: str, says: Connection, script: Callable[[Asked], Turn], journal: Path, first_number: int
) -> None:
    """Serve a gateway in this process, with the engine's log in a file; says the address, and never ends."""

    async def serve() -> None:
        agent = scripted_agent(script, journal=journal, first_number=first_number, tokens_a_call=64)
        root = Root.open(root_url, writable=True)
        with held_life(root) as life:
            gateway = Gateway(root, life, EngineBackend(agent), GatewaySettings(), SamplingParams(max_tokens=60))
            await gateway.start()
            async with running(gateway, own_key_digest=key_digest(OWN_KEY)) as url:
                says.send(url)
                await asyncio.Event().wait()

    with new_loop() as runner:
        runner.run(serve())


@contextmanager
def served(
    root: Root,
    agent: Agent,
    *,
    settings: GatewaySettings | None = None,
    http: HttpSettings | None = None,
    sampling: SamplingParams | None = None,
) -> Iterator[ServedGateway]:
    """Serve a gateway on a free port of 127.0.0.1, in a thread, until the block ends; then it drains."""
    here = ServedGateway(root, agent)
    started = threading.Event()

    async def serve() -> None:
        here._loop, here._stop = asyncio.get_running_loop(), asyncio.Event()
        with held_life(root) as life:
            backend = EngineBackend(agent)
            limits = sampling or SamplingParams(max_tokens=4_000)
            here.gateway = Gateway(root, life, backend, settings or GatewaySettings(), limits)
            await here.gateway.start()
            async with running(here.gateway, http, own_key_digest=key_digest(OWN_KEY)) as here.url:
                started.set()
                await here._stop.wait()
                await here.gateway.drain()

    def run() -> None:
        try:
            with new_loop() as runner:
                runner.run(serve())
        except BaseException as error:
            here._failures.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run)
    thread.start()
    started.wait(60)
    try:
        if not here._failures:
            yield here
    finally:
        if here._loop is not None and thread.is_alive():
            here._loop.call_soon_threadsafe(here._stop.set)
        thread.join(60)
        for failure in here._failures:
            raise failure


# --- The account -----------------------------------------------------------------------------------------------------


def tokens_in_masks(assemblies: Sequence[Assembly]) -> Counter[tuple[int, float]]:
    """How often each token with its logprob is in a mask of the rows."""
    found: Counter[tuple[int, float]] = Counter()
    for assembly in assemblies:
        for row in assembly.rollouts:
            mask = np.ones(len(row.response_tokens), bool) if row.action_mask is None else row.action_mask
            tokens, logprobs = row.response_tokens[mask].tolist(), row.response_logprobs[mask].tolist()
            found.update(zip(tokens, logprobs, strict=True))
    return found


def check_account(samples: Sequence[Any], assemblies: Sequence[Assembly], calls: Any) -> Counter[str]:
    """Check that each sampled token is in exactly one row's mask, or in the audit with a reason.

    samples: the engine's log. calls: stored rows of these episodes. Returns the tokens by where they went: trained, or
    a reason. A token is known by its id and its logprob, which no other has.
    """
    in_masks = tokens_in_masks(assemblies)
    audit: dict[str, list[Any]] = {}
    for assembly in assemblies:
        for row in assembly.audit:
            audit.setdefault(row.call_id, []).append(row)
    stored = {}
    for row in calls.select(
        ["call_id", "event", "response_tokens", "response_logprobs", "undelivered_tokens"]
    ).to_pylist():
        if row["event"] == "call":
            key = row["response_tokens"][0], row["response_logprobs"][0]
            assert key not in stored, f"call {row['call_id']} is stored twice"
            stored[key] = row
    where: Counter[str] = Counter()
    for sample in samples:
        if sample.completion is None:
            continue
        tokens = list(zip(sample.tokens, sample.logprobs, strict=True))
        call = stored[tokens[0]]  # each sampled call is stored, even if its client has gone
        delivered, left = len(call["response_tokens"]), len(call["undelivered_tokens"] or ())
        assert call["response_tokens"] + (call["undelivered_tokens"] or []) == sample.tokens
        counts = [in_masks[token] for token in tokens]
        assert counts in ([1] * delivered + [0] * left, [0] * len(tokens)), f"call {call['call_id']}: {counts}"
        reasons = {row.reason: row.num_tokens for row in audit[call["call_id"]] if row.fate == "dropped"}
        if counts[0]:
            where["trained"] += delivered
            assert set(reasons) <= {"undelivered"}
            assert reasons.get("undelivered", 0) == left
        else:
            assert None not in reasons
            assert sum(reasons.values()) == len(tokens), (reasons, len(tokens))
        where.update({reason: number for reason, number in reasons.items() if reason})
    assert sum(in_masks.values()) == where["trained"], "a row trains on tokens that were never sampled"
    return where
