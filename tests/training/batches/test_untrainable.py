"""A row that can't be trained on never ends a run: it is dropped with its reason, and named; the rest is trained on."""

import math
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest
from tiny_runs import fill, final_weights, query, train_here, train_until_killed

from ludic.errors import ConfigError, StalledError
from ludic.root.maintenance.verify import check_root
from ludic.root.root import Root
from ludic.root.rows.ledger import read_ledger, read_rollouts
from ludic.root.rows.parquet import decode, encode
from ludic.root.weights.policies import latest_policy
from ludic.training.batches.config import BatchConfig
from ludic.training.batches.reading import Vetting
from ludic.training.batches.replanner import Replanner
from ludic.training.batches.source import batch_rules
from ludic.training.batches.stream import BatchStream
from ludic.training.inherited_settings import replay_settings

pytestmark = pytest.mark.slow

REASONS = "select rollout_id, reason from batches where not used order by rollout_id"
BAD: list[tuple[str, Any]] = [
    *(("response_tokens", token) for token in (1_000_000, -1, 2**31 - 1)),
    ("prompt_tokens", 1_000_000),
    *(("response_logprobs", logprob) for logprob in (5.0, -9999.0, math.nan, math.inf)),
    ("temperature", 0.0),
]
"""Column, and the value of its first token."""


def spoil(root: Root, changes: Mapping[int, tuple[str, Any]]) -> list[str]:
    """Change rows of the first file, by index, as an older ludic could have stored them; returns their rollout_ids."""
    name = min(root.list("rollouts"))
    table = decode(root.read(name), name, "rollouts")
    for row, (column, value) in changes.items():
        values = table[column].to_pylist()
        values[row] = [value, *values[row][1:]] if isinstance(values[row], list) else value
        index = table.schema.get_field_index(column)
        table = table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))
    root.put(name, encode(table))
    return sorted(table["rollout_id"][row].as_py() for row in changes)


def spoil_all_kinds(root: Root) -> list[str]:
    """A row of each kind, of which eight make two whole groups."""
    return spoil(root, {3 + row: change for row, change in enumerate(BAD)})


def as_an_older_ludic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan without a look at tokens."""
    monkeypatch.setattr(Vetting, "find", lambda self, rows: [])


def test_rows_are_named_in_the_log_and_a_reward_that_is_no_number_is_none(new_root, caplog):
    root = new_root()
    fill(root, num_files=1)
    [failed] = spoil(root, {5: ("episode_reward", math.nan)})
    bad = spoil(root, dict.fromkeys((6, 7), ("response_tokens", 1_000_000)))
    assert train_here(root, num_steps=1) == 1
    assert query(root, REASONS) == sorted([(failed, "drop_errors"), *((row, "untrainable") for row in bad)])
    [said] = [record.getMessage() for record in caplog.records if "untrainable" in record.getMessage()]
    assert "2 of 7 rows can't be trained on (rollout " in said
    assert all(f"rollout {row}: response_tokens is 1000000 at token 0, wanted" in said for row in bad)


@pytest.mark.parametrize("settings", [{"max_uses": 2}, {"offline": True, "epochs": 2}], ids=["online", "offline"])
def test_all_kinds_at_once_leave_whole_batches_of_the_rest(new_root, settings):
    root = new_root()
    fill(root, num_files=2)
    bad = spoil_all_kinds(root)
    steps = {"num_steps": 6} if "epochs" not in settings else {}
    # 8 groups, two of which have no row left: 6 make 3 batches of 2 groups, not 4 as offline training promises itself
    num_steps = train_here(root, **settings, **steps)
    assert num_steps == 6
    assert query(root, "select distinct reason from batches where not used") == [("untrainable",)]
    dropped = query(root, "select distinct rollout_id from batches where not used order by 1")
    assert [rollout_id for (rollout_id,) in dropped] == bad
    assert query(root, "select count(*) from (select step, count(distinct group_id) as n from batches where used "
                       "group by step having n > 2)") == [(0,)]  # fmt: skip
    uses = "select max(n) from (select rollout_id, count(*) as n from batches where used group by rollout_id)"
    assert query(root, uses)[0][0] <= 2
    # the weights of the last step are published, also if there were fewer steps than groups had promised
    assert query(root, "select max(step) from policies")[0][0] == num_steps


def test_verify_names_the_rows(new_root):
    root = new_root()
    fill(root, num_files=1)
    train_here(root, num_steps=1)  # keeps the model, whose embedding bounds the ids
    bad = spoil(root, {8: ("response_tokens", 1_000_000), 9: ("prompt_tokens", -1), 10: ("response_logprobs", -9999.0)})
    found = [finding for finding in check_root(root).findings if finding.check == "untrainable_tokens"]
    assert sorted(finding.problem.split(",")[0].removeprefix("rollout_id ") for finding in found) == bad


@pytest.mark.parametrize("settings", [{}, {"offline": True, "epochs": 1}], ids=["online", "offline"])
def test_a_run_that_such_a_row_has_ended_goes_on(new_root, monkeypatch, settings):
    root = new_root()
    fill(root, num_files=1)
    bad = spoil(root, {13: ("response_tokens", 1_000_000)})
    num_steps = {} if settings else {"num_steps": 2}
    with monkeypatch.context() as older:
        as_an_older_ludic(older)
        with pytest.raises(IndexError):
            train_here(root, **settings, **num_steps)
    assert bad[0] in [row for (row,) in query(root, "select rollout_id from all_batches where used")]
    assert train_here(root, **settings, **num_steps) == 2
    assert query(root, REASONS) == [(bad[0], "untrainable")]
    assert query(root, "select count(*), count(distinct rollout_id) from batches where used") == [(15, 15)]


def test_a_killed_trainer_drops_them_again_and_uses_each_other_row_once(new_root):
    root = new_root()
    fill(root, num_files=3)
    bad = spoil_all_kinds(root)
    train_until_killed(root, at_step=2, checkpoint_every=1, num_steps=5)
    assert train_here(root, num_steps=5) == 5
    assert [row for row, _ in query(root, REASONS)] == bad
    assert query(root, "select count(*) - count(distinct rollout_id) from batches where used") == [(0,)]


def test_a_run_without_any_row_to_train_on_says_so(new_root):
    root = new_root(groups_per_batch=1)
    fill(root, num_files=1, groups_per_file=1)
    spoil(root, dict.fromkeys(range(4), ("response_tokens", 1_000_000)))
    with pytest.raises(ConfigError, match=r"nothing to train on; 0 of 1 .* drop 4 of 4 rollouts, untrainable most"):
        train_here(root, offline=True, epochs=1)
    with pytest.raises(StalledError, match="filters drop 4 of 4 rollouts, untrainable most"):
        train_here(root, num_steps=1)


def test_a_limit_that_the_prompts_fill_makes_no_step(new_root):
    root = new_root()
    fill(root, num_files=1)  # prompts of 8 tokens
    with pytest.raises(ConfigError, match=r"nothing to train on; .* drop 16 of 16 rollouts, no_tokens most"):
        train_here(root, offline=True, epochs=1, max_seq_len=8)
    with pytest.raises(StalledError, match="filters drop 16 of 16 rollouts, no_tokens most"):
        train_here(root, num_steps=1, max_seq_len=8)
    assert query(root, "select count(*) from batches") == [(0,)]


def test_a_stream_for_other_loops_leaves_them_out_on_each_rank(new_root):
    root = new_root()
    fill(root, num_files=1)
    train_here(root, num_steps=1)
    bad = spoil(root, dict.fromkeys((1, 14), ("response_tokens", 1_000_000)))
    shares = [list(BatchStream(root, rank=rank, num_ranks=2)) for rank in range(2)]
    ledgers = [[batch.plan.rows["rollout_id"].to_pylist() for batch in share] for share in shares]
    assert ledgers[0] == ledgers[1]
    dropped = [row for batch in shares[0] for row in batch.plan.rows.to_pylist() if not row["used"]]
    assert sorted(row["rollout_id"] for row in dropped) == bad


def test_planned_again_by_the_same_rules_a_step_is_the_same(new_root):
    root = new_root()
    fill(root, num_files=1)
    spoil(root, {5: ("response_tokens", 1_000_000)})
    train_here(root, num_steps=2)
    replanner = Replanner(root, batch_rules(BatchConfig(max_off_policy_steps=None), 2))
    for step in (1, 2):
        stored = read_ledger(root, 1, step)
        assert replanner.plan(stored, read_rollouts(root, stored, replanner.columns)).equals(stored)


def test_a_replay_repeats_what_an_older_ludic_trained_on(new_root, monkeypatch):
    older, root = new_root("older"), new_root("again")
    fill(older, num_files=1)
    spoil(older, {2: ("response_logprobs", -9999.0), 6: ("response_logprobs", 5.0)})
    with monkeypatch.context() as patched:
        as_an_older_ludic(patched)
        assert train_here(older, num_steps=2) == 2
    assert train_here(root, **replay_settings(older.url), replay_batches=older.url) == 2
    weights = final_weights(older)
    assert all((tensor == weights[name]).all() for name, tensor in final_weights(root).items())


def test_a_replay_of_rows_that_the_model_does_not_know_is_an_error_that_names_them(new_root):
    other, root = new_root("other"), new_root("again")
    fill(other, num_files=1)
    train_here(other, num_steps=2)
    [bad] = spoil(other, {2: ("response_tokens", 1_000_000)})
    with pytest.raises(ConfigError, match=rf"step \d of .*other: 1 of 8 rows .*{bad}: response_tokens is 1000000"):
        train_here(root, **replay_settings(other.url), replay_batches=other.url)


def test_a_branch_drops_rows_that_the_other_run_had_filtered(new_root):
    other, root = new_root("other"), new_root("branch")
    fill(other, num_files=1)
    [bad] = spoil(other, {2: ("response_tokens", 1_000_000)})
    train_here(other, num_steps=2, where=f"rollout_id <> '{bad}'")
    assert query(other, REASONS) == [(bad, "where")]
    train_here(root, num_steps=2, replay_batches=other.url, replan_from=0)
    assert query(root, REASONS) == [(bad, "untrainable")]
    assert latest_policy(root) is not None
