"""A run's batches once more: the same weights, bit for bit, from the first ones; what differs is refused by name."""

import pytest
from tiny_runs import (
    copied,
    create_root,
    fill,
    final_weights,
    ledger,
    other_model,
    query,
    train_here,
    train_until_killed,
)

from ludic.errors import ConfigError
from ludic.root.maintenance.compaction import compact
from ludic.root.sql.connection import connect
from ludic.training.inherited_settings import replay_settings

pytestmark = pytest.mark.slow

SETTINGS = {
    "num_steps": 6,
    "schedule": "linear",
    "objective": "ppo_clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "advantage": "grpo",
    "filters": ("drop_zero_variance_groups",),
    "max_seq_len": 20,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_folder):
    """Six steps, with a crash and a restart in between; not to be changed."""
    root = create_root(str(tmp_path_factory.mktemp("trained") / "run"), tiny_folder)
    fill(root, num_files=3)
    train_until_killed(root, at_step=4, **SETTINGS)
    train_here(root, **SETTINGS)
    return root


def ask(root, sql, *params):
    return connect(root).execute(sql, params).fetchall()


def replay(root, url, **settings):
    return train_here(root, **(replay_settings(url) | settings), replay_batches=url)


def assert_same_weights(root, expected):
    weights = final_weights(expected)
    assert weights.keys() == final_weights(root).keys()
    assert all((tensor == weights[name]).all() for name, tensor in final_weights(root).items())


def test_the_weights_are_those_of_the_run_bit_for_bit(new_root, trained):
    root = new_root("again")
    assert replay(root, trained.url) == 6
    assert_same_weights(root, trained)
    assert ledger(root) == ledger(trained)
    assert query(root, "select distinct root from batches") == [(trained.url,)]
    losses = "select step, loss, grad_norm from metrics where attempt_id = $1 and step > 3 order by step"
    assert ask(root, losses, 1) == ask(trained, losses, 2)


def test_after_compaction_too(new_root, trained, tmp_path):
    moved = copied(trained, tmp_path / "moved")
    compact(moved, before_version=None)
    root = new_root("again")
    replay(root, moved.url)
    assert_same_weights(root, trained)


def test_a_run_that_was_stopped_early_is_replayed_as_far_as_it_came(new_root):
    stopped, root = new_root("stopped"), new_root("again")
    fill(stopped, num_files=2)
    train_until_killed(stopped, at_step=4, **SETTINGS)  # checkpoint at step 3 of 6; learning rates fall until step 6
    assert replay(root, stopped.url) == 3
    assert_same_weights(root, stopped)


def test_a_replay_of_an_offline_run_reads_its_sources(new_root):
    source, offline, root = new_root("source"), new_root("offline"), new_root("again")
    fill(source, num_files=2)
    train_here(offline, offline=True, sources=(source.url,), epochs=2)
    assert replay(root, offline.url) == 8
    assert_same_weights(root, offline)
    assert query(root, "select distinct root from batches") == [(source.url,)]


def test_a_run_that_used_groups_several_times_is_replayed(new_root):
    trained, root = new_root("trained"), new_root("again")
    fill(trained, num_files=1)
    train_here(trained, num_steps=4, max_uses=2)
    replay(root, trained.url)
    assert_same_weights(root, trained)
    assert [row[:4] for row in ledger(root)] == [row[:4] for row in ledger(trained)]


def test_a_replay_may_keep_token_stats_that_the_run_did_not(new_root, trained):
    root = new_root("again")
    replay(root, trained.url, keep_token_stats=True)
    assert_same_weights(root, trained)
    assert query(root, "select count(distinct step) from token_stats") == [(6,)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0.5}, "learning_rate is 0.001 there and 0.5 here"),
        ({"clip_high": 0.3, "max_seq_len": 9}, "max_seq_len is 20 there and 9 here, clip_high is 0.2 there and 0.3"),
    ],
)
def test_other_settings_are_refused_by_name(new_root, trained, settings, message):
    with pytest.raises(ConfigError, match=message):
        replay(new_root("again"), trained.url, **settings)


def test_a_run_with_another_head_is_refused(trained, tmp_path):
    root = create_root(str(tmp_path / "again"), trained.record.model, float32_head=True)
    with pytest.raises(ConfigError, match="would not repeat it: float32_head is False there and True here"):
        replay(root, trained.url)


def test_a_run_with_another_seed_is_refused_where_the_seed_draws_adapters(new_root, trained, tmp_path):
    adapted = new_root("adapted")
    fill(adapted, num_files=1)
    train_here(adapted, num_steps=1, lora_rank=2)
    root = create_root(str(tmp_path / "again"), trained.record.model, seed=5)
    with pytest.raises(ConfigError, match="would not repeat it: seed is 0 there and 5 here"):
        replay(root, adapted.url)
    assert replay(root, trained.url) == 6


def test_other_first_weights_are_refused(new_root, trained, tmp_path):
    root = create_root(str(tmp_path / "again"), other_model(tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"would not repeat it: weights differ \(model.safetensors\)"):
        replay(root, trained.url)


def test_a_run_is_not_replayed_into_itself(trained):
    with pytest.raises(ConfigError, match="is itself the run to replay"):
        replay(trained, trained.url)


def test_a_run_without_a_checkpoint_has_nothing_to_replay(new_root):
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        replay_settings(new_root("empty").url)
