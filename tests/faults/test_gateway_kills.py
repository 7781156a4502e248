"""A gateway that is really killed while agents call it: no answer that a client has seen is missing, and none is twice.

Each life serves the same root; agents keep their keys and repeat what they have no answer to.
"""

import asyncio
import json
import os
import random
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from gateway.scripted import Asked, Turn, says
from gateway.served import OWN_KEY, Episode, serve_until_killed, tokens_in_masks
from preloaded import fork_server

import ludic
from ludic.gateway.assembly import SealedEpisode, assemble_episodes
from ludic.gateway.episodes import EpisodeResult
from ludic.root.root import Root
from ludic.root.rows.calls import read_all_calls, read_prompt
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

NUM_AGENTS = 6
CALLS_A_LIFE = 400
processes = fork_server(
    "httpx2",
    "ludic.gateway.assembly",
    "ludic.gateway.conversation",
    "ludic.gateway.server",
    "ludic.models.tiny",
    "s3fs",
)


def script(asked: Asked) -> Turn:
    chance = random.Random(len(asked.prompt) * 1_000 + asked.number)
    return Turn(
        text=says(f"Answer {asked.number} {chance.randrange(1_000)}"), delay_s=chance.choice([0, 0, 0.01, 0.03])
    )


@dataclass
class Life:
    """A process that serves, until it is killed."""

    root_url: str
    journal: Path
    number: int
    url: str = ""
    process: Any = None

    async def start(self) -> None:
        hears, speaks = processes.Pipe(duplex=False)
        args = (
            serve_until_killed,
            dict(os.environ),
            speaks,
            self.root_url,
            script,
            self.journal,
            self.number * CALLS_A_LIFE,
        )
        self.process = processes.Process(target=_live, args=args, daemon=True)
        self.process.start()
        speaks.close()
        self.url = await asyncio.to_thread(hears.recv)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _live(function: Any, environment: dict[str, str], says: Any, root_url: str, *args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    function(root_url, says, *args)


@dataclass
class Seen:
    """What the agents have seen."""

    answers: dict[str, str] = field(default_factory=dict)
    """Text by the id of its call."""
    keys: set[str] = field(default_factory=set)
    """Idempotency keys of answered requests."""
    num_repeated: int = 0


class Run:
    """Agents that call one life after the other."""

    def __init__(self, root_url: str, journal: Path, seed: int) -> None:
        self._root_url, self._journal, self._chance = root_url, journal, random.Random(seed)
        self.life = Life(root_url, journal, 0)
        self.seen = Seen()
        self.episodes: list[Episode] = []
        self._is_over = False

    async def live(self, num_kills: int) -> None:
        async with httpx2.AsyncClient(timeout=30) as client:
            await self.life.start()
            for _ in range(NUM_AGENTS):
                self.episodes.append(await self._open(client))
            async with asyncio.TaskGroup() as agents:
                for episode in self.episodes:
                    agents.create_task(self._work(client, episode))
                for number in range(1, num_kills + 1):
                    await self._wait()
                    self.life.kill()
                    following = Life(self._root_url, self._journal, number)
                    await following.start()
                    self.life = following
                self._is_over = True
            for episode in self.episodes:
                await self._post(client, episode, "/seal", {"reward": 1.0})
        self.life.kill()

    async def _wait(self) -> None:
        """Wait for some answers, and a little more: however slow the machine is, each life answers some calls."""
        wanted = len(self.seen.answers) + self._chance.randint(1, 12)
        while len(self.seen.answers) < wanted:
            await asyncio.sleep(0.001)
        await asyncio.sleep(self._chance.uniform(0, 0.03))

    async def _open(self, client: httpx2.AsyncClient) -> Episode:
        url = self.life.url
        opened = await client.post(f"{url}/episodes", json={}, headers={"Authorization": f"Bearer {OWN_KEY}"})
        found = opened.raise_for_status().json()
        return Episode(url, found["episode_id"], found["attempt"], found["key"])

    async def _work(self, client: httpx2.AsyncClient, episode: Episode) -> None:
        """Talk until the last life; every sixth answer is forgotten, and the conversation begins again."""
        messages: list[dict[str, str]] = []
        number = 0
        while not self._is_over:
            number += 1
            if number % 6 == 1:
                messages = [{"role": "system", "content": f"You are agent {number}."}]
            messages.append({"role": "user", "content": f"Task {number}"})
            key = uuid.uuid4().hex
            answered = await self._post(
                client, episode, "/v1/chat/completions", {"model": "scripted", "messages": messages}, key
            )
            text = answered["choices"][0]["message"]["content"]
            call_id = answered["id"].removeprefix("chatcmpl-")
            assert call_id not in self.seen.answers, "two requests have one call"
            self.seen.answers[call_id] = text
            self.seen.keys.add(key)
            messages.append({"role": "assistant", "content": text})

    async def _post(
        self, client: httpx2.AsyncClient, episode: Episode, path: str, body: dict[str, Any], key: str | None = None
    ) -> Any:
        """Ask the life of now, again and again until it answers."""
        headers = episode.headers | ({} if key is None else {"Idempotency-Key": key})
        while True:
            url = self.life.url
            try:
                answered = await client.post(
                    f"{url}/e/{episode.episode_id}/{episode.attempt}{path}", json=body, headers=headers
                )
            except httpx2.TransportError:
                self.seen.num_repeated += 1
                while self.life.url == url:  # the next life is not there yet
                    await asyncio.sleep(0.005)
                continue
            # The keys are still known; nothing is refused but what the next life has to take over first.
            assert answered.status_code == 200, answered.text
            return answered.json()


def findings(run: Run, root: Root, journal: Path) -> Counter[str]:
    calls = read_all_calls(root)
    rows = calls.select(["call_id", "event", "idempotency_digest", "response_tokens", "response_logprobs"]).to_pylist()
    stored = Counter(row["call_id"] for row in rows if row["event"] == "call")
    keys = Counter(row["idempotency_digest"] for row in rows if row["event"] == "call")
    open_calls = {
        call_id for (call_id,) in ludic.open(root.url).sql("select call_id from model_calls where is_open").rows()
    }
    digests = set(calls["system_digest"].to_pylist()) - {None}
    episodes = [SealedEpisode(episode_id=each.episode_id, result=EpisodeResult(reward=1.0)) for each in run.episodes]
    assemblies = assemble_episodes(calls, episodes, {each: read_prompt(root, each) for each in digests})
    in_masks = tokens_in_masks(assemblies)
    in_calls = Counter(
        token
        for row in rows
        if row["event"] == "call"
        for token in zip(row["response_tokens"], row["response_logprobs"], strict=True)
    )
    samples = [json.loads(line) for line in journal.read_text().splitlines()]
    sampled = {token for each in samples for token in zip(each["tokens"], each["logprobs"], strict=True)}
    unfinished = {row.call_id for each in assemblies for row in each.audit if row.reason == "unfinished"}
    intents = {row["call_id"] for row in rows if row["event"] == "intent"}
    return Counter(
        seen=len(run.seen.answers),
        repeated=run.seen.num_repeated,
        open=len(open_calls),
        sampled=len(samples),
        lost=len(run.seen.answers.keys() - stored.keys()),
        doubled=sum(count > 1 for count in (*stored.values(), *keys.values())),
        hidden=len((intents - stored.keys()) ^ open_calls) + len(open_calls ^ unfinished),
        not_trained_once=sum((in_calls - in_masks).values()) + sum((in_masks - in_calls).values()),
        never_sampled=len(in_calls.keys() - sampled),
    )


def check_kills(root_url: str, folder: Path, num_kills: int) -> None:
    root = put_run(root_url, RunConfig(model="scripted", env=("moar_cats",)))
    run = Run(root_url, folder / "journal", seed=num_kills)
    asyncio.run(run.live(num_kills))
    found = findings(run, root, folder / "journal")
    print(dict(found))
    for wrong in ("lost", "doubled", "hidden", "not_trained_once", "never_sampled"):
        assert found[wrong] == 0, found
    # The kills came while calls were on their way.
    assert found["seen"] > 3 * num_kills
    assert found["repeated"] > num_kills
    assert found["open"] > num_kills / 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", ["folder", "s3"])
def test_a_gateway_killed_at_any_moment_keeps_every_answer_once(where: str, s3_bucket: str, tmp_path: Path) -> None:
    root_url = str(tmp_path / "root") if where == "folder" else f"{s3_bucket}/{uuid.uuid4()}"
    check_kills(root_url, tmp_path, int(os.environ.get("LUDIC_KILLS", "10")))
