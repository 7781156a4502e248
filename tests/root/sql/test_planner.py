"""Which groups make a batch, which rows are dropped for which reason, and what waits."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from ludic.base.by_name import read_packaged
from ludic.errors import ConfigError, QueryError
from ludic.records.tables import SCALAR_COLUMNS, arrow_schema
from ludic.root.root import Root
from ludic.root.sql.connection import connect
from ludic.root.sql.library import advantages
from ludic.root.sql.planner import BatchRules, Planner


def plan(planner: Planner, *, step: int = 1, trainer_version: int = 0, **options) -> list[dict] | None:
    ledger = planner.plan(step=step, attempt_id=3, trainer_version=trainer_version, **options)
    return None if ledger is None else ledger.to_pylist()


def used(ledger: list[dict], column: str) -> list:
    return [row[column] for row in ledger if row["used"]]


def dropped(ledger: list[dict], column: str) -> list:
    return [row[column] for row in ledger if not row["used"]]


def test_a_plan_is_exactly_a_ledger(arrive):
    planner = Planner(BatchRules(groups_per_batch=1))
    table = arrive([[1.0, 0.0, 0.5]], arrival=4, policy_version=2)
    planner.add(table)
    ledger = planner.plan(step=120, attempt_id=3, trainer_version=5)
    assert ledger.schema.equals(arrow_schema("batches"))
    first = table.slice(0, 1).to_pylist()[0]
    assert ledger.slice(0, 1).to_pylist()[0] == {
        "attempt_id": 3,
        "step": 120,
        "batch_index": 0,
        "rollout_id": first["rollout_id"],
        "group_id": first["group_id"],
        "env_name": "moar_cats",
        "policy_version": 2,
        "trainer_version": 5,
        "lag": 3,
        "lag_last": 3,
        "file": "file-4",
        "row_group": 0,
        "row": 0,
        "prompt_length": 8,
        "response_length": 16,
        "episode_reward": 1.0,
        "advantage": 0.75,  # 1 - (0 + .5)/2
        "weight": 1.0,
        "used": True,
        "reason": None,
        "token_advantages": None,
        "num_uses": 1,
        "seq_len_truncated": False,
        "truncated": False,
        "truncation_reason": None,
        "root": None,
        "pair_id": None,
        "scorer_versions": None,
    }


def test_oldest_weights_go_first_then_first_come(arrive):
    planner = Planner(BatchRules(groups_per_batch=2))
    for arrival, version in enumerate([1, 0, 1, 0]):
        planner.add(arrive([[1.0, 0.0], [1.0, 0.0]], arrival=arrival, policy_version=version))
    files = [used(plan(planner, step=step, trainer_version=1), "file")[::2] for step in (1, 2, 3, 4)]
    assert files == [["file-1"] * 2, ["file-3"] * 2, ["file-0"] * 2, ["file-2"] * 2]
    assert planner.num_pending_groups == 0
    assert plan(planner, step=5) is None


def test_dropped_rows_stand_after_used_ones_with_the_first_filter_that_hit(arrive):
    rules = BatchRules(groups_per_batch=1, filters=("drop_truncated", "drop_parse_errors"))
    planner = Planner(rules)
    planner.add(
        arrive(
            [[1.0, 0.0, None, 0.5, 0.5]],
            truncated=[False, True, True, False, False],
            parse_error=[True, True, True, False, False],
        )
    )
    ledger = plan(planner)
    assert [row["batch_index"] for row in ledger] == [0, 1, 2, 3, 4]
    assert [row["row"] for row in ledger] == [3, 4, 0, 1, 2]
    assert [row["reason"] for row in ledger] == [
        None,
        None,
        "drop_parse_errors",
        "drop_truncated",
        "drop_errors",
    ]
    assert [row["weight"] for row in ledger] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_the_baseline_is_of_the_whole_group_unless_asked_otherwise(arrive):
    table = arrive([[1.0, 0.0, 0.5]], truncated=[True, False, False])
    for baseline_over, expected in [
        # (1 + .5)/2 and (1 + 0)/2 are the baselines of the second and the third
        ("group", [-0.75, 0.0]),
        # .5 and 0
        ("kept", [-0.5, 0.5]),
    ]:
        rules = BatchRules(groups_per_batch=1, filters=("drop_truncated",), baseline_over=baseline_over)
        planner = Planner(rules)
        planner.add(table)
        ledger = plan(planner)
        assert used(ledger, "advantage") == expected
        assert dropped(ledger, "advantage") == ([0.75] if baseline_over == "group" else [None])


def test_the_batch_mean_of_reinforce_is_of_the_batch_not_of_all_that_waits(arrive):
    planner = Planner(BatchRules(groups_per_batch=1, advantage="reinforce"))
    planner.add(arrive([[1.0, 0.0], [100.0, 100.0]]))
    assert used(plan(planner), "advantage") == [0.5, -0.5]
    assert used(plan(planner), "advantage") == [0.0, 0.0]


def test_a_group_that_lost_every_row_is_recorded_and_does_not_count(arrive):
    planner = Planner(BatchRules(groups_per_batch=2, filters=("drop_zero_variance_groups",)))
    planner.add(arrive([[1.0, 1.0], [1.0, 0.0], [None, None], [0.0, 1.0], [0.5, 0.5], [3.0, 0.0]]))
    ledger = plan(planner)
    assert used(ledger, "row") == [2, 3, 6, 7]
    assert dropped(ledger, "row") == [0, 1, 4, 5, 8, 9]
    assert dropped(ledger, "reason") == [
        *["drop_zero_variance_groups"] * 2,
        *["drop_errors"] * 2,
        *["drop_zero_variance_groups"] * 2,
    ]
    assert dropped(ledger, "advantage") == [None] * 6
    assert planner.num_pending_groups == 1


def test_groups_wait_until_there_are_enough(arrive):
    planner = Planner(BatchRules(groups_per_batch=2, filters=("drop_truncated",)))
    planner.add(arrive([[1.0, 0.0], [1.0, 0.0]], truncated=[True, True, False, False]))
    assert plan(planner) is None
    assert planner.num_pending_groups == 2
    shortage = planner.shortage(1, trainer_version=0)
    assert (shortage.ready_groups, shortage.wanted_groups, shortage.drops) == (1, 2, {"drop_truncated": 2})
    assert shortage.describe() == ("1 of 2 groups are ready; filters drop 2 of 4 rollouts, drop_truncated most (2)")
    planner.add(arrive([[1.0, 0.0]], arrival=1))
    ledger = plan(planner)
    assert used(ledger, "file") == ["file-0"] * 2 + ["file-1"] * 2
    assert dropped(ledger, "row") == [0, 1]


def test_a_shortage_without_drops_says_only_what_is_missing(arrive):
    planner = Planner(BatchRules(groups_per_batch=2))
    planner.add(arrive([[1.0, 0.0]]))
    assert planner.shortage(1, trainer_version=0).describe() == "1 of 2 groups are ready"


def test_stale_and_old_groups_are_dropped_by_what_the_trainer_knows(arrive):
    rules = BatchRules(
        groups_per_batch=1,
        filters=("max_off_policy_steps", "max_age"),
        params={"max_off_policy_steps": 2, "max_age_s": 60.0},
    )
    planner = Planner(rules)
    hour = {"year": 2026, "month": 1, "day": 1, "hour": 12, "tzinfo": UTC}
    written = [[datetime(**hour, minute=minute)] * 2 for minute in (0, 9, 9)]
    for arrival, (version, times) in enumerate(zip([3, 0, 3], written, strict=True)):
        planner.add(arrive([[1.0, 0.0]], arrival=arrival, policy_version=version, created_at=times))
    ledger = plan(planner, trainer_version=5, now=datetime(**hour, minute=10))
    assert used(ledger, "file") == ["file-2"] * 2
    assert used(ledger, "lag") == [2, 2]
    # queued by version: file-1 is stale, file-0 is old
    assert dropped(ledger, "reason") == ["max_off_policy_steps"] * 2 + ["max_age"] * 2


@pytest.mark.slow
def test_the_order_of_adding_does_not_change_the_plan(arrive):
    tables = [arrive([[0.1, 0.2, 0.7], [0.3, 0.3, 0.9]], arrival=0, seed=seed) for seed in range(3)]
    tables = [
        table.set_column(table.schema.get_field_index("file"), "file", pa.array([f"file-{seed}"] * 6))
        for seed, table in enumerate(tables)
    ]
    plans = []
    for order in (tables, tables[::-1], [tables[1], tables[2], tables[0]]):
        planner = Planner(BatchRules(groups_per_batch=4, filters=("drop_zero_variance_groups",)))
        for table in order:
            planner.add(table)
        plans.append(planner.plan(step=1, attempt_id=1, trainer_version=0))
    assert all(other.equals(plans[0]) for other in plans)


def test_only_columns_that_the_sql_reads_are_wanted(tmp_path, arrive):
    assert Planner(BatchRules(groups_per_batch=1)).columns == list(SCALAR_COLUMNS)
    file = tmp_path / "by_length.sql"
    file.write_text("select rollout_id, len(response_tokens) as advantage from rollouts")
    planner = Planner(BatchRules(groups_per_batch=1, advantage=str(file)))
    assert set(planner.columns) - set(SCALAR_COLUMNS) == {"response_tokens"}
    assert "traceback" not in planner.columns  # kilobytes in each failed row
    planner.add(arrive([[1.0, 0.0]]))
    assert used(plan(planner), "advantage") == [16.0, 16.0]


def test_a_users_filter_stands_in_the_ledger_by_its_name(tmp_path, arrive):
    file = tmp_path / "it's long.sql"
    file.write_text("group_id in (select group_id from rollouts where episode_reward > $most)")
    planner = Planner(BatchRules(groups_per_batch=1, filters=(str(file),), params={"most": 2}))
    planner.add(arrive([[3.0, 0.0], [1.0, 0.0]]))
    assert dropped(plan(planner), "reason") == ["it's long"] * 2


def test_a_filter_may_use_a_runs_own_column(tmp_path, arrive):
    file = tmp_path / "badly_judged.sql"
    file.write_text("x_judge = 'bad'")
    rules = BatchRules(groups_per_batch=1, filters=(str(file),))
    planner = Planner(rules, {"x_judge": "string", "x_unused": "string"})
    assert set(planner.columns) - set(SCALAR_COLUMNS) == {"x_judge"}
    rows = arrive([[3.0, 0.0, 1.0]])
    planner.add(rows.append_column("x_judge", pa.array(["good", None, "bad"])))
    ledger = plan(planner)
    assert used(ledger, "rollout_id") == rows["rollout_id"].to_pylist()[:2]
    assert dropped(ledger, "reason") == ["badly_judged"]
    with pytest.raises(QueryError, match=r"badly_judged\.sql: .*\"x_judge\" not found"):
        Planner(rules)


@pytest.mark.parametrize(
    ("advantage", "reason"),
    [
        ("select rollout_id, rewrad as advantage from rollouts", 'column "rewrad" not found'),
        ("select rollout_id, $scale as advantage from rollouts", r"no value for \$scale"),
        ("select rollout_id, ['0'] as token_advantages from rollouts", "returns .*list.*string"),
    ],
)
def test_advantages_that_can_not_work_are_refused_before_training(tmp_path, advantage: str, reason: str):
    file = tmp_path / "mine.sql"
    file.write_text(advantage)
    with pytest.raises(QueryError, match=rf"mine\.sql: .*{reason}"):
        Planner(BatchRules(groups_per_batch=1, advantage=str(file)))


@pytest.mark.parametrize(
    ("predicate", "reason"),
    [("truncatd", 'column "truncatd" not found'), ("response_length", "int32, not true or false")],
)
def test_filters_that_can_not_work_are_refused_before_training(tmp_path, predicate: str, reason: str):
    file = tmp_path / "mine.sql"
    file.write_text(predicate)
    with pytest.raises(QueryError, match=rf"mine\.sql: .*{reason}"):
        Planner(BatchRules(groups_per_batch=1, filters=(str(file),)))


@pytest.mark.parametrize(
    ("advantage", "reason"),
    [
        (
            "select rollout_id, null::double as advantage from rollouts",
            "2 of 2 rollouts to train on get no finite advantage",
        ),
        ("select rollout_id, ln(episode_reward - 1e-9) as advantage from rollouts where episode_reward > 0", "1 of 2"),
        ("select rollout_id, 'nan'::double as advantage from rollouts", "2 of 2"),
        (
            "select rollout_id, 1 as advantage from rollouts union all select rollout_id, 2 from rollouts",
            "more than once",
        ),
    ],
)
def test_rows_are_not_trained_on_without_one_finite_advantage(tmp_path, arrive, advantage: str, reason: str):
    file = tmp_path / "mine.sql"
    file.write_text(advantage)
    planner = Planner(BatchRules(groups_per_batch=1, advantage=str(file)))
    planner.add(arrive([[1.0, 0.0]]))
    with pytest.raises(QueryError, match=rf"mine\.sql: .*{reason}"):
        plan(planner)
    assert planner.num_pending_groups == 1


BY_TOKEN = "select rollout_id, {} as token_advantages from rollouts"


@pytest.fixture
def planner_by_token(tmp_path) -> Callable[[str], Planner]:
    """A planner of one group, with the rows' reward plus the token's index at each of so many tokens."""

    def make(num_tokens: str, **rules) -> Planner:
        file = tmp_path / "by_token.sql"
        file.write_text(BY_TOKEN.format(f"[episode_reward + i for i in range({num_tokens})]"))
        return Planner(BatchRules(groups_per_batch=1, advantage=str(file), **rules))

    return make


def test_an_advantage_for_each_token_stands_in_the_ledger_beside_their_mean(planner_by_token, arrive):
    planner = planner_by_token("response_length", filters=("drop_truncated",))
    planner.add(arrive([[1.0, 0.5, 0.0]], truncated=[False, True, False]))
    ledger = plan(planner)
    # 16 tokens: the mean of 0, 1, ..., 15 is 7.5
    assert used(ledger, "advantage") == [8.5, 7.5]
    assert used(ledger, "token_advantages") == [[1.0 + i for i in range(16)], [float(i) for i in range(16)]]
    assert (dropped(ledger, "advantage"), dropped(ledger, "token_advantages")) == ([8.0], [None])


def test_the_mean_is_that_of_the_rollout_whatever_the_order_of_the_query(planner_by_token, arrive, monkeypatch):
    def turned(name, *rest):
        text = read_packaged(name, *rest)
        return f"{text} order by rollout_id desc" if "mean_advantages" in rest else text

    monkeypatch.setattr("ludic.root.sql.planner.read_packaged", turned)
    planner = planner_by_token("response_length")
    planner.add(arrive([[1.0, 0.5, 0.0]]))
    assert used(plan(planner), "advantage") == [8.5, 8.0, 7.5]


def test_a_response_without_tokens_gets_none_and_the_advantage_0(planner_by_token, arrive):
    planner = planner_by_token("response_length")
    planner.add(arrive([[1.0]], response_length=[0]))
    (row,) = plan(planner)
    assert (row["advantage"], row["token_advantages"]) == (0.0, [])


def test_an_advantage_too_few_names_the_file_the_rollout_and_both_lengths(planner_by_token, arrive):
    planner = planner_by_token("response_length - row")
    rows = arrive([[1.0, 0.5]], arrival=7)
    planner.add(rows)
    message = (
        rf"1 of 2 rollouts get .* wrong length, first {rows['rollout_id'][1]} in file-7: 15 for 16 response tokens"
    )
    with pytest.raises(QueryError, match=message):
        plan(planner)
    assert planner.num_pending_groups == 1


@pytest.mark.parametrize(
    ("advantages", "reason"),
    [
        ("[null::double for i in range(response_length)]", "with nulls, wanted a number for each response token"),
        ("null::double[]", "get no finite advantage"),
        ("['nan'::double for i in range(response_length)]", "2 of 2 rollouts to train on get no finite advantage"),
        ("[1e39 for i in range(response_length)]", "no finite advantage"),  # more than a float32 holds
    ],
)
def test_tokens_are_not_trained_on_without_a_finite_advantage(tmp_path, arrive, advantages: str, reason: str):
    file = tmp_path / "mine.sql"
    file.write_text(BY_TOKEN.format(advantages))
    planner = Planner(BatchRules(groups_per_batch=1, advantage=str(file)))
    planner.add(arrive([[1.0, 0.0]]))
    with pytest.raises(QueryError, match=rf"mine\.sql: .*{reason}"):
        plan(planner)


DPO = {"advantage": "best_worst", "baseline_over": "kept", "loss_unit": "pair"}


def test_rows_are_used_in_pairs_and_the_others_dropped_by_that_name(arrive):
    planner = Planner(BatchRules(groups_per_batch=2, filters=("drop_truncated",), **DPO))
    # without the truncated 1.0, the best of the first group is 0.5
    table = arrive([[1.0, 0.0, 0.5], [0.25, 0.75]], truncated=[True, False, False, False, False])
    planner.add(table)
    ledger = plan(planner)
    first, second = dict.fromkeys(table["group_id"].to_pylist())
    assert used(ledger, "row") == [1, 2, 3, 4]
    assert used(ledger, "advantage") == [-1, 1, -1, 1]
    assert used(ledger, "pair_id") == [first, first, second, second]
    assert dropped(ledger, "reason") == ["drop_truncated"]
    planner.add(arrive([[1.0, 0.0, 0.5], [0.25, 0.25]], arrival=1))
    ledger = plan(planner, step=2)
    assert used(ledger, "row") == [0, 1]
    assert dropped(ledger, "row") == [2, 3, 4]
    assert dropped(ledger, "reason") == ["no_pair"] * 3
    assert dropped(ledger, "pair_id") == [None] * 3
    assert planner.num_pending_groups == 0


def test_a_row_whose_other_side_a_filter_drops_is_in_no_pair(arrive):
    planner = Planner(BatchRules(groups_per_batch=2, filters=("drop_truncated",), **DPO | {"baseline_over": "group"}))
    planner.add(arrive([[1.0, 0.0, 0.5], [0.25, 0.75]], truncated=[True, False, False, False, False]))
    ledger = plan(planner)
    assert used(ledger, "row") == [3, 4]
    assert [(row["row"], row["reason"]) for row in ledger if not row["used"]] == [
        (0, "drop_truncated"),
        (1, "no_pair"),
        (2, "no_pair"),
    ]


def test_pairs_can_not_be_made_by_an_advantage_that_knows_none():
    message = r"rloo\.sql: returns no pair_id, which objectives of pairs \(dpo, ipo, orpo\) need"
    with pytest.raises(QueryError, match=message):
        Planner(BatchRules(groups_per_batch=1, loss_unit="pair"))


@pytest.mark.parametrize(
    ("advantage", "reason"),
    [
        ("select rollout_id, 1 as advantage, group_id as pair_id from rollouts", "has 2 rollouts, 2 of them chosen"),
        ("select rollout_id, 0 as advantage, group_id as pair_id from rollouts", "has 2 rollouts, 0 of them chosen"),
        (
            "select rollout_id, 1 as advantage, rollout_id as pair_id from rollouts",
            "makes no pair of the 1 groups .* drop_zero_variance_groups",
        ),
    ],
)
def test_pairs_are_one_chosen_and_one_rejected_row(tmp_path, arrive, advantage: str, reason: str):
    file = tmp_path / "mine.sql"
    file.write_text(advantage)
    planner = Planner(BatchRules(groups_per_batch=1, advantage=str(file), loss_unit="pair"))
    planner.add(arrive([[1.0, 0.0]]))
    with pytest.raises(QueryError, match=rf"mine\.sql: .*{reason}"):
        plan(planner)


def test_episodes_count_alike_however_many_rows_they_have(arrive):
    """Of three episodes, the first has two rows, of 3 and 1 sampled tokens, and the last one that a filter drops."""
    table = arrive([[1.0, 1.0, 0.0, 0.5]], truncated=[False, False, False, True]).to_pylist()
    table[1] |= {"episode_id": table[0]["episode_id"], "segment_index": 1}
    for row, length in zip(table, (3, 1, 10, 10), strict=True):
        row["action_length"] = length
    rows = pa.Table.from_pylist(table, schema=arrive([[0.0]]).schema)
    planner = Planner(BatchRules(groups_per_batch=1, filters=("drop_truncated",), loss_unit="episode"))
    planner.add(rows)
    ledger = plan(planner)
    # 3 rows of 2 episodes are used; a row has its part of the episode's tokens, times 3 / 2.
    assert used(ledger, "weight") == pytest.approx([3 / 4 * 3 / 2, 1 / 4 * 3 / 2, 3 / 2])
    assert dropped(ledger, "weight") == [0.0]


def trained_rows(arrive, *rows: dict[str, Any], **rules: Any) -> list[dict]:
    """The ledger of one group, by episodes: each row has 10 prompt tokens, and is all sampled unless it says more."""
    lengths = {"prompt_length": 10, "response_length": 10, "action_length": 10, "action_mask": None}
    table = [
        {**row, **lengths, **changes}
        for row, changes in zip(arrive([[1.0] * len(rows)]).to_pylist(), rows, strict=True)
    ]
    planner = Planner(BatchRules(groups_per_batch=1, loss_unit="episode", **rules))
    planner.add(pa.Table.from_pylist(table, schema=arrive([[0.0]]).schema))
    return plan(planner)


def test_rows_that_max_seq_len_empties_are_dropped_and_count_in_no_weight(arrive):
    # A has two rows, the second of which begins beyond 20 tokens; B has one: both trajectories count by what is left.
    ledger = trained_rows(
        arrive,
        {"rollout_id": "a1", "episode_id": "A", "trajectory_id": "a1"},
        {"rollout_id": "a2", "episode_id": "A", "trajectory_id": "a1", "segment_index": 1, "prompt_length": 20},
        {"rollout_id": "b", "episode_id": "B", "trajectory_id": "b"},
        max_seq_len=20,
    )
    assert used(ledger, "rollout_id") == ["a1", "b"]
    assert used(ledger, "weight") == [1.0, 1.0]
    assert dropped(ledger, "reason") == ["no_tokens"]


def test_weights_go_by_the_sampled_tokens_that_max_seq_len_leaves(arrive):
    # within 20 tokens A has 6 + 4 sampled ones, where the second row has 4 of context first, and C has none
    context_first = [False] * 4 + [True] * 10
    ledger = trained_rows(
        arrive,
        {"rollout_id": "a1", "episode_id": "A", "trajectory_id": "a1", "response_length": 6, "action_length": 6},
        {
            "rollout_id": "a2",
            "episode_id": "A",
            "trajectory_id": "a1",
            "segment_index": 1,
            "prompt_length": 12,
            "response_length": 14,
            "action_mask": context_first,
        },
        {"rollout_id": "b", "episode_id": "B", "trajectory_id": "b", "response_length": 30, "action_length": 30},
        {
            "rollout_id": "c",
            "episode_id": "C",
            "trajectory_id": "c",
            "prompt_length": 16,
            "response_length": 14,
            "action_mask": context_first,
        },
        max_seq_len=20,
    )
    # 3 rows of 2 trajectories: each adds up to 3 / 2
    assert used(ledger, "weight") == pytest.approx([6 / 10 * 3 / 2, 4 / 10 * 3 / 2, 3 / 2])
    assert (dropped(ledger, "rollout_id"), dropped(ledger, "reason")) == (["c"], ["no_tokens"])


def test_siblings_and_a_child_with_its_parents_name_are_trajectories_of_their_own(arrive):
    of_a = {"episode_id": "A", "agent_id": "a"}
    ledger = trained_rows(
        arrive,
        {"rollout_id": "parent", "trajectory_id": "parent", **of_a},
        *({"rollout_id": name, "trajectory_id": name, "parent_rollout_id": "parent", **of_a} for name in ("c", "d")),
        {"rollout_id": "b", "trajectory_id": "b", "episode_id": "B"},
    )
    assert used(ledger, "weight") == [1.0] * 4


def test_a_row_without_a_sampled_token_is_dropped_and_says_so(arrive):
    ledger = trained_rows(arrive, {"rollout_id": "a"}, {"rollout_id": "b", "response_length": 0, "action_length": 0})
    assert (used(ledger, "rollout_id"), dropped(ledger, "reason")) == (["a"], ["no_tokens"])


def test_a_group_of_which_max_seq_len_leaves_nothing_makes_no_batch(arrive):
    planner = Planner(BatchRules(groups_per_batch=1, max_seq_len=8))
    planner.add(arrive([[1.0, 0.0]]))  # prompts of 8 tokens
    assert planner.plan(step=1, attempt_id=1, trainer_version=0) is None
    assert (
        planner.shortage(step=1, trainer_version=0)
        .describe()
        .endswith("filters drop 2 of 2 rollouts, no_tokens most (2)")
    )


CAPTURES = [None, "sampler", "trainer", "ids", "text"]


def test_rows_without_logprobs_are_trained_on_only_if_the_loss_needs_none(arrive):
    table = arrive([[1.0, 0.0, 0.5, 0.25, 0.75]], capture=CAPTURES, truncated=[False] * 4 + [True])
    reasons = {}
    for needs_logprobs, filters in ((True, ()), (False, ()), (True, ("drop_truncated",))):
        planner = Planner(BatchRules(groups_per_batch=1, needs_logprobs=needs_logprobs, filters=filters))
        planner.add(table)
        reasons[needs_logprobs, filters] = {row["row"]: row["reason"] for row in plan(planner)}
    kept = dict.fromkeys(range(3))
    assert reasons == {
        (True, ()): kept | {3: "no_logprobs", 4: "text_capture"},
        (False, ()): dict.fromkeys(range(5)),
        (True, ("drop_truncated",)): kept | {3: "no_logprobs", 4: "drop_truncated"},
    }


def test_a_shortage_says_what_to_do_about_rows_without_logprobs(arrive):
    planner = Planner(BatchRules(groups_per_batch=1))
    planner.add(arrive([[1.0, 0.0, 0.5]], capture=["ids", "text", "ids"]))
    said = planner.shortage(step=1, trainer_version=0).describe()
    assert (
        "filters drop 3 of 3 rollouts, no_logprobs most (2); no_logprobs: their sampling logprobs were not stored"
        in said
    )
    assert "; text_capture: their tokens were made later from recorded texts" in said


def test_rules_are_checked_when_they_are_built():
    with pytest.raises(ConfigError, match="groups_per_batch is 0"):
        BatchRules(groups_per_batch=0)
    with pytest.raises(ConfigError, match="baseline_over is 'rows'"):
        BatchRules(groups_per_batch=1, baseline_over="rows")


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "reinforce"])
def test_the_same_sql_gives_the_same_advantages_on_the_views(root: Root, store, arrive, name: str):
    table = arrive([[0.1, 0.2, 0.7], [0.3, None, 0.9]])
    store(table.select(arrow_schema("rollouts").names))
    planner = Planner(BatchRules(groups_per_batch=2, advantage=name))
    planner.add(table)
    planned = {row["rollout_id"]: row["advantage"] for row in plan(planner)}
    of_views = {row["rollout_id"]: row["advantage"] for row in advantages(connect(root), name).to_pylist()}
    assert of_views == planned


def test_where_drops_rows_that_it_is_not_true_of_and_leaves_groups_without_one_alone(arrive):
    table = arrive([[0.0, 1.0], [0.0, 0.0], [None, 1.0]])
    planner = Planner(BatchRules(groups_per_batch=2, where="episode_reward > 0.5"))
    planner.add(table)
    assert planner.num_pending_groups == 2
    ledger = planner.plan(step=1, attempt_id=1, trainer_version=0)
    found = list(zip(ledger["episode_reward"].to_pylist(), ledger["reason"].to_pylist(), strict=True))
    # The first filter that hits gives the reason, and drop_errors comes first; null is not true
    assert found == [(1.0, None), (1.0, None), (0.0, "where"), (None, "drop_errors")]


@pytest.mark.parametrize(
    "where", ["episode_reward >", "episode_reward > 1; select 2", "no_such_column = 1", "rollout_id"]
)
def test_a_where_that_is_no_predicate_is_named(where):
    with pytest.raises(QueryError, match=re.escape(f"where ({where})")):
        Planner(BatchRules(groups_per_batch=1, where=where))


def test_where_can_have_parameters(arrive):
    planner = Planner(BatchRules(groups_per_batch=1, where="episode_reward > $least", params={"least": 0.5}))
    planner.add(arrive([[0.4, 0.6]]))
    ledger = planner.plan(step=1, attempt_id=1, trainer_version=0)
    assert ledger["used"].to_pylist() == [True, False]


def test_fewer_groups_make_a_batch_where_that_is_said(arrive):
    planner = Planner(BatchRules(groups_per_batch=3))
    planner.add(arrive([[0.0, 1.0]] * 2))
    assert planner.plan(step=1, attempt_id=1, trainer_version=0) is None
    ledger = planner.plan(step=1, attempt_id=1, trainer_version=0, at_least=1)
    assert len(ledger["group_id"].unique()) == 2
    assert planner.plan(step=2, attempt_id=1, trainer_version=0, at_least=1) is None


def test_a_group_whose_request_is_anothers_is_dropped_and_never_waits(arrive):
    planner = Planner(BatchRules(groups_per_batch=1, filters=("drop_truncated",)))
    planner.add(arrive([[1.0, 0.0]], arrival=0))
    duplicate = arrive([[1.0, 0.0]], arrival=1, truncated=[True, False])
    index = duplicate.schema.get_field_index("refusal")
    planner.add(duplicate.set_column(index, "refusal", pa.array(["duplicate_request"] * 2)))
    assert planner.num_pending_groups == 1
    plan = planner.plan(step=1, attempt_id=1, trainer_version=0)
    assert plan["reason"].to_pylist() == [None, None, "duplicate_request", "duplicate_request"]
    assert planner.used_up(plan).num_rows == 4
    assert planner.plan(step=2, attempt_id=1, trainer_version=0) is None
