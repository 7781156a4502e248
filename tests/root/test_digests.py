"""Every byte of a Parquet file is vouched for by digests inside it; readers that are not ludic see none of that."""

import io
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from strategies import make_batch

from ludic.errors import SchemaError
from ludic.records.conversion import to_table
from ludic.root.maintenance.verify.tables import read_content
from ludic.root.root import Root
from ludic.root.rows.parquet import DIGESTS_KEY, PAGE_BYTES, decode, encode, encode_plain, open_writer, read_columns
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run

NAME = "rollouts/version=0/env=moar_cats/w0-0.parquet"
TRAINED_ON = ["prompt_tokens", "response_tokens", "response_logprobs", "action_mask", "temperature", "episode_reward"]


@pytest.fixture(scope="module")
def rows() -> pa.Table:
    """Several row groups of several pages each."""
    batch = make_batch(worker_id="w0", num_groups=12, group_size=64, response_length=40)
    return to_table(batch, run_id="a-run", sequence=0)


@pytest.fixture(scope="module")
def file(rows: pa.Table) -> bytes:
    return encode(rows)


def flip(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def is_named(data: bytes) -> bool:
    """By the function that `ludic verify` reads a file with."""
    try:
        read_content(io.BytesIO(data), NAME)
    except (SchemaError, pa.ArrowException, OSError):
        return True
    return False


def test_a_file_has_many_pages_and_row_groups(file: bytes) -> None:
    assert len(file) > 2 * PAGE_BYTES
    assert pq.ParquetFile(io.BytesIO(file)).num_row_groups == 3


def test_other_readers_see_the_same_rows_and_a_sound_file_passes(rows: pa.Table, file: bytes) -> None:
    assert pq.read_table(io.BytesIO(file)).equals(rows)
    assert not is_named(file)


def test_each_bit_of_the_end_is_vouched_for(rows: pa.Table) -> None:
    """Digests, trailer, footer, its length and PAR1: damage to one is seen by the other."""
    file = encode_plain(rows.select(["group_id", "policy_version"]).slice(0, 3))
    size = int.from_bytes(file[-8:-4], "little")
    first = 8 * (len(file) - size - 8 - 80)
    assert decode(file, "here", "rollouts").num_rows == 3
    for bit in range(first, 8 * len(file)):
        with pytest.raises(SchemaError, match="here: "):
            decode(flip(file, bit), "here", "rollouts")


def test_random_bits_of_a_file_are_named(file: bytes) -> None:
    draw = random.Random(0)
    missed = [bit for bit in (draw.randrange(8 * len(file)) for _ in range(200)) if not is_named(flip(file, bit))]
    assert missed == []


def test_a_read_refuses_or_gives_what_was_written(root: Root, file: bytes) -> None:
    root.put(NAME, file)
    written = read_columns(root, NAME, TRAINED_ON)
    draw, num_refused = random.Random(1), 0
    for _ in range(30):
        root.put(NAME, flip(file, draw.randrange(8 * len(file))))
        try:
            assert read_columns(root, NAME, TRAINED_ON).equals(written)
        except SchemaError:
            num_refused += 1
    assert num_refused > 10  # the columns that are read are most of the file


def test_a_compacted_file_is_vouched_for(rows: pa.Table, tmp_path: Path) -> None:
    path = tmp_path / "compacted.parquet"
    with open_writer(path, rows.schema) as writer:
        writer.write_table(rows)
    assert decode(path.read_bytes(), "here", "rollouts").equals(rows)
    with pytest.raises(SchemaError, match="here: the 65,536 bytes from 65,536 on do not match their digest"):
        decode(flip(path.read_bytes(), 8 * 70_000), "here", "rollouts")


def test_a_file_of_another_writer_is_read_as_it_is(rows: pa.Table) -> None:
    sink = io.BytesIO()
    pq.write_table(rows, sink)
    assert DIGESTS_KEY not in pq.read_metadata(sink).metadata
    assert decode(sink.getvalue(), "here", "rollouts").equals(rows)


def test_text_that_is_no_utf8_is_named_with_its_column(tmp_path: Path, run_config: RunConfig, rows: pa.Table) -> None:
    """Of another writer, so that no digest tells. Arrow itself hands such text out."""
    root, sink = put_run(str(tmp_path / "run"), run_config), io.BytesIO()
    pq.write_table(rows, sink, compression="none", use_dictionary=False)
    for text, column in ((b"example-3", "group_key"), (b"cat number", "messages")):
        root.put(NAME, sink.getvalue().replace(text, b"\xff" + text[1:]))
        with pytest.raises(SchemaError, match=f"w0-0.parquet: column '{column}' holds text that is not UTF-8"):
            read_columns(root, NAME, [column])
        with pytest.raises(SchemaError, match=f"column '{column}'"):
            read_content(io.BytesIO(root.read(NAME)), NAME)
