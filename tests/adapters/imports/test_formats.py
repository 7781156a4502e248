"""Files of peers, and the rows that they become."""

import json
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pytest
from transformers import PreTrainedTokenizerBase

import ludic
from ludic.adapters.imports.formats import load_format
from ludic.adapters.imports.importing import import_file
from ludic.agents.agent import PromptBuilder
from ludic.app.demos.calculator import make_demonstrations
from ludic.errors import ConfigError
from ludic.models.chat import load_tokenizer, render_text
from ludic.models.tiny import make_tiny_chat_model
from ludic.records.conversion import from_table
from ludic.records.messages import to_message
from ludic.records.rollout import Rollout
from ludic.records.tables import arrow_schema
from ludic.root.json_records import ImportReport
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.parquet import read_columns
from ludic.root.weights.model_location import remember_model, vocabulary_of
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root

Import = Callable[..., ImportReport]


@pytest.fixture
def root(tmp_path: Path, model_folder: str) -> Root:
    run = RunConfig(model=model_folder, env=("cats",), temperature=0.9, max_tokens=32)
    return create_root(str(tmp_path / "run"), run)


@pytest.fixture
def bring_in(root: Root) -> Import:
    """bring_in(path, "verl"): as `ludic import` does."""

    def with_calls() -> PreTrainedTokenizerBase:
        tokenizer = load_tokenizer(root.record.model)
        tokenizer.chat_template = tokenizer.chat_template.replace(" <eos>", SHOWN_CALLS + " <eos>")
        return tokenizer

    def bring_in(path: Path, name: str) -> ImportReport:
        fmt = load_format(name)
        options = {"env_name": fmt.name, "tokenizer": root.record.model, "get_tokenizer": with_calls}
        return import_file(root, str(path), fmt, **options)

    return bring_in


SHOWN_CALLS = "{% for call in message['tool_calls'] or [] %} {{ call.function.name }}{% endfor %}"


@pytest.fixture
def encode(model_folder: str) -> Callable[[str], list[int]]:
    tokenizer = load_tokenizer(model_folder)
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


def rollouts_of(root: Root, folder: str = "rollouts") -> list[Rollout]:
    """In the order of the file they came from."""
    names = arrow_schema("rollouts").names
    batches = [from_table(read_columns(root, file.name, names)) for file in list_files(root, None, folder)]
    rollouts = [rollout for batch in batches for one in batch for group in one.groups for rollout in group.rollouts]
    return sorted(rollouts, key=lambda rollout: (-rollout.request_index, rollout.segment_index))


def groups_of(rollouts: Sequence[Rollout]) -> list[tuple[int, int]]:
    """(number of the group, group_index) of each rollout, and that group_size is true."""
    ids = list(dict.fromkeys(rollout.group_id for rollout in rollouts))
    for rollout in rollouts:
        assert rollout.group_size == len({r.episode_id for r in rollouts if r.group_id == rollout.group_id})
    return [(ids.index(rollout.group_id), rollout.group_index) for rollout in rollouts]


# --- verl ------------------------------------------------------------------------------------------------


def test_verl_equal_prompts_of_a_step_are_a_group(root: Root, bring_in: Import, tmp_path: Path, encode):
    other = "user\ncc\nassistant\n"
    records = [
        peers.verl_record("cc", 1.0, acc=True),
        peers.verl_record("dd", 0.0, prompt=other, acc=False),
        peers.verl_record("ee ff", 0.5, acc=False),
    ]
    report = bring_in(peers.write_verl(tmp_path, records), "verl")
    first, second, third = rollouts_of(root)
    assert groups_of([first, second, third]) == [(0, 0), (1, 0), (0, 1)]
    assert [r.episode_reward for r in (first, second, third)] == [1.0, 0.0, 0.5]
    assert first.prompt_tokens.tolist() == encode(peers.PROMPT)
    assert third.response_tokens.tolist() == encode("ee ff <eos>")
    assert third.token_rewards.tolist() == [0.0, 0.0, 0.5]
    assert (first.policy_version, first.env_name, first.temperature, first.max_tokens) == (3, "verl", 0.9, 32)
    assert (first.metadata, first.capture) == ({"acc": "true"}, "text")
    assert (first.wanted, first.correct) == ("cc", None)
    assert (report.num_groups, report.num_rollouts, report.num_without_logprobs) == (2, 3, 3)
    assert report.kept_as_metadata == {"acc": 3}


def test_absent_logprobs_are_zeros_that_say_so_and_a_filter_drops_them(root: Root, bring_in: Import, tmp_path: Path):
    bring_in(peers.write_verl(tmp_path, [peers.verl_record("cc", 1.0)]), "verl")
    assert rollouts_of(root)[0].response_logprobs.tolist() == [0.0, 0.0]
    predicate = ludic.root.sql.load_filter("drop_absent_logprobs").text
    assert ludic.connect(root).execute(f"select ({predicate}) from rollouts").fetchall() == [(True,)]  # noqa: S608


def test_a_record_may_say_what_was_kept_and_not_more_than_it_has(root: Root, bring_in: Import, tmp_path: Path):
    tokens = {"prompt_tokens": [5, 6], "response_tokens": [7, 8], "episode_reward": 1}
    kept, zeros = {"response_logprobs": [-1, -0.5]}, {"response_logprobs": [0, 0]}
    old_export = {"metadata": {"logprobs": "absent"}}
    records = [
        *(tokens | kept | {"capture": "trainer"}, tokens | zeros | {"capture": "ids"}, tokens | {"capture": "text"}),
        *(tokens | zeros | old_export, tokens | zeros | old_export | {"capture": "ids"}),
        *(tokens | {"capture": "sampler"}, tokens | kept | {"capture": "ids"}, tokens | kept | {"capture": "all"}),
        {"prompt": "aa", "completion": "bb", "capture": "ids"},
    ]
    report = bring_in(peers.write_lines(tmp_path / "mine.jsonl", records), "jsonl")
    assert [row.capture for row in rollouts_of(root)] == ["trainer", "ids", "text", "text", "ids"]
    assert (report.num_without_logprobs, report.num_from_text) == (4, 2)
    assert {refusal.line: refusal.reason for refusal in report.refused} == {
        6: "capture is sampler, and the record has no response_logprobs; wanted ids or text",
        7: "response_logprobs has 2 that are not 0, wanted zeros, since capture is ids: no logprobs were stored",
        8: "capture is 'all', wanted sampler or trainer or ids or text or null",
        9: "capture is ids, and the record has texts without token ids; wanted text",
    }


def test_verl_the_key_of_a_rollout_begins_with_that_of_its_group(root: Root, bring_in: Import, tmp_path: Path):
    """As trainer.use_v1 dumps: {group}_{session}_{output}; a fork's uid is that of the group."""
    uids = ["5f1e-9a_0_0", "5f1e-9a_1_0", "77b0-1c_0_0", "77b0-1c_1_0", "fork", "fork"]
    bring_in(peers.write_verl(tmp_path, [peers.verl_record("cc", 1.0, uid=uid) for uid in uids]), "verl")
    rollouts = rollouts_of(root)
    assert groups_of(rollouts) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [rollout.metadata.get("uid") for rollout in rollouts] == [*uids[:4], None, None]


# --- SkyRL -----------------------------------------------------------------------------------------------


def test_skyrl_evaluations_have_their_special_tokens_and_a_score_a_token(
    root: Root, bring_in: Import, tmp_path: Path, encode
):
    records = [
        peers.skyrl_record("cc dd <eos>", [0.0, 0.25, 0.5]),
        peers.skyrl_record("dd", 0.0, stop_reason="length"),
        peers.skyrl_record("dd", [0.0, "high"]),
    ]
    report = bring_in(peers.write_skyrl(tmp_path, records), "skyrl")
    first, second = rollouts_of(root, "evals")
    assert first.prompt_tokens.tolist() == encode("<|user|> aa bb <eos> <|assistant|>")
    assert first.response_tokens.tolist() == encode("cc dd <eos>")
    assert second.response_tokens.tolist() == encode("dd")
    assert [(each.episode_reward, each.finish_reason) for each in (first, second)] == [(0.75, "stop"), (0.0, "length")]
    assert (first.env_name, first.policy_version, first.wanted) == ("gsm8k", 4, "cc")
    assert groups_of([first, second]) == [(0, 0), (0, 1)]
    assert [refusal.reason for refusal in report.refused] == ["score is [0.0, 'high'], wanted a list of float64"]
    assert report.kept_as_metadata["env_extras"] == 2


# --- TRL -------------------------------------------------------------------------------------------------


def test_trl_the_reward_is_the_sum_of_the_reward_columns(root: Root, bring_in: Import, tmp_path: Path):
    columns = {
        "prompt": [peers.PROMPT] * 3,
        "completion": ["cc", "dd", "ee"],
        "accuracy_reward": [1.0, 0.0, float("nan")],
        "format_reward": [0.25, 0.5, float("nan")],
        "answer": ["cc", "cc", "cc"],
        "advantage": [0.7, -0.7, 0.0],
    }
    report = bring_in(peers.write_trl(tmp_path, columns), "trl")
    rollouts = rollouts_of(root)
    assert [r.episode_reward for r in rollouts] == [1.25, 0.5, None]
    assert rollouts[0].reward_components == {"accuracy_reward": 1.0, "format_reward": 0.25}
    assert rollouts[2].error == "the peer's record has no reward"
    assert groups_of(rollouts) == [(0, 0), (0, 1), (0, 2)]
    assert {r.policy_version for r in rollouts} == {20}
    assert rollouts[0].metadata == {"advantage": "0.7", "answer": "cc"}
    assert (report.num_unscored, report.kept_as_metadata) == (1, {"advantage": 3, "answer": 3})


def test_trl_a_function_of_the_users_weights_the_reward_columns(root: Root, bring_in: Import, tmp_path: Path):
    function = tmp_path / "mine.py"
    function.write_text(WEIGHTED)
    columns = {"prompt": ["aa"], "completion": ["bb"], "accuracy_reward": [1.0], "format_reward": [0.5], "length": [7]}
    bring_in(peers.write_trl(tmp_path, columns), f"{function}:weighted")
    (rollout,) = rollouts_of(root)
    assert (rollout.episode_reward, rollout.env_name) == (1.25, "weighted")
    assert rollout.reward_components == {"accuracy_reward": 1.0, "format_reward": 0.5, "length": 7.0}


WEIGHTED = """
from dataclasses import replace
from ludic.adapters.imports.formats import trl

def weighted(record):
    episode = trl(record)
    reward = record.number("accuracy_reward") + 0.5 * record.number("format_reward")
    return replace(episode, columns={**episode.columns, "episode_reward": reward})
"""


def test_a_table_without_a_column_that_the_format_needs_is_refused(bring_in: Import, tmp_path: Path):
    path = peers.write_trl(tmp_path, {"prompt": ["aa"], "response": ["bb"]})
    with pytest.raises(ConfigError, match="none of 1 records can be used as format trl; the first, at 1: has no compl"):
        bring_in(path, "trl")


# --- OpenPipe ART ----------------------------------------------------------------------------------------


def art_rows() -> list[dict[str, Any]]:
    call = '[{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{\\"at\\": \\"dd\\"}"}}]'
    turns = [
        peers.art_message("system", "aa"),
        peers.art_message("user", "bb cc"),
        peers.art_message("assistant", "dd", trainable=True, tool_calls=call),
        peers.art_message("tool", "ee", tool_call_id="c1"),
        peers.art_message("assistant", "ff gg", trainable=True),
    ]
    one_turn = [*turns[:2], peers.art_message("assistant", "hh", trainable=True)]
    return [
        {"group_index": 0, "trajectory_index": 0, "reward": 1.0, "metrics": '{"won": 1.0}', "messages": turns},
        {"group_index": 0, "trajectory_index": 1, "reward": 0.0, "metadata": '{"seat": 2}', "messages": one_turn},
        {"group_index": 1, "trajectory_index": 0, "reward": 0.5, "logs": ["x" * 300], "messages": one_turn},
    ]


@pytest.mark.parametrize("format_version", [1, 2])
def test_art_conversations_become_transcripts_with_a_mask(
    root: Root, bring_in: Import, tmp_path: Path, encode, format_version: int
):
    report = bring_in(peers.write_art(tmp_path, art_rows(), format_version=format_version), "art")
    long, short, other = rollouts_of(root)
    assert groups_of([long, short, other]) == [(0, 0), (0, 1), (1, 0)]
    # The template: "<|role|> content names of calls <eos>" a message, "<|assistant|>" where the assistant is to speak.
    assert long.prompt_tokens.tolist() == encode("<|system|> aa <eos><|user|> bb cc <eos><|assistant|>")
    assert long.response_tokens.tolist() == encode("dd look <eos><|tool|> ee <eos><|assistant|> ff gg <eos>")
    assert long.action_mask is not None
    assert long.action_mask.tolist() == [1, 1, 1, 0, 0, 0, 0, 1, 1, 1]
    assert [(step.start, step.end, step.action_target) for step in long.agent_steps] == [
        (0, 3, "internal"),
        (7, 10, "env"),
    ]
    assert long.messages[2].tool_calls[0].name == "look"
    assert long.reward_components == {"won": 1.0}
    assert short.action_mask is None
    assert (short.metadata, short.capture) == ({"seat": "2"}, "text")
    assert (long.policy_version, long.purpose, long.num_turns) == (7, "train", 2)
    assert report.not_kept == {"logs": 1}


def test_conversations_with_tools_are_what_the_model_would_have_seen_and_said(tmp_path: Path):
    """The template shows the schemas, and no token reaches across the border of a turn, as when a model is sampled."""
    model = tmp_path / "model"
    records = list(make_demonstrations(5, 2))
    conversations = [[to_message(message) for message in record["messages"]] for record in records]
    make_tiny_chat_model(str(model), conversations * 20, tools=records[0]["tools"], hidden_size=64, num_layers=1)
    tokenizer = load_tokenizer(str(model))
    whole = tokenizer("<|im_start|>assistant\n<think>")["input_ids"]
    assert whole != [*tokenizer("<|im_start|>assistant\n")["input_ids"], *tokenizer("<think>")["input_ids"]]

    root = create_root(str(tmp_path / "run"), RunConfig(model=str(model), env=("word_problems",)))
    (tmp_path / "demonstrations.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ludic.open(root.url).import_(tmp_path / "demonstrations.jsonl", "jsonl")
    rollouts = rollouts_of(root)
    assert len(rollouts) == len(records)
    for rollout, record, conversation in zip(rollouts, records, conversations, strict=True):
        builder = PromptBuilder(tokenizer, record["tools"])
        prompt = builder.build(conversation[:1])
        assert rollout.prompt_tokens.tolist() == prompt.tolist()
        tokens = np.concatenate([rollout.prompt_tokens, rollout.response_tokens])
        assert tokenizer.decode(tokens.tolist()) + "\n" == render_text(
            tokenizer, conversation, tools=record["tools"], add_generation_prompt=False
        )
        calls = 2 if len(conversation) == 4 else 1
        assert len(rollout.agent_steps) == calls
        for step in rollout.agent_steps:
            said = tokenizer.decode(rollout.response_tokens[step.start : step.end].tolist())
            assert said.endswith("<|im_end|>")
            assert rollout.response_tokens[step.start : step.end].tolist() == tokenizer(said)["input_ids"]


def test_tools_that_are_no_list_of_schemas_are_refused(bring_in: Import, tmp_path: Path):
    path = tmp_path / "records.jsonl"
    said = [{"role": "user", "content": "aa"}, {"role": "assistant", "content": "bb"}]
    lines = [
        {"messages": said, "episode_reward": 1.0, "tools": tools} for tools in ("[1]", "no JSON", {"name": "x"}, [])
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = bring_in(path, "jsonl")
    assert [refusal.line for refusal in report.refused] == [1, 2, 3]
    assert all("tools" in refusal.reason and "schemas" in refusal.reason for refusal in report.refused)


def test_art_validation_trajectories_are_evals(root: Root, bring_in: Import, tmp_path: Path):
    bring_in(peers.write_art(tmp_path, art_rows(), split="val"), "art")
    assert rollouts_of(root) == []
    assert [rollout.purpose for rollout in rollouts_of(root, "evals")] == ["eval"] * 3


def test_art_a_trajectory_of_raw_exchanges_is_refused_by_its_row(bring_in: Import, tmp_path: Path):
    rows = [*art_rows(), {"group_index": 2, "trajectory_index": 0, "reward": 1.0, "messages": None}]
    report = bring_in(peers.write_art(tmp_path, rows, format_version=2), "art")
    assert [(refusal.line, refusal.reason) for refusal in report.refused] == [(4, "has no messages")]


# --- prime-rl --------------------------------------------------------------------------------------------


def test_prime_rl_tokens_masks_and_logprobs_are_taken_as_they_are(root: Root, bring_in: Import, tmp_path: Path):
    nodes = [
        peers.trace_node("user", "aa bb", [5, 6, 7]),
        peers.trace_node("assistant", "cc", [8, 20, 21], parent=0, num_sampled=2),
        peers.trace_node("tool", "dd", [9, 9], parent=1, tool_call_id="c1"),
        peers.trace_node("assistant", "ee", [8, 22], parent=2, num_sampled=1),
    ]
    rewards = {"correct": {"score": 1.0, "weight": 0.5}, "style": {"score": 0.25, "weight": 1.0}, "unscored": None}
    report = bring_in(peers.write_prime_rl(tmp_path, [peers.episode([peers.trace(nodes, rewards)])]), "prime-rl")
    (rollout,) = rollouts_of(root)
    assert rollout.prompt_tokens.tolist() == [5, 6, 7, 8]
    assert rollout.response_tokens.tolist() == [20, 21, 9, 9, 8, 22]
    assert rollout.action_mask is not None
    assert rollout.action_mask.tolist() == [1, 1, 0, 0, 0, 1]
    assert rollout.response_logprobs.tolist() == [-0.5, -1.0, 0, 0, 0, -0.5]
    assert [(step.start, step.end, step.finish_reason) for step in rollout.agent_steps] == [
        (0, 2, "stop"),
        (5, 6, "stop"),
    ]
    assert rollout.episode_reward == 0.75
    assert rollout.reward_components == {"correct": 0.5, "style": 0.25}
    assert (rollout.policy_version, rollout.policy_version_last) == (10, 11)
    assert (rollout.env_name, rollout.env_example_id) == ("cats", "task-7")
    assert (rollout.temperature, rollout.max_tokens, rollout.finish_reason) == (pytest.approx(0.7), 64, "stop")
    assert report.num_without_logprobs == 0


def test_prime_rl_what_branches_share_is_action_tokens_once(root: Root, bring_in: Import, tmp_path: Path):
    nodes = [
        peers.trace_node("user", "aa", [5]),
        peers.trace_node("assistant", "bb", [20], parent=0, num_sampled=1),
        peers.trace_node("user", "cc", [6], parent=1),
        peers.trace_node("assistant", "dd", [21], parent=2, num_sampled=1),
        peers.trace_node("user", "ee", [7], parent=1),
        peers.trace_node("assistant", "ff", [22, 23], parent=4, num_sampled=2),
    ]
    traces = [peers.trace(nodes, {"r": {"score": 2.0}})]
    bring_in(peers.write_prime_rl(tmp_path, [peers.episode(traces)]), "prime-rl")
    first, second = rollouts_of(root)
    assert (first.episode_id, first.segment_index, second.segment_index) == (second.episode_id, 0, 1)
    assert (first.prompt_tokens.tolist(), first.response_tokens.tolist()) == ([5], [20, 6, 21])
    # Token 20 is context here: the first branch trains it.
    assert (second.prompt_tokens.tolist(), second.response_tokens.tolist()) == ([5, 20, 7], [22, 23])
    assert [int(np.count_nonzero(r.token_rewards)) for r in (first, second)] == [0, 1]


def test_prime_rl_rollouts_of_a_group_are_a_group_for_each_agent(root: Root, bring_in: Import, tmp_path: Path):
    def of(agent: str, reward: float, *, trainable: bool = True) -> dict[str, Any]:
        nodes = [
            peers.trace_node("user", "aa", [5]),
            peers.trace_node("assistant", "bb", [20], parent=0, num_sampled=1),
        ]
        described = {"config": {}, "name": agent, "trainable": trainable}
        return peers.trace(nodes, {"r": {"score": reward}}, agent=described)

    judge = of("judge", 0.0, trainable=False)
    episodes = [peers.episode([of("solver", 1.0), of("critic", 0.5), judge]), peers.episode([of("solver", 0.0)])]
    bring_in(peers.write_prime_rl(tmp_path, episodes), "prime-rl")
    rollouts = rollouts_of(root)
    assert [r.agent_id for r in rollouts] == ["solver", "critic", "solver"]
    assert groups_of(rollouts) == [(0, 0), (1, 0), (0, 1)]


def test_prime_rl_failures_are_errors_and_limits_are_truncations(root: Root, bring_in: Import, tmp_path: Path):
    nodes = [
        peers.trace_node("user", "aa", [5]),
        peers.trace_node("assistant", "bb", [20], parent=0, num_sampled=1),
    ]
    error = {"type": "SandboxError", "message": "gone"}
    failed = peers.trace(nodes, {"r": None}, ok=False, stop_condition="error", errors=[error])
    limited = peers.trace(nodes, {"r": {"score": 1.0}}, stop_condition="max_turns")
    nothing = peers.episode([], ok=False, errors=[{"type": "EnvError", "message": "no task"}])
    report = bring_in(peers.write_prime_rl(tmp_path, [peers.episode([failed, limited]), nothing]), "prime-rl")
    first, second = rollouts_of(root)
    assert (first.error, first.episode_reward) == ("the trace is not ok: SandboxError: gone", None)
    assert (second.truncated, second.truncation_reason, second.error) == (True, "max_steps", None)
    assert report.refused[0].reason == "has no trace of an agent that is trained: EnvError: no task"


def test_prime_rl_traces_without_tokens_are_rendered(root: Root, bring_in: Import, tmp_path: Path, encode):
    nodes = [
        peers.trace_node("user", "aa", []),
        peers.trace_node("assistant", "bb", [], parent=0) | {"sampled": True},
    ]
    report = bring_in(
        peers.write_prime_rl(tmp_path, [peers.episode([peers.trace(nodes, {"r": {"score": 1.0}})])]), "prime-rl"
    )
    assert rollouts_of(root)[0].response_tokens.tolist() == encode("bb <eos>")
    assert report.num_without_logprobs == 1


# --- JSON Lines and functions of users ----------------------------------------------------------------------


def test_jsonl_takes_tokens_then_messages_then_texts(root: Root, bring_in: Import, tmp_path: Path, encode):
    messages = [{"role": "user", "content": "aa"}, {"role": "assistant", "content": "bb"}]
    records = [
        {"prompt_tokens": [5, 6], "response_tokens": [7, 8], "response_logprobs": [-1, -0.5], "episode_reward": 1},
        {"messages": messages, "episode_reward": 0.5, "example_columns": {"level": "hard", "story": "x" * 3_000}},
        {"example_columns": '{"level": 3}', "prompt": [messages[0]], "completion": "cc", "episode_reward": 0.25},
    ]
    bring_in(peers.write_lines(tmp_path / "mine.jsonl", records), "jsonl")
    tokens, conversation, texts = rollouts_of(root)
    assert tokens.response_logprobs.tolist() == [-1.0, -0.5]
    assert [row.capture for row in (tokens, conversation, texts)] == ["sampler", "text", "text"]
    assert tokens.example_columns is None
    # An object, or its text as ludic exports it; cut to max_column_characters of the run.
    assert json.loads(conversation.example_columns or "")["story"]["characters"] == 3_000
    assert (len(conversation.example_columns or ""), texts.example_columns) == (2_000, '{"level": 3}')
    assert conversation.metadata == {}
    assert conversation.response_tokens.tolist() == encode("bb <eos>")
    assert texts.prompt_tokens.tolist() == encode("<|user|> aa <eos><|assistant|>")
    assert texts.response_tokens.tolist() == encode("cc <eos>")


def test_jsonl_takes_each_array_of_the_catalogue(root: Root, bring_in: Import, tmp_path: Path):
    tokens = {"prompt_tokens": [5, 6], "response_tokens": [7, 8], "episode_reward": 1}
    good = tokens | {"kept_tokens": [[6, 7], [8]], "experts": [[[0, 1]], [[2, 3]], [[0, 3]]], "token_rewards": "[0, 1]"}
    bad = {
        "experts": [
            ([[[0, 1]], [[2]]], "wanted a list of lists of lists of int16, of equal lengths"),
            ([[[0, 70_000]]] * 3, "wanted a list of lists of lists of int16, of equal lengths"),
            ([0, 1, 2], "wanted a list of lists of lists of int16, of equal lengths"),
            ([[[0, 1]]] * 2, "has shape (2, 1, 2), wanted 3: prompt_tokens, and response_tokens without the last one"),
        ],
        "kept_tokens": [
            ([7, 8], "wanted a list of lists of int32"),
            ([[7], [0.5]], "wanted a list of lists of int32"),
            ([[7]], "has length 1, response_tokens has 2"),
            ([[7, 5], [8]], "is 5 at token 0, wanted sorted numbers, each once"),
        ],
        "action_mask": [
            ([[True], [True]], "wanted a list of bool"),
            ([True], "has length 1, response_tokens has 2"),
        ],
        "token_rewards": [(["a", "b"], "wanted a list of float32")],
    }
    cases = [(name, value, reason) for name, found in bad.items() for value, reason in found]
    records = [good, *(tokens | {name: value} for name, value, _ in cases)]
    report = bring_in(peers.write_lines(tmp_path / "mine.jsonl", records), "jsonl")
    (row,) = rollouts_of(root)
    assert [each.tolist() for each in row.columns["kept_tokens"]] == [[6, 7], [8]]
    assert (row.columns["experts"].tolist(), row.columns["experts"].dtype) == (good["experts"], np.int16)
    assert row.token_rewards.tolist() == [0.0, 1.0]
    for refusal, (name, _, reason) in zip(report.refused, cases, strict=True):
        assert refusal.reason.startswith(f"{name} "), refusal
        assert reason in refusal.reason


MINE = """
from ludic.adapters.imports.episodes import Conversation, ImportedEpisode, ImportedRow, Texts
from ludic.adapters.imports.formats import ImportFormat
import numpy as np

def texts(record):
    if record.get("skip"):
        return []
    return ImportedEpisode(
        rows=[Texts(prompt=record["question"], completion=record["answer"])],
        columns={"episode_reward": 1 / record.number("tries"), "policy_version": record.integer("step")},
        group=record.get("task.id"),
    )

def tokens(record):
    for agent in record["agents"]:
        row = ImportedRow(prompt_tokens=np.array([5], np.int32), response_tokens=np.array(agent["ids"], np.int32))
        yield ImportedEpisode(rows=[row], columns={"episode_reward": 1.0, "agent_id": agent["name"]})

def leaves(record):
    raise SystemExit(3)

def unknown(record):
    return ImportedEpisode(rows=[Texts(prompt="aa", completion="bb")], columns={"reward": 1.0})

stepped = ImportFormat(function=texts, path=r"out_(?P<step>[0-9]+)/")
broken = ImportFormat(function=texts, path="(")
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_function_of_the_users_reads_records_and_says_what_fails(
    root: Root, bring_in: Import, tmp_path: Path, mine: Path, encode
):
    records = [
        {"question": "aa bb", "answer": "cc", "tries": 2, "step": 4, "task": {"id": 7}, "note": "x"},
        {"question": "aa", "answer": "dd", "tries": 1, "step": 4, "task": {"id": 7}},
        {"question": "aa", "answer": "dd", "tries": 0, "step": 4},
        {"question": "aa", "tries": 1},
        {"skip": True},
        {"question": "aa", "answer": "dd", "tries": 1, "step": "new"},
    ]
    report = bring_in(peers.write_lines(tmp_path / "a.jsonl", records), f"{mine}:texts")
    first, second = rollouts_of(root)
    assert first.prompt_tokens.tolist() == encode("aa bb")
    assert (first.episode_reward, first.policy_version, first.metadata) == (0.5, 4, {"note": "x"})
    assert groups_of([first, second]) == [(0, 0), (0, 1)]
    assert {refusal.line: refusal.reason for refusal in report.refused} == {
        3: f"{mine}, line 11, failed: ZeroDivisionError: float division by zero",
        4: "has no answer",
        5: "gives no episode",
        6: "step is 'new', wanted a whole number",
    }


def test_the_function_in_the_docs_reads_a_record(root: Root, bring_in: Import, tmp_path: Path):
    text = Path(ludic.__file__).parents[1].joinpath("docs", "interop.md").read_text()
    lines = text.partition("    # mine.py, used as")[2].splitlines()[1:]
    function = tmp_path / "mine.py"
    function.write_text("\n".join(line[4:] for line in takewhile(lambda line: line[:4].isspace() or not line, lines)))
    record = {"question": "aa", "answer": "bb", "score": 0.5, "step": 4, "task": {"id": 7}}
    bring_in(peers.write_lines(tmp_path / "a.jsonl", [record]), f"{function}:convert")
    (rollout,) = rollouts_of(root)
    assert (rollout.episode_reward, rollout.policy_version, rollout.env_name) == (0.5, 4, "convert")


def test_a_function_of_the_users_may_give_several_episodes_of_tokens(
    root: Root, bring_in: Import, tmp_path: Path, mine: Path
):
    records = [{"agents": [{"name": "solver", "ids": [6, 7]}, {"name": "critic", "ids": [8]}]}] * 2
    report = bring_in(peers.write_lines(tmp_path / "a.jsonl", records), f"{mine}:tokens")
    rollouts = rollouts_of(root)
    assert [(r.agent_id, r.response_tokens.tolist()) for r in rollouts] == [("solver", [6, 7]), ("critic", [8])] * 2
    assert groups_of(rollouts) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert (report.num_without_logprobs, report.num_from_text) == (4, 0)
    assert {row.capture for row in rollouts} == {"ids"}


def test_a_users_format_may_read_the_path_of_the_file(root: Root, bring_in: Import, tmp_path: Path, mine: Path):
    for step in (3, 4):
        record = {"question": "aa", "answer": "bb", "tries": 1}
        bring_in(peers.write_lines(tmp_path / f"out_{step}" / "a.jsonl", [record]), f"{mine}:stepped")
    assert sorted(rollout.policy_version for rollout in rollouts_of(root)) == [3, 4]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("leaves", r"mine.py, line 21, failed: RuntimeError: sys.exit\(3\) was called"),
        ("unknown", "mine.py failed: TypeError: .* unexpected keyword argument 'reward'"),
        ("absent", "has no function or Format 'absent'; it has texts, tokens, leaves, unknown, stepped, broken"),
        ("broken", r"path '\(' is no regular expression: missing \)"),
    ],
)
def test_a_function_of_the_users_that_can_not_be_used_is_named(
    bring_in: Import, tmp_path: Path, mine: Path, name: str, message: str
):
    with pytest.raises(ConfigError, match=message):
        bring_in(peers.write_lines(tmp_path / "a.jsonl", [{"question": "aa"}]), f"{mine}:{name}")


def test_another_text_of_the_function_is_another_import(bring_in: Import, tmp_path: Path, mine: Path):
    path = peers.write_lines(tmp_path / "a.jsonl", [{"question": "aa", "answer": "bb", "tries": 1, "step": 4}])
    assert not bring_in(path, f"{mine}:texts").was_there
    moved = mine.rename(tmp_path / "moved.py")
    assert bring_in(path, f"{moved}:texts").was_there
    moved.write_text(MINE.replace("1 / record", "2 / record"))
    with pytest.raises(ConfigError, match=r"was imported into .* before, with code"):
        bring_in(path, f"{moved}:texts")


@pytest.mark.parametrize(
    ("text", "message"),
    [("def texts(record:", "SyntaxError"), ("import nothing_of_this_name", "mine.py, line 1, failed: ModuleNotFound")],
)
def test_a_file_that_does_not_load_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_format(f"{path}:texts")


def test_an_unknown_format_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="format 'prime_rl' is unknown; did you mean 'prime-rl'"):
        load_format("prime_rl")


# --- Tokens that the run's model does not know -----------------------------------------------------------


def jsonl_row(tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    return {
        "prompt_tokens": [2, 3],
        "response_tokens": list(tokens),
        "response_logprobs": list(logprobs),
        "episode_reward": 1.0,
    }


def own_row(tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    return {"all": jsonl_row(tokens, logprobs)}


def prime_rl_row(tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    nodes = [
        peers.trace_node("user", "aa", [2, 3]),
        peers.trace_node("assistant", "bb", tokens, parent=0, num_sampled=len(tokens)) | {"logprobs": list(logprobs)},
    ]
    return peers.episode([peers.trace(nodes, {"accuracy": {"score": 1.0, "weight": 1.0}})])


OWN_FORMAT = """
from ludic.adapters.imports.formats import JSONL
from ludic.adapters.imports.records import ImportRecord


def own(record):
    return JSONL.function(ImportRecord(record["all"]))
"""


@pytest.mark.parametrize("name", ["jsonl", "prime-rl", "own"])
@pytest.mark.parametrize("keeps_model", [True, False])
def test_tokens_and_logprobs_that_no_model_gives_are_refused_alone(
    root: Root, bring_in: Import, tmp_path: Path, name: str, keeps_model: bool
) -> None:
    if keeps_model:
        remember_model(root)
    most = (vocabulary_of(root) or 2**31) - 1
    bad_tokens = [-1, 2**31, 2**63, 10**30, *([1_000_000, most + 1] if keeps_model else [])]
    bad_logprobs = [5.0, 1e308, -1e308, -9999.0, float("inf")]
    if name != "prime-rl":  # where NaN says that there is none
        bad_logprobs.append(float("nan"))
    make = {"jsonl": jsonl_row, "prime-rl": prime_rl_row, "own": own_row}[name]
    records = [make([4, token], [-0.5, -1.0]) for token in bad_tokens]
    records += [make([4, 5], [-0.5, logprob]) for logprob in bad_logprobs]
    records += [make([4, most if keeps_model else 1_000_000], [-0.5, -1.0])]
    (tmp_path / "own.py").write_text(OWN_FORMAT)
    fmt = f"{tmp_path}/own.py:own" if name == "own" else name
    path = tmp_path / "rows.jsonl"
    if name == "prime-rl":
        path = peers.write_prime_rl(tmp_path, records)
    else:
        peers.write_lines(path, records)
    report = bring_in(path, fmt)
    assert [refusal.line for refusal in report.refused] == list(range(1, len(records)))
    [row] = rollouts_of(root)
    assert row.response_tokens[-1] == (most if keeps_model else 1_000_000)


def test_text_in_a_tokenizer_of_more_tokens_than_the_model_has_is_refused(
    root: Root, tmp_path: Path, model_folder: str
) -> None:
    remember_model(root)
    tokenizer = load_tokenizer(model_folder)
    tokenizer.add_tokens([f"beyond{number}" for number in range(100)])
    assert len(tokenizer) > vocabulary_of(root)
    path = peers.write_verl(tmp_path, [peers.verl_record("beyond99", 1.0), peers.verl_record("cc", 1.0)])
    report = import_file(
        root, str(path), load_format("verl"), env_name="verl", tokenizer="more", get_tokenizer=lambda: tokenizer
    )
    [refusal] = report.refused
    assert f"wanted a token id from 0 to {vocabulary_of(root) - 1}" in refusal.reason
