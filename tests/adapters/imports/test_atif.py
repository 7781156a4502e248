"""Trajectories of ATIF: Harbor's files become rows, and ludic's rows go out and come back with the same tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from gateway.stored_calls import Calls, store, whole
from tiny_runs import create_root, query

import ludic
from ludic.adapters.imports.importing import import_files
from ludic.errors import ConfigError
from ludic.gateway import assemble_root
from ludic.records import Message, ToolCall
from ludic.root import Root, claim_life

HARBOR: dict[str, Any] = {
    "schema_version": "ATIF-v1.7",
    "session_id": "s",
    "agent": {"name": "terminus-2", "version": "2.0", "model_name": "qwen"},
    "steps": [
        {"step_id": 1, "source": "system", "message": "be brief"},
        {"step_id": 2, "source": "user", "message": "list"},
        {
            "step_id": 3,
            "source": "agent",
            "message": "",
            "reasoning_content": "hm",
            "tool_calls": [{"tool_call_id": "c1", "function_name": "bash", "arguments": {"cmd": "ls"}}],
            "observation": {"results": [{"source_call_id": "c1", "content": "a.txt"}]},
            "metrics": {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "logprobs": [-0.5, -0.25]},
        },
        {
            "step_id": 4,
            "source": "agent",
            "message": "a.txt",
            "metrics": {"prompt_token_ids": [1, 2, 3, 4, 5], "completion_token_ids": [6], "logprobs": [-1.0]},
        },
    ],
    "extra": {"reward": 1.0},
}
ROWS = """
select prompt_tokens, response_tokens, coalesce(action_mask, [true for each in response_tokens]), response_logprobs,
    episode_reward, capture
from rollouts order by prompt_tokens
"""


@pytest.fixture
def run(tmp_path: Path) -> Root:
    return create_root(str(tmp_path / "run"), "tiny")


def test_harbors_trajectory_becomes_a_row_with_its_tokens(run: Root, tmp_path: Path):
    file = tmp_path / "trajectory.json"
    file.write_text(json.dumps(HARBOR, indent=2))
    (report,) = import_files(run, [str(file)], "atif")
    assert (report.num_rollouts, report.refused) == (1, [])
    assert query(run, ROWS) == [
        ([1, 2], [3, 4, 5, 6], [True, True, False, True], [-0.5, -0.25, 0.0, -1.0], 1.0, "sampler")
    ]
    ((messages, steps),) = query(run, "select messages, agent_steps from rollouts")
    assert [(each["role"], each["content"], each["reasoning"], each["tool_call_id"]) for each in messages] == [
        ("system", "be brief", None, None),
        ("user", "list", None, None),
        ("assistant", "", "hm", None),
        ("tool", "a.txt", None, "c1"),
        ("assistant", "a.txt", None, None),
    ]
    assert [(step["action_target"], step["start"], step["end"]) for step in steps] == [
        ("external", 0, 2),
        ("env", 3, 4),
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": "ATIF-v2.0"}, "schema_version is 'ATIF-v2.0', wanted ATIF-v1.0 to ATIF-v1.7"),
        ({"steps": [{"source": "robot"}]}, r"steps\[0\].source is 'robot', wanted system, user or agent"),
        ({"steps": HARBOR["steps"][:2]}, "steps has no step of the agent"),
    ],
)
def test_a_bad_trajectory_is_refused_with_its_reason(run: Root, tmp_path: Path, change, reason):
    file = tmp_path / "trajectory.json"
    file.write_text(json.dumps({**HARBOR, **change}))
    with pytest.raises(ConfigError, match=reason):
        import_files(run, [str(file)], "atif")


@pytest.mark.slow
def test_rows_that_are_exported_come_back_with_the_same_tokens_and_logprobs(run: Root, tmp_path: Path):
    calls, search = Calls("e"), ToolCall(id="t1", name="search", arguments="no JSON")
    asked = (Message(role="user", content="hi"),)
    answers = [Message(role="assistant", content="", tool_calls=(search,)), Message(role="assistant", content="end")]
    more = (*asked, answers[0], Message(role="tool", content="found", tool_call_id="t1"))
    first = calls.add([1, 2], [10, 11], messages=asked, answer=answers[0])
    calls.add([*whole(first), 3], [12], messages=more, answer=answers[1])
    calls.add([*whole(first), 4], [13, 14], messages=more, answer=answers[1])
    store(claim_life(run, "http://a"), 0, calls, reward=0.5)
    assemble_root(run)

    file = tmp_path / "out.jsonl"
    ludic.open(run.url).export("atif", str(file))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [step["step_id"] for step in lines[0]["steps"]] == [1, 2, 3]
    copied = sorted([step.get("is_copied_context", False) for step in line["steps"]] for line in lines)
    assert copied == [[False, False, False], [False, True, False]]  # the fork's prompt holds the first answer
    back = create_root(str(tmp_path / "back"), "tiny")
    import_files(back, [str(file)], "atif")
    assert query(back, ROWS) == query(run, ROWS)
    arguments = "select distinct messages[2].tool_calls[1].arguments from rollouts"
    assert query(back, arguments) == [("no JSON",)]

    chat = tmp_path / "chat.jsonl"
    ludic.open(run.url).export("chat", str(chat))
    (line, _) = [json.loads(line) for line in chat.read_text().splitlines()]
    assert [message["role"] for message in line["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert line["messages"][1]["tool_calls"][0]["function"] == {"name": "search", "arguments": "no JSON"}
