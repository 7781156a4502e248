"""Kill a worker in the middle of its agents' episodes: how many tokens are sampled twice?

    python -m benchmarks.killed_agents

An episode is 20 calls of an agent in plain HTTP. A worker plays four at a time before an engine that samples 16 tokens
in 20 ms, and is killed (SIGKILL) at random moments; its next life goes on. Once with agent_replay, by which the calls
of an unfinished episode are answered from the store, and once without it, by which such an episode starts again. At the
end each episode is there once, with 20 turns, and each of its calls is in one row.
"""

import multiprocessing
import random
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

import ludic
from benchmarks.measure import print_table
from ludic.app import OTHER_WORDS
from ludic.environments import WORDS
from ludic.models import make_tiny_model
from ludic.root import Root
from ludic.root.rows import read_all_calls
from ludic.root.weights import publish_policy
from ludic.run import RunConfig, create_root
from ludic.settings import run_script

NUM_CALLS, MAX_TOKENS, GROUP_SIZE = 20, 16, 4
PRELOADED = [
    "ludic.app.launch.sample",
    "ludic.rollouts.worker",
    "ludic.rollouts.program_gateway",
    "ludic.rollouts.programs",
    "ludic.gateway.server",
    "httpx2",
    "transformers",
    "benchmarks.killed_agents",
]
"""Modules of a worker, imported once and not by each life. This one too: a new process runs its imports again."""
AGENT = f"""
import httpx2

async def run(example, base_url, api_key, model):
    messages = list(example["messages"])
    headers = {{"Authorization": f"Bearer {{api_key}}"}}
    async with httpx2.AsyncClient(trust_env=False, verify=False, headers=headers, timeout=None) as http:
        for number in range({NUM_CALLS}):
            said = await http.post(f"{{base_url}}/chat/completions", json={{"model": model, "messages": messages}})
            said.raise_for_status()
            messages += [said.json()["choices"][0]["message"], {{"role": "user", "content": "and then"}}]
    return messages[-2]["content"]
"""

ENGINE = f"""
import asyncio
import numpy as np
from ludic.engines.engine import Completion
from ludic.records.rollout import WeightSpan

class Words:
    name, max_length, repeats_in_any_batch, max_batch = "words 1", 100_000, True, 64

    def __init__(self, folder, *, version, **options):
        self.policy_version = version

    async def generate(self, request):
        await asyncio.sleep(0.02)
        tokens = np.random.default_rng(request.seed).integers(10, 200, {MAX_TOKENS}, np.int32)
        return Completion(
            tokens=tokens,
            columns={{"response_logprobs": np.full(len(tokens), -0.5, np.float32)}},
            finish_reason="length",
            weight_versions=(WeightSpan(version=self.policy_version, start=0, end=len(tokens)),),
        )

    def load_weights(self, folder, version):
        self.policy_version = version
"""


def main(quick: bool = False, kills: int = 50, seed: int = 0) -> None:
    """Print a table with a row for each way to go on after a kill.

    Args:
        quick: Kill twice, to check that the benchmark works.
        kills: Number of kills.
        seed: Decides the moments of the kills.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, replays in (("go on from the stored calls", True), ("start the episode again", False)):
            root = _make_root(Path(folder) / f"replay-{replays}", replays)
            began = time.perf_counter()
            found = kill_often(root, 2 if quick else kills, seed)
            cost = found["sampled"] - found["in_rows"]
            rows.append(
                [
                    name,
                    f"{found['kills']}",
                    f"{found['episodes']}",
                    f"{found['in_rows']:,}",
                    f"{cost:,}",
                    f"{cost / found['kills']:.0f}",
                    f"{found['unfinished']} ({found['unfinished'] / found['kills']:.1f})",
                    f"{time.perf_counter() - began:.0f}",
                ]
            )
    print_table(
        f"killed_agents: a worker with {GROUP_SIZE} episodes of {NUM_CALLS} calls, killed at random",
        [
            "after a kill",
            "kills",
            "episodes",
            "tokens in rows",
            "sampled beside",
            "a kill",
            "calls cut off (a kill)",
            "s",
        ],
        rows,
    )


def _make_root(folder: Path, replays: bool) -> Root:
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    (folder / "engine.py").write_text(ENGINE)
    model = str(folder / "model")
    make_tiny_model(model, [*WORDS, OTHER_WORDS], seed=0)
    run = RunConfig(
        model=model,
        env=("moar_cats",),
        agent=f"{folder}/agent.py:run",
        agent_replay=replays,
        group_size=GROUP_SIZE,
        max_tokens=MAX_TOKENS,
    )
    root = create_root(str(folder / "run"), run)

    def save(target: Path) -> None:
        for file in Path(model).iterdir():
            (target / file.name).write_bytes(file.read_bytes())

    publish_policy(root, save, step=0, attempt_id=1, parent_version=None, budget=10**6)
    return root


def _work(url: str, num_groups: int | None) -> None:
    from ludic.app.launch.sample import work
    from ludic.rollouts import WorkerConfig

    config = WorkerConfig(slot=0, num_groups=num_groups, in_flight=GROUP_SIZE, follow_budget=False)
    engine = f"{Path(url).parent}/engine.py:Words"
    work(Root.open(url, writable=True), config, threading.Event(), engine=engine)


def kill_often(root: Root, kills: int, seed: int) -> Mapping[str, Any]:
    """Kill workers in the middle of their episodes, let the last one end its groups, and count tokens and calls."""
    context, chance = multiprocessing.get_context("forkserver"), random.Random(seed)
    context.set_forkserver_preload(PRELOADED)
    for _ in range(kills):
        worker = context.Process(target=_work, args=(root.url, None))
        worker.start()
        wanted = len(root.list("calls")) + chance.randint(3, 40)
        while worker.is_alive() and len(root.list("calls")) < wanted:
            time.sleep(0.005)
        assert worker.is_alive(), "the worker ended by itself"
        worker.kill()
        worker.join()
        assert worker.exitcode == -signal.SIGKILL
    worker = context.Process(target=_work, args=(root.url, 2))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    return {**count(root), "kills": kills}


def count(root: Root) -> dict[str, int]:
    """Return episodes, tokens that were sampled and stored, those in rows, and calls that were cut off.

    Raises AssertionError if an episode of the rows lacks a call, or if a call is in two rows.
    """
    query = "select episode_id, num_turns, error, metadata['call_ids'] as call_ids from rollouts"
    listed = ludic.open(root.url).sql(query).to_dicts()
    assert all(row["error"] is None for row in listed), [row["error"] for row in listed if row["error"]][:3]
    assert len({row["episode_id"] for row in listed}) == len(listed), "an episode has two rows"
    assert {row["num_turns"] for row in listed} == {NUM_CALLS}
    in_rows = [call for row in listed for call in row["call_ids"].split()]
    assert len(in_rows) == len({*in_rows}) == NUM_CALLS * len(listed)
    calls = read_all_calls(root)
    answered = calls.filter(pc.equal(calls["event"], "call"))
    lengths = dict(
        zip(answered["call_id"].to_pylist(), pc.list_value_length(answered["response_tokens"]).to_pylist(), strict=True)
    )
    begun = {*calls["call_id"].to_pylist()}
    over = {row["episode_id"] for row in listed}
    # Episodes of groups that are not complete are left for the next life.
    of_rows = {
        call
        for call, episode in zip(calls["call_id"].to_pylist(), calls["episode_id"].to_pylist(), strict=True)
        if episode in over
    }
    return {
        "episodes": len(listed),
        "sampled": sum(length for call, length in lengths.items() if call in of_rows),
        "in_rows": sum(lengths[call] for call in in_rows),
        "unfinished": len((begun - lengths.keys()) & of_rows),
    }


if __name__ == "__main__":
    run_script(main)
