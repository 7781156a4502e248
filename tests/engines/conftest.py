"""A tiny model on disk, whose distribution is neither flat nor peaked."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

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
