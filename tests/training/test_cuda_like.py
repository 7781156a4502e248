"""A step with a GPU's defaults (bfloat16, checkpointing, compile, costs), on two CPU ranks, beside a plain one."""

import json
from pathlib import Path

import pytest
from forks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("cuda_like_on_ranks.py")
BFLOAT16 = 2**-8
"""Largest relative error of one rounding to bfloat16."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(2, [SCRIPT, out], out / "logs", timeout_s=800)
    return [json.loads((out / f"rank={rank}.json").read_text()) for rank in (0, 1)]


def test_the_loss_and_the_gradient_norm_are_those_of_a_plain_step(seen):
    for of_rank in seen:
        plain, cuda_like = of_rank["plain"], of_rank["cuda_like"]
        assert cuda_like["loss"] == pytest.approx(plain["loss"], rel=BFLOAT16)
        assert cuda_like["grad_norm"] == pytest.approx(plain["grad_norm"], rel=BFLOAT16)
        assert cuda_like["loss"] != plain["loss"]  # it was computed in another dtype


def test_each_gradient_is_within_a_few_roundings_of_the_plain_one(seen):
    # A gradient passes two layers of about six products, each rounded once: sqrt(12) roundings, if independent.
    # A key's bias has no gradient but noise (test_ranks.py). Only rank 0 has whole gradients.
    apart = {name: value for name, value in seen[0]["gradients"].items() if not name.endswith("k_proj.bias")}
    assert len(apart) > 10
    assert max(apart.values()) < 8 * BFLOAT16, max(apart, key=apart.get)
