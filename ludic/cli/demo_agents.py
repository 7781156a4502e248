"""`ludic demo --agents`: teach a tiny model to call a calculator; print held-out answers before and after RL."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import ludic
from ludic.cli.demo import draw_curve, print_next, save
from ludic.cli.flags.demo import Settings
from ludic.launch.demo_agents import EVAL_EVERY, improve, open_demo, version_before_rl, warm_start
from ludic.launch.process import interrupt_on_sigterm
from ludic.sql import connect
from ludic.store import Root
from ludic.viewer.evaluation import Comparison, interval_text
from ludic.viewer.output import printable, sparkline

_SHOWN_PROBLEMS = 3
_CLEAR = 0.05
"""Largest p-value that counts as a clear difference."""

Row = Mapping[str, Any]
"""Mean reward of a version on held-out problems, with its interval."""

CURVE = """
    select policy_version, avg(episode_reward)
    from rollouts where worker_id not like 'import-%' group by all order by all
"""
"""Reward by version of what the workers sampled."""


def main(settings: Settings) -> None:
    console = Console()
    root = open_demo(settings.root or "runs/demo-agents")
    interrupt_on_sigterm()
    console.print(f"[bold]Warm start in {root.url}: import of demonstrations, supervised fine-tuning[/]")
    warm_start(root)
    console.print(f"[bold]RL in {root.url}: a worker, a trainer, and an evaluation each {EVAL_EVERY} versions[/]")
    improve(root, settings.num_steps or 50)
    before = version_before_rl(root)
    assert before is not None, "the warm start is evaluated"
    run = ludic.Run(root)
    measured = [
        row for row in run.evaluation(measures=["mean_reward"]).to_dict()["measures"] if _version(row) >= before
    ]
    after = max(map(_version, measured))
    _print_answers(console, root, measured)
    _print_curve(console, root, measured)
    _print_comparison(console, run.compare(before, after))
    _print_next(console, root, before, after)


def _version(row: Row) -> int:
    return int(row["policy_version"])


def _print_answers(console: Console, root: Root, measured: Sequence[Row]) -> None:
    table = Table("problem (held out)", "before RL", "after RL", title="Answers at temperature 1", show_lines=True)
    ends = measured[0], measured[-1]
    old, new = (_answers(root, _version(row)) for row in ends)
    for problem in list(old)[:_SHOWN_PROBLEMS]:
        table.add_row(*(Text(printable(text)) for text in (problem, old[problem], new[problem])))
    means = (f"[bold]{row['estimate']:.3f} ({interval_text(row, 3)})[/]" for row in ends)
    table.add_row(f"mean reward of {measured[-1]['num_examples']}, 95% interval", *means)
    console.print(table)


def _print_comparison(console: Console, comparison: Comparison) -> None:
    """Print whether RL improved the answers, and the comparison that says so."""
    (row,) = comparison.to_dict()["differences"]
    is_clear = row["p_value"] < _CLEAR and row["difference"] != 0
    verdict = ("RL improved it" if row["difference"] > 0 else "RL made it worse") if is_clear else "not clear"
    test = {"mcnemar": "McNemar's exact test", "permutation": "permutation test"}[row["test"]]
    console.print(
        f"\nDid RL help? [bold]{verdict}[/]: mean reward {row['difference']:+.3f} "
        f"(95% interval {interval_text(row, 3)}), p = {row['p_value']:.2g} ({test}, same problems)",
        highlight=False,
    )
    comparison.print_to(console)


def _answers(root: Root, version: int) -> dict[str, str]:
    """Return the answers of a version, with their tool calls and results, by problem."""
    query = "select env_example_id, messages from evals where policy_version = ? order by request_index"
    rows = connect(root).execute(query, [version]).fetchall()
    return {problem: "\n".join(map(_as_line, messages[1:])) for problem, messages in rows}


def _as_line(message: dict[str, str]) -> str:
    return f"-> {message['content']}" if message["role"] == "tool" else message["content"]


def _print_curve(console: Console, root: Root, measured: Sequence[Row]) -> None:
    versions, rewards = zip(*connect(root).execute(CURVE).fetchall(), strict=True)
    console.print(f"\nReward by policy version in training, {rewards[0]:.3f} to {rewards[-1]:.3f}:")
    console.print(f"  [green]{sparkline(rewards, 72)}[/]")
    figure = draw_curve(versions, rewards, "Word problems with a calculator, RL after a warm start")
    (axes,) = figure.axes
    means = [row["estimate"] for row in measured]
    axes.errorbar(
        list(map(_version, measured)),
        means,
        yerr=[
            [math.nan if row[name] is None else abs(row[name] - row["estimate"]) for row in measured]
            for name in ("low", "high")
        ],
        fmt="o",
        capsize=4,
        color="tab:blue",
        label=f"{measured[-1]['num_examples']} held-out problems, 95% interval",
    )
    axes.set_ylim(0, 1)
    axes.legend(loc="lower right")
    console.print(f"  {save(figure, root)}")


def _print_next(console: Console, root: Root, before: int, after: int) -> None:
    query = "select rollout_id from evals where policy_version = ? order by episode_reward desc limit 1"
    ((rollout_id,),) = connect(root).execute(query, [after]).fetchall()
    kinds = "select metadata['kind'] as kind, count(*), avg(episode_reward) from rollouts group by all order by all"
    print_next(
        console,
        f"show {root.url} {rollout_id}",
        f'sql {root.url} "{kinds}"',
        f"eval compare {root.url}@{before} @{after}",
    )
