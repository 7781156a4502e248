"""What only the embedded engine promises; the rest is in test_engine.py."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from model_families import FAMILIES, VOCAB_SIZE, random_model_of
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from ludic.engines import transformers_engine
from ludic.engines.engine import GenerationRequest, SamplingParams, generate_all
from ludic.engines.transformers_engine import TransformersEngine
from ludic.errors import ConfigError, ModelError

PROMPT = np.array([4, 46, 50, 47, 2, 5], dtype=np.int32)


def requests(num: int, *, max_tokens: int = 8) -> list[GenerationRequest]:
    params = SamplingParams(max_tokens=max_tokens)
    return [GenerationRequest(prompt_tokens=PROMPT[: 1 + seed % 6], params=params, seed=seed) for seed in range(num)]


def test_more_requests_than_max_batch_wait_with_the_same_result(model_folder: str) -> None:
    whole = generate_all(TransformersEngine(model_folder, device="cpu"), requests(11))
    waiting = generate_all(TransformersEngine(model_folder, device="cpu", max_batch=4), requests(11))
    assert [c.tokens.tolist() for c in waiting] == [c.tokens.tolist() for c in whole]


def test_padding_does_not_move_the_positions_of_a_model_that_learned_each_of_them(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=24, bos_token_id=2, eos_token_id=2)
    config.initializer_range = 0.3
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    engine = TransformersEngine(str(tmp_path), device="cpu")
    # Prompts of 1 to 6 tokens; 6 + 18 is all that the table of positions holds.
    together = generate_all(engine, requests(6, max_tokens=18))
    alone = [generate_all(engine, [request])[0] for request in requests(6, max_tokens=18)]
    assert [c.tokens.tolist() for c in together] == [c.tokens.tolist() for c in alone]


def count_forward_passes(engine: TransformersEngine) -> list[int]:
    """Return a list that gets the number of sequences of each forward pass."""
    sizes: list[int] = []
    engine._model.register_forward_hook(lambda module, args, output: sizes.append(len(output.logits)))
    return sizes


def test_tasks_that_start_together_make_one_batch(model_folder: str) -> None:
    engine = TransformersEngine(model_folder, device="cpu")
    sizes = count_forward_passes(engine)
    params = SamplingParams(max_tokens=1)

    async def ask_twice(token: int) -> None:
        request = GenerationRequest(prompt_tokens=np.array([3, token], np.int32), params=params, seed=0)
        await engine.generate(request)
        await engine.generate(request)

    async def ask() -> None:
        await asyncio.gather(*map(ask_twice, range(64)))

    asyncio.run(ask())
    assert sizes == [64, 64]


def test_a_cancelled_request_frees_its_slot(model_folder: str) -> None:
    engine = TransformersEngine(model_folder, device="cpu", max_batch=1)
    sizes = count_forward_passes(engine)
    # Greedy decoding of these weights never stops.
    endless = GenerationRequest(prompt_tokens=PROMPT, params=SamplingParams(max_tokens=500, temperature=0.0), seed=0)

    async def cancel() -> None:
        task = asyncio.ensure_future(engine.generate(endless))
        while len(sizes) < 3:
            await asyncio.sleep(0.001)
        queued = asyncio.ensure_future(engine.generate(endless))
        second = asyncio.ensure_future(engine.generate(requests(1)[0]))
        await asyncio.sleep(0)
        task.cancel()
        queued.cancel()
        await second

    asyncio.run(cancel())
    assert len(sizes) < 400
    assert max(sizes) == 1


def test_a_half_loaded_model_fails_the_requests_being_generated(
    model_folder: str, other_weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransformersEngine(model_folder, device="cpu")
    sizes = count_forward_passes(engine)

    def fail(*_: object) -> None:
        raise ModelError("the file failed half-way")

    async def generate() -> None:
        task = asyncio.ensure_future(engine.generate(requests(1, max_tokens=500)[0]))
        while len(sizes) < 3:
            await asyncio.sleep(0.001)
        with pytest.raises(ModelError, match="failed half-way"):
            await asyncio.to_thread(engine.load_weights, other_weights, 1)
        with pytest.raises(ModelError, match="half loaded"):
            await task

    with monkeypatch.context() as patch:
        patch.setattr(transformers_engine, "read_into", fail)
        asyncio.run(generate())
    with pytest.raises(ModelError, match="half loaded"):
        generate_all(engine, requests(1))
    engine.load_weights(model_folder, 2)
    assert generate_all(engine, requests(1))[0].policy_version == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_of_every_family_can_join_and_leave_a_batch(family: str, tmp_path: Path) -> None:
    """Some have layers whose cache holds a window of the last tokens only."""
    random_model_of(family, attention="sdpa", initializer_range=0.3).save_pretrained(tmp_path)
    engine = TransformersEngine(str(tmp_path), device="cpu", max_batch=3)
    rng = np.random.default_rng(0)
    many = [
        GenerationRequest(
            prompt_tokens=rng.integers(2, VOCAB_SIZE, length).astype(np.int32),
            params=SamplingParams(max_tokens=max_tokens),
            seed=length,
        )
        for length, max_tokens in [(2, 30), (3, 2), (4, 3), (12, 4), (1, 20), (5, 5), (9, 9), (3, 12), (14, 2)]
    ]
    together = generate_all(engine, many)
    alone = [generate_all(engine, [request])[0] for request in many]
    for one, other in zip(together, alone, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_the_batch_does_not_grow_with_the_requests_that_pass_through_it(model_folder: str) -> None:
    engine = TransformersEngine(model_folder, device="cpu", max_batch=4)
    widths: list[int] = []
    engine._model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["attention_mask"].shape[1]), with_kwargs=True
    )
    generate_all(engine, requests(120, max_tokens=20))
    assert len(widths) > 200
    # 6 tokens of the longest prompt, 20 of a completion, and some until finished sequences leave
    assert max(widths) < 40


def test_max_batch_of_zero_is_refused(model_folder: str) -> None:
    with pytest.raises(ConfigError, match="max_batch is 0"):
        TransformersEngine(model_folder, max_batch=0)


def test_a_folder_without_a_model_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"could not be loaded.*model\.safetensors"):
        TransformersEngine(str(tmp_path))


def test_the_first_version_is_the_one_given(model_folder: str) -> None:
    engine = TransformersEngine(model_folder, device="cpu", version=31)
    [completion] = generate_all(engine, requests(1))
    assert (engine.policy_version, completion.policy_version, completion.policy_version_last) == (31, 31, 31)


def test_bfloat16_samples_with_float32_logprobs(model_folder: str) -> None:
    engine = TransformersEngine(model_folder, device="cpu", dtype=torch.bfloat16)
    reference = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    [completion] = generate_all(engine, requests(1, max_tokens=1))
    with torch.inference_mode():
        logits = reference(torch.from_numpy(PROMPT[:1].astype(np.int64))[None]).logits[0, -1].float()
    expected = logits.log_softmax(dim=-1)[int(completion.tokens[0])]
    assert completion.logprobs.dtype == np.float32
    # bfloat16 holds 8 bits, so logits of some 5 are 0.02 apart; float32 afterwards loses nothing more.
    assert completion.logprobs[0] == pytest.approx(float(expected), abs=1e-5)


def test_the_first_weights_do_not_change_with_the_folder_they_came_from(model_folder: str, tmp_path: Path) -> None:
    """A mapped file that shrinks would not even raise: it kills the process."""
    shutil.copytree(model_folder, tmp_path / "policy")
    engine = TransformersEngine(str(tmp_path / "policy"), device="cpu")
    (tmp_path / "policy/model.safetensors").write_bytes(b"")
    expected = generate_all(TransformersEngine(model_folder, device="cpu"), requests(3))
    assert [c.tokens.tolist() for c in generate_all(engine, requests(3))] == [c.tokens.tolist() for c in expected]
