"""A tiny model that answers sums."""

import pytest
from tiny_models import make_model

from ludic.agents.agent import Agent
from ludic.engines.transformers_engine import TransformersEngine
from ludic.models.chat import load_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="session")
def agent(folder: str) -> Agent:
    engine = TransformersEngine(folder, device="cpu", version=7)
    return Agent(engine=engine, tokenizer=load_tokenizer(folder), model="tiny")
