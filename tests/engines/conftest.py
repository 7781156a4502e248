"""Every engine under test, and a tiny model on disk, whose distribution is neither flat nor peaked."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ludic.engines.engine import Engine
from ludic.engines.transformers_engine import TransformersEngine
from ludic.models.tiny import make_tiny_model

WORDS = ["the quick brown fox jumps over a lazy dog and some cats", "how many more cats do you see"]


def _make_model(folder: Path, *, seed: int) -> str:
    """A tiny model whose last norm is random, so that logits spread by some 1.6 instead of 0.16.

    Scaling them instead would make it repeat its last token, since the embedding is tied.
    """
    make_tiny_model(str(folder), WORDS, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.normal_(std=10, generator=torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _make_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same architecture, drawn from another seed."""
    return _make_model(tmp_path_factory.mktemp("other"), seed=2)


@pytest.fixture(scope="module", params=["transformers"])
def loaded_engine(request: pytest.FixtureRequest, model_folder: str) -> Engine:
    """One engine for the module, since some implementations take half a minute to start."""
    engines: dict[str, Callable[[], Engine]] = {
        "transformers": lambda: TransformersEngine(model_folder, device="cpu", dtype=torch.float32)
    }
    return engines[request.param]()


@pytest.fixture
def engine(loaded_engine: Engine, model_folder: str) -> Engine:
    loaded_engine.load_weights(model_folder, 0)
    return loaded_engine
