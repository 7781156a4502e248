"""Sharded models on two real ranks against one whole model."""

import json
from pathlib import Path

import pytest
from forks import run_ranks

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("model_on_ranks.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each of the two ranks found."""
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(2, [SCRIPT, out], out)
    return [json.loads((out / f"rank={rank}.json").read_text()) for rank in (0, 1)]


# Gemma takes its norms in float32, whatever the rest is in.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "of_logprobs", "of_gradients"),
    [
        ("qwen2", 1e-12, 1e-12),
        ("qwen3", 1e-12, 1e-12),
        ("gemma2", 1e-12, 1e-6),
        # Their layers run on one sequence after the other, of which the ranks have 3 and 2; in part in float32.
        ("qwen3_5_text", 1e-4, 1e-3),
        ("granite_swa", 1e-4, 1e-3),
        ("qwen3_moe, replayed", 1e-4, 1e-3),
    ],
)
def test_two_ranks_have_the_logprobs_and_gradients_of_the_whole_model(seen, family, of_logprobs, of_gradients):
    """Embeddings are tied in qwen2 and gemma2; gemma2 caps its logits."""
    for of_rank in seen:
        assert of_rank[family]["logprobs"] < of_logprobs
        assert of_rank[family]["gradients"] < of_gradients
