"""A tiny random Qwen2 with tied embeddings, random sequences, and a short training run on any number of ranks."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import create_root, make_model, save_checkpoint
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from ludic.base.distributed import init_distributed, num_ranks, rank, shut_down
from ludic.root.attempts import complete_checkpoints
from ludic.root.root import Root
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run
from ludic.training.batches.packing import MicroBatch, TrainingSequence, assign_pairs, pack
from ludic.training.checkpoint import load_checkpoint
from ludic.training.config import TrainConfig
from ludic.training.model import load_sharded
from ludic.training.step import build_optimizer, train_step

VOCAB_SIZE = 256


def random_model(*, hidden_size: int = 64, tied: bool = True, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """changes: of the configuration."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = Qwen2Config(**sizes | changes, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1)
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config).eval()


def random_sequences(num_sequences: int, seed: int) -> list[TrainingSequence]:
    """Prompts and responses of 1 to 20 tokens; half of them with masked tokens, token advantages, a temperature."""
    rng = np.random.default_rng(seed)
    return [_random_sequence(rng, f"{seed}-{i}", plain=i % 2 == 0) for i in range(num_sequences)]


def _random_sequence(rng: np.random.Generator, rollout_id: str, *, plain: bool) -> TrainingSequence:
    prompt_length, length = rng.integers(1, 21, size=2)
    mask = rng.random(length) < 0.7
    mask[0] = True
    return TrainingSequence(
        rollout_id=rollout_id,
        prompt_tokens=rng.integers(0, VOCAB_SIZE, prompt_length, dtype=np.int32),
        response_tokens=rng.integers(0, VOCAB_SIZE, length, dtype=np.int32),
        columns={
            "response_logprobs": rng.normal(-5.5, 0.2, length).astype(np.float32),
            "action_mask": None if plain else mask,
        },
        advantage=float(rng.normal()) if plain else rng.normal(size=length).astype(np.float32),
        weight=1.0 if plain else 0.5,
        temperature=1.0 if plain else 0.7,
    )


def step_batches(step: int, *, in_pairs: bool = False) -> tuple[list[MicroBatch], int]:
    """This rank's micro-batches of a step, and the action tokens of all ranks; step 2 has one sequence, or pair."""
    sequences = random_sequences((1 if step == 2 else 9) * (2 if in_pairs else 1), seed=step)
    if in_pairs:
        sides = [{"pair_id": f"{i // 2}", "advantage": 1.0 - i % 2 * 2} for i in range(len(sequences))]
        sequences = [replace(s, **side) for s, side in zip(sequences, sides, strict=True)]
    lengths, pair_ids = np.array([s.num_tokens for s in sequences]), [s.pair_id for s in sequences]
    plan = assign_pairs(lengths, pair_ids, num_ranks(), max_tokens_per_micro_batch=64)
    micro_batches = [pack([sequences[i] for i in indexes]) for indexes in plan[rank()]]
    return micro_batches, sum(s.num_action_tokens for s in sequences)


def train(
    url: str,
    *,
    attempt_id: int,
    steps: range,
    resume_from: tuple[int, int] | None = None,
    optimizer: str = "adamw",
    **options: Any,
) -> list[dict]:
    """Metrics of some gradient steps on whatever ranks there are; checkpoints to the root at step 3 and at the end.

    The data of a step depend on nothing but the step; step 2 has one sequence, so that a second
    rank has nothing to do. resume_from is an attempt and a step; options are those of `load_sharded`.
    """
    root, config = Root.open(url), TrainConfig.of(learning_rate=1e-3, weight_decay=0.1, optimizer=optimizer)
    model = load_sharded(root.record.model, init_distributed("cpu"), **options)
    adam = build_optimizer(model, config)
    if resume_from:
        infos = {(info.attempt_id, info.step): info for info in complete_checkpoints(root)}
        load_checkpoint(root, infos[resume_from], model, adam)
    metrics = []
    for step in steps:
        micro_batches, num_action_tokens = step_batches(step)
        metrics.append(
            train_step(
                model,
                adam,
                micro_batches,
                config=config,
                num_action_tokens=num_action_tokens,
                num_ranks=num_ranks(),
                learning_rate=config.optimizer.learning_rate,
            )
        )
        if step in (3, steps[-1]):
            save_checkpoint(
                root,
                model,
                adam,
                attempt_id=attempt_id,
                step=step,
                policy_version=step,
                cursor={"w0": [[0, step]]},
                config=config.flat(),
            )
    return metrics


@pytest.fixture(scope="session")
def mesh() -> Iterator[DeviceMesh]:
    """The group of this process alone."""
    yield init_distributed("cpu")
    shut_down()


@pytest.fixture
def tiny_model() -> Callable[..., PreTrainedModel]:
    return random_model


@pytest.fixture
def sequences() -> Callable[[int, int], list[TrainingSequence]]:
    return random_sequences


@pytest.fixture
def train_here(mesh: DeviceMesh) -> Callable[..., list[dict]]:
    return train


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Weights of the tiny model, in Hugging Face form."""
    folder = tmp_path / "model"
    random_model().save_pretrained(folder)
    return folder


@pytest.fixture
def run_root(tmp_path: Path, model_folder: Path) -> Root:
    return put_run(str(tmp_path / "run"), RunConfig(model=str(model_folder), env=("moar_cats",)))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with its tokenizer, for whole runs."""
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def new_root(tmp_path: Path, tiny_folder: str) -> Callable[..., Root]:
    """new_root("name", group_size=8): a run on this machine without rollouts."""
    return lambda name="root", **settings: create_root(str(tmp_path / name), tiny_folder, **settings)
