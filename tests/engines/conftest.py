"""Every engine under test, and a tiny model on disk, whose distribution is neither flat nor peaked."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import forked_vllm
from transformers import AutoModelForCausalLM
from vllm_servers import running_servers

from ludic.base.installed import is_installed
from ludic.engines.config import EngineConfig
from ludic.engines.engine import Engine
from ludic.engines.registry import EngineSetup, engine_maker
from ludic.engines.server_engine import ServerEngine
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


@pytest.fixture(scope="session")
def transformers(model_folder: str) -> Engine:
    return start_engine("transformers", model_folder)


@pytest.fixture(scope="session")
def vllm(model_folder: str) -> Iterator[Engine]:
    if not is_installed("vllm"):
        pytest.skip("vllm is not installed; `make test-vllm` installs it and runs these tests")
    with forked_vllm():
        engine = start_engine("vllm", model_folder)
    yield engine
    engine.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def server_url(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a real vLLM server, in a process of its own."""
    if not is_installed("vllm"):
        pytest.skip("vllm is not installed; `make test-vllm` installs it and runs these tests")
    with running_servers(model_folder, tmp_path_factory.mktemp("server")) as [process]:
        yield process.url


@pytest.fixture(scope="session")
def server(model_folder: str, server_url: str) -> Iterator[Engine]:
    with closing(ServerEngine(model_folder, [server_url])) as engine:
        yield engine


@pytest.fixture
def start_vllm() -> Iterator[Callable[..., Engine]]:
    """Starts further ones, which end with the test."""
    with ExitStack() as engines:

        def start(folder: str, **options: Any) -> Engine:
            with forked_vllm():
                engine = start_engine("vllm", folder, **options)
            engines.callback(engine.close)  # type: ignore[attr-defined]
            return engine

        yield start


def start_engine(name: str, folder: str, **options: Any) -> Engine:
    """Return an engine with the weights of a folder. options: engine_options."""
    return engine_maker(EngineSetup(config=EngineConfig(engine=name, engine_options=options), device="cpu"))(folder, 0)


@pytest.fixture(params=["transformers", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vllm", "server"))])
def engine(request: pytest.FixtureRequest, model_folder: str) -> Engine:
    """Every engine with the weights of model_folder as version 0; started once, since some take half a minute."""
    engine: Engine = request.getfixturevalue(request.param)
    engine.load_weights(model_folder, 0)
    return engine
