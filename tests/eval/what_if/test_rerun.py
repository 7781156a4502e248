"""what-if: the run's own rules give its ledger bit for bit; other rules give other uses, drops and credit."""

from datetime import UTC, datetime, timedelta
from shutil import copytree

import numpy as np
import polars as pl
import pytest
from tiny_runs import (
    GROUPS_PER_BATCH,
    create_root,
    fill,
    make_model,
    train_config,
    train_here,
    train_until_killed,
)

import ludic
from ludic.app.launch.train import prepare_trainer_code
from ludic.errors import ConfigError, ConsentError, QueryError
from ludic.eval.what_if.rerun import given_settings, rerun
from ludic.root.attempts import start_attempt
from ludic.root.root import Root
from ludic.root.rows.ledger import write_ledger
from ludic.root.rows.reader import RolloutReader
from ludic.root.rows.tables import ScoreLog
from ludic.root.rows.tombstones import expire, stored_files
from ludic.root.sql.planner import Planner
from ludic.settings.consent import CONFIG_VARIABLE, CodeSettings
from ludic.training.batches.source import batch_rules

TIED = [0.0, 0.0, 0.0, 0.0]
MIXED = [[0.0, 1.0, 0.0, 1.0], TIED, [1.0, 0.0, 0.0, 0.0], [0.5, 1.0, None, 0.0]]


def given(**settings):
    return given_settings(**{"advantage": None, "filters": None, "algorithm": None, "sql_params": None} | settings)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def fill_mixed(root: Root, *, num_files: int = 3) -> None:
    """Groups with equal rewards, unscored rollouts, several turns, two versions, and a request sampled twice."""
    for seed in range(num_files):
        fill(root, num_files=1, worker_id=f"w{seed}-test", seed=seed, rewards=MIXED, num_turns=1 + seed % 2)
    fill(root, num_files=1, worker_id="w0-again", seed=0, seed_of_ids=77, rewards=MIXED[:1])
    fill(root, num_files=1, worker_id="w9-test", seed=9, rewards=MIXED[:3], policy_version=1, env_name="addition")


OWN_RULES = {
    "kept": {
        "filters": ("drop_zero_variance_groups", "drop_errors"),
        "baseline_over": "kept",
        "advantage": "grpo",
        "loss_normalization": "episodes",
    },
    "per_token": {
        "advantage": "token_returns",
        "max_seq_len": 12,
        "where": "episode_reward > 0",
        "selection": "uniform",
    },
    "history": {"advantage": "rae", "max_uses": 2, "filters": ("drop_zero_variance_groups",)},
    "pairs": {
        "advantage": "best_worst",
        "objective": "dpo",
        "loss_normalization": "sequences",
        "filters": ("drop_zero_variance_groups",),
    },
    "balanced": {"selection": "balanced", "sql_params": {"env_weights": "addition=2"}},
    "offline": {"offline": True, "epochs": 1, "filters": ("drop_zero_variance_groups",)},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", OWN_RULES.values(), ids=OWN_RULES)
def test_the_own_rules_of_a_run_give_its_ledger_bit_for_bit(tmp_path, model, settings):
    root = create_root(str(tmp_path / "run"), model, env=("moar_cats", "addition"))
    fill_mixed(root, num_files=2)
    if settings.get("objective") == "dpo":
        settings = settings | {"reference": model}
    assert train_here(root, num_steps=2, **settings) >= 2
    again = rerun(root, given())
    assert again.is_ledger
    assert (again.steps["num_added"].sum(), again.steps["num_removed"].sum()) == (0, 0)
    assert (again.steps["mean_abs_difference"].sum(), again.steps["sign_flips"].sum()) == (0.0, 0.0)
    assert rerun(root, given(), steps="2").is_ledger


def test_the_time_of_a_plan_follows_from_the_rows_that_were_too_old(tmp_path):
    root = create_root(str(tmp_path / "run"), "model")
    for seed in range(3):  # written at seconds 0, 1 and 2
        fill(root, num_files=1, groups_per_file=1, worker_id=f"w{seed}-test", seed=seed)
    settings = {"max_age_s": 60.0}
    planner = Planner(batch_rules(train_config(**settings).batch, GROUPS_PER_BATCH))
    rows = RolloutReader(root, planner.columns).poll(None)
    planner.add(rows)
    # 60.5 s after the first row, 59.5 s after the second.
    now = min(rows["created_at"].to_pylist()).replace(tzinfo=UTC) + timedelta(seconds=60.5)
    ledger = planner.plan(step=1, attempt_id=1, trainer_version=0, now=now)
    write_ledger(root, start_attempt(root, config=train_config(**settings).flat()), 1, ledger)
    again = rerun(root, given())
    assert again.is_ledger
    assert again.rows["reason"].to_list() == [None] * 8 + ["max_age"] * 4


@pytest.mark.slow
def test_the_own_rules_give_the_ledger_of_a_run_whose_trainer_was_killed(tmp_path, model):
    root = create_root(str(tmp_path / "run"), model)
    fill_mixed(root)
    rules = {"advantage": "rae", "filters": ("drop_zero_variance_groups",), "checkpoint_every": 1}
    train_until_killed(root, at_step=2, num_steps=4, **rules)
    assert train_here(root, num_steps=3, **rules) == 3
    again = rerun(root, given())
    assert again.is_ledger
    assert again.steps["step"].to_list() == [1, 2, 3]


@pytest.mark.slow
def test_the_own_rules_use_the_scores_that_the_plan_used(tmp_path, model):
    root = create_root(str(tmp_path / "run"), model)
    groups = fill(root, num_files=1)

    def score(version: str, value: float) -> None:
        with ScoreLog(root, "judge") as log:
            for number, group in enumerate(groups.values()):
                for rollout in group.rollouts[number % 2 :]:
                    log.append(
                        {
                            "rollout_id": rollout.rollout_id,
                            "name": "score",
                            "value": value * (1.0 - rollout.episode_reward),
                            "scorer_version": version,
                            "created_at": datetime.now(UTC),
                        }
                    )

    score("aa11", 1.0)
    train_here(root, num_steps=2, scorers=("judge",), reward_scorer="judge", wait_for_scores_s=0.01)
    score("bb22", -5.0)
    again = rerun(root, given())
    assert again.is_ledger
    assert "unscored" in again.rows["reason"].to_list()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, model):
    """Two steps of two groups each; the group of equal rewards is dropped."""
    root = create_root(str(tmp_path_factory.mktemp("trained") / "run"), model)
    fill(root, num_files=1, rewards=[MIXED[0], TIED, MIXED[2], [1.0, 1.0, 0.0, 1.0]])
    fill(root, num_files=1, worker_id="w1-test", seed=5, rewards=[MIXED[0], MIXED[2]])
    train_here(root, num_steps=2, filters=("drop_zero_variance_groups",))
    return root


@pytest.mark.slow
def test_a_run_with_drops_is_reproduced(trained):
    again = rerun(trained, given())
    assert again.is_ledger
    assert again.rows["reason"].drop_nulls().unique().to_list() == ["drop_zero_variance_groups"]


def test_without_the_filter_the_dropped_group_is_used_with_its_own_advantage(trained):
    other = rerun(trained, given(filters=()))
    assert not other.is_ledger
    first = other.steps.row(0, named=True)
    assert (first["num_used"], first["num_new_used"], first["num_added"], first["num_removed"]) == (8, 12, 4, 0)
    added = other.rows.filter(pl.col("new_used") & ~pl.col("used"))
    assert added["reason"].to_list() == ["drop_zero_variance_groups"] * 4
    assert added["new_advantage"].to_list() == [0.0] * 4


def test_another_advantage_changes_the_credit_of_each_token_by_numbers_worked_by_hand(trained):
    # rloo of [0, 1, 0, 1]: the means of the others are 2/3 and 1/3. reinforce: minus the mean of the batch, 3/8.
    rows = rerun(trained, given(advantage="reinforce"), steps="1").rows
    group = rows.filter(pl.col("group_id") == rows["group_id"][0])
    assert group["advantage"].to_list() == pytest.approx([-2 / 3, 2 / 3, -2 / 3, 2 / 3])
    assert group["new_advantage"].to_list() == [-3 / 8, 5 / 8, -3 / 8, 5 / 8]
    assert group["mean_abs_difference"].to_list() == pytest.approx([7 / 24, 1 / 24, 7 / 24, 1 / 24])
    # All rows are as long as each other. The second group, [1, 0, 0, 0], has 1 and -1/3, against 5/8 and -3/8.
    first = rerun(trained, given(advantage="reinforce"), steps="1").steps.row(0, named=True)
    assert first["mean_abs_difference"] == pytest.approx((7 + 1 + 7 + 1 + 9 + 1 + 1 + 1) / 24 / 8)
    old = [-2 / 3, 2 / 3, -2 / 3, 2 / 3, 1, -1 / 3, -1 / 3, -1 / 3]
    assert first["correlation"] == pytest.approx(np.corrcoef(old, [0, 1, 0, 1, 1, 0, 0, 0])[0, 1])


def test_a_user_s_advantage_may_flip_every_sign(trained, tmp_path):
    own = tmp_path / "mine.sql"
    own.write_text("select rollout_id, -2 * (episode_reward - 0.5) as advantage from rollouts")
    steps = rerun(trained, given(advantage=str(own))).steps
    assert steps["sign_flips"].to_list() == [1.0, 1.0]
    assert all(value < 0 for value in steps["correlation"])


def test_an_algorithm_brings_its_advantage_and_filters(trained):
    other = rerun(trained, given(algorithm="grpo"))
    assert other.rows.filter(pl.col("new_used"))["new_advantage"].abs().max() > 1
    with pytest.raises(ConfigError, match="algorithm 'grpoo' is unknown; did you mean"):
        rerun(trained, given(algorithm="grpoo"))


def test_a_filter_that_drops_everything_leaves_reasons(trained, tmp_path):
    own = tmp_path / "all_of_it.sql"
    own.write_text("true")
    other = rerun(trained, given(filters=(str(own),)))
    assert other.steps["num_new_used"].to_list() == [0, 0]
    assert set(other.rows["new_reason"]) == {"all_of_it"}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("3", "has no step 3; its batches have steps 1 to 2"),
        ("0-2", "no step 0"),
        ("2-1", "comes after"),
        ("a", "wanted"),
    ],
)
def test_wrong_steps_are_refused(trained, steps, message):
    with pytest.raises(ConfigError, match=message):
        rerun(trained, given(), steps=steps)


def test_a_wrong_advantage_is_refused_with_the_step(trained, tmp_path):
    own = tmp_path / "mine.sql"
    own.write_text("select rollout_id, null::double as advantage from rollouts")
    with pytest.raises(QueryError, match=r"step 1: .*mine.sql: 8 of 8 rollouts to train on get no finite advantage"):
        rerun(trained, given(advantage=str(own)))


def test_code_of_the_root_runs_only_with_consent(tmp_path, model, monkeypatch):
    own = tmp_path / "mine.sql"
    own.write_text("select rollout_id, 1.0 as advantage from rollouts")
    root = create_root(str(tmp_path / "run"), model)
    fill(root, num_files=1)
    prepare_trainer_code(root, train_config(advantage=str(own)), CodeSettings())
    train_here(root, num_steps=1, advantage=str(own))
    assert rerun(root, given()).is_ledger
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "another user"))
    with pytest.raises(ConsentError, match=r"mine\.sql"):
        rerun(root, given())


@pytest.fixture
def three_steps(tmp_path) -> Root:
    """Three planned steps, each of the two groups of one file; no trainer has run."""
    root = create_root(str(tmp_path / "run"), "model")
    fill(root, num_files=3, groups_per_file=GROUPS_PER_BATCH)
    config = train_config()
    planner = Planner(batch_rules(config.batch, GROUPS_PER_BATCH))
    planner.add(RolloutReader(root, planner.columns).poll(None))
    attempt = start_attempt(root, config=config.flat())
    for step in (1, 2, 3):
        write_ledger(root, attempt, step, planner.plan(step=step, attempt_id=attempt.attempt_id, trainer_version=0))
    return root


@pytest.mark.parametrize("rows_together", [1, 9, 1024])
def test_steps_are_read_together_and_planned_one_by_one(three_steps, monkeypatch, rows_together):
    monkeypatch.setattr("ludic.eval.what_if.rerun._ROWS_TOGETHER", rows_together)  # a step has 8 rows
    again = rerun(three_steps, given())
    assert again.is_ledger
    assert again.steps.select("step", "num_considered").rows() == [(1, 8), (2, 8), (3, 8)]
    used = ludic.connect(three_steps).execute("select rollout_id from batches order by step, batch_index").fetchall()
    assert again.rows["rollout_id"].to_list() == [rollout_id for (rollout_id,) in used]


def test_of_steps_that_are_read_together_the_one_whose_rollouts_are_gone_is_named(three_steps):
    expire(three_steps, stored_files(three_steps)[1:2], rule="the second")
    with pytest.raises(ConfigError, match=r"step 2 needs rollouts/\S*-1\.parquet, which is gone"):
        rerun(three_steps, given())
    assert rerun(three_steps, given(), steps="3").is_ledger


def test_expired_rollouts_are_named(tmp_path, trained):
    root = Root.open(str(copytree(trained.url, tmp_path / "run")))
    expire(root, stored_files(root), rule="all")
    with pytest.raises(ConfigError, match=r"step 1 needs rollouts/.* is gone: its rollouts have expired"):
        rerun(root, given())


def test_a_replay_has_no_rules_of_its_own(tmp_path, model, trained):
    again = create_root(str(tmp_path / "again"), model)
    train_here(again, replay_batches=trained.url)
    with pytest.raises(
        ConfigError, match=r"repeats the batches of .* without rules of its own; run what-if on that run"
    ):
        rerun(again, given())
