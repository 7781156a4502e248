"""`ludic watch --totals`: what is in a root."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from strategies import make_batch

import ludic
from ludic.app.show.stats import collect_stats
from ludic.records.rollout import RolloutBatch, RolloutMetadata
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.tombstones import quarantine
from ludic.root.rows.writer import RolloutWriter


@pytest.mark.slow
def test_answers_cut_at_max_tokens_are_counted_under_this_name(ludic, started: Root) -> None:
    # Three of four answers hit max_tokens; no episode was truncated.
    (group,) = make_batch(worker_id="w0", rewards=[[0.0, 0.0, 0.0, 1.0]]).groups
    cut = [replace(rollout, incomplete_completion=True, finish_reason="length") for rollout in group.rollouts[:3]]
    batch = RolloutBatch(
        groups=(replace(group, rollouts=(*cut, group.rollouts[3])),), metadata=RolloutMetadata(worker_id="w0")
    )
    with RolloutWriter(started, "w0") as writer:
        writer.append(batch)
    (row,) = collect_stats(started).facts["environments"]
    assert (row["truncated_fraction"], row["incomplete_fraction"]) == (0.0, 0.75)
    lines = [line.split() for line in ludic("watch", started.url, "--totals").out.splitlines()]
    assert ["env", "rollouts", "reward", "tokens", "max_tokens", "unparsed", "limits", "failed"] in lines
    assert ["moar_cats", "4", "0.25", "16.0", "75.0%", "0.0%", "0.0%", "0.0%"] in lines


@pytest.mark.slow
def test_json_on_stdout_is_what_was_collected(ludic, trained: Root) -> None:
    result = ludic("watch", trained.url, "--totals", "--json")
    assert (result.code, result.err) == (0, "")
    printed = json.loads(result.out)["totals"]
    assert printed["run"]["env"] == ["moar_cats"]
    assert printed["run_id"] == trained.run_id
    assert printed["steps"] == collect_stats(trained).facts["steps"]


def test_people_get_tables_and_a_curve(ludic, trained: Root) -> None:
    result = ludic("watch", trained.url, "--totals")
    assert (result.code, result.err) == (0, "")
    assert "reward by version  0.375 ▁█ 0.4286" in result.out
    assert "4 rollouts: drop_zero_variance_groups 4" in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    assert "\x1b" not in result.out


@pytest.mark.slow
def test_a_run_that_has_only_begun_is_no_error(ludic, started: Root) -> None:
    result = ludic("watch", started.url, "--totals")
    assert result.code == 0
    assert "no rollouts yet" in result.out
    assert "never trained" in result.out
    assert json.loads(ludic("watch", started.url, "--totals", "--json").out)["totals"]["versions"] == []


@pytest.mark.slow
def test_what_can_not_be_read_is_named_and_left_out(ludic, breakable: Path) -> None:
    torn = list_files(Root.open(str(breakable)))[0].name
    (breakable / torn).write_bytes((breakable / torn).read_bytes()[:-100])
    printed = json.loads(ludic("watch", breakable, "--totals", "--json").out)["totals"]
    assert [file["name"] for file in printed["unreadable"]] == [torn]
    assert printed["rollouts"]["num_rollouts"] == 8
    assert f"unreadable {torn}" in ludic("watch", breakable, "--totals").out


@pytest.mark.slow
def test_many_files_are_counted_from_the_cache_of_scalars(
    breakable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = list_files(Root.open(str(breakable)))[0].name
    (breakable / torn).write_bytes((breakable / torn).read_bytes()[:-100])
    root = Root.open(str(breakable))
    expected = ludic.open(root.url).watch(once=True).totals.facts
    monkeypatch.setenv("LUDIC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("ludic.root.sql.listed_files.FEW_FILES", 0)
    assert ludic.open(root.url).watch(once=True).totals.facts == expected
    assert [file["name"] for file in expected["unreadable"]] == [torn]
    assert list((tmp_path / "cache").rglob("*.parquet"))


@pytest.mark.slow
def test_what_was_quarantined_is_named(ludic, breakable: Path) -> None:
    root = Root.open(str(breakable))
    name = list_files(root)[0].name
    quarantine(root, name, "cut off")
    printed = json.loads(ludic("watch", breakable, "--totals", "--json").out)["totals"]
    assert [(file["name"], file["reason"]) for file in printed["quarantined"]] == [(name, "cut off")]
    assert f"quarantined {name}: cut off\n" in ludic("watch", breakable, "--totals").out


def test_many_versions_are_shown_by_both_ends(ludic, started: Root) -> None:
    with RolloutWriter(started, "w0") as writer:
        for version in range(13):
            writer.append(make_batch(worker_id="w0", num_groups=1, seed=version, policy_version=version))
    out = ludic("watch", started.url, "--totals").out
    assert "versions (3 in the middle left out)" in out
    lines = out.partition("versions (3 in the middle left out)")[2].splitlines()
    shown = [line.split()[0] for line in lines if line.strip()[:1].isdigit()]
    assert shown == ["0", "1", "2", "3", "4", "8", "9", "10", "11", "12"]
