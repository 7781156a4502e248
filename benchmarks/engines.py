"""Compare a worker's tokens/s with those of a bare engine, answers of unlike length, and time swaps of weights.

    python -m benchmarks.engines          # vLLM needs the environment of `make test-vllm`; else transformers alone

Lengths of answers are log-normal with a sigma of 1, at most 8 times the mean, by the request's seed; the model never
stops. The means are small, since the models are: the cost of an episode counts for more with short answers. `bare`
keeps as many requests in flight as the batch holds: it calls AsyncLLM.generate in vLLM's own event loop, or `generate`
of ludic's engine transformers, which has no other front. `worker` is the stream of `ludic worker`: the episodes of
MoarCats, records, files. Both sample the same tokens for the same prompts. Speed is measured while the batch is full:
from the first max_batch completions until the last request has begun. `by CPU time` compares tokens per second of CPU
time, vLLM's process included, which other programs on the machine hardly change; what runs beside the model is not free
there.

Swaps are timed while one half of the batch is answers of 400 tokens, the other one answers of 1 to 24, of which about
two end at each decoding step; the first one that ends with the new version tells when its first token came. Decoding
stands still during a swap, and on a server from its pause to its resumption; `still` is the share of the time for that
if five versions a minute are published.
"""

import asyncio
import gc
import math
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import numpy as np
import psutil  # type: ignore[import-untyped]
from transformers import GenerationConfig

import ludic
from benchmarks.measure import print_table
from benchmarks.ports import free_port
from ludic.app import OTHER_WORDS, ServerArguments, work
from ludic.base import is_installed, start_python
from ludic.engines import (
    Completion,
    Engine,
    EngineConfig,
    EngineSetup,
    GenerationRequest,
    SamplingParams,
    ServerEngine,
    engine_maker,
)
from ludic.environments import WORDS
from ludic.errors import NoServerError
from ludic.models import load_pretrained, load_tokenizer, make_tiny_model
from ludic.rollouts import WorkerConfig
from ludic.root import Root
from ludic.root.weights import publish_policy
from ludic.run import RunConfig, put_run
from ludic.settings import run_script

_GROUP = 8
_LONGEST = 8
"""Tokens of the longest answer, as a multiple of the mean."""
_LONG, _SHORT = 400, (1, 24)
"""Tokens of the answers that are in flight while weights are replaced; the short ones tell when a token came."""


def main(
    quick: bool = False,
    rounds: int = 9,
    engines: tuple[str, ...] = ("transformers", "vllm", "server"),
    batches: tuple[int, ...] = (64,),
    means: tuple[int, ...] = (64, 256),
) -> None:
    """Print a table of tokens/s and one of swaps.

    Args:
        quick: Use one round, few requests and no server, to check that the benchmark works.
        rounds: Rounds, in turns, after one that warms up.
        engines: Engines to measure, of those that are installed. `server` is a vLLM server of this machine; only its
            swaps are timed.
        batches: Sequences in a full batch.
        means: Mean lengths of the answers, in tokens.
    """
    rounds, batches, means = (1, (8,), (16,)) if quick else (rounds, batches, means)
    speeds, swaps, publications = [], [], []
    for name in engines:
        if (name == "server" and quick) or (name != "transformers" and not is_installed("vllm")):
            continue
        for max_batch in batches:
            with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
                _make_model(folder, _LONGEST * max(means) + 512)
                engine = _start(name, folder, max_batch, stack)
                _children.cache_clear()
                gc.collect()
                gc.freeze()  # as `ludic worker` does
                stack.callback(gc.unfreeze)
                for mean in means if name != "server" else ():
                    num_requests = (4 if quick else max(6, 768 // mean)) * max_batch
                    row = _compare(engine, folder, mean, num_requests, rounds)
                    speeds.append([name, str(max_batch), str(mean), *row])
                swaps.append([name, str(max_batch), *_time_swaps(engine, folder, rounds)])
                publications.append([name, str(max_batch), *_publish(engine, folder, means[0], rounds)])
    columns = ["engine", "in flight", "mean length", "tokens/s, bare", "worker", "of bare", "by CPU time"]
    print_table(f"engines: log-normal lengths; medians of {rounds} rounds", columns, speeds)
    columns = ["engine", "in flight", "step, ms", "swap, ms", "first token, ms", "after the swap, steps (most)"]
    title = f"engines: a swap under answers of {_LONG} tokens, medians of {rounds}"
    print_table(title, [*columns, "still, at 5 a minute"], swaps)
    columns = ["engine", "in flight", "poll, ms", "fetch, ms", "load, ms", "first token, ms"]
    print_table(
        f"engines: from a publication to a busy worker's first token, medians of {rounds}", columns, publications
    )


def _make_model(folder: str, num_positions: int) -> None:
    """Write a model without an end-of-sequence token."""
    words = [*WORDS, OTHER_WORDS]
    make_tiny_model(folder, words, max_position_embeddings=num_positions)
    model = load_pretrained(folder, dtype=None)
    model.config.eos_token_id = None
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)


def _start(name: str, folder: str, max_batch: int, stack: ExitStack) -> Engine:
    """Return an engine, which ends with the stack."""
    if name == "server":
        return _start_server(folder, max_batch, stack)
    config = EngineConfig(engine=name, max_batch=max_batch)
    engine = engine_maker(EngineSetup(config=config, device="cpu"))(folder, 0)
    stack.callback(getattr(engine, "close", lambda: None))
    return engine


def _start_server(folder: str, max_batch: int, stack: ExitStack) -> Engine:
    """Start vLLM as `ludic serve` does, and return an engine that loads its weights."""
    port = free_port()
    settings = asdict(EngineConfig(engine="vllm", max_batch=max_batch))
    arguments = ServerArguments(folder=folder, host="127.0.0.1", port=port, float32_head=False, engine=settings)
    process = start_python(["-m", *arguments.to_args()], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    while True:
        try:
            engine = ServerEngine(folder, [f"http://127.0.0.1:{port}"], max_batch=max_batch, loads_all=True)
        except NoServerError:  # it is starting
            if process.poll() is not None:
                raise
        else:
            stack.callback(engine.close)
            return cast(Engine, engine)


def length_of(seed: int, mean: int) -> int:
    """Return the tokens of an answer."""
    mu = math.log(mean) - 0.5  # the mean is exp(mu + 1/2)
    return max(1, min(_LONGEST * mean, round(math.exp(random.Random(seed).gauss(mu, 1.0)))))


# --- Speed -----------------------------------------------------------------------------------------------


class _Now(NamedTuple):
    clock_s: float
    cpu_s: float
    """Of this process, and of vLLM's, which is its child."""


@cache
def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _now() -> _Now:
    of_children = (child.cpu_times() for child in _children())
    return _Now(time.perf_counter(), time.process_time() + sum(each.user + each.system for each in of_children))


@dataclass
class _Unlike:
    """An engine whose answers have the lengths of their seeds; notes requests and when their answers were whole."""

    engine: Engine
    mean: int
    requests: list[GenerationRequest] = field(default_factory=list)
    ends: list[tuple[_Now, Completion]] = field(default_factory=list)
    loads: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Begin and end of each version's load."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, request: GenerationRequest) -> Completion:
        request = replace(request, params=SamplingParams(max_tokens=length_of(request.seed, self.mean)))
        self.requests.append(request)
        completion = await self.engine.generate(request)
        self.ends.append((_now(), completion))
        return completion

    def load_weights(self, folder: str, version: int) -> None:
        began = time.perf_counter()
        self.engine.load_weights(folder, version)
        self.loads[version] = began, time.perf_counter()

    def first_of(self, version: int) -> float | None:
        """Return when the first answer was whole whose last token is of a version; None if none is yet."""
        if version not in self.loads:
            return None
        return next((end.clock_s for end, found in list(self.ends) if found.policy_version_last == version), None)


def _compare(engine: Engine, folder: str, mean: int, num_requests: int, rounds: int) -> list[str]:
    speeds: dict[str, list[tuple[float, float]]] = {"bare": [], "worker": []}
    for number in range(rounds + 1):
        sampled = _sample_as_worker(engine, folder, mean, num_requests)
        bare = _sample_bare(engine, sampled.requests)
        of_worker = [(end, completion.tokens) for end, completion in sampled.ends]
        if engine.repeats_in_any_batch:
            tokens = [sorted(tokens.tolist() for _, tokens in ends) for ends in (bare, of_worker)]
            assert tokens[0] == tokens[1], "the contestants sampled different tokens"
        for name, ends in (("bare", bare), ("worker", of_worker)):
            if number > 0:
                speeds[name].append(_speed(ends, engine.max_batch))
    cells = [f"{median(by_clock for by_clock, _ in speeds[name]):,.0f}" for name in ("bare", "worker")]
    for worker, bare_speeds in zip(zip(*speeds["worker"], strict=True), zip(*speeds["bare"], strict=True), strict=True):
        ratios = [top / bottom for top, bottom in zip(worker, bare_speeds, strict=True)]
        cells.append(f"{median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return cells


def _speed(ends: Sequence[tuple[_Now, np.ndarray]], max_batch: int) -> tuple[float, float]:
    """Return tokens per second of the clock, and of CPU time, of the answers that ended while the batch was full."""
    full = ends[max_batch - 1 : len(ends) - max_batch]
    num_tokens, first, last = sum(len(tokens) for _, tokens in full[1:]), full[0][0], full[-1][0]
    return num_tokens / (last.clock_s - first.clock_s), num_tokens / (last.cpu_s - first.cpu_s)


def _sample_as_worker(engine: Engine, folder: str, mean: int, num_requests: int) -> _Unlike:
    unlike = _Unlike(engine, mean)
    with tempfile.TemporaryDirectory() as url:
        root, _ = _published(url, folder, mean)
        config = WorkerConfig(slot=0, num_groups=num_requests // _GROUP, follow_budget=False)
        work(root, config, threading.Event(), engine=cast(Engine, unlike), report=lambda batch: None)
    return unlike


def _published(url: str, folder: str, mean: int) -> tuple[Root, Callable[[int], int]]:
    """Return a root with a first version, and a function that publishes another one and returns its number."""
    model = load_pretrained(folder, dtype=None)

    def save(target: Path) -> None:
        model.save_pretrained(target)
        load_tokenizer(folder).save_pretrained(target)

    def publish(step: int) -> int:
        return publish_policy(root, save, step=step, attempt_id=1, budget=1, parent_version=step - 1 if step else None)

    most = _LONGEST * mean
    run = RunConfig(model=folder, env=("moar_cats",), group_size=_GROUP, max_tokens=most, accept_incomplete=True)
    root = put_run(f"{url}/run", run)
    publish(0)
    return root, publish


def _sample_bare(engine: Engine, requests: Sequence[GenerationRequest]) -> list[tuple[_Now, np.ndarray]]:
    """Return when each answer was whole, and its tokens, with max_batch requests in flight until none is left."""
    ends: list[tuple[_Now, Any]] = []

    async def refill(generate: Callable[[GenerationRequest], Awaitable[Any]]) -> None:
        waiting = iter(requests)

        async def one_by_one() -> None:
            for request in waiting:
                tokens = await generate(request)
                ends.append((_now(), tokens))

        await asyncio.gather(*(one_by_one() for _ in range(engine.max_batch)))

    if engine.name.startswith("vllm"):
        from ludic.engines import VllmEngine

        assert isinstance(engine, VllmEngine)
        engine._process.wait(refill(partial(_generate_bare, engine)))
    else:

        async def tokens_of(request: GenerationRequest) -> np.ndarray:
            return (await engine.generate(request)).tokens

        asyncio.run(refill(tokens_of))
    return [(end, np.asarray(tokens)) for end, tokens in ends]


async def _generate_bare(engine: Any, request: GenerationRequest) -> Sequence[int]:
    """Return vLLM's tokens, as a user of AsyncLLM gets them with the same parameters."""
    from vllm import TokensPrompt

    from ludic.engines.vllm_engine import _to_params

    prompt = TokensPrompt(prompt_token_ids=request.prompt_tokens.tolist())
    params = _to_params(request, engine._eos_token_ids, engine._vocab_size)
    async for output in engine._process.llm.generate(prompt, params, f"bare-{request.seed}-{time.monotonic_ns()}"):
        found = output.outputs[0]
    return found.token_ids


# --- Swaps -----------------------------------------------------------------------------------------------


def _time_swaps(engine: Engine, folder: str, rounds: int) -> list[str]:
    """Return a decoding step, a swap, the time from its begin to the new version's first token, and what follows."""
    swap = partial(_swap_within, engine, folder, _note_pauses(engine))
    found = [asyncio.run(swap(number)) for number in range(1, rounds + 2)][1:]
    cells = [f"{median(each[part] for each in found) * 1e3:.1f}" for part in ("step", "swap", "first")]
    beyond = [(each["first"] - each["swap"]) / each["step"] for each in found]
    still = median(each["still"] for each in found)
    return [*cells, f"{median(beyond):.1f} ({max(beyond):.1f})", f"{still * 5 / 60:.2%}"]


async def _swap_within(engine: Engine, folder: str, pauses: Sequence[float], version: int) -> dict[str, float]:
    """Return seconds, by name. pauses: from `_note_pauses`.

    One half of the batch is long answers, the other one short ones, one after the other.
    """
    prompt = load_tokenizer(folder)(" ".join(WORDS), return_tensors="np")["input_ids"][0][:32]
    draw = random.Random(version)
    ends: list[tuple[float, int]] = []
    is_over = asyncio.Event()

    async def sample(length: int) -> None:
        params = SamplingParams(max_tokens=length)
        seed = draw.getrandbits(32)
        found = await engine.generate(GenerationRequest(prompt_tokens=prompt, params=params, seed=seed))
        ends.append((time.perf_counter(), found.policy_version_last))

    async def sample_short_ones() -> None:
        while not is_over.is_set():
            await sample(draw.randint(*_SHORT))

    started = time.perf_counter()
    num_long = engine.max_batch // 2
    long = [asyncio.ensure_future(sample(_LONG)) for _ in range(num_long)]
    short = [asyncio.ensure_future(sample_short_ones()) for _ in range(engine.max_batch - num_long)]
    while len(ends) < engine.max_batch:
        await asyncio.sleep(0.001)
    began, ended = await asyncio.to_thread(_timed, partial(engine.load_weights, folder, version))
    await asyncio.gather(*long)
    is_over.set()
    whole = time.perf_counter()
    await asyncio.gather(*short)
    first = next(end for end, last in ends if last == version)
    still = pauses[-1] if pauses else ended - began
    step = (whole - started - still) / _LONG
    return {"step": step, "swap": ended - began, "first": first - began, "still": still}


def _note_pauses(engine: Engine) -> list[float]:
    """Return a list that gets the seconds of each pause of a server; others stand still as long as a swap takes."""
    pauses: list[float] = []
    if isinstance(engine, ServerEngine):
        [member] = engine._pool._members
        pause, resume = member.server.pause, member.server.resume

        async def noted_pause() -> None:
            pauses.append(-time.perf_counter())
            await pause()

        async def noted_resume() -> None:
            await resume()
            pauses[-1] += time.perf_counter()

        member.server.pause, member.server.resume = noted_pause, noted_resume  # type: ignore[method-assign]
    return pauses


def _timed(call: Callable[[], object]) -> tuple[float, float]:
    began = time.perf_counter()
    call()
    return began, time.perf_counter()


def _publish(engine: Engine, folder: str, mean: int, rounds: int) -> list[str]:
    """Return parts of the time from the end of a publication to the first token that a busy worker samples with it."""
    unlike, stop, found = _Unlike(engine, mean), threading.Event(), []
    with tempfile.TemporaryDirectory() as url:
        root, publish = _published(url, folder, mean)
        config = WorkerConfig(slot=0, follow_budget=False)
        arguments: dict[str, Any] = {"engine": cast(Engine, unlike), "report": lambda batch: None}
        worker = threading.Thread(target=partial(work, root, config, stop, **arguments), daemon=True)
        worker.start()
        try:
            _until(lambda: len(unlike.ends) > 2 * engine.max_batch)
            for step in range(1, rounds + 1):
                version = publish(step)
                published = time.perf_counter()
                first = _until(partial(unlike.first_of, version))
                found.append((version, published, *unlike.loads[version], first))
                time.sleep(random.Random(step).uniform(1.0, 3.0))  # until the worker looks for versions seldom
        finally:
            stop.set()
            worker.join()
        rows = ludic.open(root.url).sql("select policy_version, fetch_s from metrics where fetch_s is not null").rows()
    fetches = dict(rows)
    parts = [
        (began - published - fetches[version], fetches[version], ended - began, first - ended)
        for version, published, began, ended, first in found
        if version in fetches
    ]
    return [f"{median(column) * 1e3:.0f}" for column in zip(*parts, strict=True)]


def _until(look: Callable[[], Any]) -> Any:
    """Return what `look` returns once it is true."""
    until = time.monotonic() + 60
    while not (found := look()):
        if time.monotonic() > until:
            raise TimeoutError("the worker has done nothing for 60 s")
        time.sleep(0.001)
    return found


if __name__ == "__main__":
    run_script(main, description=__doc__)
