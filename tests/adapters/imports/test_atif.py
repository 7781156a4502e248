"""Trajectories of ATIF: Harbor's files become rows, and all that ludic exports comes back."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway.stored_calls import Calls, store, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import as_plain, changed, make_batch, rollout_batches
from tiny_runs import create_root, query

from ludic.adapters.imports.formats import load_format
from ludic.adapters.imports.importing import import_file, import_files
from ludic.app.operations.run import Run
from ludic.errors import ConfigError
from ludic.gateway import assemble_root
from ludic.models.chat import load_tokenizer
from ludic.records.conversion import from_table
from ludic.records.rollout import Message, Rollout, RolloutBatch, RolloutMetadata, ToolCall, new_id
from ludic.records.tables import arrow_schema
from ludic.root import claim_life
from ludic.root.json_records import ImportReport
from ludic.root.root import Root
from ludic.root.rows.calls import put_prompt
from ludic.root.rows.files import list_files
from ludic.root.rows.parquet import read_columns
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run


def bring_in(root: Root, path: Path, name: str = "atif") -> ImportReport:
    model = root.record.model
    return import_file(
        root,
        str(path),
        load_format(name),
        env_name="cats",
        tokenizer=model,
        get_tokenizer=lambda: load_tokenizer(model),
    )


def rows_of(root: Root) -> list[Rollout]:
    names = arrow_schema("rollouts").names
    files = [file for folder in ("rollouts", "evals") for file in list_files(root, None, folder)]
    batches = [batch for file in files for batch in from_table(read_columns(root, file.name, names))]
    return [row for batch in batches for group in batch.groups for row in group.rollouts]


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
        ("internal", 0, 2),
        ("env", 3, 4),
    ]


def call(prompt: list[int], completion: list[int], **values: Any) -> dict[str, Any]:
    metrics = {"prompt_token_ids": prompt, "completion_token_ids": completion, "logprobs": [-0.5] * len(completion)}
    return {"source": "agent", "message": str(completion), "metrics": metrics, **values}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": "ATIF-v2.0"}, "schema_version is 'ATIF-v2.0', wanted ATIF-v1.0 to ATIF-v1.8"),
        ({"steps": [{"source": "robot"}]}, r"steps\[0\].source is 'robot', wanted system, user, agent"),
        (
            {"steps": [{**call([1], [2]), "metrics": {**call([1], [2])["metrics"], "logprobs": [-1, -1]}}]},
            "1 completion_token_ids, and 2 in response_logprobs",
        ),
        (
            {"steps": [call([1], [2**40])]},
            r"steps\[0\].metrics.completion_token_ids is \[1099511627776\], wanted a list of",
        ),
        (
            {"steps": [{"source": "user", "message": [{"type": "image", "source": {}}]}, call([1], [2])]},
            "is 'image', wanted one of text",
        ),
        ({"agent": [1]}, r"agent is \[1\], wanted an object"),
        ({"steps": HARBOR["steps"][:2]}, "steps has no step of the agent that a model sampled"),
    ],
)
def test_a_bad_trajectory_is_refused_with_its_reason(run: Root, tmp_path: Path, change, reason):
    file = tmp_path / "trajectory.json"
    file.write_text(json.dumps({**HARBOR, **change}))
    with pytest.raises(ConfigError, match=reason):
        import_files(run, [str(file)], "atif")


@pytest.mark.slow
def test_compacted_contexts_and_sub_agents_are_rows_and_steps_without_one_call_are_context(run: Root, tmp_path: Path):
    observed = {"results": [{"content": "a.txt", "subagent_trajectory_ref": [{"trajectory_id": "sub"}]}]}
    steps = [
        {"source": "user", "message": [{"type": "text", "text": "list"}]},
        call([1, 2], [3], observation=observed),
        call([1, 2, 3, 4], [5, 6], llm_call_count=2),
        {"source": "agent", "message": "by hand", "llm_call_count": 0},
        call([1, 2, 3, 4, 5, 6, 7], [8]),
        {"source": "user", "message": "in short", "timestamp": "2026-01-01T00:00:00Z"},
        {"source": "agent", "message": "an old answer", "is_copied_context": True},
        call([9, 9], [10]),
        call([9, 9, 10, 11], [12], metrics={"prompt_token_ids": [], "completion_token_ids": []}),
    ]
    sub = {**HARBOR, "trajectory_id": "sub", "agent": {"name": "helper", "version": "1"}, "extra": None}
    whole = {**HARBOR, "steps": steps, "subagent_trajectories": [sub], "final_metrics": {"total_cost_usd": 1.0}}
    file = tmp_path / "trajectories.jsonl"
    file.write_text(json.dumps(whole) + "\n")
    (report,) = import_files(run, [str(file)], "atif")
    assert query(run, ROWS) == [
        ([1, 2], [3, 4, 5, 6, 7, 8], [True, *[False] * 4, True], [-0.5, *[0.0] * 4, -0.5], 1.0, "sampler"),
        ([1, 2], [3, 4, 5, 6], [True, True, False, True], [-0.5, -0.25, 0.0, -1.0], None, "sampler"),
        ([9, 9], [10], [True], [-0.5], 1.0, "sampler"),
    ]
    groups = "select agent_id, count(*), count(distinct episode_id), count(distinct group_id) from rollouts group by 1"
    assert sorted(query(run, groups)) == [("helper", 1, 1, 1), ("terminus-2", 2, 1, 1)]
    assert report.not_kept == {
        "steps[] without token ids of one call, which count as context": 2,
        "steps[].timestamp": 1,
    }
    ((messages,),) = query(run, "select messages from rollouts where response_tokens[1] = 10")
    assert [each["content"] for each in messages] == ["in short", "an old answer", "[10]", "[12]"]
    ((messages,),) = query(run, "select messages from rollouts where len(response_tokens) = 6")
    assert [(each["role"], each["content"]) for each in messages[:3]] == [
        ("user", "list"),
        ("assistant", "[3]"),
        ("user", "a.txt"),  # no call of a tool, so the agent showed it as a user's message
    ]


# --- What ludic exports -----------------------------------------------------------------------------------

_TEXT = st.text(max_size=5)
_arguments = st.dictionaries(_TEXT, st.integers() | _TEXT, max_size=2).map(json.dumps) | _TEXT.filter(str.strip)
_calls = st.lists(
    st.builds(ToolCall, id=_TEXT, name=st.text(min_size=1, max_size=3), arguments=_arguments), max_size=2
).map(tuple)
_said = st.builds(Message, role=st.just("assistant"), content=_TEXT, tool_calls=_calls, reasoning=st.none() | _TEXT)
_others = st.builds(
    Message, role=st.sampled_from(["system", "developer", "user"]), content=_TEXT, name=st.none() | _TEXT
)
_results = st.builds(
    Message, role=st.just("tool"), content=_TEXT, tool_call_id=st.none() | _TEXT, name=st.none() | _TEXT
)
_conversations = st.lists(_said | _others | _results, max_size=5).map(tuple)


def _sensible(row: Rollout, messages: tuple[Message, ...]) -> Rollout:
    """The row with tool calls that name a tool, of the assistant alone, and in the trajectory of its episode."""
    steps = tuple(replace(step, tool_calls=()) for step in row.agent_steps)
    return changed(row, trajectory_id=None, messages=messages, agent_steps=steps)


def as_read(row: Rollout) -> Any:
    """The tokens that a model read and sampled, and all that belongs to the sampled ones."""
    mask = np.ones(row.response_length, np.bool_) if row.action_mask is None else row.action_mask
    left_out = ("experts", "token_rewards", *(() if row.response_length else ("kept_tokens",)))
    arrays = {name: values for name, values in row.columns.items() if name not in left_out}
    arrays["response_logprobs"] = row.response_logprobs + np.float32(0)  # -0 is 0
    rewards = np.where(mask, row.token_rewards, np.float32(0)) + np.float32(0)
    return as_plain({**arrays, "action_mask": mask, "rewards": rewards})


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(batch=rollout_batches(), data=st.data())
def test_what_ludic_exports_as_atif_comes_back(batch: RolloutBatch, data: st.DataObject):
    groups = [
        replace(group, rollouts=tuple(_sensible(row, data.draw(_conversations)) for row in group.rollouts))
        for group in batch.groups
    ]
    batch = replace(batch, groups=tuple(groups), metadata=replace(batch.metadata, worker_id="w0-test"))
    origin, root = (put_run(f"memory://{new_id()}", RunConfig(model="none", env=("cats",))) for _ in range(2))
    with RolloutWriter(origin, "w0-test") as writer:
        writer.append(batch)
    with tempfile.TemporaryDirectory() as folder:
        Run(origin).export("atif", Path(folder) / "rows.jsonl")
        report = bring_in(root, Path(folder) / "rows.jsonl")
    assert report.refused == []
    wanted: dict[tuple[str, str], list[Rollout]] = {}
    for group in batch.groups:
        for row, key in zip(group.rollouts, group.trajectory_ids(), strict=True):
            wanted.setdefault((row.episode_id, key), []).append(row)
    found: dict[tuple[str, str], list[Rollout]] = {}
    for row in rows_of(root):
        found.setdefault((row.metadata["session_id"], row.metadata["trajectory_id"]), []).append(row)
    assert {key: [*map(as_read, rows)] for key, rows in found.items()} == {
        key: [*map(as_read, rows)] for key, rows in wanted.items()
    }
    for key, rows in wanted.items():
        for name in ("episode_reward", "reward_components", "env_name", "agent_id", "model", "error", "purpose"):
            assert as_plain(getattr(found[key][0], name)) == as_plain(getattr(rows[0], name)), name


@pytest.mark.slow
def test_an_episode_of_calls_is_one_trajectory_and_comes_back_as_one_episode(run: Root, tmp_path: Path):
    calls, search = Calls("e"), ToolCall(id="t1", name="search", arguments="no JSON")
    asked = (Message(role="user", content="hi"),)
    answers = [Message(role="assistant", content="", tool_calls=(search,)), Message(role="assistant", content="end")]
    more = (*asked, answers[0], Message(role="tool", content="found", tool_call_id="t1"))
    tools = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
    first = calls.add([1, 2], [10, 11], messages=asked, answer=answers[0], tools=tools)
    calls.add([*whole(first), 3], [12], messages=more, answer=answers[1])
    calls.add([*whole(first), 4], [13, 14], messages=more, answer=answers[1])
    put_prompt(run, tools)
    store(claim_life(run, "http://a"), 0, calls, reward=0.5)
    assemble_root(run)

    file = tmp_path / "out.jsonl"
    Run(run).export("atif", str(file))
    (line,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert [step["step_id"] for step in line["steps"]] == [1, 2, 3, 4, 5, 6]
    copied = [step.get("is_copied_context", False) for step in line["steps"]]
    assert copied == [False, False, False, True, True, False]  # the fork's prompt holds the first answer
    assert line["steps"][1]["observation"]["results"] == [{"source_call_id": "t1", "content": "found"}]
    assert line["agent"]["tool_definitions"] == tools
    back = create_root(str(tmp_path / "back"), "tiny")
    import_files(back, [str(file)], "atif")
    assert query(back, ROWS) == query(run, ROWS)
    assert query(back, "select count(distinct episode_id), count(distinct trajectory_id) from rollouts") == [(1, 1)]
    assert query(back, "select distinct messages[2].tool_calls[1].arguments from rollouts") == [("no JSON",)]

    chat = tmp_path / "chat.jsonl"
    Run(run).export("chat", str(chat))
    one, fork = [json.loads(line) for line in chat.read_text().splitlines()]
    assert [message["role"] for message in one["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert one["messages"][1]["tool_calls"][0]["function"] == {"name": "search", "arguments": "no JSON"}
    assert (one["tools"], one["episode_reward"]) == (tools, 0.5)
    assert [message.get("weight") for message in fork["messages"]] == [None, 0, None, None]


def test_a_sub_agent_is_embedded_in_the_trajectory_of_the_agent_that_began_it(tmp_path: Path):
    origin = put_run(str(tmp_path / "run"), RunConfig(model="none", env=("cats",)))
    group = make_batch(num_groups=1, group_size=2).groups[0]
    main, other = group.rollouts
    ids = {"parent_rollout_id": main.rollout_id, "depth": 1, "agent_id": "helper", "episode_id": main.episode_id}
    main, helper = changed(main, group_size=1), changed(other, **ids, group_index=0, group_size=1)
    with RolloutWriter(origin, "w0-test") as writer:
        writer.append(
            RolloutBatch(
                groups=(replace(group, rollouts=(main, helper)),), metadata=RolloutMetadata(worker_id="w0-test")
            )
        )
    Run(origin).export("atif", tmp_path / "out.jsonl")
    (line,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert [each["agent"]["name"] for each in (line, *line["subagent_trajectories"])] == ["agent", "helper"]
    back = put_run(str(tmp_path / "back"), RunConfig(model="none", env=("cats",)))
    bring_in(back, tmp_path / "out.jsonl")
    assert {row.agent_id: as_read(row) for row in rows_of(back)} == {
        row.agent_id: as_read(row) for row in (main, helper)
    }
