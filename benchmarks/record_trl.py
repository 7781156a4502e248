"""What recording costs a trainer of TRL: seconds a step with `ludic.trl.record` and without it, in pairs.

    make .venv/trl/installed && .venv/trl/bin/python -m benchmarks.record_trl

GRPO of a tiny model: 64 answers of up to 128 tokens a step. Each run is a process of its own; a pair runs one after the
other, in an order that changes from round to round. The first steps, which warm up, are not counted. The root lies in
the temporary folder.
"""

import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

import ludic
from benchmarks.measure import in_a_process, median_ratio, print_table, with_spread
from ludic.environments import FORMS, SCENES
from ludic.models import make_tiny_model
from ludic.settings import run_script

_NUM_STEPS, _NUM_WARM = 30, 5
_QUESTIONS = [f"write a {form} about cats {scene}" for form in FORMS for scene in SCENES]
_SETTINGS: Mapping[str, Any] = {
    "num_generations": 8,
    "per_device_train_batch_size": 64,
    "learning_rate": 3e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
}


def main(quick: bool = False, rounds: int = 5) -> None:
    """Print milliseconds a step with and without recording, and their ratio within a round.

    Args:
        quick: Take a few steps in one round, to check that the benchmark works.
        rounds: Number of pairs.
    """
    num_steps, num_rounds, num_tokens = (_NUM_WARM + 2, 1, 8) if quick else (_NUM_STEPS, rounds, 128)
    found: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_model(str(folder / "model"), _QUESTIONS)
        for number in range(num_rounds):
            for is_recorded in (False, True) if number % 2 else (True, False):
                root = folder / f"root-{number}" if is_recorded else None
                found[is_recorded].append(in_a_process(_train, folder, root, num_steps, num_tokens))
            print(f"round {number}: {found[False][-1]:.1f} ms a step, recorded {found[True][-1]:.1f} ms", flush=True)
    rows = [[name, with_spread(found[key])] for name, key in (("TRL alone", False), ("recorded", True))]
    rows += [["ratio in a round, median", f"{median_ratio(found[True], found[False]):.3f}"]]
    print_table(f"record_trl: {num_steps - _NUM_WARM} steps of 64 rows", ["", "ms a step (lowest to highest)"], rows)


def _train(folder: Path, root: Path | None, num_steps: int, num_tokens: int) -> float:
    """Return the median milliseconds of a step."""
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=_cats,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": asked}]} for asked in _QUESTIONS]),
        args=GRPOConfig(str(folder / "trl"), max_steps=num_steps, max_completion_length=num_tokens, **_SETTINGS),
    )
    if root is not None:
        ludic.trl.record(trainer, root)
    trainer.remove_callback(PrinterCallback)
    clock = _Clock()
    trainer.add_callback(clock)
    trainer.train()
    ends = clock.ends[_NUM_WARM - 1 :]
    return median(1000 * (end - begin) for begin, end in pairwise(ends))


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []
        """Time of the end of each step, in seconds."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def _cats(completions: Any, **columns: Any) -> list[float]:
    return [completion[0]["content"].split().count("cats") / 10 for completion in completions]


if __name__ == "__main__":
    run_script(main)
