"""Runs as workers and trainers leave them, and a browser."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from app.cli.conftest import breakable, make_trained, model_folder, started, trained

__all__ = ["breakable", "make_trained", "model_folder", "started", "trained"]

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra browser)")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on the PATH")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()
