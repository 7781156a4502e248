"""Find an inference engine by name: a built-in one, or a class in a user's file.

ludic.settings.kinds lists the built-in ones. An engine's file needs no consent, since the person who starts the worker
names it: unlike environments, engines are never named by a root. Raises ConfigError for an unknown name.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ludic.base import Longrope
from ludic.engines.config import EngineConfig
from ludic.engines.engine import Engine
from ludic.settings import ENGINE, find
from ludic.settings.kinds import check


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Settings that a worker passes to its engine, besides the first weights."""

    config: EngineConfig = field(default_factory=EngineConfig)
    device: str | None = None
    """"cpu" or "cuda"; None leaves it to the engine."""
    base: Callable[[], str] | None = None
    """Returns the folder of the base model of LoRA adapters; None is the one that they name."""
    float32_head: bool = False
    """Compute logits in float32, as the trainer does."""
    keep_experts: bool = False
    """Requests may ask for the experts that tokens are sent to."""
    longrope: Longrope | None = None
    """Factors of a longrope model, which decide how long a sequence may be; None is short."""
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
    check(ENGINE, name)


def find_engine(name: str) -> EngineFactory:
    """Return the factory of a built-in engine, or of path/to/file.py:ClassName, which runs that file."""
    return find(ENGINE, name)


def engine_maker(setup: EngineSetup) -> MakeEngine:
    """Return the function that a worker makes its engine with."""
    make = partial(find_engine(setup.config.chosen(setup.device)), setup=setup)
    return lambda folder, version: make(folder, version=version)
