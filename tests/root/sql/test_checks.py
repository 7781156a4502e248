"""Each data check finds the fault that is seeded for it, and nothing else."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pytest

from ludic.errors import QueryError
from ludic.records import columns
from ludic.records.columns import ArrayColumn
from ludic.records.tables import Column, arrow_schema
from ludic.root.attempts import start_attempt
from ludic.root.json_records import Policy
from ludic.root.maintenance.compaction import compact
from ludic.root.maintenance.verify import check_root, checks, meaning_of
from ludic.root.maintenance.verify.checks import ROW_CHECKS, small_views_as_tables
from ludic.root.root import Root
from ludic.root.rows.ledger import ledger_name
from ludic.root.rows.parquet import encode, encode_plain
from ludic.root.rows.tombstones import expire, quarantine, stored_files
from ludic.root.sql.connection import connect, open_duckdb
from ludic.root.sql.library import has_rows, load_checks, run_checks, run_query
from ludic.root.sql.planner import BatchRules, Planner

pytestmark = pytest.mark.slow

on_both_filesystems = pytest.mark.parametrize("filesystem", ["local", "memory"])
"""For tests that between them have files of every kind, sound and broken."""


def found(root: Root) -> dict[str, list[dict]]:
    """Offending rows of the checks that found any, as `ludic verify` asks for them."""
    con = connect(root)

    def rows_of(names: Iterable[str]) -> dict[str, list[dict]]:
        checks = {name: load_checks()[name] for name in names}
        return {name: run_query(con, sql).to_pylist() for name, sql in checks.items() if has_rows(con, sql)}

    with small_views_as_tables(con):
        of_all_rows = rows_of(load_checks().keys() - set(ROW_CHECKS))
    # Where nothing is stored, they have no row to look at.
    return of_all_rows | (rows_of(ROW_CHECKS) if root.list("rollouts") else {})


@pytest.fixture
def ledger(root: Root, store, arrive) -> Callable[..., list[dict]]:
    """Two stored groups, and the rows that plan one a step; nothing of it is in the ledger yet."""
    tables = [arrive([[1.0, 0.0]], arrival=number, sequence=number) for number in range(2)]
    start_attempt(root)
    planner = Planner(BatchRules(groups_per_batch=1))
    for table in tables:
        name = store(table.select(arrow_schema("rollouts").names))
        index = table.schema.get_field_index("file")
        planner.add(table.set_column(index, "file", pa.array([name] * table.num_rows)))
    return [planner.plan(step=step, attempt_id=1, trainer_version=0).to_pylist() for step in (1, 2)]


def expire_all(root: Root) -> None:
    expire(root, stored_files(root), rule="by hand")


def quarantine_all(root: Root) -> None:
    for name in root.list("rollouts"):
        quarantine(root, name, "torn")


def commit(root: Root, step: int, rows: list[dict]) -> None:
    table = pa.Table.from_pylist([row | {"step": step} for row in rows], schema=arrow_schema("batches"))
    assert root.put_if_absent(ledger_name(1, step), encode_plain(table))


@on_both_filesystems
def test_an_empty_root_is_sound(root: Root):
    assert found(root) == {}
    assert {name: table.num_rows for name, table in run_checks(connect(root)).items()} == dict.fromkeys(
        load_checks(), 0
    )


def test_a_root_that_was_trained_on_is_sound(root: Root, ledger):
    for step, rows in enumerate(ledger, start=1):
        commit(root, step, rows)
    assert found(root) == {}


def test_a_run_with_many_rows_is_checked_through_its_views(root: Root, ledger, monkeypatch: pytest.MonkeyPatch):
    commit(root, 2, ledger[0])
    monkeypatch.setattr(checks, "_MOST_ROWS", 1)
    con = connect(root)
    with small_views_as_tables(con):
        tables = con.execute("select table_name from duckdb_tables() where temporary order by all").fetchall()
        assert tables == [("attempts",), ("evals",), ("gone",), ("policies",)]
    assert list(found(root)) == ["step_gaps"]


def test_a_rollout_that_is_stored_twice(root: Root, store, rows):
    store(rows([[1.0, 0.0]]))
    store(rows([[1.0, 0.0]], sequence=1))
    offending = {name: table.to_pylist() for name, table in run_checks(connect(root)).items() if table.num_rows}
    assert offending == found(root)
    assert set(offending) == {"duplicate_rollouts", "split_groups"}
    assert [row["num_rows"] for row in offending["duplicate_rollouts"]] == [2, 2]


def test_a_group_that_lacks_an_episode(root: Root, store, rows):
    table = rows([[1.0, 0.0, 0.5]])
    store(table.slice(0, 2))
    group_id = table["group_id"][0].as_py()
    assert found(root) == {
        "incomplete_groups": [{"group_id": group_id, "group_size": 3, "group_size_max": 3, "num_episodes": 2}]
    }


def test_a_group_in_two_files(root: Root, store, rows):
    store(rows([[1.0, 0.0]]).slice(0, 1))
    store(rows([[1.0, 0.0]], sequence=1).slice(1, 1))
    assert [row["num_files"] for row in found(root)["split_groups"]] == [2]


def test_a_group_in_another_versions_partition(root: Root, rows):
    root.put("rollouts/version=9/env=other/worker-0-0.parquet", encode(rows([[1.0]], policy_version=2)))
    (row,) = found(root)["misplaced_rollouts"]
    assert (row["version"], row["policy_version"], row["env"], row["env_name"]) == (9, 2, "other", "moar_cats")


def test_a_workers_file_that_is_gone(root: Root, store, rows):
    for sequence in (3, 4, 7):
        store(rows([[1.0]], seed=sequence, sequence=sequence))
    assert found(root) == {
        "sequence_gaps": [
            {"worker_id": "worker-0", "first_missing": 0, "last_missing": 2},
            {"worker_id": "worker-0", "first_missing": 5, "last_missing": 6},
        ],
    }


def test_a_group_lies_in_the_partition_of_its_oldest_version(root: Root, store, rows):
    # New weights came between the two rollouts of the group.
    table = rows([[1.0, 0.0]], policy_version=2)
    field = arrow_schema("rollouts").field("policy_version")
    index = table.schema.get_field_index("policy_version")
    store(table.set_column(index, field, pa.array([2, 3], field.type)))
    assert found(root) == {}


@on_both_filesystems
def test_files_that_were_quarantined_or_have_expired_are_no_gap(root: Root, store, rows):
    names = [store(rows([[1.0]], seed=sequence, sequence=sequence)) for sequence in range(5)]
    quarantine(root, names[1], "torn")
    (stored,) = [stored for stored in stored_files(root) if stored.file.name == names[3]]
    expire(root, [stored], rule="by hand")
    assert found(root) == {}
    root.delete(names[2])
    assert found(root) == {"sequence_gaps": [{"worker_id": "worker-0", "first_missing": 2, "last_missing": 2}]}


def test_compaction_leaves_no_gap(root: Root, store, rows):
    for sequence in range(3):
        store(rows([[1.0]], seed=sequence, sequence=sequence))
    compact(root)
    assert len(root.list("rollouts")) == 1
    assert found(root) == {}


@on_both_filesystems
def test_a_source_that_compaction_lost(root: Root, store, rows):
    for sequence in range(3):
        store(rows([[1.0]], seed=sequence, sequence=sequence))
    compact(root)
    root.delete("rollouts")
    partition = "rollouts/version=0/env=moar_cats"
    assert found(root) == {
        "lost_sources": [{"partition": partition, "worker_id": "worker-0", "sequence": index} for index in range(3)]
    }


def test_the_sources_of_a_compacted_file_that_was_quarantined_are_not_missed(root: Root, ledger):
    for step, rows in enumerate(ledger, start=1):
        commit(root, step, rows)
    compact(root)
    (compacted,) = root.list("rollouts")
    quarantine(root, compacted, "torn")
    assert found(root) == {}


def test_the_rollouts_of_a_compacted_file_that_expired_are_not_missed(root: Root, ledger):
    for step, rows in enumerate(ledger, start=1):
        commit(root, step, rows)
    compact(root)
    expire(root, stored_files(root), rule="by hand")
    assert root.list("rollouts") == []
    assert found(root) == {}


def found_in_changed(root: Root, store, rows, check: str, changes: dict[str, Any]) -> set[str]:
    """Change each column in the second row of a file; returns the columns whose rows the check finds, and no others."""
    column_of = {}
    for sequence, (column, value) in enumerate(changes.items()):
        table = rows([[1.0, 0.0]], seed=sequence)
        good = table[column].to_pylist()[0]
        column_of[table["rollout_id"][1].as_py()] = column
        store(rows([[1.0, 0.0]], seed=sequence, sequence=sequence, **{column: [good, value]}))
    return {column_of[row["rollout_id"]] for row in found(root)[check]}


def test_lists_that_are_not_as_long_as_they_say(root: Root, store, rows):
    changes = {
        "prompt_length": 7,
        "response_length": 15,
        "token_rewards": [0.0],
        "response_logprobs": [],
        "action_mask": [True] * 17,
        "action_length": 15,
    }
    assert found_in_changed(root, store, rows, "unequal_lengths", changes) == changes.keys()


def test_numbers_that_are_none(root: Root, store, rows):
    changes = {
        "episode_reward": float("nan"),
        "token_rewards": [float("inf")] * 16,
        "response_logprobs": [float("-inf")] * 16,
        "reward_components": {"cats": float("nan")},
        "temperature": float("inf"),
    }
    assert found_in_changed(root, store, rows, "not_finite", changes) == changes.keys()


EXPERTS = [[[1, 2]]] * 23
KEPT = [[]] * 16


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("experts", EXPERTS[1:]),
        ("experts", [*EXPERTS[1:], [[-1, 2]]]),
        ("kept_tokens", KEPT[1:]),
        ("kept_tokens", [*KEPT[1:], [-1, 2]]),
        ("kept_tokens", [*KEPT[1:], [2, 300]]),
    ],
)
def test_arrays_that_only_the_catalogue_names(root: Root, store, rows, column: str, value: list):
    sound = {"experts": EXPERTS, "kept_tokens": [*KEPT[1:], [2, 299]]}[column]
    store(rows([[1.0, 0.0, 1.0]], **{column: [sound, value, None]}))
    con = connect(root)
    con.execute("set variable vocab_size = 300")
    [row] = run_query(con, load_checks()["unsound_arrays"]).to_pylist()
    assert row["array_name"] == column
    assert row["rollout_id"] == rows([[1.0, 0.0, 1.0]])["rollout_id"][1].as_py()


def test_an_array_is_checked_by_its_row_of_the_catalogue(monkeypatch: pytest.MonkeyPatch):
    keys = {"along": "row", "set_by": "sampler", "range": [0, 1]}
    pace = ArrayColumn.of(Column(name="pace", type=pa.float32(), nullable=True, doc="", catalogue=keys))
    flags = pa.list_(pa.bool_())
    greedy = Column(
        name="greedy", type=flags, nullable=True, doc="", catalogue={**keys, "along": "prompt", "range": (None, None)}
    )
    monkeypatch.setattr(columns, "array_columns", lambda: {"pace": pace, "greedy": ArrayColumn.of(greedy)})
    con = open_duckdb()
    con.execute("""
        create table rollouts as
        select * from (
            values
            ('a', 2, 0.5::float, [true, false]),
            ('b', 2, 'nan'::float, null),
            ('c', 1, 2::float, [true]),
            ('d', 1, null, [])
        )
        rows (rollout_id, prompt_length, pace, greedy)
    """)
    found = run_query(con, load_checks()["unsound_arrays"]).to_pylist()
    assert [(row["rollout_id"], row["array_name"]) for row in found] == [("b", "pace"), ("c", "pace"), ("d", "greedy")]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("response_logprobs", (5.0, -9999.0, -101.0)),
        ("response_tokens", (-1, 300, 2**31 - 1)),
        ("prompt_tokens", (-1, 300)),
    ],
)
def test_tokens_and_logprobs_that_training_would_drop(root: Root, store, rows, column: str, values: tuple):
    for sequence, value in enumerate(values):
        good = rows([[1.0, 0.0]])[column].to_pylist()[0]
        store(rows([[1.0, 0.0]], sequence=sequence, **{column: [good, [value, *good[1:]]]}))
    con = connect(root)
    con.execute("set variable vocab_size = 300")
    assert run_query(con, load_checks()["untrainable_tokens"]).num_rows == len(values)


def test_each_id_that_a_column_holds_passes_if_no_model_is_known(root: Root, store, rows):
    good = rows([[1.0, 0.0]])["response_tokens"].to_pylist()[0]
    store(rows([[1.0, 0.0]], response_tokens=[good, [2**31 - 1, *good[1:]]]))
    assert found(root) == {}


def test_a_group_that_two_steps_trained_on(root: Root, ledger):
    commit(root, 1, ledger[0])
    commit(root, 2, ledger[0])
    (row,) = found(root)["planned_twice"]
    assert sorted(row["steps"]) == [1, 2]


def test_a_group_that_was_considered_again_after_it_was_dropped(root: Root, ledger):
    commit(root, 1, [row | {"used": False, "reason": "drop_truncated"} for row in ledger[0]])
    commit(root, 2, ledger[0])
    (row,) = found(root)["planned_twice"]
    assert (row["steps"], row["num_uses"], row["num_repeated"]) == ([1, 2], 1, 0)


def test_a_group_with_a_rollout_that_one_step_trained_on_twice(root: Root, ledger):
    commit(root, 1, [*ledger[0], ledger[0][0]])
    (row,) = found(root)["planned_twice"]
    assert (row["steps"], row["num_uses"], row["num_repeated"]) == ([1], 1, 1)


def test_a_group_is_free_again_when_the_step_that_used_it_is_superseded(root: Root, ledger):
    commit(root, 1, ledger[0])
    start_attempt(root, parent_attempt=1, parent_step=0)
    commit_as_second = [row | {"attempt_id": 2} for row in ledger[0]]
    table = pa.Table.from_pylist(commit_as_second, schema=arrow_schema("batches"))
    root.put_if_absent(ledger_name(2, 1), encode_plain(table))
    assert found(root) == {}


def test_a_step_without_ledger(root: Root, ledger):
    commit(root, 2, ledger[0])
    commit(root, 5, ledger[1])
    assert found(root)["step_gaps"] == [
        {"first_missing": 1, "last_missing": 1},
        {"first_missing": 3, "last_missing": 4},
    ]


def test_a_ledger_row_whose_rollout_is_gone(root: Root, ledger):
    commit(root, 1, ledger[0])
    commit(root, 2, [row | {"rollout_id": "gone"} for row in ledger[1][:1]])
    assert [row["rollout_id"] for row in found(root)["lost_rollouts"]] == ["gone"]


@pytest.mark.parametrize("loss", [expire_all, quarantine_all])
def test_a_ledger_row_whose_rollout_expired_or_was_quarantined_is_not_missed(root: Root, ledger, loss):
    commit(root, 1, ledger[0])
    loss(root)
    assert found(root) == {}


@pytest.mark.parametrize(("column", "value"), [("group_id", "another"), ("policy_version", 7)])
def test_a_ledger_row_that_contradicts_its_rollout(root: Root, ledger, column: str, value):
    change = {column: value} | ({"trainer_version": 7} if column == "policy_version" else {})
    commit(root, 1, [row | change for row in ledger[0]])
    rows = found(root)["mismatched_batches"]
    assert [row[column] for row in rows] == [value, value]


def test_a_step_that_passed_over_a_part_of_a_group(root: Root, ledger):
    commit(root, 1, ledger[0][:1])
    group_id = ledger[0][0]["group_id"]
    assert found(root) == {
        "partial_groups": [{"attempt_id": 1, "step": 1, "group_id": group_id, "num_planned": 1, "num_stored": 2}]
    }


@pytest.mark.parametrize(
    "contradiction",
    [{"reason": "drop_truncated"}, {"used": False}, {"advantage": None}, {"advantage": float("nan")}, {"lag": 1}],
)
def test_a_ledger_row_that_contradicts_itself(root: Root, ledger, contradiction: dict):
    commit(root, 1, [ledger[0][0] | contradiction, *ledger[0][1:]])
    assert set(found(root)) == {"contradictory_batches"}


def test_an_attempt_without_its_parent(root: Root):
    start_attempt(root, parent_attempt=8, parent_step=3)
    assert found(root) == {"orphan_attempts": [{"attempt_id": 1, "parent_attempt": 8, "parent_step": 3}]}


def test_a_ledger_of_an_attempt_that_is_not_recorded(root: Root, ledger):
    commit(root, 1, ledger[0])
    root.delete("attempts/1.json")
    assert found(root) == {
        "unknown_attempts": [{"attempt_id": 1, "folders": ["batches"], "first_step": 1, "last_step": 1}]
    }


def publish(root: Root, version: int) -> None:
    policy = Policy(version=version, step=0, attempt_id=1, parent_version=None, created_at="2026-01-02T03:04:05Z")
    root.put(f"policies/version={version}/policy.json", json.dumps(asdict(policy)).encode())


@on_both_filesystems
def test_rollouts_of_weights_that_nobody_published(root: Root, store, rows):
    store(rows([[1.0, 0.0]], policy_version=4))
    start_attempt(root)
    assert found(root) == {}  # weights from elsewhere
    publish(root, 3)
    assert found(root) == {"unknown_policies": [{"policy_version": 4, "num_rollouts": 2}]}
    publish(root, 4)
    assert found(root) == {}


@on_both_filesystems
def test_a_file_that_can_not_be_read_is_named(root: Root):
    root.put("batches/attempt=1/step=1.parquet", b"no Parquet at all")
    with pytest.raises(QueryError, match=r"^check .*step=1\.parquet"):
        run_checks(connect(root))


@pytest.fixture
def doubles(root: Root, store, arrive) -> list[list[dict]]:
    """Two groups of one request, by two lives of slot 0, and the rows with which an older ludic plans one a step."""
    start_attempt(root)
    planner = Planner(BatchRules(groups_per_batch=1))
    for life in (0, 1):
        table = arrive([[1.0, 0.0]], arrival=life, worker_id=[f"w0-{life}"] * 2, request_index=[6, 7])
        name = store(table.select(arrow_schema("rollouts").names))
        index = table.schema.get_field_index("file")
        planner.add(table.set_column(index, "file", pa.array([name] * table.num_rows)))
    return [planner.plan(step=step, attempt_id=1, trainer_version=0).to_pylist() for step in (1, 2)]


@on_both_filesystems
def test_a_request_that_was_trained_on_as_two_groups(root: Root, doubles):
    commit(root, 1, doubles[0])
    assert found(root) == {}
    commit(root, 2, doubles[1])
    groups = sorted({row["group_id"] for rows in doubles for row in rows})
    assert found(root) == {"duplicate_requests": [{"group_number": 3, "group_ids": groups, "steps": [1, 2]}]}


def test_a_request_that_is_stored_as_two_groups_is_a_note(root: Root, doubles):
    commit(root, 1, doubles[0])
    (note,) = check_root(root).notes
    assert note.check == "repeated_requests"
    assert note.problem.startswith("group_number 3, group_ids [")
    assert note.problem.endswith("worker_ids ['w0-0', 'w0-1']")
    assert meaning_of("repeated_requests").startswith("a request of the schedule that is stored as more than one group")
    assert found(root) == {}


def test_rows_without_a_position_in_the_schedule_are_no_doubles(root: Root, store, rows):
    for life, (worker_id, index) in enumerate([("w0-a", -1), ("w0-b", -1), ("mine", 3), ("yours", 3)]):
        store(rows([[1.0]], worker_id=[worker_id], seed=life, request_index=[index]))
    assert list(check_root(root).notes) == []
