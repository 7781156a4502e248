"""The calls of an episode in memory: which one a request repeats, replays, ids, shared tokens."""

import asyncio
import re
import tracemalloc
from datetime import UTC, datetime

import numpy as np
import pytest

from ludic.gateway.calls import Answer, Caller, CallRequest, Delivery, RefusedCallError, StoredCall
from ludic.gateway.episode_calls import EpisodeCalls, HeldCall
from ludic.records.rollout import Message, ToolCall


def caller(digest: str, key: str | None = None, retry: int | None = 0) -> Caller:
    return Caller(request_digest=digest, idempotency_key=key, retry_count=retry)


def stored(call: HeldCall, tokens=(), messages=()) -> StoredCall:
    return StoredCall(
        call_id=call.call_id,
        messages=tuple(messages),
        answer=Message(role="assistant", content=call.request_digest),
        tools_digest=None,
        prompt_tokens=np.array(tokens, np.int32),
        completion=None,
    )


def answer(call: HeldCall, num_tokens: int = 1) -> Answer:
    return Answer(
        call_id=call.call_id,
        created_at=datetime(2026, 11, 30, tzinfo=UTC),
        model="m",
        message=Message(role="assistant", content=call.request_digest),
        finish_reason="stop",
        stop_sequence=None,
        text=call.request_digest,
        prompt_length=0,
        completion_length=num_tokens,
    )


def make(calls: EpisodeCalls, asked: Caller, repeats: HeldCall | None = None, tokens=(), messages=()) -> HeldCall:
    call = calls.begin(asked, repeats)
    calls.finish(call, stored(call, tokens, messages), answer(call), None)
    return call


def earlier(*digests: str, unfinished: str = "") -> list[HeldCall]:
    """Calls of an earlier life, each of 10 sampled tokens; those in `unfinished` have no answer."""
    found = [HeldCall(request_digest=digest) for digest in digests]
    for call in found:
        call.state = "unfinished" if call.request_digest in unfinished else "stored"
        if call.state == "stored":
            call.stored, call.answer = stored(call), answer(call, 10)
    return found


def test_equal_requests_are_two_calls_and_a_retry_repeats_the_one_without_an_answer():
    calls = EpisodeCalls()
    first, second = make(calls, caller("a")), make(calls, caller("a"))
    assert calls.find(caller("a")) is None
    first.deliveries.append(Delivery(state="sent"))
    assert calls.find(caller("a", retry=1)) is second
    assert calls.find(caller("a", retry=1)) is first  # the second was repeated once; this is another client's retry
    assert calls.find(caller("a", retry=2)) is second
    assert calls.find(caller("b", retry=1)) is None  # its first request never arrived


async def hung_up() -> bool:
    return True


async def waits() -> bool:
    return False


@pytest.mark.parametrize(
    ("retry", "delivery", "is_repeated"),
    [
        (None, Delivery(state="lost"), True),
        (None, Delivery(is_gone=hung_up), True),
        (None, None, True),  # of an earlier life
        (1, Delivery(state="lost"), True),
        (0, Delivery(state="lost"), False),  # the client says that it is another call
        (None, Delivery(state="sent"), False),
        (None, Delivery(is_gone=waits), False),
        (None, Delivery(), False),
    ],
)
def test_an_equal_request_may_repeat_one_whose_answer_is_lost(retry, delivery, is_repeated):
    calls, asked = EpisodeCalls(), caller("a", retry=retry)
    first = make(calls, caller("a", retry=None))
    first.deliveries += [delivery] if delivery is not None else []
    second, third = calls.begin(asked, None), calls.begin(asked, None)
    for call in (second, third):
        call.deliveries.append(Delivery(state="lost"))
        call.retry_of = asyncio.run(calls.maybe_repeated(call, asked))
    assert second.retry_of == (first.call_id if is_repeated else None)
    # A chain names its first call; the second one's answer is lost in any case.
    assert third.retry_of == (first.call_id if is_repeated else None if retry == 0 else second.call_id)


def test_an_idempotency_key_names_one_call_with_one_body():
    calls = EpisodeCalls()
    first, other = make(calls, caller("a", key="k")), make(calls, caller("a", key="l"))
    assert calls.find(caller("a", key="k")) is first
    assert calls.find(caller("a", key="l")) is other
    with pytest.raises(RefusedCallError, match="came with another body") as refusal:
        calls.find(caller("b", key="k"))
    assert refusal.value.reason == "invalid"


def test_a_call_that_failed_is_sampled_again_with_its_number():
    calls = EpisodeCalls()
    make(calls, caller("a"))
    failed = calls.begin(caller("b"), None)
    failed.state = "failed"
    repeated = calls.find(caller("b", retry=1))
    assert repeated is failed
    again = make(calls, caller("b", retry=1), repeated)
    assert (failed.number, again.number, again.retry_of) == (1, 1, failed.call_id)
    assert calls.find(caller("b", retry=2)) is again
    assert make(calls, caller("c")).number == 2


def test_a_replay_answers_until_the_first_other_request_and_numbers_calls_as_an_unbroken_run():
    found = earlier("a", "b", "c", "d", "e", unfinished="c")
    calls = EpisodeCalls(found, is_replay=True)
    assert calls.earlier == []
    assert calls.replay(caller("b")) is found[1]  # b and a were sampled at the same time
    assert calls.replay(caller("a")) is found[0]
    assert [call.call_id for call in calls.earlier] == [found[0].call_id, found[1].call_id]
    unfinished = calls.replay(caller("c"))
    assert unfinished is found[2]
    assert unfinished.state == "unfinished"
    assert make(calls, caller("c"), unfinished).number == 2
    assert calls.is_replaying
    assert calls.left_behind == ()
    assert calls.replay(caller("x")) is None
    assert not calls.is_replaying
    assert calls.left_behind == (found[3].call_id, found[4].call_id)
    assert make(calls, caller("x")).number == 3
    assert calls.replay(caller("d")) is None  # after the end of a replay, all is sampled
    assert (calls.counts.num_replayed_calls, calls.counts.replayed_tokens) == (2, 20)
    assert (calls.counts.num_calls, calls.counts.sampled_tokens) == (2, 2)


def test_calls_of_an_earlier_life_keep_their_numbers():
    found = earlier("a", "b", "b", "c", "c", unfinished="")
    found[1].state, found[2].retry_of = "failed", found[1].call_id
    found[4].retry_of = found[3].call_id  # both were sampled, each with its own seed
    calls = EpisodeCalls(found)
    assert [call.number for call in found] == [0, 1, 1, 2, 3]
    assert make(calls, caller("d")).number == 4
    assert calls.find(caller("c", retry=1)) is found[3]


def test_previous_response_id_puts_the_earlier_conversation_before_the_messages():
    calls = EpisodeCalls()
    said = [Message(role="system", content="old"), Message(role="user", content="hi")]
    call = make(calls, caller("a"), messages=said)
    new = (Message(role="system", content="new"), Message(role="user", content="more"))
    request = CallRequest(dialect="responses", messages=new, previous_id=call.call_id)
    whole = calls.with_earlier(request)
    assert [each.content for each in whole.messages] == ["new", "hi", "a", "more"]
    whole = calls.with_earlier(CallRequest(dialect="responses", messages=new[1:], previous_id=call.call_id))
    assert [each.content for each in whole.messages] == ["old", "hi", "a", "more"]
    with pytest.raises(RefusedCallError, match="'nothing' is no stored response of this episode") as refusal:
        calls.with_earlier(CallRequest(dialect="responses", previous_id="nothing"))
    assert refusal.value.reason == "not_found"


def test_ids_of_tool_calls_are_unique_in_an_episode():
    calls = EpisodeCalls()
    said = Message(
        role="assistant",
        content="",
        tool_calls=tuple(ToolCall(id=name, name="f", arguments="{}") for name in ("one", "", "one")),
    )
    first = calls.with_unique_ids(calls.begin(caller("a"), None), said)
    second = calls.with_unique_ids(calls.begin(caller("b"), None), said)
    ids = [call.id for message in (first, second) for call in message.tool_calls]
    assert ids[0] == "one"
    assert all(re.fullmatch("c[0-9a-f]{8}", each) for each in ids[1:])
    assert len({*ids}) == 6


def test_growing_prompts_of_a_conversation_take_linear_memory_and_branches_do_not_mix():
    calls = EpisodeCalls()
    tokens, base = np.arange(10_000, dtype=np.int32), None
    tracemalloc.start()
    kept = []
    for turn in range(100):
        call = calls.begin(caller(f"{turn}"), None)
        calls.finish(call, stored(call, tokens), answer(call), base)
        kept.append((call, len(tokens)))
        base = call.call_id, len(tokens)
        tokens = np.append(tokens, np.full(100, turn, np.int32))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 500_000  # 100 whole prompts: 6 MB
    branch = calls.begin(caller("branch"), None)
    of_branch = np.append(np.arange(10_000, dtype=np.int32), [7, 7])
    calls.finish(branch, stored(branch, of_branch), answer(branch), (kept[0][0].call_id, 10_000))
    assert branch.stored.prompt_tokens.tolist() == of_branch.tolist()
    for call, length in kept:
        assert call.stored.prompt_tokens.tolist() == tokens[:length].tolist()
