"""Attention for decoding gives what transformers' own gives, and leaves models alone that it does not fit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_requests import tokens_of
from model_families import FAMILIES, VOCAB_SIZE, random_model_of
from torch import nn
from transformers import AutoModelForCausalLM, FalconConfig, GptOssConfig, PreTrainedConfig

from ludic.engines.engine import GenerationRequest, SamplingParams, generate_all
from ludic.engines.transformers_engine import (
    DECODING_ATTENTION,
    TransformersEngine,
    decoding_attention,
    use_decoding_attention,
)


def test_heads_of_a_group_share_a_key_and_value_head_and_see_no_padding() -> None:
    # 1 sequence, 4 heads, 2 key and value heads of size 1, 3 tokens, the first of them padding.
    query = torch.tensor([0.0, 1.0, 0.0, 1.0]).view(1, 4, 1, 1)
    key = torch.log(torch.tensor([[9.0, 1.0, 3.0], [9.0, 1.0, 1.0]])).view(1, 2, 3, 1)
    value = torch.tensor([[100.0, 4.0, 8.0], [100.0, 2.0, 6.0]]).view(1, 2, 3, 1)
    mask = torch.tensor([False, True, True]).view(1, 1, 1, 3)
    output, _ = decoding_attention(nn.Module(), query, key, value, mask, scaling=1.0)
    # head 0: (4 + 8) / 2; head 1: weights 1/4 and 3/4; heads 2 and 3: equal keys, (2 + 6) / 2
    torch.testing.assert_close(output, torch.tensor([6.0, 7.0, 4.0, 4.0]).view(1, 1, 4, 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_grouped_heads_are_those_of_a_plain_forward_pass(family: str, tmp_path: Path) -> None:
    random_model_of(family, attention="sdpa", initializer_range=0.3).save_pretrained(tmp_path)
    engine = TransformersEngine(str(tmp_path), device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB_SIZE, length).astype(np.int32) for length in (2, 5, 9)]
    params = SamplingParams(max_tokens=20)
    requests = [
        GenerationRequest(prompt_tokens=prompt, params=params, seed=seed) for seed, prompt in enumerate(prompts)
    ]
    for prompt, completion in zip(prompts, generate_all(engine, requests), strict=True):
        tokens = torch.from_numpy(np.concatenate([prompt, completion.tokens])).long()
        with torch.inference_mode():
            logprobs = plain(tokens[None]).logits[0].log_softmax(dim=-1)
        expected = logprobs[:-1].gather(-1, tokens[1:, None])[len(prompt) - 1 :, 0]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4, rtol=0)


_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 1,
    "pad_token_id": None,
}


@pytest.mark.parametrize(
    ("config", "attention"),
    [
        pytest.param(
            GptOssConfig(**_SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1), "eager", id="sinks"
        ),
        pytest.param(FalconConfig(**_SIZES, num_kv_heads=2, new_decoder_architecture=True), "sdpa", id="own code"),
    ],
)
def test_models_with_attention_of_their_own_keep_it_and_sample(
    config: PreTrainedConfig, attention: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    engine = TransformersEngine(str(tmp_path), device="cpu")
    assert engine._model.config._attn_implementation == attention
    params = SamplingParams(max_tokens=5)
    requests = [
        GenerationRequest(prompt_tokens=np.arange(2, 2 + length, dtype=np.int32), params=params, seed=length)
        for length in (3, 6)
    ]
    alone = [generate_all(engine, [request])[0] for request in requests]
    assert tokens_of(generate_all(engine, requests)) == tokens_of(alone)


def test_a_model_that_was_given_another_attention_keeps_it() -> None:
    model = random_model_of("llama", attention="eager")
    use_decoding_attention(model)
    assert model.config._attn_implementation == "eager"
    model = random_model_of("llama", attention="sdpa")
    use_decoding_attention(model)
    assert model.config._attn_implementation == DECODING_ATTENTION
