"""A run with hostile texts, several turns, evaluations, token statistics and a trained step; and how to drive it."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from app.cli.conftest import model_folder
from strategies import make_batch
from textual.pilot import Pilot
from textual.widgets import Static
from tiny_runs import create_root, train_here

from ludic.app.show.terminal.app import ViewApp
from ludic.records.rollout import Message, RolloutBatch
from ludic.root.root import Root
from ludic.root.rows.writer import RolloutWriter

__all__ = ["model_folder"]

HOSTILE = "[bold red]x[/] [@click=app.quit]quit[/] [link=https://example.com]l[/] \x1b[2Jcleared\x07 \u202etxt"
SIZE = (150, 60)


def _with_hostile_answers(batch: RolloutBatch) -> RolloutBatch:
    groups = [
        replace(
            group,
            rollouts=tuple(
                replace(rollout, messages=[*rollout.messages[:-1], Message(role="assistant", content=HOSTILE)])
                for rollout in group.rollouts
            ),
        )
        for group in batch.groups
    ]
    return replace(batch, groups=tuple(groups))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, model_folder: str) -> Root:
    """Versions 0 and 1 of two groups of 4, evaluations of version 0, and one step with token statistics."""
    root = create_root(str(tmp_path_factory.mktemp("viewed") / "run"), model_folder)
    rewards = {0: [[1.0, 0.0, 0.5, 0.25], [0.0, 0.0, 0.0, 0.75]], 1: [[1.0, 1.0, 0.0, 0.5], [0.125, 1.0, 0.0, None]]}
    with RolloutWriter(root, "w0-test") as writer:
        for version, of_groups in rewards.items():
            batch = make_batch(
                worker_id="w0-test", rewards=of_groups, seed=version, policy_version=version, num_turns=2
            )
            writer.append(_with_hostile_answers(batch))
            writer.flush()
    with RolloutWriter(root, "w1-eval", folder="evals") as writer:
        writer.append(make_batch(worker_id="w1-eval", rewards=[[0.5, 1.0]], seed=0, seed_of_ids=9, purpose="eval"))
    train_here(root, num_steps=1, keep_token_stats=True)
    return root


@pytest.fixture
def run_copy(made: Root, tmp_path: Path) -> Root:
    """A copy of it that a test may change."""
    return Root.open(str(shutil.copytree(made.path, tmp_path / "run")))


Steps = Callable[[ViewApp, Pilot[None]], Awaitable[None]]


def drive(root: Root, steps: Steps, **options: Any) -> None:
    """Open the viewer without a terminal, and do the steps."""

    async def run() -> None:
        app = ViewApp(root, **options)
        async with app.run_test(size=SIZE) as pilot:
            await settle(pilot)
            await steps(app, pilot)

    asyncio.run(run())


async def settle(pilot: Pilot[None]) -> None:
    """Wait until all queries are answered and drawn."""
    await pilot.pause()
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


async def press(pilot: Pilot[None], *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
        await settle(pilot)


async def write(pilot: Pilot[None], text: str) -> None:
    """Type a text into the focused line."""
    await pilot.press(*(" " if each == " " else each for each in text))


def shown(app: ViewApp) -> str:
    """The text of the screen, line by line, as a terminal shows it."""
    width, height = app.size
    lines = app.screen._compositor.render_strips()
    assert len(lines) == height
    return "\n".join(strip.text[:width].rstrip() for strip in lines)


def line(app: ViewApp, name: str) -> str:
    return str(app.screen.query_one(f"#{name}", Static).content)
