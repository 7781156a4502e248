"""Runs with stored rollouts, and a user's scorer."""

from collections.abc import Callable
from pathlib import Path

import pytest
from strategies import make_batch

import ludic
from ludic.root.rows.writer import RolloutWriter
from ludic.run.config import RunConfig
from ludic.run.run_json import put_run


@pytest.fixture
def run(tmp_path: Path) -> ludic.Run:
    """A run of two groups of four rollouts."""
    root = put_run(str(tmp_path / "run"), RunConfig(model="tiny", env=("moar_cats",), group_size=4))
    with RolloutWriter(root, "w0-test") as writer:
        writer.append(make_batch(worker_id="w0-test", rewards=[[1.0, 0.0, 0.5, 0.5], [1.0, 1.0, 0.0, 0.0]]))
    return ludic.Run(root)


@pytest.fixture
def write_scorer(tmp_path: Path) -> Callable[[str], str]:
    """write_scorer(text): a scorer's file whose function is `score`, as the setting names it."""

    def write(text: str) -> str:
        (tmp_path / "mine.py").write_text(text)
        return f"{tmp_path / 'mine.py'}:score"

    return write
