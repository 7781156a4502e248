"""An answer cut at max_tokens is called max_tokens, and a version counts the same, wherever a run is looked at."""

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import duckdb
import pytest
from app.show.terminal.conftest import drive, press, shown
from chat_models import scripted_agent
from episodes import Script, run_episode
from rich.console import Console
from strategies import make_batch
from tiny_runs import create_root

import ludic
from ludic.app.show.data import RunData, versions
from ludic.app.show.report.page import read_groups
from ludic.app.show.stats import collect_stats
from ludic.base.results import Result
from ludic.records.rollout import RolloutBatch, RolloutGroup, RolloutMetadata, ended_by
from ludic.records.validation import FINISH_REASONS, TRUNCATION_REASONS
from ludic.root.root import Root
from ludic.root.rows.writer import RolloutWriter
from ludic.root.sql.library import create_macros
from ludic.root.sql.reports import means


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """A question, whose one step is used up by an answer that was cut at max_tokens; in rollouts/ and in evals/."""
    root = create_root(str(tmp_path_factory.mktemp("cut") / "run"), "tiny", group_size=1, max_steps=1)
    for folder, purpose in (("rollouts", "train"), ("evals", "eval")):
        (row,) = run_episode(scripted_agent([("and so on", "length")]), Script([]), max_steps=1)
        stored = (row.truncation_reason, row.finish_reason, row.incomplete_completion, row.parse_error)
        assert stored == ("max_steps", "length", True, True)  # as every ludic has stored it
        group = RolloutGroup(key="script/start", rollouts=(replace(row, purpose=purpose),))
        with RolloutWriter(root, "w0-test", folder=folder) as writer:
            writer.append(RolloutBatch(groups=(group,), metadata=RolloutMetadata(worker_id="w0-test")))
    return root


def printed(result: Result) -> str:
    console = Console(file=io.StringIO(), width=200)
    result.print_to(console)
    return console.file.getvalue()


def of_report(root: Root) -> str:
    with ludic.connect(root) as con:
        (group, *_), *_ = (groups for groups in read_groups(con, root).values() if groups)
    (row,) = group["rollouts"]
    return f"{row['ending']}"


def of_screens(root: Root) -> str:
    screens: list[str] = []

    async def steps(app: Any, pilot: Any) -> None:
        for _ in range(4):  # versions, groups, rollouts, one rollout
            screens.append(shown(app))
            await press(pilot, "enter")

    drive(root, steps)
    return "\n".join(screens)


def of_measure(root: Root) -> str:
    return str(ludic.open(root.url).eval(stored=True, measures=["ends"]).to_dict()["measures"])


SEEN: Mapping[str, Callable[[Root], str]] = {
    "stats": lambda root: printed(collect_stats(root)).partition("environments\n")[2],
    "view, a rollout": lambda root: printed(ludic.open(root.url).view(ids(root)[0], text=True)),
    "view, a group": lambda root: printed(ludic.open(root.url).view(ids(root)[1], text=True)),
    "report": of_report,
    "view": of_screens,
    "measure ends": of_measure,
}


def ids(root: Root) -> tuple[str, str]:
    return ludic.open(root.url).sql("select rollout_id, group_id from rollouts").row(0)


@pytest.mark.parametrize("name", SEEN)
def test_an_answer_cut_at_max_tokens_is_called_so(cut: Root, name: str) -> None:
    text = SEEN[name](cut)
    text = text.replace("max_tokens 256", "")  # the setting
    assert "max_tokens" in text
    for other in ("max_steps", "incomplete", "finish_reason", "parse error", "unparsed  100", "100.0%  100.0%"):
        assert other not in text, text


def test_python_and_sql_name_the_same_end() -> None:
    con = duckdb.connect()
    create_macros(con)
    cases = list(product(TRUNCATION_REASONS, FINISH_REASONS, (True, False)))
    by_sql = [con.execute("select ended_by($1, $2, $3)", list(case)).fetchone() for case in cases]
    assert [ended_by(*case) for case in cases] == [row[0] for row in by_sql if row]
    named = {case: ended_by(*case) for case in cases}
    assert named["max_steps", "length", True] == named[None, "length", False] == "max_tokens"
    # A cut answer that was taken (accept_incomplete) did not end the episode; its step limit did.
    assert named["max_steps", "length", False] == named["max_steps", "stop", True] == "max_steps"
    assert (named["env", "length", True], named[None, None, False]) == ("env", None)


def test_a_version_counts_the_same_in_stats_in_the_viewer_and_in_the_report(tmp_path: Path) -> None:
    # A group of four: weights changed after two rollouts, so their policy_version is 1 and 1, then 2 and 2; its folder
    # is version=1. The next group is of version 2 as a whole.
    root = create_root(str(tmp_path / "run"), "tiny")
    batch = make_batch(rewards=[[0.0, 1.0, 0.0, 1.0], [1.0] * 4], policy_version=1)
    (first, second), of_version = batch.groups, {"policy_version": 2, "policy_version_last": 2}
    changed = (*first.rollouts[:2], *(replace(each, **of_version) for each in first.rollouts[2:]))
    groups = (
        replace(first, rollouts=changed),
        replace(second, rollouts=tuple(replace(each, **of_version) for each in second.rollouts)),
    )
    with RolloutWriter(root, batch.metadata.worker_id) as writer:
        writer.append(replace(batch, groups=groups))
    wanted = [(1, 4, 1, 0.5), (2, 4, 1, 1.0)]
    keys = ("version", "num_rollouts", "num_groups", "reward_mean")
    listing = versions("rollouts")
    viewed = RunData(root).rows(listing, "", listing.order).sort("version")
    assert viewed.select(keys).rows() == wanted
    assert collect_stats(root).facts["versions"] == [
        {**row, **dict(zip(keys, each, strict=True))}
        for row, each in zip(collect_stats(root).facts["versions"], wanted, strict=True)
    ]
    with ludic.connect(root) as con:
        assert con.sql(means("version, env_name", "rollouts")).select(*keys).fetchall() == wanted


def test_the_advice_at_the_end_of_a_warning_is_on_the_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = create_root(str(tmp_path / "run"), "tiny")
    advice = "start a run with --accept-incomplete, or with a higher --max-tokens"
    warnings = [f"{number}: {'90% of 1,024 answers hit max_tokens ' * 5}; {advice} ({number})" for number in range(9)]
    monkeypatch.setattr(RunData, "diagnostics", lambda self: warnings)

    async def steps(app: Any, pilot: Any) -> None:
        seen = " ".join(shown(app).split())
        assert all(f"--max-tokens ({number})" in seen for number in range(9)), shown(app)

    drive(root, steps)
