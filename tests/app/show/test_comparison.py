"""Whole runs in one table: what differs, rewards at equal steps and tokens, evaluations in pairs, groups of seeds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared_runs import Groups, make_compared, train_on
from eval.test_pairing import evaluated
from evaluations import store_evaluation
from scipy import stats

import ludic
from ludic.app.show.comparison import matching_runs, open_runs
from ludic.app.show.evaluations import Comparison
from ludic.base.results import Frame
from ludic.errors import ConfigError, MissingRootError
from ludic.eval.statistics import holm
from ludic.root.json_records import CodeRecord
from ludic.root.root import Root
from ludic.root.rows.evaluations import put_evaluation
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

FEW: Groups = ((0.0, 1.0), (0.0, 0.0), (1.0, 1.0))
MANY: Groups = ((1.0, 1.0), (1.0, 0.0), (1.0, 1.0))


def steps(groups: Groups, last: int) -> dict[int, Groups]:
    return dict.fromkeys(range(1, last + 1), groups)


def make(folder: Path, name: str, groups: Groups = FEW, last: int = 4, **options: Any) -> Root:
    # as `ludic.fit` names its rewards, in the folder where it was called
    reward = {"env_options": {"addition": {"scorer": f"runs/{name}/inputs/reward.py:ludic_score"}}}
    run = reward | options.pop("run", {})
    return make_compared(str(folder / name), steps(groups, last), run=run, **options)


def rewards(found: Comparison, at: str) -> list[dict[str, Any]]:
    assert found.runs is not None
    return [dict(row) for row in found.runs.rewards if row["at"] == at]


def test_runs_are_compared_at_the_last_step_and_with_the_tokens_that_all_have(tmp_path: Path) -> None:
    # six rollouts of 5 + 10 and of 5 + 25 tokens a step
    first = make(tmp_path, "a", FEW, 6, learning_rate=1e-6)
    other = make(tmp_path, "b", MANY, 4, tokens=25, learning_rate=3e-6)
    empty = make(tmp_path, "c", last=0)
    with pytest.raises(ConfigError, match="environment 'nosuch' is unknown; there are addition"):
        ludic.compare([first, other], env="nosuch")
    found = ludic.compare([first, ludic.Run(other), empty.url], window=2)
    assert found.runs is not None
    assert {row["name"]: dict(row["values"]) for row in found.runs.differing} == {
        "learning_rate": {"a": "1e-06", "b": "3e-06", "c": "1e-06"}
    }
    numbers = found.frame("runs").select("run", "step", "num_steps", "tokens").rows()
    assert numbers == [("a", 6, 100, 540), ("b", 4, 100, 720), ("c", 0, 100, 0)]
    a, b, c = rewards(found, "step")
    # groups of 0.5, 0, 1 and of 1, 0.5, 1, twice
    values = np.array([0.5, 0, 1] * 2), np.array([1, 0.5, 1] * 2)
    assert [(each["first_step"], each["last_step"], each["num_values"]) for each in (a, b, c)] == [
        (3, 4, 6),
        (3, 4, 6),
        (None, None, 0),
    ]
    assert (a["estimate"], b["estimate"], c["estimate"]) == (0.5, pytest.approx(5 / 6), None)
    assert (a["difference"], b["difference"], c["difference"]) == (None, pytest.approx(1 / 3), None)
    interval = stats.ttest_ind(values[1], values[0], equal_var=False).confidence_interval()
    assert (b["difference_low"], b["difference_high"]) == pytest.approx((interval.low, interval.high))
    own = stats.t.interval(0.95, 5, values[0].mean(), stats.sem(values[0]))
    assert (a["low"], a["high"]) == pytest.approx(own)
    # 540 tokens: all 6 steps of the first run, 3 of the other one
    assert [(each["first_step"], each["last_step"]) for each in rewards(found, "tokens")[:2]] == [(5, 6), (2, 3)]
    assert found.runs.highest().startswith("no run has clearly the highest reward up to step 4: b, 0.833 (")
    clear = replace(found.runs, rewards=[{**b, "low": 0.98, "estimate": 0.99}, a, c])
    assert clear.highest().startswith("highest reward up to step 4: b, 0.99 (0.98 to")
    shown = repr(found)
    assert "says nothing about other seeds" in shown
    assert "last 2 steps up to step 4; intervals over groups" in shown
    assert "last 2 steps up to 540 trained tokens" in shown
    assert "c: no gradient step yet" in shown
    assert f"evaluation of a not compared: {first.url} has no evaluation" in shown
    assert json.loads(json.dumps(found.to_dict()))["rewards"][1]["run"] == "b"


EVIL = "<script>[red]\x1b[31m"


def test_few_groups_have_no_interval_and_hostile_names_are_text(tmp_path: Path) -> None:
    runs = [make(tmp_path, f"{EVIL}a", FEW, 1), make(tmp_path, f"{EVIL}b", MANY, 1)]
    found = ludic.compare(runs)
    assert [row["low"] for row in rewards(found, "step")] == [None, None]
    shown = repr(found)
    assert "too few groups (3)" in shown
    assert "up to step 1, which all reach with 90 trained tokens" in shown
    assert "the runs have recorded no difference" in shown
    assert ("\x1b" in shown, "<script>[red]\\x1b[31mb" in shown) == (False, True)
    assert "<script>" not in found._repr_html_()


@pytest.mark.slow
def test_many_runs_that_differ_are_listed_by_value(tmp_path: Path) -> None:
    for number in range(7):
        name = f"{EVIL}{number}"
        make(tmp_path, name, last=1, run={"seed": number // 6, "model": f"{'m' * 100}{number // 6}{'n' * 100}"})
    found = ludic.compare([str(tmp_path)])
    listed = ", ".join(f"{EVIL}{number}" for number in range(6))
    (frame,) = [part for part in found.parts() if isinstance(part, Frame) and part.name == "differing"]
    told = {row["name"]: frame.derived["runs by value"](row) for row in frame.rows}
    # Long values are shown from before their first difference on; the rows have all of them.
    by_model = f"…{'m' * 15}0{'n' * 100} ({listed}); …{'m' * 15}1{'n' * 100} ({EVIL}6)"
    assert told == {"seed": f"0 ({listed}); 1 ({EVIL}6)", "model": by_model}


@pytest.mark.slow
def test_code_data_and_machine_that_differ_are_named(tmp_path: Path) -> None:
    def code(rows: str, reward: str, name: str) -> list[CodeRecord]:
        own = {"sha256": reward * 64, "path": "/home/me/[b]reward.py", "imports": {"helper": "f" * 64}}
        return [
            CodeRecord(role="scorer", name=f"{name}/inputs/reward.py:ludic_score", **own),  # type: ignore[arg-type]
            CodeRecord(role="environment", name=f"qa/{name}", sha256=rows * 64),
            CodeRecord(role="advantage", name="grpo", sha256="e" * 64, package="ludic-rl 0.1.0"),
        ]

    roots = [make(tmp_path, name, last=0) for name in ("a", "b", "c")]
    cpu = {"device": "cpu", "torch": "2.13", "num_threads": [1]}
    for root, rows, reward, torch in zip(roots, "112", "337", ("2.12", "2.13", "2.13"), strict=True):
        train_on(root, {1: FEW}, code=code(rows, reward, root.url), numerics=cpu | {"torch": torch})
    found = ludic.compare(roots)
    assert found.runs is not None
    told = [(row["kind"], row["name"], list(row["values"].values())) for row in found.runs.differing]
    same, other = "[b]reward.py 333333333333", "[b]reward.py 777777777777"
    assert told == [
        ("code", "scorer reward.py:ludic_score", [same, same, other]),
        # equal rows are one data set, whatever each root calls them
        ("data", f"qa/{roots[0].url}", ["1" * 12, "1" * 12, None]),
        ("data", f"qa/{roots[2].url}", [None, None, "2" * 12]),
        ("machine", "torch", ["2.12", "2.13", "2.13"]),
    ]
    assert "[b]reward.py" in repr(found)


@pytest.mark.slow
def test_evaluations_are_paired_where_examples_are_equal_and_corrected_over_all_runs(tmp_path: Path) -> None:
    roots = [make(tmp_path, name, last=0) for name in ("a", "b", "c", "d")]
    answers = {"a": [0.0] * 8, "b": [1.0] * 8, "c": [1.0] * 6 + [0.0] * 2}
    for name, root in zip("abc", roots, strict=False):  # each calls the same rows by its own name
        each = evaluated(f"qa/{root.url}/questions.jsonl")
        put_evaluation(root, each)
        of = {f"e{number}": [reward] for number, reward in enumerate(answers[name])}
        store_evaluation(root, of, version=3, evaluation=each.evaluation, env_name=each.env_name)
    found = ludic.compare(roots)
    rows = found.differences
    assert rows["b"].to_list() == [f"{root.url}@3" for root in roots[1:3]]
    assert rows["p_value"].to_list() == [2 / 256, 2 / 64]
    assert rows["p_holm"].to_list() == holm([2 / 256, 2 / 64])
    assert "b@3 " in repr(found)
    assert found.runs is not None
    assert found.runs.notes[-1].startswith(f"evaluation of d not compared: {roots[3].url} has no evaluation")


@pytest.mark.slow
def test_runs_that_differ_by_their_seeds_alone_are_one_row(tmp_path: Path) -> None:
    made = {
        "a0": (0, 1e-6, FEW),
        "a1": (1, 1e-6, FEW),
        "b0": (0, 3e-6, MANY),
        "b1": (1, 3e-6, FEW),
        "b2": (2, 3e-6, MANY),
    }
    for name, (seed, rate, groups) in made.items():
        make(tmp_path, name, groups, run={"seed": seed}, learning_rate=rate)
    found = ludic.compare([f"{tmp_path}/a*", str(tmp_path)], by="learning_rate")
    a, b = rewards(found, "step")
    assert (a["group"], a["num_runs"], b["group"], b["num_runs"]) == (
        "learning_rate=1e-06",
        2,
        "learning_rate=3e-06",
        3,
    )
    # 5/6, 1/2, 5/6 over runs; both runs of the baseline have 1/2, so that they have no spread
    of_runs = np.array([5 / 6, 1 / 2, 5 / 6])
    assert (b["low"], b["high"]) == pytest.approx(stats.t.interval(0.95, 2, of_runs.mean(), stats.sem(of_runs)))
    assert (a["estimate"], a["low"], b["difference"]) == (0.5, None, pytest.approx(2 / 9))
    assert found.frame("runs")["group"].to_list() == ["learning_rate=1e-06"] * 2 + ["learning_rate=3e-06"] * 3


@pytest.mark.slow
def test_runs_that_differ_in_more_than_the_seed_are_not_averaged(tmp_path: Path) -> None:
    make(tmp_path, "a", run={"seed": 0, "temperature": 1.0}, learning_rate=1e-6)
    make(tmp_path, "b", run={"seed": 1, "temperature": 0.5}, learning_rate=1e-6)
    grpo = [CodeRecord(role="advantage", name="mine.sql", path="mine.sql", sha256="a" * 64)]
    train_on(make(tmp_path, "c", last=0, run={"seed": 2, "temperature": 0.5}), {1: FEW}, code=grpo, learning_rate=1e-6)
    found = ludic.compare([str(tmp_path)], by="learning_rate")
    assert [(row["group"], row["num_runs"]) for row in rewards(found, "step")] == [
        ("learning_rate=1e-06, temperature=1.0", 1),
        ("learning_rate=1e-06, temperature=0.5", 1),
        ("learning_rate=1e-06, temperature=0.5, other code (mine.sql)", 1),
    ]
    assert "runs of one learning_rate that differ in more than the seed are groups of their own" in repr(found)
    with pytest.raises(ConfigError, match=r"setting 'learning_rat' is unknown.*learning_rate"):
        ludic.compare([str(tmp_path)], by="learning_rat")


@pytest.mark.slow
def test_the_report_of_the_runs_is_written_beside_the_table(tmp_path: Path) -> None:
    runs = [make(tmp_path, "first<b>", FEW), make(tmp_path, "other", MANY, learning_rate=1e-3)]
    page = tmp_path / "page.html"
    found = ludic.Run(runs[0]).compare(runs[1].url, output=page)
    assert found.to_dict()["page"] == str(page)
    text = page.read_text()
    assert "first&lt;b&gt;" in text
    assert "first<b>" not in text
    with pytest.raises(ConfigError, match=r"page\.html exists; choose another output, or replace it with --overwrite"):
        ludic.compare(["nowhere", "nowhere2"], output=str(page))  # before the runs are read


def test_folders_and_patterns_name_runs_and_each_counts_once(tmp_path: Path) -> None:
    for name in ("lr1", "lr2", "deep/er", "[1]"):
        make(tmp_path, name, last=0)
    here = str(tmp_path)
    assert matching_runs(f"{here}/lr?") == [f"{here}/lr1", f"{here}/lr2"]
    assert matching_runs(f"{here}/d*") == [f"{here}/deep/er"]
    assert matching_runs(f"{here}/[1]") == [f"{here}/[1]"]
    bucket = f"memory://{tmp_path.name}"
    for name in ("lr1", "lr2"):
        put_run(f"{bucket}/{name}", RunConfig(model="m", env=("addition",)))
    assert matching_runs(f"{bucket}/lr[2-9]") == [f"{bucket}/lr2"]
    opened = open_runs([f"{here}/lr2", f"{here}/*"])
    assert [Path(root.path).name for root in opened] == ["lr2", "[1]", "er", "lr1"]
    with pytest.raises(ConfigError, match=r"no run matches .*/x\*"):
        matching_runs(f"{here}/x*")
    (tmp_path / "none").mkdir()
    with pytest.raises(MissingRootError):
        open_runs([f"{here}/none"])


def test_settings_of_runs_and_of_versions_are_not_mixed(tmp_path: Path) -> None:
    root = make(tmp_path, "a")
    run = ludic.Run(root)
    for options in ({"by": "seed"}, {"window": 3}, {"output": "page.html"}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} is for whole runs, and a side names a version"):
            run.compare(0, 1, **options)
    with pytest.raises(ConfigError, match=f"there is nothing to compare {root.url} with"):
        ludic.compare([root])
