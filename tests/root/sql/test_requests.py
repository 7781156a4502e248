"""The views of requests/: how each group ended, what the trainer did with it, and what training misses."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from strategies import make_batch

import ludic
from ludic.records.rollout import EpisodeEnd, GroupEvent, RolloutBatch, RolloutMetadata
from ludic.root.attempts import start_attempt
from ludic.root.claims import claim_slot, held_slot
from ludic.root.root import Root
from ludic.root.rows.writer import RolloutWriter
from ludic.root.weights.policies import publish_policy

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)


def event(kind: Any, number: int, at_s: float, ends: Sequence[EpisodeEnd] | None = None, **values: Any) -> GroupEvent:
    return GroupEvent(
        **{
            "event": kind,
            "group_id": f"group-{number}",
            "group_number": number,
            "env_name": "moar_cats",
            "env_example_id": "prompt-1",
            "group_size": 2,
            "policy_version": 3,
            "created_at": NOON + timedelta(seconds=at_s),
            "episodes": None if ends is None else tuple(ends),
        }
        | values
    )


def end(index: int, at_s: float, num_tokens: int, *, version: int = 3, outcome: Any = "complete") -> EpisodeEnd:
    ended_at = NOON + timedelta(seconds=at_s)
    return EpisodeEnd(
        group_index=index, outcome=outcome, ended_at=ended_at, policy_version=version, num_tokens=num_tokens
    )


def put(root: Root, worker_id: str, *events: GroupEvent) -> None:
    with RolloutWriter(root, worker_id) as writer:
        writer.append(None, events)


def ask(root: Root, sql: str) -> list[tuple[Any, ...]]:
    with ludic.connect(root.url) as con:
        return con.sql(sql).fetchall()


@pytest.mark.slow
def test_how_groups_ended_is_told_by_their_ends_and_by_the_next_life_of_the_slot(root: Root) -> None:
    with held_slot(root, 0, "w0-first"):
        put(
            root,
            "w0-first",
            event("started", 0, 0),
            event("started", 1, 0),
            event("started", 2, 1),
            event("started", 3, 2),
            event("complete", 0, 5, [end(0, 5, 30), end(1, 2, 10, version=4, outcome="failed")], policy_version=5),
            event("given_up", 1, 6, [end(0, 4, 7), EpisodeEnd(group_index=1, outcome="given_up")]),
        )
    claim_slot(root, 1, "w1-first")
    put(root, "w1-first", event("started", 4, 0))
    found = ask(
        root,
        "select group_number, slot, outcome, num_ended, num_failed, num_tokens, sampled_s, fate, oldest_version "
        "from requests order by group_number",
    )
    assert found == [
        (0, 0, "complete", 2, 1, 40, 5.0, "waiting", 3),
        (1, 0, "given_up", 1, 0, 7, 6.0, None, 3),
        (2, 0, "lost", None, None, None, None, None, None),  # its worker has ended
        (3, 0, "lost", None, None, None, None, None, None),
        (4, 1, "running", None, None, None, None, None, None),
    ]
    claim_slot(root, 1, "w1-second")
    put(root, "w1-second", event("started", 4, 9, group_id="group-4-again"))
    found = ask(root, "select group_id, outcome, next_group_id from requests where group_number = 4 order by 1")
    assert found == [("group-4", "lost", "group-4-again"), ("group-4-again", "running", None)]


def test_episodes_have_places_and_seconds_from_the_start_of_their_group(root: Root) -> None:
    ends = [end(0, 5, 30), end(1, 2, 10), EpisodeEnd(group_index=2, outcome="given_up")]
    put(root, "w0-a", event("started", 0, 1), event("given_up", 0, 6, ends, group_size=3))
    found = ask(root, "select group_index, outcome, num_tokens, sampled_s, place from request_episodes order by 1")
    assert found == [
        (0, "complete", 30, 4.0, 2),
        (1, "complete", 10, 1.0, 1),
        (2, "given_up", None, None, None),
    ]


@pytest.mark.slow
def test_a_root_without_requests_has_empty_views(root: Root) -> None:
    for view in ("requests", "request_episodes", "bias_by_length", "bias_by_order"):
        assert ask(root, f"from {view}") == []


@pytest.fixture
def judged(root: Root) -> Root:
    """Four groups of two: one answer used at step 1, both too old, both dropped by another filter, not seen yet."""
    claim_slot(root, 0, "w0-a")
    lengths = [(3, 12), (40, 100), (5, 9), (0, 33)]
    events = []
    for number, pair in enumerate(lengths):
        ends = [end(index, 10 + number + index, length) for index, length in enumerate(pair)]
        events += [event("started", number, number), event("complete", number, 11 + number, ends)]
    put(root, "w0-a", *events)
    return root


LEDGER = """
create or replace view root_0.batches as
select *, group_id || '/' || group_index as rollout_id from (values
    ('group-0', 0, true, 1, null, 2), ('group-0', 0, true, 2, null, 4),
    ('group-0', 1, false, 1, 'drop_incomplete_completions', 2),
    ('group-1', 0, false, 2, 'max_off_policy_steps', 40), ('group-1', 1, false, 2, 'max_off_policy_steps', 40),
    ('group-2', 0, false, 2, 'drop_errors', 1), ('group-2', 1, false, 2, 'drop_errors', 1)
) as t (group_id, group_index, used, step, reason, off_policy_steps)
"""
ROLLOUTS = """
create or replace view root_0.rollouts as
select distinct rollout_id, group_id, group_index from root_0.batches
"""


def test_what_training_misses_is_told_by_length_and_by_order(judged: Root) -> None:
    with ludic.connect(judged.url) as con:
        con.execute(LEDGER)
        con.execute(ROLLOUTS)
        fates = con.sql("select fate, used_step, off_policy_steps from requests order by group_number").fetchall()
        by_length = con.sql(
            "select min_tokens, num_episodes, num_used, num_too_old, num_dropped, num_waiting, share_used "
            "from bias_by_length"
        ).fetchall()
        by_order = con.sql(
            "select twentieth, num_groups, num_used, num_too_old, share_used, num_tokens_mean, sampled_s_mean "
            "from bias_by_order"
        ).fetchall()
    assert fates == [
        ("used", 1, 3.0),
        ("max_off_policy_steps", None, None),
        ("drop_errors", None, None),
        ("waiting", None, None),
    ]
    assert by_length == [
        (0, 1, 0, 0, 0, 1, None),
        (2, 1, 1, 0, 0, 0, 1.0),
        (4, 1, 0, 0, 1, 0, 0.0),
        (8, 2, 0, 0, 2, 0, 0.0),  # one of them was in the group that was used
        (32, 2, 0, 1, 0, 1, 0.0),
        (64, 1, 0, 1, 0, 0, 0.0),
    ]
    assert by_order == [
        (1, 1, 1, 0, 1.0, 15.0, 11.0),
        (2, 1, 0, 1, 0.0, 140.0, 11.0),
        (3, 1, 0, 0, 0.0, 14.0, 11.0),
        (4, 1, 0, 0, None, 33.0, 11.0),
    ]


@pytest.mark.slow
def test_a_group_whose_rollouts_were_never_committed_is_lost_once_its_number_is_sampled_again(root: Root) -> None:
    """As after a kill between the two files of a flush."""
    ends = [end(0, 5, 30), end(1, 2, 10)]
    put(root, "w0-a", event("started", 0, 0), event("complete", 0, 5, ends))
    assert ask(root, "select outcome, fate from requests") == [("complete", "waiting")]
    put(root, "w0-b", event("started", 0, 9, group_id="again"), event("complete", 0, 12, ends, group_id="again"))
    found = ask(root, "select group_id, outcome, fate from requests order by started_at")
    assert found == [("group-0", "lost", None), ("again", "complete", "waiting")]


def test_a_group_that_came_when_its_weights_were_too_old_to_be_read_says_so(root: Root) -> None:
    attempt = start_attempt(root, config={"max_off_policy_steps": 8})
    for step in range(20):
        publish_policy(root, lambda folder: None, step=step, attempt_id=attempt.attempt_id, parent_version=None)
    start_attempt(root, config={"max_off_policy_steps": 0, "offline": True})  # it reads all versions
    old, recent = [end(0, 5, 30, version=10), end(1, 5, 9, version=12)], [end(0, 5, 30, version=11)]
    put(root, "w0-a", event("complete", 0, 6, old), event("complete", 1, 6, recent))
    assert ask(root, "select fate from requests order by group_number") == [("max_off_policy_steps",), ("waiting",)]


def test_what_became_of_a_group_is_committed_before_its_rollouts(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(num_groups=1, group_size=2, response_length=4, seed=1, policy_version=0)
    batch = RolloutBatch(groups=batch.groups, metadata=RolloutMetadata(worker_id="w0-a"))
    names: list[str] = []
    put_if_absent = Root.put_if_absent

    def note(self: Root, name: str, data: Any) -> bool:
        names.append(name)
        return put_if_absent(self, name, data)

    monkeypatch.setattr(Root, "put_if_absent", note)
    with RolloutWriter(root, "w0-a") as writer:
        writer.append(None, [event("started", 0, 0)])
        writer.append(batch, [event("complete", 0, 1, [end(0, 1, 4), end(1, 1, 4)])])
        writer.flush()
        writer.append(None, [event("started", 1, 2)])
    assert names == [
        "requests/w0-a-0.parquet",
        "rollouts/version=0/env=moar_cats/w0-a-0.parquet",
        "requests/w0-a-1.parquet",
    ]


@pytest.mark.slow
def test_groups_keep_their_order_and_their_ends_when_rows_of_starts_have_expired(root: Root) -> None:
    ends = [end(0, 5, 30), end(1, 2, 10)]
    put(root, "w0-a", event("given_up", 0, 6, [EpisodeEnd(group_index=0, outcome="given_up")]))
    put(root, "w0-b", event("started", 0, 9, group_id="again"), event("complete", 0, 12, ends, group_id="again"))
    found = ask(root, "select group_id, outcome, fate, sampled_s, next_group_id from requests order by ended_at")
    assert found == [("group-0", "given_up", None, None, "again"), ("again", "complete", "waiting", 3.0, None)]
    assert ask(root, "select num_given_up, num_complete from bias_by_order order by twentieth") == [(1, 0), (0, 1)]


def test_groups_of_a_run_are_cut_into_twenty_parts_by_the_order_of_their_starts(root: Root) -> None:
    put(root, "w0-a", *(event("started", number, number) for number in range(21)))
    found = ask(root, "select twentieth, num_groups from bias_by_order order by twentieth")
    assert found == [(1, 2), *((part, 1) for part in range(2, 21))]
