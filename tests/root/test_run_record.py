"""What the root itself reads of run.json, and that it needs no other setting of the run."""

import io
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from strategies import make_batch

import ludic
from ludic.errors import ConfigError
from ludic.root.json_records import RunRecord, encode_json
from ludic.root.root import Root
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run, run_of

UNKNOWN: Mapping[str, Mapping[str, Any]] = {
    "out of range": {"group_size": 0},
    "of another type": {"sweep": 7, "tools": None},
    "unknown": {"mood": "calm"},
    "of a newer minor version": {"schema_version": "1.99", "mood": "calm"},
}
"""Changes of run.json, by what they are."""


def rewrite(root: Root, **changes: Any) -> Root:
    """Open the run with other values in its run.json, which has its digest again."""
    values = json.loads(root.run_json) | changes
    del values["digest"]
    root.put("run.json", encode_json(values))
    return Root.open(root.url)


@pytest.fixture
def filled(tmp_path: Path) -> Root:
    """A run with 24 rollouts of three versions in six files, and a column of its own."""
    run = RunConfig(model="m", env=("moar_cats",), group_size=4, extra_columns={"x_judge": "string"})
    root = put_run(str(tmp_path / "run"), run)
    with RolloutWriter(root, "w0-test") as writer:
        for seed in range(6):
            batch = make_batch(worker_id="w0-test", num_groups=1, group_size=4, seed=seed, policy_version=seed // 2)
            writer.append(batch)
            writer.flush()
    return root


@pytest.mark.parametrize("changes", UNKNOWN.values(), ids=UNKNOWN)
def test_a_root_with_settings_that_this_ludic_does_not_know_opens_for_all_that_needs_none(
    filled: Root, changes: Mapping[str, Any]
) -> None:
    rewrite(filled, **changes)
    run = ludic.open(filled.url)
    # What no worker starts with is named; settings of a newer minor version are left out.
    refused = set() if changes is UNKNOWN["of a newer minor version"] else {"settings"}
    assert run.sql("select count(*), count(x_judge), (select model from roots) from rollouts").row(0) == (24, 0, "m")
    assert {each["check"] for each in run.verify().to_dict()["findings"]} == refused
    assert len(run.compact(all_versions=True).partitions) == 3
    run.expire(before=1)
    exported = io.BytesIO()
    run.export("jsonl", exported)
    assert len(exported.getvalue().splitlines()) == 16
    assert {each["check"] for each in run.verify().to_dict()["findings"]} == refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (UNKNOWN["out of range"], "group_size is 0, wanted"),
        (UNKNOWN["of another type"], "sweep"),
        (UNKNOWN["unknown"], "'mood' is not a setting of a run"),
    ],
)
def test_who_samples_or_trains_is_told_which_setting_is_wrong_and_where(
    filled: Root, changes: Mapping[str, Any], message: str
) -> None:
    root = rewrite(filled, **changes)
    with pytest.raises(
        ConfigError, match=rf"^{root.url}/run\.json is not a run\.json that ludic can read: .*{message}"
    ):
        run_of(root)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": "../x"}, r"run_id has '\.\./x', wanted at most 64 letters, digits and hyphens; put a sound copy"),
        ({"run_id": "x" * 65}, "run_id has 'x{65}', wanted at most 64"),
        ({"model": 7}, r"`\$\.model`"),
        ({"env": "moar_cats"}, r"`\$\.env`"),
        ({"env_options": []}, r"`\$\.env_options`"),
        ({"extra_columns": {"judge": "string"}}, "extra column 'judge': wanted x_"),
        ({"extra_columns": {"x_judge": "text"}}, "extra column 'x_judge' is 'text', wanted one of string"),
        ({"schema_version": "one"}, "run.json that ludic can read"),
        ({"schema_version": "2.0"}, "has schema 2.0, this ludic reads 1"),
    ],
)
def test_what_the_root_reads_is_checked_when_it_opens(filled: Root, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as found:
        rewrite(filled, **changes)
    assert f"{filled.url}/run.json" in str(found.value)


def test_a_value_that_the_root_needs_can_not_be_left_out(filled: Root) -> None:
    for name in ("run_id", "schema_version", "model", "env"):
        values = json.loads(filled.run_json)
        del values[name], values["digest"]
        filled.put("run.json", encode_json(values))
        with pytest.raises(ConfigError, match=rf"is not a run\.json that ludic can read: .*{name}"):
            Root.open(filled.url)


def test_the_record_has_the_values_of_the_settings(filled: Root) -> None:
    run = run_of(filled)
    shared = {field.name for field in fields(RunRecord)} & {field.name for field in fields(RunConfig)}
    assert shared == {"model", "env", "env_options", "extra_columns"}
    for name in shared:
        assert getattr(filled.record, name) == getattr(run, name)


def test_settings_are_read_once_however_often_they_are_asked_for(filled: Root) -> None:
    assert run_of(Root.open(filled.url)) is run_of(filled)
    assert run_of(rewrite(filled, seed=3)).seed == 3


MODULES = (
    "root.rows.reader",
    "root.sql.planner",
    "records.tables",
    "root.maintenance.verify",
    "root.maintenance.compaction",
)


def test_store_sql_and_maintenance_load_no_settings_of_runs_and_no_names_of_other_trainers() -> None:
    code = (
        f"import sys; from importlib import import_module; [import_module(f'ludic.{{name}}') for name in {MODULES}];"
        "print([name for name in sys.modules if name.startswith(('ludic.run.', 'ludic.settings.table',"
        " 'ludic.settings.flags', 'ludic.adapters'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
