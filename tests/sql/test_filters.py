"""Each filter, on rows that it drops and rows that it leaves."""

from datetime import UTC, datetime
from typing import Any

import pytest

from ludic.code.kinds import read_packaged
from ludic.schema.validation import TRUNCATION_REASONS
from ludic.sql import load_filter, run_query
from ludic.sql.connect import open_duckdb


@pytest.fixture
def dropped(rows):
    """Indexes of the rows that a filter drops."""

    def run(name: str, rewards: list[list[float | None]], params: dict[str, Any] | None = None, **columns: Any):
        text = load_filter(name)
        con = open_duckdb()
        con.register("stored", rows(rewards, **columns))
        con.execute("create table rollouts as select *, row_number() over () - 1 as index from stored")
        query = f"select index, (\n{text.text}\n) as hit from rollouts order by index"  # noqa: S608
        hits = run_query(con, query, text.bind(params or {})).to_pylist()
        return [row["index"] for row in hits if row["hit"]]

    return run


def test_drop_errors_drops_what_failed_and_what_was_not_scored(dropped):
    rewards = [[1.0, None, 0.0, 0.5]]
    assert dropped("drop_errors", rewards, error=[None, None, "tool failed", None]) == [1, 2]


def test_truncated_episodes_and_incomplete_completions_are_two_things(dropped):
    flags = {
        "truncated": [True, True, False, False],
        "truncation_reason": ["max_steps", "env", None, None],
        "incomplete_completion": [False, True, True, False],
        "finish_reason": ["stop", "length", "length", "stop"],
    }
    assert dropped("drop_truncated", [[0.0] * 4], **flags) == [0, 1]
    assert dropped("drop_incomplete_completions", [[0.0] * 4], **flags) == [1, 2]


def test_drop_truncated_names_every_limit():
    text = read_packaged("filters", "drop_truncated")
    assert [reason for reason in TRUNCATION_REASONS if reason and reason not in text] == []


def test_drop_parse_errors(dropped):
    assert dropped("drop_parse_errors", [[0.0] * 3], parse_error=[False, True, False]) == [1]


def test_drop_zero_variance_groups_drops_groups_whole(dropped):
    # the second group has one reward, the third one scored episode; what was not scored says nothing
    assert dropped("drop_zero_variance_groups", [[1.0, 0.0], [0.5, 0.5], [1.0, None]]) == [2, 3, 4, 5]


def test_drop_not_best_of_group_leaves_the_best_episode_of_each_group(dropped):
    # of two that are best the lower episode_id stays; what failed or was not scored is never the best
    ids = {"episode_id": list("abcdefghi")}
    rewards = [[0.1, 0.9, 0.5], [0.7, None, 0.7], [1.0, 0.2, 0.0]]
    errors = {"error": [None] * 6 + ["tool failed", None, None]}
    assert dropped("drop_not_best_of_group", rewards, **ids, **errors) == [0, 2, 4, 5, 6, 8]


FAMILIES: dict[str, Any] = {"depth": [0, 1, 1, 0, 1, 1], "agent_id": ["main", "solver", "solver"] * 2}
"""Columns of two parents with two children each."""


@pytest.mark.parametrize(
    ("rewards", "is_dropped"),
    [
        # all parents are equal, and all children, though not to each other
        ([1.0, 0.5, 0.5, 1.0, 0.5, None], True),
        ([1.0, 0.5, 0.5, 1.0, 0.5, 0.4], False),
        ([1.0, 0.5, 0.5, 0.0, 0.5, 0.5], False),
        ([None, None, None, None, None, None], False),
    ],
)
def test_drop_zero_variance_groups_compares_parents_with_parents_and_children_with_children(
    dropped, rewards, is_dropped
):
    assert dropped("drop_zero_variance_groups", [rewards], **FAMILIES) == (list(range(6)) if is_dropped else [])


def test_drop_not_best_of_group_takes_the_reward_of_the_agent_and_not_of_its_children(dropped):
    ids = {"episode_id": list("aaabbb")}
    assert dropped("drop_not_best_of_group", [[0.1, 9.0, 9.0, 0.2, 0.0, 0.0]], **FAMILIES, **ids) == [0, 1, 2]


def test_max_off_policy_steps_leaves_the_limit_itself(dropped):
    limits = {"max_off_policy_steps": 2, "trainer_version": 5}
    assert dropped("max_off_policy_steps", [[0.0]], limits, policy_version=2) == [0]
    assert dropped("max_off_policy_steps", [[0.0]], limits, policy_version=3) == []


def test_max_age_counts_seconds_to_now(dropped):
    times = [datetime(2026, 1, 1, 12, 0, second, tzinfo=UTC) for second in (0, 10, 11)]
    now = datetime(2026, 1, 1, 12, 1, 10, tzinfo=UTC)
    # ages 70, 60 and 59 s
    assert dropped("max_age", [[0.0] * 3], {"max_age_s": 60, "now": now}, created_at=times) == [0]
