"""Episodes start as slots are free, in the order of their groups; an engine stays full while some wait elsewhere."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from line_counts import counted_lines

import ludic.rollouts.scheduler
from ludic.agents.requests import Ending, EpisodeRequest, ending
from ludic.engines.engine import Completion, GenerationRequest, SamplingParams
from ludic.environments.environment import Example
from ludic.environments.limits import LimitedEnvironments
from ludic.errors import ModelError
from ludic.records.rollout import Message, WeightSpan
from ludic.rollouts.scheduler import EngineCalls, Scheduler

ENVIRONMENTS = {"own": LimitedEnvironments("own", object)}


class Batch:
    """An engine of two sequences, each of which ends when a test says so."""

    name, repeats_in_any_batch, policy_version, max_length, max_batch = "batch", True, 0, 100, 2

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[None]] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        call = asyncio.get_running_loop().create_future()
        self.calls.append(call)
        try:
            await call
        finally:
            self.calls.remove(call)
        return Completion(
            tokens=np.array([1], np.int32),
            columns={"response_logprobs": np.zeros(1, np.float32)},
            finish_reason="stop",
            weight_versions=(WeightSpan(version=self.policy_version, start=0, end=1),),
        )

    def load_weights(self, folder: str, version: int) -> None:
        self.policy_version = version


ASKED = GenerationRequest(prompt_tokens=np.array([1], np.int32), params=SamplingParams(), seed=0)


def group(number: int, size: int = 2) -> Sequence[EpisodeRequest]:
    example = Example(example_id=str(number), messages=(Message(role="user", content="?"),))
    return [
        EpisodeRequest(
            env_name="own",
            example=example,
            params=SamplingParams(),
            seed=index,
            group_id=str(number),
            group_index=index,
            request_index=number * size + index,
            group_size=size,
            purpose="train",
        )
        for index in range(size)
    ]


async def turns() -> None:
    """Let all tasks that are ready run, some of which make others ready."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(main(), 20)

    asyncio.run(limited())


class Episodes:
    """Episodes that end when a test says so; their names are GROUP.INDEX."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Future[Any]] = {}

    async def __call__(self, environment: object, request: EpisodeRequest) -> list[Any]:
        name = f"{request.group_id}.{request.group_index}"
        self.running[name] = asyncio.get_running_loop().create_future()
        try:
            await self.running[name]
        finally:
            del self.running[name]
        return []

    def end(self, name: str) -> None:
        self.running[name].set_result(None)


@pytest.mark.parametrize("in_flight", [3, 10_000])
def test_closing_a_group_looks_at_its_own_episodes_alone(in_flight: int) -> None:
    """in_flight: most episodes of the other groups wait for a slot, or all of them run."""

    def num_lines(num_groups: int) -> int:
        endings: dict[str, Ending | None] = {}
        episodes, found = Episodes(), 0

        async def episode(environment: object, request: EpisodeRequest) -> list[Any]:
            endings[f"{request.group_id}.{request.group_index}"] = ending.get()
            return await episodes(environment, request)

        async def main() -> None:
            nonlocal found
            scheduler = Scheduler(episode, ENVIRONMENTS, {}, in_flight=in_flight, close_groups_at=1)
            for number in range(num_groups):
                scheduler.start(number, group(number, size=4))
            await turns()
            episodes.end("0.1")
            with counted_lines(ludic.rollouts.scheduler) as lines:
                await turns()
            found = lines.num
            closed = [name for name, of_episode in endings.items() if of_episode and of_episode.reason]
            assert closed == ["0.0", "0.2", "0.3"]
            assert list(episodes.running)[:2] == ["0.0", "0.2"]
            assert "0.3" in episodes.running  # one that waited begins, so that it has its row
            await scheduler.close()

        run(main)
        return found

    assert num_lines(2) == num_lines(400)


def test_the_oldest_group_gets_the_free_slots() -> None:
    async def main() -> None:
        episodes = Episodes()
        scheduler = Scheduler(episodes, ENVIRONMENTS, {}, in_flight=3)
        for number in (7, 8, 9):
            scheduler.start(number, group(number))
        await turns()
        assert list(episodes.running) == ["7.0", "7.1", "8.0"]
        assert not scheduler.has_room
        episodes.end("8.0")
        assert await scheduler.wait() == []
        await turns()
        assert list(episodes.running) == ["7.0", "7.1", "8.1"]
        episodes.end("7.1")
        episodes.end("7.0")
        done = await scheduler.wait()
        await turns()
        done += [] if done else await scheduler.wait()
        assert [each.begun.number for each in done] == [7]
        assert list(episodes.running) == ["8.1", "9.0", "9.1"]
        assert (scheduler.num_open, scheduler.num_running) == (2, 3)
        for name in list(episodes.running):
            episodes.end(name)
        done = []
        while scheduler.num_open:
            done += await scheduler.wait()
        done += await scheduler.wait(0)
        assert [each.begun.number for each in done] == [8, 9]
        assert scheduler.has_room

    run(main)


def test_as_many_episodes_run_as_keep_the_engine_full() -> None:
    async def main() -> None:
        batch, waiting = Batch(), []
        calls = EngineCalls(batch)

        async def episode(environment: object, request: EpisodeRequest) -> list[Any]:
            await calls.generate(ASKED)
            waiting.append(asyncio.get_running_loop().create_future())
            await waiting[-1]  # its environment takes long
            await calls.generate(ASKED)
            return []

        scheduler = Scheduler(episode, ENVIRONMENTS, {}, calls=calls)
        number = 0
        for expected in (2, 4, 6):
            while scheduler.has_room:
                scheduler.start(number, group(number, size=1))
                number += 1
                await turns()
            assert (scheduler.num_running, len(batch.calls)) == (expected, 2)
            for call in list(batch.calls):
                call.set_result(None)
            await turns()
        # Eight times max_batch is the most, whatever they wait for.
        while len(waiting) < 16:
            while scheduler.has_room:
                scheduler.start(number, group(number, size=1))
                number += 1
                await turns()
            for call in list(batch.calls):
                call.set_result(None)
            await turns()
        assert scheduler.num_running == 16
        assert not scheduler.has_room
        await scheduler.close()
        assert scheduler.num_running == 0

    run(main)


def test_an_engine_that_does_not_say_how_much_it_holds_gets_what_the_settings_say() -> None:
    class Plain:
        policy_version = 0

    assert EngineCalls(Plain()).max_batch == 256  # type: ignore[arg-type]


def test_an_error_of_the_engine_ends_the_wait() -> None:
    async def main() -> None:
        async def episode(environment: object, request: EpisodeRequest) -> list[Any]:
            raise ModelError("NaN")

        scheduler = Scheduler(episode, ENVIRONMENTS, {}, in_flight=2)
        scheduler.start(0, group(0))
        with pytest.raises(ModelError, match="NaN"):
            await scheduler.wait()
        await scheduler.close()

    run(main)


def test_an_episode_that_is_cancelled_from_elsewhere_is_an_error_and_no_endless_wait() -> None:
    async def main() -> None:
        async def episode(environment: object, request: EpisodeRequest) -> list[Any]:
            raise asyncio.CancelledError

        scheduler = Scheduler(episode, ENVIRONMENTS, {}, in_flight=2)
        scheduler.start(0, group(0))
        with pytest.raises(RuntimeError, match="an episode was cancelled"):
            await scheduler.wait()

    run(main)


def test_while_it_is_paused_nothing_starts() -> None:
    async def main() -> None:
        episodes = Episodes()
        scheduler = Scheduler(episodes, ENVIRONMENTS, {}, in_flight=4)
        scheduler.is_paused = True
        scheduler.start(0, group(0))
        await turns()
        assert not episodes.running
        scheduler.is_paused = False
        assert await scheduler.wait(0.01) == []
        assert len(episodes.running) == 2
        await scheduler.close()

    run(main)


def test_held_requests_keep_their_slots() -> None:
    async def main() -> None:
        batch = Batch()
        calls = EngineCalls(batch)

        async def ask(environment: object, request: EpisodeRequest) -> list[Any]:
            await calls.generate(ASKED)
            return []

        scheduler = Scheduler(ask, ENVIRONMENTS, {}, calls=calls)
        for number in range(4):
            scheduler.start(number, group(number))
        await turns()
        assert (scheduler.num_running, len(batch.calls)) == (2, 2)
        calls.hold()
        for call in list(batch.calls):
            call.set_result(None)
        for _ in range(6):  # the next two begin, and wait; before, all others began too
            await scheduler.wait(0.03)
        assert (scheduler.num_running, calls.num_held, batch.calls) == (2, 2, [])
        calls.release()
        await scheduler.close()

    run(main)


def test_requests_that_are_held_wait_before_the_engine() -> None:
    async def main() -> None:
        batch = Batch()
        calls = EngineCalls(batch)
        calls.hold()
        waiting = asyncio.create_task(calls.generate(ASKED))
        await turns()
        assert (calls.num_running, batch.calls) == (0, [])
        calls.load_weights("folder", 3)
        calls.release()
        await turns()
        assert calls.num_running == 1
        batch.calls[0].set_result(None)
        assert (await waiting).policy_version == 3
        assert set(calls.first_tokens) == {3}
        cancelled = asyncio.create_task(calls.generate(ASKED))
        await turns()
        cancelled.cancel()
        with suppress(asyncio.CancelledError):
            await cancelled
        assert calls.num_running == 0

    run(main)
