"""Import ludic on a machine that has PyTorch and transformers, but not every package that ludic imports.

    with stand_ins():
        from ludic.training import train_step  # imports the store, and with it msgspec

In the block each missing package of PACKAGES is imported as a stand-in: any name can be taken from it, and a call gives
such a name again, as for `Meta(ge=0)` in an annotation. After the block the package is missing again, and a call of one
of these names raises ModuleNotFoundError. So what needs none of the packages runs, and nothing else does. The doors of
ludic's rooms need lazy_loader; where it is missing, `attach_stub` here reads them.
"""

import ast
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("msgspec", "platformdirs", "tenacity", "uuid_utils", "xxhash")
"""Packages that core modules of ludic import and that PyTorch, transformers, safetensors and pyarrow do not need."""


class StandIn(ModuleType):
    """A missing package, or a name in it."""

    is_importing = False
    """Whether modules are being imported, which may call functions of the package."""

    def __getattr__(self, name: str) -> "StandIn":
        if name.startswith("__"):  # which Python itself looks up
            raise AttributeError(f"{self.__name__} has no {name}")
        return StandIn(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> "StandIn":
        if StandIn.is_importing:
            return self
        package = self.__name__.partition(".")[0]
        raise ModuleNotFoundError(f"{self.__name__} is called, but {package} is not installed", name=package)


class _Finder(MetaPathFinder, Loader):
    """Finds a stand-in for each of some packages; asked after all other finders, so only for those that are missing."""

    def __init__(self, packages: Collection[str]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self._packages else None

    def create_module(self, spec: ModuleSpec) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stand-in has no code."""


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return __getattr__, __dir__ and __all__ of a door, as lazy_loader.attach_stub does."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {each.name: f"{package}.{node.module}" for node in imports for each in node.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"{package} has no {name}")
        return getattr(import_module(homes[name]), name)

    return get, lambda: sorted(homes), sorted(homes)


@contextmanager
def stand_ins(packages: Collection[str] = PACKAGES) -> Iterator[None]:
    """Let missing packages be imported within the block."""
    if "lazy_loader" not in sys.modules and find_spec("lazy_loader") is None:
        doors = ModuleType("lazy_loader")
        doors.__dict__["attach_stub"] = attach_stub
        sys.modules["lazy_loader"] = doors
    finder = _Finder(packages)
    sys.meta_path.append(finder)
    StandIn.is_importing = True
    try:
        yield
    finally:
        StandIn.is_importing = False
        sys.meta_path.remove(finder)
        for name in packages:
            if isinstance(sys.modules.get(name), StandIn):
                del sys.modules[name]
