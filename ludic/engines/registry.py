"""Engines by name: built-in, or your own class in a file.

To add a built-in engine, write its file and its line in BUILT_IN. An engine's file runs because the person who starts
the worker names it: unlike environments, engines are never named by a root. Raises ConfigError, which names the
requested engine and the known ones.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import MappingProxyType
from typing import Protocol

from ludic.engines.engine import Engine
from ludic.own_classes import check_own, find_own, unknown
from ludic.user_files import python_file_of

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "transformers": "ludic.engines.transformers_engine:TransformersEngine",
    }
)
"""Module and class of each engine, imported when it is used: their libraries take seconds to import."""

MakeEngine = Callable[[str, int], Engine]
"""Function that makes an engine from a folder of weights and their version."""


class EngineFactory(Protocol):
    """A class of engines, or a function that makes one."""

    def __call__(
        self,
        folder: str,
        *,
        version: int,
        device: str | None,
        base: Callable[[], str] | None,
        float32_head: bool,
    ) -> Engine:
        """Return an engine with the weights of a Hugging Face folder.

        version: of these weights. device: "cpu" or "cuda"; None leaves it to the engine. base: returns the folder of
        the model that LoRA adapters belong to. float32_head: compute logits in float32, as the trainer does.
        """
        ...


def check_engine(name: str) -> None:
    """Raise ConfigError if there is no such engine; imports and runs nothing."""
    if python_file_of(name) is not None:
        check_own(name, "engine")
    elif name not in BUILT_IN:
        raise unknown(name, "engine", list(BUILT_IN))


def find_engine(name: str) -> EngineFactory:
    """Return the class of a built-in engine, or of path/to/file.py:ClassName, which runs that file."""
    check_engine(name)
    if name in BUILT_IN:
        module, _, class_name = BUILT_IN[name].partition(":")
        return getattr(import_module(module), class_name)
    return find_own(name, "engine")


def engine_maker(
    name: str, *, device: str | None = None, base: Callable[[], str] | None = None, float32_head: bool = False
) -> MakeEngine:
    """Return the function that a worker makes its engine with."""
    make = partial(find_engine(name), device=device, base=base, float32_head=float32_head)
    return lambda folder, version: make(folder, version=version)
