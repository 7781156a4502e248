"""Calls through the gateway, without HTTP: stored before they are answered, retried, replayed, taken over, refused."""

import asyncio
import functools
import hashlib
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filesystems import UnreliableFileSystem
from gateway.scripted import Asked, Turn, says, scripted_agent
from tiny_runs import create_root

from ludic.agents.requests import derive_seed
from ludic.engines.engine import SamplingParams
from ludic.errors import EngineError
from ludic.gateway.calls import Answer, Caller, CallRequest, RefusedCallError
from ludic.gateway.config import GatewaySettings
from ludic.gateway.conversation import EngineBackend
from ludic.gateway.episodes import EpisodeFacts, EpisodeResult, OpenEpisode
from ludic.gateway.gateway import Gateway
from ludic.records.rollout import Message
from ludic.root.gateways import held_life, newest_episode_claim
from ludic.root.root import Root
from ludic.root.rows.calls import read_calls, whole_prompts

SAMPLING = SamplingParams(max_tokens=64)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return create_root(str(tmp_path / "run"), "tiny")


@pytest.fixture
def unreliable_root() -> Iterator[Root]:
    """A root in memory; its `fs` is an UnreliableFileSystem."""
    root = create_root(f"memory://{uuid.uuid4()}", "tiny")
    yield replace(root, fs=UnreliableFileSystem())
    root.fs.rm(root.path, recursive=True)


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


def stored(root: Root, episode: OpenEpisode) -> dict[str, list[dict[str, Any]]]:
    """Stored rows by event."""
    found: dict[str, list[dict[str, Any]]] = {"intent": [], "call": [], "failed": []}
    for row in read_calls(root, episode.episode_id, episode.attempt).to_pylist():
        found[row["event"]].append(row)
    return found


async def refusal(call: Awaitable[Any]) -> RefusedCallError:
    with pytest.raises(RefusedCallError) as caught:
        await call
    return caught.value


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        asyncio.run(test(*args, **options))

    return run


# --- Calls --------------------------------------------------------------------------------------------------------


@in_loop
async def test_a_call_is_stored_before_its_answer_with_the_tokens_that_the_engine_sampled(root: Root) -> None:
    async with serving(root) as gateway:
        episode = await gateway.open_episode(facts=EpisodeFacts(env_name="mine"))
        answers = await converse(gateway, episode, 3)
        rows, log = stored(root, episode), gateway.engine.log
        ids = [answer.call_id for answer in answers]
        assert [row["call_id"] for row in rows["intent"]] == [row["call_id"] for row in rows["call"]] == ids
        assert [row["response_tokens"] for row in rows["call"]] == [sample.tokens for sample in log]
        assert [row["response_logprobs"] for row in rows["call"]] == [sample.logprobs for sample in log]
        assert [row["base_call_id"] for row in rows["call"]] == [None, *ids[:2]]
        assert [len(row["messages"]) for row in rows["call"]] == [1, 1, 1]  # the new ones alone
        prompts = whole_prompts(read_calls(root, episode.episode_id, 1))
        assert [prompts[each].tolist() for each in ids] == [s.request.prompt_tokens.tolist() for s in log]
        assert [s.request.seed for s in log] == [derive_seed(episode.seed, number) for number in range(3)]
        assert gateway.counts(episode).sampled_tokens == sum(len(sample.tokens) for sample in log)


@in_loop
async def test_a_retry_gets_the_answer_of_its_call_and_equal_calls_are_two(root: Root) -> None:
    async with serving(root, lambda asked: Turn(text=says(f"{asked.number}"), delay_s=0.02)) as gateway:
        episode = await gateway.open_episode()
        first = asyncio.create_task(ask(gateway, episode, "hi"))
        await asyncio.sleep(0)
        in_flight = await ask(gateway, episode, "hi", retry_count=1)
        assert in_flight == await first
        assert await ask(gateway, episode, "hi", retry_count=2) == in_flight
        assert (await ask(gateway, episode, "hi")).message.content == "1"
        keyed = await ask(gateway, episode, "hi", idempotency_key="a" * 64)
        assert await ask(gateway, episode, "hi", idempotency_key="a" * 64) == keyed
        assert len(gateway.engine.log) == 3
        assert (await refusal(ask(gateway, episode, "other", idempotency_key="a" * 64))).reason == "invalid"
        assert len(stored(root, episode)["call"]) == 3


@in_loop
async def test_a_call_goes_on_without_its_client_and_its_retry_gets_the_answer(root: Root) -> None:
    async with serving(root, lambda asked: Turn(text=says(f"{asked.number}"), delay_s=0.03)) as gateway:
        episode = await gateway.open_episode()
        gone = asyncio.create_task(ask(gateway, episode, "hi"))
        await asyncio.sleep(0.01)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        other = await ask(gateway, episode, "other")
        # It asks again, once without and once with a count of its retries.
        unknown = await ask(gateway, episode, "hi")
        assert (await ask(gateway, episode, "hi", retry_count=1)).message.content == "0"
        assert other.message.content == "1"
        await ask(gateway, episode, "hi")  # the answer has come by now: it is another call
        rows = stored(root, episode)["call"]
        assert [row["retry_of"] for row in rows] == [None, None, rows[0]["call_id"], None]
        assert [row["call_id"] for row in rows][2] == unknown.call_id


@in_loop
async def test_a_failed_call_is_stored_and_its_retry_samples_with_the_same_seed(root: Root) -> None:
    script = [Turn(error=EngineError("the GPU is gone")), says("well")]
    async with serving(root, script) as gateway:
        episode = await gateway.open_episode()
        error = await refusal(ask(gateway, episode, "hi"))
        assert (error.reason, str(error)) == ("engine", "the engine failed: the GPU is gone")
        assert isinstance(gateway.engine_error, EngineError)
        assert (await ask(gateway, episode, "hi", retry_count=1)).message.content == "well"
        rows = stored(root, episode)
        (failed,), (call,) = rows["failed"], rows["call"]
        assert (failed["status"], failed["error"]) == (500, "the engine failed: the GPU is gone")
        assert call["retry_of"] == failed["call_id"]
        assert call["seed"] == failed["seed"]
        assert len(rows["intent"]) == 2


@in_loop
async def test_calls_at_once_are_numbered_as_they_came_and_clients_only_shorten(root: Root) -> None:
    delays = [0.03, 0.02, 0.01]
    script = lambda asked: Turn(text=says("x" * 50), delay_s=delays[asked.number])  # noqa: E731
    async with serving(root, script, sampling=SamplingParams(max_tokens=20)) as gateway:
        episode = await gateway.open_episode(seed=5)
        limits = [{"max_tokens": 3}, {"max_tokens": 1000}, {}]
        asked = [ask(gateway, episode, text, asks=asks) for text, asks in zip("abc", limits, strict=True)]
        answers = await asyncio.gather(*asked)
        assert [answer.completion_length for answer in answers] == [3, 20, 20]
        assert [s.request.seed for s in gateway.engine.log] == [derive_seed(5, number) for number in range(3)]
        assert [row["max_tokens"] for row in stored(root, episode)["call"]] == [3, 20, 20]
        assert gateway.engine.most_running == 3


@in_loop
async def test_a_call_that_can_not_be_stored_is_answered_once_it_is(unreliable_root: Root) -> None:
    root = unreliable_root
    async with serving(root) as gateway:
        episode = await gateway.open_episode()
        await ask(gateway, episode, "first")
        root.fs.failures_before = [OSError("the disk is full")] * 2
        error = await refusal(ask(gateway, episode, "hi"))
        assert (error.reason, error.retry_after_s) == ("stopping", 1.0)
        root.fs.failures_before.clear()
        await asyncio.sleep(0.25)  # the log tries again after 0.2 s
        answer = await ask(gateway, episode, "hi", retry_count=1)
        assert len(gateway.engine.log) == 2
        assert answer.call_id in [row["call_id"] for row in stored(root, episode)["call"]]


# --- Episodes -----------------------------------------------------------------------------------------------------


@in_loop
async def test_a_key_opens_its_own_episode_until_it_ends_and_is_stored_nowhere(root: Root) -> None:
    async with serving(root) as gateway:
        one, two = await gateway.open_episode(episode_id="one"), await gateway.open_episode(episode_id="two")
        assert await gateway.find(one.key) is await gateway.find(one.key, "one", 1) is one
        assert await gateway.find(None, "two", 1) is two
        assert (await refusal(gateway.find(one.key, "two", 1))).reason == "wrong_key"
        assert (await refusal(gateway.find("sk-ludic-wrong"))).reason == "wrong_key"
        assert (await refusal(gateway.find(None, "three", 1))).reason == "not_found"
        assert (await refusal(gateway.find(None, "../one", 1))).reason == "not_found"
        assert (await refusal(gateway.open_episode(episode_id="../x"))).reason == "invalid"
        assert (await refusal(gateway.open_episode(episode_id="one"))).reason == "invalid"
        await gateway.score(one, reward=0.5, reward_components={"a": 0.5})
        await gateway.seal(one, EpisodeResult(exit_code=0))
        for call in (gateway.find(one.key), gateway.find(None, "one", 1), ask(gateway, one, "hi")):
            assert (await refusal(call)).reason == "sealed"
        claim = newest_episode_claim(root, "one", 1)
        assert (claim.end, claim.reward, dict(claim.agent)) == ("complete", 0.5, {"exit_code": 0})
        short = await gateway.open_episode(timeout_s=0.01)
        await asyncio.sleep(0.02)
        assert "expired at" in str(await refusal(gateway.find(short.key)))
        keys = [one.key, two.key, short.key]
        files = [path.read_bytes() for path in Path(root.path).rglob("*") if path.is_file()]
        assert not [key for key in keys for data in files if key.encode() in data]


@in_loop
async def test_sealing_waits_for_calls_in_flight_and_refuses_new_ones(root: Root) -> None:
    async with serving(root, lambda asked: Turn(text=says("well"), delay_s=0.05)) as gateway:
        episode = await gateway.open_episode()
        call = asyncio.create_task(ask(gateway, episode, "hi"))
        await asyncio.sleep(0.01)
        seal = asyncio.create_task(gateway.seal(episode, EpisodeResult(outcome="failed", error="it gave up")))
        gone = asyncio.create_task(gateway.seal(episode))
        await asyncio.sleep(0.01)
        gone.cancel()
        assert (await refusal(ask(gateway, episode, "more"))).reason == "sealed"
        assert (await call).message.content == "well"
        await seal
        assert gateway.num_open == 0
        assert gateway.counts(episode).num_calls == 1
        assert newest_episode_claim(root, episode.episode_id, 1).error == "it gave up"


@in_loop
async def test_limits_of_calls_and_episodes_and_a_stop_are_said_to_clients(root: Root) -> None:
    slow = lambda asked: Turn(text=says("well"), delay_s=0.05)  # noqa: E731
    async with serving(root, slow, max_in_flight=1, max_episodes=1) as gateway:
        episode = await gateway.open_episode()
        assert (await refusal(gateway.open_episode())).reason == "full"
        first = asyncio.create_task(ask(gateway, episode, "hi"))
        await asyncio.sleep(0.01)
        error = await refusal(ask(gateway, episode, "more"))
        assert (error.reason, error.retry_after_s) == ("full", 1.0)
        drained = asyncio.create_task(gateway.drain())
        await asyncio.sleep(0)
        assert (await refusal(ask(gateway, episode, "more"))).reason == "stopping"
        assert (await first).message.content == "well"
        await drained


# --- Take-over and replay -------------------------------------------------------------------------------------------


@in_loop
async def test_a_gateway_that_starts_again_knows_keys_answers_and_unfinished_calls(root: Root) -> None:
    async with serving(root) as gateway:
        whole = await converse(gateway, await gateway.open_episode(seed=9), 4)
    texts = ["start"] + [
        each for answer in whole for each in (answer.message.content, f"after {answer.message.content}")
    ]
    hanging = lambda asked: Turn(delay_s=60) if asked.number == 3 else numbered(asked)  # noqa: E731
    async with serving(root, hanging, drain_timeout_s=0.05) as gateway:
        opened = await gateway.open_episode(seed=9)
        before = await converse(gateway, opened, 2)
        with_logprobs = await ask(
            gateway, await gateway.open_episode(episode_id="e"), "hi", asks={"asks_logprobs": True}
        )
        lost = asyncio.create_task(ask(gateway, opened, *texts[:5]))
        await asyncio.sleep(0.02)
    assert (await refusal(lost)).reason == "stopping"
    async with serving(root) as gateway:
        episode = await gateway.find(opened.key)
        assert (episode.episode_id, episode.seed, episode.key) == (opened.episode_id, 9, None)
        assert await ask(gateway, episode, *texts[:3], retry_count=1) == before[1]
        other = await gateway.find(None, "e", 1)
        again = await ask(gateway, other, "hi", asks={"asks_logprobs": True}, retry_count=1)
        assert again.token_texts == with_logprobs.token_texts
        assert again.token_logprobs.tolist() == with_logprobs.token_logprobs.tolist()
        third = await ask(gateway, episode, *texts[:5], retry_count=1)
        fourth = await ask(gateway, episode, *texts[:7])
        assert [each.message for each in (*before, third, fourth)] == [each.message for each in whole]
        assert len(gateway.engine.log) == 2
        rows = stored(root, episode)
        unfinished = {row["call_id"] for row in rows["intent"]} - {row["call_id"] for row in rows["call"]}
        assert {row["retry_of"] for row in rows["call"]} == {None, *unfinished}
        assert rows["call"][2]["base_call_id"] == before[1].call_id
        assert newest_episode_claim(root, episode.episode_id, 1).number == 2


@in_loop
async def test_episodes_expire_also_those_of_a_gateway_that_has_ended(root: Root, monkeypatch: Any) -> None:
    monkeypatch.setattr("ludic.gateway.held_episodes.WATCH_S", 0.02)
    async with serving(root) as gateway:
        await gateway.open_episode(episode_id="one", timeout_s=0.1)
    async with serving(root, address="http://two") as gateway:
        await gateway.open_episode(episode_id="two", timeout_s=0.1)
        await asyncio.sleep(0.3)
        assert gateway.num_open == 0
    for name in ("one", "two"):
        claim = newest_episode_claim(root, name, 1)
        assert claim.end == "expired"
        assert claim.error.startswith("it was open for longer than its limit, until ")


@in_loop
async def test_calls_that_an_agent_does_not_ask_for_again_are_left_behind_when_it_ends(root: Root) -> None:
    async with serving(root) as gateway:
        before = await converse(gateway, await gateway.open_episode(episode_id="e"), 3)
    async with serving(root) as gateway:
        episode = await gateway.open_episode(episode_id="e", replay=True)
        await converse(gateway, episode, 1)
        await gateway.seal(episode)
    assert newest_episode_claim(root, "e", 1).left_behind == [answer.call_id for answer in before[1:]]


@pytest.mark.slow
@in_loop
async def test_an_episode_of_a_live_gateway_is_elsewhere_until_that_one_is_silent_for_its_lease(root: Root) -> None:
    async with serving(root, lease_s=1, address="http://one") as one, serving(root) as two:
        episode = await one.open_episode(episode_id="e")
        answer = await ask(one, episode, "hi")
        error = await refusal(two.find(episode.key))
        assert (error.reason, error.owner) == ("elsewhere", "http://one")
        one.life.renew = lambda: None  # as if this process were stopped
        await asyncio.sleep(1.0)
        taken = await two.find(None, "e", 1)
        assert await ask(two, taken, "hi", retry_count=1) == answer
        assert (await refusal(ask(one, episode, "more"))).reason == "stopping"
        assert (await refusal(ask(one, episode, "hi", retry_count=1))).reason == "stopping"  # nor a stored answer


@in_loop
async def test_a_program_that_runs_again_gets_its_stored_answers_and_then_samples_as_if_unbroken(root: Root) -> None:
    async with serving(root) as gateway:
        whole = await converse(gateway, await gateway.open_episode(seed=9), 5)
        opened = await gateway.open_episode(episode_id="e", seed=9)
        before = await converse(gateway, opened, 3)
    async with serving(root) as gateway:
        episode = await gateway.open_episode(episode_id="e", replay=True)
        assert (await refusal(gateway.find(opened.key))).reason == "wrong_key"
        again = await converse(gateway, episode, 5)
        assert again[:3] == before
        assert [answer.message for answer in again] == [answer.message for answer in whole]
        counts, log = gateway.counts(episode), gateway.engine.log
        assert (counts.num_replayed_calls, counts.num_calls) == (3, 2)
        assert counts.replayed_tokens == sum(answer.completion_length for answer in before)
        assert counts.sampled_tokens == sum(len(sample.tokens) for sample in log)
        assert len(stored(root, episode)["call"]) == 5
        # The agent runs a third time, in the same gateway, and asks something else after two turns.
        episode = await gateway.open_episode(episode_id="e", replay=True)
        assert await converse(gateway, episode, 2) == again[:2]
        await ask(gateway, episode, "else")
        assert newest_episode_claim(root, "e", 1).left_behind == [answer.call_id for answer in again[2:]]
        replayed = [answer.message.content for answer in again]
        third = ["start", replayed[0], f"after {replayed[0]}", replayed[1], f"after {replayed[1]}"]
        assert (await ask(gateway, episode, *third)).call_id != again[2].call_id
    async with serving(root) as gateway:
        episode = await gateway.open_episode(episode_id="e", replay=True)
        await converse(gateway, episode, 2)
        await ask(gateway, episode, "else")
        assert gateway.counts(episode).num_replayed_calls == 3
        assert gateway.engine.log == []


@in_loop
async def test_an_answer_that_held_a_secret_is_never_given_again_with_the_secret_masked(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "kFp3-9qLw-77aZ-x0"
    monkeypatch.setenv("OF_A_TOOL_API_KEY", secret)

    def script(asked: Asked) -> str:
        return says(f"the key is {secret}") if asked.prompt.count("hello") == 1 else says("done")

    async with serving(root, script) as gateway:
        episode = await gateway.open_episode(episode_id="e", seed=9)
        first = await ask(gateway, episode, "hello")
        assert secret in first.message.content
        assert await ask(gateway, episode, "hello", retry_count=1) == first
        await ask(gateway, episode, "hello", first.message.content, "hello")
    files = [path.read_bytes() for path in Path(root.path).rglob("*") if path.is_file()]
    assert not [data for data in files if secret.encode() in data]
    async with serving(root, script) as gateway:  # the agent goes on, and tries again
        episode = await gateway.find(episode.key)
        again = await ask(gateway, episode, "hello", retry_count=1)
        assert again.call_id != first.call_id
        assert again.message == first.message
    async with serving(root, script) as gateway:  # the agent is started again
        episode = await gateway.open_episode(episode_id="e", replay=True)
        third = await ask(gateway, episode, "hello")
        assert third.message == first.message
        await ask(gateway, episode, "hello", third.message.content, "hello")
        assert gateway.counts(episode).num_replayed_calls == 1
        await gateway.seal(episode)
        assert newest_episode_claim(root, "e", 1).left_behind == [first.call_id, again.call_id]


@in_loop
async def test_wrong_keys_start_few_threads(root: Root) -> None:
    async with serving(root) as gateway:
        await gateway.open_episode(episode_id="e")
        before = threading.active_count()
        tries = [asyncio.ensure_future(gateway.find(f"wrong {number}", "e", 1)) for number in range(300)]
        await asyncio.sleep(0)
        assert threading.active_count() - before <= 64
        assert {(await refusal(each)).reason for each in tries} == {"wrong_key"}
