"""A new folder of the root is one row of the catalogue and one schema: all else follows without another line."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ludic
from ludic.records.tables import table_names
from ludic.root.catalogue import FILE_KINDS, Table

PACKAGE = Path(ludic.__file__).parent
ROW = """

NAPS = Table(
    "naps",
    SequenceName,
    "naps/{worker_id}-{sequence}.parquet",
    "when workers slept",
    table="naps",
    most_rows=1000,
    kept="expire",
    view="naps",
)
FILE_KINDS = (*FILE_KINDS, NAPS)
"""
SCHEMA = {
    "table": "naps",
    "version": "1.0",
    "doc": "One row per nap.",
    "columns": [
        {"name": "worker_id", "type": "string", "nullable": False, "doc": "Who slept."},
        {"name": "seconds", "type": "double", "nullable": True, "doc": "How long."},
        {"name": "created_at", "type": {"timestamp": "us"}, "nullable": False, "doc": "When."},
    ],
}
SCRIPT = """
import sys
from datetime import UTC, datetime

import pyarrow as pa

import ludic
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run
from ludic.records.tables import arrow_schema
from ludic.records.docs import render
from ludic.root.root import Root
from ludic.root.catalogue import NAPS, SequenceName, to_markdown
from ludic.root.rows.tables import put_table, read_table

root = put_run(sys.argv[1], RunConfig(model="tiny", env=("moar_cats",)))
row = {"worker_id": "w0-a", "seconds": 2.5, "created_at": datetime(2026, 1, 2, tzinfo=UTC)}
rows = pa.Table.from_pylist([row], arrow_schema("naps"))
first = SequenceName("w0-a", 0)
assert put_table(root, NAPS, first, rows)
assert not put_table(root, NAPS, first, rows.slice(0, 0)), "the name is taken"
assert NAPS.listed(root) == [first]
assert read_table(root, NAPS, first) == rows

run = ludic.open(root.url)
assert run.verify().findings == []
assert run.sql("select worker_id, seconds from naps").rows() == [("w0-a", 2.5)]
root.put("naps/w1-b-0.parquet", root.read(NAPS.name(first)))
root.put("naps/of me.txt", b"zzz")
found = {each.where: each.problem for each in run.verify().findings}
assert found["naps/w1-b-0.parquet"] == "holds rows that belong in naps/w0-a-0.parquet", found
assert "naps/of me.txt" in found
root.put("naps/w0-a-1.parquet", root.read(NAPS.name(first))[:-9])
assert "naps/w0-a-1.parquet" in {each.where for each in run.verify().findings}
assert run.watch(once=True).totals.facts["folders"]["naps"]["num_files"] == 3

assert run.expire(folder="naps", older_than="7d").files.keys() == {"naps/w0-a-0.parquet", "naps/w1-b-0.parquet"}
assert NAPS.listed(root) == [SequenceName("w0-a", 1)]
assert "| `naps/{worker_id}-{sequence}.parquet` | when workers slept |" in to_markdown()
assert "## naps 1.0" in render()
"""


@pytest.mark.slow
def test_a_row_and_a_schema_are_all_that_a_folder_needs(tmp_path: Path) -> None:
    code = tmp_path / "code"
    shutil.copytree(PACKAGE, code / "ludic", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PACKAGE.parent / "schemas", code / "schemas")
    with (code / "ludic/root/catalogue.py").open("a") as catalogue:
        catalogue.write(ROW)
    (code / "schemas/naps.v1.json").write_text(json.dumps(SCHEMA))
    environment = {**os.environ, "PYTHONPATH": str(code), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_other_module_or_query_spells_a_folders_names() -> None:
    folders = "|".join(
        sorted({re.escape(row.folder) for row in FILE_KINDS if row.folder and row.kept != "not the run's"})
    )
    # In code, not in a comment or a docstring: a name below a folder, as a pattern, an f-string or a glob; a part of a
    # name with a field; a listing of a folder.
    below = rf"""["'](?:{folders})/(?:[^"'\s]*[{{*=(\[])"""
    part = r"""["'/](?:version|attempt|step|slot|scorer|model|env)=\{"""
    spelled = re.compile(rf"""{below}|{part}|(?:list|sizes|folders)\(["'](?:{folders})["'/]""")
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.sql")])
        if path.name != "catalogue.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if spelled.search(line.partition("--" if path.suffix == ".sql" else '"""')[0])
    ]
    # Copies on this machine, outside of the root.
    copies = ["root/weights/policies.py"]
    found = [place for place in found if place.partition(":")[0] not in copies]
    assert found == [], "use the row of ludic.root.catalogue"


def test_the_help_of_expire_names_each_folder_that_expires() -> None:
    text = (PACKAGE / "root/maintenance/expiry_rule.py").read_text()
    assert all(row.folder in text for row in FILE_KINDS if row.kept == "expire")


def test_each_table_has_one_row_and_each_row_its_table() -> None:
    assert {row.table for row in FILE_KINDS if isinstance(row, Table)} == set(table_names())
