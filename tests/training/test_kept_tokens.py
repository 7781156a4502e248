"""Logprobs over the tokens that top_k and top_p kept: by hand, and the sampler's equal the trainer's."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import query

import ludic
from ludic.engines.engine import GenerationRequest, SamplingParams, generate_all
from ludic.engines.transformers_engine import TransformersEngine
from ludic.environments.moar_cats import WORDS
from ludic.models.tiny import make_tiny_model
from ludic.records.columns import Ragged, with_columns
from ludic.training.batches.packing import MicroBatch, PackedRagged, TrainingSequence, pack
from ludic.training.logprobs import linear_logprobs, token_logprobs
from ludic.training.model import load_model
from ludic.training.reference import CachedReference, model_reference

CUTS: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.8}, {"top_k": 7, "top_p": 0.9, "temperature": 0.7}]


def packed_of(*lists: list[int]) -> PackedRagged:
    """Kept tokens of two sequences, the first of one token; none for a token is an empty list."""
    return PackedRagged.of([Ragged.of(part, np.int32) for part in (lists[:1], lists[1:])], np.int64)


def test_logprobs_and_entropy_over_the_kept_tokens_worked_out_by_hand():
    # probabilities 0.1, 0.2, 0.3, 0.4. Over tokens 1 and 3: 1/3, 2/3; over all; over token 2 alone: 1
    hidden, weight = torch.ones(3, 1), torch.tensor([[0.1], [0.2], [0.3], [0.4]]).log()
    targets, temperatures = torch.tensor([3, 3, 2]), torch.ones(3)
    packed = packed_of([1, 3], [], [2])
    logprobs, entropy = linear_logprobs(hidden, weight, None, targets, temperatures, kept=packed)
    assert logprobs.tolist() == pytest.approx([math.log(2 / 3), math.log(0.4), 0])
    assert entropy[0].item() == pytest.approx(math.log(3) / 3 + 2 / 3 * math.log(3 / 2))
    assert entropy[2].item() == 0


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_values_and_gradients_are_those_of_a_plain_masked_softmax(chunk_tokens, softcap):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in [(7, 5), (11, 5)]
    )
    targets, temperatures = torch.randint(11, (7,), generator=generator), torch.linspace(0.5, 2, 7)
    is_kept = torch.rand((7, 11), generator=generator) < 0.4
    is_kept[torch.arange(7), targets] = True
    lists = [row.nonzero()[:, 0].tolist() for row in is_kept]
    lists[2], is_kept[2] = [], True  # drawn from the whole vocabulary
    packed = packed_of(*lists)
    weights = torch.linspace(-1, 2, 7, dtype=torch.float64)

    def with_gradients(logprobs, entropies):
        total = (weights * logprobs + weights.square() * entropies).sum()
        return logprobs, entropies, *torch.autograd.grad(total, [hidden, weight])

    logits = hidden @ weight.T if softcap is None else softcap * torch.tanh(hidden @ weight.T / softcap)
    plain = (logits / temperatures[:, None]).masked_fill(~is_kept, -torch.inf).log_softmax(-1)
    finite = plain.masked_fill(~is_kept, 0)
    entropies = -(torch.where(is_kept, finite.exp(), 0) * finite).sum(-1)
    options = {"kept": packed, "softcap": softcap, "chunk_tokens": chunk_tokens, "entropy_gradient": True}
    found = linear_logprobs(hidden, weight, None, targets, temperatures, **options)
    wanted = with_gradients(plain[torch.arange(7), targets], entropies)
    for one, other in zip(with_gradients(*found), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose last norm is random, so that it is surer of its tokens than with other random weights."""
    folder = str(tmp_path_factory.mktemp("sure") / "model")
    make_tiny_model(folder, WORDS)
    model = load_model(folder)
    model.get_decoder().norm.weight.data.normal_(std=10, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    return folder


def sampled(folder: str, **params: Any) -> MicroBatch:
    """Completions of the engine, packed as the trainer packs them."""
    settings = SamplingParams(max_tokens=16, return_mask=True, **params)
    prompt = np.arange(3, 11, dtype=np.int32)
    requests = [GenerationRequest(prompt_tokens=prompt, params=settings, seed=seed) for seed in range(8)]
    rows = []
    for request, done in zip(requests, generate_all(TransformersEngine(folder, device="cpu"), requests), strict=True):
        rows.append(
            TrainingSequence(
                rollout_id=f"r{request.seed}",
                prompt_tokens=prompt,
                response_tokens=done.tokens,
                columns=done.columns,
                advantage=1.0,
                temperature=settings.temperature,
            )
        )
    return pack(rows)


@pytest.mark.parametrize("cut", CUTS)
def test_the_engines_logprobs_are_the_trainers_with_the_same_weights(folder, cut):
    batch, model = sampled(folder, **cut), load_model(folder)
    with torch.no_grad():
        logprobs, _ = token_logprobs(model, batch, chunk_tokens=7)
        over_all, _ = token_logprobs(model, with_columns(batch, kept_tokens=None))
    torch.testing.assert_close(logprobs, batch.sampler_logprobs, rtol=0, atol=1e-5)
    assert (over_all - batch.sampler_logprobs).mean() < -0.1
    assert ((over_all - batch.sampler_logprobs) < 1e-5).all()  # the sampler left tokens out


def test_the_engine_returns_the_tokens_that_it_drew_from_if_it_is_asked(folder):
    batch = sampled(folder, top_k=5)
    assert batch.kept_tokens.has_any.all()
    assert np.diff(batch.kept_tokens.bounds).tolist() == [5] * len(batch.targets)
    of_token = batch.kept_tokens.values.reshape(-1, 5)
    assert (of_token.diff(dim=1) > 0).all()
    assert (of_token == batch.targets[:, None]).any(dim=1).all()
    assert sampled(folder).kept_tokens is None  # nothing was cut


def test_a_reference_is_over_the_kept_tokens_and_is_not_stored(folder, run_root, mesh):
    batch = sampled(folder, top_k=5)
    plain = model_reference(load_model(folder), torch.device("cpu"))
    for _ in range(2):
        cached = CachedReference(plain, run_root, "0123456789abcdef" * 2, torch.device("cpu"))
        torch.testing.assert_close(cached([batch])[0], batch.sampler_logprobs, rtol=0, atol=1e-5)
    assert list(run_root.list("reference")) == []


RUN: dict[str, Any] = {"env": "moar_cats", "group_size": 2, "groups_per_batch": 2, "max_tokens": 8, "top_k": 5}
TRAIN: dict[str, Any] = {"device": "cpu", "rollout_timeout_s": 30.0, "keep_token_stats": True, "num_steps": 1}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, folder: str) -> ludic.Run:
    """A run with a batch of rollouts and the mask that it keeps by default; not to be changed."""
    run = ludic.create(str(tmp_path_factory.mktemp("stored") / "run"), model=folder, accept_incomplete=True, **RUN)
    run.worker(2)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"training_unit": "turn", "keep_token_stats": False}, {"max_seq_len": 18}])
def test_a_runs_first_ratios_are_1_with_the_mask_that_it_keeps_by_default(
    tmp_path: Path, stored: ludic.Run, settings: dict, caplog
):
    run = ludic.open(str(shutil.copytree(stored.root.path, tmp_path / "run")))
    run.train(**TRAIN | settings)
    ((k1, kl, low, high),) = query(run.root, "select sampler_kl_k1, sampler_kl, ratio_p01, ratio_p99 from metrics"
                                   " where kind = 'train'")  # fmt: skip
    assert (k1, kl) == pytest.approx((0, 0), abs=1e-5)
    assert (low, high) == pytest.approx((1, 1), abs=1e-4)
    assert "importance ratio" not in caplog.text
    assert run.verify().findings == []


@pytest.mark.slow
def test_without_the_mask_the_first_ratios_are_biased_below_1(tmp_path: Path, folder: str, caplog):
    run = ludic.create(str(tmp_path / "run"), model=folder, keep_sampling_mask=False, accept_incomplete=True, **RUN)
    run.worker(2)
    run.train(**TRAIN)
    ((k1, high),) = query(run.root, "select sampler_kl_k1, ratio_p99 from metrics where kind = 'train'")
    assert k1 > 0.1
    assert high < 1.01
    assert "top_k is 5, and the tokens that were kept are not stored: the trainer takes its logprobs" in caplog.text
    assert query(run.root, "select count(kept_tokens) from rollouts") == [(0,)]
    text = [diagnostic.text for diagnostic in run.watch(once=True).diagnostics()]
    assert any(text_.startswith("top_k is 5") for text_ in text)


@pytest.mark.slow
def test_an_sft_step_is_about_the_whole_distribution(tmp_path: Path, stored: ludic.Run):
    run = ludic.open(str(shutil.copytree(stored.root.path, tmp_path / "run")))
    assert query(run.root, "select count(kept_tokens) > 0 from rollouts") == [(True,)]
    run.train(**TRAIN, objective="sft", advantage="zero")
    assert query(run.root, "select min(log_ratio) < -0.1, max(log_ratio) < 1e-5 from trained_tokens") == [(True, True)]
