"""What every engine promises of requests that come and go at different times, tried on every implementation."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from engine_requests import LONGER_PROMPT, PROMPT, a_request, tokens_of

from ludic.engines.engine import Completion, Engine, generate_all
from ludic.errors import ConfigError


@pytest.mark.slow
def test_a_request_that_arrives_while_others_decode_gives_the_tokens_that_it_gives_alone(engine: Engine) -> None:
    if not engine.repeats_in_any_batch:
        pytest.skip("the engine does not promise it")
    prompts = [PROMPT, LONGER_PROMPT, np.arange(3, 43, dtype=np.int32)]
    requests = [
        a_request(
            prompts[seed % 3], seed=seed, temperature=(1.0, 0.0, 0.7)[seed % 3 - 1], max_tokens=10 + seed % 7 * 10
        )
        for seed in range(24)
    ]
    alone = [generate_all(engine, [request])[0] for request in requests]

    async def arrive_one_by_one() -> list[Completion]:
        tasks = []
        for request in requests:
            tasks.append(asyncio.ensure_future(engine.generate(request)))
            await engine.generate(a_request(seed=100 + len(tasks), max_tokens=1 + len(tasks) % 3))
        return await asyncio.gather(*tasks)

    arrived = asyncio.run(arrive_one_by_one())
    assert tokens_of(arrived) == tokens_of(alone)
    for one, other in zip(arrived, alone, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5, rtol=0)
        assert one.finish_reason == other.finish_reason


def test_threads_with_event_loops_of_their_own_may_generate_at_the_same_time(engine: Engine) -> None:
    requests = [a_request(seed=seed) for seed in range(12)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda request: generate_all(engine, [request])[0], requests))
    assert tokens_of(found) == tokens_of(generate_all(engine, requests))


def test_generate_all_works_within_an_event_loop(engine: Engine) -> None:
    async def within() -> list[Completion]:
        return generate_all(engine, [a_request(seed=seed) for seed in range(3)])

    assert tokens_of(asyncio.run(within())) == tokens_of(generate_all(engine, [a_request(seed=i) for i in range(3)]))


def test_requests_that_begin_while_weights_are_loaded_are_served(
    engine: Engine, model_folder: str, other_weights: str
) -> None:
    found: list[Completion] = []

    def load_five_times() -> None:
        for version in range(1, 6):
            # Of seventeen answers, one of sixteen askers had two: it asked for the second one after the last load.
            enough, until = len(found) + 17, time.monotonic() + 30
            while len(found) < enough:
                assert time.monotonic() < until
                time.sleep(0.001)
            engine.load_weights((model_folder, other_weights)[version % 2], version)

    async def ask(seed: int, loading: "asyncio.Future[None]") -> None:
        while not loading.done():
            found.append(await engine.generate(a_request(seed=seed, max_tokens=3)))

    async def keep_asking() -> None:
        loading = asyncio.ensure_future(asyncio.to_thread(load_five_times))
        await asyncio.gather(loading, *(ask(seed, loading) for seed in range(16)))

    asyncio.run(keep_asking())
    assert {completion.policy_version for completion in found} >= {0, 1, 2, 3, 4}


def test_a_cancelled_request_does_not_change_the_others(engine: Engine) -> None:
    requests = [a_request(seed=seed, max_tokens=60) for seed in range(6)]
    alone = [generate_all(engine, [request])[0] for request in requests]

    async def cancel_every_other() -> list[Completion]:
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        await engine.generate(a_request(max_tokens=2))
        for task in tasks[::2]:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends[::2])
        return [end for end in ends[1::2] if isinstance(end, Completion)]

    assert tokens_of(asyncio.run(cancel_every_other())) == tokens_of(alone[1::2])
    assert tokens_of(generate_all(engine, requests)) == tokens_of(alone)


@pytest.mark.slow
def test_cancelled_requests_free_their_slots(engine: Engine) -> None:
    """More than a full batch, none of which would end within this test."""
    endless = [a_request(temperature=0.0, max_tokens=500) for _ in range(300)]

    async def cancel_all() -> float:
        tasks = [asyncio.ensure_future(engine.generate(request)) for request in endless]
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        start = time.perf_counter()
        await engine.generate(a_request(max_tokens=2))
        return time.perf_counter() - start

    start = time.perf_counter()
    generate_all(engine, endless[:32])
    assert asyncio.run(cancel_all()) < (time.perf_counter() - start) / 2


def test_the_error_of_one_request_does_not_touch_the_others(engine: Engine) -> None:
    good = [a_request(seed=seed) for seed in range(3)]

    async def generate() -> list[Completion | BaseException]:
        empty, unknown = a_request(np.array([], dtype=np.int32)), a_request(np.array([64], dtype=np.int32))
        mixed = [good[0], empty, good[1], unknown, good[2]]
        return await asyncio.gather(*map(engine.generate, mixed), return_exceptions=True)

    ends = asyncio.run(generate())
    assert [type(end) for end in ends[1::2]] == [ConfigError, ConfigError]
    assert tokens_of(ends[::2]) == tokens_of(generate_all(engine, good))
