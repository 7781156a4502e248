"""Calls of agents for tests, as a gateway stores them, and roots with episodes of them."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from ludic.root import CALLS, Life, claim_episode, seal_episode
from ludic.root.catalogue import SequenceName
from ludic.root.rows.calls import stored_rows, to_calls_table
from ludic.root.rows.tables import put_table

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Calls:
    """Events of calls, with tokens whose logprobs are all different, so that each sampled token has a name."""

    episode_id: str = "e"
    rows: list[dict[str, Any]] = field(default_factory=list)
    num_sampled: int = 0

    def add(self, prompt: list[int], completion: list[int], **values: Any) -> dict[str, Any]:
        """Add an answered call, or another event."""
        number = len(self.rows)
        row = {
            "episode_id": self.episode_id,
            "attempt": 1,
            "call_id": f"{self.episode_id}-{number:03}",
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
            if row["prompt_tokens"] is not None:
                self._shorten(row)
        self.rows.append(row)
        return row

    def _shorten(self, row: dict[str, Any]) -> None:
        """Store the prompt as what it adds to the call with which it has most tokens in common."""
        best = max(self.answered(row["attempt"]), key=lambda each: common(whole(each), prompt_of(row)), default=None)
        if best is not None and (length := common(whole(best), prompt_of(row))):
            row |= {"base_call_id": best["call_id"], "base_length": length}

    def answered(self, attempt: int) -> list[dict[str, Any]]:
        return [row for row in self.rows if (row["attempt"], row["event"]) == (attempt, "call")]

    def table(self, *without: str) -> pa.Table:
        """Return all rows, as stored, but those of these calls."""
        stamp = {"run_id": "run", "worker_id": "g1-abcd"}
        rows, _ = stored_rows([{**row, **stamp} for row in self.rows if row["call_id"] not in without])
        return to_calls_table(rows)


def prompt_of(row: dict[str, Any]) -> list[int]:
    return row["prompt_tokens"].tolist()


def whole(row: dict[str, Any]) -> list[int]:
    return [*prompt_of(row), *row["response_tokens"].tolist()]


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def store(life: Life, number: int, calls: Calls, *, sealed: bool = True, **facts: Any) -> None:
    """Store the calls of an episode in one file, and its claim. facts: of the claim; end and reward seal it."""
    key = {"key_digest": "b" * 64, "group_id": calls.episode_id, "env_name": "env", "env_example_id": "1"}
    end = {name: facts.pop(name) for name in ("end", "reward", "error") if name in facts}
    claim = claim_episode(life, episode_id=calls.episode_id, attempt=1, **{**key, **facts})
    assert put_table(life.root, CALLS, SequenceName(life.worker_id, number), calls.table())
    if sealed:
        seal_episode(life, claim, **{"end": "complete", **end})


def store_group(life: Life, number: int, rewards: dict[str, float | None]) -> None:
    """Store a group of three episodes, `rewards` by name; the first makes three rows: a fork, and a new context."""
    for index, (name, reward) in enumerate(rewards.items()):
        calls = Calls(name)
        first = calls.add([1, 2], [3])
        calls.add([*whole(first), 4], [5, 6])
        if index == 0:
            calls.add([*whole(first), 7], [8])
            calls.add([9], [10, 11])
        facts = {"group_id": f"group {number}", "group_index": index, "group_size": len(rewards)}
        store(life, 10 * number + index, calls, reward=reward, **facts)
