"""Compare ludic's gateway with others before one fake engine: calls a second, latency, lost tokens, kills.

    python -m benchmarks.gateway --peers PEERS     # folder of environments, as benchmarks.gateway_peers names them

speed: 64 clients ask as fast as they are answered; every answer has 1,024 tokens (4 kB of int32) with logprobs, and an
episode has eight calls. added: 8 clients, and an engine that takes 100 ms: what a gateway adds to the p50 and p99 of
the engine's own server. On S3, ludic stores in a moto server on this machine.

lost: one agent's tree of calls through each gateway: turns, a branch, a compaction, a sub-agent, two helpers at once,
retries with and without an answer, and streams that the client ends. A sampled token is trained if it is in one row's
mask, reported if the gateway says why it is in none, doubled if it is in several, and else lost.

kills: clients ask, the gateway is killed (SIGKILL) and started again on what it kept. An answer that a client has seen
whole and that the gateway no longer has is lost.

The engine, the gateway and the clients are one process each, on the same cores. Contestants take turns.
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np

from benchmarks.gateway_engine import MODEL
from benchmarks.gateway_peers import DIRECT, GATEWAYS, LUDIC, Gateway, Kept, Served, wait_for
from benchmarks.measure import in_a_process, print_table
from benchmarks.ports import free_port
from benchmarks.s3_server import s3_server
from ludic.settings import run_script

_NUM_TOKENS = 1_024
_CALLS_AN_EPISODE = 8
_ENGINE_S = 0.1
_SYSTEM = "You are an agent that works in a folder."


def main(
    peers: Path,
    quick: bool = False,
    rounds: int = 3,
    kills: int = 10,
    only: Literal["speed", "lost", "kills"] | None = None,
) -> None:
    """Print tables.

    Args:
        peers: Folder of the other gateways' environments.
        quick: Ask each gateway for a second, and kill it once, to check that the benchmark works.
        rounds: Number of times that each gateway's speed is measured; medians are printed.
        kills: Number of kills of each gateway that keeps calls.
        only: The only table to make; none makes all.
    """
    gateways = [each for each in GATEWAYS if each.python(peers).exists()]
    for missing in set(GATEWAYS) - set(gateways):
        print(f"{missing.name} is left out: {missing.python(peers)} is missing", file=sys.stderr)
    seconds, rounds, kills = (1.0, 1, 1) if quick else (8.0, rounds, kills)
    with s3_server(0.0):
        keeping = [each for each in gateways if each.kept is not None]
        if only in (None, "speed"):
            speed(peers, [DIRECT, *gateways], seconds, rounds)
        if only in (None, "lost"):
            lost(peers, keeping)
        if only in (None, "kills"):
            killed(peers, keeping, kills)


# --- Requests --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Client:
    """One connection that stays open; the cheapest client there is, since it runs on the gateway's cores."""

    url: str
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, token: str, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the answer. Raises OSError or IncompleteReadError if the connection breaks."""
        await self.send(path, token, body)
        head, content = await self._head(), b""
        status = int(head.split(b" ", 2)[1])
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        assert self.reader is not None
        if b"content-length" in fields:
            content = await self.reader.readexactly(int(fields[b"content-length"]))
        else:
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                content += await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            await self.reader.readexactly(2)
        return status, content

    async def send(self, path: str, token: str, body: bytes) -> None:
        if self.writer is None:
            host = urlsplit(self.url)
            self.reader, self.writer = await asyncio.open_connection(host.hostname, host.port, limit=1 << 24)
        head = f"POST {path} HTTP/1.1\r\nHost: {urlsplit(self.url).netloc}\r\nAuthorization: Bearer {token}\r\n"
        self.writer.write(
            f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        await self.writer.drain()

    async def first_event(self) -> None:
        """Wait until an event of a stream has come."""
        await self._head()
        assert self.reader is not None
        await self.reader.readuntil(b"data: ")

    async def _head(self) -> bytes:
        assert self.reader is not None
        return await self.reader.readuntil(b"\r\n\r\n")

    def close(self) -> None:
        """End the connection at once, as a client that gives up."""
        if self.writer is not None:
            self.writer.transport.abort()
        self.reader = self.writer = None


def _body(messages: Sequence[Mapping[str, str]], **also: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 2_048, **also}).encode()


# --- The engine ------------------------------------------------------------------------------------------------------


@contextmanager
def engine(folder: Path, *args: str) -> Iterator[str]:
    """Run the fake engine's server; yields its URL."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.gateway_engine", "--port", str(port), *args]
    with subprocess.Popen(command) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}", process, folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


# --- speed -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Load:
    """What clients have seen."""

    seconds: float
    latencies: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    def quantile_ms(self, quantile: float) -> float:
        return 1e3 * float(np.quantile(self.latencies, quantile)) if self.latencies else float("nan")


def speed(peers: Path, gateways: Sequence[Gateway], seconds: float, rounds: int) -> None:
    """Print calls a second and what each gateway adds to the engine's latency."""
    full: dict[str, list[Load]] = {each.name: [] for each in gateways}
    slow: dict[str, list[Load]] = {each.name: [] for each in gateways}
    for _ in range(rounds):
        for found, num_clients, latency_s in ((full, 64, 0.0), (slow, 8, _ENGINE_S)):
            for gateway in gateways:
                found[gateway.name].append(_measured(peers, gateway, num_clients, latency_s, seconds))
    rows = []
    for gateway in gateways:
        loads, late = full[gateway.name], slow[gateway.name]
        added = [
            median(
                mine.quantile_ms(quantile) - direct.quantile_ms(quantile)
                for mine, direct in zip(late, slow[DIRECT.name], strict=True)
            )
            for quantile in (0.5, 0.99)
        ]
        ours = median(mine.rate / our.rate for mine, our in zip(loads, full[LUDIC.name], strict=True))
        failed = sum((load.failed for load in (*loads, *late)), Counter[str]())
        rates = median(load.rate for load in loads)
        rows.append(
            [
                gateway.name,
                gateway.keeps,
                f"{rates:,.0f}",
                f"{ours:.2f}x",
                *(f"{each:.1f} ms" for each in added),
                ", ".join(f"{count} {what}" for what, count in failed.items()) or "0",
            ]
        )
    columns = ["", "keeps calls in", "calls/s", "of ludic's", "adds to p50", "adds to p99", "failed"]
    print_table(f"gateway: answers of {_NUM_TOKENS:,} tokens", columns, rows)


def _measured(peers: Path, gateway: Gateway, num_clients: int, latency_s: float, seconds: float) -> Load:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        args = ("--num-tokens", str(_NUM_TOKENS), "--latency-s", str(latency_s))
        url = stack.enter_context(engine(folder, *args))
        if gateway is not DIRECT:
            own = {"num_tokens": _NUM_TOKENS, "latency_s": latency_s}
            url = stack.enter_context(gateway.serving(peers, url, folder, **own)).url
        return in_a_process(_load, gateway.name, url, num_clients, seconds)


def _load(name: str, url: str, num_clients: int, seconds: float) -> Load:
    """Ask with many clients; the first second is not counted."""
    gateway = next(each for each in (DIRECT, *GATEWAYS) if each.name == name)
    load = Load(seconds)
    body = [_body([_said("system", _SYSTEM), _said("user", f"Task {each}")]) for each in range(_CALLS_AN_EPISODE)]

    async def ask(number: int, begin: float) -> None:
        client, episode = Client(url), 0
        while time.monotonic() < begin + seconds:
            episode += 1
            session = f"e{number}-{episode}"
            token = gateway.key.format(session=session)
            for each in body:
                since = time.monotonic()
                status, _ = await client.post(gateway.path.format(session=session), token, each)
                now = time.monotonic()
                if begin < now < begin + seconds:
                    if status == 200:
                        load.latencies.append(now - since)
                    else:
                        load.failed[str(status)] += 1
        client.close()

    async def ask_all() -> None:
        begin = time.monotonic() + 1
        await asyncio.gather(*(ask(number, begin) for number in range(num_clients)))

    asyncio.run(ask_all())
    return load


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# --- lost ------------------------------------------------------------------------------------------------------------


def lost(peers: Path, gateways: Sequence[Gateway]) -> None:
    """Print what each gateway makes of the tokens of one tree of calls."""
    rows = []
    for gateway in gateways:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            log = folder / "samples.jsonl"
            url = stack.enter_context(engine(folder, "--latency-s", "0.1", "--log", str(log)))
            served = stack.enter_context(gateway.serving(peers, url, folder, latency_s=0.1, samples=log))
            asyncio.run(_Tree(gateway, served.url, "tree").grow())
            time.sleep(1)
            assert gateway.kept is not None
            kept = gateway.kept(served, "tree")
            sampled = [logprob for line in log.read_text().splitlines() for logprob in json.loads(line)["logprobs"]]
            rows.append([gateway.name, *_accounts(sampled, kept)])
            print("lost:", *rows[-1], file=sys.stderr)
    columns = ["", "sampled", "trained", "reported", "lost", "doubled", "trained, never sampled", "rows reported"]
    print_table("gateway: tokens of one tree of calls", columns, rows)


def _accounts(sampled: Sequence[float], kept: Sequence[Kept]) -> list[str]:
    """Count sampled tokens, each known by its logprob, by what was kept of them."""
    trained = Counter(np.float32(each) for row in kept if row.reason is None for each in row.logprobs)
    reported = {np.float32(each) for row in kept if row.reason is not None for each in row.logprobs}
    known = [np.float32(each) for each in sampled]
    is_lost = [each for each in known if each not in trained and each not in reported]
    counts = (
        len(known),
        sum(trained[each] > 0 for each in known),
        sum(each in reported and not trained[each] for each in known),
        len(is_lost),
        sum(max(0, trained[each] - 1) for each in known),
        len(trained.keys() - set(known)),
    )
    reasons = Counter(row.reason for row in kept if row.reason is not None)
    return [*(f"{each:,}" for each in counts), ", ".join(f"{count} {reason}" for reason, count in reasons.items())]


class _Tree:
    """An agent that works, forgets, delegates, asks again and gives up."""

    def __init__(self, gateway: Gateway, url: str, session: str) -> None:
        self._url, self._path = url, gateway.path.format(session=session)
        self._token = gateway.key.format(session=session)
        self._random = random.Random(7)

    async def grow(self) -> None:
        main = await self._turns([_said("system", _SYSTEM), _said("user", "Begin.")], 4)
        # A branch from the second turn, and the first branch goes on.
        await self._turns([*main[:5], _said("user", "Try something else.")], 2)
        main = await self._turns([*main, _said("user", "Go on.")], 2)
        main = await self._retries([*main, _said("user", "And now?")])
        compacted = [main[0], _said("user", f"Summary: {main[-1]['content'][:80]}. Go on.")]
        main = await self._turns(compacted, 3)
        helper = [_said("system", "You are a helper."), _said("user", "Find the file.")]
        await self._turns(helper, 3)
        # Two helpers that begin alike, at once.
        await asyncio.gather(self._turns(helper, 2), self._turns(helper, 2))
        await self._streams([*main, _said("user", "Stream it.")])

    async def _turns(self, messages: Sequence[dict[str, str]], num_turns: int) -> list[dict[str, str]]:
        """Ask, and answer with an observation; returns the messages up to the last answer."""
        said = list(messages)
        for turn in range(num_turns):
            if turn:
                said.append(_said("user", f"Output {self._random.randrange(1_000)}"))
            said.append(_said("assistant", await self._answer(said)))
        return said

    async def _answer(self, messages: Sequence[Mapping[str, str]], **also: Any) -> str:
        client = Client(self._url)
        status, content = await client.post(self._path, self._token, _body(messages, **also))
        client.close()
        if status != 200:
            raise RuntimeError(f"{self._url} answers {status}: {content[:500]!r}")
        return str(json.loads(content)["choices"][0]["message"]["content"])

    async def _retries(self, messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
        """A request that is given up before its answer and sent again; then one whose answer is asked for twice."""
        given_up = Client(self._url)
        await given_up.send(self._path, self._token, _body(messages))
        await asyncio.sleep(0.05)
        given_up.close()
        said = [*messages, _said("assistant", await self._answer(messages)), _said("user", "Once more?")]
        await self._answer(said)
        return [*said, _said("assistant", await self._answer(said))]

    async def _streams(self, messages: Sequence[dict[str, str]]) -> None:
        """A stream that the client ends after its first event, and another one that it does not wait for."""
        for is_read in (True, False):
            client = Client(self._url)
            await client.send(self._path, self._token, _body(messages, stream=True))
            if is_read:
                await client.first_event()
            else:
                await asyncio.sleep(0.02)
            client.close()
            await asyncio.sleep(0.3)


# --- kills -----------------------------------------------------------------------------------------------------------


def killed(peers: Path, gateways: Sequence[Gateway], kills: int) -> None:
    """Print how many answers that clients have seen are gone after a kill."""
    rows = []
    for gateway in gateways:
        seen = gone = 0
        for number in range(kills):
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                log = folder / "samples.jsonl"
                url = stack.enter_context(engine(folder, "--latency-s", "0.005", "--log", str(log)))
                with gateway.serving(peers, url, folder, latency_s=0.005, samples=log) as served:
                    answers = asyncio.run(_until_killed(gateway, served, random.Random(number)))
                time.sleep(0.2)
                with gateway.serving(peers, url, folder, latency_s=0.005, samples=log) as served:
                    seen += sum(answers.values())
                    gone += sum(
                        max(0, count - _num_kept(gateway, served, session)) for session, count in answers.items()
                    )
        rows.append([gateway.name, gateway.keeps, f"{kills}", f"{seen:,}", f"{gone:,}"])
        print("kills:", *rows[-1], file=sys.stderr)
    print_table("gateway: kills", ["", "keeps calls in", "kills", "answers seen", "of them gone"], rows)


def _num_kept(gateway: Gateway, served: Served, session: str) -> int:
    """Return the number of calls of a session that a gateway still has; each is a row, since none extends another."""
    assert gateway.kept is not None
    try:
        return sum(len(row.logprobs) > 0 for row in gateway.kept(served, session))
    except OSError:
        return 0  # it no longer knows the session


async def _until_killed(gateway: Gateway, served: Served, chance: random.Random) -> Mapping[str, int]:
    """Ask with 16 clients and kill the gateway meanwhile; returns the answers that each session has seen."""
    answers: Counter[str] = Counter()

    async def ask(number: int) -> None:
        client, session = Client(served.url), f"k{number}"
        token = gateway.key.format(session=session)
        for call in range(10_000):
            body = _body([_said("system", _SYSTEM), _said("user", f"Task {call} of {number}")])
            try:
                status, _ = await client.post(gateway.path.format(session=session), token, body)
            except (OSError, asyncio.IncompleteReadError):
                return
            answers[session] += status == 200

    async def kill() -> None:
        await asyncio.sleep(chance.uniform(0.3, 1.5))
        served.process.send_signal(signal.SIGKILL)

    await asyncio.gather(kill(), *map(ask, range(16)))
    return answers


if __name__ == "__main__":
    run_script(main, description=__doc__)
