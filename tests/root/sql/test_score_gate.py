"""Plans that need scores: what waits, what a scorer's value becomes, and why a row is dropped."""

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from ludic.errors import ConfigError, QueryError
from ludic.records.tables import arrow_schema
from ludic.root.rows.tables import PLAN_COLUMNS
from ludic.root.sql.planner import BatchRules, Planner

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def score_rows(rows, values, *, scorer="judge", version="aa11", name="score", hour=0):
    """Scores of the rollouts of a table, in its order; a text is a failure's reason, None is no score."""
    found = [
        {
            "rollout_id": rollout_id,
            "name": name,
            "value": None if isinstance(value, str) else value,
            "scorer": scorer,
            "scorer_version": version,
            "error": value if isinstance(value, str) else None,
            "created_at": EPOCH + timedelta(hours=hour),
            "run_id": "run",
        }
        for rollout_id, value in zip(rows["rollout_id"].to_pylist(), values, strict=True)
        if value is not None
    ]
    return pa.Table.from_pylist(found, arrow_schema("scores")).select(PLAN_COLUMNS)


def plan(planner, **options):
    ledger = planner.plan(step=1, attempt_id=1, trainer_version=0, **options)
    return None if ledger is None else ledger.to_pylist()


def in_order(rows, ledger, column):
    values = {row["rollout_id"]: row[column] for row in ledger}
    return [values[rollout_id] for rollout_id in rows["rollout_id"].to_pylist()]


def test_the_value_of_a_scorer_is_the_reward(arrive):
    planner = Planner(BatchRules(groups_per_batch=1, reward_scorer="judge", wait_for_scores_s=None))
    rows = arrive([[1.0, 1.0, 1.0]])
    planner.add(rows)
    assert plan(planner) is None
    planner.add_scores(score_rows(rows, [4.0, 1.0, 1.0]))
    ledger = plan(planner)
    assert in_order(rows, ledger, "episode_reward") == [4.0, 1.0, 1.0]
    assert in_order(rows, ledger, "advantage") == [3.0, -1.5, -1.5]  # 4 - (1 + 1)/2, 1 - (4 + 1)/2
    assert [dict(row["scorer_versions"]) for row in ledger] == [{"judge": "aa11"}] * 3


def test_without_scorers_the_ledger_names_none(arrive):
    planner = Planner(BatchRules(groups_per_batch=1))
    planner.add(arrive([[1.0, 0.0]]))
    assert [row["scorer_versions"] for row in plan(planner)] == [None, None]


def test_a_plan_waits_until_the_last_scorer_has_answered_for_the_last_rollout(arrive):
    planner = Planner(BatchRules(groups_per_batch=1, scorers=("judge", "style"), wait_for_scores_s=None))
    rows = arrive([[1.0, 0.0]])
    planner.add(rows)
    planner.add_scores(score_rows(rows, [0.5, 0.5]))
    planner.add_scores(score_rows(rows, [0.5, None], scorer="style"))
    assert plan(planner) is None
    assert planner.num_pending_groups == 1
    shortage = planner.shortage(1, 0)
    assert shortage.num_waiting_groups == 1
    assert shortage.describe() == ("0 of 1 groups are ready; 1 groups wait for scores: style has not scored 1 rollouts")
    planner.add_scores(score_rows(rows, [None, 0.25], scorer="style"))
    assert in_order(rows, plan(planner), "advantage") == [1.0, -1.0]
    assert planner.num_pending_groups == 0


def test_a_rollout_whose_scorer_failed_is_dropped_as_unscored(arrive):
    planner = Planner(BatchRules(groups_per_batch=1, reward_scorer="judge", wait_for_scores_s=None))
    rows = arrive([[1.0, 1.0, 1.0]])
    planner.add(rows)
    planner.add_scores(score_rows(rows, [2.0, 1.0, "the judge answered 'hm'"]))
    ledger = plan(planner)
    assert in_order(rows, ledger, "reason") == [None, None, "unscored"]
    assert in_order(rows, ledger, "episode_reward") == [2.0, 1.0, None]
    assert in_order(rows, ledger, "advantage") == [1.0, -1.0, None]


def test_when_the_time_is_over_what_is_not_scored_is_dropped(arrive):
    planner = Planner(BatchRules(groups_per_batch=1, scorers=("judge",), wait_for_scores_s=0.0))
    rows = arrive([[1.0, 0.0, 0.5], [1.0, 0.0]])
    planner.add_scores(score_rows(rows, [0.5, 0.5, None, None, None]))
    planner.add(rows)
    assert in_order(rows, plan(planner), "reason") == [None, None, "unscored", "unscored", "unscored"]


def test_failed_rollouts_and_duplicates_need_no_score(arrive):
    planner = Planner(BatchRules(groups_per_batch=1, reward_scorer="judge", wait_for_scores_s=None))
    rows = arrive([[1.0, None, 1.0]], error=[None, "failed", None])
    double = arrive([[1.0, 0.0]], arrival=1)
    double = double.set_column(double.schema.get_field_index("refusal"), "refusal", pa.array(["duplicate_request"] * 2))
    planner.add(rows)
    planner.add(double)
    planner.add_scores(score_rows(rows, [1.0, None, 0.0]))
    ledger = plan(planner)
    assert in_order(rows, ledger, "reason") == [None, "drop_errors", None]
    assert in_order(double, ledger, "reason") == ["duplicate_request"] * 2


def test_a_group_that_was_scored_by_different_versions_is_refused(arrive):
    rows = arrive([[1.0, 0.0], [1.0, 0.0]])
    scores = [
        score_rows(rows, [0.5, None, 0.5, 0.5]),
        score_rows(rows, [None, 0.75, 0.25, None], version="bb22", hour=1),
    ]
    rules = {"groups_per_batch": 1, "reward_scorer": "judge", "wait_for_scores_s": 0.0}

    def planned(**options):
        planner = Planner(BatchRules(**rules | options))
        for table in scores:
            planner.add_scores(table)
        planner.add(rows)
        return plan(planner)

    # The second group has all its scores from version aa11.
    ledger = planned()
    assert in_order(rows, ledger, "reason") == ["mixed_scorers", "mixed_scorers", None, None]
    assert in_order(rows, ledger, "episode_reward")[2:] == [0.5, 0.5]
    # Told, the newest score of each rollout counts.
    ledger = planned(groups_per_batch=2, mixed_scorers=True)
    assert in_order(rows, ledger, "reason") == [None] * 4
    assert in_order(rows, ledger, "episode_reward") == [0.5, 0.75, 0.5, 0.5]
    versions = [dict(value) for value in in_order(rows, ledger, "scorer_versions")]
    assert versions == [{"judge": "aa11"}, {"judge": "bb22"}, {"judge": "aa11"}, {"judge": "aa11"}]
    # One version by name.
    ledger = planned(groups_per_batch=2, reward_scorer="judge@aa")
    assert in_order(rows, ledger, "reason") == [None, "unscored", None, None]


def test_the_newest_version_that_scored_the_whole_group_counts(arrive):
    planner = Planner(BatchRules(groups_per_batch=1, reward_scorer="judge", wait_for_scores_s=None))
    rows = arrive([[1.0, 0.0]])
    planner.add(rows)
    planner.add_scores(score_rows(rows, [0.25, 0.5], version="bb22", hour=1))
    planner.add_scores(score_rows(rows, [1.0, 0.0], version="aa11"))
    assert in_order(rows, plan(planner), "episode_reward") == [0.25, 0.5]


def test_a_version_by_its_first_digits_and_a_value_by_name(arrive):
    planner = Planner(BatchRules(groups_per_batch=1, reward_scorer="judge@aa:help", wait_for_scores_s=0.0))
    rows = arrive([[1.0, 0.0]])
    planner.add_scores(score_rows(rows, [9.0, 9.0], version="bb22", name="help"))
    planner.add_scores(score_rows(rows, [8.0, 8.0], name="harm"))
    planner.add_scores(score_rows(rows, [0.25, 0.5], name="help"))
    planner.add(rows)
    assert in_order(rows, plan(planner), "episode_reward") == [0.25, 0.5]


def test_of_a_value_that_was_given_twice_the_first_counts_and_of_a_failure_the_value(arrive):
    planner = Planner(BatchRules(groups_per_batch=1, reward_scorer="judge", wait_for_scores_s=0.0))
    rows = arrive([[1.0, 0.0]])
    planner.add_scores(score_rows(rows, [0.25, "failed"]))
    planner.add_scores(score_rows(rows, [0.75, 0.5], hour=1))
    planner.add(rows)
    assert in_order(rows, plan(planner), "episode_reward") == [0.25, 0.5]


def test_sql_of_advantages_and_filters_reads_the_scores_of_its_rollouts(arrive, tmp_path):
    advantage = tmp_path / "judged.sql"
    advantage.write_text("""
select rollout_id, value - avg(value) over (partition by group_id) as advantage
from scores
inner join rollouts using (rollout_id)
where scorer = 'judge'
""")
    bad = tmp_path / "bad.sql"
    bad.write_text("(select max(value) from scores where scores.rollout_id = rollouts.rollout_id) < 0.2")
    rules = {"advantage": str(advantage), "filters": (str(bad),), "groups_per_batch": 1}
    planner = Planner(BatchRules(**rules, scorers=("judge",)))
    rows = arrive([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    planner.add_scores(score_rows(rows, [1.0, 0.5, 0.0, 8.0, 8.0, 8.0]))
    planner.add(rows)
    ledger = plan(planner)
    assert in_order(rows.slice(0, 3), ledger, "advantage") == [0.5, 0.0, -0.5]
    assert in_order(rows.slice(0, 3), ledger, "reason") == [None, None, "bad"]
    assert planner.num_pending_groups == 1
    with pytest.raises(QueryError, match="it reads scores, so name their scorers in the setting scorers"):
        Planner(BatchRules(**rules))


def test_sql_reads_no_scores_of_groups_that_an_earlier_plan_used(arrive, tmp_path):
    mean = tmp_path / "mean.sql"
    mean.write_text("select rollout_id, (select avg(value) from scores) as advantage from rollouts")
    planner = Planner(BatchRules(advantage=str(mean), groups_per_batch=1, scorers=("judge",)))
    for scores, expected in [([8.0, 6.0], 7.0), ([1.0, 0.5], 0.75)]:  # with the first two: 15.5 / 4
        rows = arrive([[1.0, 1.0]])
        planner.add_scores(score_rows(rows, scores))
        planner.add(rows)
        assert in_order(rows, plan(planner), "advantage") == [expected, expected]


def test_where_may_read_the_reward_that_a_scorer_gives(arrive):
    rules = BatchRules(groups_per_batch=1, where="episode_reward > 0.5", reward_scorer="judge", wait_for_scores_s=None)
    planner = Planner(rules)
    rows = arrive([[0.0, 0.0]])
    planner.add(rows)
    planner.add_scores(score_rows(rows, [1.0, 0.25]))
    assert in_order(rows, plan(planner), "reason") == [None, "where"]


def test_references_that_can_not_be_meant_are_refused():
    for options, reason in (
        ({"scorers": ("judge@xyz",)}, "scorers has 'judge@xyz', wanted SCORER or SCORER@VERSION"),
        ({"reward_scorer": ""}, "reward_scorer has ''"),
        ({"scorers": ("judge@aa",), "reward_scorer": "judge@bb"}, "several versions of 'judge': aa and bb"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Planner(BatchRules(groups_per_batch=1, **options))
