"""Families through vLLM give the trainer's logprobs; `python -m benchmarks.families` judges all of them."""

from pathlib import Path

import pytest
from forks import forked_vllm

from benchmarks.vllm_families import largest_differences, save_small
from ludic.base.installed import is_installed
from ludic.models.families import TOLERANCE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed("vllm"), reason="vllm is not installed; `make test-vllm` runs these tests"),
]


@pytest.mark.parametrize("family", ["gpt_oss", "lfm2"])
def test_experts_sinks_and_states_are_sampled_with_the_trainers_logprobs(tmp_path: Path, family: str) -> None:
    """Before and after the weights are replaced: gpt-oss has experts and sinks, LFM2 short convolutions."""
    folders = [save_small(family, str(tmp_path / str(seed)), seed) for seed in range(2)]
    with forked_vllm():
        assert max(largest_differences(folders)) < TOLERANCE
