"""The runs of a folder: which are found, what one row says of each, in what they differ, and how they are shown."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from app.cli.conftest import ludic as run_ludic

import ludic as package
from ludic.app.show import run_table
from ludic.app.show.run_table import tabulate
from ludic.app.show.runs import (
    RunSummary,
    differing,
    find_runs,
    group_runs,
    labels_of,
    lines_of,
    setting_text,
    summarise,
)
from ludic.app.show.terminal.run_list import RunListApp
from ludic.base import open_console
from ludic.base.defaults import RECORDED_ENV
from ludic.errors import ConfigError
from ludic.root.attempts import record_attempt
from ludic.root.catalogue import LEASES
from ludic.root.claims import claim, claim_slot, held
from ludic.root.code import to_dicts
from ludic.root.json_records import CheckpointId, CodeRecord, encode_record
from ludic.root.root import Root
from ludic.root.rows.tables import MetricsLog
from ludic.root.storage.filesystem import Storage
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run
from ludic.training.config import TrainConfig

ludic = run_ludic
START = datetime(2026, 11, 1, tzinfo=UTC)
HOSTILE = "[bold red]x[/]\x1b[2Jcleared\u202e"


def make_run(
    url: str,
    steps: range = range(1, 5),
    *,
    after: int = 0,
    parent: CheckpointId | None = None,
    seed: int = 0,
    released: bool = True,
    error: str | None = None,
    file_rows: int = 100,
    **config: Any,
) -> Root:
    """A run whose trainer took some of 4 steps, a minute each, with 100 tokens and a reward of step / 10."""
    root = put_run(url, RunConfig(model="tiny", env=("moar_cats",), seed=seed))
    lease = claim(root, after)
    began = START + timedelta(hours=after)
    attempt = record_attempt(root, lease, parent, {**TrainConfig.of(num_steps=4).flat(), **config})
    name = f"attempts/{attempt.attempt_id}.json"
    root.put(name, encode_record(replace(attempt, created_at=began.isoformat())))
    with closing(MetricsLog(root, "train", f"t{lease.attempt_id}")) as log:
        for number, step in enumerate(steps, 1):
            figures = {"reward_mean": step / 10, "num_tokens": 100, "created_at": began + timedelta(minutes=number)}
            log.write(attempt_id=lease.attempt_id, step=step, policy_version=step - 1, **figures)
            if number % file_rows == 0:
                log.flush()
    root.put(LEASES.name_of(lease), encode_record(replace(lease, released=released, error=error)))
    return root


def by_label(folder: str) -> Mapping[str, RunSummary]:
    return {each.label: each for each in tabulate(folder).runs}


def shown(table: run_table.RunTable, width: int) -> str:
    console = open_console(width=width, color_system=None, highlight=False, markup=False, record=True, quiet=False)
    with console.capture() as printed:
        table.print_to(console)
    return printed.get()


def put_silent(root: Root) -> None:
    """Make the lease one of a trainer on another machine, which is not renewed."""
    lease = LEASES.read(root, 1)
    root.put(LEASES.name_of(lease), encode_record(replace(lease, released=False, process=None, lease_s=1e-9)))


def test_runs_are_found_three_levels_down_and_not_in_runs_or_hidden_folders(root_url: str) -> None:
    storage = Storage.connect(root_url)
    for name in ("b/d/e", "b/d/f/too-deep", "b/d/e/inner", ".hidden"):
        storage.put_if_absent(f"{name}/run.json", b"{}")
    put_silent(make_run(f"{root_url}/a", range(1, 2)))
    found = {each.label: each for each in summarise(find_runs(root_url))}
    assert {name: each.state for name, each in found.items()} == {"a": "failed", "b/d/e": "unreadable"}
    assert (found["a"].step, found["a"].reward, found["a"].tokens) == (1, 0.1, 100)
    assert "has not renewed its lease" in found["a"].problem


def test_a_run_whose_newest_groups_have_equal_rewards_has_a_warning(tmp_path: Path) -> None:
    groups = RunConfig(model="tiny", env=("moar_cats",)).groups_per_batch
    for name, files in {"dead": [0, groups - 1, 1], "recovered": [groups, 0, 0], "few": [0, groups - 1, 0]}.items():
        root = make_run(f"{tmp_path}/{name}")
        with closing(MetricsLog(root, "worker", "w0-test")) as log:
            for num_equal in files:
                size = max(1, num_equal)
                counts = {"num_rollouts": size, "num_groups": size, "num_zero_variance_groups": num_equal}
                log.write(env_name="moar_cats", policy_version=3, **counts)
                log.flush()
    table = tabulate(str(tmp_path))
    warnings = {each.label: each.warning for each in table.runs}
    assert warnings == {"dead": "equal rewards in moar_cats", "recovered": "", "few": ""}
    assert re.search(r"dead +finished +4 of 4 +0.4 +equal rewards", shown(table, 120))


def test_a_link_leads_to_a_run_once_and_in_no_circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_run(f"{tmp_path}/elsewhere/one", RunConfig(model="tiny", env=("moar_cats",)))
    folder = tmp_path / "runs"
    folder.mkdir()
    for name, target in {"best": "elsewhere/one", "newest": "elsewhere/one", "up": "runs", "self": "runs/self"}.items():
        (folder / name).symlink_to(tmp_path / target)
    assert find_runs(folder) == find_runs(f"{folder}/best") == [f"{folder}/best"]
    monkeypatch.chdir(folder)
    assert find_runs(".") == ["best"]
    with pytest.raises(ConfigError, match=r"nowhere: there is no such folder; wanted a run, or a folder with runs"):
        find_runs("nowhere")


def test_each_state_is_told_from_the_lease_and_the_steps(tmp_path: Path) -> None:
    make_run(f"{tmp_path}/finished")
    make_run(f"{tmp_path}/stopped", range(1, 3))
    make_run(f"{tmp_path}/failed", range(1, 3), error="OutOfMemoryError: of GPU 0")
    training = make_run(f"{tmp_path}/training", range(1, 3), released=False)
    killed = make_run(f"{tmp_path}/killed", range(1, 3), released=False)
    lease = LEASES.read(training, 1)
    boot, namespace, _, start = str(lease.process).split()
    gone = f"{boot} {namespace} {2**22 - 1} {start}"  # no process has this number
    killed.put(LEASES.name_of(lease), encode_record(replace(lease, process=gone)))
    put_run(f"{tmp_path}/new", RunConfig(model="tiny", env=("moar_cats",)))
    put_run(f"{tmp_path}/recorded", RunConfig(model="tiny", env=(RECORDED_ENV,)))
    Storage.connect(str(tmp_path)).put_if_absent("broken/run.json", b"{torn")
    found = by_label(str(tmp_path))
    assert {name: each.state for name, each in found.items()} == {
        "broken": "unreadable",
        "failed": "failed",
        "finished": "finished",
        "killed": "failed",
        "new": "new",
        "recorded": "recorded",
        "stopped": "stopped",
        "training": "training",
    }
    assert found["failed"].problem == "OutOfMemoryError: of GPU 0"
    assert "its process is gone" in found["killed"].problem
    assert "is not a run.json that ludic can read" in found["broken"].problem
    text = shown(tabulate(str(tmp_path)), 300)
    assert all(f"{name}: {each.problem}" in text for name, each in found.items() if each.problem)


def test_an_error_that_ends_a_trainer_is_kept_with_its_lease(tmp_path: Path) -> None:
    root = put_run(f"{tmp_path}/run", RunConfig(model="tiny", env=("moar_cats",)))
    lease = claim(root, 0)
    record_attempt(root, lease, None, {"num_steps": 4})
    with suppress(ValueError), held(root, lease, on_fenced=lambda: None, also=lambda: None):
        raise ValueError("rewards\nare NaN")
    (found,) = summarise([root.url])
    assert (found.state, found.problem) == ("failed", "ValueError: rewards are NaN")


def test_a_resumed_run_is_one_row_of_the_steps_that_count(tmp_path: Path) -> None:
    url = f"{tmp_path}/run"
    make_run(url, range(1, 4))
    make_run(url, range(3, 4), after=1, parent=(1, 2))
    (found,) = summarise([url])
    # steps 1 and 2 of attempt 1 and step 3 of attempt 2, 100 tokens each; 3 minutes of attempt 1 and 1 of attempt 2
    assert (found.step, found.num_steps, found.reward, found.tokens, found.seconds) == (3, 4, 0.3, 300, 240.0)
    make_run(url, range(0), after=2, parent=(2, 3))
    root = make_run(url, range(0), after=3, parent=(1, 1))
    (found,) = summarise([url])
    assert (found.step, found.reward, found.tokens) == (1, 0.1, 100)  # attempt 4 trains step 2 again
    root.put("metrics/train-t1-0.parquet", b"torn")
    (found,) = summarise([url])
    assert (found.state, found.step, found.reward) == ("stopped", 1, None)
    assert "metrics/train-t1-0.parquet" in found.problem


def test_tokens_of_many_files_are_estimated_from_some_and_marked(tmp_path: Path) -> None:
    make_run(f"{tmp_path}/few", range(1, 4), file_rows=1)
    make_run(f"{tmp_path}/many", range(1, 11), file_rows=1)
    found = by_label(str(tmp_path))
    assert [(each.tokens, each.is_tokens_estimated) for each in found.values()] == [(300, False), (1000, True)]
    assert "~1,000" in shown(tabulate(str(tmp_path)), 200)


def test_a_branch_is_below_the_run_that_it_left_wherever_that_was_typed(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    make_run(f"{folder}/b")
    make_run(f"{folder}/a-of-b", replay_batches="runs/b", replan_from=2)  # typed in the folder above
    make_run(f"{folder}/c-of-a", replay_batches=f"{folder}/a-of-b", replan_from=1)
    make_run(f"{folder}/a-of-none", replay_batches="gone/b", replan_from=2)
    make_run(f"{folder}/z-replay", replay_batches="runs/b")
    table = tabulate(str(folder))
    assert [(each.label, depth) for each, depth in zip(table.runs, table.depths, strict=True)] == [
        ("a-of-none", 0),
        ("b", 0),
        ("a-of-b", 1),
        ("c-of-a", 2),
        ("z-replay", 0),
    ]
    assert "\n  a-of-b " in shown(table, 200)
    assert table.differing == []


def test_runs_differ_in_settings_and_not_in_places_and_group_by_all_but_the_seed(tmp_path: Path) -> None:
    rates = {"x/lr1-s0": (1e-6, 0), "x/lr1-s1": (1e-6, 1), "y/lr3-s0": (3e-6, 0), "y/lr3-s1": (3e-6, 1)}
    for name, (rate, seed) in rates.items():
        own = {"learning_rate": rate, "reference": f"{tmp_path}/{name}/model"}
        make_run(f"{tmp_path}/{name}", seed=seed, keep_checkpoints=seed + 1, **own)
    runs = summarise(find_runs(tmp_path))
    assert [each.label for each in runs] == list(rates)
    assert differing(runs) == ["learning_rate", "seed", "keep_checkpoints"]
    by_rate = {
        f"learning_rate={rate}": [f"{name}-s0", f"{name}-s1"] for name, rate in (("x/lr1", 1e-6), ("y/lr3", 3e-6))
    }
    assert group_runs(runs, "learning_rate") == by_rate
    # Without `by`, a difference that changes nothing that is learned is one, too.
    assert all(len(labels) == 1 for labels in group_runs(runs).values())
    same = [replace(each, settings={**each.settings, "keep_checkpoints": 1}) for each in runs]
    assert group_runs(same) == by_rate
    other = replace(same[1], label="other", code={"scorer reward.py:score": "reward.py 11111111"})
    others = [replace(other, label=digest, code={"scorer reward.py:score": f"reward.py {digest}"}) for digest in "23"]
    data = replace(same[1], label="data", data={"qa/x": "rows.jsonl 4"})
    first = [*same[:2], replace(same[0], label="again", settings={**same[0].settings, "seed": 5})]
    named = {"learning_rate=1e-06": ["x/lr1-s0", "x/lr1-s1", "again"]}
    assert group_runs([*first, other], "learning_rate") == named | {
        "learning_rate=1e-06, other code (reward.py)": ["other"]
    }
    assert group_runs([*first, *others, data], "learning_rate") == named | {
        "learning_rate=1e-06, other code (reward.py 2)": ["2"],
        "learning_rate=1e-06, other code (reward.py 3)": ["3"],
        "learning_rate=1e-06, other data (rows.jsonl)": ["data"],
    }
    # Which runs are one line does not depend on the others beside them.
    aside = replace(same[0], label="aside", settings={**same[0].settings, "checkpoint_every": 5})
    assert lines_of(same[:2]) == dict.fromkeys(["x/lr1-s0", "x/lr1-s1"], "all runs (2 runs)")
    assert {*lines_of([*same[:2], aside, other, data])} == {"x/lr1-s0", "x/lr1-s1"}
    assert labels_of(runs[:2]) == ["lr1-s0", "lr1-s1"]
    assert labels_of(runs[:1]) == ["lr1-s0"]
    with pytest.raises(ConfigError, match="setting 'learning_rat' is unknown; did you mean 'learning_rate'"):
        group_runs(runs, "learning_rat")


def test_a_place_is_found_in_whole_paths_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("g", "grpo"):
        make_run(f"{tmp_path}/{name}", advantage="grpo", reference=f"{tmp_path}/g-old", log_to=[f"runs/{name}/log"])
    monkeypatch.chdir(tmp_path)
    runs = summarise(find_runs("."))
    assert [each.url for each in runs] == ["g", "grpo"]
    assert (differing(runs), setting_text(runs[1], "advantage")) == ([], "grpo")


def test_runs_that_differ_in_code_alone_show_it_and_are_no_group(tmp_path: Path) -> None:
    for name, digit in (("a", "1"), ("b", "2"), ("b again", "2")):
        make_run(str(tmp_path / name))
        claim_slot(Root.open(str(tmp_path / name), writable=True), 0, "w0-x", code=_code("0"))
        of_other_folders = f"{tmp_path}/{name}/inputs/reward.py"
        claim_slot(Root.open(str(tmp_path / name), writable=True), 0, "w0-y", code=_code(digit, of_other_folders))
    table = tabulate(str(tmp_path))
    assert table.differing == []
    assert table.frame()["code"].to_list() == ["reward.py 11111111", "reward.py 22222222", "reward.py 22222222"]
    assert {*lines_of(table.runs)} == {"b", "b again"}
    assert "code" not in replace(table, runs=table.runs[1:]).frame().columns


def _code(digit: str, path: str = "reward.py") -> Sequence[Mapping[str, Any]]:
    return to_dicts([CodeRecord(role="scorer", name="reward.py:score", sha256=digit * 64, path=path)])


def test_nothing_is_cut_in_a_terminal_of_any_width_and_names_are_text(tmp_path: Path) -> None:
    odd = {
        "num_steps": "many",
        "replay_batches": 5,
        "replan_from": [],
        "env": 3,
        "run": {},
        "max_uses": 10**30,
        "advantage": ["x" * 10**5],
    }
    make_run(f"{tmp_path}/{HOSTILE}", learning_rate=1e-6, error=HOSTILE * 1000, **odd)
    make_run(f"{tmp_path}/a-long-name-of-a-run-that-says-what-it-is", learning_rate=3e-6, advantage="grpo")
    table = tabulate(str(tmp_path))
    for width in (20, 60, 80, 120, 200):
        text = shown(table, width)
        assert "\x1b[2J" not in text
        assert "\u202e" not in text
        assert len(text) < 6000
        if width > 60:
            assert "a-long-name-of-a-run-that-says-what-it-is" in text
        rest = text.partition("no room for ")[2]
        for name in ("state", "step", "reward", "tokens", "began", "learning_rate", "advantage"):
            assert name in text.splitlines()[0] or name in rest or width < 60, (width, name, text)
    assert "no room" not in shown(table, 250)
    assert table.frame()["max_uses"].to_list() == [str(10**30), "1"]


def test_the_command_sorts_and_prints_json_and_python_gives_a_frame(ludic, tmp_path: Path) -> None:
    for name, steps in {"a": range(1, 2), "b": range(1, 4), "c": range(0)}.items():
        make_run(f"{tmp_path}/{name}", steps, learning_rate=1e-6 if name == "a" else 2)
    found = json.loads(ludic("runs", tmp_path, "--sort", "reward", "--json").out)
    assert [each["label"] for each in found["runs"]] == ["b", "a", "c"]
    assert found["differing"] == ["learning_rate"]
    frame = package.runs(tmp_path).frame()
    assert frame.select("run", "step", "reward", "learning_rate").rows() == [
        ("a", 1, 0.1, 1e-6),
        ("b", 3, 0.3, 2.0),
        ("c", 0, None, 2.0),
    ]
    assert "3 of 4" in package.runs(tmp_path / "b")._repr_html_()
    printed = [
        re.sub(r"\d+ s ago", "", ludic(*args).out) for args in (("watch", tmp_path, "--once"), ("runs", tmp_path))
    ]
    assert "3 of 4" in printed[0]
    assert printed[0] == printed[1]


def test_a_folder_without_runs_says_so_in_one_line(ludic, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    told = f"{tmp_path} holds no run, and neither do the folders below it; `ludic run`"
    result = ludic("runs", tmp_path)
    assert (result.code, result.out) == (0, f"{told} starts one\n")
    for command in ("watch", "view"):
        result = ludic(command, tmp_path)
        assert (result.code, result.err) == (1, f"ludic: {told} or `ludic.record` starts one\n")
    make_run(f"{tmp_path}/sub/run")
    for args, code, said in (
        (("watch", "--totals"), 2, f"totals is of one run, and {tmp_path} has runs below it"),
        (("view",), 1, "the viewer needs a terminal; `ludic runs"),
        (("view", "some-id"), 1, f"{tmp_path} is not a run, and ID is of one; `ludic runs {tmp_path}` lists"),
    ):
        result = ludic(args[0], tmp_path, *args[1:])
        assert (result.code, said in result.err) == (code, True), result
    near = f"ludic: {tmp_path}/sub/ruin holds no run: run.json is missing; did you mean {tmp_path}/sub/run?\n"
    assert ludic("view", tmp_path / "sub/ruin").err == near


def test_a_live_table_shows_the_training_runs_of_many(tmp_path: Path) -> None:
    for number in range(5):
        make_run(f"{tmp_path}/run-{number}", range(1, 2), released=number < 3)
    console = open_console(width=100, height=9, force_terminal=True, color_system=None)
    text = run_table._shortened(tabulate(str(tmp_path)), console)
    assert [f"run-{number}" in text for number in (3, 4, 0, 1, 2)] == [True, True, True, False, False]
    assert text.endswith("and 2 more: `ludic runs` lists all")


def test_enter_opens_the_chosen_run_and_the_list_begins_there_again(tmp_path: Path) -> None:
    for name in ("a", HOSTILE.replace("/", ""), "c"):
        make_run(f"{tmp_path}/{name}")

    async def choose(*keys: str, begin: str | None = None) -> str | None:
        app = RunListApp(str(tmp_path), begin)
        async with app.run_test(size=(120, 30)) as pilot:
            await pilot.app.workers.wait_for_complete()
            await pilot.pause()
            await pilot.press(*keys)
            await pilot.pause()
        return app.return_value

    runs = find_runs(tmp_path)
    assert len(runs) == 3
    chosen = asyncio.run(choose("down", "enter"))
    assert chosen == runs[1]
    assert asyncio.run(choose("down", "enter", begin=chosen)) == runs[2]
    assert asyncio.run(choose("q")) is None
