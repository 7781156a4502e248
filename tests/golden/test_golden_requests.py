"""Requests that ludic wrote when the table was new (requests 1.0) read as they were written.

The store was written by `write` when that version came, and is never written again.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import ludic
from ludic.records.rollout import EpisodeEnd, GroupEvent
from ludic.root.claims import claim_slot, held_slot
from ludic.root.maintenance.verify import check_root
from ludic.root.root import Root
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)
STARTED = {
    "group_id": "group-7",
    "group_number": 7,
    "env_name": "moar_cats",
    "env_example_id": "prompt ☃",
    "group_size": 3,
    "policy_version": 4,
}
ENDS = (
    EpisodeEnd(
        group_index=0, outcome="complete", ended_at=NOON + timedelta(seconds=3), policy_version=4, num_tokens=2**40
    ),
    EpisodeEnd(group_index=1, outcome="failed", ended_at=NOON + timedelta(seconds=2), policy_version=5, num_tokens=0),
    EpisodeEnd(group_index=2, outcome="given_up"),
)


def write(url: str) -> None:
    root = put_run(url, RunConfig(model="tiny", env=("moar_cats",)))
    with held_slot(root, 1, "w1-a"), RolloutWriter(root, "w1-a") as writer:
        writer.append(None, [GroupEvent(event="started", created_at=NOON, **STARTED)])
        writer.flush()
        ended = {"created_at": NOON + timedelta(microseconds=5_000_001), "policy_version": 6, "episodes": ENDS}
        writer.append(None, [GroupEvent(**{"event": "given_up", **STARTED, **ended})])
    claim_slot(root, 1, "w1-b")


@pytest.fixture
def root() -> Root:
    return Root.open(str(Path(__file__).parent / "requests-v1.0"))


def test_groups_and_episodes_read_as_they_were_written(root: Root) -> None:
    with ludic.connect(root.url) as con:
        (group,) = con.sql("from requests").to_arrow_table().to_pylist()
        episodes = con.sql("from request_episodes order by group_index").to_arrow_table().to_pylist()
    assert {name: group[name] for name in STARTED} == STARTED
    assert (group["outcome"], group["slot"], group["worker_id"], group["num_ended"]) == ("given_up", 1, "w1-a", 2)
    assert (group["num_failed"], group["num_tokens"], group["oldest_version"]) == (1, 2**40, 4)
    assert group["started_at"] == NOON
    assert group["sampled_s"] == 5.000001
    found = [
        EpisodeEnd(
            **{name: row[name] for name in ("group_index", "outcome", "ended_at", "policy_version", "num_tokens")}
        )
        for row in episodes
    ]
    assert tuple(found) == ENDS


def test_verify_finds_nothing_wrong(root: Root) -> None:
    assert list(check_root(root).findings) == []
