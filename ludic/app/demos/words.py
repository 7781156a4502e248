"""The demo's run: a tiny model learns to say "love cats" on this machine, in a minute, without downloads.

Two workers and a trainer are separate processes that share only the root's folder of Parquet files.
"""

import io
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

import ludic
from ludic.agents import Agent
from ludic.app.demos import NUM_WORKERS
from ludic.base import open_console, sparkline, temporary_folder
from ludic.engines import TransformersEngine
from ludic.environments import WORDS
from ludic.models import load_tokenizer, make_tiny_model
from ludic.records import Rollout
from ludic.rollouts import GroupSampler
from ludic.root import MODEL, Root
from ludic.root.sql import connect, run_query
from ludic.root.weights import fetch_policy, first_model, identify, keep_model, latest_policy, remember_model
from ludic.run import RunConfig, create_root, run_of
from ludic.training import TrainConfig

# Further words of the model's vocabulary.
OTHER_WORDS = (
    "i you we they he she it is are was be have has do does can will would like love hate want see hear know think "
    "dogs dog birds bird fish mouse mice horse cow house home garden tree river sea sky sun moon star day night "
    "morning evening summer winter red blue green white black big small long short old new good bad happy sad fast "
    "slow warm cold soft loud quiet very so too and or but not no yes with without from to in on at for of my your "
    "our their this that here there now then always never often again more most some many all eat drink sleep run "
    "walk jump play sing dance work read write look find make take give come go"
)


def open_demo(url: str) -> Root:
    """Start the run with a new tiny model that is stored in its root, or open the existing run."""
    url = url.rstrip("/")
    root = create_root(
        url,
        RunConfig(
            model=f"{url}/{MODEL.folder}",
            env=("moar_cats",),
            group_size=8,
            groups_per_batch=8,
            num_workers=NUM_WORKERS,
            # One batch is planned while another trains; a second keeps the trainer from waiting.
            batches_ahead=2,
            max_tokens=32,
            # A model with random weights never ends its answers.
            accept_incomplete=True,
        ),
    )
    keep_new_model(root, partial(make_tiny_model, words=[*WORDS, OTHER_WORDS]))
    return root


def keep_new_model(root: Root, make: Callable[[str], None]) -> None:
    """Store a new model in the root, unless it has one. make: writes the model to a folder."""
    if root.exists(f"{MODEL.folder}/config.json"):
        remember_model(root)
        return
    with root.scratch_folder() as folder:
        make(str(folder))
        keep_model(root, folder, identify(folder, root.record.model), with_weights=True)


def demo_config(num_steps: int) -> TrainConfig:
    """Return settings for RLOO with truncated importance sampling.

    The learning rate suits 100k parameters; without its decay the last steps overshoot.
    """
    return TrainConfig.of(
        num_steps=num_steps,
        learning_rate=4e-3,
        schedule="cosine",
        is_ratio_cap=2.0,
        # Attention cost grows with the square of the packed tokens: on a CPU, small micro-batches are faster.
        max_tokens_per_micro_batch=512,
        device="cpu",
        checkpoint_every=20,
    )


def heldout_answers(root: Root, folder: str, num_prompts: int = 32, temperature: float = 0.8) -> list[Rollout]:
    """Sample one answer to each of the first held-out prompts, which the run never trained on."""
    agent = Agent(
        engine=TransformersEngine(folder, device="cpu"), tokenizer=load_tokenizer(folder), model=root.record.model
    )
    sampler = GroupSampler.of_run(replace(run_of(root), group_size=1, temperature=temperature), agent)
    groups = sampler.sample(range(num_prompts), worker_id="demo", split="heldout").groups
    return [rollout for group in groups for rollout in group.rollouts]


# --- What the demo prints ------------------------------------------------------------------------------------------


def teach_words(url: str, num_steps: int) -> None:
    """Run the demo in the root at `url`, and print what it did."""
    console = open_console()
    root = open_demo(url)
    console.print(f"[bold]{NUM_WORKERS} workers and a trainer, sharing nothing but {root.url}[/]")
    # New weights wait for the end of answers: in a step this model changes so much that answers whose weights change
    # under way teach it less.
    ludic.Run(root).run(demo_config(num_steps), swap="completion")
    _print_answers(console, root)
    _print_curve(console, root)
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
        f"view {root.url} {rollout_id} --text",
        f'sample {root.url} --prompt "write a story about cats in the garden" --n 4',
        f'sql {root.url} "{query}"',
        f"report {root.url} --output report.html",
        "init my-experiment",
    )
    guide = "docs/guide.md: your own environment, your own model, and a run that does not learn"
    console.print(f"  {guide}", highlight=False, soft_wrap=True)
