"""`ludic demo` and a replay of it, each in processes of its own: the same weights bit for bit."""

import os
import subprocess
import sys

import pytest
from tiny_runs import final_weights

from ludic.root.attempts import read_attempt
from ludic.root.root import Root

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def ludic(folder, *args):
    # Nothing shares out the cores here but `ludic run` itself, as in a user's shell.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    result = subprocess.run(
        [sys.executable, "-m", "ludic", *args], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stderr


def test_a_replay_of_the_demo_has_its_weights_bit_for_bit(tmp_path):
    ludic(tmp_path, "demo", "--root", "A", "--num-steps", "4")
    errors = ludic(tmp_path, "train", "B", "--replay-batches", "A")
    assert "last bits" not in errors
    trained, again = (Root.open(str(tmp_path / name)) for name in "AB")
    assert read_attempt(again, 1).numerics == read_attempt(trained, 1).numerics
    weights = final_weights(trained)
    assert all((tensor == weights[name]).all() for name, tensor in final_weights(again).items())
