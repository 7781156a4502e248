"""How full workers and evaluations keep an engine with answers of unlike length, and how old used rollouts are.

    python -m benchmarks.in_flight

Time is simulated: a decoding step takes the same time whatever the batch is, and nothing sleeps. All else is real: the
worker with its episodes, budget and files, the trainer's source, planner, ledger and publishing, one after the other in
a process. A training step is time on the clock. Lengths of answers are log-normal with a sigma of 1, mean 4,000, at
most 32,768 tokens; one simulated token stands for 16, so that the figures come in minutes.

`fill` is the mean number of sequences in the batch over max_batch, while requests remain to be started. The first table
has no trainer; `calls of 64` is a worker that samples a batch of 64 episodes, then the next one. `block by block` is an
evaluation that begins a block of 32 examples when the last one is stored.
"""

import asyncio
import itertools
import logging
import math
import random
import selectors
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import ludic
from benchmarks.measure import print_table
from ludic.agents import Agent
from ludic.engines import Completion, GenerationRequest
from ludic.environments import Example, LimitedEnvironments, Score, SingleTurn, Split, Transition, event_loops
from ludic.eval import EvalConfig, evaluate
from ludic.models import load_tokenizer, make_tiny_model
from ludic.records import Message, WeightSpan
from ludic.rollouts import EngineCalls, GroupSampler, Scheduler, WorkerConfig, episodes_of_run, opened_stream
from ludic.root import Root, start_attempt
from ludic.root.rows import RolloutWriter, write_ledger
from ludic.run import RunConfig, create_root
from ludic.settings import SideThread, run_script
from ludic.training import Publisher, TrainConfig
from ludic.training.batches import OnlineSource, online

TOKENS_EACH = 16
"""Tokens that one simulated token stands for."""
MEAN, LONGEST = 4000 // TOKENS_EACH, 32768 // TOKENS_EACH
STEP_S = 0.02 * TOKENS_EACH
"""Seconds of a decoding step of the clock."""
GROUP_SIZE, GROUPS_PER_BATCH, NUM_TURNS = 8, 8, 5
_LONG = 2 * MEAN
"""Tokens of an answer that counts as long."""


def main(quick: bool = False, requests: int = 20_000, steps: int = 150, examples: int = 1000) -> None:
    """Print three tables.

    Args:
        quick: Sample few requests, to check that the benchmark works.
        requests: Requests of each cell of the first table.
        steps: Training steps of each row of the last table.
        examples: Examples of an evaluation.
    """
    requests, steps, examples = (400, 2, 128) if quick else (requests, steps, examples)
    logging.getLogger("ludic").setLevel("ERROR")  # else the trainer says that it waits, every 30 s of the clock
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        make_tiny_model(model, ["say something"], max_position_embeddings=2**20)
        rows = []
        for max_batch, waits_s in (
            [(64, None), (64, 0.05)] if quick else itertools.product((64, 256), (None, 0.0, 0.005, 0.05, 0.5))
        ):
            fills = [_fill(model, max_batch, waits_s, requests, calls) for calls in (False, True)]
            assert min(fills) > 0, "no episode reached the engine"
            kind = "single answers" if waits_s is None else f"{NUM_TURNS} turns, steps of {1e3 * waits_s:.0f} ms"
            rows.append([str(max_batch), kind, *(f"{fill:.2f}" for fill in fills)])
        print_table(
            f"in_flight: fill of the batch while {requests:,} requests are sampled",
            ["max_batch", "episodes", "stream", "calls of 64"],
            rows,
        )
        rows = []
        for max_batch in (64,) if quick else (64, 256):
            stream, blocks = (
                _evaluate(model, f"{folder}/{max_batch}-{each}", max_batch, examples, each) for each in (False, True)
            )
            assert stream[0] > blocks[0], f"a stream fills {stream[0]:.2f} of the batch, single blocks {blocks[0]:.2f}"
            rows.append([str(max_batch), *(f"{cell:.2f}" for cell in (stream[0], blocks[0], stream[1], blocks[1]))])
        print_table(
            f"in_flight: an evaluation of {examples:,} examples in blocks of {EvalConfig().examples_per_call}",
            ["max_batch", "fill of the stream", "block by block", "hours of the stream", "block by block"],
            rows,
        )
        rows = []
        for max_batch, ahead in [(64, None)] if quick else itertools.product((64, 256), (None, 0, 1, 2, 4, 8)):
            found = _train(model, f"{folder}/{max_batch}-{ahead}", max_batch, ahead, steps)
            rows.append([str(max_batch), "default" if ahead is None else str(ahead), *found])
        print_table(
            f"in_flight: a run of {steps} steps of {GROUPS_PER_BATCH} groups of {GROUP_SIZE}, on a simulated clock",
            ["max_batch", "batches_ahead", "fill", "off-policy steps", "most", "tokens dropped", "of long answers"],
            rows,
        )


# --- The clock -------------------------------------------------------------------------------------------


class NoWaits(selectors.SelectSelector):
    """Moves the clock of the event loop on instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now_s += timeout or 0.0
        return super().select(0)


class Clock(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own; also the time and the stop event of code that does not run in it."""

    def __init__(self, no_waits: NoWaits | None = None) -> None:
        self._no_waits = no_waits or NoWaits()
        super().__init__(self._no_waits)

    def time(self) -> float:
        return self._no_waits.now_s

    monotonic = time

    def wait(self, timeout: float | None = None) -> bool:
        """Let time pass, and what is due in it happen."""
        self.run_until_complete(asyncio.sleep(timeout or 0.0))
        return False

    def is_set(self) -> bool:
        return False

    def __enter__(self) -> "Clock":
        return self

    def __exit__(self, *error: object) -> None:
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.wait(1.0)
        self.close()


async def _run_here(thread: SideThread, function: Callable[[], Any]) -> Any:
    return function()


@contextmanager
def without_threads() -> Iterator[None]:
    """Call what would run in a side thread at once, and wait for each file, so that the clock stands still for them."""
    flush = RolloutWriter.flush
    with (
        mock.patch.object(SideThread, "run", _run_here),
        mock.patch.object(RolloutWriter, "flush", lambda writer, wait=True: flush(writer)),
    ):
        yield


# --- Engine and environments -----------------------------------------------------------------------------


@dataclass
class SimulatedEngine:
    """Decodes up to max_batch sequences together, one token each in STEP_S; changes weights between two tokens."""

    clock: Clock
    max_batch: int
    name: str = "simulated 1"
    repeats_in_any_batch: bool = True
    policy_version: int = 0
    max_length: int = 2**20
    loads: list[tuple[float, int]] = field(default_factory=list)
    """Time and version of each change of the weights."""
    _busy_s: float = 0.0
    """Sum over the sequences of the seconds in the batch, up to `_counted_s`."""
    _counted_s: float = 0.0
    _num_running: int = 0
    fill: float = 0.0
    """Mean number of sequences in the batch over max_batch, until the last one began."""

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.max_batch)

    async def generate(self, request: GenerationRequest) -> Completion:
        length = length_of(request.seed)
        async with self._slots:
            began_s = self.clock.time()
            self._count(1)
            self.fill = self._busy_s / max(began_s, STEP_S) / self.max_batch
            try:
                await asyncio.sleep(length * STEP_S)
            finally:
                self._count(-1)
        return Completion(
            tokens=np.full(length, 5, np.int32),
            columns={"response_logprobs": np.full(length, -1.0, np.float32)},
            finish_reason="stop",
            weight_versions=self._spans(began_s, length),
        )

    def load_weights(self, folder: str, version: int) -> None:
        self.policy_version = version
        self.loads.append((self.clock.time(), version))

    def busy_s(self) -> float:
        """Return the seconds of all sequences in the batch until now."""
        self._count(0)
        return self._busy_s

    def _count(self, change: int) -> None:
        now_s = self.clock.time()
        self._busy_s += self._num_running * (now_s - self._counted_s)
        self._counted_s, self._num_running = now_s, self._num_running + change

    def _spans(self, began_s: float, length: int) -> tuple[WeightSpan, ...]:
        starts = {0: max((version for time_s, version in self.loads if time_s <= began_s), default=0)}
        for time_s, version in self.loads:
            if time_s > began_s and (start := math.ceil((time_s - began_s) / STEP_S)) < length:
                starts[start] = version
        ends = [*list(starts)[1:], length]
        return tuple(
            WeightSpan(version=version, start=start, end=end)
            for (start, version), end in zip(starts.items(), ends, strict=True)
        )


def length_of(seed: int) -> int:
    """Return the tokens of an answer: log-normal, sigma 1."""
    return max(1, min(LONGEST, round(MEAN * math.exp(random.Random(seed).gauss(-0.5, 1.0)))))


class Answers:
    """A question, and a score by chance."""

    def example(self, index: int, split: Split) -> Example:
        return Example(example_id=str(index), messages=(Message(role="user", content="say something"),))

    def score(self, example: Example, answer: str) -> Score:
        return Score(reward=random.random())


class Turns:
    """NUM_TURNS steps, each of which takes `wait_s`."""

    wait_s = 0.0

    def example(self, index: int, split: Split) -> Example:
        return Answers().example(index, split)

    def reset(self, example: Example) -> tuple[Message, ...]:
        self._num_steps = 0
        return example.messages

    async def step(self, action: str) -> Transition:
        await asyncio.sleep(self.wait_s)
        self._num_steps += 1
        is_over = self._num_steps == NUM_TURNS
        return Transition(observation="say something", reward=1.0, terminated=is_over)


# --- Without a trainer -----------------------------------------------------------------------------------


def _fill(model: str, max_batch: int, wait_s: float | None, num_requests: int, in_calls: bool) -> float:
    """Return the mean fill until the last episode begins. in_calls: 64 episodes begin when all before have ended."""
    run = RunConfig(model=model, env=("benchmark",), group_size=GROUP_SIZE, max_tokens=LONGEST, accept_incomplete=True)
    make = partial(SingleTurn, Answers()) if wait_s is None else type("Waits", (Turns,), {"wait_s": wait_s})
    environments = {"benchmark": LimitedEnvironments("benchmark", make)}
    num_groups = num_requests // GROUP_SIZE // (1 if wait_s is None else NUM_TURNS)
    with Clock() as clock:
        engine = SimulatedEngine(clock, max_batch)
        calls = EngineCalls(engine)
        agent = Agent(engine=calls, tokenizer=load_tokenizer(model), model=model)
        sampler = GroupSampler(run=run, run_episode=episodes_of_run(run, agent), environments=environments)

        async def sample() -> float:
            pump = Scheduler(sampler.run_episode, environments, {}, calls=None if in_calls else calls)
            fill, numbers, at_once = 0.0, iter(range(num_groups)), 64 // GROUP_SIZE if in_calls else 1
            while True:
                while pump.num_open == 0 if in_calls else pump.has_room:
                    begun = list(itertools.islice(numbers, at_once))
                    for number in begun:
                        pump.start(number, sampler.episodes(number))
                    if not begun:
                        break
                    await asyncio.sleep(0)
                    fill = engine.busy_s() / max(clock.time(), STEP_S) / max_batch
                if pump.num_open == 0:
                    return fill
                await pump.wait()

        return clock.run_until_complete(sample())


# --- An evaluation ---------------------------------------------------------------------------------------


def _evaluate(model: str, url: str, max_batch: int, num: int, block_by_block: bool) -> tuple[float, float]:
    """Evaluate version 0 on `num` examples; returns the fill of the batch until the last one begins, and the hours."""
    environment = f"{Path(__file__).resolve()}:Answers"
    run = RunConfig(model=model, env=(environment,), max_tokens=LONGEST, accept_incomplete=True)
    root = create_root(url, run)
    stop = threading.Event()
    with ExitStack() as stack:
        clock = stack.enter_context(Clock())
        stack.enter_context(without_threads())
        stack.enter_context(mock.patch.object(event_loops, "run", clock.run_until_complete))
        engine = SimulatedEngine(clock, max_batch)
        # Examples that are stored are not sampled again, so each of many evaluations samples one further block.
        step = EvalConfig().examples_per_call if block_by_block else num
        for num_examples in (*range(step, num, step), num):
            config = EvalConfig(num_examples=num_examples)
            evaluate(root, {"": config}, lambda folder, version: engine, stop, report=lambda batch: None)
        num_samples = ludic.open(url).sql("select count(*) as n from evals")["n"].item()
        assert num_samples == num, f"{num_samples} samples are stored"
        return engine.fill, clock.time() / 3600


# --- The whole run ---------------------------------------------------------------------------------------


def _train(model: str, url: str, max_batch: int, batches_ahead: int | None, num_steps: int) -> list[str]:
    """Train on the clock; returns the cells of a row."""
    environment = f"{Path(__file__).resolve()}:Answers"
    run = RunConfig(
        model=model,
        env=(environment,),
        group_size=GROUP_SIZE,
        groups_per_batch=GROUPS_PER_BATCH,
        max_tokens=LONGEST,
        batches_ahead=batches_ahead,
        accept_incomplete=True,
    )
    root = create_root(url, run)
    with ExitStack() as stack:
        clock = stack.enter_context(Clock())
        stack.enter_context(without_threads())
        stack.enter_context(mock.patch.object(online, "time", clock))
        engine = SimulatedEngine(clock, max_batch)
        trainer = _Trainer(root, clock, model, max_batch)
        stack.callback(trainer.close)
        trainer.publish(0)
        config = WorkerConfig(slot=0)
        stop = threading.Event()
        stream = stack.enter_context(opened_stream(root, config, lambda folder, version: engine, stop))
        assert stream.wait_for_policy()
        task = clock.create_task(stream.run())
        trainer.train(num_steps)
        fill = engine.busy_s() / clock.time() / max_batch
        stop.set()
        clock.run_until_complete(task)
    return [f"{fill:.2f}", *_ages(root)]


class _Trainer:
    """The only rank of a trainer, without a model; a step takes 60% of the time that its rollouts take at full fill."""

    def __init__(self, root: Root, clock: Clock, model: str, max_batch: int) -> None:
        self._root, self._clock, self._model = root, clock, Path(model)
        self._step_s = 0.6 * GROUPS_PER_BATCH * GROUP_SIZE * MEAN * STEP_S / max_batch
        config = TrainConfig.of(num_steps=1).batch
        self._attempt = start_attempt(root)
        most = config.max_off_policy_steps
        self._publisher = Publisher(root, self._attempt, keep=2, max_off_policy_steps=most)
        self._source = OnlineSource(root, config, clock)  # type: ignore[arg-type]
        self._source.resume(None, self._publisher)

    def train(self, num_steps: int) -> None:
        self._plan(1)
        for step in range(1, num_steps + 1):
            over_s = self._clock.time() + self._step_s
            self._clock.call_at(over_s, self.publish, step)
            if step < num_steps:
                self._plan(step + 1)
            self._clock.wait(max(0.0, over_s - self._clock.time()))

    def publish(self, step: int) -> None:
        self._publisher.publish(self._save, step=step)

    def close(self) -> None:
        self._publisher.close()

    def _plan(self, step: int) -> None:
        plan = self._source.plan(step, attempt_id=self._attempt.attempt_id, trainer_version=step - 1)
        assert plan is not None
        write_ledger(self._root, self._attempt, step, plan.rows)

    def _save(self, folder: Path) -> None:
        for file in self._model.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())


_AGES = """
with tokens as (
    select
        response_length,
        response_length > $long as is_long,
        off_policy_steps,
        coalesce(used, false) as is_used,
        coalesce(not used, policy_version < (select max(step) from batches) - $window - 1) as is_dropped
    from rollouts
    left join (select rollout_id, used, off_policy_steps from batches) using (rollout_id)
)

select
    avg(off_policy_steps) filter (where is_used) as mean_age,
    max(off_policy_steps) filter (where is_used) as most,
    sum(response_length) filter (where is_dropped) / sum(response_length) as dropped,
    sum(response_length) filter (where is_dropped and is_long) / sum(response_length) filter (where is_long) as of_long
from tokens
"""
"""Rollouts that nobody read are dropped once they are older than the window; the newest may still be used."""


def _ages(root: Root) -> list[str]:
    window = TrainConfig.of(num_steps=1).batch.max_off_policy_steps
    (row,) = ludic.open(root.url).sql(_AGES, {"long": _LONG, "window": window}).to_dicts()
    shares = [f"{row[name] or 0.0:.1%}" for name in ("dropped", "of_long")]
    return [f"{row['mean_age']:.1f}", str(row["most"]), *shares]


if __name__ == "__main__":
    run_script(main, description=__doc__)
