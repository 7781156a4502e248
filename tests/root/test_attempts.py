import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

import ludic
from ludic.errors import FencedError, SchemaError
from ludic.records.tables import arrow_schema
from ludic.root.attempts import (
    chain,
    check_not_fenced,
    newest_attempt,
    newest_attempt_id,
    newest_checkpoint,
    outdated,
    read_attempt,
    start_attempt,
)
from ludic.root.claims import claim
from ludic.root.rows.ledger import ledger_name, ledger_steps, read_ledger, write_ledger
from ludic.run.run_json import put_run
from ludic.settings.renamed import RENAMED

GOLDEN = Path(__file__).parents[1] / "golden" / "attempt-former-names.json"


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
        {**values, "batch_index": index, "row": index, "rollout_id": rollout_id}
        for index, rollout_id in enumerate(rollout_ids)
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


def test_an_attempt_remembers_its_numerics(root):
    attempt = start_attempt(root, numerics={"num_threads": [2, 2], "torch": "2.13.0"})
    assert read_attempt(root, 1) == attempt
    assert attempt.numerics == {"num_threads": [2, 2], "torch": "2.13.0"}


def test_settings_of_older_versions_are_read_under_their_current_names(root):
    former = GOLDEN.read_bytes()
    root.put("attempts/1.json", former)
    settings = read_attempt(root, 1).config
    renamed = {RENAMED.get(name, name): value for name, value in json.loads(former)["config"].items()}
    lists = {"sapo_tau": [renamed.pop("sapo_tau_positive"), renamed.pop("sapo_tau_negative")]}
    lists |= {"dppo_bounds": [renamed.pop("dppo_high"), renamed.pop("dppo_low")]}
    assert settings == renamed | lists
    assert (settings["loss_normalization"], settings["max_tokens_per_micro_batch"]) == ("sequences", 512)


def test_an_attempt_is_read_without_what_it_lacks_and_what_is_unknown(root):
    values = {"attempt_id": 1, "parent_attempt": None, "parent_step": None, "owner": "host-3"}
    values |= {"created_at": "2026-11-22T12:00:00+00:00", "config": {}, "from_the_future": 1}
    root.put("attempts/1.json", json.dumps(values).encode())
    assert read_attempt(root, 1).numerics is None


def test_trainers_that_start_at_once_get_attempts_of_their_own(root):
    with ThreadPoolExecutor(4) as pool:
        attempts = list(pool.map(lambda _: start_attempt(root), range(4)))
    assert sorted(attempt.attempt_id for attempt in attempts) == [1, 2, 3, 4]


def test_a_newer_attempt_fences_an_older_one(root):
    first = start_attempt(root)
    check_not_fenced(root, first)
    second = start_attempt(root)
    with pytest.raises(
        FencedError, match=rf"attempt 1 was replaced by attempt 2 of {second.owner} at .*; this trainer stops"
    ):
        check_not_fenced(root, first)
    check_not_fenced(root, second)


def test_a_foreign_file_is_no_attempt(root):
    start_attempt(root)
    root.put("attempts/notes.json", b"")
    root.put("attempts/9.json.bak", b"")
    assert newest_attempt_id(root) == 1


def test_attempts_of_a_claim_that_died_are_passed_over(root):
    first = start_attempt(root)
    claim(root, 1)  # and dies before it puts an attempt
    assert newest_attempt(root) == first
    assert start_attempt(root).attempt_id == 3
    assert newest_attempt(root, before=3) == first
    assert newest_attempt(root, before=1) is None


def test_a_claim_fences_before_its_attempt_is_there(root):
    first = start_attempt(root)
    lease = claim(root, 1)
    with pytest.raises(FencedError, match=f"attempt 1 was replaced by attempt 2 of {lease.owner}"):
        check_not_fenced(root, first)


# Attempt 2 left 1 at step 6, 3 left 2 at 9, 4 left 1 at 4 although 2 had left it later, 5 left 3 at 7, before 3 began.
PARENTS = {1: None, 2: (1, 6), 3: (2, 9), 4: (1, 4), 5: (3, 7)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("newest", "expected"),
    [
        (1, [(1, None)]),
        (3, [(3, None), (2, 9), (1, 6)]),
        (4, [(4, None), (1, 4)]),
        (5, [(5, None), (3, 7), (2, 7), (1, 6)]),
    ],
)
def test_the_chain_is_what_sql_says_it_is(tmp_path, run_config, newest, expected):
    assert [(link.attempt_id, link.last_step) for link in chain(newest, PARENTS.get)] == expected
    root = put_run(str(tmp_path / "run"), run_config)
    for attempt_id in range(1, newest + 1):
        parent_attempt, parent_step = PARENTS[attempt_id] or (None, None)
        start_attempt(root, parent_attempt=parent_attempt, parent_step=parent_step)
    query = "select attempt_id, last_step from attempt_chain order by attempt_id desc"
    assert ludic.connect(root).execute(query).fetchall() == expected


def test_a_chain_ends_where_an_attempt_is_gone_or_claims_to_be_its_own_ancestor():
    assert [link.attempt_id for link in chain(3, {3: (2, 5)}.get)] == [3, 2]
    assert [link.attempt_id for link in chain(3, {3: (2, 5), 2: (3, 5)}.get)] == [3, 2]


@pytest.mark.parametrize(
    ("checkpoints", "expected"),
    [
        ({(3, 12), (3, 10), (2, 9)}, (3, 12)),
        ({(2, 9), (2, 8)}, (2, 9)),
        ({(2, 12), (2, 8)}, (2, 8)),  # attempt 3 began from (2, 9), which is gone; (2, 12) is off the chain
        ({(2, 12), (1, 7), (1, 3)}, (1, 3)),
        ({(2, 12), (1, 7)}, None),
    ],
)
def test_the_newest_checkpoint_on_the_chain_is_resumed(checkpoints, expected):
    assert newest_checkpoint(chain(3, PARENTS.get), checkpoints) == expected


def test_the_newest_checkpoints_are_kept_in_the_order_of_attempts_and_steps():
    assert outdated({(1, 9), (1, 10), (2, 3), (2, 1)}, keep=2) == [(1, 9), (1, 10)]
    assert outdated({(1, 9)}, keep=1) == []


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
