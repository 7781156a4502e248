"""A tiny model that answers sums."""

import pytest
from tiny_models import make_model

from ludic.inference.chat import load_tokenizer
from ludic.inference.transformers_engine import TransformersEngine
from ludic.interaction.single_step import Agent


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="session")
def agent(folder: str) -> Agent:
    engine = TransformersEngine(folder, device="cpu", version=7)
    return Agent(engine=engine, tokenizer=load_tokenizer(folder), model="tiny")
