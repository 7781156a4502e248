"""Every objective teaches a tiny model MoarCats, through store, planner, ledger, stream and gradient steps of a run.

The advantages of the other algorithms with the same objective are worked by hand in tests/root/sql.

Worker and trainer take turns in one process: a batch is sampled with the newest weights and trained on in the next
step, so that a run is the same every time. Every second step is off-policy. With a loss of the wrong sign the model
unlearns its few cats.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

import ludic
from ludic.agents.agent import Agent
from ludic.engines.transformers_engine import TransformersEngine
from ludic.environments.moar_cats import WORDS
from ludic.models.chat import load_tokenizer
from ludic.models.tiny import make_tiny_model
from ludic.records.rollout import RolloutGroup
from ludic.rollouts.sampler import GroupSampler
from ludic.root.root import Root
from ludic.root.rows.writer import RolloutWriter
from ludic.root.weights.policies import fetch_policy, latest_policy
from ludic.run.config import RunConfig
from ludic.run.run_json import create_root, run_of
from ludic.settings.kinds import ALGORITHM
from ludic.training.config import TrainConfig
from ludic.training.presets import load_algorithm
from ludic.training.trainer import train

MAX_TOKENS = 16
NUM_STEPS = 10
STEPS_PER_VERSION = 2
MOST_BATCHES = 8
"""Sampled for one step before the model counts as one that unlearns; the first step needs 2."""

# Of each objective one; distillation learns no reward, and test_policy_objectives.py shows what it does.
ALGORITHMS = ("cispo", "dpo", "dppo", "dr_grpo", "gmpo", "gspo", "ipo", "orpo", "rloo", "sapo", "sft", "vespo")

# What a run must add to an algorithm's own settings.
OWN_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "dr_grpo": {"constant_tokens": MAX_TOKENS},
    # the loss is least where a pair's gain is 1 / (2 x 0.02) = 25 nats; 5 nats, the preset's, end the learning early
    "ipo": {"dpo_beta": 0.02},
    "sft": {"filters": ("drop_not_best_of_group",)},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tiny") / "model")
    make_tiny_model(folder, WORDS, max_position_embeddings=64)
    return folder


def new_root(url: str, model: str) -> Root:
    sizes = {"group_size": 8, "groups_per_batch": 8, "max_tokens": MAX_TOKENS, "steps_per_version": STEPS_PER_VERSION}
    # A model of random weights never ends its answers by itself.
    return create_root(url, RunConfig(model=model, env=("moar_cats",), accept_incomplete=True, **sizes))


class Worker:
    """Samples and stores what the trainer needs for a step, whenever it is told to."""

    def __init__(self, root: Root, cache: Path, is_useful: Callable[[RolloutGroup], bool]) -> None:
        self._root, self._cache, self._is_useful, folder = root, cache, is_useful, root.record.model
        self._engine = TransformersEngine(folder, device="cpu")
        agent = Agent(engine=self._engine, tokenizer=load_tokenizer(folder), model=folder)
        self._sampler = GroupSampler.of_run(run_of(root), agent)
        self._numbers, self._num_ready = count(), 0

    def follow_and_work(self, step: int, row: Mapping[str, Any]) -> None:
        """With the weights that the trainer published last, which another thread writes while this one reports."""
        version = step // STEPS_PER_VERSION
        while latest_policy(self._root).version < version:
            time.sleep(0.01)
        self._engine.load_weights(fetch_policy(self._root, version, self._cache), version)
        self.work(step)

    def work(self, step: int) -> None:
        """Groups until a batch of them is useful, for the step after this one."""
        worker_id, size = f"w0-{step}", run_of(self._root).groups_per_batch
        with RolloutWriter(self._root, worker_id) as writer:
            for _ in range(MOST_BATCHES):
                batch = self._sampler.sample(list(islice(self._numbers, size)), worker_id)
                writer.append(batch)
                self._num_ready += sum(map(self._is_useful, batch.groups))
                if self._num_ready >= size:
                    self._num_ready -= size
                    return
        raise AssertionError(f"after step {step}, {MOST_BATCHES} batches had no variance: the model unlearns")


def has_variance(group: RolloutGroup) -> bool:
    return len({rollout.episode_reward for rollout in group.rollouts}) > 1


def rewards_of_versions(root: Root) -> list[float]:
    query = "select avg(episode_reward) from rollouts group by policy_version order by policy_version"
    return [reward for (reward,) in ludic.connect(root).execute(query).fetchall()]


def train_algorithm(name: str, root: Root, cache: Path, **settings: Any) -> None:
    config = TrainConfig.of(
        **{**load_algorithm(name), **OWN_SETTINGS.get(name, {}), **settings},
        num_steps=NUM_STEPS,
        learning_rate=1e-2,
        max_tokens_per_micro_batch=512,
        checkpoint_every=None,
        rollout_timeout_s=20,
        device="cpu",
    )
    drops_equal = "drop_zero_variance_groups" in config.batch.filters
    worker = Worker(root, cache, has_variance if drops_equal else lambda group: True)
    worker.work(0)
    assert train(root, config, threading.Event(), worker.follow_and_work) == NUM_STEPS


def test_one_algorithm_of_each_objective_is_tried() -> None:
    def objectives(names: Iterable[str]) -> set[str]:
        return {load_algorithm(name)["objective"] for name in names}

    assert objectives(ALGORITHMS) == objectives(ALGORITHM.names())
    assert len(objectives(ALGORITHMS)) == len(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_learns(name: str, tmp_path: Path, model: str) -> None:
    root = new_root(str(tmp_path / "run"), model)
    reference = {"reference": model} if load_algorithm(name)["objective"] in ("dpo", "ipo") else {}
    train_algorithm(name, root, tmp_path / "weights", **reference)
    rewards = rewards_of_versions(root)
    assert len(rewards) == NUM_STEPS // STEPS_PER_VERSION + 1
    assert rewards[-1] + rewards[-2] > 4 * (rewards[0] + rewards[1])
