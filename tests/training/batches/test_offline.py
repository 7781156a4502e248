"""Training on what roots hold: each chosen group once an epoch, over restarts too; the ledger says where it lies."""

from collections import Counter

import pytest
from tiny_runs import copied, create_root, fill, final_weights, ledger, query, train_here, train_until_killed

from ludic.errors import ConfigError, QueryError
from ludic.root.attempts import complete_checkpoints
from ludic.root.maintenance.compaction import compact
from ludic.root.sql.connection import connect
from ludic.root.sql.library import run_checks
from ludic.root.weights.policies import latest_policy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory, tiny_folder):
    """Eight groups of four; no trainer ever ran there. Not to be changed."""
    root = create_root(str(tmp_path_factory.mktemp("source") / "run"), tiny_folder)
    fill(root, num_files=2)
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_folder, source):
    """A root that was trained on `source` for an epoch; not to be changed."""
    root = create_root(str(tmp_path_factory.mktemp("trained") / "run"), tiny_folder)
    train_here(root, offline=True, sources=(source.url,), epochs=1)
    return root


def broken_checks(root):
    return [name for name, rows in run_checks(connect(root)).items() if rows.num_rows]


def groups_by_step(root):
    """The groups of each step, in the order of training."""
    rows = query(root, "select step, group_id from batches where used order by step, batch_index")
    return {step: list(dict.fromkeys(group for s, group in rows if s == step)) for step, _ in rows}


def test_an_epoch_uses_each_group_once_in_an_order_that_the_next_one_changes(new_root, source):
    root = new_root("offline")
    # 8 groups, 2 a batch: 4 steps an epoch
    assert train_here(root, offline=True, sources=(source.url,), epochs=2) == 8
    steps = groups_by_step(root)
    first, second = ([group for step in range(start, start + 4) for group in steps[step]] for start in (1, 5))
    stored = {group for (group,) in query(source, "select distinct group_id from rollouts")}
    assert (sorted(first), sorted(second)) == (sorted(stored), sorted(stored))
    assert first != second
    assert query(root, "select distinct step, num_uses from batches order by all") == [
        (step, 1 + (step > 4)) for step in range(1, 9)
    ]


def test_rows_say_in_which_root_they_lie_and_nothing_is_written_there(new_root, source):
    root, other = new_root("offline"), new_root("other")
    fill(other, num_files=1, worker_id="w0-other", seed=7)
    before = source.list("")
    train_here(root, offline=True, sources=(source.url, other.url), epochs=1)
    counted = query(root, "select root, count(distinct group_id) from batches where used group by root order by 2")
    assert counted == [(other.url, 4), (source.url, 8)]
    steps = query(root, "select distinct off_policy_steps_mean, off_policy_steps_max from metrics")
    assert steps == [(None, None)]  # of other runs' versions
    assert source.list("") == before
    assert broken_checks(root) == []


def test_groups_that_several_sources_hold_are_used_once(new_root, source):
    root, copy = new_root("offline"), new_root("copy")
    fill(copy, num_files=2)  # the same rollouts
    assert train_here(root, offline=True, sources=(source.url, copy.url), epochs=1) == 4
    assert query(root, "select distinct root from batches") == [(source.url,)]


def test_an_epoch_that_ends_within_a_batch_goes_on_with_the_next_and_the_last_batch_is_smaller(new_root):
    source, root = new_root("source"), new_root("offline")
    fill(source, num_files=1, groups_per_file=3)  # 2 epochs of 3 groups, in batches of 2
    assert train_here(root, offline=True, sources=(source.url,), epochs=2) == 3
    assert [len(groups) for groups in groups_by_step(root).values()] == [2, 2, 2]
    root = new_root("once")
    assert train_here(root, offline=True, sources=(source.url,), epochs=1) == 2
    assert [len(groups) for groups in groups_by_step(root).values()] == [2, 1]


def test_where_chooses_rows_and_the_advantage_still_sees_whole_groups(new_root):
    source, root = new_root("source"), new_root("offline")
    fill(source, num_files=1, num_groups=3, rewards=[[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]])
    train_here(root, offline=True, sources=(source.url,), epochs=1, where="episode_reward > 0.5")
    # Leave one out: 1 - 0, and 1 - 2/3. The first group has no such row, and is not in the ledger at all.
    used = query(root, "select advantage from batches where used order by all")
    assert [advantage for (advantage,) in used] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0])
    assert query(root, "select reason, count(*), count(distinct group_id) from batches where not used group by 1") == [
        ("where", 4, 2)
    ]


def test_a_killed_pass_goes_on_as_one_that_was_not(new_root):
    source = new_root("source")
    fill(source, num_files=1)
    settings = {"offline": True, "sources": (source.url,), "epochs": 2, "filters": ("drop_zero_variance_groups",)}
    fill(source, num_files=1, num_groups=2, worker_id="w1-x", rewards=[[0.5] * 4, [0.1, 0.2, 0.3, 0.4]], seed=9)
    whole, root = new_root("whole"), new_root("offline")
    assert train_here(whole, **settings) == 5
    train_until_killed(root, at_step=4, **settings)
    assert train_here(root, **settings) == 5
    assert ledger(root) == ledger(whole)
    weights = final_weights(whole)
    assert all((tensor == weights[name]).all() for name, tensor in final_weights(root).items())
    # 5 groups can be trained on, twice; the sixth is dropped once
    uses = Counter(group for groups in groups_by_step(root).values() for group in groups)
    assert sorted(uses.values()) == [2] * 5
    assert query(root, "select count(*) from batches where not used") == [(4,)]


def test_an_average_over_batches_goes_on_after_a_kill(new_root, source):
    settings = {"offline": True, "sources": (source.url,), "advantage": "rae", "epochs": 1, "checkpoint_every": 2}
    whole, root = new_root("whole"), new_root("offline")
    num_steps = train_here(whole, **settings)
    train_until_killed(root, at_step=num_steps - 1, **settings)
    assert train_here(root, **settings) == num_steps
    assert ledger(root) == ledger(whole)


def test_more_epochs_go_on_and_another_choice_begins_anew(trained, source, tmp_path):
    root = copied(trained, tmp_path / "run")
    settings = {"offline": True, "sources": (source.url,)}
    assert train_here(root, epochs=1, **settings) == 4
    assert train_here(root, epochs=2, **settings) == 8
    assert query(root, "select distinct num_uses from batches where step > 4") == [(2,)]
    assert train_here(root, epochs=1, where="episode_reward is not null", **settings) == 12
    assert query(root, "select distinct num_uses from batches where step > 8") == [(1,)]


def test_without_epochs_it_goes_on_until_num_steps(new_root, source):
    root = new_root("offline")
    assert train_here(root, offline=True, sources=(source.url,), num_steps=5) == 5
    assert query(root, "select max(num_uses) from batches") == [(2,)]


def test_a_root_trains_offline_on_its_own_rollouts_and_online_after_that(new_root):
    root = new_root()
    fill(root, num_files=2)
    assert train_here(root, offline=True, epochs=1) == 4
    assert query(root, "select distinct root from batches") == [(None,)]
    assert train_here(root, num_steps=6) == 6
    assert broken_checks(root) == []


def test_only_the_first_and_the_last_weights_are_published(trained):
    assert query(trained, "select version, step from policies order by all") == [(0, 0), (1, 4)]
    assert latest_policy(trained).num_allowed(0) == 0


def test_another_selection_can_choose_offline_too(new_root, source):
    root = new_root("offline")
    train_here(root, offline=True, sources=(source.url,), epochs=1, selection="fifo")
    assert [group for groups in groups_by_step(root).values() for group in groups] == list(
        dict.fromkeys(
            group for (group,) in query(source, "select group_id from rollouts order by sequence, row_number() over ()")
        )
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"where": "episode_reward > 99"}, "nothing to train on where episode_reward > 99; 0 of 2 groups are ready"),
        ({"where": "episode_rewrad > 0"}, None),
        ({"where": "episode_reward"}, None),
    ],
)
def test_a_choice_that_can_not_be_is_explained_before_ownership_is_taken(new_root, source, settings, message):
    root = new_root("offline")
    with pytest.raises((ConfigError, QueryError), match=message or "where \\(episode_rew"):
        train_here(root, offline=True, sources=(source.url,), epochs=1, **settings)
    assert root.list("attempts") == []


def test_an_empty_source_is_explained(new_root):
    root, source = new_root("offline"), new_root("source")
    with pytest.raises(ConfigError, match="source: no rollouts, wanted at least one group"):
        train_here(root, offline=True, sources=(source.url,), epochs=1)


def test_two_types_of_one_extra_column_are_refused(new_root, source, tiny_folder, tmp_path):
    one = create_root(str(tmp_path / "one"), tiny_folder, extra_columns={"x_judge": "string"})
    two = create_root(str(tmp_path / "two"), tiny_folder, extra_columns={"x_judge": "double"})
    with pytest.raises(ConfigError, match="two: x_judge is double, and string in a source before it"):
        train_here(new_root("offline"), offline=True, sources=(one.url, two.url), epochs=1)


def test_extra_columns_of_one_source_are_null_in_the_other(new_root, source, tiny_folder, tmp_path):
    judged = create_root(str(tmp_path / "judged"), tiny_folder, extra_columns={"x_judge": "string"})
    fill(judged, num_files=1, worker_id="w0-judged", seed=3)
    root = new_root("offline")
    assert train_here(root, offline=True, sources=(source.url, judged.url), epochs=1, where="x_judge is null") == 6


def test_rollouts_that_compaction_moved_are_read_where_they_are_now(new_root, trained, source, tmp_path):
    root, moved = new_root("offline"), copied(source, tmp_path / "moved")
    compact(moved, before_version=None)
    train_here(root, offline=True, sources=(moved.url,), epochs=1)
    weights = final_weights(trained)
    assert {row[:4] for row in ledger(root)} == {row[:4] for row in ledger(trained)}
    assert all((tensor == weights[name]).all() for name, tensor in final_weights(root).items())


def test_a_checkpoint_says_what_it_was_trained_on(new_root, source):
    root = new_root("offline")
    train_here(root, offline=True, sources=(source.url,), epochs=1, where="true")
    begun = complete_checkpoints(root)[-1].cursor["offline"]
    assert begun == {"first_step": 1, "sources": [source.url], "where": "true"}


def test_a_request_that_two_workers_sampled_is_used_once_an_epoch_and_the_ledger_says_why(new_root, source, tmp_path):
    root, source = new_root("offline"), copied(source, tmp_path / "source")
    fill(source, num_files=1, worker_id="w0-zombie", seed_of_ids=9)  # the requests of the first of two files
    assert train_here(root, offline=True, sources=(source.url,), epochs=2) == 8
    uses = Counter(group for groups in groups_by_step(root).values() for group in groups)
    assert sorted(uses.values()) == [2] * 8
    dropped = (
        "select reason, count(distinct group_id), count(distinct step) from batches where not used group by reason"
    )
    assert query(root, dropped) == [("duplicate_request", 4, 1)]
