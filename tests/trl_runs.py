"""Runs of TRL's trainers as a user writes them, recorded; in this process or in processes of their own."""

import functools
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="`make trl` makes an environment with TRL")

import torch
from datasets import Dataset
from transformers import TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import ludic
from ludic.adapters import trl as adapter
from ludic.models.tiny import make_tiny_model
from ludic.run.recording import life

TOPICS = ("cats", "dogs", "birds", "mice")
SCENES = ("now", "please", "red", "big")
KINDS = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}
SETTINGS: Mapping[str, Any] = {
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 6,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "reward_weights": [1.0, 0.1],
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "report_to": "none",
    "disable_tqdm": True,
    "log_completions": True,
    "num_completions_to_print": 0,
}


def make_model(folder: Path) -> Path:
    make_tiny_model(str(folder), [f"say a word about {' '.join((*TOPICS, *SCENES))} we love them"])
    return folder


def questions(num: int = 16) -> Dataset:
    """Conversations, with an answer, a number, and a long text that rows do not hold."""
    asked = [(topic, scene) for topic in TOPICS for scene in SCENES][:num]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": f"say a word about {topic} {scene}"}],
                "answer": topic,
                "level": number,
                "story": "once " * 100,
            }
            for number, (topic, scene) in enumerate(asked)
        ]
    )


def on_topic(completions: Sequence[Any], answer: Sequence[str], log_extra: Any, **columns: Any) -> list[float | None]:
    """Share of words that are the topic; none for a completion that begins with a mark."""
    texts = [completion[0]["content"].split() for completion in completions]
    log_extra("num_words", [len(words) for words in texts])
    return [
        None if not words or not words[0].isalpha() else words.count(wanted) / len(words)
        for words, wanted in zip(texts, answer, strict=True)
    ]


def brief(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Minus the characters, in hundreds; none for a completion that begins with a mark of ALWAYS' first ones."""
    texts = [completion[0]["content"] for completion in completions]
    return [None if text[:1] in {*"0123456789"} else -len(text) / 100 for text in texts]


def make_trainer(model: Path, folder: Path, kind: str = "grpo", **settings: Any) -> Any:
    """A trainer of a model; settings other than those of its config go to the trainer."""
    config, trainer = KINDS[kind]
    own = {name: settings.pop(name) for name in ("rollout_func", "reward_funcs", "eval_dataset") if name in settings}
    own.setdefault("reward_funcs", [on_topic, brief])
    args = config(output_dir=str(folder), **{**SETTINGS, **settings})
    return trainer(model=str(model), train_dataset=questions(), args=args, **own)


class KillBeforeOptimizer(TrainerCallback):
    """Kills this process before the optimizer of a step moves, after what was recorded for it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class KillWhileAppending(TrainerCallback):
    """Kills this process while its rows of a step are stored: the file has its name, and nobody was told."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            commit = life.commit

            def commit_and_die(*args: Any) -> None:
                commit(*args)
                os.kill(os.getpid(), signal.SIGKILL)

            life.commit = commit_and_die


KILLS = {"optimizer": KillBeforeOptimizer, "append": KillWhileAppending}


def train(
    model: Path, folder: Path, root: str, settings: Mapping[str, Any], *, resume: bool, kill: tuple[str, int] | None
) -> None:
    """Train, recorded, and end normally or be killed: in the `generation` of a step, or by one of KILLS."""
    set_seed(int(resume))

    @functools.wraps(on_topic)
    def reward(completions: Sequence[Any], trainer_state: Any, **columns: Any) -> list[float | None]:
        if kill == ("generation", trainer_state.global_step + 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return on_topic(completions, **columns)

    trainer = make_trainer(model, folder, reward_funcs=[reward, brief], **settings)
    ludic.trl.record(trainer, root)
    if kill is not None and kill[0] in KILLS:
        trainer.add_callback(KILLS[kill[0]](kill[1]))
    trainer.train(resume_from_checkpoint=resume)


def train_with_failing_rank(model: Path, folder: Path, root: str) -> None:
    """Train, while recording fails on rank 1 from step 3 on, in two ways; rank 0 writes what was lost."""
    trainer = make_trainer(model, folder, per_device_train_batch_size=2, max_steps=6)
    recorder = ludic.trl.record(trainer, root)
    if recorder is None:
        row_of, to_bytes = adapter.row_of, adapter.to_bytes

        def fail(generation: Any, index: int, *args: Any) -> Any:
            if generation.version >= 2 and index:
                raise RuntimeError("rank 1 can't")
            return row_of(generation, index, *args)

        def fail_later(rows: Any, note: Any) -> bytes:
            if trainer.state.global_step >= 4:
                raise RuntimeError("rank 1 sends nothing")
            return to_bytes(rows, note)

        adapter.row_of, adapter.to_bytes = fail, fail_later
    trainer.train()
    assert trainer.state.global_step == 6
    if recorder is not None:
        recorder.close()
        (folder / "lost").write_text(str(recorder.lost))


def _on_rank(
    rank: int, ranks: int, port: int, logs: Path, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        of_ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in of_ranks.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    with (logs / f"{rank}.log").open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    target(*args, **kwargs)


def run(target: Any, *args: Any, logs: Path, ranks: int = 1, **kwargs: Any) -> list[int]:
    """Call a function of this module in processes of their own, one a rank, as torchrun does; returns exit codes.

    Once one is killed, the others are, as torchrun does. logs: folder of what each rank prints, as RANK.log.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["trl_runs"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        context.Process(target=_on_rank, args=(r, ranks, port, logs, target, args, kwargs)) for r in range(ranks)
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        for process in processes:
            process.join(0.2)
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
    return [process.exitcode or 0 for process in processes]
