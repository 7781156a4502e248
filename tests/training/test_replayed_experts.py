"""Router replay: the sampler's experts are stored, and the trainer sends tokens to the same ones."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import query, train_here
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import ludic
from ludic.app.launch.roots import start_like
from ludic.engines.engine import Completion, GenerationRequest, SamplingParams, generate_all
from ludic.engines.transformers_engine import TransformersEngine
from ludic.environments.moar_cats import WORDS
from ludic.errors import ConfigError, ModelError
from ludic.models.experts import Routers
from ludic.models.families import shrink, spread
from ludic.models.tiny import make_tiny_model
from ludic.root.root import Root
from ludic.root.weights.policies import policy_folder, policy_versions
from ludic.training.batches.packing import MicroBatch, TrainingSequence, pack
from ludic.training.inherited_settings import replay_settings
from ludic.training.logprobs import token_logprobs
from ludic.training.model import load_model

NUM_EXPERTS, CHOSEN = 16, 4


def write_mixture(folder: str, family: str) -> str:
    """A tiny mixture whose routers are often in two minds, with the tokenizer of moar_cats."""
    make_tiny_model(folder, WORDS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocab_size = AutoConfig.from_pretrained(folder).vocab_size
    config = shrink(AutoConfig.for_model(family))
    sizes = {"num_experts": NUM_EXPERTS, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": CHOSEN}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    for name, value in {"vocab_size": vocab_size, **sizes, **ids}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        spread(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss", "qwen3_5_moe_text"])
def any_mixture(request, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_mixture(str(tmp_path_factory.mktemp(request.param) / "model"), request.param)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_mixture(str(tmp_path_factory.mktemp("mixture") / "model"), "qwen3_moe")


def sampled(folder: str, dtype: torch.dtype = torch.float32) -> tuple[list[np.ndarray], list[Completion]]:
    """Completions of prompts of several lengths, two of them equal; they end at different times, and one waits."""
    engine = TransformersEngine(folder, device="cpu", dtype=dtype, keep_experts=True, max_batch=5)
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (8, 8, 3, 12, 5, 1)]
    requests = [
        GenerationRequest(
            prompt_tokens=prompt, params=SamplingParams(max_tokens=4 + 3 * seed, return_experts=True), seed=seed
        )
        for seed, prompt in enumerate(prompts)
    ]
    return prompts, generate_all(engine, requests)


def packed(prompts: list[np.ndarray], completions: list[Completion]) -> MicroBatch:
    rows = [
        TrainingSequence(
            rollout_id=f"r{number}",
            prompt_tokens=prompt,
            response_tokens=done.tokens,
            columns=done.columns,
            advantage=1.0,
        )
        for number, (prompt, done) in enumerate(zip(prompts, completions, strict=True))
    ]
    return pack(rows)


def test_the_engine_returns_the_experts_that_each_sequence_alone_would_choose(any_mixture):
    prompts, completions = sampled(any_mixture)
    model = load_model(any_mixture)
    routers = Routers(model, "it")
    for prompt, done in zip(prompts, completions, strict=True):
        with torch.no_grad(), routers.record() as recorded:
            token_logprobs(model, packed([prompt], [done]))
        np.testing.assert_array_equal(done.columns["experts"], recorded().numpy())


def test_an_engine_returns_experts_only_if_it_keeps_them_and_is_asked(mixture):
    prompt, params = np.arange(3, 8, dtype=np.int32), SamplingParams(max_tokens=4)
    asked = GenerationRequest(prompt_tokens=prompt, params=replace(params, return_experts=True), seed=0)
    with pytest.raises(ConfigError, match="was started without keep_experts"):
        generate_all(TransformersEngine(mixture, device="cpu"), [asked])
    engine = TransformersEngine(mixture, device="cpu", keep_experts=True)
    one, other = generate_all(engine, [asked, GenerationRequest(prompt_tokens=prompt, params=params, seed=0)])
    assert "experts" in one.columns
    assert "experts" not in other.columns
    assert one.tokens.tolist() == other.tokens.tolist()


def test_a_trainer_in_float32_agrees_with_a_sampler_in_bfloat16_only_with_its_experts(mixture):
    batch, model = packed(*sampled(mixture, torch.bfloat16)), load_model(mixture)
    routers = Routers(model, "it")
    with torch.no_grad():
        without, _ = token_logprobs(model, batch)
        with routers.replay(batch.experts) as differs:
            replayed, _ = token_logprobs(model, batch)
    gaps = [(each - batch.sampler_logprobs).abs() for each in (without, replayed)]
    assert differs().mean() > 0.01
    assert gaps[0].max() > 1.5 * gaps[1].max()
    assert gaps[0].mean() > 1.2 * gaps[1].mean()


def test_a_dense_model_is_refused_at_the_start(tmp_path):
    make_tiny_model(str(tmp_path / "dense"), WORDS)
    with pytest.raises(ModelError, match="has no experts to keep or replay"):
        TransformersEngine(str(tmp_path / "dense"), device="cpu", keep_experts=True)


RUN: dict[str, Any] = {
    "env": "moar_cats",
    "group_size": 4,
    "groups_per_batch": 4,
    "max_tokens": 12,
    "accept_incomplete": True,
}
TRAIN: dict[str, Any] = {"device": "cpu", "rollout_timeout_s": 30.0, "dtype": "bfloat16", "num_steps": 1}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, mixture: str) -> ludic.Run:
    """A run with a batch of rollouts and their experts; not to be changed."""
    run = ludic.create(str(tmp_path_factory.mktemp("stored") / "run"), model=mixture, keep_experts=True, **RUN)
    run.worker(4)
    return run


MEASURED = "select sampler_kl, experts_changed from metrics where kind = 'train'"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"training_unit": "turn"},
        {"max_seq_len": 18, "activation_checkpointing": True, "max_tokens_per_micro_batch": 60},
    ],
)
def test_a_run_stores_experts_and_replays_them_and_its_mismatch_shrinks(
    tmp_path: Path, stored: ludic.Run, settings: dict
):
    run, other = (ludic.open(str(shutil.copytree(stored.root.path, tmp_path / name))) for name in ("run", "other"))
    shapes = query(
        run.root,
        "select distinct len(experts) - prompt_length - response_length, len(experts[1]), len(experts[1][1])"
        " from rollouts",
    )
    assert shapes == [(-1, 2, CHOSEN)]
    run.train(**TRAIN | settings)
    ((kl, changed),) = query(run.root, MEASURED)
    assert 0.01 < changed < 0.5
    assert run.verify().findings == []
    other.train(**TRAIN | settings, replay_experts=False)
    ((other_kl, none),) = query(other.root, MEASURED)
    assert none is None
    assert kl < other_kl / 2


def weights_of(root: Root) -> dict[str, bytes]:
    """Bytes of the newest version's weights, by file."""
    folder = policy_folder(policy_versions(root)[-1])
    return {Path(name).name: root.read(name) for name in root.list(folder) if name.endswith(".safetensors")}


def replayed(root: Root, folder: Path, **settings: Any) -> Root:
    other = start_like(str(folder), root, None)
    train_here(other, **replay_settings(root.url) | settings, replay_batches=root.url)
    return other


@pytest.mark.slow
def test_a_replay_of_a_run_sends_tokens_to_the_same_experts_to_the_bit(tmp_path: Path, mixture: str):
    run = ludic.create(str(tmp_path / "run"), model=mixture, keep_experts=True, **RUN)
    run.worker(8)
    run.train(**TRAIN | {"num_steps": 2}, learning_rate=1e-2)
    again = replayed(run.root, tmp_path / "again")
    assert weights_of(again) == weights_of(run.root)
    assert query(again, MEASURED) == query(run.root, MEASURED)
    with pytest.raises(ConfigError, match="so a replay would not repeat it: replay_experts is None there and False"):
        replayed(run.root, tmp_path / "without", replay_experts=False)


@pytest.mark.slow
def test_offline_training_replays_experts_if_it_is_told_to(tmp_path: Path, mixture: str, stored: ludic.Run):
    dense = str(tmp_path / "dense")
    make_tiny_model(dense, WORDS)
    other = ludic.create(str(tmp_path / "other"), model=dense, **RUN)
    offline = {"offline": True, "sources": (stored.root.url,)}
    other.train(**TRAIN | offline)  # a dense model on a mixture's rollouts
    with pytest.raises(ModelError, match="has no experts to keep or replay"):
        other.train(**TRAIN | offline | {"num_steps": 2, "replay_experts": True})
    mixed = ludic.create(str(tmp_path / "mixed"), model=mixture, **RUN)
    mixed.worker(1)
    assert query(mixed.root, "select count(experts), count(*) from rollouts") == [(0, 4)]
    mixed.train(**TRAIN | offline | {"replay_experts": True})
    assert query(mixed.root, "select experts_changed > 0 from metrics where kind = 'train'") == [(True,)]


@pytest.mark.slow
def test_experts_of_another_model_are_named_and_left_to_the_routers(tmp_path: Path, stored: ludic.Run, caplog):
    deeper = write_mixture(str(tmp_path / "deeper"), "gpt_oss")  # four layers
    other = ludic.create(str(tmp_path / "other"), model=deeper, **RUN)
    other.train(**TRAIN, offline=True, sources=(stored.root.url,), replay_experts=True)
    assert "the experts of 16 rollouts are not used; those of the first" in caplog.text
    assert "experts has 4 experts in each of 2 layers, the model sends a token to 4 in each of 4" in caplog.text
    assert query(other.root, "select count(*), count(experts_changed) from metrics") == [(1, 0)]
