"""Logprobs of a reference that ludic kept when the table was new (reference 1.0) are found as they were written.

The store was written by `write_reference` when that version came, and is never written again.
"""

from pathlib import Path

import pytest

from ludic.root.maintenance.verify import check_root
from ludic.root.root import Root
from ludic.root.rows.tables import read_reference, read_reference_index

MODEL = "00112233445566778899aabbccddeeff"
LENGTHS = [3, 1, 20, 7] * 10
"""Of rollouts rollout-0 to rollout-39; token k of rollout i has logprob -(i + k / 32)."""


@pytest.fixture
def root() -> Root:
    return Root.open(str(Path(__file__).parent / "reference-v1.0"))


def test_all_rows_are_found_with_what_they_are_of(root):
    index = read_reference_index(root, MODEL)
    found = {row["rollout_id"]: row for row in index.to_pylist()}
    assert {name: row["response_length"] for name, row in found.items()} == {
        f"rollout-{i}": length for i, length in enumerate(LENGTHS)
    }
    assert {row["temperature"] for row in found.values()} == {0.5}
    for i, length in enumerate(LENGTHS):
        row = found[f"rollout-{i}"]
        (logprobs,) = read_reference(root, row["file"], [row["row"]])
        assert logprobs.tolist() == [-(i + k / 32) for k in range(length)]


def test_verify_finds_nothing_wrong(root):
    assert list(check_root(root).findings) == []
