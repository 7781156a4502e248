"""Advantages that a Python function computes: what it is given, and what is said when it fails."""

import re
from pathlib import Path

import pytest

from ludic.errors import ConfigError, QueryError
from ludic.records.tables import SCALAR_COLUMNS
from ludic.root.sql.connection import connect, open_duckdb
from ludic.root.sql.library import advantages, load_advantage
from ludic.root.sql.planner import BatchRules, Planner

GUIDE = Path(__file__).parents[3] / "docs" / "algorithms.md"

USERS_FILE = """
import pyarrow as pa
import pyarrow.compute as pc


def doubled(rollouts, *, factor=2.0):
    rewards = pc.multiply(rollouts["episode_reward"], factor)
    return rollouts.select(["rollout_id"]).append_column("advantage", rewards)


def by_token(rollouts):
    # which columns there are follows from what this file says: response_tokens
    lists = [[float(i) for i in range(len(tokens))] for tokens in rollouts["response_tokens"].to_pylist()]
    return pa.table({"rollout_id": rollouts["rollout_id"], "token_advantages": lists})


def columns(rollouts):
    raise KeyError(" ".join(rollouts.column_names))


def order(rollouts):
    ids = rollouts["rollout_id"].to_pylist()
    assert ids == sorted(ids)
    return rollouts.select(["rollout_id"]).append_column("advantage", rollouts["episode_reward"])


def helped(rollouts):
    return one_of(rollouts)[0]


def one_of(rollouts):
    rewards = {"none": None}
    return rewards[
        "some"
    ]


def nothing(rollouts):
    return None


def other(rollouts):
    return rollouts.select(["rollout_id", "episode_reward"])


def needy(rollouts, *, scale):
    return doubled(rollouts, factor=scale)


def two(rollouts, groups):
    return rollouts


def any_number(*tables, **options):
    return tables


not_a_function = 3
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USERS_FILE)
    return path


@pytest.fixture
def con(rows):
    con = open_duckdb()
    con.register("rollouts", rows([[1.0, 0.0, 0.5]], truncated=[True, False, False]))
    return con


def planner_of(advantage: str, rows, **rules) -> Planner:
    planner = Planner(BatchRules(groups_per_batch=1, advantage=advantage, **rules))
    planner.add(rows)
    return planner


def test_a_function_runs_like_sql(con, file):
    assert load_advantage(f"{file}:doubled").name == "doubled"
    assert sorted(advantages(con, f"{file}:doubled")["advantage"].to_pylist()) == [0.0, 1.0, 2.0]
    assert sorted(advantages(con, f"{file}:doubled", factor=3, other=1)["advantage"].to_pylist()) == [0.0, 1.5, 3.0]


def test_filters_drop_rows_of_a_function_as_of_sql(con, file):
    found = advantages(con, f"{file}:doubled", filters=["drop_truncated"])
    assert sorted(found["advantage"].to_pylist()) == [0.0, 1.0]


def test_a_function_plans_a_batch_with_the_parameters_of_the_run(file, arrive):
    planner = planner_of(f"{file}:doubled", arrive([[1.0, 0.0]]), params={"factor": 4.0})
    ledger = planner.plan(step=1, attempt_id=1, trainer_version=0).to_pylist()
    assert [row["advantage"] for row in ledger] == [4.0, 0.0]
    with pytest.raises(ConfigError, match=r"'facto' is unknown; did you mean 'factor'\?"):
        planner_of(f"{file}:doubled", arrive([[1.0]]), params={"facto": 4.0})


def test_a_function_may_give_each_token_its_own(file, arrive):
    planner = planner_of(f"{file}:by_token", arrive([[1.0, 0.0]]))
    (first, _) = planner.plan(step=1, attempt_id=1, trainer_version=0).to_pylist()
    assert first["token_advantages"] == [float(i) for i in range(16)]


@pytest.mark.slow
def test_a_function_gets_all_scalars_and_the_lists_that_its_file_names_by_rollout_id(root, store, rows, file, arrive):
    wanted = {*SCALAR_COLUMNS, "response_tokens"}
    store(rows([[1.0, 0.0]]))
    with pytest.raises(QueryError) as caught:
        advantages(connect(root), f"{file}:columns")
    assert set(str(caught.value).split("KeyError: ")[1].strip("'").split()) == wanted
    assert set(planner_of(f"{file}:columns", arrive([[1.0]])).columns) == wanted
    assert advantages(connect(root), f"{file}:order").num_rows == 2


def test_an_error_of_the_function_is_one_line_with_its_line_number(con, file):
    line = USERS_FILE.split("\n").index("    return rewards[") + 1
    with pytest.raises(QueryError) as caught:
        advantages(con, f"{file}:helped")
    assert str(caught.value) == f"{file}:helped: {file}, line {line}, failed: KeyError: 'some'"


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        ("mine.py:doubld", "has no function 'doubld'; it has doubled, by_token, columns, "),
        ("mine.py:not_a_function", "has no function 'not_a_function'"),
        ("yours.py:doubled", r"there is no file .*yours\.py"),
        ("broken.py:doubled", r"broken\.py, line 2, failed: ZeroDivisionError"),
        ("mine.py:two", r"takes \(rollouts, groups\), wanted \(rollouts, \*, parameter=default, \.\.\.\)"),
        ("mine.py:any_number", r"takes \(\*tables, \*\*options\), wanted"),
    ],
)
def test_a_function_that_can_not_be_loaded_is_refused_before_training(file, tail, reason):
    (file.parent / "broken.py").write_text("x = 0\n1 / x\n")
    with pytest.raises(QueryError, match=reason):
        Planner(BatchRules(groups_per_batch=1, advantage=f"{file.parent}/{tail}"))


def test_a_parameter_without_default_must_be_given(file):
    with pytest.raises(QueryError, match=r"mine\.py:needy: no value for \$scale"):
        Planner(BatchRules(groups_per_batch=1, advantage=f"{file}:needy"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nothing", "returns NoneType; wanted a function of an Arrow table of rollouts"),
        ("other", "returns rollout_id string, episode_reward double; wanted a function"),
    ],
)
def test_a_function_that_returns_something_else_is_told_what_is_wanted(con, file, name, reason):
    with pytest.raises(QueryError, match=rf"mine\.py:{name}: {reason}"):
        advantages(con, f"{file}:{name}")


def test_rows_that_a_function_leaves_out_are_not_trained_on(tmp_path, arrive):
    file = tmp_path / "first.py"
    file.write_text(
        "def first(rollouts):\n"
        "    table = rollouts.slice(0, 1)\n"
        "    return table.select(['rollout_id']).append_column('advantage', table['episode_reward'])\n"
    )
    planner = planner_of(f"{file}:first", arrive([[1.0, 0.0]]))
    with pytest.raises(QueryError, match=r"first\.py:first: 1 of 2 rollouts to train on get no finite advantage"):
        planner.plan(step=1, attempt_id=1, trainer_version=0)


def test_the_function_of_the_guide_ranks_a_group(con, tmp_path, rows):
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    path = tmp_path / "mine.py"
    path.write_text(example)
    con.register("rollouts", rows([[1.0, 0.0, 0.5, None], [7.0, 7.0]]))
    found = advantages(con, f"{path}:centred_rank", spread=2.0)
    by_id = dict(zip(*found.to_pydict().values(), strict=True))
    ids = con.table("rollouts").select("rollout_id").fetchall()
    # ranks 3, 1 and 2 of three, and 1.5 twice of two
    assert [by_id[rollout_id] for (rollout_id,) in ids] == [2.0, -2.0, 0.0, None, 0.0, 0.0]
