"""Train with agents that know nothing of ludic, beside ludic's own agent: do both environments learn alike?

    python -m benchmarks.agent_learning --folder FOLDER

Runs `ludic run` as a user does: moar_cats from random weights, and word_problems after a warm start on demonstrations,
each once with the protocol and tools of ludic, and once with a file of plain OpenAI calls (pipelines/agents). FOLDER
keeps the runs; one that was interrupted goes on. Writes FOLDER/agent_learning.png, the picture of docs/gateway.md.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

import ludic
from benchmarks.learning import COMMON
from benchmarks.measure import print_table
from ludic.app import OTHER_WORDS
from ludic.app.demos import calculator
from ludic.environments import WORDS
from ludic.models import make_tiny_chat_model, make_tiny_model
from ludic.records import to_message
from ludic.run import RunConfig, create_root
from ludic.settings import run_script
from ludic.training import TrainConfig

AGENTS = Path(__file__).parents[1] / "pipelines" / "agents"
CATS, SUMS = AGENTS / "answer.py", AGENTS / "calculator.py"
TITLES: Mapping[str, str] = {
    "cats": "MoarCats, from random weights",
    "sums": "Word problems with a calculator, after a warm start",
}


_LINES = (("plain", "tab:gray", "ludic's own agent"), ("agent", "tab:green", "plain OpenAI calls"))
"""Kind, colour and label of the lines of a panel."""


def main(folder: str, quick: bool = False) -> None:
    """Train what is not trained yet, print a table, and draw the curves.

    Args:
        folder: Folder of the runs and of the picture.
        quick: Make two steps of each run, to check that the benchmark works.
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    runs = {(task, kind): place / f"{task}-{kind}" for task in TITLES for kind in ("plain", "agent")}
    for (task, kind), root in runs.items():
        (_cats if task == "cats" else _sums)(root, is_agent=kind == "agent", quick=quick)
    curves = {key: _curve(root) for key, root in runs.items()}
    rows = [
        [task, kind, f"{_mean(points[:5]):.2f}", f"{_mean(points[-5:]):.2f}"] for (task, kind), points in curves.items()
    ]
    print_table("agent_learning: mean reward", ["environment", "agent", "first versions", "last versions"], rows)
    _draw(curves).savefig(place / "agent_learning.png", dpi=110)


def _cats(root: Path, *, is_agent: bool, quick: bool) -> None:
    model = root.parent / "cats-model"
    if not model.exists():
        make_tiny_model(str(model), [*WORDS, OTHER_WORDS], seed=0)
    flags = COMMON.replace("--accept-incomplete", f"--agent {CATS}:run" if is_agent else "--accept-incomplete")
    words = f"run {root} --model {model} --env moar_cats --max-tokens 32 --num-steps {2 if quick else 40} {flags}"
    subprocess.run([sys.executable, "-m", "ludic", *shlex.split(words)], check=True)


def _sums(folder: Path, *, is_agent: bool, quick: bool) -> None:
    """Warm up on demonstrations with the tools that the agent shows, then train online."""
    num_problems = 100 if quick else calculator.NUM_PROBLEMS
    records = list(calculator.make_demonstrations(num_problems, calculator.PER_PROBLEM))
    if is_agent:
        tools = _tools_of(SUMS)
        records = [{**record, "tools": tools} for record in records]
    model = folder.parent / f"{folder.name}-model"
    if not model.exists():
        conversations = (list(map(to_message, record["messages"])) for record in records)
        make_tiny_chat_model(str(model), conversations, tools=records[0]["tools"])
    of_agent: dict[str, Any] = {"agent": f"{SUMS}:run"}
    own: dict[str, Any] = {"tools": calculator.TOOLS, "parser": calculator.PARSER}
    run = RunConfig(
        model=str(model),
        env=(calculator.ENVIRONMENT,),
        group_size=8,
        groups_per_batch=16,
        num_workers=1,
        max_tokens=48,
        **(of_agent if is_agent else own),
    )
    root = create_root(str(folder), run)
    opened = ludic.Run(root)
    if not root.exists(calculator.DEMONSTRATIONS):
        root.put_if_absent(calculator.DEMONSTRATIONS, "".join(json.dumps(record) + "\n" for record in records).encode())
        opened.import_(f"{root.url}/{calculator.DEMONSTRATIONS}", "jsonl", env=calculator.ENVIRONMENT)
    if calculator.last_warm_step(root) == 0:
        opened.train(calculator.warm_start_config())
    opened.run(_of_rl(calculator.last_warm_step(root) + (2 if quick else 40)))


def _of_rl(num_steps: int) -> TrainConfig:
    return calculator.rl_config(num_steps)


def _tools_of(path: Path) -> list[Any]:
    namespace: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)  # the benchmark's own file
    return namespace["TOOLS"]


def _curve(root: Path) -> list[tuple[int, float]]:
    """Return the mean reward by version of what workers sampled, versions counted from the first sampled one."""
    table = ludic.open(str(root)).sql(calculator.CURVE.replace("order by all", "order by 1"))
    versions, rewards = (table[name].to_list() for name in table.columns)
    return [(version - versions[0], reward) for version, reward in zip(versions, rewards, strict=True)]


def _mean(points: Sequence[tuple[int, float]]) -> float:
    return fmean(reward for _, reward in points)


def _draw(curves: Mapping[tuple[str, str], Sequence[tuple[int, float]]]) -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (task, title) in zip(figure.subplots(1, 2), TITLES.items(), strict=True):
        for kind, colour, label in (
            ("plain", "tab:gray", "ludic's own agent"),
            ("agent", "tab:green", "an agent over HTTP"),
        ):
            axes.plot(*zip(*curves[task, kind], strict=True), marker=".", color=colour, label=label)
        axes.set(xlabel="versions since the start", ylabel="mean episode reward", title=title)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right")
    return figure


if __name__ == "__main__":
    run_script(main)
