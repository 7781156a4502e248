"""Calls of many episodes of earlier lives: the same rows as read one by one, and each file is looked through once."""

import asyncio
from pathlib import Path
from typing import Any

from tiny_runs import create_root

from ludic.records import new_id
from ludic.root import Life, Root, claim_episode, claim_life, take_over
from ludic.root.rows import EarlierCalls
from ludic.root.rows.calls import CallLog, read_calls

KEY = {"key_digest": "b" * 64, "env_name": "env", "env_example_id": "1"}


def call(episode_id: str, event: str = "failed") -> dict[str, Any]:
    named = {"episode_id": episode_id, "attempt": 1, "call_id": new_id(), "event": event, "request_digest": "a" * 64}
    return {**named, "dialect": "chat", "path": "/v1/chat/completions", "retry_count": 0}


def append(root: Root, life: Life, *files: list[str]) -> None:
    """Append files, each with a call of each of these episodes."""

    async def run() -> None:
        async with CallLog(root, life) as log:
            for episodes in files:
                await log.append(*map(call, episodes))

    asyncio.run(run())


def test_episodes_are_read_as_one_by_one_also_after_a_merge_of_files(tmp_path: Path, monkeypatch: Any) -> None:
    root = create_root(str(tmp_path / "run"), "tiny")
    lives = [claim_life(root) for _ in range(3)]
    episodes = list("abcd")
    claims = [claim_episode(lives[0], episode_id=each, attempt=1, group_id=each, **KEY) for each in episodes]
    append(root, lives[0], ["a", "b"], ["b"], ["c", "a"], ["d"])
    claims = [take_over(lives[1], claim) for claim in claims]
    append(root, lives[1], ["a"], ["b", "d"])
    for claim in claims:
        assert claim is not None
        assert take_over(lives[2], claim) is not None
    read = []
    plain = Root.read
    monkeypatch.setattr(Root, "read", lambda self, name: read.append(name) or plain(self, name))
    earlier = EarlierCalls(root, live=lives[2].worker_id)

    def check(*counts: int) -> None:
        for episode, count in zip(episodes, counts, strict=True):
            rows = earlier.read(episode, 1)
            assert rows.num_rows == count
            assert rows.equals(read_calls(root, episode, 1))

    check(3, 3, 1, 2)
    append(root, lives[2], ["c"])
    check(3, 3, 2, 2)
    read.clear()
    assert [earlier.read(each, 1).num_rows for each in episodes] == [3, 3, 2, 2]
    assert not [name for name in read if name.startswith("calls/")]
    folder = tmp_path / "run" / "calls"
    for number in range(2):  # a merge of files, whose rows keep their worker_id
        (folder / f"{lives[0].worker_id}-{number}.parquet").rename(folder / f"compacted.7-{number}.parquet")
    check(3, 3, 2, 2)
    earlier._forget()
    earlier.read("a", 1)
    (folder / "compacted.7-0.parquet").rename(folder / "compacted.8-0.parquet")
    earlier._kept.clear()  # as if other files had taken their place
    check(3, 3, 2, 2)
