"""Agents' calls that ludic wrote when the table was new (calls 1.0) read as they were written.

The store was written by `write` when that version came, and is never written again.
"""

from pathlib import Path

import numpy as np
import pytest
from agent_calls import SYSTEM, TOOLS, call_row, claimed, store, tokens

import ludic
from ludic.records import Message, Ragged, ToolCall
from ludic.root import Root, held_life, newest_episode_claim, seal_episode
from ludic.root.maintenance.verify import check_root
from ludic.root.rows.calls import read_calls, read_prompt, whole_columns, whole_messages, whole_prompts
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

IDS = [f"019aa000-0000-7000-8000-00000000000{number}" for number in range(3)]
CALLED = Message(
    role="assistant",
    content="",
    reasoning="add ☃",
    tool_calls=(ToolCall(id="call_0", name="add", arguments='{"a": 1}'),),
)
SAID = (SYSTEM, Message(role="user", content="1 + 1?"))
MORE = (*SAID, CALLED, Message(role="tool", content="2", tool_call_id="call_0"))
EXPERTS = np.arange(24, dtype=np.int16).reshape(6, 2, 2)


def write(url: str) -> None:
    root = put_run(url, RunConfig(model="tiny", env=("moar_cats",)))
    with held_life(root, "http://127.0.0.1:8000") as life:
        claim = claimed(life, "sum-1")
        first = call_row(
            "sum-1",
            call_id=IDS[0],
            prompt_tokens=tokens(1, 2, 3, 4),
            response_tokens=tokens(5, 6),
            kept_tokens=Ragged.of([[5, 9], [6]], np.int32),
            experts=EXPERTS[:5],
            messages=SAID,
            answer=CALLED,
            tools=TOOLS,
            hints={"session_id": "s"},
            stop=["\n\n"],
            asked='{"temperature": 0.2}',
            temperature=0.7,
            capture="sampler",
        )
        second = call_row(
            "sum-1",
            call_id=IDS[1],
            prompt_tokens=tokens(1, 2, 3, 4, 5, 6, 7),
            base_call_id=IDS[0],
            base_length=6,
            response_tokens=tokens(8),
            experts=np.concatenate([EXPERTS, EXPERTS[:1]]),
            messages=MORE,
            base_messages_call_id=IDS[0],
            base_num_messages=3,
            answer=Message(role="assistant", content="2"),
            tools=TOOLS,
            capture="sampler",
        )
        intents = [call_row("sum-1", event="intent", call_id=call_id) for call_id in IDS]
        store(root, life, [[[intents[0], first], [intents[1], second], [intents[2]]]])
        seal_episode(life, claim, end="complete", reward=0.25, reward_components={"sum": 0.25}, correct=True)


@pytest.fixture
def root() -> Root:
    return Root.open(str(Path(__file__).parent / "calls-v1.0"))


def test_calls_and_episodes_read_as_they_were_written(root: Root) -> None:
    stored = read_calls(root, "sum-1", 1)
    prompts, columns = whole_prompts(stored), whole_columns(stored)
    assert [prompts[call_id].tolist() for call_id in IDS[:2]] == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7]]
    np.testing.assert_array_equal(columns[IDS[1]]["experts"], np.concatenate([EXPERTS, EXPERTS[:1]]))
    assert [each.tolist() for each in columns[IDS[0]]["kept_tokens"]] == [[5, 9], [6]]
    digests = {each for each in stored["system_digest"].to_pylist() if each}
    assert whole_messages(stored, {each: read_prompt(root, each) for each in digests})[IDS[1]] == MORE
    with ludic.connect(root.url) as con:
        calls = con.sql("select call_id, event, temperature, hints from model_calls order by call_id").fetchall()
        episodes = con.sql('select episode_id, attempt, "end", reward, correct from agent_episodes').fetchall()
    assert [(call_id, event) for call_id, event, *_ in calls] == [
        (IDS[0], "call"),
        (IDS[1], "call"),
        (IDS[2], "intent"),
    ]
    assert calls[0][2:] == (np.float32(0.7), {"session_id": "s"})
    assert episodes == [("sum-1", 1, "complete", 0.25, True)]
    assert newest_episode_claim(root, "sum-1", 1).key_digest == "b" * 64


def test_verify_finds_nothing_wrong(root: Root) -> None:
    assert list(check_root(root).findings) == []
