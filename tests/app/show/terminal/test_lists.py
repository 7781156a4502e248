"""Lists of the viewer: versions, groups, rollouts and evals; filtered, sorted and paged by keys."""

import asyncio
from dataclasses import replace

import polars as pl
import pytest
from app.show.terminal.conftest import drive, line, press, settle, shown, write
from strategies import make_group
from textual.widgets import Input

from benchmarks.stores import make_store
from ludic.app.show.terminal.app import ViewApp
from ludic.app.show.terminal.list_screen import PAGE, ListScreen, PagedTable
from ludic.app.show.terminal.rollout_screen import RolloutScreen
from ludic.records.rollout import Message, RolloutBatch, RolloutMetadata
from ludic.root.root import Root
from ludic.root.rows.writer import RolloutWriter


def table(app: ViewApp) -> PagedTable:
    return app.screen.query_one(PagedTable)


def rows(app: ViewApp) -> pl.DataFrame:
    return pl.DataFrame([table(app).row(index) for index in range(table(app).num_rows)])


def test_the_first_screen_has_the_run_and_its_versions_with_counts_and_rewards(made: Root):
    async def steps(app, pilot):
        assert made.url in shown(app)
        assert made.run_id in shown(app)
        assert "versions: 1 to 2 of 2; by version desc" in shown(app)
        # version 1: (1 + 1 + 0 + 0.5 + 0.125 + 1 + 0) / 7, without the one that was not scored
        assert rows(app).select("version", "num_rollouts", "num_groups", "reward_mean").rows() == [
            (1, 8, 2, pytest.approx(3.625 / 7)),
            (0, 8, 2, pytest.approx(2.5 / 8)),
        ]

    drive(made, steps)


def test_a_list_has_the_titles_of_the_commands_and_its_line_names_the_columns(made: Root):
    async def steps(app, pilot):
        titles = [str(column.label) for column in table(app).columns.values()]
        # one of version 1 failed; nothing was truncated, incomplete or unparsed in any
        assert titles == ["version", "env", "rollouts", "groups", "reward", "tokens", "failed"]
        await press(pilot, "slash")
        assert "reward_mean" in str(app.screen.query_one(Input).border_subtitle)
        await write(pilot, "truncated_fraction > 1")
        await press(pilot, "enter")
        assert "no rows" in line(app, "title")

    drive(made, steps)


@pytest.mark.slow
def test_enter_goes_from_versions_to_groups_to_rollouts_to_one_and_escape_back(made: Root):
    async def steps(app, pilot):
        await press(pilot, "down", "enter")
        assert rows(app)["reward_mean"].to_list() == [pytest.approx(1.75 / 4), pytest.approx(0.75 / 4)]
        await press(pilot, "enter")
        assert sorted(rows(app)["episode_reward"].to_list()) == [0.0, 0.25, 0.5, 1.0]
        chosen = rows(app)["rollout_id"][0]
        await press(pilot, "enter")
        assert isinstance(app.screen, RolloutScreen)
        assert chosen in shown(app)
        for title in ("rollouts of group", "groups of version 0", "versions"):
            await press(pilot, "escape")
            assert title in line(app, "title")
        await press(pilot, "escape")  # the first list stays
        assert isinstance(app.screen, ListScreen)

    drive(made, steps)


def titles(app: ViewApp) -> list[str]:
    return [str(column.label) for column in table(app).columns.values()]


def cells(app: ViewApp, title: str) -> list[str]:
    """A column of the page."""
    column = titles(app).index(title)
    return [table(app).get_row_at(row)[column].plain for row in range(table(app).row_count)]


@pytest.mark.slow
def test_lists_show_how_question_and_answer_begin(made: Root):
    async def steps(app, pilot):
        await press(pilot, "down", "enter")
        assert cells(app, "prompt") == ["Say something about cats."] * 2
        await press(pilot, "enter")
        assert "prompt" not in titles(app)  # of a group it is one
        assert all(answer.startswith("[bold red]x[/] ") for answer in cells(app, "answer"))
        await press(pilot, "escape", "escape", "A")
        assert cells(app, "prompt") == ["Say something about cats."] * 16
        await press(pilot, "slash")
        await write(pilot, "episode_reward = 0.75")
        await press(pilot, "enter")
        assert cells(app, "prompt") == ["Say something about cats."]
        await press(pilot, "escape", "e", "enter")
        assert len(cells(app, "answer")) == 2

    drive(made, steps)


@pytest.mark.slow
def test_columns_that_are_the_same_in_all_rows_are_left_out(made: Root):
    async def steps(app, pilot):
        await press(pilot, "A")
        # version and error differ; num_turns, finish_reason, agent, environment and others are the same in all
        assert titles(app) == ["rollout", "reward", "prompt", "answer", "tokens", "error", "example", "version"]
        await press(pilot, "slash")
        await write(pilot, "num_turns = 2 and version = 0")  # a predicate may name them
        await press(pilot, "enter")
        assert titles(app) == ["rollout", "reward", "prompt", "answer", "tokens", "example"]

    drive(made, steps)


@pytest.mark.slow
def test_wanted_answers_stand_beside_the_answers(run_copy: Root):
    asked = (Message(role="system", content="Be brief."), Message(role="user", content="1 + 1?\nQuick."))
    group = make_group(rewards=[1.0, 0.0], seed=7, policy_version=5)
    rows = tuple(
        replace(row, messages=(*asked, Message(role="assistant", content=said)), wanted="2", correct=said == "2")
        for row, said in zip(group.rollouts, ("2", "3"), strict=True)
    )
    with RolloutWriter(run_copy, "w7-sums") as writer:
        writer.append(
            RolloutBatch(groups=(replace(group, rollouts=rows),), metadata=RolloutMetadata(worker_id="w7-sums"))
        )

    async def steps(app, pilot):
        assert cells(app, "accuracy") == ["50.0%", "-", "-"]
        await press(pilot, "enter")
        assert (cells(app, "prompt"), cells(app, "wanted")) == (["1 + 1?\\nQuick."], ["2"])
        await press(pilot, "enter")
        assert list(zip(cells(app, "answer"), cells(app, "correct"), strict=True)) == [("2", "true"), ("3", "false")]
        await press(pilot, "enter")
        before, _ = shown(app).split("conversation", 1)
        assert [line.split() for line in before.splitlines() if line.split()[:1] in (["wanted"], ["correct"])] == [
            ["wanted", "2"],
            ["correct", "true"],
        ]

    drive(run_copy, steps)


@pytest.mark.slow
def test_a_key_shows_evals_instead_of_rollouts(made: Root):
    async def steps(app, pilot):
        await press(pilot, "e")
        assert rows(app)["num_rollouts"].to_list() == [2]
        await press(pilot, "enter")
        assert sorted(rows(app)["episode_reward"].to_list()) == [0.5, 1.0]
        await press(pilot, "escape", "e")
        assert rows(app)["num_rollouts"].to_list() == [8, 8]

    drive(made, steps)


@pytest.mark.slow
def test_a_typed_predicate_chooses_rows_and_a_wrong_one_loses_nothing(made: Root):
    async def steps(app, pilot):
        await press(pilot, "down", "a", "slash")
        await write(pilot, "episode_reward > 0.4 -- good")
        await press(pilot, "enter")
        assert sorted(rows(app)["episode_reward"].to_list()) == [0.5, 0.75, 1.0]
        assert "where episode_reward > 0.4" in line(app, "title")
        await press(pilot, "slash")
        app.screen.query_one(Input).value = "episode_reward > 0.4 nonsense("
        await press(pilot, "enter")
        assert "Error" in line(app, "problem")
        assert "\n" not in line(app, "problem")
        assert len(rows(app)) == 3
        assert app.screen.query_one(Input).value == "episode_reward > 0.4 nonsense("

    drive(made, steps)


PREDICATES = (
    "true); copy (select 1) to 'stolen.csv'; select (1",
    "exists (from read_text('/etc/passwd'))",
    "true); attach 'other.db'; select (1",
    "true); drop view rollouts; select (1",
)


@pytest.mark.slow
def test_a_predicate_can_neither_write_nor_reach_outside(made: Root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def steps(app, pilot):
        await press(pilot, "a")
        for predicate in PREDICATES:
            await press(pilot, "slash")
            app.screen.query_one(Input).value = predicate
            await press(pilot, "enter")
            assert line(app, "problem"), predicate
            assert len(rows(app)) == 8, predicate
            assert list(tmp_path.iterdir()) == [], predicate
            await press(pilot, "escape")
            assert not line(app, "problem"), predicate

    drive(made, steps)


@pytest.mark.slow
def test_rows_are_sorted_by_any_column_or_expression_with_missing_values_last(made: Root):
    async def steps(app, pilot):
        await press(pilot, "a", "s")
        app.screen.query_one(Input).value = "episode_reward desc"
        await press(pilot, "enter")
        assert rows(app)["episode_reward"].to_list() == [1.0, 1.0, 1.0, 0.5, 0.125, 0.0, 0.0, None]
        await press(pilot, "S")
        assert rows(app)["episode_reward"].to_list() == [0.0, 0.0, 0.125, 0.5, 1.0, 1.0, 1.0, None]
        await press(pilot, "s")
        app.screen.query_one(Input).value = "abs(episode_reward - 0.5)"
        await press(pilot, "enter")
        assert rows(app)["episode_reward"].to_list()[:2] == [0.5, 0.125]
        await press(pilot, "s")
        app.screen.query_one(Input).value = "no_such_column"
        await press(pilot, "enter")
        assert "no_such_column" in line(app, "problem")
        assert rows(app)["episode_reward"].to_list()[:2] == [0.5, 0.125]

    drive(made, steps)


@pytest.mark.slow
def test_training_columns_say_which_step_considered_a_rollout(made: Root):
    async def steps(app, pilot):
        await press(pilot, "down", "a", "t")
        assert rows(app)["step"].to_list() == [1] * 8
        assert rows(app)["dropped_by"].null_count() == 8
        assert abs(sum(rows(app)["advantage"].to_list())) < 1e-9  # rloo: zero in each group

    drive(made, steps)


@pytest.mark.slow
def test_reload_shows_rollouts_of_a_running_run(run_copy: Root):
    from strategies import make_batch

    async def steps(app, pilot):
        with RolloutWriter(run_copy, "w2-late") as writer:
            writer.append(make_batch(worker_id="w2-late", rewards=[[1.0] * 4], seed=7, policy_version=2))
        await press(pilot, "r")
        assert rows(app)["version"].to_list() == [2, 1, 0]

    drive(run_copy, steps)


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Root:
    """A run with 256 rollouts."""
    folder = tmp_path_factory.mktemp("many")
    return make_store(str(folder / "run"), 4, num_versions=1, mean_length=4, base_groups=16)


@pytest.mark.slow
def test_arrows_and_page_keys_go_through_all_pages(many: Root):
    async def steps(app, pilot):
        await press(pilot, "a")
        widget = table(app)
        assert widget.num_rows == 256
        assert widget.row_count == PAGE
        widget.go_to(PAGE - 1)
        await press(pilot, "down")
        assert widget.position == PAGE
        assert "101 to 200 of 256" in line(app, "title")
        await press(pilot, "up")
        assert widget.position == PAGE - 1
        await press(pilot, "end")
        assert widget.position == 255
        await press(pilot, "down")
        assert widget.position == 255
        await press(pilot, "pageup", "pageup")
        assert widget.position < 255 - 50
        await press(pilot, "home")
        assert widget.position == 0

    drive(many, steps)


@pytest.mark.slow
def test_more_rows_than_are_held_are_counted(many: Root, monkeypatch):
    monkeypatch.setattr("ludic.app.show.data.MOST_ROWS", 100)
    monkeypatch.setattr(ViewApp, "most_rows", 100)

    async def steps(app, pilot):
        await press(pilot, "a")
        assert "1 to 100 of 100, the first of 256" in line(app, "title")

    drive(many, steps)


@pytest.mark.slow
def test_help_lists_the_keys_of_the_screen(made: Root):
    async def steps(app, pilot):
        await press(pilot, "question_mark")
        assert "show the rows of a SQL predicate" in shown(app)
        assert "colour tokens" not in shown(app)
        await press(pilot, "escape", "a", "enter", "question_mark")
        assert "colour tokens" in shown(app)
        await press(pilot, "escape", "q")

    drive(made, steps)


@pytest.mark.slow
def test_a_run_without_rollouts_opens(tmp_path, model_folder):
    from tiny_runs import create_root

    root = create_root(str(tmp_path / "run"), model_folder)

    async def steps(app, pilot):
        assert "no rows" in line(app, "title")
        await press(pilot, "enter", "a", "l", "v", "down", "e")

    drive(root, steps)


@pytest.mark.slow
def test_a_run_in_memory_opens(model_folder):
    from strategies import make_batch
    from tiny_runs import create_root

    root = create_root("memory://viewed-in-memory", model_folder)
    with RolloutWriter(root, "w0-test") as writer:
        writer.append(make_batch(worker_id="w0-test"))

    async def steps(app, pilot):
        assert rows(app)["num_rollouts"].to_list() == [8]
        await press(pilot, "a", "enter")
        assert "Say something about cats." in shown(app)

    drive(root, steps)


@pytest.mark.slow
def test_a_slow_predicate_ends_when_its_screen_is_left(made: Root):
    endless = "(select count(*) from range(1000000000) a, range(1000000) b where a.range + b.range = 7) > 0"

    async def run() -> None:
        app = ViewApp(made)
        async with app.run_test() as pilot:
            await settle(pilot)
            await press(pilot, "a", "slash")
            app.screen.query_one(Input).value = endless
            await pilot.press("enter")
            await pilot.pause(0.3)
            await pilot.press("escape")  # closes the line
            await pilot.press("escape")
            await settle(pilot)
            assert "versions" in line(app, "title")

    asyncio.run(run())
