"""Two workers sample while a trainer trains, three processes that share nothing but the root.

    python pipelines/async_rloo.py --root runs/async
    ludic sql runs/async "select step, avg(off_policy_steps), avg(episode_reward) from batches group by 1 order by 1"

`ludic run` does the same and starts again whoever dies. Here a dead worker stays dead: the other one is asked for
more. On another machine, `ludic worker ROOT` joins. Stopped, the same command goes on from the last checkpoint.
"""

import multiprocessing
from pathlib import Path

import torch
import tyro

from ludic.cli.process import stop_on_signals
from ludic.cli.train import describe
from ludic.environments.moar_cats import WORDS
from ludic.inference.tiny import make_tiny_model
from ludic.inference.transformers_engine import TransformersEngine
from ludic.rollouts.worker import WorkerConfig, run_worker
from ludic.store import Root, RunConfig
from ludic.training.config import TrainConfig
from ludic.training.trainer import train


def main(root: str = "runs/async", model: str = "runs/async-model", num_steps: int = 50, num_workers: int = 2) -> None:
    """Start the workers, train, stop the workers.

    Args:
        root: Folder or URL of the run.
        model: Folder of the first weights; a tiny model is made where there is none.
        num_steps: Gradient steps.
        num_workers: Processes that sample.
    """
    if not Path(model).exists():
        make_tiny_model(model, WORDS)
    run = RunConfig(model=model, env=("moar_cats",), num_workers=num_workers, max_tokens=32, accept_incomplete=True)
    config = TrainConfig.of(num_steps=num_steps, advantage="rloo", learning_rate=4e-3, schedule="linear")
    opened = Root.create(root, run)
    stop = stop_on_signals()
    processes = multiprocessing.get_context("spawn")
    workers = [processes.Process(target=work, args=(root, slot), daemon=True) for slot in range(num_workers)]
    for worker in workers:
        worker.start()
    try:
        torch.set_num_threads(1)  # three processes share the cores
        train(opened, config, stop, lambda step, row: print(f"step {step:3}  {describe(row)}", flush=True))
    finally:
        for worker in workers:
            worker.terminate()  # SIGTERM: what is sampled is flushed
        for worker in workers:
            worker.join()


def work(root: str, slot: int) -> None:
    torch.set_num_threads(1)
    run_worker(Root.open(root, writable=True), WorkerConfig(slot=slot), make_engine, stop_on_signals())


def make_engine(folder: str, version: int) -> TransformersEngine:
    return TransformersEngine(folder, device="cpu", version=version)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
