"""Calls become rows: parents by the longest prefix, forks, retries, cut episodes; each sampled token counts once."""

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gateway.stored_calls import START, Calls, prompt_of, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.gateway import SealedEpisode, assemble_episodes
from ludic.gateway.episodes import EpisodeResult
from ludic.records import (
    AWAITS_SCORE,
    Message,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
    ToolCall,
    WeightSpan,
    find_problems,
)

DONE = EpisodeResult(reward=1.0)


def problems(rollouts: list[Any]) -> list[Any]:
    batch = RolloutBatch(
        groups=(RolloutGroup(key="k", rollouts=tuple(rollouts)),),
        metadata=RolloutMetadata(worker_id="w1", timestamp=START),
    )
    return find_problems(batch)


def parent_by_hand(row: dict[str, Any], answered: list[dict[str, Any]]) -> str | None:
    """The oracle: the longest prompt and completion that begin the prompt; of equal ones the first."""
    before = [each for each in answered if each["call_id"] < row["call_id"]]
    found = [each for each in before if prompt_of(row)[: len(whole(each))] == whole(each)]
    return max(found, key=lambda each: (len(whole(each)), -int(each["call_id"][2:])))["call_id"] if found else None


def are_rivals(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Equal requests alone are no rivals: an agent may want several answers."""
    ids = {one["call_id"], one.get("retry_of")} & {other["call_id"], other.get("retry_of")}
    keys = {one.get("idempotency_digest")} & {other.get("idempotency_digest")}
    return bool((ids | keys) - {None})


def fates_by_hand(rows: list[dict[str, Any]], attempt: int) -> dict[str, tuple[str | None, str | None]]:
    """Parent of each call, and the reason why it is in no row."""
    answered = {number: [r for r in rows if r["event"] == "call" and r["attempt"] == number] for number in (1, 2)}
    parents = {r["call_id"]: parent_by_hand(r, answered[number]) for number in (1, 2) for r in answered[number]}
    extended = set(parents.values())
    found: dict[str, tuple[str | None, str | None]] = {}
    for row in rows:
        others = [each for each in answered[row["attempt"]] if each is not row]
        rivals = {each["call_id"] for each in others if are_rivals(row, each)}
        reason = {"intent": "unfinished", "failed": "failed"}.get(row["event"])
        if reason is None and row["attempt"] != attempt:
            reason = "earlier_attempt"
        elif reason is None and row["call_id"] not in extended and rivals:
            reason = "retry" if extended & rivals else "unresolved"
        found[row["call_id"]] = parents.get(row["call_id"]), reason
    return found


KINDS = ("turn", "turn", "turn", "root", "compact", "again", "same key", "named", "intent", "failed", "cut", "attempt")
SOME = st.lists(st.integers(1, 2), max_size=3)
ACTIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 7), SOME, SOME.filter(bool)), max_size=10)


def play(actions: list[Any]) -> Calls:
    """Make the calls of an agent: each extends an earlier one, begins another context, or repeats a request."""
    calls, attempt = Calls(), 1
    for kind, which, suffix, completion in actions:
        if kind == "attempt":
            attempt = 2
            continue
        mine = calls.answered(attempt)
        if kind == "root" or not mine:
            calls.add([3, *suffix], completion, attempt=attempt, idempotency_digest=f"key {len(calls.rows)}")
            continue
        earlier = mine[which % len(mine)]
        repeats = {
            "again": {"request_digest": earlier["request_digest"]},
            "same key": {"idempotency_digest": earlier.get("idempotency_digest")},
            "named": {"retry_of": earlier["call_id"]},
        }
        if kind in repeats:
            calls.add(prompt_of(earlier), completion, attempt=attempt, **repeats[kind])
        elif kind == "compact":
            calls.add([3, *whole(earlier)[-2:], *suffix], completion, attempt=attempt)
        elif kind in ("intent", "failed"):
            calls.add([], [], attempt=attempt, event=kind, request_digest=earlier["request_digest"])
        else:
            behind = {"undelivered_tokens": np.array(completion, np.int32)} if kind == "cut" else {}
            calls.add([*whole(earlier), *suffix], completion, attempt=attempt, **behind)
    return calls


@given(ACTIONS)
@settings(max_examples=8)
def test_each_sampled_token_is_in_one_row_or_in_the_audit_with_a_reason(actions):
    check_tree(actions)


@pytest.mark.slow
@given(ACTIONS)
@settings(max_examples=600 if "LUDIC_SOAK" in os.environ else 150)
def test_each_sampled_token_of_many_trees_is_in_one_row_or_in_the_audit(actions):
    check_tree(actions)


def check_tree(actions: list[Any]) -> None:
    calls = play(actions)
    attempt = max((row["attempt"] for row in calls.rows), default=1)
    (found,) = assemble_episodes(calls.table(), [SealedEpisode(episode_id="e", attempt=attempt, result=DONE)])
    audit = {row.call_id: row for row in found.audit if row.reason != "undelivered"}
    behind = {row.call_id: row.num_tokens for row in found.audit if row.reason == "undelivered"}
    of_rows = {rollout.rollout_id: rollout for rollout in found.rollouts}

    by_hand = fates_by_hand(calls.rows, attempt)
    assert {call_id: (row.parent_call_id, row.reason) for call_id, row in audit.items()} == by_hand
    names = Counter[float]()
    for rollout in found.rollouts:
        mask = np.ones(rollout.response_length, bool) if rollout.action_mask is None else rollout.action_mask
        names.update(rollout.response_logprobs[mask].tolist())
    for row in calls.rows:
        entry = audit[row["call_id"]]
        assert behind.get(row["call_id"], 0) == len(row.get("undelivered_tokens", ()))
        if entry.rollout_id is not None:
            rollout = of_rows[entry.rollout_id]
            tokens = np.concatenate([rollout.prompt_tokens, rollout.response_tokens]).tolist()
            start = rollout.prompt_length + entry.start
            assert tokens[:start] == prompt_of(row)  # all that the model saw
            assert tokens[start : start + entry.num_tokens] == row["response_tokens"].tolist()
        elif row["event"] == "call":
            names.update(row["response_logprobs"].tolist())
    assert names == Counter((-np.arange(calls.num_sampled, dtype=np.float32) / 1024).tolist())
    assert not found.rollouts or problems(found.rollouts) == []
    num_trained = sum(reason is None for _, reason in by_hand.values())
    assert sum(len(rollout.agent_steps) for rollout in found.rollouts) == num_trained


def assembled(calls: Calls, *without: str, **result: Any) -> Any:
    episode = SealedEpisode(episode_id="e", result=EpisodeResult(**result))
    return assemble_episodes(calls.table(*without), [episode])[0]


def said(text: str, *tools: ToolCall) -> Message:
    return Message(role="assistant", content=text, tool_calls=tools)


def test_a_fork_goes_on_in_one_row_and_begins_another_whose_prompt_holds_what_they_share():
    calls, search = Calls(), ToolCall(id="t1", name="search", arguments="{}")
    asked = (Message(role="user", content="hi"),)
    first = calls.add([1, 2], [10, 11], messages=asked, answer=said("", search), finish_reason="tool_calls")
    calls.add([*whole(first), 3], [12])
    answered = (*asked, said("", search), Message(role="tool", content="found", tool_call_id="t1"))
    third = calls.add([*whole(first), 4], [13], messages=answered, answer=said("so"), finish_reason="length")
    calls.add([*whole(third), 5], [14], messages=answered, answer=said("done"), declared_parent="e-000")
    found = assembled(calls, reward=0.5, reward_components={"tests": 0.5}, correct=False)
    row, fork = found.rollouts

    assert (row.prompt_tokens.tolist(), row.response_tokens.tolist()) == ([1, 2], [10, 11, 4, 13, 5, 14])
    assert row.action_mask.tolist() == [True, True, False, True, False, True]
    assert row.token_rewards.tolist() == [0, 0, 0, 0, 0, 0.5]  # the last answer was scored
    steps = [(step.action_target, step.start, step.end, step.finish_reason, step.action) for step in row.agent_steps]
    assert steps == [
        ("external", 0, 2, "stop", None),
        ("external", 3, 4, "length", None),
        ("env", 5, 6, "stop", "done"),
    ]
    assert [(call.name, call.result) for call in row.agent_steps[0].tool_calls] == [("search", "found")]
    assert [(step.agent_steps, step.reward) for step in row.environment_steps] == [((2,), 0.5)]
    assert [message.content for message in row.messages] == ["hi", "", "found", "done"]
    assert row.metadata == {
        "gateway": "g1-abcd",
        "attempt": "1",
        "call_ids": "e-000 e-002 e-003",
        "scored_call_id": "e-003",
        "declared_parents": "e-000",
    }
    assert (row.incomplete_completion, row.finish_reason, row.terminated) == (True, "stop", True)

    assert (fork.prompt_tokens.tolist(), fork.response_tokens.tolist()) == ([1, 2, 10, 11, 3], [12])
    assert fork.action_mask is None
    assert (fork.segment_index, fork.parent_segment_index) == (1, 0)
    assert fork.trajectory_id == row.trajectory_id == row.rollout_id
    assert (fork.episode_reward, fork.token_rewards.tolist(), fork.environment_steps) == (0.5, [0], ())
    assert [each.call_id for each in found.audit if each.forked] == ["e-001"]
    assert problems(found.rollouts) == []
    assert assembled(calls, reward=0.5).rollouts[1].rollout_id == fork.rollout_id  # the same calls, the same ids


def test_best_of_n_trains_all_n_completions_and_a_repeated_one_only_the_answer_that_went_on():
    calls = Calls()
    same = {"request_digest": "same"}
    for number in range(3):
        calls.add([1], [10 + number, 7], **same)
    lost = calls.add([1], [13, 7], retry_count=None, **same)
    again = [calls.add([1], [n, 7], retry_count=None, retry_of=lost["call_id"], **same) for n in (14, 15)]
    assert [row.reason for row in assembled(calls, reward=1.0).audit] == [None] * 3 + ["unresolved"] * 3
    calls.add([*whole(again[1]), 5], [6])
    found = assembled(calls, reward=1.0)
    assert [row.response_tokens.tolist() for row in found.rollouts] == [[10, 7], [11, 7], [12, 7], [15, 7, 5, 6]]
    assert [row.reason for row in found.audit] == [None] * 3 + ["retry"] * 2 + [None] * 2


def test_a_repeated_answer_counts_if_a_conversation_goes_on_with_it_whose_tokens_do_not():
    calls, asked = Calls(), Message(role="user", content="hi")
    lost = calls.add([1], [2, 3], messages=(asked,), answer=said("well"))
    again = calls.add([1], [4, 5], messages=(asked,), answer=said("fine"), retry_of=lost["call_id"])
    continued = {"base_messages_call_id": again["call_id"], "base_num_messages": 2}
    calls.add([1, 6, 7], [8], messages=(asked, said("fine"), asked), answer=said("end"), **continued)  # 4, 5 as 6
    found = assembled(calls, reward=1.0)
    assert [(row.parent_call_id, row.reason) for row in found.audit] == [(None, "retry"), (None, None), (None, None)]
    assert [row.response_tokens.tolist() for row in found.rollouts] == [[4, 5], [8]]


def test_calls_whose_base_is_missing_are_quarantined_and_the_others_assembled():
    calls = Calls()
    lost = calls.add([1], [2])
    calls.add([*whole(lost), 3], [4])
    calls.add([9], [8])
    found = assembled(calls, "e-000", reward=1.0)
    assert [(row.call_id, row.reason, row.num_tokens) for row in found.audit] == [
        ("e-001", "quarantined", 1),
        ("e-002", None, 1),
    ]
    assert [row.prompt_tokens.tolist() for row in found.rollouts] == [[9]]


@pytest.mark.parametrize(
    ("result", "reward", "error", "truncation_reason"),
    [
        ({}, None, None, None),
        ({"outcome": "failed", "error": "exit code 1", "reward": 1.0}, None, "exit code 1", None),
        ({"outcome": "expired"}, None, "the episode's time was over before it was sealed", None),
        ({"outcome": "expired", "error": "it was open for too long", "reward": 0.25}, 0.25, None, "time_limit"),
    ],
)
def test_an_end_becomes_a_reward_an_error_or_a_truncation(result, reward, error, truncation_reason):
    calls = Calls()
    calls.add([1], [2])
    (row,) = assembled(calls, **result).rollouts
    assert (row.episode_reward, row.error, row.truncation_reason) == (reward, error, truncation_reason)
    assert (AWAITS_SCORE in row.metadata) == (not result)
    assert problems([row]) == []


def test_weight_versions_and_lost_arrays_of_a_row_follow_from_its_calls():
    calls = Calls()
    spans = (WeightSpan(version=3, start=0, end=1), WeightSpan(version=4, start=1, end=2))
    first = calls.add([1], [2, 3], weight_versions=spans, policy_version=3, policy_version_last=4)
    calls.add([*whole(first), 5], [6], policy_version=4, capture="ids", response_logprobs=np.zeros(1, np.float32))
    (row,) = assembled(calls, reward=1.0).rollouts
    assert [(span.version, span.start, span.end) for span in row.weight_versions] == [(3, 0, 1), (4, 1, 2), (4, 3, 4)]
    assert (row.policy_version, row.policy_version_last, row.capture) == (3, 4, "ids")


def test_text_calls_are_matched_as_the_gateway_matches_conversations():
    calls, asked = Calls(), Message(role="user", content="hi")
    text = {"capture": "text", "prompt_tokens": None, "response_tokens": None, "response_logprobs": None}
    thought = said("<think>\nhm\n</think>\n\nwell", ToolCall(id="1", name="f", arguments='{"a": 1}'))
    calls.add([], [], messages=(asked,), answer=thought, **text)
    changed = said(" well", ToolCall(id="2", name="f", arguments='{ "a":1.0 }'))
    calls.add([], [], messages=(asked, changed, asked), answer=said("end"), **text)
    calls.add([], [], messages=(replace(asked, content="hi "), changed, asked), answer=said("end"), **text)
    found = assembled(calls, reward=1.0)
    assert [row.parent_call_id for row in found.audit] == [None, "e-000", None]
    assert {row.reason for row in found.audit} == {"text"}
    assert found.rollouts == []


def test_calls_that_a_replay_left_behind_are_in_no_row_and_rival_none():
    calls = Calls()
    first = calls.add([1], [2])
    left = [calls.add([1, 2, 3], [4], request_digest="same"), calls.add([1, 2, 3, 4, 5], [6])]
    again = [calls.add([1, 2, 7], [8]), calls.add([1, 2, 3], [9], request_digest="same")]
    ids = [row["call_id"] for row in left]
    (found,) = assemble_episodes(calls.table(), [SealedEpisode(episode_id="e", result=DONE, left_behind=ids)])
    assert {row.call_id: row.reason for row in found.audit} == {
        **{row["call_id"]: None for row in (first, *again)},
        **dict.fromkeys(ids, "earlier_attempt"),
    }
    assert [row.response_tokens.tolist() for row in found.rollouts] == [[2, 7, 8], [9]]
