"""The SQL files of ludic/root/sql/figures/ and plan/: one statement each, which says what it gives; and the shared
means."""

import ast
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from string import Template

import duckdb
import pytest

import ludic
from ludic.base.by_name import packaged_names, read_packaged
from ludic.root.sql.connection import open_duckdb
from ludic.root.sql.reports import figure, means

PACKAGE = Path(ludic.__file__).parent
NAMES = [(folder, name) for folder in ("figures", "plan") for name in packaged_names(folder)]


@pytest.mark.parametrize(("folder", "name"), NAMES)
def test_a_file_is_one_select_whose_first_line_says_what_it_gives(folder: str, name: str) -> None:
    text = read_packaged(folder, name)
    first, *others = text.splitlines()
    assert first.startswith(f"-- {name}: ")
    assert others[0].startswith("-- grain: ")
    assert any("reads: " in line for line in others if line.startswith("--"))
    (statement,) = duckdb.extract_statements(text.replace("$predicates", "true").replace("from $rows", "from rollouts"))
    assert statement.type == duckdb.StatementType.SELECT


def test_every_figure_is_shown_somewhere() -> None:
    texts = {
        str(node.value)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    formed = {"messages_of_rollouts", "messages_of_evals"}  # figure(f"messages_of_{folder}")
    assert set(packaged_names("figures")) - formed <= texts


def test_means_are_those_of_the_rows_that_the_keys_tell_apart(con_of_rollouts: duckdb.DuckDBPyConnection) -> None:
    rows = con_of_rollouts.sql(means("env_name, policy_version", "rollouts")).fetchall()
    # (1 + 0) / 2 and 3 / 1, the unscored one aside; one of two is correct, then one of one of which it is known;
    # lengths (2 + 4) / 2 and (6 + 8) / 2; of version 0 a limit ended one of two, of version 1 one of two failed;
    # then by cause: truncated, cut at max_tokens, with a parse error; unparsed and other limits without the cut; failed
    assert rows == [
        ("a", 0, 2, 1, 0.5, 0.5, 3.0, 0.5, 0.0, 0.0, 0.0, 0.5, 0.0),
        ("a", 1, 2, 2, 3.0, 1.0, 7.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5),
    ]


@pytest.fixture
def con_of_steps() -> Iterator[duckdb.DuckDBPyConnection]:
    """Batches of two steps in two environments; of the rollouts, r7 is not in this root."""
    with open_duckdb() as con:
        con.execute(
            "create table batches as select *, 0 as policy_version from (values "
            "(1, 'a', 'g', 1.0, 2, true, 'r0'), (1, 'a', 'g', 0.0, 4, false, 'r1'), "  # a group with a signal
            "(1, 'a', 'h', 0.5, 6, false, 'r2'), (1, 'a', 'h', 0.5, 8, false, 'r3'), "  # one without
            "(1, 'b', 'i', 2.0, 10, null, 'r4'), (1, 'b', 'i', null, 20, null, 'r5'), "  # one scored says nothing of it
            "(2, 'a', 'j', null, 1, false, 'r6'), (2, 'b', 'k', 1.0, 3, false, 'r7')) "
            "as t(step, env_name, group_id, episode_reward, response_length, truncated, rollout_id)"
        )
        con.execute(
            "create table rollouts as select *, 0 as policy_version from (values "
            "('r0', null, map {'hit': 1.0, 'short': 0.5}), ('r1', null, map {'hit': 0.0}), "
            "('r2', null, map {'hit': 0.5}), ('r3', 'gone', null), "
            "('r4', null, map {'hit': 4.0}), ('r5', 'gone', null), ('r6', 'gone', null)) "
            "as t(rollout_id, error, reward_components)"
        )
        yield con


def test_a_step_is_told_apart_by_environment(con_of_steps: duckdb.DuckDBPyConnection) -> None:
    by_env = Template(figure("steps_by_column")).safe_substitute(value="batches.env_name", stored_value="null")
    rows = con_of_steps.execute(by_env, {"after_step": 0}).fetchall()
    assert rows == [
        (1, "a", 0.5, 5.0, 0.5, 0.25, 0.25),
        (1, "b", 2.0, 15.0, None, None, 0.5),
        (2, "a", None, 1.0, None, 0.0, 1.0),
        (2, "b", 1.0, 3.0, None, 0.0, None),
    ]
    later = con_of_steps.execute(by_env, {"after_step": 1}).fetchall()
    assert later == rows[2:]


def test_a_step_is_told_apart_by_a_column_of_its_rollouts(con_of_steps: duckdb.DuckDBPyConnection) -> None:
    hit = "reward_components['hit']"
    by_hit = Template(figure("steps_by_column")).safe_substitute(value="stored.value", stored_value=hit)
    rows = con_of_steps.execute(by_hit, {"after_step": 1}).fetchall()
    # r6 has no components, and r7, which is not in this root, no known value: both are under NULL
    assert rows == [(2, None, 1.0, 2.0, None, 0.0, 1.0)]


@pytest.fixture
def con_of_turns() -> Iterator[duckdb.DuckDBPyConnection]:
    """Two steps: of two rollouts with two and three completions, and of one with one; calls by name, ! fails."""

    def completion(start: int, end: int, *calls: str) -> str:
        texts = [
            f"{{'name': '{call.rstrip('!')}', 'error': {chr(39) + 'e' + chr(39) if call[-1] == '!' else 'null'}}}"
            for call in calls
        ]
        return f"{{'start': {start}, 'end': {end}, 'tool_calls': [{', '.join(texts)}]}}"

    def rollout(name: str, completions: list[str], rewards: list[str]) -> str:
        steps = ", ".join(f"{{'reward': {reward}}}" for reward in rewards)
        return f"('{name}', 0, [{', '.join(completions)}], [{steps}])"

    with open_duckdb() as con:
        con.execute(
            "create table batches as from (values (1, 'r0', 0), (1, 'r1', 0), (2, 'r2', 0)) "
            "as t(step, rollout_id, policy_version)"
        )
        rows = [
            rollout("r0", [completion(0, 4, "look", "add!"), completion(6, 8)], ["0.5", "null"]),
            rollout("r1", [completion(0, 2, "look"), completion(3, 7, "rare"), completion(9, 19)], ["1.0"]),
            rollout("r2", [completion(0, 3)], ["2.0"]),
        ]
        con.execute(
            f"create table rollouts as from (values {', '.join(rows)}) "
            "as t(rollout_id, policy_version, agent_steps, environment_steps)"
        )
        yield con


def test_rewards_and_lengths_are_told_apart_by_turn(con_of_turns: duckdb.DuckDBPyConnection) -> None:
    rows = con_of_turns.execute(figure("turns_by_step"), {"last": 2}).fetchall()
    # Turn 1: rewards 0.5 and 1, of 4 and 2 tokens. Turn 2 and later: no reward, 2, 4 and 10 tokens.
    assert rows == [(1, 1, 0.75, 3.0, 2, 2), (1, 2, None, pytest.approx(16 / 3), 0, 3), (2, 1, 2.0, 3.0, 1, 1)]


def test_calls_and_errors_are_told_apart_by_tool(con_of_turns: duckdb.DuckDBPyConnection) -> None:
    rows = con_of_turns.execute(figure("tools_by_step"), {"most": 2}).fetchall()
    # Of two rollouts; the most frequent names are look, and add before rare in the alphabet. Step 2 has no call.
    of_first = [(1, "add", 0.5, 1.0, 1), (1, "look", 1.0, 0.0, 2), (1, None, 0.5, 0.0, 1)]
    assert rows == [*of_first, *((2, tool, 0.0, None, 0) for tool in ("add", "look", None))]


def test_components_are_told_apart_by_environment_and_step(con_of_steps: duckdb.DuckDBPyConnection) -> None:
    rows = con_of_steps.execute(figure("components_by_environment"), {"after_step": 0}).fetchall()
    # hit in a: (1 + 0 + 0.5) / 3; the rollout without components does not count
    assert rows == [(1, "a", "hit", 0.5), (1, "a", "short", 0.5), (1, "b", "hit", 4.0)]


def test_samples_of_a_step_are_the_best_and_the_worst_of_the_groups_that_differ_most() -> None:
    with open_duckdb() as con:
        con.execute(
            "create table batches as from (values "
            "(1, 'a', 'g', 1.0, 'r0'), (1, 'a', 'g', 0.25, 'r1'), (1, 'a', 'g', null, 'r2'), "  # they differ by 0.75
            "(1, 'a', 'h', 3.0, 'r3'), (1, 'a', 'h', 3.0, 'r4'), (1, 'a', 'h', 1.0, 'r5'), (1, 'a', 'h', 1.0, 'r6'), "
            "(1, 'a', 'i', 9.0, 'r7'), (1, 'a', 'i', 9.0, 'r8'), "  # the third of the environment
            "(1, 'b', 'j', 2.0, 'r9'), (1, 'b', 'j', 2.0, 'ra'), "  # equal: one is enough
            "(1, 'c', 'k', null, 'rb'), (1, 'c', 'k', 'nan'::double, 'rc')) "
            "as t(step, env_name, group_id, episode_reward, rollout_id)"
        )
        rows = con.execute(figure("samples_of_steps"), {"most": 2}).fetchall()
    assert [row[-1] for row in rows] == ["r3", "r6", "r0", "r1", "r9"]


def test_evaluations_are_told_apart_by_version_environment_and_settings() -> None:
    with open_duckdb() as con:
        con.execute(
            "create table eval_episodes as select *, day as env_example_id, 4 as response_length, false as truncated, "
            "make_date(2026, 1, day) as created_at from (values "
            "(0, 'a', 'e1', 1.0, true, null, 1), (0, 'a', 'e1', 0.0, false, null, 2), "
            "(0, 'a', 'e1', null, null, 'gone', 3), "
            "(0, 'a', 'e2', 5.0, null, null, 4), (0, 'b', null, 3.0, null, null, 5), "
            "(1, 'a', 'e1', 9.0, true, null, 6)) "
            "as t(version, env_name, evaluation, reward, correct, error, day)"
        )
        con.execute(
            "create table evaluations as from (values ('e2', 'a', '2026-02'), ('e1', 'a', '2026-01')) "
            "as t(evaluation, env_name, created_at)"
        )
        rows = con.execute(figure("evaluation_means"), {"versions": [0]}).fetchall()
    # (1 + 0) / 2, of three samples of which one failed; one of two is correct; e1 was begun before e2
    assert rows == [
        (0, "a", "e1", True, date(2026, 1, 3), 3, 0.5, 0.5, 4.0, 0.0, 1 / 3),
        (0, "a", "e2", False, date(2026, 1, 4), 1, 5.0, None, 4.0, 0.0, 0.0),
        (0, "b", None, True, date(2026, 1, 5), 1, 3.0, None, 4.0, 0.0, 0.0),
    ]


@pytest.fixture
def con_of_rollouts() -> Iterator[duckdb.DuckDBPyConnection]:
    con = open_duckdb()
    con.execute(
        "create table rollouts as from (values ('a', 0, 'g', 1.0, 2, true, null), ('a', 0, 'g', 0.0, 4, false, null), "
        "('a', 1, 'h', 3.0, 6, false, null), ('a', 1, 'i', null, 8, false, 'gone')) "
        "as t(env_name, policy_version, group_id, episode_reward, response_length, truncated, error)"
    )
    con.execute("alter table rollouts add column incomplete_completion boolean default false")
    con.execute("alter table rollouts add column parse_error boolean default false")
    con.execute("alter table rollouts add column correct boolean")
    con.execute("update rollouts set correct = episode_reward > 0 where episode_reward is not null")
    yield con
    con.close()


def test_a_figure_that_is_not_there_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        figure("no_such_figure")
