"""A root as a Delta table: what Delta's readers see is what ludic stored."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema
from strategies import make_batch
from table_rows import by_id, stored_rows

import ludic
from ludic.adapters.exports.tables import export_delta, storage_options
from ludic.errors import ConfigError
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run, run_of, to_json

AddFiles = Callable[..., None]
IN_A_FOLDER = pytest.mark.parametrize("open_url", ["local"], indirect=True)
"""What does not depend on where the root is."""


def open_table(root: Root) -> DeltaTable:
    location = root.at("rollouts") if root.is_local else f"{root.url}/rollouts"
    return DeltaTable(location, storage_options=storage_options())


def test_the_table_holds_exactly_the_rows_of_the_root(filled: Root):
    report = export_delta(filled)
    table = open_table(filled).to_pyarrow_table()
    assert (report.version, report.num_added, report.num_files) == (0, 6, 6)
    assert by_id(table) == stored_rows(filled)
    assert table["env"] == table["env_name"]
    assert table["version"] == table["policy_version"]


def test_no_file_is_copied_or_changed(filled: Root):
    before = filled.sizes("rollouts")
    export_delta(filled)
    after = filled.sizes("rollouts")
    assert before.items() <= after.items()
    assert all(name.startswith("rollouts/_delta_log/") for name in after.keys() - before.keys())


@IN_A_FOLDER
def test_a_filter_on_version_skips_files_by_the_log_alone(filled: Root):
    export_delta(filled)
    uris = open_table(filled).file_uris(file_pruning_predicate=[("version", "=", "1"), ("env", "=", "50% a=b ü?#&")])
    assert [uri.rpartition("version=")[2] for uri in uris] == [
        "1/env=50%25%20a%3Db%20%C3%BC%3F%23%26/w0-test-5.parquet"
    ]


@IN_A_FOLDER
def test_a_second_export_with_nothing_new_changes_nothing(filled: Root):
    export_delta(filled)
    names = filled.list("rollouts")
    report = export_delta(filled)
    assert (report.version, report.num_added, report.num_removed) == (0, 0, 0)
    assert filled.list("rollouts") == names


def test_new_files_come_in_with_one_commit(filled: Root, add_files: AddFiles):
    export_delta(filled)
    add_files(filled, [2], "w1-test")
    report = export_delta(filled)
    assert (report.version, report.num_added, report.num_removed, report.num_files) == (1, 3, 0, 9)
    assert by_id(open_table(filled).to_pyarrow_table()) == stored_rows(filled)


@IN_A_FOLDER
def test_compacted_files_take_the_place_of_their_sources(filled: Root, add_files: AddFiles):
    add_files(filled, [0, 1], "w1-test")
    export_delta(filled)
    rows = stored_rows(filled)
    compact(filled)
    report = export_delta(filled)
    assert (report.version, report.num_added, report.num_removed) == (1, 6, 12)
    assert by_id(open_table(filled).to_pyarrow_table()) == rows


@IN_A_FOLDER
def test_a_source_that_a_compaction_left_behind_is_not_in_the_table_twice(filled: Root, add_files: AddFiles):
    add_files(filled, [0, 1], "w1-test")
    source = list_files(filled)[0].name
    data = filled.read(source)
    compact(filled)
    assert filled.put_if_absent(source, data)
    assert export_delta(filled).num_files == 6
    assert by_id(open_table(filled).to_pyarrow_table()) == stored_rows(filled)


def test_files_that_are_gone_leave_the_table(filled: Root):
    export_delta(filled)
    filled.delete("rollouts/version=0")
    report = export_delta(filled)
    assert (report.num_removed, report.num_files) == (3, 3)
    assert by_id(open_table(filled).to_pyarrow_table()) == stored_rows(filled)


@IN_A_FOLDER
def test_a_broken_file_is_left_out_with_its_reason(filled: Root):
    name = "rollouts/version=0/env=moar_cats/w9-broken-0.parquet"
    filled.put(name, b"PAR1 and no more")
    report = export_delta(filled)
    assert report.num_added == 6
    assert list(report.left_out) == [name]
    assert "not a Parquet file" in report.left_out[name]


@IN_A_FOLDER
def test_ludic_itself_does_not_see_the_log(filled: Root):
    export_delta(filled)
    assert len(list_files(filled)) == 6
    assert ludic.connect(filled).execute("select count(*) from rollouts").fetchone() == (12,)
    assert ludic.scan(filled).collect().height == 12


@IN_A_FOLDER
def test_columns_that_the_run_did_not_have_at_the_first_export_are_added(filled: Root):
    export_delta(filled)
    grown = replace(
        filled, run_json=to_json(replace(run_of(filled), extra_columns={"x_judge": "string"}), filled.run_id)
    )
    batch = make_batch(worker_id="w1-test", num_groups=1, group_size=2, seed=99)
    rollouts = tuple(replace(rollout, extra={"x_judge": "fine"}) for rollout in batch.groups[0].rollouts)
    with RolloutWriter(grown, "w1-test") as writer:
        writer.append(replace(batch, groups=(replace(batch.groups[0], rollouts=rollouts),)))
    export_delta(grown)
    judged = open_table(grown).to_pyarrow_table(columns=["worker_id", "x_judge"]).to_pylist()
    assert {(row["worker_id"], row["x_judge"]) for row in judged} == {("w0-test", None), ("w1-test", "fine")}


def test_a_table_of_an_older_schema_takes_newer_files_with_fields_in_the_midst_of_columns(golden_root: Root):
    location = golden_root.at("rollouts")
    old = pq.read_schema(golden_root.at(list_files(golden_root)[0].name))
    partition = [pa.field("version", pa.int64()), pa.field("env", pa.string())]
    DeltaTable.create(location, Schema.from_arrow(pa.schema([*old, *partition])), partition_by=["version", "env"])
    with RolloutWriter(golden_root, "w1-new") as writer:
        writer.append(make_batch(worker_id="w1-new", num_turns=2))
    export_delta(golden_root)
    assert by_id(open_table(golden_root).to_pyarrow_table()) == stored_rows(golden_root)
    version = open_table(golden_root).version()
    with RolloutWriter(golden_root, "w2-new") as writer:
        writer.append(make_batch(worker_id="w2-new", seed=1))
    assert export_delta(golden_root).version == version + 1


@IN_A_FOLDER
def test_vacuum_spares_files_that_no_export_has_seen(filled: Root, add_files: AddFiles):
    export_delta(filled)
    add_files(filled, [2])
    a_year_ago = time.time() - 365 * 24 * 3600
    for file in list_files(filled):
        os.utime(filled.at(file.name), (a_year_ago, a_year_ago))
    assert open_table(filled).vacuum(dry_run=True, full=True) == []


@IN_A_FOLDER
def test_a_table_that_somebody_else_made_is_left_alone(filled: Root):
    deltalake.write_deltalake(filled.at("rollouts"), pa.table({"a": [1]}))
    with pytest.raises(ConfigError, match=r"partitioned by \[\], wanted \['version', 'env'\]"):
        export_delta(filled)


def test_evals_are_a_table_of_their_own(tmp_path: Path, run_config: RunConfig):
    root = put_run(str(tmp_path / "run"), run_config)
    with RolloutWriter(root, "w0-test", folder="evals") as writer:
        writer.append(make_batch(worker_id="w0-test", purpose="eval"))
    export_delta(root, "evals")
    assert DeltaTable(root.at("evals")).to_pyarrow_table(columns=["purpose"]).to_pylist() == [{"purpose": "eval"}] * 8


def test_a_root_that_only_this_process_has_is_refused(run_config: RunConfig):
    root = put_run("memory://exported", run_config)
    with pytest.raises(ConfigError, match="not memory://"):
        export_delta(root)
