"""`ludic demo --agents`: teach a tiny model to call a calculator; print held-out answers before and after RL."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ludic.cli.demo import draw_curve, print_next, save
from ludic.cli.flags.demo import Settings
from ludic.launch.demo_agents import improve, open_demo, warm_start
from ludic.launch.process import interrupt_on_sigterm
from ludic.sql import connect
from ludic.store import Root
from ludic.viewer.output import printable, sparkline

_SHOWN_PROBLEMS = 3

REWARDS = """
    select policy_version, avg(coalesce(episode_reward, 0)) as reward,
        1.96 * stddev_samp(coalesce(episode_reward, 0)) / sqrt(count(*)) as half_width, count(*) as episodes
    from evals group by all order by all
"""
"""Held-out reward by version, with the half width of its 95% interval (normal approximation)."""
CURVE = """
    select policy_version, avg(episode_reward)
    from rollouts where worker_id not like 'import-%' group by all order by all
"""
"""Reward by version of what the workers sampled."""


@dataclass(frozen=True, slots=True)
class _Heldout:
    """Mean reward of held-out problems under one version, with a 95% interval."""

    version: int
    reward: float
    half_width: float
    episodes: int

    def __str__(self) -> str:
        low, high = max(0.0, self.reward - self.half_width), min(1.0, self.reward + self.half_width)
        return f"{self.reward:.3f} ({low:.3f} to {high:.3f})"


def main(settings: Settings) -> None:
    console = Console()
    root = open_demo(settings.root or "runs/demo-agents")
    interrupt_on_sigterm()
    console.print(f"[bold]Warm start in {root.url}: import of demonstrations, supervised fine-tuning[/]")
    warm_start(root)
    console.print(f"[bold]RL in {root.url}: a worker and a trainer[/]")
    improve(root, settings.num_steps or 50)
    measured = [_Heldout(*row) for row in connect(root).execute(REWARDS).fetchall()]
    before, after = measured[0], measured[-1]
    _print_answers(console, root, before, after)
    _print_curve(console, root, measured)
    _print_next(console, root, after)


def _print_answers(console: Console, root: Root, before: _Heldout, after: _Heldout) -> None:
    table = Table("problem (held out)", "before RL", "after RL", title="Answers at temperature 1", show_lines=True)
    old, new = (_answers(root, measured.version) for measured in (before, after))
    for problem in list(old)[:_SHOWN_PROBLEMS]:
        table.add_row(*(Text(printable(text)) for text in (problem, old[problem], new[problem])))
    table.add_row(f"mean reward of {after.episodes}, 95% interval", f"[bold]{before}[/]", f"[bold]{after}[/]")
    console.print(table)


def _answers(root: Root, version: int) -> dict[str, str]:
    """Return the answers of a version, with their tool calls and results, by problem."""
    query = "select env_example_id, messages from evals where policy_version = ? order by request_index"
    rows = connect(root).execute(query, [version]).fetchall()
    return {problem: "\n".join(map(_as_line, messages[1:])) for problem, messages in rows}


def _as_line(message: dict[str, str]) -> str:
    return f"-> {message['content']}" if message["role"] == "tool" else message["content"]


def _print_curve(console: Console, root: Root, measured: list[_Heldout]) -> None:
    versions, rewards = zip(*connect(root).execute(CURVE).fetchall(), strict=True)
    console.print(f"\nReward by policy version in training, {rewards[0]:.3f} to {rewards[-1]:.3f}:")
    console.print(f"  [green]{sparkline(rewards, 72)}[/]")
    figure = draw_curve(versions, rewards, "Word problems with a calculator, RL after a warm start")
    (axes,) = figure.axes
    axes.errorbar(
        [one.version for one in measured],
        [one.reward for one in measured],
        yerr=[one.half_width for one in measured],
        fmt="o",
        capsize=4,
        color="tab:blue",
        label="held out, 95% interval",
    )
    axes.set_ylim(0, 1)
    axes.legend(loc="upper left")
    console.print(f"  {save(figure, root)}")


def _print_next(console: Console, root: Root, after: _Heldout) -> None:
    query = "select rollout_id from evals where policy_version = ? order by episode_reward desc limit 1"
    ((rollout_id,),) = connect(root).execute(query, [after.version]).fetchall()
    kinds = "select metadata['kind'] as kind, count(*), avg(episode_reward) from rollouts group by all order by all"
    print_next(
        console,
        f"show {root.url} {rollout_id}",
        f'sql {root.url} "{kinds}"',
        f'sql {root.url} "{" ".join(REWARDS.split())}"',
    )
