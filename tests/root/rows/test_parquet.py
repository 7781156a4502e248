"""Files are read as they are now, however often they were opened before."""

import pyarrow as pa
import pytest
from strategies import make_batch

from ludic.errors import SchemaError
from ludic.records.conversion import to_table
from ludic.root.root import Root
from ludic.root.rows.parquet import encode, read_columns
from ludic.run.run_json import put_run

COLUMNS = ["rollout_id", "response_tokens", "response_logprobs"]


def table_of(root: Root, seed: int, num_groups: int = 2) -> pa.Table:
    return to_table(make_batch(num_groups=num_groups, group_size=2, seed=seed), run_id=root.run_id, sequence=seed)


def put(root: Root, table: pa.Table, name: str = "rollouts/a.parquet") -> bytes:
    data = bytes(encode(table))
    root.put(name, data)
    return data


def test_a_file_that_was_replaced_is_read_anew(root: Root):
    for seed in (1, 2, 1):
        table = table_of(root, seed)
        put(root, table)
        for _ in range(2):
            assert read_columns(root, "rollouts/a.parquet", COLUMNS).equals(table.select(COLUMNS))


@pytest.mark.slow
def test_more_files_than_are_remembered(tmp_path, run_config):
    root = put_run(str(tmp_path / "run"), run_config)
    tables = {f"rollouts/{seed}.parquet": table_of(root, seed, num_groups=1) for seed in range(150)}
    for name, table in tables.items():
        put(root, table, name)
    for _ in range(2):
        for name, table in tables.items():
            assert read_columns(root, name, COLUMNS).equals(table.select(COLUMNS))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1",
        lambda data: data[:-8] + b"\x00\x00\x00\x00PAR1",
        lambda data: data[:-400] + bytes(392) + data[-8:],
        lambda data: data[-8:],
        lambda data: b"",
    ],
    ids=["cut", "footer too long", "no footer", "zeros in the footer", "only its end", "empty"],
)
def test_a_footer_that_broke_after_it_was_read_is_found_broken(root: Root, damage):
    data = put(root, table_of(root, 1))
    read_columns(root, "rollouts/a.parquet", COLUMNS)
    root.put("rollouts/a.parquet", damage(data))
    with pytest.raises(SchemaError, match=r"rollouts/a\.parquet"):
        read_columns(root, "rollouts/a.parquet", COLUMNS)
