"""Each data check finds the fault that is seeded for it, and nothing else."""

from collections.abc import Callable

import pyarrow as pa
import pytest

from ludic.errors import QueryError
from ludic.schema import arrow_schema
from ludic.sql import BatchRules, Planner, connect, run_checks
from ludic.store.attempts import start_attempt
from ludic.store.ledger import ledger_name
from ludic.store.parquet import encode, encode_plain
from ludic.store.root import Root


def found(root: Root) -> dict[str, list[dict]]:
    """Offending rows of the checks that found any."""
    return {name: table.to_pylist() for name, table in run_checks(connect(root)).items() if table.num_rows}


@pytest.fixture
def ledger(root: Root, store, arrive) -> Callable[..., list[dict]]:
    """Two stored groups, and the rows that plan one a step; nothing of it is in the ledger yet."""
    tables = [arrive([[1.0, 0.0]], arrival=number, sequence=number) for number in range(2)]
    for table in tables:
        store(table.select(arrow_schema("rollouts").names))
    start_attempt(root)
    planner = Planner(BatchRules(groups_per_batch=1))
    for table in tables:
        planner.add(table)
    return [planner.plan(step=step, attempt_id=1, trainer_version=0).to_pylist() for step in (1, 2)]


def commit(root: Root, step: int, rows: list[dict]) -> None:
    table = pa.Table.from_pylist([row | {"step": step} for row in rows], schema=arrow_schema("batches"))
    assert root.put_if_absent(ledger_name(1, step), encode_plain(table))


def test_an_empty_root_is_sound(root: Root):
    assert found(root) == {}


def test_a_root_that_was_trained_on_is_sound(root: Root, ledger):
    for step, rows in enumerate(ledger, start=1):
        commit(root, step, rows)
    assert found(root) == {}


def test_a_rollout_that_is_stored_twice(root: Root, store, rows):
    store(rows([[1.0, 0.0]]))
    store(rows([[1.0, 0.0]], sequence=1))
    assert set(found(root)) == {"duplicate_rollouts", "split_groups"}
    assert [row["num_rows"] for row in found(root)["duplicate_rollouts"]] == [2, 2]


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


def test_a_row_in_another_versions_partition(root: Root, rows):
    root.put("rollouts/version=9/env=other/worker-0-0.parquet", encode(rows([[1.0]], policy_version=2)))
    (row,) = found(root)["misplaced_rollouts"]
    assert (row["version"], row["policy_version"], row["env"], row["env_name"]) == (9, 2, "other", "moar_cats")


def test_a_workers_file_that_is_gone(root: Root, store, rows):
    for sequence in (3, 4, 7):
        store(rows([[1.0]], seed=sequence, sequence=sequence))
    assert found(root) == {
        "sequence_gaps": [{"worker_id": "worker-0", "first_missing": 5, "last_missing": 6}],
    }


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("prompt_length", 7),
        ("response_length", 15),
        ("token_rewards", [0.0]),
        ("response_logprobs", []),
        ("action_mask", [True] * 17),
        ("action_length", 15),
    ],
)
def test_lists_that_are_not_as_long_as_they_say(root: Root, store, rows, column: str, value):
    table = rows([[1.0, 0.0]])
    good = table[column].to_pylist()[0]
    store(rows([[1.0, 0.0]], **{column: [good, value]}))
    (row,) = found(root)["unequal_lengths"]
    assert row["rollout_id"] == table["rollout_id"][1].as_py()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("episode_reward", float("nan")),
        ("token_rewards", [float("inf")] * 16),
        ("response_logprobs", [float("-inf")] * 16),
        ("reward_components", {"cats": float("nan")}),
        ("temperature", float("inf")),
    ],
)
def test_numbers_that_are_none(root: Root, store, rows, column: str, value):
    table = rows([[1.0, 0.0]])
    good = table[column].to_pylist()[0]
    store(rows([[1.0, 0.0]], **{column: [good, value]}))
    (row,) = found(root)["not_finite"]
    assert row["rollout_id"] == table["rollout_id"][1].as_py()


def test_a_group_that_two_steps_trained_on(root: Root, ledger):
    commit(root, 1, ledger[0])
    commit(root, 2, ledger[0])
    (row,) = found(root)["planned_twice"]
    assert sorted(row["steps"]) == [1, 2]


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


def test_a_file_that_can_not_be_read_is_named(root: Root):
    root.put("rollouts/version=0/env=moar_cats/broken-0.parquet", b"no Parquet at all")
    with pytest.raises(QueryError, match=r"^check .*broken-0\.parquet"):
        run_checks(connect(root))
