"""Sharded models on two real ranks against one whole model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("model_on_ranks.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each of the two ranks found."""
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, str(out)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"rank={rank}.json").read_text()) for rank in (0, 1)]


# Gemma takes its norms in float32, whatever the rest is in.
@pytest.mark.slow
@pytest.mark.parametrize(("family", "tolerance"), [("qwen2", 1e-12), ("qwen3", 1e-12), ("gemma2", 1e-6)])
def test_two_ranks_have_the_logprobs_and_gradients_of_the_whole_model(seen, family, tolerance):
    """Embeddings are tied in qwen2 and gemma2; gemma2 caps its logits."""
    for of_rank in seen:
        assert of_rank[family]["logprobs"] < 1e-12
        assert of_rank[family]["gradients"] < tolerance
