"""A tiny model of one of the newest families learns by `ludic run`; `python -m benchmarks.family_learning` has all."""

from pathlib import Path

import pytest

from benchmarks.family_learning import _learn


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_of_short_convolutions_and_attention_learns(tmp_path: Path) -> None:
    layers, first, last, *_ = _learn("lfm2", "transformers", 16, tmp_path)
    assert layers == "4"
    assert float(last) > 5 * float(first)
