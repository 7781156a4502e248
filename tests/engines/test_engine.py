"""What every engine promises (ludic.engines.engine.Engine), tried on every implementation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import LONGER_PROMPT, PROMPT, a_request, tokens_of
from transformers import AutoModelForCausalLM

from ludic.engines.engine import Engine, SamplingParams, generate_all
from ludic.engines.server_engine import ServerEngine
from ludic.errors import ConfigError, ModelError
from ludic.records.rollout import WeightSpan

EOS = 2
VOCABULARY = 64


def logits_after(folder: str, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """(len(response), vocabulary) float64: what a plain forward pass says before each response token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    with torch.inference_mode():
        logits = model(tokens).logits[0].double().numpy()
    return logits[len(prompt) - 1 : -1]


def expected_logprobs(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Log of the distribution to sample from, worked out one row at a time, -inf for what is cut off."""
    rows = []
    for row in logits / params.temperature:
        probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        kept = np.argsort(-probabilities)[: params.top_k]
        share = np.cumsum(probabilities[kept]) / probabilities[kept].sum()
        kept = kept[: int(np.searchsorted(share, params.top_p)) + 1] if params.top_p < 1 else kept
        cut = np.zeros_like(probabilities)
        cut[kept] = probabilities[kept] / probabilities[kept].sum()
        with np.errstate(divide="ignore"):
            rows.append(np.log(cut))
    return np.stack(rows)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": temperature, **cut}
        for temperature in (0.7, 1.0, 1.3)
        for cut in ({}, {"top_k": 10}, {"top_p": 0.8}, {"top_k": 40, "top_p": 0.9})
    ],
    ids=str,
)
def test_logprobs_are_those_of_a_plain_forward_pass_cut_and_renormalised(
    engine: Engine, model_folder: str, params: dict[str, Any]
) -> None:
    requests = [a_request(prompt, seed=seed, **params) for seed in range(4) for prompt in (PROMPT, LONGER_PROMPT)]
    for request, completion in zip(requests, generate_all(engine, requests), strict=True):
        logits = logits_after(model_folder, request.prompt_tokens, completion.tokens)
        expected = expected_logprobs(logits, request.params)[np.arange(len(completion.tokens)), completion.tokens]
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4, rtol=0)


def test_arrays_have_the_types_that_records_store(engine: Engine) -> None:
    [completion] = generate_all(engine, [a_request()])
    assert completion.tokens.dtype == np.int32
    assert completion.logprobs.dtype == np.float32
    assert completion.tokens.shape == completion.logprobs.shape


def test_the_same_seed_gives_the_same_completion_and_another_seed_another(engine: Engine) -> None:
    first, again, other = (tokens_of(generate_all(engine, [a_request(seed=seed)])) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_negative_and_large_seeds_are_seeds_like_others(engine: Engine) -> None:
    seeds = [-1, 0, 1, 2**63 - 1]
    completions = tokens_of(generate_all(engine, [a_request(seed=seed) for seed in seeds]))
    assert len({tuple(tokens) for tokens in completions}) == len(seeds)


def test_a_completion_does_not_depend_on_what_else_is_in_its_batch(engine: Engine) -> None:
    if not engine.repeats_in_any_batch:
        pytest.skip("the engine does not promise it")
    requests = [
        a_request(LONGER_PROMPT if seed % 3 else PROMPT, seed=seed, **params)
        for seed in range(5)
        for params in ({}, {"temperature": 0.0}, {"top_p": 0.6}, {"top_k": 5, "max_tokens": 3}, {"max_tokens": 40})
    ]
    together = generate_all(engine, requests)
    alone = [generate_all(engine, [request])[0] for request in requests]
    assert tokens_of(together) == tokens_of(alone)
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5, rtol=0)
        assert one.finish_reason == other.finish_reason


def test_completions_come_in_the_order_of_the_requests(engine: Engine) -> None:
    lengths = [5, 1, 4, 2, 3]
    prompts = [LONGER_PROMPT, PROMPT, LONGER_PROMPT, PROMPT, PROMPT]
    requests = [a_request(p, temperature=0.0, max_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
    greedy = {len(prompt): generate_all(engine, [a_request(prompt, temperature=0.0)])[0] for prompt in prompts}
    for request, completion in zip(requests, generate_all(engine, requests), strict=True):
        expected = greedy[len(request.prompt_tokens)].tokens[: request.params.max_tokens]
        assert completion.tokens.tolist() == expected.tolist()


def test_no_request_gives_no_completion(engine: Engine) -> None:
    assert generate_all(engine, []) == []


def test_max_tokens_ends_a_completion_with_length(engine: Engine) -> None:
    requests = [a_request(seed=seed, max_tokens=max_tokens) for seed in range(20) for max_tokens in (1, 6)]
    completions = generate_all(engine, requests)
    cut_off = [(r, c) for r, c in zip(requests, completions, strict=True) if c.finish_reason == "length"]
    assert len(cut_off) > 10
    for request, completion in cut_off:
        assert len(completion.tokens) == request.params.max_tokens
        assert EOS not in completion.tokens


def test_the_models_end_of_sequence_stops_and_is_the_last_token(engine: Engine) -> None:
    completions = generate_all(engine, [a_request(seed=seed, max_tokens=200) for seed in range(40)])
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    assert len(stopped) > 10
    for completion in stopped:
        assert completion.tokens.tolist().index(EOS) == len(completion.tokens) - 1


def test_a_stop_token_of_the_request_stops_that_request_alone(engine: Engine) -> None:
    [free] = generate_all(engine, [a_request(temperature=0.0, max_tokens=12)])
    index = 5
    stop = int(free.tokens[index])
    first = free.tokens.tolist().index(stop)
    stopped, still_free = generate_all(
        engine,
        [a_request(temperature=0.0, max_tokens=12, stop_token_ids=(stop,)), a_request(temperature=0.0, max_tokens=12)],
    )
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert stopped.finish_reason == "stop"
    assert still_free.tokens.tolist() == free.tokens.tolist()


def test_a_stop_token_in_the_last_position_is_a_stop(engine: Engine) -> None:
    [free] = generate_all(engine, [a_request(temperature=0.0, max_tokens=1)])
    [stopped] = generate_all(engine, [a_request(temperature=0.0, max_tokens=1, stop_token_ids=(int(free.tokens[0]),))])
    assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")


def test_greedy_takes_the_most_likely_tokens_with_logprob_zero(engine: Engine, model_folder: str) -> None:
    one, other = generate_all(engine, [a_request(temperature=0.0, seed=seed) for seed in (1, 2)])
    assert one.tokens.tolist() == logits_after(model_folder, PROMPT, one.tokens).argmax(axis=1).tolist()
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.logprobs.tolist() == [0.0] * len(one.tokens)


@pytest.mark.slow
def test_greedy_completions_are_those_of_transformers_token_for_token(engine: Engine, model_folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    prompts = [PROMPT, LONGER_PROMPT, np.arange(3, 43, dtype=np.int32), np.array([63], dtype=np.int32)]
    requests = [a_request(prompt, temperature=0.0, max_tokens=100) for prompt in prompts]
    for request, completion in zip(requests, generate_all(engine, requests), strict=True):
        prompt = torch.from_numpy(request.prompt_tokens.astype(np.int64))[None]
        mask = torch.ones_like(prompt)
        found = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=100, pad_token_id=0)
        assert completion.tokens.tolist() == found[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-6}], ids=str)
def test_cutting_down_to_one_token_is_greedy(engine: Engine, params: dict[str, Any]) -> None:
    greedy, cut = generate_all(engine, [a_request(temperature=0.0), a_request(seed=3, **params)])
    assert cut.tokens.tolist() == greedy.tokens.tolist()
    assert cut.logprobs.tolist() == [0.0] * len(cut.tokens)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.6}, {"top_k": 12}, {"top_p": 0.7}], ids=str)
def test_first_tokens_occur_as_often_as_their_probability_says(
    engine: Engine, model_folder: str, params: dict[str, Any]
) -> None:
    # A server has the same sampler as engine vllm, and each request takes its time.
    num_samples = 300 if isinstance(engine, ServerEngine) else 3000
    requests = [a_request(seed=seed, max_tokens=1, **params) for seed in range(num_samples)]
    first = np.array([completion.tokens[0] for completion in generate_all(engine, requests)])
    logits = logits_after(model_folder, PROMPT, PROMPT[:1])
    expected = num_samples * np.exp(expected_logprobs(logits, requests[0].params)[0])
    observed = np.bincount(first, minlength=len(expected))
    assert observed[expected == 0].sum() == 0
    # Pearson's statistic has mean df and variance 2 df; tokens expected less than 5 times count as one.
    common = expected >= 5
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum() + 1e-9)
    df = len(expected) - 1
    assert ((observed - expected) ** 2 / expected).sum() < df + 4 * np.sqrt(2 * df)


@pytest.mark.slow
def test_loaded_weights_are_used_and_can_be_taken_back(engine: Engine, model_folder: str, other_weights: str) -> None:
    requests = [a_request(seed=seed) for seed in range(4)]
    before = generate_all(engine, requests)
    engine.load_weights(other_weights, 12)
    swapped = generate_all(engine, requests)
    engine.load_weights(model_folder, 13)
    after = generate_all(engine, requests)

    assert tokens_of(swapped) != tokens_of(before)
    assert tokens_of(after) == tokens_of(before)
    logits = logits_after(other_weights, PROMPT, swapped[0].tokens)
    expected = expected_logprobs(logits, requests[0].params)[np.arange(len(logits)), swapped[0].tokens]
    np.testing.assert_allclose(swapped[0].logprobs, expected, atol=1e-4, rtol=0)
    for completion, version in ((before[0], 0), (swapped[0], 12), (after[0], 13)):
        assert completion.weight_versions == (WeightSpan(version=version, start=0, end=len(completion.tokens)),)
        assert (completion.policy_version, completion.policy_version_last) == (version, version)
    assert engine.policy_version == 13


def test_an_empty_prompt_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"the prompt has shape \(0,\)"):
        generate_all(engine, [a_request(), a_request(np.array([], dtype=np.int32))])


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_prompt_with_a_token_that_the_model_does_not_know_is_refused(engine: Engine, token: int) -> None:
    with pytest.raises(ConfigError, match=rf"{token}.* 0 to 63"):
        generate_all(engine, [a_request(np.array([4, token], dtype=np.int32))])


def test_a_prompt_that_leaves_no_room_for_max_tokens_is_refused_with_the_numbers(engine: Engine) -> None:
    assert engine.max_length == 512
    prompt = np.full(500, 40, dtype=np.int32)
    with pytest.raises(ConfigError, match=r"500 tokens and max_tokens 13 make 513, the model holds 512"):
        generate_all(engine, [a_request(prompt, max_tokens=13)])
    [completion] = generate_all(engine, [a_request(prompt, max_tokens=12)])
    assert len(completion.tokens) <= 12


def test_the_name_is_the_librarys_with_its_version(engine):
    *library, version = engine.name.split(" ")
    assert library
    assert version[0].isdigit()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_diverged_are_an_error_that_names_the_version(
    engine: Engine, model_folder: str, tmp_path: Path, temperature: float
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    model.save_pretrained(tmp_path)
    engine.load_weights(str(tmp_path), 8)
    with pytest.raises(ModelError, match="weights of version 8 give NaN"):
        generate_all(engine, [a_request(temperature=temperature)])
