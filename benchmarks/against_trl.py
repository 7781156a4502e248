"""Train the same tiny model by GRPO with TRL and with ludic, loss and optimizer set equal: is the reward the same?

    python -m venv trl && trl/bin/pip install --constraint constraints.txt trl==1.16.0 peft torch
    python -m benchmarks.against_trl --python trl/bin/python

trl_grpo.py and ludic_grpo.py are the two scripts, as a user would write them. For each seed, each runs as a process of
its own, in turns. The reward is that of the trained model on held-out prompts, which ludic's evaluation measures for
both. A seed gives each side a difference, and pairs nothing: the two programs draw independently of each other.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import chdir
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Literal

import datasets
import numpy as np

import ludic
from benchmarks.measure import print_table, with_spread
from ludic.environments import FORMS, SCENES
from ludic.eval import FEWEST_EXAMPLES, clustered
from ludic.models import load_pretrained, make_tiny_model, merge_adapter
from ludic.settings import run_script

TOPICS = ("cats", "dogs", "birds", "mice")
_FILLERS = "i we they love like see hear big small red blue house tree river sea sky sun moon star day"
_NUM_HELDOUT, _NUM_STEPS = 128, 100
Side = Literal["TRL", "ludic"]
_SCRIPTS: Mapping[Side, str] = {"TRL": "trl_grpo.py", "ludic": "ludic_grpo.py"}


def main(quick: bool = False, python: Path | None = None, seeds: int = 5) -> None:
    """Print a row for each seed, and an interval of the difference of the means.

    Args:
        quick: Make two steps with one seed, and sample few answers, to check that the benchmark works.
        python: Python of an environment with TRL and peft; without it, ludic's script alone runs.
        seeds: Number of runs of each side.
    """
    pythons: dict[Side, Path] = {"TRL": python.absolute()} if python is not None else {}
    pythons["ludic"] = Path(sys.executable)
    seconds: dict[Side, list[float]] = {side: [] for side in pythons}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_and_questions(folder, num_passes=1 if quick else 6)
        for seed in range(1 if quick else seeds):
            for side, interpreter in pythons.items():
                own = folder / f"{side}-{seed}"
                seconds[side].append(_train(side, interpreter, own, seed, 2 if quick else _NUM_STEPS))
                print(f"{own.name} took {seconds[side][-1]:.1f} s; the load is {os.getloadavg()[0]:.1f}", flush=True)
        num_samples = 1 if quick else 8
        before = _reward(folder / "model", folder / "ludic-0", num_samples)
        rewards: dict[Side, list[float]] = {
            side: [
                _reward(_trained(side, folder / f"{side}-{seed}"), folder / "ludic-0", num_samples)
                for seed in range(len(of))
            ]
            for side, of in seconds.items()
        }
    _print(before, rewards, seconds)


def make_model_and_questions(folder: Path, num_passes: int) -> None:
    """Write a tiny model, and questions with the splits train and heldout.

    The model has learned to answer with some words, of which about a third are the topic, in num_passes passes.
    """
    prompts = [
        (f"write a {form} about {topic} {scene}", topic) for form, topic, scene in product(FORMS, TOPICS, SCENES)
    ]
    random = Random(0)
    random.shuffle(prompts)
    make_tiny_model(str(folder / "random"), [*(prompt for prompt, _ in prompts), _FILLERS])
    answers = [
        {"prompt": prompt, "completion": " ".join(random.choices(words, k=random.randint(2, 14)))}
        for prompt, topic in prompts[_NUM_HELDOUT:]
        for words in [[topic] * 12 + [*TOPICS] * 2 + _FILLERS.split()]
        for _ in range(num_passes)
    ]
    taught = ludic.sft(
        model=folder / "random", dataset=answers, root=folder / "taught", learning_rate=3e-3, groups_per_batch=32
    )
    taught.export("hf", folder / "model")
    rows = [{"prompt": [{"role": "user", "content": prompt}], "answer": topic} for prompt, topic in prompts]
    splits = {"train": rows[_NUM_HELDOUT:], "heldout": rows[:_NUM_HELDOUT]}
    datasets.disable_progress_bars()
    datasets.DatasetDict({split: datasets.Dataset.from_list(of) for split, of in splits.items()}).save_to_disk(
        folder / "questions"
    )


def _train(side: Side, python: Path, folder: Path, seed: int, num_steps: int) -> float:
    """Run a side's script in a new folder, beside the model and the questions; returns the seconds of the process."""
    for name in ("model", "questions"):
        shutil.copytree(folder.parent / name, folder / name)
    shutil.copy(Path(__file__).with_name(_SCRIPTS[side]), folder)
    command = [str(python), _SCRIPTS[side], str(seed), str(num_steps)]
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{_SCRIPTS[side]} failed: {done.stderr[-4000:]}")
    return time.perf_counter() - began


def _trained(side: Side, folder: Path) -> Path:
    """Return a folder with the whole weights that a script's run ends with."""
    trained = folder / "trained"
    if side == "ludic":
        ludic.open(folder / "ludic").export("hf", trained)
        return trained
    (adapter,) = (folder / "trl").glob("checkpoint-*")
    shutil.copytree(folder / "model", trained)
    merge_adapter(load_pretrained(str(folder / "model"), dtype=None), str(adapter)).save_pretrained(trained)
    return trained


def _reward(model: Path, folder: Path, num_samples: int) -> float:
    """Return a model's mean reward on all held-out questions, with the settings and rewards of a run in `folder`."""
    with chdir(folder):  # the run names its questions from there
        run = ludic.create(model.parent / f"{model.name}-measured", like="ludic", model=model)
        run.eval(0, num_examples=_NUM_HELDOUT, n=num_samples)
    return float(run.sql("select avg(reward) from eval_episodes").item())


def _print(before: float, rewards: Mapping[Side, Sequence[float]], seconds: Mapping[Side, Sequence[float]]) -> None:
    sides = list(rewards)
    columns = ["seed", *(f"reward, {side}" for side in sides), *(f"s, {side}" for side in sides)]
    rows = [
        [
            str(seed),
            *(f"{rewards[side][seed]:.3f}" for side in sides),
            *(f"{seconds[side][seed]:.0f}" for side in sides),
        ]
        for seed in range(len(seconds["ludic"]))
    ]
    means = [f"{fmean(rewards[side]):.3f}" for side in sides]
    rows.append(["mean; median s", *means, *(with_spread(seconds[side]) for side in sides)])
    print_table(f"against_trl: reward on held-out prompts, {before:.3f} before training", columns, rows)
    if "TRL" in rewards:
        differences = np.array(rewards["ludic"]) - np.array(rewards["TRL"])
        found = clustered(differences)
        text = (
            f"ludic minus TRL, over {len(differences)} independent runs of each: {found.estimate:+.4f}, 95% interval "
        )
        if found.low is None or found.high is None:
            print(f"{text}of fewer than {FEWEST_EXAMPLES} runs is not known")
        else:
            print(f"{text}{found.low:+.4f} to {found.high:+.4f}, width {found.high - found.low:.4f}")


if __name__ == "__main__":
    run_script(main, description=__doc__)
