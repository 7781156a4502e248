"""A tiny model of one of the newest families learns by `ludic run`; `python -m benchmarks.family_learning` has all."""

import pytest

from benchmarks import family_learning


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_of_short_convolutions_and_attention_learns(capsys: pytest.CaptureFixture[str]) -> None:
    family_learning.main(families=["lfm2"], num_steps=16)
    printed = capsys.readouterr().out
    (row,) = (line for line in printed.splitlines() if "lfm2" in line)
    name, layers, first, last, *_ = row.replace("\u2502", " ").split()
    assert (name, layers) == ("lfm2", "4")
    assert float(last) > 5 * float(first)
