"""Whole runs whose workers sample with vLLM in their process."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
from tiny_models import committed_rows, make_model, publish

import ludic
from ludic.app.demos.calculator import open_demo as open_agents_demo
from ludic.app.demos.calculator import rl_config, warm_start
from ludic.app.demos.words import OTHER_WORDS, keep_new_model
from ludic.app.launch.config import LaunchConfig
from ludic.app.launch.local import launch
from ludic.app.launch.sample import work
from ludic.engines.config import EngineConfig
from ludic.environments.moar_cats import WORDS
from ludic.models.tiny import make_tiny_model
from ludic.rollouts.config import WorkerConfig
from ludic.root.catalogue import MODEL
from ludic.root.root import Root
from ludic.root.weights.policies import latest_policy
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root

pytestmark = pytest.mark.slow

NUM_STEPS = 30
# Those of `ludic demo`, besides the engine.
SETTINGS = (
    f"--engine vllm --device cpu --num-steps {NUM_STEPS} --learning-rate 4e-3 --schedule cosine --is-ratio-cap 2 "
    "--max-tokens-per-micro-batch 512 --checkpoint-every 20"
)


def new_moar_cats(url: str) -> Root:
    """The run of `ludic demo`, except that it has one worker, and that no batch is planned ahead.

    So the worker samples with every version.
    """
    run = RunConfig(
        model=f"{url}/{MODEL.folder}",
        env=("moar_cats",),
        num_workers=1,
        batches_ahead=0,
        max_tokens=32,
        accept_incomplete=True,
    )
    root = create_root(url, run)
    keep_new_model(root, partial(make_tiny_model, words=[*WORDS, OTHER_WORDS]))
    return root


@pytest.mark.timeout(900)
def test_moar_cats_is_learnt_with_a_swap_at_every_version(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    root = new_moar_cats(url)
    run = forks.ludic("run", url, *SETTINGS.split(), folder=tmp_path, timeout_s=880)
    assert run.returncode == 0, run.stderr

    latest = latest_policy(root)
    assert latest is not None
    assert latest.version == NUM_STEPS
    con = ludic.connect(root)
    # How far a run gets is shown by tests/post_training/test_async_train.py, with more steps.
    mean = "select avg(episode_reward) from rollouts where policy_version between ? and ?"
    (first,), (last,) = (con.execute(mean, span).fetchone() for span in ([0, 0], [NUM_STEPS - 6, NUM_STEPS]))
    assert last >= 5 * first
    query = "select list_sort(list(distinct policy_version)) from rollouts group by worker_id"
    [(versions,)] = con.execute(query).fetchall()
    # While vLLM starts, the trainer asks for more groups of version 0, and trains on all of them before it waits. So
    # the first versions may have no rollouts of their own; from then on, each has.
    assert versions[0] == 0
    assert max(set(range(NUM_STEPS)) - {*versions}, default=0) < 15
    assert len(versions[1:]) > 0.8 * (NUM_STEPS - versions[1])
    assert ludic.open(url).verify().findings == []


def rows_through(engine: str, folder: str, tmp_path: Path) -> list[dict[str, Any]]:
    """The rows that a worker with this engine stores of four groups of two."""
    # Of the most likely token alone; runs refuse temperature 0, since nothing can be learned from it.
    sampling = {"group_size": 2, "max_tokens": 24, "accept_incomplete": True, "top_k": 1}
    run = RunConfig(model=folder, env=("addition",), **sampling)
    root = create_root(str(tmp_path / engine), run)
    publish(root, folder, budget=4)
    with forks.forked_vllm():
        work(root, WorkerConfig(slot=0, num_groups=4), threading.Event(), engine=engine, device="cpu")
    return committed_rows(
        root, "prompt_tokens", "response_tokens", "response_logprobs", "finish_reason", "policy_version"
    )


def test_greedy_rows_are_those_of_the_transformers_engine(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", seed=3)
    found, wanted = (rows_through(engine, folder, tmp_path) for engine in ("vllm", "transformers"))
    assert len(found) == 8
    for row, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(row.pop("response_logprobs"), other.pop("response_logprobs"), atol=1e-5, rtol=0)
        assert row == other


@pytest.mark.timeout(600)
def test_episodes_with_tools_after_a_warm_start(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    root = open_agents_demo(url)
    warm_start(root, num_problems=64, num_heldout=8)
    con = ludic.connect(root)
    (warm_steps,) = con.execute("select max(step) from batches").fetchall()[0]
    launch(root, rl_config(warm_steps + 2), LaunchConfig(), EngineConfig(engine="vllm"))

    run = ludic.open(url)
    turns = run.sql("""
        select len(agent_steps) as turns, bool_and(len(response_logprobs) = len(response_tokens)) as ok
        from rollouts where worker_id not like 'import-%' group by all
    """)
    assert turns["ok"].all()
    assert (turns["turns"] > 1).any(), turns  # some called the calculator, and went on with its result
    assert run.verify().findings == []
