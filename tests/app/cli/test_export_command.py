"""`ludic export`: tables over the same files, and rows as text."""

import json
import sys
from pathlib import Path

import pytest
from deltalake import DeltaTable

from ludic.root.root import Root


def test_delta_says_what_came_in_and_then_that_nothing_did(ludic, breakable: Path):
    first, second = (ludic("export", breakable, "--format", "delta") for _ in range(2))
    assert first.out == f"{breakable}/rollouts: delta table of 2 files; 2 files added, 0 removed\n"
    assert second.out == f"{breakable}/rollouts: delta table of 2 files; 0 files added, 0 removed\n"
    assert (first.code, first.err, second.err) == (0, "", "")
    assert DeltaTable(breakable / "rollouts").to_pyarrow_table().num_rows == 16


@pytest.mark.slow
def test_the_run_is_sound_after_both_kinds_of_tables_were_made(ludic, breakable: Path):
    for kind in ("delta", "iceberg"):
        assert ludic("export", breakable, "--format", kind).code == 0
    assert ludic("verify", breakable).code == 0


def test_the_report_of_a_table_as_json_names_broken_files(ludic, breakable: Path):
    name = "rollouts/version=0/env=moar_cats/w9-broken-0.parquet"
    (breakable / name).write_bytes(b"PAR1")
    result = ludic("export", breakable, "--format", "iceberg", "--json")
    report = json.loads(result.out)
    assert (report["format"], report["num_added"], report["location"]) == (
        "iceberg",
        2,
        f"{breakable}/iceberg/catalog.db",
    )
    assert list(report["left_out"]) == [name]
    assert result.err.startswith(f"ludic: {name} was left out: ")


def test_jsonl_is_an_object_a_line_of_the_rows_asked_for(ludic, trained: Root):
    result = ludic("export", trained.url, "--format", "jsonl", "--where", "policy_version = 1 -- the newer half")
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [row["policy_version"] for row in rows] == [1] * 8
    assert {len(row["response_tokens"]) == row["response_length"] for row in rows} == {True}
    # The texts of steps are stored once, in messages; who reads JSON gets them in place.
    assert {step["action"] == row["messages"][1]["content"] for row in rows for step in row["agent_steps"]} == {True}
    assert sorted(row["episode_reward"] is None for row in rows) == [False] * 7 + [True]


def test_a_file_appears_whole_or_not_at_all_and_is_never_replaced(ludic, trained: Root, tmp_path: Path):
    out = tmp_path / "rows.jsonl"
    bad = "case when policy_version = 1 then error('no more') else true end"
    failed = ludic("export", trained.url, "--format", "jsonl", "--where", bad, "--out", out)
    assert (failed.code, "no more" in failed.err, list(tmp_path.iterdir())) == (1, True, [])
    assert ludic("export", trained.url, "--format", "jsonl", "--out", out).code == 0
    assert len(out.read_text().splitlines()) == 16
    again = ludic("export", trained.url, "--format", "jsonl", "--out", out)
    assert (again.code, again.err) == (1, f"ludic: {out} exists; choose another target, or delete it\n")


@pytest.mark.parametrize(
    ("kind", "module", "package"),
    [("delta", "deltalake.exceptions", "deltalake"), ("iceberg", "pyiceberg.exceptions", "pyiceberg with SQLite")],
)
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    ludic, breakable: Path, monkeypatch: pytest.MonkeyPatch, kind: str, module: str, package: str
):
    monkeypatch.setitem(sys.modules, module, None)  # as Python marks a module that can't be imported
    result = ludic("export", breakable, "--format", kind)
    assert result.code == 1
    assert f"tables need {package}: pip install 'ludic-rl[export]'" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "delta", "--where", "true"], "where does not apply to format delta"),
        (["--format", "delta", "--out", "x"], "out does not apply to format delta"),
        (["--format", "jsonl", "--where", "true", "--sql", "select 1"], "where and sql both choose the rows"),
        (["--format", "lance"], "lance"),
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(ludic, trained: Root, options: list[str], message: str):
    result = ludic("export", trained.url, *options)
    assert result.code == 2
    assert message in " ".join(result.err.split())


def test_what_is_no_run_is_refused_in_a_line(ludic, tmp_path: Path):
    result = ludic("export", tmp_path, "--format", "delta")
    assert result.code == 1
    assert (
        result.err == f"ludic: {tmp_path} holds no run: run.json is missing; `ludic run` or `ludic.record` starts one\n"
    )


def test_weights_are_written_where_asked_and_reported(ludic, trained: Root, tmp_path: Path):
    out = tmp_path / "model"
    result = ludic("export", trained.url, "--format", "hf", "--step", "1", "--out", out)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"{out}: checkpoints/attempt=1/step=1 as ")
    assert (out / "config.json").exists()
    report = json.loads(ludic("export", trained.url, "--format", "hf", "--out", tmp_path / "v", "--json").out)
    assert (report["format"], report["source"]) == ("hf", "policies/version=1")
    again = ludic("export", trained.url, "--format", "hf", "--out", out)
    assert (again.code, again.err) == (1, f"ludic: {out} exists; choose another target, or delete it\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--format", "hf"], "format hf needs out"),
        (["--format", "hf", "--out", "x", "--step", "0", "--version", "0"], "step and version both choose"),
        (["--format", "jsonl", "--version", "0"], "version does not apply to format jsonl"),
        (
            ["--format", "csv"],
            "--format: export format 'csv' is unknown; there are hf, delta, iceberg, jsonl, atif, chat, inspect",
        ),
        (["--format", "delta", "--step", "0"], "step does not apply to format delta"),
    ],
)
def test_options_of_weights_that_do_not_go_together_are_wrong_usage(ludic, trained: Root, args, message: str):
    result = ludic("export", trained.url, *args)
    assert result.code == 2
    assert message in " ".join(result.err.replace("│", "").split())
