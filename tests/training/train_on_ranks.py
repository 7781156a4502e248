"""Run by torchrun: train the tiny model and write the metrics of each rank, for test_ranks.py.

    python -m torch.distributed.run --standalone --nproc-per-node 2 train_on_ranks.py ROOT OUT ATTEMPT FIRST LAST [FROM]

Steps FIRST to LAST; FROM is ATTEMPT:STEP of the checkpoint to resume from. OUT/rank=R.json.
"""

import json
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from conftest import random_model, random_sequences, train
from torch.optim import SGD

from ludic.base.distributed import broadcast_bytes, init_distributed, is_main, rank, run_on_all, run_on_main, shut_down
from ludic.errors import StalledError, TrainingError
from ludic.training.batches.packing import pack
from ludic.training.config import TrainConfig
from ludic.training.model import shard
from ludic.training.step import train_step


def error_of_rank_0() -> str:
    def stall() -> bytes:
        raise StalledError("nothing arrived: at all")

    try:
        run_on_main(stall)
    except StalledError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("rank 0 raised, this rank did not")


def error_of_rank_1() -> str:
    def fail() -> int:
        if rank() == 1:
            raise StalledError("nothing arrived: here")
        return rank()

    try:
        run_on_all(fail)
    except StalledError as error:
        return str(error)
    raise AssertionError("rank 1 raised, this rank did not")


def waited_for_rank_0() -> str:
    """Work of rank 0 that takes longer than the default group's time-out, as a download of a model may."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))

    def work() -> str:
        time.sleep(3)
        return "done"

    return run_on_main(work)


def error_of_a_nan_on_rank_1() -> str:
    model = random_model()
    shard(model, init_distributed("cpu"))
    advantage = float("nan") if rank() == 1 else 1.0
    batch = pack([replace(s, advantage=advantage) for s in random_sequences(2, seed=0)])
    settings = {"config": TrainConfig(), "num_action_tokens": 1, "num_ranks": 2}
    try:
        train_step(model, SGD(model.parameters()), [batch], learning_rate=0.1, **settings)
    except TrainingError as error:
        return str(error)
    raise AssertionError("a step with a nan went through")


def main(root: str, out: str, attempt_id: str, first: str, last: str, resume_from: str | None = None) -> None:
    init_distributed("cpu")
    start = tuple(int(part) for part in resume_from.split(":")) if resume_from else None
    seen = {
        "metrics": train(root, attempt_id=int(attempt_id), steps=range(int(first), int(last) + 1), resume_from=start),
        "received": broadcast_bytes(b"from rank 0" if is_main() else None).decode(),
        "error": error_of_rank_0(),
        "error_of_rank_1": error_of_rank_1(),
        "nan": error_of_a_nan_on_rank_1(),
        "waited": waited_for_rank_0(),  # the last: the default group gives up after a second from here on
    }
    (Path(out) / f"rank={rank()}.json").write_text(json.dumps(seen))
    shut_down()


if __name__ == "__main__":
    main(*sys.argv[1:])
