"""Engines by name: built-in, or your own class in a file.

To add a built-in engine, write its file and its line in BUILT_IN. An engine's file runs because the person who starts
the worker names it: unlike environments, engines are never named by a root. Raises ConfigError, which names the
requested engine and the known ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Protocol

from ludic.by_name import find_by_name
from ludic.engines.config import EngineConfig
from ludic.engines.engine import Engine
from ludic.own_classes import check_own, find_own, unknown
from ludic.user_files import python_file_of

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "transformers": "ludic.engines.transformers_engine:make_engine",
        "vllm": "ludic.engines.vllm_engine:make_engine",
        "server": "ludic.engines.server_engine:make_engine",
    }
)
"""Module and function of each engine, imported when it is used: their libraries take seconds to import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """What a worker tells its engine, apart from the first weights."""

    config: EngineConfig = field(default_factory=EngineConfig)
    device: str | None = None
    """"cpu" or "cuda"; None leaves it to the engine."""
    base: Callable[[], str] | None = None
    """Returns the folder of the model that LoRA adapters belong to; None is the one that they name."""
    float32_head: bool = False
    """Compute logits in float32, as the trainer does."""
    run_id: str | None = None
    """Run that the worker samples for; workers of a run may share servers."""


MakeEngine = Callable[[str, int], Engine]
"""Function that makes an engine from a folder of weights and their version."""


class EngineFactory(Protocol):
    """A class of engines, or a function that makes one."""

    def __call__(self, folder: str, *, version: int, setup: EngineSetup) -> Engine:
        """Return an engine with the weights of a Hugging Face folder. version: of these weights."""
        ...


def check_engine(name: str) -> None:
    """Raise ConfigError if there is no such engine; imports and runs nothing."""
    if python_file_of(name) is not None:
        check_own(name, "engine")
    elif name not in BUILT_IN:
        raise unknown(name, "engine", list(BUILT_IN))


def find_engine(name: str) -> EngineFactory:
    """Return the factory of a built-in engine, or of path/to/file.py:ClassName, which runs that file."""
    check_engine(name)
    if name in BUILT_IN:
        return find_by_name(BUILT_IN[name])
    return find_own(name, "engine")


def engine_maker(setup: EngineSetup) -> MakeEngine:
    """Return the function that a worker makes its engine with."""
    make = partial(find_engine(setup.config.engine), setup=setup)
    return lambda folder, version: make(folder, version=version)
