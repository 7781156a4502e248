"""Training on scores: what the trainer waits for and drops; restarts, offline runs and replays."""

import threading
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from tiny_runs import fill, final_weights, query, train_config, train_here

from ludic.errors import ConfigError, StalledError
from ludic.root.attempts import read_attempt, start_attempt
from ludic.root.json_records import CheckpointInfo
from ludic.root.rows.ledger import write_ledger
from ludic.root.rows.tables import ScoreLog
from ludic.training.batches.config import BatchConfig
from ludic.training.batches.online import OnlineSource
from ludic.training.batches.stream import BatchStream
from ludic.training.inherited_settings import replay_settings
from ludic.training.publisher import Publisher


def score(root, groups, value_of, *, scorer="judge", version="aa11"):
    """Store a score of each rollout of the groups; value_of gives its value, or a failure's reason."""
    with ScoreLog(root, scorer) as log:
        for group in groups.values():
            for rollout in group.rollouts:
                value = value_of(rollout)
                log.append(
                    {
                        "rollout_id": rollout.rollout_id,
                        "name": "score",
                        "value": None if isinstance(value, str) else value,
                        "error": value if isinstance(value, str) else None,
                        "scorer_version": version,
                        "created_at": datetime.now(UTC),
                    }
                )


def reversed_reward(rollout):
    return 1.0 - rollout.episode_reward


@pytest.fixture
def open_source():
    sources = []

    def open_(root, **settings):
        publisher = Publisher(root, start_attempt(root), keep=None)
        source = OnlineSource(root, train_config(**settings).batch, threading.Event())
        source.resume(None, publisher)
        publisher.publish(lambda folder: None, step=0)
        sources.append(source)
        return source, publisher

    yield open_
    for source in sources:
        source.close()


def next_plan(source, step=1):
    return source.plan(step, attempt_id=1, trainer_version=0)


def test_a_plan_waits_for_scores_that_another_process_writes(new_root, open_source):
    root = new_root("run")
    groups = fill(root, num_files=1, groups_per_file=2)
    source, _ = open_source(root, reward_scorer="judge", rollout_timeout_s=60.0)
    timer = threading.Timer(0.3, score, (root, groups, reversed_reward))
    timer.start()
    rows = next_plan(source).rows.to_pylist()
    timer.join()
    rewards = {rollout.rollout_id: rollout.episode_reward for group in groups.values() for rollout in group.rollouts}
    assert {row["rollout_id"]: row["episode_reward"] for row in rows} == {
        rollout_id: 1.0 - reward for rollout_id, reward in rewards.items()
    }
    assert all(row["used"] for row in rows)


def test_a_wait_ends_with_its_reason(new_root, open_source):
    root = new_root("run")
    fill(root, num_files=1, groups_per_file=2)
    source, _ = open_source(root, scorers=("judge@aa",), wait_for_scores_s=None, rollout_timeout_s=0.2)
    with pytest.raises(StalledError, match="2 groups wait for scores: judge@aa has not scored 8 rollouts"):
        next_plan(source)
    # Waiting groups are not asked of workers again.
    assert source.count_ready_groups(0) == 2


@pytest.mark.slow
def test_after_the_time_limit_unscored_rollouts_are_dropped(new_root, open_source):
    root = new_root("run")
    groups = fill(root, num_files=1, groups_per_file=2)
    source, _ = open_source(root, scorers=("judge",), wait_for_scores_s=0.3, rollout_timeout_s=60.0)
    # Two of the four rollouts of each group have a score, and more do not come.
    halves = {group_id: replace(group, rollouts=group.rollouts[:2]) for group_id, group in groups.items()}
    score(root, halves, reversed_reward)
    rows = next_plan(source).rows.to_pylist()
    scored = {rollout.rollout_id for group in halves.values() for rollout in group.rollouts}
    assert {row["rollout_id"] for row in rows if row["used"]} == scored
    assert [row["reason"] for row in rows if not row["used"]] == ["unscored"] * 4


def test_a_judge_that_fails_on_everything_costs_rollouts_and_no_error(new_root, open_source):
    root = new_root("run")
    groups = fill(root, num_files=1, groups_per_file=4)
    first, second, *others = groups
    score(root, {group_id: groups[group_id] for group_id in others}, lambda rollout: "the judge answered 'hm'")
    score(root, {first: groups[first], second: groups[second]}, reversed_reward)
    source, _ = open_source(root, reward_scorer="judge", rollout_timeout_s=60.0)
    rows = next_plan(source).rows.to_pylist()
    assert {row["group_id"] for row in rows if row["used"]} == {first, second}
    assert {(row["group_id"], row["reason"]) for row in rows if not row["used"]} == {
        (group_id, "unscored") for group_id in others
    }


def test_a_broken_file_of_scores_is_left_out(new_root, open_source, caplog):
    root = new_root("run")
    groups = fill(root, num_files=1, groups_per_file=2)
    root.put_if_absent("scores/scorer=judge/019b0000-0000-7000-8000-000000000000-0.parquet", b"no Parquet")
    score(root, groups, reversed_reward)
    source, _ = open_source(root, reward_scorer="judge", rollout_timeout_s=60.0)
    assert all(row["used"] for row in next_plan(source).rows.to_pylist())
    assert "left out scores that can't be read" in caplog.text


@pytest.mark.slow
def test_an_average_over_batches_of_scores_goes_on_after_a_restart(new_root, open_source):
    root = new_root("run")
    score(root, fill(root, num_files=2), reversed_reward)
    settings = {"advantage": "rae", "reward_scorer": "judge"}
    source, publisher = open_source(root, **settings)
    plans = []
    for step in (1, 2, 3, 4):
        plans.append(next_plan(source, step))
        write_ledger(root, read_attempt(root, 1), step, plans[-1].rows)
    checkpoint = CheckpointInfo(attempt_id=1, step=2, policy_version=0, cursor=plans[1].cursor, config={}, num_ranks=1)
    again = OnlineSource(root, train_config(**settings).batch, threading.Event())
    again.resume(checkpoint, publisher)
    for plan in plans[2:]:
        assert next_plan(again, plan.step).rows.equals(plan.rows)


@pytest.mark.slow
def test_stored_rollouts_are_trained_on_with_the_scores_that_are_there(new_root):
    root = new_root("run")
    groups = fill(root, num_files=1, groups_per_file=4)
    with pytest.raises(ConfigError, match=r"nothing to train on; 0 of 2 groups are ready; .* unscored most"):
        BatchStream(root, config=BatchConfig(reward_scorer="judge"))
    some = dict(list(groups.items())[:3])
    score(root, some, reversed_reward)
    stream = BatchStream(root, config=BatchConfig(reward_scorer="judge"))
    used = {row["group_id"] for share in stream for row in share.plan.rows.to_pylist() if row["used"]}
    assert used == set(some)


@pytest.mark.slow
def test_a_replay_repeats_the_rewards_and_versions_of_scores(new_root, mesh):
    root = new_root("run")
    score(root, fill(root, num_files=1), reversed_reward)
    train_here(root, num_steps=2, reward_scorer="judge", learning_rate=1e-3)
    assert query(root, "select distinct scorer_versions['judge'] from batches") == [("aa11",)]
    rewards = "select batches.episode_reward, rollouts.episode_reward from batches join rollouts using (rollout_id)"
    assert all(used == 1.0 - stored for used, stored in query(root, rewards))
    # Other scores come later, and the replay does not look at them.
    score(root, fill(root, num_files=1, worker_id="w1-test", seed=3), lambda rollout: 0.0, version="bb22")
    again = new_root("again")
    train_here(again, **replay_settings(root.url), replay_batches=root.url)
    rows = "select rollout_id, episode_reward, advantage, scorer_versions from batches order by step, batch_index"
    first, second = (query(each, rows) for each in (root, again))
    assert first == second
    for name, tensor in final_weights(root).items():
        assert (tensor == final_weights(again)[name]).all()
