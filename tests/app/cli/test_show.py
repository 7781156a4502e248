"""`ludic view --text`: a rollout or a group by its id, or by a part of it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from chat_models import hermes_call, scripted_agent
from episodes import Script, end, run_episode
from strategies import make_batch, make_group

from ludic import Run
from ludic.agents.delegation import SubAgent
from ludic.app.show.lookup import look_up
from ludic.records.rollout import Message, RolloutBatch, RolloutGroup, RolloutMetadata, ToolCall
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

Ids = Callable[[int, int], str]


@pytest.fixture
def rollout_id(first_batch: RolloutBatch) -> Ids:
    """rollout_id(group, index): of a rollout of version 0."""
    return lambda group, index: first_batch.groups[group].rollouts[index].rollout_id


@pytest.fixture
def group_id(first_batch: RolloutBatch) -> str:
    return first_batch.groups[0].rollouts[0].group_id


def test_a_rollout_is_shown_with_what_training_made_of_it(ludic, trained: Root, rollout_id: Ids) -> None:
    result = ludic("view", trained.url, rollout_id(0, 0))
    assert (result.code, result.err) == (0, "")
    lines = [" ".join(line.split()) for line in result.out.splitlines()]
    assert f"rollout {rollout_id(0, 0)}" in lines
    assert "user Say something about cats." in lines
    assert "reward 1 (num_cats 1)" in lines
    assert "end terminated, finish_reason stop" in lines
    # 1 - (0 + .5 + .5) / 3; version 0 trained on at version 0
    assert "used at step 1 of attempt 1, advantage +0.666667, weight 1, off-policy steps 0" in lines
    assert "w0-test-0.parquet, row group 0, row 0" in " ".join(lines)


def with_answers(root: Root) -> RolloutGroup:
    """A stored group of four answers to one question: right, wrong, unknown and failed."""
    asked = (Message(role="system", content="Be brief."), Message(role="user", content="1 + 1?"))
    said = [(*asked, Message(role="assistant", content=text)) for text in ("2", "3", "two", "")]
    group = make_group(rewards=[1.0, 0.0, 0.5, None])
    values = zip(group.rollouts, said, (True, False, None, None), strict=True)
    rows = tuple(replace(row, messages=messages, wanted="2", correct=correct) for row, messages, correct in values)
    answered = RolloutGroup(key="sum", rollouts=rows)
    with RolloutWriter(root, "w7-answers") as writer:
        writer.append(RolloutBatch(groups=(answered,), metadata=RolloutMetadata(worker_id="w7-answers")))
    return answered


def test_reward_wanted_and_correct_come_before_the_text(ludic, started: Root) -> None:
    right, wrong, unknown, _ = with_answers(started).rollouts
    out = ludic("view", started.url, right.rollout_id).out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    before = lines[: next(number for number, line in enumerate(lines) if line.startswith("conversation"))]
    assert [line for line in before if line.split()[0] in ("reward", "wanted", "correct")] == [
        "reward 1 (num_cats 1)",
        "wanted 2",
        "correct true",
    ]
    assert not any(line.startswith(("sampling", "file", "written")) for line in before)
    Run(started).label(right.rollout_id, "odd", note="not \x1b[31mred", author="ann")
    assert "labels" not in out
    *_, title, label = ludic("view", started.url, right.rollout_id).out.splitlines()
    assert title.startswith("labels ")
    assert label.startswith("label odd  by ann, ")
    assert label.rstrip().endswith(" not \\x1b[31mred")
    (stored,) = json.loads(ludic("view", started.url, right.rollout_id, "--json").out)["labels"]
    assert (stored["text"], stored["author"]) == ("odd", "ann")
    assert "correct false" in " ".join(ludic("view", started.url, wrong.rollout_id).out.split())
    assert "correct" not in ludic("view", started.url, unknown.rollout_id).out


def test_a_group_shows_its_question_the_wanted_answer_and_who_gave_it(ludic, started: Root) -> None:
    group = with_answers(started)
    out = ludic("view", started.url, group.rollouts[0].group_id).out
    lines = [line.split() for line in out.splitlines()]
    assert ["wanted", "2"] in lines
    assert ["user", "1", "+", "1?"] in lines
    assert [line[3] for line in lines if len(line) > 4 and line[0] in ("0", "1", "2", "3")] == [
        *("true", "false", "-", "-"),
    ]


def test_a_group_without_wanted_answers_has_no_column_for_them(ludic, trained: Root, group_id: str) -> None:
    out = ludic("view", trained.url, group_id).out
    assert "wanted" not in out
    assert "correct" not in out


def test_a_dropped_rollout_says_which_filter_dropped_it(ludic, trained: Root, rollout_id: Ids) -> None:
    out = ludic("view", trained.url, rollout_id(1, 2)).out
    assert "dropped by drop_zero_variance_groups at step 1 of attempt 1" in out


def test_the_viewer_takes_no_flag_of_the_text_and_the_text_none_of_the_viewer(
    ludic, trained: Root, rollout_id: Ids
) -> None:
    said = ludic("view", trained.url, rollout_id(0, 0), "--tokens", "--web")
    assert (said.code, said.err) == (2, "ludic: web is for the viewer, and text is asked for; leave out one of them\n")
    said = ludic("view", trained.url, "--full")
    assert (said.code, said.err) == (2, "ludic: text needs ID; name a rollout or a group\n")


@pytest.mark.slow
def test_the_response_is_text_by_the_newest_tokenizer(ludic, trained: Root, rollout_id: Ids) -> None:
    shown = ludic("view", trained.url, rollout_id(0, 0), "--tokens", "--color", "none").out
    tokens = look_up(trained, rollout_id(0, 0)).rows[0]["response_tokens"]
    lines = [line.split() for line in shown.splitlines()]
    table = [line for line in lines if line[:1] and line[0].isdigit()]
    assert [int(line[1]) for line in table if line[-1] == "yes"] == tokens
    assert all("'" in "".join(line) for line in table)


@pytest.mark.slow
def test_the_response_is_text_by_the_first_model_s_tokenizer_and_ids_without_any(
    ludic, breakable: Path, rollout_id: Ids
) -> None:
    as_text = ludic("view", breakable, rollout_id(0, 0)).out
    for path in breakable.glob("policies/*/tokenizer.json"):
        path.unlink()
    assert ludic("view", breakable, rollout_id(0, 0)).out == as_text
    shutil.rmtree(breakable / "model")
    out = ludic("view", breakable, rollout_id(0, 0)).out
    tokens = look_up(Root.open(str(breakable)), rollout_id(0, 0)).rows[0]["response_tokens"]
    assert " ".join(map(str, tokens)) in " ".join(out.split())


@pytest.mark.slow
def test_the_beginning_or_the_end_of_an_id_will_do(ludic, trained: Root, rollout_id: Ids) -> None:
    whole = ludic("view", trained.url, rollout_id(0, 1)).out
    assert ludic("view", trained.url, rollout_id(0, 1)[:8]).out == whole
    assert ludic("view", trained.url, rollout_id(0, 1)[-8:]).out == whole


def test_a_part_of_several_ids_lists_some(ludic, trained: Root) -> None:
    # Every id of the run is a uuid4 here, so 4 begins or ends many of 20.
    result = ludic("view", trained.url, "4")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("ludic: '4' matches ")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("unknown", ["no-such-id", ""])
def test_an_unknown_id_is_explained_in_one_line(ludic, trained: Root, unknown: str) -> None:
    result = ludic("view", trained.url, unknown)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"ludic: {trained.url} has no rollout or group {unknown!r}; ")
    assert result.err.count("\n") == 1


def test_a_group_is_a_table_of_its_rollouts(ludic, trained: Root, group_id: str, rollout_id: Ids) -> None:
    result = ludic("view", trained.url, group_id)
    assert (result.code, result.err) == (0, "")
    lines = [line.split() for line in result.out.splitlines()]
    # rewards 1, 0, .5, .5; advantages 1 - 1/3, 0 - 2/3, 0, 0
    assert [line[2:4] for line in lines if line[:1] and line[0] in "0123" and len(line) > 5] == [
        ["1", "+0.6667"],
        ["0", "-0.6667"],
        ["0.5", "+0"],
        ["0.5", "+0"],
    ]
    assert rollout_id(0, 0)[-12:] in result.out
    assert "best, 1 " in result.out
    assert "worst, 0 " in result.out


@pytest.mark.slow
def test_json_holds_rows_and_uses(ludic, trained: Root, rollout_id: Ids, group_id: str) -> None:
    shown = json.loads(ludic("view", trained.url, rollout_id(0, 0), "--json").out)
    assert (shown["kind"], len(shown["rows"])) == ("rollout", 1)
    assert shown["rows"][0]["messages"][0]["content"] == "Say something about cats."
    assert [use["step"] for use in shown["uses"]] == [1]
    assert len(json.loads(ludic("view", trained.url, group_id, "--json").out)["rows"]) == 4


def test_a_broken_file_hides_no_other(ludic, breakable: Path, rollout_id: Ids) -> None:
    torn = list_files(Root.open(str(breakable)))[1].name
    (breakable / torn).write_bytes(b"torn")
    assert ludic("view", breakable, rollout_id(0, 0)).code == 0


def test_a_damaged_page_hides_no_rollout_of_another_version(ludic, breakable: Path, rollout_id: Ids) -> None:
    path = breakable / list_files(Root.open(str(breakable)))[1].name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    assert ludic("view", breakable, rollout_id(0, 0)).code == 0


def write_group(root: Root, group: RolloutGroup) -> None:
    with RolloutWriter(root, "w0") as writer:
        writer.append(RolloutBatch(groups=(group,), metadata=RolloutMetadata(worker_id="w0")))


def test_tools_turns_and_errors_are_shown(ludic, started: Root) -> None:
    call = ToolCall(id="c1", name="add", arguments='{"a": 1}', result=None, error="no such [red]tool[/]")
    group = make_group(rewards=[None], num_turns=2, response_length=9)
    first, second = group.rollouts[0].agent_steps
    rollout = replace(
        group.rollouts[0],
        agent_steps=(replace(first, tool_calls=(call,), action_target="internal"), second),
        messages=(Message(role="assistant", content="\x1b[2Jhello", tool_calls=(call,), reasoning="I \x1b[2Jadd."),),
    )
    write_group(started, replace(group, rollouts=(rollout,)))
    out = ludic("view", started.url, rollout.rollout_id, "--tokens").out
    assert 'add({"a": 1}) -> error: no such [red]tool[/]' in out
    assert out.index("I \\x1b[2Jadd.") < out.index("\\x1b[2Jhello")
    assert "not scored" in out
    assert "the environment failed" in out
    assert "no gradient step has considered it yet" in out
    # Nine tokens, of which the one between two turns was not sampled.
    assert [line.split()[-1] for line in out.splitlines() if line.split()[-1:] in (["yes"], ["no"])].count("no") == 1


def test_an_episode_of_several_agents_is_shown_as_a_tree(ludic, started: Root) -> None:
    calls = [hermes_call("delegate", task=task) for task in ("add", "mul")]
    helper = SubAgent(name="helper", description="Helps.")
    agent = scripted_agent(["\n".join(calls), "3", "8", "[red]both[/]"], sub_agents=(helper,))
    rows = run_episode(agent, Script([end(0.5)]), max_tokens=128)
    write_group(started, RolloutGroup(key="script", rollouts=tuple(rows)))
    lines = [" ".join(line.split()) for line in ludic("view", started.url, rows[2].rollout_id).out.splitlines()]
    tree = "\n".join(lines[lines.index(f"episode {rows[0].episode_id}") :])
    first, second = (f"│ └── helper …{rows[1].rollout_id[-12:]}, reward 0.5", f"└── helper …{rows[2].rollout_id[-12:]}")
    assert f"└── agent …{rows[0].rollout_id[-12:]}, reward 0.5, {rows[0].action_length} of " in tree
    assert tree.index('delegate({"task": "add"}) -> 3') < tree.index(first)
    assert tree.index(first) < tree.index('delegate({"task": "mul"}) -> 8') < tree.index(second)
    assert f"delegated by {rows[0].rollout_id}, depth 1" in lines
    out = ludic("view", started.url, rows[0].group_id).out
    assert [line.split()[1] for line in out.splitlines() if line[:1] == "0"] == ["agent", "helper", "helper"]


def test_what_compaction_moved_is_shown_from_where_it_is(ludic, started: Root) -> None:
    groups = [make_group(rewards=[1.0, 0.0], seed=seed) for seed in range(2)]
    for number, group in enumerate(groups):
        with RolloutWriter(started, f"w{number}") as writer:
            writer.append(RolloutBatch(groups=(group,), metadata=RolloutMetadata(worker_id=f"w{number}")))
    compact(started)
    out = ludic("view", started.url, groups[1].rollouts[1].rollout_id).out
    assert "rollouts/version=0/env=moar_cats/compacted.0-0.parquet, row group 0, row " in " ".join(out.split())


def test_a_runs_own_columns_are_shown(ludic, tmp_path: Path) -> None:
    columns = {"x_judge": "string", "x_spans": "list<int64>", "x_none": "double"}
    root = put_run(str(tmp_path / "own"), RunConfig(model="m", env=("moar_cats",), extra_columns=columns))
    group = make_group(rewards=[1.0])
    rollout = replace(group.rollouts[0], extra={"x_judge": "fine", "x_spans": [1, 2]})
    write_group(root, replace(group, rollouts=(rollout,)))
    lines = [" ".join(line.split()) for line in ludic("view", root.url, rollout.rollout_id).out.splitlines()]
    assert {"x_judge fine", "x_spans [1, 2]"} <= set(lines)
    assert not any(line.startswith("x_none") for line in lines)


@pytest.mark.slow
def test_the_middle_of_a_long_rollout_is_left_out_unless_asked_for(ludic, started: Root) -> None:
    group = make_group(rewards=[1.0], response_length=3_000)
    text = "a" * 3_000 + "MIDDLE" + "z" * 3_000
    rollout = replace(group.rollouts[0], messages=(Message(role="assistant", content=text),))
    write_group(started, replace(group, rollouts=(rollout,)))
    short = "".join(ludic("view", started.url, rollout.rollout_id).out.split("\n"))
    # Of 6,006 characters 4,000 are shown, of 3,000 tokens 2,000.
    assert "… 2,006 characters left out; --full shows them …" in short
    assert "… 1,000 tokens left out; --full shows them …" in short
    assert "MIDDLE" not in short
    assert short.count("a" * 2_000) == short.count("z" * 2_000) == 1
    full = "".join(ludic("view", started.url, rollout.rollout_id, "--full").out.split("\n"))
    assert "MIDDLE" in full
    assert "left out" not in full


def test_a_failed_rollout_shows_the_traceback_of_the_users_code(ludic, started: Root) -> None:
    batch = make_batch(worker_id="w0-bad", num_groups=1, group_size=2)
    error = f"KeyError: {'x' * 200} (own.py:3, in score)"
    trace = 'Traceback (most recent call last):\n  File "/home/me/own.py", line 3, in score\nKeyError'
    rows = tuple(
        replace(row, error=error, traceback=trace, episode_reward=None, reward_components={}, terminated=False)
        for row in batch.groups[0].rollouts
    )
    with RolloutWriter(started, "w0-bad") as writer:
        writer.append(replace(batch, groups=(replace(batch.groups[0], rollouts=rows),)))
    out = ludic("view", started.url, rows[0].rollout_id).out
    lines = [line.strip() for line in out.splitlines()]
    at = lines.index("Traceback (most recent call last):")
    assert lines[at : at + 3] == [line.strip() for line in trace.splitlines()]
    assert "(own.py:3, in score)" in " ".join(out.split())
