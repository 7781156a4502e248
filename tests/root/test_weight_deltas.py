"""Differences between safetensors files: lossless for any dtype and any bits, and small where few words change."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.root.weights import weight_folders
from ludic.root.weights.weight_folders import apply_delta, write_delta

ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "F8_E4M3": 1, "I8": 1, "BOOL": 1}


def write_file(path: Path, tensors: dict[str, tuple[str, bytes]]) -> Path:
    """Write a safetensors file by its format, so that no library stands between the test and the bits."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, values) in tensors.items():
        shape = [len(values) // ITEM_BYTES[dtype]]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def size_of_delta(folder: Path, old: dict[str, tuple[str, bytes]], new: dict[str, tuple[str, bytes]]) -> int:
    """Write both files and the difference, apply it, and compare the result bit for bit."""
    before, after = write_file(folder / "old", old), write_file(folder / "new", new)
    write_delta(before, after, folder / "delta")
    shutil.copy(before, folder / "result")
    apply_delta(folder / "delta", folder / "result")
    assert (folder / "result").read_bytes() == after.read_bytes()
    return (folder / "delta").stat().st_size


@st.composite
def two_versions(draw):
    """Tensors of any dtype and length, zero included, and a version of them with any bits changed."""
    old, new = {}, {}
    for index, dtype in enumerate(draw(st.lists(st.sampled_from(sorted(ITEM_BYTES)), max_size=5))):
        num_bytes = ITEM_BYTES[dtype] * draw(st.integers(0, 40))
        values = np.array(draw(st.lists(st.integers(0, 255), min_size=num_bytes, max_size=num_bytes)), np.uint8)
        changed = values.copy()
        for place in draw(st.sets(st.integers(0, num_bytes - 1), max_size=num_bytes)) if num_bytes else ():
            changed[place] = draw(st.integers(0, 255))
        old[f"t{index}"], new[f"t{index}"] = (dtype, values.tobytes()), (dtype, changed.tobytes())
    return old, new


@pytest.mark.slow
@given(versions=two_versions(), segment_words=st.integers(1, 50))
def test_any_bits_of_any_dtype_come_back(versions, segment_words, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_folders, "_SEGMENT_WORDS", segment_words)
        size_of_delta(tmp_path_factory.mktemp("delta"), *versions)


def test_nan_payloads_infinities_and_signed_zeros_come_back(tmp_path):
    # bfloat16 bits: quiet NaN with two payloads, signalling NaN, inf, -inf, 0, -0, the smallest number
    bits = np.array([0x7FC0, 0x7FC1, 0x7F81, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001], "<u2")
    size_of_delta(tmp_path, {"w": ("BF16", bits.tobytes())}, {"w": ("BF16", bits[::-1].tobytes())})
    size_of_delta(tmp_path, {"w": ("BF16", bytes(16))}, {"w": ("BF16", bits.tobytes())})


def test_equal_files_take_a_few_hundred_bytes_whatever_their_size(tmp_path):
    tensors = {"w": ("BF16", np.random.default_rng(0).bytes(2_000_000))}
    assert size_of_delta(tmp_path, tensors, tensors) < 1000


def test_one_change_in_a_hundred_by_one_unit_takes_one_or_two_bytes_a_change(tmp_path):
    random = np.random.default_rng(0)
    old = random.integers(0, 2**16, 1_000_000, dtype=np.uint16)
    new = old + (random.random(len(old)) < 0.01) * random.choice([1, -1], len(old)).astype(np.uint16)
    num_changed = int((old != new).sum())
    size = size_of_delta(tmp_path, {"w": ("BF16", old.tobytes())}, {"w": ("BF16", new.tobytes())})
    assert num_changed < size < 2 * num_changed


def test_random_new_bits_take_no_more_than_the_whole_file(tmp_path):
    random = np.random.default_rng(0)
    old, new = ({"w": ("F32", random.bytes(400_000))} for _ in range(2))
    assert size_of_delta(tmp_path, old, new) < 402_000


@pytest.mark.parametrize(
    "other",
    [
        {"w": ("F16", bytes(8))},
        {"w": ("BF16", bytes(10))},
        {"v": ("BF16", bytes(8))},
        {"w": ("BF16", bytes(8)), "v": ("BF16", b"")},
    ],
    ids=["dtype", "length", "name", "number"],
)
def test_other_tensors_have_no_difference(tmp_path, other):
    old, new = write_file(tmp_path / "old", {"w": ("BF16", bytes(8))}), write_file(tmp_path / "new", other)
    with pytest.raises(ValueError, match="new holds other tensors than before"):
        write_delta(old, new, tmp_path / "delta")


def test_bytes_that_no_tensor_has_are_refused(tmp_path):
    files = [write_file(tmp_path / name, {"w": ("BF16", bytes(8))}) for name in ("old", "new")]
    files[1].write_bytes(files[1].read_bytes() + b"x")
    with pytest.raises(ValueError, match="new is longer than its header says"):
        write_delta(*files, tmp_path / "delta")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_words": 10**15}, "impossible sizes"),
        ({"word_bytes": 3}, "impossible sizes"),
        ({"num_changed": -1}, "impossible sizes"),
        ({"num_words": 99}, "the file ends after"),
        ({"start": 10**9}, "the file ends after 0"),
        ({"differences": b"no zstd"}, "can't be decompressed"),
        ({"gaps": pa.compress(np.array([9], "<u4").tobytes(), codec="zstd", asbytes=True)}, "beyond the end"),
    ],
)
def test_a_forged_difference_is_refused(tmp_path, changes, problem):
    old = write_file(tmp_path / "old", {"w": ("BF16", bytes(16))})
    new = write_file(tmp_path / "new", {"w": ("BF16", bytes(14) + b"\1\0")})
    write_delta(old, new, tmp_path / "delta")
    with pa.ipc.open_stream((tmp_path / "delta").read_bytes()) as stream:
        (row,) = stream.read_all().to_pylist()
        schema = stream.schema
    with pa.OSFile(str(tmp_path / "forged"), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.RecordBatch.from_pylist([row | changes], schema=schema))
    with pytest.raises(ValueError, match=problem):
        apply_delta(tmp_path / "forged", old)
