"""Calls become rows: parents by the longest prefix, forks, retries, cut episodes; each sampled token counts once."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.gateway import SealedEpisode, assemble_episodes
from ludic.gateway.episodes import EpisodeResult
from ludic.records import RolloutBatch, RolloutGroup, RolloutMetadata, find_problems
from ludic.root.rows.calls import stored_rows, to_calls_table

START = datetime(2026, 1, 1, tzinfo=UTC)
DONE = EpisodeResult(reward=1.0)


@dataclass
class Calls:
    """Events of calls, with tokens whose logprobs are all different, so that each sampled token has a name."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    num_sampled: int = 0

    def add(self, prompt: list[int], completion: list[int], **values: Any) -> dict[str, Any]:
        """Add an answered call, or another event."""
        number = len(self.rows)
        row = {
            "episode_id": "e",
            "attempt": 1,
            "call_id": f"call-{number:03}",
            "event": "call",
            "dialect": "chat",
            "path": "/v1/chat/completions",
            "request_digest": f"request {number}",
            "retry_count": 0,
            "created_at": START + timedelta(seconds=number, milliseconds=500),
            **values,
        }
        if row["event"] == "call":
            names = np.arange(self.num_sampled, self.num_sampled + len(completion))
            self.num_sampled += len(completion)
            row |= {
                "began_at": START + timedelta(seconds=number),
                "ended_at": row["created_at"],
                "capture": "sampler",
                "model": "tiny",
                "engine": "scripted 1",
                "policy_version": 0,
                "temperature": 1.0,
                "top_p": 1.0,
                "max_tokens": 64,
                "seed": 1,
                "finish_reason": "stop",
                "prompt_tokens": np.array(prompt, np.int32),
                "response_tokens": np.array(completion, np.int32),
                "response_logprobs": -names.astype(np.float32) / 1024,
                **values,
            }
            self._shorten(row)
        self.rows.append(row)
        return row

    def _shorten(self, row: dict[str, Any]) -> None:
        """Store the prompt as what it adds to the call with which it has most tokens in common."""
        best = max(self.answered(row), key=lambda each: common(whole(each), prompt_of(row)), default=None)
        if best is not None and (length := common(whole(best), prompt_of(row))):
            row |= {"base_call_id": best["call_id"], "base_length": length}

    def answered(self, like: dict[str, Any]) -> list[dict[str, Any]]:
        of = ("episode_id", "attempt", "event")
        return [row for row in self.rows if [row[name] for name in of] == [*(like[n] for n in of[:2]), "call"]]

    def table(self, *without: str) -> pa.Table:
        """Return all rows, as stored, but those of these calls."""
        stamp = {"run_id": "run", "worker_id": "g1-abcd"}
        rows = [{**row, **stamp} for row in self.rows if row["call_id"] not in without]
        return to_calls_table(stored_rows(rows)[0])


def prompt_of(row: dict[str, Any]) -> list[int]:
    return row["prompt_tokens"].tolist()


def whole(row: dict[str, Any]) -> list[int]:
    return [*prompt_of(row), *row["response_tokens"].tolist()]


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


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
    return max(found, key=lambda each: (len(whole(each)), -int(each["call_id"][5:])))["call_id"] if found else None


def are_rivals(one: dict[str, Any], other: dict[str, Any]) -> bool:
    ids = {one["call_id"], one.get("retry_of")} & {other["call_id"], other.get("retry_of")}
    keys = {one.get("idempotency_digest")} & {other.get("idempotency_digest")}
    return one["request_digest"] == other["request_digest"] or bool((ids | keys) - {None})


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


KINDS = ("turn", "turn", "turn", "root", "compact", "retry", "same key", "named", "intent", "failed", "cut", "attempt")
SOME = st.lists(st.integers(1, 2), max_size=3)
ACTIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 7), SOME, SOME.filter(bool)), max_size=10)


def play(actions: list[Any]) -> Calls:
    """Make the calls of an agent: each extends an earlier one, begins another context, or repeats a request."""
    calls, attempt = Calls(), 1
    for kind, which, suffix, completion in actions:
        if kind == "attempt":
            attempt = 2
            continue
        mine = calls.answered({"episode_id": "e", "attempt": attempt})
        if kind == "root" or not mine:
            calls.add([3, *suffix], completion, attempt=attempt, idempotency_digest=f"key {len(calls.rows)}")
            continue
        earlier = mine[which % len(mine)]
        repeats = {
            "retry": {"request_digest": earlier["request_digest"]},
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
@settings(max_examples=12)
def test_each_sampled_token_is_in_one_row_or_in_the_audit_with_a_reason(actions):
    check_tree(actions)


@pytest.mark.slow
@given(ACTIONS)
@settings(max_examples=600)
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


def test_calls_that_a_replay_left_behind_are_in_no_row_and_rival_none() -> None:
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
