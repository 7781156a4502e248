"""Measure loading files into tensors, one rank on one core: ludic's batch stream and the methods of other trainers.

    python -m benchmarks.stream

Loads 256 rollouts of about 1,000 response tokens, in files of 64 on the local disk (page cache), into the tensors of a
training step. ludic reads the rows of a plan and packs them. The other contestants read files with only the data that
training needs (ids, logprobs, an advantage), as lists, as other trainers pass them on; they make tensors and pad them
to the longest of a micro-batch, and leave mask and shifted targets to the step. The last two store raw buffers, as
other trainers could. Each contestant has separate processes. The plan (SQL over scalars) is measured in `planner`.

The second table has the bytes that all ranks together read from the operating system, footers included, when they
share a batch of 512 rollouts with log-normal lengths from 16 files.
"""

import json
import pickle
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import torch

from benchmarks.measure import in_a_process, median_ratio, print_table, take_turns
from benchmarks.padding import fill_padded
from benchmarks.rollouts import make_batch, with_own_requests
from ludic.records import Rollout, RolloutBatch, to_table
from ludic.root import Root
from ludic.root.rows import RolloutFile, RolloutReader, encode
from ludic.root.sql import BatchRules, Planner
from ludic.run import RunConfig, put_run
from ludic.settings import run_script
from ludic.training import TrainConfig
from ludic.training.batches import MICRO_BATCH_TOKENS, BatchPlan, read_rank_batch

CONFIG = TrainConfig.of(max_tokens_per_micro_batch=MICRO_BATCH_TOKENS)
NUM_FILES, GROUPS, GROUP_SIZE = 4, 32, 8
COLUMNS = {"prompt_tokens": np.int32, "response_tokens": np.int32, "response_logprobs": np.float32}
_CALLS = 5

Row = dict[str, Any]
Load = Callable[[], int]
"""Loads all files into tensors; returns the number of response tokens."""


def main(quick: bool = False) -> None:
    """Print a table.

    Args:
        quick: Use short rollouts and one round, to check that the benchmark works.
    """
    mean_length, rounds = (50, 1) if quick else (1000, 5)
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for _ in range(rounds):
        for name in CONTESTANTS:
            with tempfile.TemporaryDirectory() as folder:
                num_tokens, taken = in_a_process(measure, name, folder, mean_length)
                seconds[name].append(taken)
    ours = seconds["Parquet (ludic), packed"]
    rows = [
        [name, f"{num_tokens / median(taken) / 1e6:.1f}", f"{median_ratio(taken, ours):.2g}x"]
        for name, taken in seconds.items()
    ]
    print_table("stream: from files to tensors", ["", "M tokens/s", "ludic is faster"], rows)
    _print_bytes(mean_length)


def _print_bytes(mean_length: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, plan = _plan_skewed(Path(folder), mean_length)
        rows, whole = [], 0
        read_rank_batch(root, CONFIG.batch, plan, 0, 1)  # reads the files of lazy imports
        for num_ranks in (1, 2, 4, 8):
            shares, size_bytes = [], 0
            for rank in range(num_ranks):
                before = _bytes_read()
                shares.append(read_rank_batch(root, CONFIG.batch, plan, rank, num_ranks))
                size_bytes += _bytes_read() - before
            whole = whole or size_bytes
            uneven = shares[0].token_imbalance
            rows.append([str(num_ranks), f"{size_bytes / 1e6:.2f} MB", f"{size_bytes / whole:.2f}x", f"{uneven:.3f}"])
    columns = ["ranks", "read in sum", "of one rank's", "tokens, fullest rank of the mean"]
    print_table("stream: what ranks read that share a batch", columns, rows)


def _bytes_read() -> int:
    """Return the bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def measure(name: str, folder: str, mean_length: int) -> tuple[int, float]:
    """Return the number of response tokens, and the median seconds to load them."""
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    load = CONTESTANTS[name](Path(folder), mean_length)
    return load(), median(take_turns({name: load}, _CALLS, twice=True)[name])


def by_ludic(folder: Path, mean_length: int, *, num_files: int = NUM_FILES) -> Load:
    """Load as a trainer's rank does, after the plan; the reader's poll has parsed the footers."""
    batches = [_make_batch(number, mean_length, GROUPS // num_files) for number in range(num_files)]
    root, plan = _plan(folder, batches)

    def load() -> int:
        return read_rank_batch(root, CONFIG.batch, plan, 0, 1).num_action_tokens

    return load


def _make_batch(number: int, mean_length: int, num_groups: int = GROUPS // NUM_FILES) -> RolloutBatch:
    return make_batch(num_groups, mean_length=mean_length, group_size=GROUP_SIZE, seed=number)


def _plan(folder: Path, batches: Sequence[RolloutBatch]) -> tuple[Root, BatchPlan]:
    """Return a root with one file per batch, and the plan of a step that uses all batches."""
    root = put_run(str(folder / "run"), RunConfig(model="none", env=("moar_cats",), group_size=GROUP_SIZE))
    for number, batch in enumerate(batches):
        table = with_own_requests(to_table(batch, run_id=root.run_id, sequence=number), number)
        root.put_if_absent(RolloutFile(7, "moar_cats", batch.metadata.worker_id, number).name, encode(table))
    planner = Planner(BatchRules(groups_per_batch=sum(len(batch.groups) for batch in batches)))
    found = RolloutReader(root, planner.columns).poll(None)
    assert found is not None
    planner.add(found)
    rows = planner.plan(step=1, attempt_id=1, trainer_version=7)
    assert rows is not None
    return root, BatchPlan(step=1, rows=rows, cursor={}, num_pending_groups=0, num_unreadable_files=0)


def _plan_skewed(folder: Path, mean_length: int) -> tuple[Root, BatchPlan]:
    """Plan groups whose mean lengths are log-normal with sigma 1, so that files differ in size."""
    rng = np.random.default_rng(0)
    batches = []
    for number in range(16):
        lengths = np.maximum(2, rng.lognormal(np.log(mean_length) - 0.5, 1.0, 4)).astype(int).tolist()
        parts = [make_batch(1, mean_length=length, seed=4 * number + i) for i, length in enumerate(lengths)]
        batches.append(replace(parts[0], groups=tuple(group for part in parts for group in part.groups)))
    return _plan(folder, batches)


def by_peer(
    folder: Path, mean_length: int, *, dumps: Callable[[list[Row]], bytes], loads: Callable[[bytes], list[Row]]
) -> Load:
    """Load files of rows; each file is decoded whole, and rows are padded."""
    files = []
    for number in range(NUM_FILES):
        batch = _make_batch(number, mean_length)
        files.append(folder / f"{number}.bin")
        files[-1].write_bytes(dumps([_row(rollout) for group in batch.groups for rollout in group.rollouts]))

    def load() -> int:
        rows = [row for file in files for row in loads(file.read_bytes())]
        lengths = [len(row["prompt_tokens"]) + len(row["response_tokens"]) for row in rows]
        micro_batches = fill_padded(lengths, MICRO_BATCH_TOKENS)
        return sum(_pad([rows[index] for index in indexes]) for indexes in micro_batches)

    return load


def _row(rollout: Rollout) -> Row:
    return {**{name: getattr(rollout, name) for name in COLUMNS}, "advantage": 1.0, "temperature": rollout.temperature}


def _pad(rows: Sequence[Row]) -> int:
    """Make padded ids, attention and loss masks, logprobs and advantages; returns the number of response tokens."""
    prompts, responses = ([torch.as_tensor(row[name]) for row in rows] for name in list(COLUMNS)[:2])
    logprobs = [torch.as_tensor(row["response_logprobs"], dtype=torch.float32) for row in rows]
    shape = len(rows), max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    input_ids = torch.zeros(shape, dtype=torch.int64)
    attention_mask, loss_mask = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    sampler_logprobs, advantages = torch.zeros(shape), torch.zeros(shape)
    for index, (prompt, response, logprob, row) in enumerate(zip(prompts, responses, logprobs, rows, strict=True)):
        begin, end = len(prompt), len(prompt) + len(response)
        input_ids[index, :begin], input_ids[index, begin:end] = prompt, response
        attention_mask[index, :end] = loss_mask[index, begin:end] = True
        sampler_logprobs[index, begin:end] = logprob
        advantages[index, begin:end] = row["advantage"]
    return int(loss_mask.sum())


def _as_lists(rows: list[Row]) -> list[Row]:
    return [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row.items()} for row in rows]


def _as_bytes(rows: list[Row]) -> list[Row]:
    return [{k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in row.items()} for row in rows]


def _of_bytes(rows: list[Row]) -> list[Row]:
    return [row | {name: np.frombuffer(row[name], dtype).copy() for name, dtype in COLUMNS.items()} for row in rows]


CONTESTANTS: dict[str, Callable[[Path, int], Load]] = {
    "Parquet (ludic), packed": by_ludic,
    "the same in one file, packed": partial(by_ludic, num_files=1),
    "MessagePack of lists, padded": partial(
        by_peer, dumps=lambda rows: msgpack.packb(_as_lists(rows)), loads=msgpack.unpackb
    ),
    "JSON lines, padded": partial(
        by_peer,
        dumps=lambda rows: "\n".join(map(json.dumps, _as_lists(rows))).encode(),
        loads=lambda data: [json.loads(line) for line in data.splitlines()],
    ),
    "pickle of lists, padded": partial(by_peer, dumps=lambda rows: pickle.dumps(_as_lists(rows)), loads=pickle.loads),
    "pickle of NumPy arrays, padded": partial(by_peer, dumps=pickle.dumps, loads=pickle.loads),
    "MessagePack of bytes, padded": partial(
        by_peer,
        dumps=lambda rows: msgpack.packb(_as_bytes(rows)),
        loads=lambda data: _of_bytes(msgpack.unpackb(data)),
    ),
}


if __name__ == "__main__":
    run_script(main, description=__doc__)
