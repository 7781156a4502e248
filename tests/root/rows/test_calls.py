"""The log of agents' calls: stored as differences, read back whole, acknowledged in order, never lost."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from agent_calls import SYSTEM, TOOLS, call_row, claimed, tokens
from tiny_runs import create_root

from ludic.errors import FencedError, InvalidBatchError, NameTakenError, StoreError
from ludic.records import Message, Ragged
from ludic.root import CALLS, Root, claim_life, newest_episode_claim, open_episodes_of, seal_episode, take_over
from ludic.root.rows.calls import CallLog, read_calls, read_prompt, whole_columns, whole_messages, whole_prompts

ASKED = Message(role="user", content="hi")


@pytest.fixture
def run(tmp_path: Path) -> Root:
    return create_root(str(tmp_path / "run"), "tiny")


def test_an_intent_is_stored_alone_or_with_an_answer_that_is_ready_soon(run: Root) -> None:
    life = claim_life(run)
    claimed(life)

    async def append() -> None:
        async with CallLog(run, life) as log:
            await log.append(call_row(event="intent"))
            soon = call_row(prompt_tokens=tokens(1), response_tokens=tokens(2), answer=SYSTEM)
            intent = asyncio.create_task(log.append(call_row(event="intent", call_id=soon["call_id"])))
            await asyncio.sleep(0)
            await asyncio.gather(log.append(soon), intent)

    asyncio.run(append())
    files = [pq.read_table(f"{run.path}/{CALLS.name(each)}")["event"].to_pylist() for each in CALLS.listed(run)]
    assert files == [["intent"], ["intent", "call"]]


def test_calls_are_stored_as_differences_and_read_back_whole(run: Root) -> None:
    life = claim_life(run)
    claimed(life)
    answer = Message(role="assistant", content="hello")
    experts = np.arange(24, dtype=np.int16).reshape(6, 2, 2)
    first = call_row(
        prompt_tokens=tokens(1, 2, 3, 4),
        response_tokens=tokens(5, 6),
        kept_tokens=Ragged.of([[5, 9], [6]], np.int32),
        experts=experts[:5],
        messages=(SYSTEM, ASKED),
        answer=answer,
        tools=TOOLS,
    )
    more = (SYSTEM, ASKED, answer, Message(role="user", content="more"))
    second = call_row(
        prompt_tokens=tokens(1, 2, 3, 4, 5, 6, 7),
        base_call_id=first["call_id"],
        base_length=6,
        response_tokens=tokens(8),
        experts=np.concatenate([experts, experts[:1]]),
        messages=more,
        base_messages_call_id=first["call_id"],
        base_num_messages=3,
        answer=Message(role="assistant", content="bye"),
        tools=TOOLS,
    )

    async def append() -> None:
        async with CallLog(run, life) as log:
            await log.append(call_row(event="intent", call_id=first["call_id"]), first)
            await log.append(second)

    asyncio.run(append())
    stored = read_calls(run, "e", 1)
    assert stored["event"].to_pylist() == ["intent", "call", "call"]
    assert stored["new_prompt_tokens"].to_pylist() == [None, [1, 2, 3, 4], [7]]
    assert [None if each is None else len(each) for each in stored["experts"].to_pylist()] == [None, 5, 2]
    assert [[each["content"] for each in of_row] for of_row in stored["messages"].to_pylist()[1:]] == [["hi"], ["more"]]
    prompts = whole_prompts(stored)
    assert prompts[second["call_id"]].tolist() == [1, 2, 3, 4, 5, 6, 7]
    columns = whole_columns(stored)
    np.testing.assert_array_equal(columns[second["call_id"]]["experts"], second["experts"])
    assert [each.tolist() for each in columns[first["call_id"]]["kept_tokens"]] == [[5, 9], [6]]
    assert "kept_tokens" not in columns[second["call_id"]]
    (tools,), (system,) = (set(stored[f"{name}_digest"].to_pylist()[1:]) for name in ("tools", "system"))
    assert read_prompt(run, tools) == list(TOOLS)
    messages = whole_messages(stored, {system: read_prompt(run, system)})
    assert messages[second["call_id"]] == more


def test_a_bad_row_is_refused_and_others_are_stored(run: Root) -> None:
    life = claim_life(run)
    claimed(life)
    good = call_row(prompt_tokens=tokens(1), response_tokens=tokens(2))
    short = call_row(prompt_tokens=tokens(1), response_tokens=tokens(2, 3), response_logprobs=np.zeros(1, np.float32))
    half = call_row(prompt_tokens=tokens(1), messages=(Message(role="user", content="\ud800"),))

    async def append() -> list[Any]:
        async with CallLog(run, life) as log:
            return await asyncio.gather(*(log.append(row) for row in (short, half, good)), return_exceptions=True)

    errors = asyncio.run(append())
    assert [type(error) for error in errors] == [InvalidBatchError, InvalidBatchError, type(None)]
    assert "response_logprobs has length 1, response_tokens has 2" in str(errors[0])
    assert read_calls(run, "e", 1)["call_id"].to_pylist() == [good["call_id"]]


def test_a_failing_store_fails_the_waiting_calls_loses_nothing_and_recovers(unreliable_root: Root) -> None:
    life, fs = claim_life(unreliable_root), unreliable_root.fs
    claimed(life)
    rows = [call_row(prompt_tokens=tokens(1), response_tokens=tokens(number)) for number in range(4)]

    async def append() -> list[Any]:
        async with CallLog(unreliable_root, life) as log:
            await log.append(rows[0])
            fs.failures_before = [OSError("the disk is full")]
            with pytest.raises(StoreError, match="the disk is full"):
                await log.append(rows[1])
            fs.failures_after = [OSError("the answer is lost")]
            found = await asyncio.gather(*map(log.append, rows[2:]), return_exceptions=True)
            return [type(each) for each in found]

    asyncio.run(append())
    stored = read_calls(unreliable_root, "e", 1)
    assert sorted(stored["call_id"].to_pylist()) == sorted(row["call_id"] for row in rows)
    numbers = sorted(int(name.rpartition("-")[2].removesuffix(".parquet")) for name in fs.written if "parquet" in name)
    assert sorted(set(numbers)) == list(range(len(set(numbers)))), "numbers have no gaps"


def test_a_life_that_lost_its_lease_acknowledges_nothing_after_another_took_its_episodes(run: Root) -> None:
    lost, mine, third = claim_life(run), claim_life(run), claim_life(run)
    claim = claimed(lost)
    kept, late = (call_row(prompt_tokens=tokens(1), response_tokens=tokens(number)) for number in (2, 3))

    async def append() -> None:
        async with CallLog(run, lost) as log:
            await log.append(kept)
            lost._renewed -= lost.record.lease_s  # as if nothing had been renewed since
            taken = take_over(mine, claim)
            assert taken is not None
            assert (taken.number, taken.worker_id, taken.key_digest) == (2, mine.worker_id, claim.key_digest)
            with pytest.raises(FencedError, match="was not renewed"):
                await log.append(late)

    asyncio.run(append())
    with pytest.raises(FencedError, match="was not renewed"):
        lost.renew()
    with pytest.raises(FencedError, match="was not renewed"):
        seal_episode(lost, claim, end="complete")
    assert take_over(third, claim) is None, "the number is taken"
    assert kept["call_id"] in read_calls(run, "e", 1)["call_id"].to_pylist()
    assert [each.life for each in open_episodes_of(run)] == [mine.number]
    newest = newest_episode_claim(run, "e", 1)
    sealed = seal_episode(mine, newest, end="complete", reward=1.0)
    assert newest_episode_claim(run, "e", 1) == sealed
    assert open_episodes_of(run) == []
    with pytest.raises(NameTakenError, match="attempt 1 of episode e exists"):
        claimed(mine)
