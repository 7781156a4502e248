"""Which groups a selection takes first, and how often: the same for the same groups, seed and step."""

from collections import Counter
from math import exp

import pyarrow as pa
import pytest
from root.sql.conftest import connection

from ludic.errors import ConfigError, QueryError
from ludic.root.sql.library import load_selection, run_query
from ludic.root.sql.planner import BatchRules, Planner

pytestmark = pytest.mark.slow


def planner_of(tables: list[pa.Table], **rules) -> Planner:
    planner = Planner(BatchRules(**({"groups_per_batch": 1} | rules)))
    for table in tables:
        planner.add(table)
    return planner


def chosen(planner: Planner, step: int = 1, trainer_version: int = 0) -> list[str] | None:
    """group_ids of the next batch, in the order of training."""
    ledger = planner.plan(step=step, attempt_id=1, trainer_version=trainer_version)
    return None if ledger is None else list(dict.fromkeys(ledger.filter(ledger["used"])["group_id"].to_pylist()))


def num_uses(planner: Planner, steps: range) -> list[int]:
    """How often each group was used."""
    return list(Counter(group for step in steps for group in chosen(planner, step) or []).values())


@pytest.mark.parametrize("selection", ["fifo", "uniform", "recency", "balanced", "curriculum"])
def test_a_selection_is_a_function_of_groups_seed_and_step(arrive, selection):
    tables = [arrive([[1.0, 0.0]] * 4, arrival=arrival, policy_version=arrival) for arrival in range(3)]

    def batch(order: list[pa.Table], seed: int, step: int) -> list[str] | None:
        return chosen(planner_of(order, selection=selection, groups_per_batch=5, seed=seed), step, 3)

    batches = [batch(tables, seed, step) for seed, step in ((1, 1), (2, 1), (1, 2))]
    assert batch(tables[::-1], 1, 2) == batches[2]
    assert len(set(map(tuple, batches))) == (3 if selection in ("uniform", "recency") else 1)


def test_recency_draws_versions_by_their_weight():
    con, text = connection(), load_selection("recency")
    con.register("groups", pa.table({"group_id": ["old", "new"], "policy_version": [0, 1]}))
    values = {"alpha": 1.0, "seed": 0, "trainer_version": 1}
    drawn = [
        run_query(con, text.text, text.bind(values | {"step": step}))["group_id"][0].as_py() for step in range(200)
    ]
    # Weights 1 and exp(-1): 0.73 of the draws, with a standard deviation of 0.031
    assert drawn.count("new") / 200 == pytest.approx(1 / (1 + exp(-1)), abs=0.07)


def test_balanced_shares_a_batch_out_by_weight_and_fills_up_with_what_is_there(arrive):
    tables = [arrive([[1.0, 0.0]] * 6, arrival=index, env_name=name) for index, name in enumerate(("code", "math"))]
    math = set(tables[1]["group_id"].to_pylist())
    planner = planner_of(tables, selection="balanced", groups_per_batch=4, params={"env_weights": "math=3, code=1"})
    shares = [len(math & set(chosen(planner, step))) for step in (1, 2, 3)]
    assert shares == [3, 3, 0]


def test_curriculum_takes_what_is_neither_too_hard_nor_too_easy_and_a_shortage_says_so(arrive):
    # success rates 1/4, 1, 0
    table = arrive([[1.0, 0, 0, 0], [1.0] * 4, [0.0] * 4])
    planner = planner_of([table], selection="curriculum", groups_per_batch=2)
    assert chosen(planner) is None
    shortage = planner.shortage(1, trainer_version=0)
    assert shortage.describe() == "1 of 2 groups are ready; selection curriculum leaves out 2 more"
    wide = planner_of([table], selection="curriculum", groups_per_batch=2, params={"max_success": 1.0})
    assert chosen(wide) == list(dict.fromkeys(table["group_id"].to_pylist()))[:2]


def test_a_users_selection_may_ask_for_all_that_is_known_of_groups(tmp_path, arrive):
    file = tmp_path / "best.sql"
    file.write_text("select group_id from groups where num_episodes = 2 order by reward_mean desc, reward_std")
    table = arrive([[0.0, 1.0], [1.0, 2.0], [0.5, 0.5]])
    first, second, third = dict.fromkeys(table["group_id"].to_pylist())
    assert chosen(planner_of([table], selection=str(file), groups_per_batch=3)) == [second, third, first]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("select group_id, 1 as n from groups", "returns group_id string, n int32"),
        ("select group_id from groups union all select group_id from groups", "more than once"),
        ("select 'nobody' as group_id", "not in groups"),
        ("select group_id from grops", "grops"),
    ],
)
def test_a_selection_that_can_not_work_is_an_error_that_names_its_file(tmp_path, arrive, text, reason):
    file = tmp_path / "mine.sql"
    file.write_text(text)
    with pytest.raises(QueryError, match=rf"mine\.sql: .*{reason}"):
        chosen(planner_of([arrive([[1.0, 0.0]])], selection=str(file)))


@pytest.mark.parametrize("selection", ["fifo", "uniform", "recency", "balanced"])
def test_a_group_is_used_max_uses_times_and_then_no_more(arrive, selection):
    planner = planner_of([arrive([[1.0, 0.0]] * 2)], selection=selection, max_uses=3)
    assert num_uses(planner, range(1, 7)) == [3, 3]
    assert chosen(planner, 7) is None
    assert planner.num_pending_groups == 0


def test_a_group_can_not_be_used_less_than_once():
    with pytest.raises(ConfigError, match="max_uses is 0"):
        BatchRules(groups_per_batch=1, max_uses=0)


def test_the_ledger_counts_uses_and_only_used_up_groups_leave_for_good(arrive):
    planner = planner_of([arrive([[1.0, 0.0]])], max_uses=2)
    plans = [planner.plan(step=step, attempt_id=1, trainer_version=0) for step in (1, 2)]
    assert [plan["num_uses"].to_pylist() for plan in plans] == [[1, 1], [2, 2]]
    assert [planner.used_up(plan).num_rows for plan in plans] == [0, 2]
    assert planner.num_pending_groups == 0


def test_uses_before_a_restart_count_and_a_lower_limit_drops_by_name(arrive):
    table = arrive([[1.0, 0.0], [0.0, 1.0]])
    first, second = dict.fromkeys(table["group_id"].to_pylist())
    planner = Planner(BatchRules(groups_per_batch=1, max_uses=2))
    planner.recall_uses({first: 2, second: 1})
    planner.add(table)
    ledger = planner.plan(step=5, attempt_id=2, trainer_version=0)
    assert ledger["group_id"].to_pylist() == [second, second, first, first]
    assert ledger["num_uses"].to_pylist() == [2] * 4
    assert ledger["reason"].to_pylist() == [None, None, "max_uses", "max_uses"]
    assert planner.used_up(ledger).num_rows == 4


def test_a_parameter_that_no_sql_takes_is_an_error_that_lists_what_there_is():
    rules = BatchRules(groups_per_batch=1, advantage="turn_returns", params={"discont": 0.9})
    with pytest.raises(ConfigError, match=r"'discont' is unknown; did you mean 'discount'\? .*takes \$discount"):
        Planner(rules)


@pytest.mark.parametrize(
    ("prompt_length", "max_seq_len", "reasons"),
    [(8, 18, ["max_seq_len", "max_steps"]), (8, 24, [None, "max_steps"]), (8, None, [None, "max_steps"])],
)
def test_the_ledger_says_what_the_trainer_cuts_and_keeps_the_episodes_own_reason(
    arrive, prompt_length, max_seq_len, reasons
):
    table = arrive([[1.0, 0.0]], truncation_reason=[None, "max_steps"], truncated=[False, True])
    assert set(table["prompt_length"].to_pylist()) == {prompt_length}  # and responses of 16
    ledger = planner_of([table], max_seq_len=max_seq_len).plan(step=1, attempt_id=1, trainer_version=0)
    assert ledger["seq_len_truncated"].to_pylist() == [max_seq_len == 18] * 2
    assert ledger["truncation_reason"].to_pylist() == reasons
    assert ledger["truncated"].to_pylist() == [reason is not None for reason in reasons]


def test_epochs_uses_every_group_once_before_any_is_used_again(arrive):
    tables = [arrive([[1.0, 0.0]] * 4, arrival=0)]
    planner = planner_of(tables, selection="epochs", max_uses=2)
    passes = [[chosen(planner, step)[0] for step in range(first, first + 4)] for first in (1, 5)]
    groups = sorted(set(tables[0]["group_id"].to_pylist()))
    assert [sorted(order) for order in passes] == [groups] * 2
    assert len(set(map(tuple, passes))) > 1
    assert chosen(planner, 9) is None
    again = planner_of(tables, selection="epochs", max_uses=2, seed=1)
    assert [chosen(again, step)[0] for step in range(1, 5)] != passes[0]


def test_a_selection_may_use_the_older_name_of_the_queue_position(arrive, tmp_path):
    tables = [arrive([[1.0, 0.0]], arrival=arrival) for arrival in range(2)]
    batches = []
    for column in ("queue_position", "place"):
        file = tmp_path / f"by_{column}.sql"
        file.write_text(f"select group_id from groups order by {column} desc")  # noqa: S608
        batches.append(chosen(planner_of(tables, selection=str(file), groups_per_batch=2)))
    assert batches[0] == batches[1] == [table["group_id"][0].as_py() for table in reversed(tables)]
