"""A root as an Iceberg table: what Iceberg's readers see is what ludic stored."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.table import Table
from strategies import make_batch
from table_rows import by_id, stored_rows

from ludic.adapters.exports.tables import TableReport, export_iceberg, open_catalog
from ludic.errors import ConfigError
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.files import list_files
from ludic.root.rows.writer import RolloutWriter
from ludic.run.run_json import put_run, run_of, to_json

AddFiles = Callable[..., None]
IN_A_FOLDER = pytest.mark.parametrize("open_url", ["local"], indirect=True)
"""What does not depend on where the root is."""


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    return tmp_path / "catalog"


@pytest.fixture
def export(filled: Root, catalog: Path) -> Callable[[], TableReport]:
    return lambda: export_iceberg(filled, catalog=catalog)


@pytest.fixture
def load(catalog: Path) -> Iterator[Callable[[], Table]]:
    """load(): the table as any Iceberg reader opens it."""
    with closing(open_catalog(catalog)) as opened:
        yield lambda: opened.load_table("ludic.rollouts")


def rows_of(table: Table) -> list[dict]:
    """PyIceberg reads a null list of structs as an empty one; a list of spans is never empty."""
    return [{**row, "weight_versions": row["weight_versions"] or None} for row in by_id(table.scan().to_arrow())]


@pytest.mark.slow
def test_the_table_holds_exactly_the_rows_of_the_root(filled, export, load):
    report = export()
    assert (report.num_added, report.num_files) == (6, 6)
    assert rows_of(load()) == stored_rows(filled)


def test_no_file_is_copied_or_changed(filled, export):
    before = filled.sizes("rollouts")
    export()
    assert filled.sizes("rollouts") == before


@IN_A_FOLDER
def test_a_filter_on_policy_version_or_environment_skips_files_by_the_manifests_alone(export, load):
    export()
    tasks = load().scan(row_filter="policy_version == 1 and env_name == '50% a=b ü?#&'").plan_files()
    names = [task.file.file_path.rpartition("version=")[2] for task in tasks]
    assert names == ["1/env=50%25%20a%3Db%20%C3%BC%3F%23%26/w0-test-5.parquet"]


@IN_A_FOLDER
def test_a_second_export_with_nothing_new_changes_nothing(export, load):
    export()
    before = load().metadata
    report = export()
    assert (report.num_added, report.num_removed) == (0, 0)
    assert load().metadata == before


@pytest.mark.slow
def test_new_files_come_in_with_one_snapshot(filled, export, load, add_files: AddFiles):
    export()
    add_files(filled, [2], "w1-test")
    report = export()
    assert (report.version, report.num_added, report.num_removed, report.num_files) == (2, 3, 0, 9)
    assert rows_of(load()) == stored_rows(filled)


@pytest.mark.slow
@IN_A_FOLDER
def test_compacted_files_take_the_place_of_their_sources(filled, export, load, add_files: AddFiles):
    add_files(filled, [0, 1], "w1-test")
    export()
    rows = stored_rows(filled)
    compact(filled)
    report = export()
    assert (report.num_added, report.num_removed, report.num_files) == (6, 12, 6)
    assert rows_of(load()) == rows


def test_files_that_are_gone_leave_the_table(filled, export, load):
    export()
    filled.delete("rollouts/version=0")
    assert export().num_removed == 3
    assert rows_of(load()) == stored_rows(filled)


@IN_A_FOLDER
def test_columns_that_the_run_did_not_have_at_the_first_export_are_added(filled: Root, catalog: Path, export, load):
    export()
    grown = replace(
        filled, run_json=to_json(replace(run_of(filled), extra_columns={"x_judge": "string"}), filled.run_id)
    )
    batch = make_batch(worker_id="w1-test", num_groups=1, group_size=2, seed=99)
    rollouts = tuple(replace(rollout, extra={"x_judge": "fine"}) for rollout in batch.groups[0].rollouts)
    with RolloutWriter(grown, "w1-test") as writer:
        writer.append(replace(batch, groups=(replace(batch.groups[0], rollouts=rollouts),)))
    export_iceberg(grown, catalog=catalog)
    judged = load().scan(selected_fields=("worker_id", "x_judge")).to_arrow().to_pylist()
    assert {(row["worker_id"], row["x_judge"]) for row in judged} == {("w0-test", None), ("w1-test", "fine")}


@pytest.mark.slow
def test_a_table_of_an_older_schema_takes_newer_files_with_fields_in_the_midst_of_columns(golden_root, catalog, load):
    with closing(open_catalog(catalog)) as opened:
        opened.create_namespace("ludic")
        old = pq.read_schema(golden_root.at(list_files(golden_root)[0].name))
        opened.create_table("ludic.rollouts", schema=old)
    with RolloutWriter(golden_root, "w1-new") as writer:
        writer.append(make_batch(worker_id="w1-new", num_turns=2))
    export_iceberg(golden_root, catalog=catalog)
    assert rows_of(load()) == stored_rows(golden_root)


@IN_A_FOLDER
def test_one_catalog_is_not_for_two_roots(filled: Root, catalog: Path, export, run_config, tmp_path: Path):
    export()
    other = put_run(str(tmp_path / "other"), run_config)
    with pytest.raises(ConfigError, match="choose another catalog"):
        export_iceberg(other, catalog=catalog)


def test_a_local_root_has_its_catalog_below_it_and_another_must_name_a_folder(filled: Root):
    if filled.is_local:
        export_iceberg(filled)
        with closing(open_catalog(Path(filled.at("iceberg")))) as opened:
            assert isinstance(opened.load_table("ludic.rollouts").scan().to_arrow(), pa.Table)
    else:
        with pytest.raises(ConfigError, match="--out FOLDER"):
            export_iceberg(filled)
