"""A bfloat16 model whose logits are made in float32, in the sampler and in the trainer."""

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from ludic.engines.engine import GenerationRequest, SamplingParams, generate_all
from ludic.engines.transformers_engine import TransformersEngine
from ludic.environments.moar_cats import WORDS
from ludic.models.tiny import make_tiny_model
from ludic.training.batches.packing import TrainingSequence, pack
from ludic.training.logprobs import token_logprobs
from ludic.training.losses import k3
from ludic.training.model import load_model, load_sharded
from ludic.training.reference import fingerprint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that is surer than random weights are, so that rounding logits matters: its entropy is 1.3 nats."""
    folder = str(tmp_path_factory.mktemp("sure") / "model")
    make_tiny_model(folder, WORDS, hidden_size=256)
    model = load_model(folder)
    model.get_output_embeddings().weight.data *= 3
    model.save_pretrained(folder)
    return folder


def sampled(engine, num=16):
    params = SamplingParams(max_tokens=32)
    requests = [
        GenerationRequest(prompt_tokens=np.arange(3, 11, dtype=np.int32), params=params, seed=i) for i in range(num)
    ]
    return pack(
        [
            TrainingSequence(
                rollout_id=f"r{request.seed}",
                prompt_tokens=request.prompt_tokens,
                response_tokens=completion.tokens,
                columns=completion.columns,
                advantage=1.0,
            )
            for request, completion in zip(requests, generate_all(engine, requests), strict=True)
        ]
    )


def mismatch(folder, mesh, *, float32_head):
    """The mean k3 estimate of the KL between sampler and trainer, both in bfloat16."""
    engine = TransformersEngine(folder, device="cpu", dtype=torch.bfloat16, float32_head=float32_head)
    batch = sampled(engine)
    model = load_sharded(folder, mesh, compute_dtype=torch.bfloat16, float32_head=float32_head)
    logprobs, _ = token_logprobs(model, batch)
    return k3(logprobs.detach() - batch.sampler_logprobs).mean().item()


def test_sampler_and_trainer_agree_better(folder, mesh):
    # 6e-6 instead of 1.3e-5
    assert mismatch(folder, mesh, float32_head=True) < 0.75 * mismatch(folder, mesh, float32_head=False)


def test_the_trainer_s_logits_are_those_of_float32_and_its_weights_get_their_gradient(folder, mesh):
    batch = sampled(TransformersEngine(folder, device="cpu"), num=1)
    model = load_sharded(folder, mesh, compute_dtype=torch.bfloat16, float32_head=True)
    found, _ = token_logprobs(model, batch)
    plain = load_model(folder, dtype=torch.bfloat16)
    hidden = plain.get_decoder()(input_ids=batch.input_ids, use_cache=False).last_hidden_state[0, batch.logit_positions]
    logits = linear(hidden.float(), plain.get_output_embeddings().weight.float())
    by_hand = logits.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
    torch.testing.assert_close(found, by_hand, rtol=0, atol=1e-4)
    found.sum().backward()
    assert all(p.grad is not None and p.grad.full_tensor().isfinite().all() for p in model.parameters())


def test_the_sampler_s_head_follows_new_weights(folder, tmp_path):
    make_tiny_model(str(tmp_path), WORDS, hidden_size=256, seed=1)
    settings = {"device": "cpu", "dtype": torch.bfloat16, "float32_head": True}
    engine = TransformersEngine(folder, **settings)
    engine.load_weights(str(tmp_path), 1)
    fresh = TransformersEngine(str(tmp_path), **settings)
    assert torch.equal(sampled(engine).sampler_logprobs, sampled(fresh).sampler_logprobs)


def test_a_cache_of_a_reference_tells_the_heads_apart(folder, mesh):
    model = load_sharded(folder, mesh)
    prints = [fingerprint(model, torch.bfloat16, float32_head=on) for on in (False, True)]
    assert prints[0] != prints[1]
    # where all is float32, nothing differs
    assert fingerprint(model, torch.float32, float32_head=True) == fingerprint(model, torch.float32)
