from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from ludic.errors import FencedError, SchemaError
from ludic.schema import arrow_schema
from ludic.store import (
    check_not_fenced,
    ledger_steps,
    newest_attempt_id,
    read_attempt,
    read_ledger,
    start_attempt,
    write_ledger,
)
from ludic.store.ledger import ledger_name


def ledger_rows(attempt_id: int, step: int, rollout_ids=("r0", "r1")) -> pa.Table:
    values = {
        "attempt_id": attempt_id,
        "step": step,
        "group_id": "g0",
        "env_name": "moar_cats",
        "policy_version": 3,
        "trainer_version": 4,
        "lag": 1,
        "file": "rollouts/version=3/env=moar_cats/w0-0.parquet",
        "row_group": 0,
        "prompt_length": 8,
        "response_length": 16,
        "episode_reward": 0.1,
        "advantage": -0.3,
        "weight": 1.0,
        "used": True,
    }
    rows = [
        {**values, "batch_index": place, "row": place, "rollout_id": rollout_id}
        for place, rollout_id in enumerate(rollout_ids)
    ]
    return pa.Table.from_pylist(rows, arrow_schema("batches"))


def test_attempts_count_up_from_one(root):
    assert newest_attempt_id(root) == 0
    assert [start_attempt(root).attempt_id for _ in range(3)] == [1, 2, 3]
    assert newest_attempt_id(root) == 3


def test_ten_follows_nine(root):
    for _ in range(9):
        start_attempt(root)
    assert start_attempt(root).attempt_id == 10
    assert newest_attempt_id(root) == 10


def test_an_attempt_remembers_its_parent_and_its_settings(root):
    start_attempt(root)
    attempt = start_attempt(root, parent_attempt=1, parent_step=40, config={"learning_rate": 1e-3})
    assert read_attempt(root, 2) == attempt
    assert (attempt.parent_attempt, attempt.parent_step, attempt.config) == (1, 40, {"learning_rate": 1e-3})


def test_trainers_that_start_at_once_get_attempts_of_their_own(root):
    with ThreadPoolExecutor(4) as pool:
        attempts = list(pool.map(lambda _: start_attempt(root), range(4)))
    assert sorted(attempt.attempt_id for attempt in attempts) == [1, 2, 3, 4]


def test_a_newer_attempt_fences_an_older_one(root):
    first = start_attempt(root)
    check_not_fenced(root, first)
    second = start_attempt(root)
    with pytest.raises(
        FencedError, match=rf"attempt 1 was replaced by attempt 2 of {second.owner}; this trainer stops"
    ):
        check_not_fenced(root, first)
    check_not_fenced(root, second)


def test_a_foreign_file_is_no_attempt(root):
    start_attempt(root)
    root.put("attempts/notes.json", b"")
    root.put("attempts/9.json.bak", b"")
    assert newest_attempt_id(root) == 1


def test_a_ledger_comes_back_as_it_was_written(root):
    attempt = start_attempt(root)
    rows = ledger_rows(1, 5)
    write_ledger(root, attempt, 5, rows)
    assert read_ledger(root, 1, 5).equals(rows)


def test_ledger_steps_are_in_the_order_of_numbers(root):
    attempt = start_attempt(root)
    assert ledger_steps(root, 1) == []
    for step in (10, 9, 100):
        write_ledger(root, attempt, step, ledger_rows(1, step))
    write_ledger(root, start_attempt(root), 7, ledger_rows(2, 7))
    assert ledger_steps(root, 1) == [9, 10, 100]
    assert ledger_steps(root, 2) == [7]


def test_writing_the_same_ledger_again_is_a_retry(root):
    attempt = start_attempt(root)
    write_ledger(root, attempt, 1, ledger_rows(1, 1))
    write_ledger(root, attempt, 1, ledger_rows(1, 1))


def test_a_step_is_never_planned_twice_in_one_attempt(root):
    attempt = start_attempt(root)
    write_ledger(root, attempt, 1, ledger_rows(1, 1))
    with pytest.raises(FencedError, match=r"step=1\.parquet exists with other content: another process trains"):
        write_ledger(root, attempt, 1, ledger_rows(1, 1, ["r2"]))
    assert read_ledger(root, 1, 1).equals(ledger_rows(1, 1))


def test_a_fenced_trainer_writes_no_ledger(root):
    attempt = start_attempt(root)
    start_attempt(root)
    with pytest.raises(FencedError):
        write_ledger(root, attempt, 1, ledger_rows(1, 1))
    assert root.list("batches") == []


def test_a_foreign_file_is_no_ledger(root):
    root.put(ledger_name(1, 1), b"text")
    with pytest.raises(SchemaError, match=r"step=1\.parquet"):
        read_ledger(root, 1, 1)
