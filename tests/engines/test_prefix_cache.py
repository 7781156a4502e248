"""What vLLM itself counts of its prefix cache, in process and on a server: turns, groups, and new weights."""

import time
import urllib.request
from collections.abc import Callable

import numpy as np
import pytest
from engine_requests import a_request

from ludic.base.installed import is_installed
from ludic.engines.engine import Engine, GenerationRequest, generate_all

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed("vllm"), reason="vllm is not installed; `make test-vllm` runs these tests"),
]

BLOCK = 128
"""Tokens of a block on the CPU."""
Counters = Callable[[], tuple[int, int]]
"""Returns the tokens of all prompts so far, and those of them that were in the cache."""


def counters_in_process() -> tuple[int, int]:
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    found = {each.name: each.value for each in get_metrics_snapshot() if isinstance(each, Counter)}
    return found["vllm:prefix_cache_queries"], found["vllm:prefix_cache_hits"]


def counters_of(url: str) -> tuple[int, int]:
    lines = urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines()
    pairs = [line.partition("{")[::2] for line in lines if line.startswith("vllm:prefix_cache_")]
    found = {name: int(float(rest.rpartition(" ")[2])) for name, rest in pairs}
    return found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]


@pytest.fixture(params=["vllm", "server"])
def counted(request: pytest.FixtureRequest, model_folder: str) -> tuple[Engine, Counters]:
    """An engine, and its counters. In process vllm counts only if it is told to, which costs time at each step."""
    if request.param == "vllm":
        engine = request.getfixturevalue("start_vllm")(model_folder, disable_log_stats=False)
        return engine, counters_in_process
    url, engine = (request.getfixturevalue(name) for name in ("server_url", "server"))
    engine.load_weights(model_folder, 0)
    return engine, lambda: counters_of(url)


def test_turns_of_an_episode_and_members_of_a_group_hit_the_cache_until_weights_change(
    counted: tuple[Engine, Counters], other_weights: str
) -> None:
    engine, counters = counted
    rng = np.random.default_rng(7)

    def hits(requests: list[GenerationRequest]) -> tuple[int, list[np.ndarray]]:
        """Return tokens that were in the cache, and each prompt with its completion but the last token."""
        before = counters()
        found = generate_all(engine, requests)
        wanted = before[0] + sum(len(request.prompt_tokens) for request in requests)
        until = time.monotonic() + 20
        while counters()[0] != wanted:  # they follow the answers
            assert time.monotonic() < until, (before, counters())
            time.sleep(0.05)
        pairs = zip(requests, found, strict=True)
        return counters()[1] - before[1], [np.concatenate([r.prompt_tokens, c.tokens[:-1]]) for r, c in pairs]

    def next_turn(computed: np.ndarray) -> np.ndarray:
        return np.concatenate([computed, rng.integers(3, 64, 20).astype(np.int32)])

    def whole_blocks(tokens: np.ndarray) -> int:
        return len(tokens) // BLOCK * BLOCK

    prompt = rng.integers(3, 64, 300).astype(np.int32)
    group = [a_request(prompt, seed=seed, max_tokens=100) for seed in range(8)]
    of_group, computed = hits(group)
    assert of_group == 7 * 2 * BLOCK  # the first member computes them
    turns = [a_request(next_turn(tokens), seed=1) for tokens in computed]
    assert max(map(whole_blocks, computed)) == 3 * BLOCK  # the third block has tokens that were sampled
    assert hits(turns)[0] == sum(map(whole_blocks, computed))

    engine.load_weights(other_weights, 1)
    assert hits(turns[:1])[0] == 0
    assert hits(turns[:1])[0] == whole_blocks(turns[0].prompt_tokens)
