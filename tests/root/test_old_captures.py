"""Rows that were imported without logprobs before there was the column `capture` have it, however they are read."""

from dataclasses import replace

import polars as pl
import pyarrow as pa
import pytest
from strategies import make_group

from ludic.records.conversion import to_table
from ludic.records.rollout import RolloutBatch, RolloutMetadata
from ludic.root.maintenance.compaction import compact
from ludic.root.root import Root
from ludic.root.rows.files import current_files
from ludic.root.rows.parquet import encode, read_columns
from ludic.root.rows.reader import RolloutReader
from ludic.root.sql.connection import connect
from ludic.root.sql.lazy_frames import scan
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

MARK = {"logprobs": "absent"}


OWN = {"x_capture": "string"}


def old_file(worker_id: str, seed: int) -> bytes:
    """One group of two rows as a file of rollouts 1.7; an import marked the first. The run has a column of its own."""
    group = make_group(group_size=2, seed=seed)
    first, second = group.rollouts
    rows = (replace(first, metadata={**MARK, "note": "a"}), second)
    batch = RolloutBatch(groups=(replace(group, rollouts=rows),), metadata=RolloutMetadata(worker_id=worker_id))
    table = to_table(batch, run_id="run", sequence=0, extra_columns=OWN).drop_columns(["capture"])
    return encode(table.replace_schema_metadata({**table.schema.metadata, b"ludic.schema_version": b"1.7"}))


@pytest.fixture
def root(tmp_path, monkeypatch) -> Root:
    monkeypatch.setenv("LUDIC_CACHE_DIR", str(tmp_path / "cache"))
    root = put_run(str(tmp_path / "run"), RunConfig(model="tiny", env=("moar_cats",), extra_columns=OWN))
    for number in range(2):
        name = f"rollouts/version=0/env=moar_cats/import-{number}-0.parquet"
        root.put(name, old_file(f"import-{number}", number))
    return root


def captures(table: pa.Table | pl.DataFrame) -> list[str | None]:
    found = table.to_arrow() if isinstance(table, pl.DataFrame) else table
    return sorted(found["capture"].to_pylist(), key=str)


def test_a_marked_row_is_text_however_it_is_read_and_after_compaction(root, monkeypatch):
    wanted = [None, None, "text", "text"]

    def check() -> None:
        assert captures(RolloutReader(root, ["rollout_id", "capture"]).poll(None)) == wanted
        assert captures(connect(root).sql("select capture from rollouts").to_arrow_table()) == wanted
        assert captures(scan(root).select("capture").collect()) == wanted
        files = [read_columns(root, file.name, ["metadata", "capture"]) for file in current_files(root)]
        assert captures(pa.concat_tables(files)) == wanted

    check()
    monkeypatch.setattr("ludic.root.rows.reader.MANY_FILES", 1)
    monkeypatch.setattr("ludic.root.sql.listed_files.MANY_FILES", 1)
    check()
    compact(root)
    assert [file.is_compacted for file in current_files(root)] == [True]
    check()


def test_a_compacted_file_of_an_older_ludic_is_read_by_the_macro(root):
    table = connect(root).sql("select capture_of(null, metadata) as capture from rollouts").to_arrow_table()
    assert captures(table) == [None, None, "text", "text"]
    kept = connect(root).sql("select capture_of('ids', map {'logprobs': 'absent'}) as capture").to_arrow_table()
    assert captures(kept) == ["ids"]
