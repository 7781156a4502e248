"""What only vLLM promises; the rest is in test_engine.py. Skipped where it is not installed; see `make test-vllm`."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from engine_requests import LONGER_PROMPT, PROMPT, a_request, tokens_of
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ludic.base.installed import is_installed
from ludic.engines import vllm_engine
from ludic.engines.engine import Completion, Engine, generate_all
from ludic.engines.transformers_engine import TransformersEngine
from ludic.engines.vllm_engine import VllmEngine
from ludic.errors import EngineError, ModelError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed("vllm"), reason="vllm is not installed; `make test-vllm` runs these tests"),
]


@pytest.fixture
def engine(vllm: Engine, model_folder: str) -> VllmEngine:
    assert isinstance(vllm, VllmEngine)
    vllm.load_weights(model_folder, 0)
    return vllm


def plain_logprobs(folder: str, completion: Completion, prompt: np.ndarray) -> np.ndarray:
    """(length,) float64: logprobs at temperature 1 of one plain forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))[None]
    with torch.inference_mode():
        logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
    return logprobs.numpy()[np.arange(len(completion.tokens)), completion.tokens]


def test_new_weights_never_continue_a_prompt_that_old_weights_have_computed(
    engine: VllmEngine, model_folder: str, other_weights: str
) -> None:
    """The prompt is two blocks long, and stays in the cache during the swap, since a request uses it."""
    prompt = np.random.default_rng(0).integers(3, 64, 300).astype(np.int32)

    async def swap_within() -> Completion:
        running = asyncio.ensure_future(engine.generate(a_request(prompt, temperature=0.0, max_tokens=200)))
        await engine.generate(a_request(prompt, max_tokens=2))
        await asyncio.to_thread(engine.load_weights, other_weights, 1)
        again = await engine.generate(a_request(prompt, seed=1))
        await running
        return again

    again = asyncio.run(swap_within())
    assert again.policy_version == 1
    np.testing.assert_allclose(again.logprobs, plain_logprobs(other_weights, again, prompt), atol=1e-4, rtol=0)


def test_prompts_that_do_not_fit_one_step_are_sampled(engine: VllmEngine, model_folder: str) -> None:
    """vLLM computes 2,048 tokens in a step; by default it would split the last prompt of each."""
    rng = np.random.default_rng(0)
    requests = [a_request(rng.integers(3, 64, 450).astype(np.int32), seed=seed) for seed in range(64)]
    for request, completion in zip(requests[::16], generate_all(engine, requests)[::16], strict=True):
        expected = plain_logprobs(model_folder, completion, request.prompt_tokens)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4, rtol=0)


def test_the_mask_holds_the_tokens_that_top_k_and_top_p_kept(engine: VllmEngine, model_folder: str) -> None:
    request = a_request(temperature=0.7, top_k=10, top_p=0.8, return_mask=True)
    [completion] = generate_all(engine, [request])
    kept_tokens = completion.columns["kept_tokens"]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokens = torch.from_numpy(np.concatenate([PROMPT, completion.tokens]).astype(np.int64))[None]
    with torch.inference_mode():
        logits = model(tokens).logits[0, len(PROMPT) - 1 : -1].double().numpy() / 0.7
    for row, kept, token, logprob in zip(logits, kept_tokens, completion.tokens, completion.logprobs, strict=True):
        ten = np.argsort(-row)[:10]
        shares = np.exp(row[ten]) / np.exp(row[ten]).sum()
        expected = ten[: int(np.searchsorted(np.cumsum(shares), 0.8)) + 1]
        assert kept.tolist() == sorted(expected.tolist())
        # The logprob is under the softmax over them.
        assert logprob == pytest.approx(row[token] - np.log(np.exp(row[kept]).sum()), abs=1e-4)


def test_weights_that_fail_half_way_fail_the_requests_being_generated(
    engine: VllmEngine, other_weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_bytes(Path(other_weights, "config.json").read_bytes())

    async def generate() -> None:
        task = asyncio.ensure_future(engine.generate(a_request(temperature=0.0, max_tokens=500)))
        await engine.generate(a_request(max_tokens=3))
        with pytest.raises(ModelError, match="reading its weights failed half-way"):
            await asyncio.to_thread(engine.load_weights, str(tmp_path), 1)
        with pytest.raises(ModelError, match="half loaded"):
            await task

    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine, "check_folder", lambda *_: None)  # so that vLLM itself finds no weights
        asyncio.run(generate())
    with pytest.raises(ModelError, match="half loaded"):
        generate_all(engine, [a_request()])
    engine.load_weights(other_weights, 2)
    assert generate_all(engine, [a_request()])[0].policy_version == 2


def test_weights_of_which_vllm_would_keep_some_old_ones_are_refused(
    engine: VllmEngine, other_weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of gpt-oss, without ludic's part in loading them; vLLM itself only logs it."""
    (tmp_path / "config.json").write_bytes(Path(other_weights, "config.json").read_bytes())
    tensors = load_file(Path(other_weights, "model.safetensors"))
    del tensors["model.layers.0.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine, "check_folder", lambda *_: None)
        with pytest.raises(ModelError, match="vLLM does not replace the weights of RowParallelLinear"):
            engine.load_weights(str(tmp_path), 1)
    engine.load_weights(other_weights, 2)
    assert generate_all(engine, [a_request()])[0].policy_version == 2


def adapter_of(model_folder: str, folder: Path, seed: int) -> str:
    """Write a LoRA adapter of rank 4 whose B is not zero; returns its folder."""
    torch.manual_seed(seed)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config).save_pretrained(folder)
    return str(folder)


def test_each_version_of_an_adapter_samples_as_if_it_were_merged(
    start_vllm: Callable[..., VllmEngine], model_folder: str, tmp_path: Path
) -> None:
    adapters = [adapter_of(model_folder, tmp_path / str(seed), seed) for seed in range(4)]
    engine = start_vllm(adapters[0])
    requests = [a_request(prompt, temperature=0.0, max_tokens=60) for prompt in (PROMPT, LONGER_PROMPT)]
    for version, folder in enumerate(adapters):
        if version:
            engine.load_weights(folder, version)
        found = generate_all(engine, requests)
        assert tokens_of(found) == tokens_of(generate_all(TransformersEngine(folder, device="cpu"), requests))
        assert {span.version for completion in found for span in completion.weight_versions} == {version}

    async def swap_within() -> tuple[Completion, Completion]:
        running = asyncio.ensure_future(engine.generate(a_request(temperature=0.0, max_tokens=400)))
        await engine.generate(a_request(max_tokens=2))
        await asyncio.to_thread(engine.load_weights, adapters[0], 4)
        return await engine.generate(requests[0]), await running

    new, old = asyncio.run(swap_within())
    assert (new.policy_version, old.policy_version, old.policy_version_last) == (4, 3, 3)
    old_engine = TransformersEngine(adapters[3], device="cpu")
    assert tokens_of([old]) == tokens_of(generate_all(old_engine, [a_request(temperature=0.0, max_tokens=400)]))

    damaged = tmp_path / "3" / "adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    for folder, message in ((adapters[3], "could not be loaded"), (model_folder, "it holds whole weights")):
        with pytest.raises(ModelError, match=message):
            engine.load_weights(folder, 5)
    assert engine.policy_version == 4
    assert tokens_of(generate_all(engine, requests[:1])) == tokens_of([new])


def processes_of_vllm(pid: int) -> list[psutil.Process]:
    def is_engine(child: psutil.Process) -> bool:
        try:
            return "EngineCore" in "".join(child.cmdline())
        except psutil.NoSuchProcess:  # it has ended; a zombie is one that its parent has not asked for yet
            return False

    return [child for child in psutil.Process(pid).children(recursive=True) if is_engine(child)]


def test_the_death_of_vllm_is_an_error_and_no_hang(model_folder: str, request: pytest.FixtureRequest) -> None:
    others = set(processes_of_vllm(os.getpid()))
    engine = VllmEngine(model_folder)
    request.addfinalizer(engine.close)

    async def kill_within() -> None:
        task = asyncio.ensure_future(engine.generate(a_request(temperature=0.0, max_tokens=500)))
        await engine.generate(a_request(max_tokens=2))
        for process in set(processes_of_vllm(os.getpid())) - others:
            process.kill()
        with pytest.raises(EngineError, match="vLLM's process has died"):
            await task

    asyncio.run(kill_within())
    for call in (lambda: generate_all(engine, [a_request()]), lambda: engine.load_weights(model_folder, 1)):
        with pytest.raises(EngineError, match="vLLM's process has died"):
            call()


@contextmanager
def process_with_engine(folder: str, *, first: str, then: str) -> Iterator[subprocess.Popen[str]]:
    """Gives a process that has started an engine. first, then: its statements before the import and after the start."""
    code = (
        f"{first}\n"
        "from ludic.engines.vllm_engine import VllmEngine\n"
        "if __name__ == '__main__':\n"
        "    engine = VllmEngine(sys.argv[1])\n"
        "    print('started', flush=True)\n"
        f"    {then}\n"
    )
    script = Path(folder).parent / "start_vllm.py"
    script.write_text(code)
    with subprocess.Popen([sys.executable, str(script), folder], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"  # and nothing else is on stdout
        try:
            yield process
        finally:
            process.kill()


def test_a_process_that_has_an_engine_ends_by_itself(model_folder: str) -> None:
    """Also one in which an early import has used weakref.finalize, whose calls then come after all others at exit."""
    early = "import sys, weakref; weakref.finalize(sys, print)"
    with process_with_engine(model_folder, first=early, then="pass") as process:
        assert process.wait(60) == 0


def test_vllm_ends_with_a_worker_that_is_killed(model_folder: str) -> None:
    with process_with_engine(model_folder, first="import sys, time", then="time.sleep(600)") as process:
        children = processes_of_vllm(process.pid)
        assert children
        process.send_signal(signal.SIGKILL)
    until = time.monotonic() + 20
    while any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children):
        assert time.monotonic() < until, "vLLM runs on"
        time.sleep(0.1)
