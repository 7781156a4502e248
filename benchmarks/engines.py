"""Compare a worker's tokens/s with those of bare vLLM, and time a swap of weights. Needs vLLM: `make test-vllm`.

    python -m benchmarks.engines

`bare` calls AsyncLLM.generate in vLLM's own event loop; `engine` goes through ludic's engine; `worker` plays episodes
of MoarCats, from the environment's example to a group of records. All three sample the same prompts with the same
seeds in the same vLLM, and give the same tokens. A worker's tokens/s are those of its completions.
"""

import asyncio
import gc
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import tyro

from benchmarks.measure import median_ratio, print_table, take_turns
from ludic.agents.agent import Agent
from ludic.engines.engine import Completion, Engine, GenerationRequest, SamplingParams, generate_all
from ludic.environments.moar_cats import WORDS
from ludic.launch.demo import OTHER_WORDS
from ludic.launch.work import work
from ludic.models.chat import load_tokenizer
from ludic.models.tiny import make_tiny_model
from ludic.models.weight_files import load_pretrained
from ludic.rollouts.config import WorkerConfig
from ludic.rollouts.sampler import GroupSampler
from ludic.run_config import RunConfig
from ludic.store import Root, publish_policy

if TYPE_CHECKING:
    from ludic.engines.vllm_engine import VllmEngine

_GROUP = 8
_MAX_TOKENS = 64


def main(quick: bool = False) -> None:
    """Print a table of tokens/s for each width of the model, and one of swaps.

    Args:
        quick: Use one small model and few requests, to check that the benchmark works.
    """
    widths, sizes, rounds = ((64,), (1, 16), 1) if quick else ((64, 256), (1, 16, 256), 9)
    speeds, swaps = [], []
    for width in widths:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            make_tiny_model(folder, [*WORDS, OTHER_WORDS], hidden_size=width)
            engine = _start(folder)
            gc.collect()
            gc.freeze()  # as `ludic worker` does
            stack.callback(engine.close)
            speeds += [[str(width), str(size), *_compare(engine, folder, size, rounds)] for size in sizes]
            swaps.append([str(width), *_time_swaps(engine, folder, sizes[-1], rounds)])
    title = f"engines: {_MAX_TOKENS} tokens a completion, {rounds} rounds; ratios are medians, lowest and highest"
    columns = ["width", "concurrent", "tokens/s, bare vLLM", "engine", "of bare", "worker", "of bare", "range"]
    print_table(title, columns, speeds)
    columns = ["width", "idle, ms", f"{sizes[-1]} in flight, ms", "publish to first completion, ms"]
    print_table(f"engines: a swap of weights, medians of {rounds} rounds", columns, swaps)


def _start(folder: str) -> "VllmEngine":
    from ludic.engines.vllm_engine import VllmEngine

    return VllmEngine(folder)


def _compare(engine: "VllmEngine", folder: str, size: int, rounds: int) -> list[str]:
    """Return a row: size requests at the same time; the smallest size is repeated, since it takes milliseconds."""
    group, repeats = min(size, _GROUP), max(1, 16 // size)
    run = RunConfig(model=folder, env=("moar_cats",), group_size=group, max_tokens=_MAX_TOKENS, accept_incomplete=True)
    recorder = _Recorder(engine)
    calls = [range(number * size // group, (number + 1) * size // group) for number in range(repeats)]
    sampler_of = partial(_sampler, folder, run)
    for numbers in calls:
        sampler_of(recorder).sample(numbers, "bench")
    requests = [recorder.requests[start : start + size] for start in range(0, len(recorder.requests), size)]
    sampler, found = sampler_of(engine), dict[str, list[list[int]]]()

    def bare() -> None:
        outputs = [output for some in requests for output in engine._process.wait(_generate_bare(engine, some))]
        found["bare"] = [list(output.token_ids) for output in outputs]

    def through_engine() -> None:
        completions = [completion for some in requests for completion in generate_all(engine, some)]
        found["engine"] = [completion.tokens.tolist() for completion in completions]

    def worker() -> None:
        groups = [group for numbers in calls for group in sampler.sample(numbers, "bench").groups]
        found["worker"] = [rollout.response_tokens.tolist() for group in groups for rollout in group.rollouts]

    seconds = take_turns({"bare": bare, "engine": through_engine, "worker": worker}, rounds)
    assert sorted(found["bare"]) == sorted(found["engine"]) == sorted(found["worker"]), "different tokens"
    num_tokens = sum(map(len, found["bare"]))
    speed = {name: f"{num_tokens / median(times):,.0f}" for name, times in seconds.items()}
    ratios = [bare_s / worker_s for bare_s, worker_s in zip(seconds["bare"], seconds["worker"], strict=True)]
    of_bare = {name: f"{median_ratio(seconds['bare'], seconds[name]):.2f}x" for name in ("engine", "worker")}
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return [speed["bare"], speed["engine"], of_bare["engine"], speed["worker"], of_bare["worker"], spread]


def _sampler(folder: str, run: RunConfig, engine: Engine) -> GroupSampler:
    return GroupSampler.of_run(run, Agent(engine=engine, tokenizer=load_tokenizer(folder), model="tiny"))


async def _generate_bare(engine: "VllmEngine", requests: Sequence[GenerationRequest]) -> list[Any]:
    """Return vLLM's outputs, as a user of AsyncLLM gets them with the same parameters."""
    from vllm import TokensPrompt

    from ludic.engines.vllm_engine import _to_params

    async def generate(number: int, request: GenerationRequest) -> Any:
        prompt = TokensPrompt(prompt_token_ids=request.prompt_tokens.tolist())
        params = _to_params(request, engine._eos_token_ids, engine._vocab_size)
        async for output in engine._process.llm.generate(prompt, params, f"bare-{number}-{time.monotonic_ns()}"):
            found = output.outputs[0]
        return found

    return await asyncio.gather(*(generate(number, request) for number, request in enumerate(requests)))


class _Recorder:
    """Engine that notes the requests, and the time of the first completion of each version."""

    name, repeats_in_any_batch = "recorder", True

    def __init__(self, engine: "VllmEngine") -> None:
        self._engine = engine
        self.policy_version, self.max_length = engine.policy_version, engine.max_length
        self.max_batch = engine.max_batch
        self.requests: list[GenerationRequest] = []
        self.first: dict[int, float] = {}

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        completion = await self._engine.generate(request)
        self.first.setdefault(completion.policy_version, time.perf_counter())
        return completion

    def load_weights(self, folder: str, version: int) -> None:
        self._engine.load_weights(folder, version)
        self.policy_version = version

    def wait_for(self, version: int) -> float:
        """Return the time of the first completion of a version."""
        until = time.monotonic() + 60
        while version not in self.first:
            if time.monotonic() > until:
                raise TimeoutError(f"the worker has not sampled with version {version} for 60 s")
            time.sleep(0.001)
        return self.first[version]


def _time_swaps(engine: "VllmEngine", folder: str, num_requests: int, rounds: int) -> list[str]:
    idle = [_seconds(partial(engine.load_weights, folder, number)) for number in range(rounds)]
    busy = [asyncio.run(_swap_within(engine, folder, num_requests, number)) for number in range(rounds)]
    return [f"{median(seconds) * 1e3:.0f}" for seconds in (idle, busy, _publish(engine, folder, rounds))]


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


async def _swap_within(engine: "VllmEngine", folder: str, num_requests: int, version: int) -> float:
    params = SamplingParams(max_tokens=4 * _MAX_TOKENS)
    prompt = load_tokenizer(folder)(" ".join(WORDS), return_tensors="np")["input_ids"][0]
    requests = [GenerationRequest(prompt_tokens=prompt, params=params, seed=seed) for seed in range(num_requests)]
    tasks = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    await engine.generate(GenerationRequest(prompt_tokens=prompt, params=SamplingParams(max_tokens=8), seed=0))
    seconds = await asyncio.to_thread(_seconds, partial(engine.load_weights, folder, version))
    await asyncio.gather(*tasks)
    return seconds


def _publish(engine: "VllmEngine", folder: str, rounds: int) -> list[float]:
    """Return seconds from the end of a publication to the first completion, of one token, of a busy worker."""
    recorder, stop, seconds = _Recorder(engine), threading.Event(), []
    model = load_pretrained(folder, dtype=None)

    def save(target: Path) -> None:
        model.save_pretrained(target)
        load_tokenizer(folder).save_pretrained(target)

    with tempfile.TemporaryDirectory() as url:
        run = RunConfig(model=folder, env=("moar_cats",), max_tokens=1, accept_incomplete=True)
        root = Root.create(f"{url}/run", run)
        publish = partial(publish_policy, root, save, attempt_id=1, budget=1)
        publish(step=0, parent_version=None)
        config = WorkerConfig(slot=0, follow_budget=False)
        worker = threading.Thread(
            target=partial(work, root, config, stop, engine=recorder, report=lambda batch: None), daemon=True
        )
        worker.start()
        try:
            for step in range(1, rounds + 1):
                recorder.wait_for(step - 1)
                version = publish(step=step, parent_version=step - 1)
                published = time.perf_counter()
                seconds.append(recorder.wait_for(version) - published)
        finally:
            stop.set()
            worker.join()
    return seconds


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
