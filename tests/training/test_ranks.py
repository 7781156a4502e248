"""One rank against two: the same data, real processes under torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import run_ranks
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("train_on_ranks.py")


def train_on_two_ranks(root, out, *arguments):
    out.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command += [root.url, str(out), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return read_ranks(out)


def read_ranks(out):
    return [json.loads((out / f"rank={rank}.json").read_text()) for rank in (0, 1)]


def saved(root, attempt_id, step, file):
    return load_file(f"{root.path}/checkpoints/attempt={attempt_id}/step={step}/{file}")


def assert_same_metrics(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def assert_same_weights(found, expected):
    for name in expected:
        # A key's bias shifts all scores of a query alike, so its gradient is rounding noise, of which Adam
        # takes only the sign.
        if not name.endswith("k_proj.bias"):
            assert torch.allclose(found[name], expected[name], rtol=0, atol=2e-5), name


@pytest.fixture
def on_one_rank(run_root, train_here):
    return train_here(run_root.url, attempt_id=1, steps=range(1, 6))


def test_two_ranks_train_as_one_does_and_each_resumes_the_other(tmp_path, run_root, train_here, on_one_rank):
    ranks = train_on_two_ranks(run_root, tmp_path / "whole", 2, 1, 5)
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    assert_same_metrics(ranks[0]["metrics"], on_one_rank)
    for step in (3, 5):
        one, two = (saved(run_root, attempt_id, step, "model.safetensors") for attempt_id in (1, 2))
        assert_same_weights(two, one)
    assert saved(run_root, 2, 5, "random.safetensors").keys() >= {"cpu.0", "cpu.1"}

    # what rank 0 decides, and what it fails with, reaches rank 1
    assert [seen["received"] for seen in ranks] == ["from rank 0"] * 2
    assert [seen["error"] for seen in ranks] == ["StalledError: nothing arrived: at all"] * 2
    # what one rank alone fails with stops both
    assert [seen["error_of_rank_1"] for seen in ranks] == ["nothing arrived: here"] * 2
    # a nan that only rank 1 saw stops both, with the same words
    assert [seen["waited"] for seen in ranks] == ["done"] * 2
    assert ranks[0]["nan"] == ranks[1]["nan"]
    assert ranks[0]["nan"].startswith("loss and grad_norm not finite")

    # two ranks wrote step 3; one goes on from it
    resumed = train_here(run_root.url, attempt_id=3, steps=range(4, 6), resume_from=(2, 3))
    assert_same_metrics(resumed, on_one_rank[3:])

    # one rank wrote step 3; two go on from it
    out = tmp_path / "resumed"
    run_ranks(2, [SCRIPT, run_root.url, out, 4, 4, 5, "1:3"], out)
    assert_same_metrics(read_ranks(out)[0]["metrics"], on_one_rank[3:])


def test_resuming_on_as_many_ranks_repeats_the_steps_bit_for_bit(run_root, train_here, on_one_rank):
    resumed = train_here(run_root.url, attempt_id=2, steps=range(4, 6), resume_from=(1, 3))
    assert resumed == on_one_rank[3:]
    for file in ("model.safetensors", "optimizer.safetensors", "random.safetensors"):
        first, second = (saved(run_root, attempt_id, 5, file) for attempt_id in (1, 2))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
