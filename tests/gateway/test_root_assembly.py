"""`ludic assemble`: episodes that are over become rows, once; scores that come later change advantages."""

from pathlib import Path

import numpy as np
import pytest
from chat_models import chat_tokenizer
from gateway.stored_calls import Calls, store, store_group, whole
from tiny_runs import create_root, query

import ludic
from ludic.gateway import assemble_root
from ludic.records import Message
from ludic.root import CALLS, Root, claim_life, newest_episode_claim
from ludic.root.catalogue import SequenceName
from ludic.root.rows.tables import put_table
from ludic.root.sql import advantages
from ludic.root.sql.library import load_checks


@pytest.fixture
def run(tmp_path: Path) -> Root:
    return create_root(str(tmp_path / "run"), "tiny")


def contents(root: Root, folder: str = "rollouts") -> dict[str, bytes]:
    return {name: root.read(name) for name in root.list(f"{folder}/")}


@pytest.mark.slow
def test_a_group_is_assembled_once_and_each_episode_counts_once_in_its_advantage(run: Root):
    life = claim_life(run, "http://127.0.0.1:1")
    store_group(life, 1, {"a": 1.0, "b": 0.0, "c": 0.5})
    store_group(life, 2, {"d": 0.0, "e": 1.0, "f": 1.0})
    report = assemble_root(run)
    # 1 + 2 + 1 + 2 sampled tokens of the first episode, and 1 + 2 of the others, in each group
    assert (report.num_episodes, report.num_groups, report.num_rollouts, report.left) == (6, 2, 10, {})
    assert report.num_tokens == {"trained": 24}
    written = contents(run)

    with ludic.connect(run) as con:
        rows_of = dict(con.sql("select episode_id, list(distinct rollout_id) from rollouts group by 1").fetchall())
        assert {name: len(rows) for name, rows in rows_of.items()} == {
            "a": 3,
            "b": 1,
            "c": 1,
            "d": 3,
            "e": 1,
            "f": 1,
        }
        found = {row["rollout_id"]: row["advantage"] for row in advantages(con, "rloo").to_pylist()}
    by_episode = {name: [found[row] for row in rows] for name, rows in rows_of.items()}
    assert by_episode["a"] == [0.75, 0.75, 0.75]  # 1 - (0 + 0.5) / 2, for each of its rows
    assert by_episode["b"] == [-0.75]  # 0 - (1 + 0.5) / 2
    assert by_episode["c"] == [0.0]  # 0.5 - (1 + 0) / 2
    assert by_episode["d"] == [-1.0, -1.0, -1.0]

    again = assemble_root(run)
    assert (again.num_episodes, again.num_known, contents(run)) == (0, 6, written)
    run.delete(sorted(written)[0])  # as if it had been killed between the two groups
    assert assemble_root(run).num_groups == 1
    assert contents(run) == written


@pytest.mark.slow
def test_open_episodes_of_lives_and_of_workers_are_left_alone_and_those_of_ended_gateways_are_sealed(run: Root):
    worker, gateway, ended = claim_life(run), claim_life(run, "http://a"), claim_life(run, "http://b")
    for number, (life, name) in enumerate([(worker, "w"), (gateway, "g"), (ended, "e")]):
        calls = Calls(name)
        calls.add([1], [2])
        store(life, number, calls, sealed=False)
    ended.end()
    worker.end()
    report = assemble_root(run)
    assert report.num_rollouts == 1
    assert query(run, "select episode_id, episode_reward, error from rollouts") == [("e", None, None)]
    sealed = newest_episode_claim(run, "e", 1)
    assert (sealed.number, sealed.end, sealed.sealed_at is not None) == (2, "complete", True)
    assert report.left == {
        "g": "is open at a gateway that lives, or did within its lease; seal it, or stop the gateway",
        "w": "is an episode of a worker, which makes its rows",
    }

    run.delete(next(iter(contents(run))))  # as if it had been killed after it had sealed the episode
    assert assemble_root(run).num_rollouts == 1

    into = create_root(f"{run.url}-again", "tiny")
    assert assemble_root(run, into).left == {"g": report.left["g"]}
    assert query(into, "select episode_id from rollouts order by 1") == [("e",), ("w",)]
    assert query(run, "select count(*) from rollouts") == [(1,)]


def test_a_group_waits_for_its_open_episodes_and_a_claim_sets_no_columns_of_ludic(run: Root):
    life = claim_life(run, "http://a")
    for number, is_sealed in enumerate([True, False]):
        calls = Calls(f"e{number}")
        calls.add([1], [2])
        store(life, number, calls, sealed=is_sealed, group_id="group", group_index=number, group_size=2)
    calls = Calls("odd")
    calls.add([1], [2])
    store(life, 2, calls, facts={"rollout_id": "mine", "wanted": "4"})
    report = assemble_root(run)
    assert report.num_rollouts == 0
    assert report.left["odd"] == "its claim sets rollout_id; it may set example_columns, extra, wanted"
    assert report.left["e0"] == "waits for 1 other episodes of its group"


AUDIT = "select * exclude (began_at, rollout_id, attempt, root) from call_audit order by call_id, num_tokens"


@pytest.mark.slow
def test_the_audit_says_of_each_call_where_its_tokens_are(run: Root):
    life = claim_life(run, "http://a")
    calls = Calls("e")
    first = calls.add([1], [2, 3])
    calls.add([1], [4], retry_of=first["call_id"])  # the first was extended
    calls.add([*whole(first), 5], [6], undelivered_tokens=np.array([7, 7], np.int32))
    calls.add([*whole(first), 8], [9, 9, 9])
    calls.add([], [], event="intent")
    store(life, 0, calls, reward=1.0)
    later = Calls("open")
    later.add([1], [2])
    store(life, 1, later, sealed=False)
    before = "select call_id, fate, why, num_tokens from call_audit where episode_id = 'e' order by call_id, num_tokens"
    assert {row[1:3] for row in query(run, before)} > {("waiting", "not_assembled"), ("dropped", "undelivered")}
    assemble_root(run)

    found = query(run, AUDIT)
    assert found == [
        # episode, call, fate, why, tokens, delivered, forked, start, rows
        ("e", "e-000", "trained", None, 2, True, False, 0, 1),
        ("e", "e-001", "dropped", "retry", 1, True, False, None, 0),
        ("e", "e-002", "trained", None, 1, True, False, 3, 1),
        ("e", "e-002", "dropped", "undelivered", 2, False, False, None, 0),
        ("e", "e-003", "trained", None, 3, True, True, 0, 1),
        ("e", "e-004", "dropped", "unfinished", 0, False, False, None, 0),
        ("open", "open-000", "waiting", "open", 1, True, False, None, 0),
    ]
    assert query(run, load_checks()["unaccounted_calls"]) == []


@pytest.mark.slow
def test_verify_finds_calls_that_no_row_has_or_that_two_have(run: Root):
    life, calls = claim_life(run, "http://a"), Calls("e")
    calls.add([1], [2, 3])
    store(life, 0, calls, reward=1.0)
    lost = Calls("e")
    lost.rows = calls.rows[:]
    lost.add([7], [8])
    assemble_root(run)
    check = load_checks()["unaccounted_calls"]
    put_table(run, CALLS, SequenceName(life.worker_id, 1), lost.table("e-000"))
    assert [row[2:6] for row in query(run, check)] == [("e-001", "unexplained", 1, 0)]
    ((name, content),) = contents(run).items()
    run.put(name.replace("-0.parquet", "-1.parquet"), content)
    assert sorted(row[2:6] for row in query(run, check)) == [("e-000", None, 2, 2), ("e-001", "unexplained", 1, 0)]


@pytest.mark.slow
def test_calls_that_were_recorded_as_text_get_tokens_by_a_tokenizer(run: Root, tmp_path: Path):
    chat_tokenizer().save_pretrained(tmp_path / "tokenizer")
    asked, more = Message(role="user", content="count"), Message(role="user", content="on")
    calls = Calls("e")
    text = {"capture": "text", "prompt_tokens": None, "response_tokens": None, "response_logprobs": None}
    first = Message(role="assistant", content="one")
    calls.add([], [], messages=(asked,), answer=first, **text)
    calls.add([], [], messages=(asked, first, more), answer=Message(role="assistant", content="two"), **text)
    store(claim_life(run, "http://a"), 0, calls, reward=1.0)

    without = ludic.open(run.url).assemble()
    assert (without.num_rollouts, without.left) == (0, {"e": "has no call whose prompt is known: 2 text"})
    assert without.remarks[-1] == "calls that were recorded as text have no tokens; --tokenizer NAME makes them"
    found = ludic.open(run.url).assemble(tokenizer=str(tmp_path / "tokenizer"))
    assert found.num_rollouts == 1
    ((tokens, mask, logprobs, capture, ids),) = query(run, TEXT_ROW)
    tokenizer = chat_tokenizer()
    assert tokenizer.decode(tokens) == (
        "<|im_start|>user\ncount<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    )
    sampled = [token for token, is_sampled in zip(tokens[-len(mask) :], mask, strict=True) if is_sampled]
    assert tokenizer.decode(sampled) == "one<|im_end|>two<|im_end|>"
    assert (set(logprobs), capture, ids) == ({0.0}, "text", "e-000 e-001")


TEXT_ROW = """
select prompt_tokens || response_tokens, action_mask, response_logprobs, capture, metadata['call_ids'] from rollouts
"""
