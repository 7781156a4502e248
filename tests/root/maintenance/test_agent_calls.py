"""Calls of agents under maintenance: what verify finds, what compaction merges, which episodes expire."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from agent_calls import call_row, claimed, conversation, store, store_episodes
from tiny_runs import create_root

import ludic
from ludic.records import conform
from ludic.root import Root, claim_life, held_life, seal_episode
from ludic.root.catalogue import CALLS, SequenceName
from ludic.root.maintenance.compaction import compact
from ludic.root.maintenance.expiry import expire
from ludic.root.maintenance.expiry_rule import ExpiryRule
from ludic.root.maintenance.verify import check_root
from ludic.root.rows.calls import read_all_calls, read_calls, whole_prompts
from ludic.root.rows.parquet import encode_plain
from ludic.root.rows.tables import read_table


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return create_root(str(tmp_path / "run"), "tiny")


Change = Callable[[list[dict[str, Any]]], Any]


def changed(root: Root, name: str, change: Change) -> None:
    """Change the rows of a file in place, as a person or a bug might, with sound digests of its bytes."""
    found = CALLS.parse(name)
    assert found is not None
    table = read_table(root, CALLS, found)
    rows = table.to_pylist()
    change(rows)
    root.put(name, encode_plain(conform(pa.Table.from_pylist(rows, table.schema), "calls")))


def other_token(rows: list[dict[str, Any]]) -> None:
    rows[1]["response_tokens"][0] += 1


CHANGES: Mapping[str, tuple[int, Change, set[str]]] = {
    # Each episode has three calls, a file each, of intent and answer; call 1 extends call 0, and call 2 extends call 1.
    "token": (0, other_token, {"does not match its digest, so it was changed", "the digest of its chain, so a call"}),
    "text": (1, lambda rows: rows[1]["answer"][0].update(content="no"), {"does not match its digest"}),
    "lost": (1, lambda rows: rows.pop(), {"is missing, which another one extends"}),
    "short": (2, lambda rows: rows[1].update(base_length=99), {"does not match its digest", "extends 99 tokens of"}),
    "prompt": (0, lambda rows: rows[1].update(tools_digest="c" * 64), {f"prompts/{'c' * 64}.json is missing"}),
}


@pytest.mark.slow
def test_verify_names_what_was_changed(root: Root) -> None:
    episodes = (*CHANGES, "claimed")
    worker_id = store_episodes(root, *episodes)
    names = {
        (episode_id, number): CALLS.name(SequenceName(worker_id, 3 * index + number))
        for index, episode_id in enumerate(episodes)
        for number in range(3)
    }
    for episode_id, (number, change, _) in CHANGES.items():
        changed(root, names[episode_id, number], change)
    changed(root, names["claimed", 0], lambda rows: rows[0].update(episode_id="other"))
    changed(root, names["claimed", 1], lambda rows: rows.append({**rows[1], "call_digest": "d" * 64}))
    found = check_root(root).findings
    for episode_id, (_, _, wanted) in CHANGES.items():
        problems = [each.problem for each in found if f"episode {episode_id}, attempt 1: " in each.problem]
        assert {each for each in wanted if any(each in problem for problem in problems)} == wanted, problems
    by_check = {each.check: each.problem for each in found if each.check != "call"}
    assert by_check.keys() == {"lost_calls", "unclaimed_calls", "doubled_calls"}
    assert by_check["lost_calls"].startswith("episode_id lost, attempt 1, call_id ")
    assert by_check["unclaimed_calls"] == f"episode_id other, attempt 1, worker_id {worker_id}, num_calls 1"
    assert by_check["doubled_calls"].endswith("episode_id claimed, num_answers 2")


@pytest.mark.slow
def test_files_of_lives_that_are_over_are_merged_and_read_the_same(root: Root) -> None:
    store_episodes(root, "a", "b")
    store_episodes(root, "c")
    with held_life(root, lease_s=0.3) as alive:
        claimed(alive, "d")
        store(root, alive, [list(conversation("d"))])
        before = read_all_calls(root)
        assert len(CALLS.listed(root)) == 12  # 3 of each episode
        report = compact(root)
        assert [(each.name, each.num_files_before, each.num_files_after) for each in report.partitions] == [
            ("calls", 9, 1)
        ]
        assert len(CALLS.listed(root)) == 4
    assert read_all_calls(root) == before
    assert whole_prompts(read_calls(root, "c", 1)).keys() == set(read_calls(root, "c", 1)["call_id"].to_pylist())
    assert check_root(root).findings == []
    answers = "select episode_id, count(*), sum(len(response_tokens)) from model_calls group by all order by all"
    assert ludic.open(root.url).sql(answers).rows() == [(each, 3, 6) for each in "abcd"]


@pytest.mark.slow
def test_whole_episodes_that_are_over_expire(root: Root) -> None:
    old = datetime.now(UTC) - timedelta(days=9)
    with held_life(root) as life:
        for name in ("old", "young", "open"):
            claim = claimed(life, name)
            if name != "open":
                seal_episode(life, claim, end="complete")
        rows = {name: list(conversation(name, 2)) for name in ("old", "young", "open")}
        aged = [[{**row, "created_at": old} for row in call] for name in rows for call in rows[name]]
        # Old and young share a file: the young one's second call keeps all of its files, and these the old one's.
        aged[3] = rows["young"][1]
        store(root, life, [[call] for call in aged])
    rule = ExpiryRule(folder="calls", older_than="7d")
    assert expire(root, rule).files.keys() == {f"calls/{life.worker_id}-{number}.parquet" for number in (0, 1)}
    assert set(read_all_calls(root)["episode_id"].to_pylist()) == {"young", "open"}
    assert check_root(root).findings == []


def test_an_episode_that_shares_a_file_with_a_younger_one_is_kept(root: Root) -> None:
    old = datetime.now(UTC) - timedelta(days=9)
    with held_life(root) as life:
        for name in ("old", "young"):
            seal_episode(life, claimed(life, name), end="complete")
        (a, b), (c, d) = (list(conversation(name, 2)) for name in ("old", "young"))
        aged = [[{**row, "created_at": old} for row in call] for call in (a, [*b, *c])]
        store(root, life, [[call] for call in (*aged, d)])
    assert expire(root, ExpiryRule(folder="calls", older_than="7d")).files == {}


def test_an_intent_without_an_answer_is_an_open_call(root: Root) -> None:
    life = claim_life(root)
    claimed(life)
    open_call = call_row(event="intent")
    failed = call_row(event="failed", error="no", status=502)
    store(root, life, [[[open_call], [failed, {**failed, "event": "intent"}], *conversation(num_calls=1)]])
    rows = ludic.open(root.url).sql("select event, is_open from model_calls order by event").rows()
    assert rows == [("call", False), ("failed", False), ("intent", True)]
    episodes = ludic.open(root.url).sql("select episode_id, attempt, is_open, reward from agent_episodes").rows()
    assert episodes == [("e", 1, True, None)]
