r"""Train with agents that know nothing of ludic, beside ludic's own agent: do both environments learn alike?

    python -m benchmarks.agent_learning --folder FOLDER

Runs `ludic run` as a user does: moar_cats from random weights, and word_problems after a warm start on demonstrations,
each once with the protocol and tools of ludic, and once with a file of plain OpenAI calls (pipelines/agents). Both have
the same weights, tools and settings. FOLDER keeps the runs; one that was interrupted goes on. Writes
FOLDER/agent_learning.png, the picture of docs/gateway.md.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

import ludic
from benchmarks.learning import COMMON
from benchmarks.measure import print_table
from ludic.agents import Toolbox, make_tools
from ludic.app import OTHER_WORDS
from ludic.app.demos import calculator
from ludic.environments import WORDS
from ludic.models import make_tiny_chat_model, make_tiny_model
from ludic.records import to_message
from ludic.settings import run_script

AGENTS = Path(__file__).parents[1] / "pipelines" / "agents"
AGENT: Mapping[str, str] = {"cats": f"--agent {AGENTS}/answer.py:run", "sums": f"--agent {AGENTS}/calculator.py:run"}
TOOL = f"{AGENTS}/calculator.py:calculator"
"""The tool of the agent with tools, as ludic's own agent gets it: the schema is the same."""
PLAIN: Mapping[str, str] = {"cats": "--accept-incomplete", "sums": f"--tools {TOOL} --parser boxed"}
"""Flags of ludic's own agent. An answer that was cut off is an answer to an agent of plain calls anyway."""
TASKS: Mapping[str, str] = {
    "cats": f"--env moar_cats --max-tokens 32 {COMMON.replace('--accept-incomplete', '')}",
    "sums": "--env word_problems --max-tokens 48 --group-size 8 --groups-per-batch 8 --num-workers 1 "
    "--batches-ahead 2 --learning-rate 1e-4 --warmup-steps 1 --is-ratio-cap 2 --max-tokens-per-micro-batch 4096 "
    "--device cpu --num-threads 1",
}
"""Environment and flags of both runs of a task."""
SFT = (
    f"--offline --algorithm sft --epochs {calculator.NUM_EPOCHS} --learning-rate 1.5e-3 --schedule cosine "
    "--max-tokens-per-micro-batch 4096 --device cpu --num-threads 1"
)
TITLES: Mapping[str, str] = {
    "cats": "MoarCats, from random weights",
    "sums": "Word problems with a calculator,\nafter a warm start",
}
LINES = (("plain", "tab:orange", "o", "ludic's own agent"), ("agent", "tab:blue", "s", "plain OpenAI calls"))
"""Kind, colour, marker and label of the lines of a panel."""
NUM_STEPS = 40
CURVE = "select policy_version, avg(episode_reward) as reward from rollouts group by all order by 1"


def main(folder: str, quick: bool = False) -> None:
    """Train what is not trained yet, print a table, and draw the curves.

    Args:
        folder: Folder of the runs and of the picture.
        quick: Make two steps of each run and a short warm start, to check that the benchmark works.
    """
    place = Path(folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    curves = {}
    for task, title in TITLES.items():
        model = _cats_model(place) if task == "cats" else _warm_model(place, quick)
        for kind, *_ in LINES:
            root, own = place / f"{task}-{kind}", AGENT[task] if kind == "agent" else PLAIN[task]
            _ludic(f"run {root} --model {model} {TASKS[task]} {own} --num-steps {2 if quick else NUM_STEPS}")
            curves[task, kind] = read_curve(root)
            print(f"{title}: {kind} is trained")
    rows = [
        [task, kind, f"{_mean(points[:5]):.2f}", f"{_mean(points[-5:]):.2f}", str(len(points))]
        for (task, kind), points in curves.items()
    ]
    headers = ["environment", "agent", "first 5 versions", "last 5 versions", "versions"]
    print_table("agent_learning: mean reward", headers, rows)
    draw(curves).savefig(place / "agent_learning.png", dpi=110)


def _ludic(words: str) -> None:
    subprocess.run([sys.executable, "-m", "ludic", *shlex.split(words)], check=True)


def _cats_model(place: Path) -> Path:
    model = place / "cats-model"
    if not model.exists():
        make_tiny_model(str(model), [*WORDS, OTHER_WORDS], seed=0)
    return model


def _warm_model(place: Path, quick: bool) -> Path:
    """Return a model that was trained on demonstrations with the tool, good ones and bad ones, from random weights."""
    model, root, first, stored = (
        place / f"sums-{name}" for name in ("model", "warm", "random", "demonstrations.jsonl")
    )
    if model.exists():
        return model
    (tool,) = Toolbox(make_tools((TOOL,))).schemas
    num_problems = 100 if quick else calculator.NUM_PROBLEMS
    records = [
        {**record, "tools": [tool]} for record in calculator.make_demonstrations(num_problems, calculator.PER_PROBLEM)
    ]
    if not first.exists():
        conversations = (list(map(to_message, record["messages"])) for record in records[:1000])
        make_tiny_chat_model(str(first), conversations, tools=[tool])
        stored.write_text("".join(json.dumps(record) + "\n" for record in records))
        own = f"--env word_problems --max-tokens 48 --groups-per-batch 16 {PLAIN['sums']}"
        _ludic(f"run {root} --create-only --model {first} {own}")
        _ludic(f"import {root} --from jsonl --env word_problems {stored}")
    _ludic(f"train {root} {SFT} --warmup-steps {1 if quick else 10}")
    _ludic(f"export {root} --format hf --out {model}")
    return model


def read_curve(root: Path) -> list[tuple[int, float]]:
    """Return the mean reward by version of what workers sampled, versions counted from the first sampled one."""
    table = ludic.open(str(root)).sql(CURVE)
    versions, rewards = (table[name].to_list() for name in table.columns)
    return [(version - versions[0], reward) for version, reward in zip(versions, rewards, strict=True)]


def _mean(points: Sequence[tuple[int, float]]) -> float:
    return fmean(reward for _, reward in points)


def draw(curves: Mapping[tuple[str, str], Sequence[tuple[int, float]]]) -> Figure:
    """Return the picture: a panel for each task, a line for each kind of agent."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (task, title) in zip(figure.subplots(1, 2), TITLES.items(), strict=True):
        for kind, colour, marker, label in LINES:
            points = curves.get((task, kind), ())
            if points:
                axes.plot(*zip(*points, strict=True), marker=marker, markersize=3, color=colour, label=label)
        axes.set(xlabel="policy version (gradient steps since the start)", ylabel="mean reward of an episode")
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    return figure


if __name__ == "__main__":
    run_script(main)
