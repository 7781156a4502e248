"""Workers that are killed in the middle of their agents' episodes: the next life goes on from the stored calls."""

import json
import random
import signal
import time
from pathlib import Path

import pytest
from forks import Forked
from tiny_models import committed_rows, make_model, publish

from benchmarks.killed_agents import AGENT, NUM_CALLS
from ludic.app.launch.roots import create_run
from ludic.root.root import Root
from ludic.run.config import RunConfig
from ludic.settings.consent import CodeSettings
from ludic.training.config import TrainConfig

pytestmark = pytest.mark.slow

NUM_KILLS, IN_FLIGHT, NUM_TOKENS = 4, 2, 8

# Writes what it samples to a file before it returns it: the oracle, which outlives the worker.
ENGINE = f"""
import asyncio
import json
import os
from pathlib import Path

import numpy as np

from ludic.engines.engine import Completion
from ludic.records.rollout import WeightSpan


class Words:
    name, max_length, repeats_in_any_batch, max_batch = "words 1", 100_000, True, 64

    def __init__(self, folder, *, version, **options):
        self.policy_version = version

    async def generate(self, request):
        await asyncio.sleep(0.01)
        tokens = np.random.default_rng(request.seed).integers(10, 60, {NUM_TOKENS}, np.int32)
        with Path(__file__).with_name("journal.jsonl").open("a") as journal:
            journal.write(json.dumps(tokens.tolist()) + "\\n")
        return Completion(
            tokens=tokens,
            columns={{"response_logprobs": np.full(len(tokens), -0.5, np.float32)}},
            finish_reason="length",
            weight_versions=(WeightSpan(version=self.policy_version, start=0, end=len(tokens)),),
        )

    def load_weights(self, folder, version):
        self.policy_version = version
"""


def start(root: Root, folder: Path, *flags: str) -> Forked:
    words = ["ludic", "worker", root.url, "--slot", "0", "--engine", f"{folder}/words.py:Words"]
    words += ["--in-flight", str(IN_FLIGHT), "--no-follow-budget", *flags]
    return Forked(words, folder / f"{time.monotonic_ns()}.log")


def test_a_kill_costs_the_calls_in_flight_alone(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "words.py").write_text(ENGINE)
    model = make_model(tmp_path / "model", seed=1)
    run = RunConfig(
        model=model, env=("moar_cats",), agent=f"{tmp_path}/agent.py:run", group_size=2, max_tokens=NUM_TOKENS
    )
    root = create_run(str(tmp_path / "run"), run, TrainConfig(), CodeSettings())
    publish(root, model, budget=10**6)
    chance, journal = random.Random(3), tmp_path / "journal.jsonl"
    journal.touch()
    for _ in range(NUM_KILLS):
        process = start(root, tmp_path)
        wanted = len(journal.read_text().splitlines()) + chance.randint(5, 30)
        while len(journal.read_text().splitlines()) < wanted:
            assert process.poll() is None, process.printed()
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    last = start(root, tmp_path, "--num-groups", "3")  # those that are open, of which there are at most two
    assert last.wait(timeout=120) == 0, last.printed()
    rows = committed_rows(root, "episode_id", "num_turns", "error", "response_tokens", "action_mask")
    assert {(row["num_turns"], row["error"]) for row in rows} == {(NUM_CALLS, None)}
    assert len({row["episode_id"] for row in rows}) == len(rows)
    in_rows = sum(sum(row["action_mask"]) for row in rows)
    assert in_rows == len(rows) * NUM_CALLS * NUM_TOKENS
    sampled = sum(len(json.loads(line)) for line in journal.read_text().splitlines())
    assert sampled - in_rows <= NUM_KILLS * IN_FLIGHT * NUM_TOKENS
