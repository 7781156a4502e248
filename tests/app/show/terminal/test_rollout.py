"""One rollout, two side by side, and labels."""

import pytest
from app.show.terminal.conftest import drive, line, press, shown, write
from textual.widgets import Input

import ludic
from ludic.app.show.terminal.rollout_screen import RolloutPane, SideBySide
from ludic.root.root import Root


def one(root: Root, sql: str) -> dict:
    return ludic.Run(root).sql(sql).to_dicts()[0]


@pytest.mark.slow
def test_a_rollout_has_its_conversation_steps_end_and_step_and_hostile_text_as_it_is(made: Root):
    row = one(made, "select rollout_id from batches where used and advantage > 0 order by advantage desc")

    async def steps(app, pilot):
        text = shown(app)
        for part in ("Say something about cats.", "Go on.", "terminated", "used at step 1 of attempt 1, advantage +"):
            assert part in text
        hostile = (
            "[bold red]x[/] [@click=app.quit]quit[/] [link=https://example.com]l[/] \\x1b[2Jcleared\\x07 \\u202etxt"
        )
        assert hostile in " ".join(text.split())

    drive(made, steps, rollout_id=row["rollout_id"])


@pytest.mark.slow
def test_a_key_colours_tokens_by_logprob_advantage_ratio_of_trainer_and_sampler_and_mask(made: Root):
    row = one(
        made,
        """select rollout_id, exp(trainer_logprobs[3] - response_logprobs[3]) as ratio
        from token_stats join rollouts using (rollout_id)
        where rollout_id in (select rollout_id from batches where used and advantage > 0)""",
    )

    async def steps(app, pilot):
        found = app.screen.query_one(RolloutPane).found
        assert found.rows[0]["ratios"][2] == pytest.approx(row["ratio"], rel=1e-5)
        legends = ("probability", "advantage +", "trainer / sampler", "sampled  not sampled")
        for legend in legends:
            assert legend in shown(app)
            await press(pilot, "c")
        assert not any(legend in shown(app) for legend in ("probability", "trainer / sampler", "  not sampled"))
        await press(pilot, "k")
        assert "probability" in shown(app)  # a column of the list of tokens

    drive(made, steps, rollout_id=row["rollout_id"])


@pytest.mark.slow
def test_n_and_p_go_through_the_list_that_a_rollout_was_opened_from(made: Root):
    async def steps(app, pilot):
        await press(pilot, "a", "enter")
        first = app.screen.query_one(RolloutPane).rollout_id
        await press(pilot, "n")
        second = app.screen.query_one(RolloutPane).rollout_id
        assert second != first
        assert second in shown(app)
        await press(pilot, "p", "p")
        assert app.screen.query_one(RolloutPane).rollout_id == first

    drive(made, steps)


@pytest.mark.slow
def test_answers_of_rollouts_and_evals_to_one_example_are_shown_side_by_side(made: Root):
    row = one(made, "select rollout_id from rollouts where env_example_id = 'example-0' order by rollout_id")
    # make_batch names its examples by their seed, so put an evaluation of the same example
    answers = one(made, "select count(*) as n from rollouts where env_example_id = 'example-0'")["n"]

    async def steps(app, pilot):
        await press(pilot, "v")
        assert f"of {answers - 1}" in line(app, "title")
        await press(pilot, "enter")
        assert isinstance(app.screen, SideBySide)
        first, second = app.screen.query(RolloutPane)
        assert (first.rollout_id, first.has_focus) == (row["rollout_id"], True)
        assert first.found.record.env_example_id == second.found.record.env_example_id
        assert first.found.record.rollout_id != second.found.record.rollout_id
        await press(pilot, "tab", "c")
        assert second.has_focus
        assert first.options.color == second.options.color == "advantage"
        await press(pilot, "escape", "escape")
        assert app.screen.query_one(RolloutPane).rollout_id == row["rollout_id"]

    drive(made, steps, rollout_id=row["rollout_id"])


@pytest.mark.slow
def test_group_and_agents_of_a_rollout_open_as_lists(made: Root):
    row = one(made, "select rollout_id from rollouts")

    async def steps(app, pilot):
        await press(pilot, "g")
        assert "1 to 4 of 4" in line(app, "title")
        await press(pilot, "escape", "a")
        assert "1 to 1 of 1" in line(app, "title")

    drive(made, steps, rollout_id=row["rollout_id"])


@pytest.mark.slow
def test_a_label_is_stored_shown_and_can_be_queried(run_copy: Root):
    async def steps(app, pilot):
        await press(pilot, "a", "l")
        await write(pilot, "0.5")
        await press(pilot, "tab")
        await write(pilot, "[red]meh")
        await press(pilot, "enter")
        assert "0.5" in [str(row["marks"]) for row in map(app.screen.table.row, range(8)) if row]
        await press(pilot, "enter")
        assert "labels" in shown(app)
        assert "0.5  by me" in shown(app)
        assert "[red]meh" in shown(app)
        await press(pilot, "l")
        await write(pilot, "bad")
        await press(pilot, "enter")
        assert "bad  by me" in shown(app)

    drive(run_copy, steps, author="me")
    run = ludic.Run(run_copy)
    # of one author and name the newest counts
    assert run.sql("select name, value, text, note, author from labels").rows() == [("label", None, "bad", None, "me")]
    assert run.sql("select value, note from all_labels order by created_at").rows() == [(0.5, "[red]meh"), (None, None)]


@pytest.mark.slow
def test_a_label_that_can_not_be_stored_says_why_and_keeps_the_text(run_copy: Root):
    async def steps(app, pilot):
        await press(pilot, "a", "l")
        await write(pilot, "1")
        app.screen.query_one("#name", Input).value = " "
        await press(pilot, "enter")
        assert "has no name" in line(app, "refused")
        assert app.screen.query_one("#mark", Input).value == "1"
        await press(pilot, "escape")

    drive(run_copy, steps, author="me")
    assert run_copy.list("labels") == []
