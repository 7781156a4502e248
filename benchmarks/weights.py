"""Compare publishing bfloat16 weights as differences with publishing all of them, over S3, under real training steps.

    python -m benchmarks.weights

A model of 98 M parameters with random weights takes gradient steps of the trainer (AdamW, float32) on random tokens.
After each step its weights are published by the trainer's own code, in turns in full and as differences to the version
before. A reader that has the version before fetches each, loads it into the transformers engine and samples one token.
The server is moto on the same machine, with 20 ms added to each response. Its bandwidth is that of a local socket; over
a network, the bytes cost more.

Then a run of a small model, with a real trainer and worker processes over the same server, measures four numbers: the
seconds from a publish to the first token of the version, the bytes of a publish, the tokens that a SIGKILL of a worker
loses, and the off-policy steps of what was trained on.
"""

import multiprocessing
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import ludic
from benchmarks.measure import median_ratio, print_table
from benchmarks.models import make_model
from benchmarks.s3_server import BUCKET, s3_server
from ludic.base import init_distributed, shut_down
from ludic.engines import EngineConfig, GenerationRequest, SamplingParams, TransformersEngine, continuous, generate_all
from ludic.environments import WORDS
from ludic.models import make_tiny_model
from ludic.rollouts import WorkerConfig, run_worker
from ludic.root import Root
from ludic.root.weights import PolicyWriter, claim_policy, fetch_policy, prune_policies, write_delta
from ludic.run import RunConfig, put_run
from ludic.settings import run_script
from ludic.training import TrainConfig, build_optimizer, full_state_dict, publish_dtype, save_weights, train, train_step
from ludic.training.batches import TrainingSequence, pack

S3_LATENCY_S = 0.02
LEARNING_RATES = (1e-6, 1e-5, 1e-4)
SIZES = {"vocab_size": 32_768, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 11}
QUICK_SIZES = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
FULL, DIFFERENCES = "in full", "as differences"

RUN_NUMBERS = """
select
    median(first_token_s) as first_token_s, max(first_token_s) as slowest_first_token_s,
    median(fetch_s) as fetch_s, median(load_s) as load_s, median(publish_write_s) as write_s,
    median(publish_bytes) as publish_bytes, max(publish_bytes) as full_bytes,
    avg(off_policy_steps_mean) as off_policy_steps, max(off_policy_steps_max) as most_off_policy_steps
from metrics
"""

Figures = Mapping[str, float]


def main(quick: bool = False) -> None:
    """Print three tables: bytes, seconds, and the four numbers of a run.

    Args:
        quick: Use small models and few steps, and no run, to check that the benchmark works; the figures mean nothing.
    """
    rates, num_versions = (LEARNING_RATES[:1], 2) if quick else (LEARNING_RATES, 9)
    with s3_server(S3_LATENCY_S):
        init_distributed("cpu")
        found = {rate: list(_publish_steps(rate, num_versions, QUICK_SIZES if quick else SIZES)) for rate in rates}
        _print_bytes(found)
        _print_seconds(found)
        if not quick:
            _print_run(num_steps=60, num_kills=8)
        shut_down()


# --- Publishing after each gradient step ----------------------------------------------------------------------


class _Reader:
    """Publishes one way, and reads each version as a worker does."""

    def __init__(self, full_every: int | None, folder: Path) -> None:
        run = RunConfig(model="none", env=("moar_cats",))
        self._root = put_run(f"s3://{BUCKET}/weights-{time.time_ns()}", run)
        self._writer, self._cache = PolicyWriter(self._root, full_every), folder
        self.close = self._writer.close
        self.engine: TransformersEngine | None = None

    def publish(self, model: PreTrainedModel, config: TrainConfig) -> tuple[Path, dict[str, float]]:
        """Return the reader's file of weights, and the bytes and seconds of writing, fetching and a first token."""
        weights, dtype = full_state_dict(model), publish_dtype(config)
        version = claim_policy(self._root, step=0, attempt_id=0, parent_version=None)
        times = [time.perf_counter()]
        num_bytes = self._writer.write(version, lambda folder: save_weights(model, weights, folder, dtype=dtype))
        times.append(time.perf_counter())
        folder = fetch_policy(self._root, version, self._cache)
        times.append(time.perf_counter())
        self._sample_a_token(folder, version)
        times.append(time.perf_counter())
        prune_policies(self._root, keep=1, latest_version=version)
        seconds = dict(zip(("write", "fetch", "load"), np.diff(times).tolist(), strict=True))
        return Path(folder, "model.safetensors"), {"bytes": num_bytes, **seconds, "total": times[-1] - times[0]}

    def _sample_a_token(self, folder: str, version: int) -> None:
        if self.engine is None:
            self.engine = TransformersEngine(folder, device="cpu", version=version)
        self.engine.load_weights(folder, version)
        params = SamplingParams(max_tokens=1)
        generate_all(self.engine, [GenerationRequest(prompt_tokens=np.ones(16, np.int32), params=params, seed=0)])


def _publish_steps(rate: float, num_versions: int, sizes: Mapping[str, Any]) -> Iterator[dict[str, float]]:
    """Yield the figures of each version after the first, which is full both ways."""
    heads: dict[str, Any] = {
        "num_attention_heads": sizes["hidden_size"] // 64,
        "num_key_value_heads": 1,
        "head_dim": 64,
    }
    model = make_model(**sizes, **heads, tie_word_embeddings=True)
    config = TrainConfig.of(learning_rate=rate, publish_dtype="bfloat16")
    optimizer = build_optimizer(model, config)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        readers = {
            name: stack.enter_context(closing(_Reader(full_every, folder / name)))
            for name, full_every in {FULL: None, DIFFERENCES: num_versions}.items()
        }
        files = [reader.publish(model, config)[0] for reader in readers.values()]
        first, before = folder / "first", files[0]
        shutil.copy(before, first)
        for step in range(1, num_versions):
            _train(model, optimizer, config, sizes["vocab_size"], step)
            figures: dict[str, float] = {}
            for name in (FULL, DIFFERENCES) if step % 2 else (DIFFERENCES, FULL):
                file, costs = readers[name].publish(model, config)
                figures |= {f"{name} {cost}": value for cost, value in costs.items()}
                if name == FULL:
                    figures |= {"changed": _share_changed(before, file), "to first": _size_of_delta(first, file)}
                    before = file
            yield figures


def _train(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: TrainConfig, vocab_size: int, step: int
) -> None:
    """Take a gradient step on four sequences of random tokens, two of them with a negative advantage."""
    random_tokens = np.random.default_rng(step)
    sequences = [
        TrainingSequence(
            rollout_id=str(index),
            prompt_tokens=random_tokens.integers(0, vocab_size, 16, dtype=np.int32),
            response_tokens=random_tokens.integers(0, vocab_size, 48, dtype=np.int32),
            columns={"response_logprobs": np.full(48, -np.log(vocab_size), np.float32)},
            advantage=1.0 if index % 2 else -1.0,
        )
        for index in range(4)
    ]
    train_step(
        model,
        optimizer,
        [pack(sequences)],
        config=config,
        num_action_tokens=sum(sequence.num_action_tokens for sequence in sequences),
        num_ranks=1,
        learning_rate=config.optimizer.learning_rate,
    )


def _share_changed(before: Path, after: Path) -> float:
    """Return the share of bfloat16 weights that differ; the files' equal headers count too little to matter."""
    old, new = (np.fromfile(file, np.uint16, count=file.stat().st_size // 2) for file in (before, after))
    return float(np.mean(old != new))


def _size_of_delta(old: Path, new: Path) -> int:
    target = new.with_name("to-first")
    write_delta(old, new, target)
    num_bytes = target.stat().st_size
    target.unlink()
    return num_bytes


def _print_bytes(found: Mapping[float, Sequence[Figures]]) -> None:
    rows = []
    for rate, versions in found.items():
        full, delta, first, changed = (
            median(version[name] for version in versions)
            for name in (f"{FULL} bytes", f"{DIFFERENCES} bytes", "to first", "changed")
        )
        most = max(version[f"{DIFFERENCES} bytes"] for version in versions)
        shares = [f"{changed:.2%}", f"{full / 1e6:.1f} MB", f"{delta / 1e6:.2f} MB", f"{delta / full:.2%}"]
        rows.append([f"{rate:g}", *shares, f"{most / full:.2%}", f"{first / full:.2%}"])
    columns = ["learning rate", "changed", FULL, DIFFERENCES, "of full", "most", "to the first version"]
    print_table(f"weights: bytes of a version, bfloat16, {len(versions)} gradient steps", columns, rows)


def _print_seconds(found: Mapping[float, Sequence[Figures]]) -> None:
    rows = []
    for rate, versions in found.items():
        for name in (FULL, DIFFERENCES):
            seconds = [
                f"{median(version[f'{name} {cost}'] for version in versions):.2f} s"
                for cost in ("write", "fetch", "load", "total")
            ]
            totals, full = ([version[f"{each} total"] for version in versions] for each in (name, FULL))
            rows.append([f"{rate:g}", name, *seconds, f"{median_ratio(totals, full):.2f}x"])
    columns = ["learning rate", "published", "write", "fetch", "load, first token", "publish to first token", "of full"]
    print_table("weights: seconds of a version over S3", columns, rows)


# --- The four numbers of a run --------------------------------------------------------------------------------


def _print_run(num_steps: int, num_kills: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(f"{folder}/model", WORDS, hidden_size=256)
        run = RunConfig(model=f"{folder}/model", env=("moar_cats",), max_tokens=32, accept_incomplete=True)
        root = put_run(f"s3://{BUCKET}/run-{time.time_ns()}", run)
        config = TrainConfig.of(
            num_steps=num_steps, learning_rate=1e-5, publish_dtype="bfloat16", full_version_every=10, num_threads=1
        )
        workers = _Workers(root.url, Path(folder), num_kills)
        with closing(workers):
            train(root, config, threading.Event())
        opened = ludic.open(root.url)
        (found,) = opened.sql(RUN_NUMBERS).to_dicts()
        (stored,) = opened.sql("select sum(response_length) as num_tokens from rollouts").to_dicts()
        lost = (workers.count_tokens() - stored["num_tokens"]) / workers.num_killed
    in_flight = EngineConfig().max_batch * run.max_tokens
    numbers = {
        "publish to first token, median": f"{found['first_token_s']:.2f} s",
        "of it: write, fetch, load": " + ".join(f"{found[f'{part}_s']:.2f}" for part in ("write", "fetch", "load"))
        + " s",
        "the slowest, while no worker lived": f"{found['slowest_first_token_s']:.2f} s",
        "bytes of a publish, median": f"{found['publish_bytes'] / 1e3:,.0f} kB",
        "bytes of a full version": f"{found['full_bytes'] / 1e3:,.0f} kB",
        "tokens lost by a SIGKILL of the worker, mean": f"{lost:,.0f} (up to {in_flight:,} are in flight)",
        "off-policy steps trained on, mean": f"{found['off_policy_steps']:.2f}",
        "off-policy steps trained on, most": str(found["most_off_policy_steps"]),
    }
    title = f"weights: a run of {num_steps} steps with a worker that is killed {workers.num_killed} times"
    print_table(title, ["", "measured"], [[name, value] for name, value in numbers.items()])


class _Workers:
    """One worker process after the other, each killed by SIGKILL while it samples; the last one at the end."""

    def __init__(self, url: str, folder: Path, num_kills: int) -> None:
        self._url, self._folder, self._num_kills = url, folder, num_kills
        self.num_killed = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def count_tokens(self) -> int:
        """Return the number of tokens that all lives sampled."""
        return sum(int(np.fromfile(file, np.int64)[0]) for file in self._folder.glob("life-*"))

    def _run(self) -> None:
        moments = random.Random(0)
        while not self._is_over.is_set():
            counter = self._folder / f"life-{self.num_killed}"
            np.zeros(1, np.int64).tofile(counter)
            process = multiprocessing.get_context("spawn").Process(target=_work, args=(self._url, str(counter)))
            process.start()
            while process.is_alive() and not np.fromfile(counter, np.int64)[0]:
                time.sleep(0.01)
            is_last = self.num_killed >= self._num_kills
            self._is_over.wait(None if is_last else moments.uniform(0.5, 3.0))
            self._kill(process)

    def _kill(self, process: BaseProcess) -> None:
        assert process.is_alive(), "the worker ended by itself"
        process.kill()
        process.join()
        self.num_killed += 1


def _work(url: str, counter: str) -> None:
    """Work in slot 0 until killed, and count each sampled token in a file that survives the process."""
    torch.set_num_threads(1)
    count, add = np.memmap(counter, np.int64, mode="r+"), continuous._Call.add

    def counted(call: continuous._Call, *token: Any) -> None:
        count[0] += 1
        add(call, *token)

    continuous._Call.add = counted  # type: ignore[assignment,method-assign]
    config = WorkerConfig(slot=0)
    run_worker(Root.open(url, writable=True), config, _make_engine, threading.Event())


def _make_engine(folder: str, version: int) -> TransformersEngine:
    return TransformersEngine(folder, device="cpu", version=version)


if __name__ == "__main__":
    run_script(main, description=__doc__)
