"""`ludic demo`: a tiny model learns to say "love cats"; prints its answers before and after, and what to try next."""

import io
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ludic.cli.flags.demo import Settings
from ludic.engines.config import EngineConfig
from ludic.launch.demo import NUM_WORKERS, demo_config, demo_processes, heldout_answers, open_demo
from ludic.launch.local import launch
from ludic.launch.process import interrupt_on_sigterm
from ludic.models.first_model import first_model
from ludic.sql import connect
from ludic.sql.library import load_advantage, run_query
from ludic.store import Root, fetch_policy, latest_policy
from ludic.temporary import temporary_folder
from ludic.viewer.output import sparkline


def main(settings: Settings) -> None:
    if settings.agents:
        from ludic.cli.demo_agents import main as main_of_agents  # imports this module

        main_of_agents(settings)
        return
    console = Console()
    root = open_demo(settings.root or "runs/demo")
    interrupt_on_sigterm()
    console.print(f"[bold]{NUM_WORKERS} workers and a trainer, sharing nothing but {root.url}[/]")
    launch(root, demo_config(settings.num_steps or 60), demo_processes(), EngineConfig())
    _print_answers(console, root)
    _print_curve(console, root)
    _print_query(console, root)
    _print_next(console, root)


def _print_answers(console: Console, root: Root) -> None:
    latest = latest_policy(root)
    assert latest is not None, "the trainer publishes before it trains"
    with temporary_folder("demo") as cache:
        with first_model(root) as model:
            before = heldout_answers(root, str(model))
        after = heldout_answers(root, fetch_policy(root, latest.version, cache))
    table = Table("prompt (held out)", "before", "after", title="Answers at temperature 0.8", show_lines=True)
    for old, new in list(zip(before, after, strict=True))[:3]:
        texts = (old.messages[0].content, old.messages[-1].content, new.messages[-1].content)
        table.add_row(*map(Text, texts))  # a model may write what looks like markup
    means = [fmean(rollout.episode_reward or 0.0 for rollout in rollouts) for rollouts in (before, after)]
    table.add_row(f"mean reward of {len(before)}", *(f"[bold]{mean:.3f}[/]" for mean in means))
    console.print(table)


def _print_curve(console: Console, root: Root) -> None:
    query = "select policy_version, avg(episode_reward) as reward from rollouts group by all order by all"
    versions, rewards = zip(*connect(root).execute(query).fetchall(), strict=True)
    console.print(
        f"\nReward by policy version, {rewards[0]:.3f} to {rewards[-1]:.3f} ({rewards[-1] / rewards[0]:,.0f}x):"
    )
    console.print(f"  [green]{sparkline(rewards, 72)}[/]")
    figure = draw_curve(versions, rewards, "MoarCats: (cats + 10 love cats) / √(1 + words)")
    console.print(f"  {save(figure, root)}")


def draw_curve(versions: Sequence[int], rewards: Sequence[float], title: str) -> Figure:
    """Plot the mean reward of each policy version's rollouts."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(versions, rewards, marker=".", color="tab:green", label="train")
    axes.set(xlabel="policy version", ylabel="mean episode reward", title=title)
    axes.grid(alpha=0.3)
    return figure


def save(figure: Figure, root: Root) -> Path:
    """Write a picture as reward.png into a local root, else into the working directory; return its path."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120)
    if root.is_local:
        root.put("reward.png", picture.getvalue())
        return Path(root.path, "reward.png")
    path = Path.cwd() / "reward.png"
    path.write_bytes(picture.getvalue())
    return path


def _print_query(console: Console, root: Root) -> None:
    console.print("\nThe advantages that the trainer used, ludic/sql/advantages/rloo.sql:")
    console.print(
        Syntax(load_advantage("rloo").text, "sql", theme="ansi_dark", background_color="default", word_wrap=True)
    )


def program() -> str:
    """Return the command that the user types: `ludic` only if the shell finds it."""
    called = Path(sys.argv[0])
    if called.name != "ludic":
        return "python -m ludic"
    return "ludic" if shutil.which("ludic") == str(called.absolute()) else str(called)


def print_next(console: Console, *commands: str) -> None:
    """Print what to try next, as commands of ludic without its name."""
    console.print("\nTry next:")
    for command in commands:
        console.print(f"  {program()} {command}", highlight=False, markup=False, soft_wrap=True)


def _print_next(console: Console, root: Root) -> None:
    best = run_query(connect(root), "select rollout_id from rollouts order by episode_reward desc limit 1")
    (rollout_id,) = best.column("rollout_id").to_pylist()
    query = "select step, count(*), avg(episode_reward), avg(off_policy_steps) from batches group by all order by all"
    print_next(
        console,
        f'sql {root.url} "{query}"',
        f"show {root.url} {rollout_id}",
        f'sample {root.url} --prompt "write a story about cats in the garden" --n 4',
    )
