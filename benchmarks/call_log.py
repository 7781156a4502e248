"""Measure calls per second of the log of agents' calls, and how long it keeps an event loop busy.

    python -m benchmarks.call_log

Clients in one process append the intent and the answer of their calls, each with 1,000 sampled tokens and logprobs, 200
new prompt tokens and 4 kB of new text, and wait for both. The last column is the time by which a sleeping task of the
same event loop wakes too late.
"""

import asyncio
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.measure import print_table
from ludic.records import Message, WeightSpan, new_id
from ludic.root import CALLS, Life, Root, claim_life
from ludic.root.rows import CallLog
from ludic.run import RunConfig, create_root
from ludic.settings import run_script

TEXT = "The quick brown fox jumps over the lazy dog. " * 45
SYSTEM = Message(role="system", content=TEXT)
TOOLS = tuple({"type": "function", "function": {"name": f"tool{n}", "description": TEXT}} for n in range(10))


def main(quick: bool = False) -> None:
    """Print a table.

    Args:
        quick: Store 64 calls of 8 clients, to check that the benchmark works.
    """
    rows = list[list[str]]()
    for num_clients in (8,) if quick else (1, 16, 64, 256):
        with tempfile.TemporaryDirectory() as folder:
            root = create_root(f"{folder}/run", RunConfig(model="tiny", env=("moar_cats",)))
            life = claim_life(root, lease_s=3600)
            num_calls = 64 if quick else min(4000, 100 * num_clients)
            rows.append([str(num_clients), *asyncio.run(_run(root, life, num_clients, num_calls))])
    columns = ("clients", "calls a second", "p50, ms", "p99, ms", "CPU a call, ms", "files", "loop late p99, ms")
    print_table("Calls that are stored before they are answered", columns, rows)


async def _run(root: Root, life: Life, num_clients: int, num_calls: int) -> list[str]:
    latencies, late = list[float](), list[float]()
    numbers = iter(range(num_calls))
    base = new_id()

    async def ask() -> None:
        for number in numbers:
            intent, answer = _call(number, base)
            since = time.perf_counter()
            await asyncio.gather(log.append(intent), log.append(answer))
            latencies.append(time.perf_counter() - since)

    async def tick() -> None:
        while True:
            since = time.perf_counter()
            await asyncio.sleep(0.002)
            late.append(time.perf_counter() - since - 0.002)

    async with CallLog(root, life) as log:
        await log.append(_call(0, base)[1])
        ticker = asyncio.create_task(tick())
        since, cpu_s = time.perf_counter(), time.process_time()
        await asyncio.gather(*(ask() for _ in range(num_clients)))
        wall_s, cpu_s = time.perf_counter() - since, time.process_time() - cpu_s
        ticker.cancel()
    p50, p99 = np.percentile(latencies, [50, 99]) * 1e3
    figures = num_calls / wall_s, p50, p99, cpu_s / num_calls * 1e3
    shown = [f"{figures[0]:,.0f}", *(f"{each:.2f}" for each in figures[1:])]
    return [*shown, str(len(CALLS.listed(root))), f"{np.percentile(late, 99) * 1e3:.1f}"]


def _call(number: int, base: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rows of a call's intent and answer."""
    rng, call_id = np.random.default_rng(number % 16), new_id()
    intent = {
        "episode_id": f"e{number % 100}",
        "attempt": 1,
        "call_id": call_id,
        "event": "intent",
        "dialect": "chat",
        "path": "/v1/chat/completions",
        "request_digest": "a" * 64,
        "retry_count": 0,
    }
    answer = {
        **intent,
        "event": "call",
        "prompt_tokens": rng.integers(0, 50_000, 3000).astype(np.int32),
        "base_call_id": base,
        "base_length": 2800,
        "response_tokens": rng.integers(0, 50_000, 1000).astype(np.int32),
        "response_logprobs": -rng.random(1000, np.float32),
        "weight_versions": (WeightSpan(version=0, start=0, end=1000),),
        "messages": (SYSTEM, *(Message(role="user", content=TEXT) for _ in range(3))),
        "base_messages_call_id": base,
        "base_num_messages": 3,
        "answer": Message(role="assistant", content=TEXT),
        "tools": TOOLS,
    }
    return intent, answer


if __name__ == "__main__":
    run_script(main)
